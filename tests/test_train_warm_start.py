"""`train.init_from`: what is taken from another run, what is fitted, named or refused, and that a restart agrees."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from train_fake import LENGTH, VOCAB, compile_cache, make_trainer, rows  # noqa: F401

from xformer.attention import Full, MusicRelative, Shaw
from xformer.models import EncoderClassifier
from xformer.train import ExponentialMovingAverage, Interrupted, WarmStartError, WorkdirMismatch, warm_start

pytestmark = pytest.mark.usefixtures("compile_cache")


def encoder(num_classes=2, max_len=LENGTH, distance=2, vocab_size=VOCAB, num_layers=1):
    """A function that makes a small classifier with learned absolute and relative positions."""
    op = Full(position=Shaw(max_distance=distance))
    return lambda rngs: EncoderClassifier(
        vocab_size, num_classes, max_len, attention=op, num_layers=num_layers, width=8, num_heads=2, mlp_dim=8,
        position_embedding="learned", rngs=rngs,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory, compile_cache):  # noqa: F811
    workdir = tmp_path_factory.mktemp("source")
    make_trainer(workdir, model_fn=encoder(), num_steps=2, eval_every=2).fit()
    return workdir


def stored(workdir, step):
    return warm_start.read(workdir / "checkpoints" / str(step), "model")


def start(workdir, source, make=None, **settings):
    """The result of a run that takes no step worth the name from the source."""
    settings = {"num_steps": 1, "init_from": str(source)} | settings
    return make_trainer(workdir, model_fn=make or encoder(), seed=8, **settings)


def test_parameters_are_those_of_the_best_checkpoint_and_the_result_says_so(tmp_path, source, capsys):
    trainer = start(tmp_path, source, callbacks=(("ema", ExponentialMovingAverage(0.5)),))
    engine = trainer.engine
    state, line = trainer._start_from(str(source), engine, engine.init())
    values = {warm_start.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
    for name, x in stored(source, 2).items():
        np.testing.assert_array_equal(values[name.removeprefix("params/")], x)
    (average,) = state.callbacks
    jax.tree.map(np.testing.assert_array_equal, average, state.params)
    assert "arrays taken" in line and ";" not in line.partition("arrays taken")[2]
    result = trainer.fit()
    assert result["init_from"]["checkpoint"] == str(source / "checkpoints" / "2")
    assert result["init_from"]["digest"] == warm_start.find(source).digest and not result["init_from"]["left"]
    assert "starts from" in capsys.readouterr().err


def test_heads_and_embeddings_of_another_size_are_named_and_fresh(tmp_path, source):
    trainer = start(tmp_path, source, encoder(num_classes=3, vocab_size=VOCAB + 2, num_layers=2))
    engine = trainer.engine
    fresh = engine.init()
    before = jax.tree.map(np.asarray, fresh.params)
    state, line = trainer._start_from(str(source), engine, fresh)
    assert "classify/kernel ([8, 2] there, [8, 3] here)" in line and "embed/table ([11, 8] there, [13, 8] here)" in line
    assert "because they are not there: blocks/1/" in line and "and 12 more" in line
    np.testing.assert_array_equal(state.params.classify.kernel[...], before.classify.kernel[...])
    np.testing.assert_array_equal(
        state.params.blocks[0].feed_forward.expand.kernel[...],
        stored(source, 2)["params/blocks/0/feed_forward/expand/kernel"],
    )
    with pytest.raises(WarmStartError, match=r"differs, and init_strict is True: .*classify/kernel"):
        start(tmp_path / "strict", source, encoder(num_classes=3), init_strict=True).fit()


def test_what_the_source_has_more_is_named(tmp_path, source):
    make_trainer(tmp_path / "two", model_fn=encoder(num_layers=2), num_steps=1).fit()
    (tmp_path / "one").mkdir()
    trainer = start(tmp_path / "one", tmp_path / "two")
    engine = trainer.engine
    line = trainer._start_from(str(tmp_path / "two"), engine, engine.init())[1]
    assert "there, but not in this model: blocks/1/" in line


@pytest.mark.parametrize(
    ("there", "here", "rows"),
    [(4, 2, [0, 1]), (2, 5, [0, 1, 0, 1, 0]), (3, 3, [0, 1, 2])],
)
def test_absolute_positions_are_cut_or_repeated(there, here, rows):
    table = np.arange(there * 2.0).reshape(there, 2)
    np.testing.assert_array_equal(warm_start.fit("positions/table", table, (here, 2)), table[rows])


@pytest.mark.parametrize("heads", [(), (3,)])
def test_tables_over_the_distance_keep_their_distances(heads):
    by_distance = lambda radius: np.broadcast_to(np.arange(-radius, radius + 1.0)[:, None], (*heads, 2 * radius + 1, 2))
    name = "blocks/0/attention/attention_fn/params/position/key"
    shorter = warm_start.fit(name, by_distance(4), (*heads, 5, 2))
    np.testing.assert_array_equal(shorter, by_distance(2))
    longer = warm_start.fit(name, by_distance(2), (*heads, 9, 2))
    np.testing.assert_array_equal(longer, np.clip(by_distance(4), -2, 2))
    assert warm_start.fit(name, by_distance(2), (*heads, 9, 3)) is None
    assert warm_start.fit("classify/kernel", by_distance(2), (*heads, 9, 2)) is None


def test_tables_of_a_model_are_found_by_their_paths(tmp_path, source):
    trainer = start(tmp_path, source, encoder(max_len=2 * LENGTH, distance=3))
    engine = trainer.engine
    state, line = trainer._start_from(str(source), engine, engine.init())
    assert "tables of positions fitted: " in line and "positions/table ([6, 8] there, [12, 8] here)" in line
    assert "attention_fn/params/position/key ([5, 4] there, [7, 4] here)" in line
    table = stored(source, 2)["params/positions/table"]
    np.testing.assert_array_equal(state.params.positions.table[...], np.concatenate([table, table]))
    music = nnx.state(nnx.eval_shape(lambda: EncoderClassifier(
        9, 2, 6, attention=Full(position=MusicRelative(6)), num_layers=1, width=8, num_heads=2, mlp_dim=8,
        rngs=nnx.Rngs(0),
    )), nnx.Param)  # fmt: skip
    names = [warm_start.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(music)]
    assert any(warm_start.re.search(warm_start.TABLES[1][0], name) for name in names)


def test_a_run_that_goes_on_does_not_start_again(tmp_path, source):
    settings = {"num_steps": 4, "eval_every": 4}
    start(tmp_path / "once", source, **settings).fit()
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    with pytest.raises(Interrupted):
        start(tmp_path / "twice", copy, stop_at_step=2, **settings).fit()
    shutil.rmtree(copy)
    resumed = start(tmp_path / "twice", copy, **settings).fit()
    assert resumed["init_from"]["checkpoint"] == str(copy / "checkpoints" / "2")
    assert rows(tmp_path / "once") == rows(tmp_path / "twice")


def test_a_start_that_has_changed_is_refused(tmp_path, source):
    start(tmp_path, source, num_steps=2, stop_at_step=1)
    other = warm_start.Source(source / "checkpoints" / "2", "another digest")
    warm_start.record(tmp_path, other, warm_start.Report())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n')
    with pytest.raises(WorkdirMismatch, match="whose content was another than that of"):
        warm_start.record(tmp_path, warm_start.find(source), warm_start.Report())


def test_a_checkpoint_folder_will_do_and_anything_else_is_one_line(tmp_path, source):
    assert warm_start.find(source / "checkpoints" / "2") == warm_start.find(source)
    for path in (tmp_path / "nothing", tmp_path, source / "checkpoints"):
        with pytest.raises(WarmStartError, match=r"^init_from: got .*, takes a run's workdir or a checkpoint in it"):
            warm_start.find(path)
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    manifest = damaged / "checkpoints" / "2" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"model/lost": "0"}))
    with pytest.raises(WarmStartError, match="holds no intact checkpoint"):
        warm_start.find(damaged)


def test_a_model_that_shares_nothing_is_refused(tmp_path, source):
    with pytest.raises(WarmStartError, match=r"no parameter of .* fits this model"):
        make_trainer(tmp_path, model_fn=lambda rngs: OneNumber(rngs), num_steps=1, init_from=str(source)).fit()


class OneNumber(nnx.Module):
    """A model of one parameter."""

    def __init__(self, rngs):
        self.number = nnx.Param(jax.random.normal(rngs.params(), (2,)))

    def __call__(self, inputs, mask, *, deterministic=True, rngs=None):
        return mask.sum(1, keepdims=True) * self.number[...]


def test_positions_of_a_grid_are_interpolated():
    """A plane stays one, corners stay near corners; row and column tables keep every distance's own row."""
    row, column = np.mgrid[0:4, 0:6]
    plane = np.stack([row, column, 2.0 * row - column], axis=-1).astype(np.float32)
    found = warm_start.fit("positions/grid", plane, (8, 12, 3))
    place = lambda count: (np.arange(2 * count) + 0.5) / 2 - 0.5  # middles of the new places among the old ones
    rows, columns = np.meshgrid(place(4), place(6), indexing="ij")
    inner = np.s_[1:-1, 1:-1]
    np.testing.assert_allclose(found[inner], np.stack([rows, columns, 2 * rows - columns], -1)[inner], atol=1e-5)
    np.testing.assert_allclose(found[0, 0], plane[0, 0], atol=1e-6)
    assert warm_start.fit("positions/grid", plane, (4, 6, 5)) is None
    table = np.arange(5.0)[:, None]
    name = "blocks/0/attention/attention_fn/params/position/row_key"
    np.testing.assert_array_equal(warm_start.fit(name, table, (9, 1))[:, 0], [0, 0, 0, 1, 2, 3, 4, 4, 4])
