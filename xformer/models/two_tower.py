"""The classifier of pairs of documents."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from xformer.models.encoder import Encoder, EncoderOptions
from xformer.nn.check import check_sizes

Array = jax.Array


class TwoTower(Encoder):
    """Classifies pairs of documents by one vector of each: they never attend to each other.

    One encoder reads both, as the Long Range Arena does in its retrieval task (Tay et al. 2021, section 2.2.3). The
    head is that of its code: the vectors, their product and their difference, `[a, b, a * b, a - b]`, go through
    hidden layers of `mlp_dim` and `mlp_dim // 2` features with ReLU.

    Args:
      vocab_size: see Encoder; max_len: longest document in tokens.
      num_classes: number of logits.
      pooling: a document's vector: "mean" of the real tokens, or "cls", a trained vector put in front of them.
      options: the keywords of Encoder; `mlp_dim` is at least 2.

    Raises:
      ValueError: as Encoder, or a number of classes below 1.

    Attributes:
      facts: what a run's result says of the model besides its name.
    """

    facts: ClassVar[Mapping[str, str]] = MappingProxyType({"tower": "shared encoder", "head": "[a, b, a * b, a - b]"})

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        max_len: int,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        **options: Unpack[EncoderOptions],
    ):
        check_sizes(num_classes=num_classes)
        super().__init__(vocab_size, max_len, pooling, **options)
        width, mlp_dim, rngs = options["width"], options["mlp_dim"], options["rngs"]
        if mlp_dim < 2:
            raise ValueError(f"mlp_dim must be at least 2, so that its half is a layer, got {mlp_dim}")
        param_dtype = options.get("param_dtype", jnp.float32)
        sizes = (4 * width, mlp_dim, mlp_dim // 2, num_classes)
        self.head = nnx.List(
            nnx.Linear(size, following, dtype=jnp.float32, param_dtype=param_dtype, rngs=rngs)
            for size, following in itertools.pairwise(sizes)
        )

    def __call__(
        self,
        inputs: Array,
        mask: Array | None,
        inputs2: Array,
        mask2: Array | None,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> Array:
        """Classifies a batch of pairs.

        Args:
          inputs, inputs2: int `[batch, length]`, token ids of the first and the second documents. Where lengths differ
            the shorter array is padded to the longer.
          mask, mask2: bool `[batch, length]`, True where a token is real; None: all are.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks, others for each document.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        if len(inputs2) != len(inputs):
            raise ValueError(f"inputs2 must hold a document for each of {len(inputs)} inputs, got {inputs2.shape}")
        tokens, real = _in_one(inputs, mask, inputs2, mask2)
        pooled_NxW = self.pool(self.encode(tokens, real, deterministic=deterministic, rngs=rngs), real)
        a, b = jnp.moveaxis(pooled_NxW.reshape(len(inputs), 2, -1), 1, 0)
        x = jnp.concatenate([a, b, a * b, a - b], axis=-1)
        *hidden, logits = self.head
        for layer in hidden:
            x = nnx.relu(layer(x))
        return logits(x)


def _in_one(inputs: Array, mask: Array | None, inputs2: Array, mask2: Array | None) -> tuple[Array, Array | None]:
    """Both documents of each pair in one batch `[2 * batch, length]`, one after the other, and its mask.

    So the encoder is compiled once; and neighbours stay on their device where the batch is cut into shards.
    """
    length = max(inputs.shape[1], inputs2.shape[1])

    def join(first: Array, second: Array) -> Array:
        pair = [jnp.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in (first, second)]
        return jnp.stack(pair, axis=1).reshape(-1, length)

    if mask is None and mask2 is None and inputs.shape == inputs2.shape:
        return join(inputs, inputs2), None
    masks = (
        jnp.ones(tokens.shape, bool) if real is None else real > 0
        for tokens, real in ((inputs, mask), (inputs2, mask2))
    )
    return join(inputs, inputs2), join(*masks)
