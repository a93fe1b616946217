"""Models out of Hugging Face folders give the logits that their library gave; see fixtures/weights/README.md."""

import json
import logging
import shutil
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from xformer import weights
from xformer.attention import ATTENTIONS, Nystrom, Shape
from xformer.cost import count
from xformer.generate import generate
from xformer.weights import folder
from xformer.weights.loading import path_name
from xformer.weights.released_nystrom import ReleasedNystrom

FIXTURES = Path(__file__).parent / "fixtures" / "weights"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


def expected(name):
    with np.load(FIXTURES / name / "expected.npz") as arrays:
        arrays = dict(arrays)
    return arrays, arrays.pop("logits")


def call(model, arrays):
    run = nnx.jit(lambda model, arrays: model(**arrays))
    out = run(model, arrays)
    return np.asarray(out.dense() if hasattr(out, "dense") else out)


def distance(logits, there, mask):
    real = mask if there.ndim == 3 else np.ones(len(there), bool)
    return np.abs(logits - there)[real].max()


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def load(name, **kwargs):
    return weights.load(FIXTURES / name, **{"as_released": True if "big_bird" in name else None, **kwargs})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_theirs(name):
    arrays, there = expected(name)
    found = load(name)
    assert distance(call(found.model, arrays), there, arrays["mask"]) < 2e-6 * max(1, np.abs(there).max())
    assert found.fresh == []
    assert all("pooler" in name or "seq_relationship" in name for name in found.unused)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_written_holds_the_same_tensors_and_sizes(name, tmp_path):
    found = load(name)
    folder = weights.save(found, tmp_path / "out")
    ours, theirs = tensors_of(folder), tensors_of(FIXTURES / name)
    assert ours.keys() == theirs.keys() - set(found.unused)
    for key in ours.keys() - {"cls.predictions.bias"}:  # which an untied model does not read
        skipped = 2 if key == "nystromformer.embeddings.position_embeddings.weight" else 0  # rows that none reads
        exact = 0 if not key.endswith("SelfAttention.q.weight") else 2e-7  # T5's: times and divided by a root
        np.testing.assert_allclose(ours[key][skipped:], theirs[key][skipped:], rtol=exact)
        assert ours[key].shape == theirs[key].shape
    before, after = (json.loads((path / "config.json").read_text()) for path in (FIXTURES / name, folder))
    spelt = ("attention_window", "classifier_dropout", "n_inner")  # null there, or one number for all layers
    assert {key: after.get(key) for key in before if key not in spelt} == {
        key: value for key, value in before.items() if key not in spelt
    } | {"architectures": after["architectures"]}
    assert weights.load(folder, as_released=True if "big_bird" in name else None).architecture == found.architecture


def test_shards_equal_one_file(tmp_path):
    found = load("bert_classifier")
    folder = weights.save(found, tmp_path / "out", shard_bytes=9000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(files) > 3 and sorted(set(index.values())) == files
    assert all((folder / file).stat().st_size < 9000 + 4096 for file in files)  # and the header
    again = weights.load(folder)
    for one, two in zip(*(nnx.to_flat_state(nnx.state(x.model)) for x in (found, again)), strict=True):
        np.testing.assert_array_equal(one[1][...], two[1][...])


def test_half_precision_is_read_and_kept(tmp_path):
    found = load("gpt2", param_dtype=jnp.bfloat16)
    folder = weights.save(found, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    again = weights.load(folder)  # in float32
    there, here = (dict(nnx.to_flat_state(nnx.state(x.model, nnx.Param))) for x in (found, again))
    for path, value in here.items():
        assert value[...].dtype == jnp.float32
        np.testing.assert_array_equal(value[...], there[path][...].astype(jnp.float32))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, options, changed",
    [
        ("bert_masked_lm", {"num_token_types": 2}, "token_types"),
        ("roberta_classifier", {}, "offset"),
        ("bert_masked_lm", {"activation": "gelu"}, "gelu"),
        ("bert_pretraining", {"norm_epsilon": 1e-12}, "epsilon"),
        ("longformer_global", {}, "global_tokens"),
    ],
)
def test_what_makes_them_equal_is_needed(name, options, changed):
    """Without it logits move by far more than the tolerance: the fixtures would show its absence."""
    arrays, there = expected(name)
    if changed in arrays:
        del arrays[changed]
    found = load(name, options=options)
    if changed == "offset":
        table = found.model.positions.table
        table[...] = jnp.roll(table[...], -1, axis=0)
    assert distance(call(found.model, arrays), there, arrays["mask"]) > 1e-4


def test_roberta_counts_real_tokens_only():
    """With padding in front, positions begin at the first real token, as theirs do."""
    arrays, _ = expected("roberta_classifier")
    found = load("roberta_classifier")
    inputs, mask = arrays["inputs"][1:2], arrays["mask"][1:2]
    moved = {"inputs": np.roll(inputs, 7, axis=1), "mask": np.roll(mask, 7, axis=1)}
    assert not moved["mask"][0, 0]
    both = [np.asarray(found.model.encode(*(jnp.asarray(x[key]) for key in ("inputs", "mask")))) for x in
            ({"inputs": inputs, "mask": mask}, moved)]  # fmt: skip
    np.testing.assert_allclose(both[1][0, 7:], both[0][0, :-7], atol=2e-6)


@pytest.mark.full
def test_any_variant_takes_the_weights(caplog):
    """Every op that is no causal state: what it has of its own is drawn and named, the rest is theirs."""
    theirs = tensors_of(FIXTURES / "bert_classifier")
    for name in sorted(ATTENTIONS):
        if name in ("retention", "reformer"):  # causal; one projection for queries and keys
            continue
        section = {"name": name}
        with caplog.at_level(logging.WARNING):
            found = load("bert_classifier", attention=section)
        own = {path.rpartition("attention_fn/")[2].partition("/")[0] for path in found.fresh}
        assert own <= {"params", "constants"}, (name, found.fresh)
        assert not found.fresh or "drawn freshly" in caplog.text
        kernel = found.model.blocks[1].feed_forward.expand.kernel[...]
        np.testing.assert_array_equal(kernel.T, theirs["bert.encoder.layer.1.intermediate.dense.weight"])


def test_nystromformer_by_the_paper_is_something_else(tmp_path):
    """Their landmarks, their start of the pseudo-inverse, and full attention where landmarks and segments are equal."""
    arrays, there = expected("nystromformer_masked_lm")
    paper = load("nystromformer_masked_lm", as_released=False)
    assert paper.architecture.op == Nystrom(num_landmarks=5, conv_size=3)
    assert distance(call(paper.model, arrays), there, arrays["mask"]) > 1e-4
    with pytest.raises(weights.WeightsError, match=r"attention is Nystrom.*, there ReleasedNystrom"):
        weights.save(paper, tmp_path / "out")
    theirs = load("nystromformer_masked_lm")
    with pytest.raises(ValueError, match="got 19 queries and 19 keys, the released code takes inputs of"):
        call(theirs.model, {key: x[:, :19] for key, x in arrays.items()})
    longer = load("nystromformer_classifier", max_len=50)  # attention is full there, and its table may grow
    table = tensors_of(FIXTURES / "nystromformer_classifier")["nystromformer.embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(longer.model.positions.table[...], np.concatenate([table[2:], table[2:21]]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("landmarks, conv_size", [(4, 3), (12, 5), (12, None)])
def test_released_nystrom_costs_what_it_computes(landmarks, conv_size):
    op = ReleasedNystrom(num_landmarks=landmarks, segment_means_len=12, conv_size=conv_size, implementation="xla")
    shape = Shape(2, 12, 12, 4, 8, 2)
    params = op.init(jax.random.key(0), shape)
    query, key = jnp.ones((2, 12, 4, 8)), jnp.ones((2, 12, 2, 8))
    counted = count(lambda q, k, v: op(q, k, v, params=params), query, key, key)
    assert op.cost(shape).flops == counted.flops


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["t5_gated", "roberta_classifier", "longformer_masked_lm"])
def test_scanned_layers_are_filled_too(name, tmp_path):
    """Of one op, of a shared bias, and of two ops in turn; saved they are layer by layer again."""
    arrays, there = expected(name)
    found = load(name, options={"scan_layers": True})
    assert found.fresh == [] and found.unused == []
    assert distance(call(found.model, arrays), there, arrays["mask"]) < 2e-6 * max(1, np.abs(there).max())
    ours, theirs = tensors_of(weights.save(found, tmp_path / "out")), tensors_of(FIXTURES / name)
    for key, x in theirs.items():
        np.testing.assert_allclose(ours[key], x, rtol=2e-7)


def test_the_encoder_of_a_t5_alone(tmp_path):
    """A folder of the encoder has no prefix and no head; another op keeps the bias where it has that position term."""
    arrays, there = expected("t5_gated")
    folder = shutil.copytree(FIXTURES / "t5_gated", tmp_path / "t5")
    tensors = tensors_of(folder)
    alone = {name.removeprefix("transformer."): x for name, x in tensors.items() if "classifier" not in name}
    alone["encoder.embed_tokens.weight"] = alone["shared.weight"].copy()
    save_file(alone, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(weights.WeightsError, match="has no head known here; give model="):
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["T5EncoderModel"]}
        (folder / "config.json").write_text(json.dumps(config))
        weights.load(folder)
    found = weights.load(folder, model="token_classifier")
    assert found.fresh == ["classify/bias", "classify/kernel"] and found.unused == []
    for name in ("weight", "bias"):
        x = tensors[f"classifier.{name}"]
        getattr(found.model.classify, "kernel" if name == "weight" else name)[...] = jnp.asarray(x.T)
    assert distance(call(found.model, arrays), there, arrays["mask"]) < 2e-5
    position = {"name": "t5", "num_buckets": 8, "max_distance": 20}
    swapped = load("t5_gated", attention={"name": "window", "left": 60, "right": 60, "position": position})
    assert distance(call(swapped.model, arrays), there, arrays["mask"]) < 2e-5
    without = load("t5_gated", attention={"name": "window", "left": 60, "right": 60})
    assert without.unused == ["transformer.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]


def test_longformer_from_roberta_starts_with_the_same_logits():
    """Within the window nothing changes, and global projections begin as copies (Beltagy et al. 2020, section 5)."""
    arrays, there = expected("roberta_classifier")
    section = {"name": "longformer", "window": 64, "num_global_tokens": 1}
    found = load("roberta_classifier", attention=section, options={"global_projections": True})
    assert found.fresh == []
    assert distance(call(found.model, arrays), there, arrays["mask"]) < 2e-6


def test_how_far_logits_moved():
    arrays, _ = expected("roberta_classifier")
    given = arrays["inputs"], arrays["mask"]
    before = load("roberta_classifier")
    after = load("roberta_classifier", attention={"name": "window", "left": 1, "right": 1})
    found = weights.moved(before, after, *given)
    difference = np.abs(call(before.model, arrays) - call(after.model, arrays))
    np.testing.assert_allclose([found["largest"], found["mean"]], [difference.max(), difference.mean()], rtol=1e-3)
    assert found["largest"] > 1e-5 and weights.moved(before, before, *given)["same_choice"] == 1
    with pytest.raises(ValueError, match="logits of one shape"):
        weights.moved(before, load("roberta_classifier", num_classes=5), *given)


@pytest.mark.parametrize("how", ["copy", "interpolate"])
def test_longer_positions(how, caplog):
    with caplog.at_level(logging.INFO):
        found = load("roberta_masked_lm", max_len=70, positions=how)
    there = tensors_of(FIXTURES / "roberta_masked_lm")["roberta.embeddings.position_embeddings.weight"]
    table = np.asarray(found.model.positions.table[...])
    offset, length = 2, 29
    np.testing.assert_array_equal(table[:offset], there[:offset])
    body, old = table[offset:], there[offset:]
    assert body.shape[0] == 70 and "positions: 29 there, 70 here" in caplog.text
    if how == "copy":
        np.testing.assert_array_equal(body[length : 2 * length], old)
        arrays, logits = expected("roberta_masked_lm")
        assert distance(call(found.model, arrays), logits, arrays["mask"]) < 2e-6
    else:
        np.testing.assert_array_equal(body[0], old[0])
        np.testing.assert_allclose(body[-1], old[-1], atol=1e-6)
        places = np.linspace(0, length - 1, 70)
        by_column = np.stack([np.interp(places, np.arange(length), column) for column in old.T], axis=1)
        np.testing.assert_allclose(body, by_column, atol=1e-6)


def test_another_head_is_drawn_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        found = load("bert_masked_lm", model="classifier", num_classes=7)
    assert found.fresh == ["classify/bias", "classify/kernel", "dense/bias", "dense/kernel"]
    assert any(name.startswith("cls.predictions") for name in found.unused)
    assert "classify/bias" in caplog.text and "cls.predictions" in caplog.text
    arrays, _ = expected("bert_masked_lm")
    assert call(found.model, arrays).shape == (3, 7)
    again = load("bert_masked_lm", model="classifier", num_classes=7)
    np.testing.assert_array_equal(again.model.classify.kernel[...], found.model.classify.kernel[...])
    other = load("bert_masked_lm", model="classifier", num_classes=7, seed=1)
    assert np.abs(other.model.classify.kernel[...] - found.model.classify.kernel[...]).max() > 0.01


def test_a_head_for_other_classes_keeps_the_rest(tmp_path):
    found = load("roberta_classifier", num_classes=6)
    assert {"classifier.out_proj.weight", "classifier.out_proj.bias"} <= set(found.unused)
    assert found.fresh == ["classify/bias", "classify/kernel"]
    folder = weights.save(found, tmp_path / "out")
    assert len(json.loads((folder / "config.json").read_text())["id2label"]) == 6
    assert weights.load(folder).architecture.num_classes == 6


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        ({"attention": {"name": "window", "left": 3, "right": 3}}, "attention is Window"),
        ({"options": {"norm": "pre"}}, "model.norm is 'pre', there 'post'"),
        ({"options": {"activation": "swiglu"}}, "hidden_act"),
        ({"options": {"pooling": "mean"}}, "model.pooling is 'mean', there 'first'"),
        ({"options": {"num_token_types": 0}}, "type_vocab_size must be an integer of at least 1, got 0"),
        ({"options": {"norm_type": "rms"}}, "model.norm_type is 'rms', there 'layer'"),
    ],
)
def test_what_is_none_of_theirs_is_refused_with_the_reason(kwargs, reason, tmp_path):
    found = load("bert_classifier", **kwargs)
    with pytest.raises(weights.WeightsError) as error:
        weights.save(found, tmp_path / "out")
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_one_tensor_at_a_time(monkeypatch):
    """While one tensor is read, no other is still held: what stays is the model itself."""
    alive, most, read = [], [], folder.Folder.read

    def counted(self, name):
        tensor = read(self, name).copy()
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(folder.Folder, "read", counted)
    monkeypatch.setattr("xformer.weights.loading.jnp.asarray", lambda x, dtype: jnp.array(x, dtype, copy=True))
    load("bert_masked_lm")
    assert len(most) == 42 and max(most) <= 2  # the one before is let go when the next has come


def test_paths_are_told_apart():
    """An attention layer's `value` is no end of a path."""
    found = load("gpt2")
    state = nnx.state(found.model, nnx.Param)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert len(paths) == len(set(paths)) and "blocks/0/attention/value/kernel" in paths


def test_gpt2_goes_on_token_by_token():
    """Decoding with caches chooses what their own logits choose."""
    arrays, there = expected("gpt2")
    model = load("gpt2").model
    tokens, length = arrays["inputs"][:1, :9], 9
    out = np.asarray(generate(model, tokens, np.array([length]), max_tokens=5))[0]
    assert out[0] == there[0, length - 1].argmax()
    row = np.concatenate([tokens[0], out])
    logits = call(model, {"inputs": row[None]})[0]
    assert out.tolist() == logits[length - 1 : -1].argmax(-1).tolist()
