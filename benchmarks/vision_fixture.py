"""A small Vision Transformer of Hugging Face with random parameters, and its logits, for tests/test_models_vision.py.

python -m benchmarks.vision_fixture      # in the environment of `make bench-peers`
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "vision"
CONFIG = {
    "image_size": 12,
    "patch_size": 3,
    "num_channels": 3,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "num_labels": 5,
}


def main() -> None:
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**CONFIG)).eval()
    images = np.random.default_rng(0).normal(size=(3, 12, 12, 3)).astype(np.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        logits = model(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2))).logits.numpy()
    model.save_pretrained(FOLDER)
    np.savez_compressed(FOLDER / "expected.npz", images=images, logits=logits)


if __name__ == "__main__":
    main()
