"""A Vision Transformer out of a Hugging Face folder gives the logits that their library gave."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from xformer.weights import WeightsError, load_vision

FIXTURE = Path(__file__).parent / "fixtures" / "vision"


def test_logits_equal_theirs():
    with np.load(FIXTURE / "expected.npz") as arrays:
        images, logits = arrays["images"], arrays["logits"]
    run = nnx.jit(lambda model, images: model(images))
    np.testing.assert_allclose(run(load_vision(FIXTURE), images), logits, atol=5e-6)
    window = load_vision(FIXTURE, attention={"name": "window", "left": 2, "right": 2})
    assert np.abs(run(window, images) - logits).max() > 0.05


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"model_type": "bert"}, {}, "model_type must be 'vit' only"),
        ({"architectures": ["ViTModel"]}, {}, "architectures must be"),
        ({"patch_size": 5}, {}, "patch_size must divide the images' height 12"),
        ({"image_size": 24}, {}, r"position_embeddings has shape \[1, 17, 24\]"),
        ({}, {"vit.layernorm.bias": None}, "vit.layernorm.bias is missing"),
        ({}, {"classifier.weight": np.zeros((4, 24), np.float32)}, r"classifier.weight has shape \[4, 24\]"),
    ],
)
def test_what_does_not_fit_is_one_line(config, tensors, message, tmp_path):
    folder = shutil.copytree(FIXTURE, tmp_path / "vit")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    held = load_file(folder / "model.safetensors") | tensors
    save_file({name: x for name, x in held.items() if x is not None}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as error:
        load_vision(folder)
    assert "\n" not in str(error.value)
    with pytest.raises(WeightsError, match="takes an attention without parameters"):
        load_vision(FIXTURE, attention={"name": "full", "position": "shaw_2d"})
