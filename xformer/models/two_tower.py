"""The classifier of pairs of documents."""

from __future__ import annotations

import itertools
from typing import Literal, Unpack

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
    """

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
          inputs, inputs2: int `[batch, length]`, token ids of the first and the second documents; lengths may differ.
          mask, mask2: bool `[batch, length]`, True where a token is real; None: all are.
          deterministic: no dropout.
          rngs: stream `dropout` draws the dropout masks, for each document others.

        Returns:
          float32 logits `[batch, num_classes]`.
        """
        if len(inputs2) != len(inputs):
            raise ValueError(f"inputs2 must hold a document for each of {len(inputs)} inputs, got {inputs2.shape}")
        a, b = (
            self.pool(self.encode(tokens, real, deterministic=deterministic, rngs=rngs), real)
            for tokens, real in ((inputs, mask), (inputs2, mask2))
        )
        x = jnp.concatenate([a, b, a * b, a - b], axis=-1)
        *hidden, logits = self.head
        for layer in hidden:
            x = nnx.relu(layer(x))
        return logits(x)
