"""What the README's Python snippets do; tests/test_docs.py runs all of its commands too."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from xformer.attention import Shape

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def run(*markers: str) -> dict:
    """The names that the blocks holding the markers define, run one after the other."""
    names: dict = {}
    for marker in markers:
        (block,) = [block for block in BLOCKS if marker in block]
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_nnx_snippet_attends_and_ignores_padding():
    names = run("from flax import nnx")
    layer, x, padding = (names[name] for name in ("layer", "x", "padding"))
    changed = layer(x.at[:, 150:].add(3.0), mask=padding)
    assert names["y"].shape == x.shape
    np.testing.assert_allclose(changed[:, :150], names["y"][:, :150], atol=1e-5)


def test_the_linen_snippet_holds_shaws_parameters():
    names = run("from flax import nnx", "import flax.linen")
    tables = names["variables"]["params"]["attention_fn"]["position"]
    assert names["y"].shape == (2, 200, 64)
    assert {name: table.shape for name, table in tables.items()} == {"key": (33, 16), "value": (33, 16)}


def test_the_new_variant_equals_dense_attention_under_its_pattern():
    op = run("class Strided")["Strided"](block_size=16)
    query, key, value = (jax.random.normal(rng, (1, 70, 2, 8)) for rng in jax.random.split(jax.random.key(0), 3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8)
    weights = jax.nn.softmax(jnp.where(op.pattern(70, 70, 2), scores, -jnp.inf), axis=-1)
    np.testing.assert_allclose(op(query, key, value), jnp.einsum("bhqk,bkhd->bqhd", weights, value), atol=1e-5)
    assert op.cost(Shape(1, 4096, 4096, 2, 8)).flops < op.cost(Shape(1, 1024, 1024, 2, 8)).flops * 8
