"""Images as grey pixels: the arena's splits and greys, broken files, and data called by their name."""

import gzip

import numpy as np
import pytest
from conformance_tasks import write_images

from xformer.tasks import DataMissing, Image, image


def test_pixels_stand_in_the_middle_of_black(tmp_path):
    task = Image(path=write_images(tmp_path))
    task.prepare(tmp_path / "data")
    data = task.open(tmp_path / "data")
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 36, "validation": 4, "test": 12}
    assert data.info["source"] == "Fashion-MNIST (not CIFAR-10)" and data.class_names[9] == "Ankle boot"
    batch = next(data.batches("test", 12, seed=0, shuffle=False, epochs=1))
    grid = batch["inputs"].reshape(12, 32, 32) - 1
    with gzip.open(tmp_path / "t10k-images-idx3-ubyte.gz") as file:
        written = np.frombuffer(file.read()[16:], np.uint8).reshape(12, 28, 28)
    np.testing.assert_array_equal(grid[:, 2:30, 2:30], written)
    assert grid.sum() == written.sum(dtype=np.int64) and list(batch["targets"]) == [*range(10), 0, 1]


def test_greys_are_those_of_the_arena():
    """White, black, the three colours, and a value between, by hand from tf.image's formula."""
    rgb = np.uint8([[255, 255, 255], [0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]])
    assert image.grey(rgb).tolist() == [255, 0, 76, 149, 29, 18]


@pytest.mark.parametrize("source", ["auto", "cifar10", "fashion-mnist"])
def test_what_is_missing_is_said(source, tmp_path):
    with pytest.raises(DataMissing, match="image: no images found; ") as error:
        Image(source, path=str(tmp_path / "nowhere")).open(tmp_path)
    assert ("cifar10" in str(error.value)) == (source != "fashion-mnist")
    assert ("fashion-mnist" in str(error.value)) == (source != "cifar10")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "is no gzip file"),
        (gzip.compress(bytes([0, 0, 8, 3, 0, 0])), "is no IDX file"),
        (gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 1])), "is no IDX file"),
    ],
    ids=["no gzip", "cut in its head", "other dimensions"],
)
def test_broken_files_are_named(content, message, tmp_path):
    task = Image("fashion-mnist", write_images(tmp_path))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte.gz {message}"):
        task.prepare(tmp_path / "data")


def test_cifar10_is_read_where_tfds_has_it(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    colours = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3)).astype(np.uint8)

    class Cifar10(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "cifar10"
        VERSION = tfds.core.Version("3.0.2")

        def _info(self):
            label = tfds.features.ClassLabel(names=[f"class{i}" for i in range(10)])
            features = {"image": tfds.features.Tensor(shape=(32, 32, 3), dtype=np.uint8), "label": label}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features),
                                         disable_shuffling=True)  # fmt: skip

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(range(10)), "test": self._generate_examples(range(10, 20))}

        def _generate_examples(self, rows):
            for row in rows:
                yield row, {"image": colours[row], "label": row % 10}

    Cifar10(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    task = Image(path=str(tmp_path / "nowhere"))
    task.prepare(tmp_path)
    data = task.open(tmp_path)
    assert data.info["source"] == "TFDS cifar10 3.0.2" and data.num_examples("train") == 9
    batch = next(data.batches("test", 10, seed=0, shuffle=False, epochs=1))
    np.testing.assert_array_equal(batch["inputs"].reshape(10, 32, 32) - 1, image.grey(colours[10:]))
