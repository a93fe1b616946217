"""The encoder-decoder beside Hugging Face's Marian of the same sizes: logits and beam search.

    .venv-peers/bin/python -m benchmarks.translation                  # all; the peer needs peers.txt
    .venv-peers/bin/python -m benchmarks.translation --only=logits    # whether both say the same, and no times

A randomly initialised Marian (post-norm, shared embeddings, SiLU) is copied into ours, and both read the same padded
batch. Beam search makes 32 tokens of 32 sources of 64 with 4 beams, none ending before; training steps are a row of
`benchmarks.targets`. Contenders take turns, and medians are compared, also of the processor time of all
threads together: where other work runs beside, that says more. Writes benchmarks/results/translation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from xformer.attention import Full
from xformer.bench import machine, timing
from xformer.generate import generate
from xformer.models import MODELS

OUT = Path(__file__).parent / "results" / "translation.json"
LAYERS, WIDTH, HEADS, MLP_DIM, VOCAB = 4, 512, 8, 1024, 8000
BATCH, LENGTH, NEW, BEAMS = 32, 64, 32, 4
LIMITS = {"beam search": 0.7}  # at most so many times the seconds of the peer
TOLERANCE = 2e-4  # of logits whose standard deviation is about 1: float32, sums in another order
SIZES: dict[str, Any] = {"num_layers": LAYERS, "width": WIDTH, "num_heads": HEADS, "mlp_dim": MLP_DIM}
PAD = 0

Turn = Callable[[], Any]


def batch(batch_size: int = BATCH, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Token ids with padding at the right of both sides, `EDGE` first in what the decoder reads."""
    random = np.random.default_rng(0)
    inputs, targets = random.integers(1, VOCAB, (2, batch_size, length))
    mask = np.arange(length) < random.integers(length // 2, length + 1, (2, batch_size))[..., None]
    read = np.concatenate([np.zeros((batch_size, 1), int), targets[:, :-1]], axis=1)
    return {"inputs": np.where(mask[0], inputs, PAD), "mask": mask[0], "decoder_inputs": np.where(mask[1], read, PAD),
            "decoder_mask": mask[1], "targets": np.where(mask[1], targets, -1)}  # fmt: skip


def ours(length: int = LENGTH, **options: Any) -> Any:
    """Our model of these sizes, as Marian has its layers."""
    return MODELS["encoder_decoder"](
        VOCAB, length, attention=Full(), **SIZES, norm="post", norm_epsilon=1e-5, activation="silu",
        position_embedding="learned", rngs=nnx.Rngs(0), **options,
    )  # fmt: skip


def marian(length: int = LENGTH, seed: int = 0) -> Any:
    """The peer, randomly initialised."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(seed)
    config = MarianConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=MLP_DIM, decoder_ffn_dim=MLP_DIM, max_position_embeddings=length,
        scale_embedding=True, activation_function="silu", dropout=0.0, attention_dropout=0.0, pad_token_id=PAD,
        eos_token_id=VOCAB - 1, forced_eos_token_id=None, decoder_start_token_id=PAD, init_std=WIDTH**-0.5,
        share_encoder_decoder_embeddings=True,
    )  # fmt: skip
    return MarianMTModel(config)


def copied(peer: Any) -> Any:
    """Ours with the parameters of a Marian."""
    model = ours()
    held = {name: np.asarray(x.detach().numpy()) for name, x in peer.state_dict().items()}
    model.embed.table[...] = held["model.shared.weight"]
    for ours_of, side in ((model, "encoder"), (model.target_decoder, "decoder")):
        # Marian's sines and cosines stand in halves: they are put into a table, which ours scales as it does tokens.
        positions = held.get(f"model.{side}.embed_positions.weight")
        positions = peer.model.encoder.embed_positions.weight.detach().numpy() if positions is None else positions
        ours_of.positions.table[...] = positions[:LENGTH] / np.sqrt(WIDTH)
        for index, block in enumerate(ours_of.blocks):
            layer = f"model.{side}.layers.{index}"
            _attention(block.attention, held, f"{layer}.self_attn")
            _norm(block.attention_norm, held, f"{layer}.self_attn_layer_norm")
            if side == "decoder":
                _attention(block.cross_attention, held, f"{layer}.encoder_attn")
                _norm(block.cross_attention_norm, held, f"{layer}.encoder_attn_layer_norm")
            for name, there in (("expand", "fc1"), ("contract", "fc2")):
                dense = getattr(block.feed_forward, name)
                dense.kernel[...], dense.bias[...] = held[f"{layer}.{there}.weight"].T, held[f"{layer}.{there}.bias"]
            _norm(block.feed_forward_norm, held, f"{layer}.final_layer_norm")
    return model


def _attention(layer: Any, held: dict[str, np.ndarray], there: str) -> None:
    for name, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        own = getattr(layer, name)
        own.kernel[...] = held[f"{there}.{theirs}.weight"].T.reshape(own.kernel.shape)
        own.bias[...] = held[f"{there}.{theirs}.bias"].reshape(own.bias.shape)
    layer.out.kernel[...] = held[f"{there}.out_proj.weight"].T.reshape(layer.out.kernel.shape)
    layer.out.bias[...] = held[f"{there}.out_proj.bias"]


def _norm(layer: Any, held: dict[str, np.ndarray], there: str) -> None:
    layer.scale[...], layer.bias[...] = held[f"{there}.weight"], held[f"{there}.bias"]


def as_torch(given: dict[str, np.ndarray]) -> dict[str, Any]:
    """The batch under the peer's names."""
    import torch

    names = {"input_ids": "inputs", "attention_mask": "mask", "decoder_input_ids": "decoder_inputs",
             "decoder_attention_mask": "decoder_mask"}  # fmt: skip
    return {theirs: torch.tensor(given[name].astype(np.int64)) for theirs, name in names.items()}


def logits() -> dict[str, Any]:
    """The largest difference of the logits of real targets, and their standard deviation."""
    import torch

    peer, given = marian().eval(), batch()
    with torch.no_grad():
        theirs = peer(**as_torch(given), use_cache=False).logits.numpy()
    arrays = {name: jnp.asarray(given[name]) for name in ("inputs", "mask", "decoder_inputs", "decoder_mask")}
    found = np.asarray(nnx.jit(lambda model, arrays: model(**arrays).dense())(copied(peer), arrays))
    real = given["decoder_mask"]
    largest = float(np.abs(found - theirs)[real].max())
    return {
        "largest_difference": largest,
        "standard_deviation": float(theirs[real].std()),
        "agree": largest < TOLERANCE,
    }


def our_beams() -> Turn:
    """Beam search of the compiled program."""
    model, sources = ours(), np.random.default_rng(0).integers(1, VOCAB, (BATCH, LENGTH))
    lengths = np.full(BATCH, LENGTH)
    return lambda: np.asarray(generate(model, sources, lengths, max_tokens=NEW, num_beams=BEAMS))


def their_beams() -> Turn:
    """`generate` of the peer."""
    import torch

    model = marian().eval()
    sources = torch.tensor(np.random.default_rng(0).integers(1, VOCAB - 1, (BATCH, LENGTH)))
    options = {"num_beams": BEAMS, "min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False}
    return lambda: model.generate(sources, attention_mask=torch.ones_like(sources), **options)


CASES = {"beam search": (our_beams, their_beams)}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Medians of both contenders and their ratio, from turns that follow each other; the first is untimed."""
    turns = dict(zip(("xformer", "Marian"), (make() for make in CASES[name]), strict=True))
    spent: dict[str, list[tuple[float, float]]] = {who: [] for who in turns}
    for number in range(rounds + 1):
        for who, turn in turns.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            turn()
            if number:
                spent[who].append((time.perf_counter() - started, time.process_time() - cpu_started))
    row: dict[str, Any] = {"limit": LIMITS[name], "rounds": rounds, "load": os.getloadavg()[0]}
    for index, key in enumerate(("seconds", "cpu_seconds")):
        medians = {who: timing.quartiles([one[index] for one in times])[1] for who, times in spent.items()}
        row[key] = medians | {"ratio": medians["xformer"] / medians["Marian"]}
    return row | {"reached": row["seconds"]["ratio"] <= LIMITS[name]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", action="append", choices=["logits", *CASES], help="may be given several times")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    chosen = options.only or ["logits", *CASES]
    found = {name: logits() if name == "logits" else measure(name, options.rounds) for name in chosen}
    for name, row in found.items():
        print(name, json.dumps(row))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine.describe(), **found}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.get("agree", True) for row in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
