"""Decoding with a cache, step by step, beside Hugging Face's GPT-2 of the same sizes.

    python -m benchmarks.decoding                                   # all rows; the peer needs peers.txt
    python -m benchmarks.decoding --only="batch 1, context 1,024"   # some

A step gives the next, likeliest token of every row. Ours is the compiled loop of `xformer.generate`; the peer's is a
call of the model for each token with its `DynamicCache`, on one thread and on all cores, of which the faster counts.
Contenders take turns, a few steps at a time that end at the stated context, after a prompt that is read untimed. Writes
benchmarks/results/decoding.json, with the machine's load: where other work runs beside, the processor time of a step,
of all threads together, says more than its seconds. With `--only` nothing is written but where `--out` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from xformer.attention import Attention, Full, Linear, Local, Retention, Window
from xformer.bench import machine, timing
from xformer.bench.peers import has_torch
from xformer.generate import streaming
from xformer.generate.request import make_request
from xformer.models import MODELS
from xformer.report import formatting

OUT = Path(__file__).parent / "results" / "decoding.json"
LAYERS, WIDTH, HEADS, MLP_DIM, VOCAB = 4, 512, 8, 1024, 1024
STEPS = 8  # of a turn
COMPARED = "seconds", "least", "cpu_seconds"
WINDOW = Window(left=256, right=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """So many rows, whose last step reads `context` tokens; with a peer or alone."""

    op: Attention
    batch: int
    context: int
    peer: bool = False


CASES = {
    "batch 1, context 1,024": Case(Full(), 1, 1024, peer=True),
    "batch 8, context 512": Case(Full(), 8, 512, peer=True),
    "window, context 1,024": Case(WINDOW, 1, 1024),
    "window, context 16,384": Case(WINDOW, 1, 16384),
    "local, context 1,024": Case(Local(block_size=256), 1, 1024),
    "linear, context 1,024": Case(Linear(), 1, 1024),
    "retention, context 1,024": Case(Retention(), 1, 1024),
    "window, context 65,536": Case(WINDOW, 1, 65536),
    "linear, context 65,536": Case(Linear(), 1, 65536),
    "retention, context 65,536": Case(Retention(), 1, 65536),
}
# (row, set against which, at most so many times its seconds a step).
TARGETS = (
    ("batch 1, context 1,024", "Hugging Face GPT-2, batch 1, context 1,024", 1.1),
    ("batch 8, context 512", "Hugging Face GPT-2, batch 8, context 512", 1 / 1.7),
    ("window, context 16,384", "window, context 1,024", 1.1),
    *((f"{name}, context 65,536", f"{name}, context 1,024", 1.1) for name in ("linear", "retention", "window")),
)


class Spent(NamedTuple):
    """Seconds of a step, and seconds of all processors together."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def on(cls, steps: Callable[[], Any]) -> Spent:
        """What `STEPS` steps took, of one."""
        started, cpu_started = time.perf_counter(), time.process_time()
        steps()
        return cls((time.perf_counter() - started) / STEPS, (time.process_time() - cpu_started) / STEPS)


@dataclasses.dataclass
class Contender:
    """`turn` takes `STEPS` steps and gives the `Spent` of one; `facts` are written beside them."""

    turn: Callable[[], Spent]
    facts: dict[str, Any]


def ours(case: Case) -> Contender:
    """The compiled step, its caches updated where they stand."""
    model = MODELS["decoder"](
        VOCAB, case.context, attention=case.op, num_layers=LAYERS, width=WIDTH, num_heads=HEADS, mlp_dim=MLP_DIM,
        position_embedding="learned", rngs=nnx.Rngs(0),
    )  # fmt: skip
    prompts = prompt_tokens(case)
    request = make_request(
        model, prompts, np.full(case.batch, prompts.shape[1]), max_tokens=STEPS + 1, temperature=0.0, top_k=None,
        top_p=None, num_beams=1, length_penalty=0.0, end_id=None, seed=0,
    )  # fmt: skip
    graphdef, state = nnx.split(model)
    numbers, settings = request.numbers, request.settings
    texts, caches, _ = streaming.begin(graphdef, state, request.tokens, request.lengths, numbers, settings)
    held = [texts, caches]
    seen = np.asarray(caches[0].length)
    until = np.int32(STEPS + 1)
    run = streaming.go_on.lower(graphdef, state, texts, caches, None, until, numbers, settings).compile()

    def turn() -> Spent:
        texts, caches = held[0], [at_length(cache, seen) for cache in held[1]]
        texts = texts._replace(step=jax.numpy.int32(1))
        jax.block_until_ready((texts, caches))

        def steps() -> None:
            held[:] = jax.block_until_ready(run(state, texts, caches, None, until, numbers))

        return Spent.on(steps)

    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(caches))
    temporary = run.memory_analysis().temp_size_in_bytes
    return Contender(turn, {"cache_bytes": cache_bytes, "temporary_bytes": temporary})


def at_length(cache: Any, seen: np.ndarray) -> Any:
    """The cache as if it had seen so many tokens, so that each turn ends at the same context."""
    if hasattr(cache, "state"):
        return dataclasses.replace(cache, state=cache.state._replace(length=jax.numpy.asarray(seen)))
    return dataclasses.replace(cache, length=jax.numpy.asarray(seen))


def hugging_face(case: Case, threads: int) -> Contender:
    """GPT-2 with a cache that is cut back after each turn."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=case.context, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_inner=MLP_DIM,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    prompts = torch.tensor(prompt_tokens(case), dtype=torch.long)
    with torch.no_grad():
        read = model(prompts, use_cache=True)
    cache, first = read.past_key_values, read.logits[:, -1].argmax(-1)

    def steps() -> None:
        token = first
        with torch.no_grad():
            for _ in range(STEPS):
                token = model(token[:, None], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

    def turn() -> Spent:
        torch.set_num_threads(threads)
        spent = Spent.on(steps)
        cache.crop(-STEPS)
        return spent

    return Contender(turn, {"threads": threads})


def prompt_tokens(case: Case) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (case.batch, case.context - STEPS))


def contenders(only: list[str]) -> dict[str, Contender]:
    """Those of the rows, by name."""
    found = {}
    for name in only:
        case = CASES[name]
        print(f"preparing {name}", flush=True)
        found[name] = ours(case)
        if case.peer and has_torch():
            for threads in sorted({1, os.cpu_count() or 1}):
                spelt = f"{threads} thread{'s' if threads > 1 else ''}"
                found[f"Hugging Face GPT-2, {name}, {spelt}"] = hugging_face(case, threads)
    return found


def measure(found: dict[str, Contender], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds a step of each, from turns that follow each other; the first is untimed."""
    times: dict[str, list[Spent]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, contender in found.items():
            time.sleep(timing.Rounds().pause_seconds)
            spent = contender.turn()
            if number:
                times[name].append(spent)
    figures: dict[str, dict[str, Any]] = {}
    for name, turns in times.items():
        seconds, cpu = map(list, zip(*turns, strict=True))
        low, middle, high = timing.quartiles(seconds)
        rows = next(case.batch for row, case in CASES.items() if row in name)
        figures[name] = {
            "seconds": middle, "quartiles": [low, high], "least": min(seconds), "tokens_per_second": rows / middle,
            "cpu_seconds": timing.quartiles(cpu)[1],
            **found[name].facts,
        }  # fmt: skip
    return figures


def check(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What each target asks and what was measured, of those that were: ratios of the medians."""
    rows = []
    for name, other, limit in TARGETS:
        peers = [one for peer, one in figures.items() if peer.startswith(other)]
        if name in figures and peers:
            ratio = {key: figures[name][key] / min(one[key] for one in peers) for key in COMPARED}
            rows.append({"ours": name, "peer": other, "limit": limit, "reached": ratio["seconds"] <= limit, **ratio})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", choices=list(CASES), help="a row; may be given several times")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help=f"the JSON; all rows go to {OUT.name} by default, some nowhere")
    options = parser.parse_args()
    found = contenders(options.only or list(CASES))
    before = os.getloadavg()
    figures = measure(found, options.rounds)
    targets = check(figures)
    for name, row in figures.items():
        spelt = [formatting.milliseconds(1e3 * row[key]) for key in COMPARED]
        print(f"{name:<62}{spelt[0]:>10} a step, least {spelt[1]:>9}, processors {spelt[2]:>9}")
    for row in targets:
        verdict = "reached" if row["reached"] else "missed"
        others = f"least {row['least']:.2f}, processors {row['cpu_seconds']:.2f}"
        print(f"{row['ours']} / {row['peer']}: {row['seconds']:.2f} ({others}), at most {row['limit']:.2f}: {verdict}")
    report = {
        "sizes": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "mlp_dim": MLP_DIM, "vocab_size": VOCAB},
        "steps": STEPS,
        "rounds": options.rounds,
        "load": {"before": before, "after": os.getloadavg()},
        "targets": targets,
        "figures": figures,
        "machine": machine.describe(),
    }
    if (out := options.out or (None if options.only else OUT)) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
