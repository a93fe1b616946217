"""Weights of Hugging Face folders in and out, each compared with the library that wrote them.

    python -m benchmarks.weights                                  # needs the environment of `make bench-peers`
    python -m benchmarks.weights --only=gpt2                      # some
    python -m benchmarks.weights --fixtures=tests/fixtures/weights    # writes what the tests read

For each case a small model with odd sizes is drawn by their library and saved by it; ours loads it, and logits and
gradients of every tensor are compared; ours saves it, and theirs loads that. Then the memory of loading a model of
some hundred megabytes is measured, in a process of its own (`--only=memory`). Writes benchmarks/results/weights.json;
with `--only` nothing but where `--out` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xformer import weights
from xformer.bench import machine
from xformer.bench import memory as process_memory
from xformer.weights.families import BY_TYPE
from xformer.weights.loading import path_name
from xformer.weights.saving import _tensors

MEMORY = "memory"
OUT = Path(__file__).parent / "results" / "weights.json"
SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 31,
}
LONG = {**SIZES, "max_position_embeddings": 67}
GPT2 = {
    "vocab_size": 53,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 31,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5 = {
    "vocab_size": 53,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
BYTES_OF_LARGE = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of theirs, its config and its inputs.

    Attributes:
      cls: the class; config: arguments of its config.
      length: of the texts; the second and third have padding at the end.
      padded: False: no text has padding, which their code refuses.
      token_types: whether texts have two kinds of tokens.
      global_tokens: places of them in the first text; of the second the first of these.
      save: arguments of `save_pretrained`. load: arguments of `xformer.weights.load`.
    """

    cls: str
    config: Mapping[str, Any]
    length: int = 19
    padded: bool = True
    token_types: bool = False
    global_tokens: Sequence[int] = ()
    save: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    load: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "bert_masked_lm": Case("BertForMaskedLM", SIZES, token_types=True),
    "bert_untied": Case("BertForMaskedLM", {**SIZES, "tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "bert_pretraining": Case("BertForPreTraining", {**SIZES, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "bert_classifier": Case("BertForSequenceClassification", {**SIZES, "num_labels": 5}, token_types=True),
    "bert_token_classifier": Case("BertForTokenClassification", {**SIZES, "num_labels": 4, "hidden_act": "silu"}),
    "roberta_masked_lm": Case("RobertaForMaskedLM", {**SIZES, "type_vocab_size": 1}, save={"max_shard_size": "20KB"}),
    "roberta_classifier": Case("RobertaForSequenceClassification", {**SIZES, "type_vocab_size": 1, "num_labels": 3}),
    "roberta_token_classifier": Case("RobertaForTokenClassification", {**SIZES, "pad_token_id": 3, "num_labels": 3}),
    "xlm_roberta_masked_lm": Case("XLMRobertaForMaskedLM", {**SIZES, "hidden_act": "gelu_new"}),
    "camembert_classifier": Case("CamembertForSequenceClassification", {**SIZES, "num_labels": 2}),
    "gpt2": Case("GPT2LMHeadModel", GPT2),
    "gpt2_untied": Case("GPT2LMHeadModel", {**GPT2, "n_inner": 17, "tie_word_embeddings": False}),
    "gpt2_classifier": Case("GPT2ForSequenceClassification", {**GPT2, "pad_token_id": 5, "num_labels": 3}),
    "gpt2_token_classifier": Case("GPT2ForTokenClassification", {**GPT2, "num_labels": 4}),
    "big_bird_full": Case("BigBirdForMaskedLM", {**LONG, "attention_type": "original_full"}, length=61),
    "big_bird_sparse": Case(
        "BigBirdForMaskedLM", {**LONG, "block_size": 4, "num_random_blocks": 2}, length=61, load={"as_released": True}
    ),
    "big_bird_classifier": Case(
        "BigBirdForSequenceClassification",
        {**LONG, "block_size": 4, "num_random_blocks": 1, "num_labels": 3},
        length=64,
        load={"as_released": True},
    ),
    "nystromformer_masked_lm": Case(
        "NystromformerForMaskedLM",
        {**SIZES, "num_landmarks": 5, "segment_means_seq_len": 20, "conv_kernel_size": 3},
        length=20,
        padded=False,
        token_types=True,
    ),
    "nystromformer_classifier": Case(
        "NystromformerForSequenceClassification",
        {**SIZES, "num_landmarks": 7, "segment_means_seq_len": 7, "conv_kernel_size": 5, "num_labels": 3},
    ),
    "nystromformer_token_classifier": Case(
        "NystromformerForTokenClassification",
        {**SIZES, "num_landmarks": 9, "segment_means_seq_len": 18, "conv_kernel_size": 7, "num_labels": 4},
        length=18,
        padded=False,
    ),
    "t5_token_classifier": Case("T5ForTokenClassification", {**T5, "num_labels": 3}),
    "t5_gated": Case(
        "T5ForTokenClassification", {**T5, "feed_forward_proj": "gated-gelu", "d_kv": 7, "num_labels": 2}, length=40
    ),
    "longformer_masked_lm": Case("LongformerForMaskedLM", {**LONG, "attention_window": [4, 8]}, length=50),
    "longformer_global": Case(
        "LongformerForMaskedLM", {**LONG, "attention_window": 6}, length=50, global_tokens=(3, 20, 21)
    ),
    "longformer_classifier": Case(
        "LongformerForSequenceClassification", {**LONG, "attention_window": 4, "num_labels": 3}, length=43
    ),
}


def make(case: Case, seed: int = 0) -> Any:
    """A model of theirs whose every parameter is random, biases and scales too."""
    import torch
    import transformers

    torch.manual_seed(seed)
    cls = getattr(transformers, case.cls)
    model = cls(cls.config_class(**case.config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs_of(case: Case, pad_id: int) -> dict[str, np.ndarray]:
    """Texts with padding at the end, by our names."""
    random = np.random.default_rng(0)
    lengths = [case.length, case.length - 7, case.length - 2] if case.padded else [case.length] * 3
    mask = np.arange(case.length) < np.array(lengths)[:, None]
    vocab_size = case.config["vocab_size"]
    arrays = {
        "inputs": np.where(mask, random.integers(4, vocab_size, mask.shape), pad_id).astype(np.int32),
        "mask": mask,
    }
    if case.token_types:
        arrays["token_types"] = random.integers(0, 2, mask.shape).astype(np.int32)
    if case.global_tokens:
        arrays["global_tokens"] = np.zeros(mask.shape, bool)
        arrays["global_tokens"][0, list(case.global_tokens)] = arrays["global_tokens"][1, case.global_tokens[0]] = True
    return arrays


def theirs(model: Any, arrays: Mapping[str, np.ndarray], factor: np.ndarray | None = None) -> tuple[np.ndarray, dict]:
    """Their logits and, of the sum of them times `factor`, the gradient of every parameter."""
    import torch

    names = {"inputs": "input_ids", "mask": "attention_mask", "token_types": "token_type_ids"}
    names["global_tokens"] = "global_attention_mask"
    given = {names[name]: torch.tensor(x.astype(np.int64)) for name, x in arrays.items()}
    output = model(**given)
    logits = output.logits if hasattr(output, "logits") else output.prediction_logits
    if factor is None:
        return logits.detach().numpy(), {}
    model.zero_grad()
    (logits * torch.tensor(factor)).sum().backward()
    gradients = {name: x.grad.numpy() for name, x in model.named_parameters() if x.grad is not None}
    return logits.detach().numpy(), gradients


def ours(found: weights.Pretrained, arrays: Mapping[str, np.ndarray], factor: np.ndarray) -> tuple[Any, dict]:
    """Our logits, and the gradient of every tensor by its name there."""
    graph, params, rest = nnx.split(found.model, nnx.Param, ...)

    @jax.jit
    def run(params: Any) -> tuple[Any, Any]:
        def total(params: Any) -> tuple[Any, Any]:
            model: Any = nnx.merge(graph, params, rest)
            logits = model(**arrays)
            logits = logits.dense() if hasattr(logits, "dense") else logits
            return (logits * factor).sum(), logits

        return jax.grad(total, has_aux=True)(params)

    gradients, logits = run(params)
    by_path = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    entries = BY_TYPE[found.config["model_type"]].entries(found.architecture)
    for entry in entries:  # of an array that is theirs times a factor: theirs moves logits by so much more
        by_path[entry.ours] = by_path[entry.ours] * entry.layout.factor**2
    return np.asarray(logits), dict(_tensors(entries, by_path))


def compare(name: str, case: Case, fixtures: Path | None) -> dict[str, Any]:
    """A row: the largest differences, in and out."""
    model = make(case)
    pad_id = model.config.pad_token_id or 0
    arrays = inputs_of(case, pad_id)
    there, _ = theirs(model, arrays)
    factor = np.random.default_rng(1).normal(size=there.shape).astype(np.float32)
    if there.ndim == 3:
        factor *= arrays["mask"][:, :, None]  # what stands at padding means nothing
    there, gradients = theirs(model, arrays, factor)
    real = arrays["mask"] if there.ndim == 3 else np.ones(len(there), bool)
    with tempfile.TemporaryDirectory() as temporary:
        folder, back = Path(temporary) / "theirs", Path(temporary) / "ours"
        model.save_pretrained(folder, **case.save)
        if fixtures is not None:
            shutil.rmtree(fixtures / name, ignore_errors=True)
            shutil.copytree(folder, fixtures / name)
            (fixtures / name / "generation_config.json").unlink(missing_ok=True)
            np.savez_compressed(fixtures / name / "expected.npz", logits=there, **arrays)
        found = weights.load(folder, **case.load)
        here, found_gradients = ours(found, arrays, factor)
        shared = {key: x for key, x in gradients.items() if key in found_gradients}
        for key in shared:
            if key.endswith("word_embeddings.weight"):  # there the row of the padding has no gradient
                found_gradients[key] = np.array(found_gradients[key])
                found_gradients[key][pad_id] = shared[key][pad_id]
        scale = max(float(np.abs(x).max()) for x in shared.values())
        distance = max(float(np.abs(x - found_gradients[key]).max()) for key, x in shared.items())
        weights.save(found, back)
        again, report = type(model).from_pretrained(back, output_loading_info=True)
        returned, _ = theirs(again.eval(), arrays)
    return {
        "name": name,
        "class": case.cls,
        "logits_difference": float(np.abs(here - there)[real].max()),
        "largest_logit": float(np.abs(there[real]).max()),
        "gradient_difference": distance,
        "largest_gradient": scale,
        "tensors_compared": len(shared),
        "tensors_without_gradient_here": sorted(set(gradients) - set(shared)),
        "returned_logits_difference": float(np.abs(returned - there)[real].max()),
        "missing_when_returned": sorted(report["missing_keys"]),
        "unexpected_when_returned": sorted(report["unexpected_keys"]),
        "unused": found.unused,
        "fresh": found.fresh,
    }


def memory() -> dict[str, Any]:
    """Peak memory of loading a large model, in a process of its own, beyond what was there before."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case("RobertaForMaskedLM", {**SIZES, **BYTES_OF_LARGE, "vocab_size": 20_000})
        model = make(case)
        model.save_pretrained(folder)
        size = sum(x.numel() * x.element_size() for x in model.parameters())
        largest = max(x.numel() * x.element_size() for x in model.parameters())
        del model
        call = [sys.executable, "-m", "benchmarks.weights", f"--load={folder}"]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
    return {"name": MEMORY, "model_bytes": size, "largest_tensor_bytes": largest, **json.loads(done.stdout)}


def load_once(folder: str) -> None:
    """Loads a folder and prints the growth of peak memory."""
    jnp.zeros(1).block_until_ready()
    before = process_memory.peak()
    found = weights.load(folder)
    jax.block_until_ready(nnx.state(found.model))
    print(json.dumps({"peak_growth_bytes": process_memory.peak() - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--fixtures", type=Path, help="a folder that gets the files of their library and its logits")
    parser.add_argument("--out", type=Path, help=f"the JSON; all rows go to {OUT.name} by default, some nowhere")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        return load_once(arguments.load)
    logging.disable(logging.WARNING)
    wanted = arguments.only.split(",") if arguments.only else [*CASES, MEMORY]
    if unknown := [name for name in wanted if name not in (*CASES, MEMORY)]:
        parser.error(f"--only: got {', '.join(unknown)}, takes {', '.join([*CASES, MEMORY])}")
    rows = []
    for name in (name for name in CASES if name in wanted):
        rows.append(compare(name, CASES[name], arguments.fixtures))
        row = rows[-1]
        print(f"{name:26} logits {row['logits_difference']:.1e}  gradients {row['gradient_difference']:.1e}", end="  ")
        print(f"returned {row['returned_logits_difference']:.1e}", flush=True)
    if MEMORY in wanted:
        rows.append(memory())
        print(rows[-1])
    versions = {name: __import__(name).__version__ for name in ("torch", "transformers", "safetensors")}
    content = {"machine": machine.describe(), "versions": versions, "rows": rows}
    if (out := arguments.out or (None if arguments.only else OUT)) is not None:
        out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
