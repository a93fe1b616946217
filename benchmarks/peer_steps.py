"""What the peers of `benchmarks.train_steps` train: models of Hugging Face Transformers of our sizes, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.functional import cross_entropy

from benchmarks import step_sizes as sizes
from benchmarks import translation


class Training(NamedTuple):
    """What is trained, and its loss on the one batch that there is."""

    parameters: Iterable[torch.nn.Parameter]
    loss: Callable[[], torch.Tensor]


def take(training: Training) -> Callable[[], float]:
    """A step with PyTorch's AdamW; returns the loss."""
    optimizer = torch.optim.AdamW(list(training.parameters), lr=sizes.LEARNING_RATE, weight_decay=sizes.WEIGHT_DECAY)

    def turn() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = training.loss()
        loss.backward()
        optimizer.step()
        return loss.item()

    return turn


def classifier(make: Callable[[int], tuple[Any, dict[str, Any]]]) -> Callable[[int, int], Training]:
    """One linear layer on the mean of an encoder's vectors. `make(length)`: the encoder and what else it is given."""

    def built(batch: int, length: int) -> Training:
        torch.manual_seed(0)
        body, options = make(length)
        body.train()
        inputs, labels = (torch.tensor(x, dtype=torch.long) for x in sizes.tokens(batch, length))
        given = {name: value(inputs) for name, value in options.items()}
        head = torch.nn.Linear(body(input_ids=inputs, **given).last_hidden_state.shape[-1], sizes.CLASSES)

        def loss() -> torch.Tensor:
            return cross_entropy(head(body(input_ids=inputs, **given).last_hidden_state.mean(1)), labels)

        return Training([*body.parameters(), *head.parameters()], loss)

    return built


def _bert_sizes(length: int) -> dict[str, Any]:
    return {
        "vocab_size": sizes.VOCAB, "hidden_size": sizes.WIDTH, "num_hidden_layers": sizes.LAYERS,
        "num_attention_heads": sizes.HEADS, "intermediate_size": sizes.MLP_DIM, "max_position_embeddings": length,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def bert(length: int) -> tuple[Any, dict[str, Any]]:
    """Full attention."""
    config = transformers.BertConfig(**_bert_sizes(length), attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False), {}


def big_bird(length: int) -> tuple[Any, dict[str, Any]]:
    """Blocks of `BLOCK`, three of them drawn."""
    config = transformers.BigBirdConfig(
        **_bert_sizes(length), attention_type="block_sparse", block_size=sizes.BLOCK, num_random_blocks=3
    )
    return transformers.BigBirdModel(config, add_pooling_layer=False), {}


def longformer(length: int) -> tuple[Any, dict[str, Any]]:
    """A window of 512, both sides together, and one global token, the first."""
    config = transformers.LongformerConfig(
        **_bert_sizes(length + 2), attention_window=[512] * sizes.LAYERS, pad_token_id=0
    )
    first = lambda inputs: (torch.arange(inputs.shape[1]) == 0).long().expand_as(inputs)
    return transformers.LongformerModel(config, add_pooling_layer=False), {"global_attention_mask": first}


def nystromformer(length: int) -> tuple[Any, dict[str, Any]]:
    """64 landmarks, and a convolution over 65 values."""
    config = transformers.NystromformerConfig(
        **_bert_sizes(length), num_landmarks=64, segment_means_seq_len=length, conv_kernel_size=65
    )
    return transformers.NystromformerModel(config), {}


def reformer(length: int) -> tuple[Any, dict[str, Any]]:
    """Chunks of 64, two rounds of hashes. Its layers are reversible, and give twice `WIDTH` features."""
    config = transformers.ReformerConfig(
        attn_layers=["lsh"] * sizes.LAYERS, vocab_size=sizes.VOCAB, hidden_size=sizes.WIDTH,
        num_attention_heads=sizes.HEADS, attention_head_size=sizes.WIDTH // sizes.HEADS,
        feed_forward_size=sizes.MLP_DIM, num_hashes=2, num_buckets=64, lsh_attn_chunk_length=64,
        max_position_embeddings=length, axial_pos_embds=False, hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0, is_decoder=False, hash_seed=0,
    )  # fmt: skip
    return transformers.ReformerModel(config), {}


def gpt2(batch: int, length: int) -> Training:
    """A language model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=sizes.DECODER_VOCAB, n_positions=length, n_embd=sizes.WIDTH, n_layer=sizes.LAYERS,
        n_head=sizes.HEADS, n_inner=sizes.MLP_DIM, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    inputs, targets = (torch.tensor(x, dtype=torch.long) for x in sizes.next_tokens(batch, length))

    def loss() -> torch.Tensor:
        return cross_entropy(model(input_ids=inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())

    return Training(model.parameters(), loss)


def vit(batch: int, side: int) -> Training:
    """A classifier of square images."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=side, patch_size=sizes.PATCH, num_channels=sizes.CHANNELS, hidden_size=sizes.WIDTH,
        num_hidden_layers=sizes.LAYERS, num_attention_heads=sizes.HEADS, intermediate_size=sizes.MLP_DIM,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=sizes.CLASSES,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()
    images, labels = sizes.images(batch, side)
    pixels, classes = torch.tensor(images.transpose(0, 3, 1, 2)), torch.tensor(labels, dtype=torch.long)
    return Training(model.parameters(), lambda: cross_entropy(model(pixel_values=pixels).logits, classes))


def marian(batch: int, length: int) -> Training:
    """A translator."""
    model = translation.marian(length).train()
    given = translation.batch(batch, length)
    targets = torch.tensor(given["targets"], dtype=torch.long).flatten()
    arguments = translation.as_torch(given)

    def loss() -> torch.Tensor:
        logits = model(**arguments, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1)

    return Training(model.parameters(), loss)
