"""Images as images: what is read, what views are drawn of them, predictions, and files that are wrong."""

import csv
import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from conformance_tasks import WORDS, write_image_folder, write_images
from flax import nnx

import xformer
from xformer import experiment, loading
from xformer.commands import cli, predict
from xformer.tasks import DataMissing, ImageClasses, Preprocessing, image_augmentation, load_preprocessing, vocab
from xformer.tasks.image_reading import read, standard


def opened(task, folder):
    task.prepare(folder)
    return task.open(folder)


def train_batches(data, count=3, size=4, seed=0, **options):
    batches = data.batches("train", size, seed=seed, shuffle=True, epochs=None, **options)
    return [next(batches) for _ in range(count)]


def test_images_are_read_as_they_are_stored(tmp_path):
    task = ImageClasses(path=write_images(tmp_path))
    data = opened(task, tmp_path / "data")
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 36, "validation": 4, "test": 12}
    assert data.summary == "images of 28 x 28 pixels: 36 train, 4 validation, 12 test"
    assert data.class_names[9] == "Ankle boot" and task.shape == (28, 28, 1)
    images = task.inputs(next(data.batches("test", 12, seed=0, shuffle=False, epochs=1)))["images"]
    with gzip.open(tmp_path / "t10k-images-idx3-ubyte.gz") as file:
        raw = np.frombuffer(file.read()[16:], np.uint8)
    np.testing.assert_allclose(images[..., 0], standard(raw.reshape(12, 28, 28).astype(np.float32)), atol=1e-6)
    assert task.sizes(data.preprocess) == data.sizes
    assert {key: data.sizes[key] for key in ("image_height", "image_width", "num_channels")} == {
        "image_height": 28, "image_width": 28, "num_channels": 1,
    }  # fmt: skip


def test_the_extracted_package_is_found_in_the_data_directory(tmp_path):
    with pytest.raises(DataMissing, match=r"images: no Fashion-MNIST in .*apt-get download dataset-fashion"):
        ImageClasses(path=str(tmp_path / "nowhere")).open(tmp_path)
    folder = tmp_path / "fashion-mnist" / "usr" / "share" / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    write_images(folder)
    for path in ("", str(tmp_path / "fashion-mnist"), str(folder)):
        count = opened(ImageClasses(path=path), tmp_path).num_examples("test")
        assert count == 12 or (not path and count == 10_000)  # the package may be installed
    with pytest.raises(DataMissing, match=r"images: no CIFAR-10 in .*tfds build cifar10"):
        ImageClasses("cifar10").open(tmp_path)


def test_another_size_is_that_of_the_images_scaled(tmp_path):
    path = write_images(tmp_path)
    small, large = (opened(ImageClasses(path=path, size=size), tmp_path / "data") for size in (14, 56))
    one = lambda data: next(data.batches("test", 12, seed=0, shuffle=False, epochs=1))["inputs"] - 1
    assert one(small).shape == (12, 14 * 14) and one(large).shape == (12, 56 * 56)
    np.testing.assert_allclose(one(small).mean(axis=1), one(large).mean(axis=1), atol=3)


def test_a_folder_is_read_in_colour_and_split_by_content(tmp_path):
    folder = tmp_path / "pictures"
    write_image_folder(folder)
    (folder / "red" / "copy.png").write_bytes((folder / "red" / "0.png").read_bytes())
    for name in (".hidden", ".DS_Store", "Thumbs.db", "desktop.ini", ".cache/0.png"):  # left aside, at any depth
        (folder / "red" / name).parent.mkdir(exist_ok=True)
        (folder / "red" / name).write_text("no image")
    (folder / "__MACOSX").mkdir()
    (folder / "._0.png").write_text("no image")
    task = ImageClasses("folder", str(folder), size=6)
    data = opened(task, tmp_path / "data")
    assert data.class_names == sorted(WORDS)
    assert sum(data.num_examples(split) for split in data.splits) == 37
    rows = [{row.tobytes() for row in data.examples(split).tokens.reshape(-1, 108)} for split in data.splits]
    assert not (rows[0] & rows[1] or rows[0] & rows[2] or rows[1] & rows[2])
    for split in data.splits:  # the brightest channel is that of the colour
        batch = next(data.batches(split, data.num_examples(split), seed=0, shuffle=False, epochs=1))
        brightest = np.asarray(task.inputs(batch)["images"]).mean(axis=(1, 2)).argmax(axis=1)
        assert [WORDS[index] for index in brightest] == [data.class_names[label] for label in batch["targets"]]


def test_an_image_is_in_the_same_split_at_every_size(tmp_path):
    """Or a run that starts from one on smaller images would have seen some of its test images in training."""
    random, folder = np.random.default_rng(0), tmp_path / "pictures"
    for name, low in (("dark", 0), ("light", 128)):
        (folder / name).mkdir(parents=True)
        for value in range(low, low + 40):  # each of one value, which no scaling changes
            pixels = np.full((int(random.integers(3, 9)), int(random.integers(3, 9)), 3), value, np.uint8)
            PIL.Image.fromarray(pixels).save(folder / name / f"{value}.png")
    found = []
    for size in (2, 6):
        data = opened(ImageClasses("folder", str(folder), size=size), tmp_path / "data")
        found.append({split: {int(data.examples(split)[i][0]) - 1 for i in range(data.num_examples(split))}
                      for split in data.splits})  # fmt: skip
    assert found[0] == found[1] and len(set.union(*found[0].values())) == 80


def test_folders_of_splits_are_kept(tmp_path):
    for part, number in (("train", 4), ("val", 1), ("test", 2)):
        write_image_folder(tmp_path / "pictures" / part, number)
    data = opened(ImageClasses("folder", str(tmp_path / "pictures"), size=4), tmp_path / "data")
    assert {split: data.num_examples(split) for split in data.splits} == {"train": 12, "validation": 3, "test": 6}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "red" / "0.png").write_bytes(b"no image"), r"red.0\.png can't be read as an image"),
        (lambda folder: (folder / "red" / "0.png").write_bytes((folder / "red" / "0.png").read_bytes()[:60]),
         r"red.0\.png can't be read as an image"),
        (lambda folder: (folder / "red" / "note.txt").write_text("x"), r"note\.txt is no image: takes files that end"),
        (lambda folder: [shutil.rmtree(folder / name) for name in ("red", "blue")], "at least 2 classes, got green"),
        (lambda folder: [shutil.rmtree(folder / name) for name in WORDS], "at least 2 classes, got none"),
        (lambda folder: (folder / "red" / "0.png").rename(folder / "0.png"), "must lie in the folder of its class"),
        (lambda folder: (folder / "empty").mkdir(), "empty has no images"),
        (lambda folder: [path.unlink() for path in (folder / "red").iterdir() if path.name != "0.png"],
         "class 'red' has too few different images .*: it needs 3 at least, got 1"),
        (lambda folder: folder.rename(folder.parent / "gone"), "path must be a folder with a folder of images"),
    ],
)  # fmt: skip
def test_a_wrong_folder_is_one_line(change, message, tmp_path):
    write_image_folder(tmp_path / "pictures")
    change(tmp_path / "pictures")
    with pytest.raises(ValueError, match=f"^images: .*{message}") as error:
        ImageClasses("folder", str(tmp_path / "pictures"), size=4).prepare(tmp_path / "data")
    assert "\n" not in str(error.value) and not list((tmp_path / "data").glob("images/*/1.0.0"))


def test_splits_must_agree(tmp_path):
    for part in ("train", "validation", "test"):
        write_image_folder(tmp_path / "pictures" / part, 2)
    (tmp_path / "pictures" / "test" / "red").rename(tmp_path / "pictures" / "test" / "pink")
    with pytest.raises(ValueError, match="class 'pink' is in one of train and test"):
        ImageClasses("folder", str(tmp_path / "pictures")).prepare(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [("train", "val", "validation", "test"), ("train", "valid", "test"), ("Train", "Val", "Test"), ("val", "test"),
     ("training", "testing"), ("train", "val", "test", "others")],
)  # fmt: skip
def test_folders_that_look_like_splits_are_no_classes(parts, tmp_path):
    for part in parts:
        write_image_folder(tmp_path / "pictures" / part, 3)
    with pytest.raises(ValueError, match=r"of which .* look like splits; takes train, validation"):
        ImageClasses("folder", str(tmp_path / "pictures")).prepare(tmp_path)


def test_classes_may_be_called_like_splits(tmp_path):
    write_image_folder(tmp_path / "pictures", 5)
    for old, new in zip(WORDS, ("train", "test", "bus"), strict=True):
        (tmp_path / "pictures" / old).rename(tmp_path / "pictures" / new)
    data = opened(ImageClasses("folder", str(tmp_path / "pictures"), size=4), tmp_path / "data")
    assert data.class_names == ["bus", "test", "train"]


def test_a_folder_of_images_that_is_taken_for_fashion_mnist_says_which_source_reads_it(tmp_path):
    write_image_folder(tmp_path / "pictures", 3)
    with pytest.raises(DataMissing, match=r"no Fashion-MNIST in .*pictures; .*; a folder of other images takes source"):
        ImageClasses(path=str(tmp_path / "pictures")).prepare(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "imagenet"}, "source must be one of fashion-mnist, cifar10, folder"),
        ({"source": "folder"}, "path must be the folder of the images"),
        ({"source": "cifar10", "path": "x"}, "path must be '' where source is 'cifar10'"),
        ({"size": 0}, "size must be an int of at least 1"),
        ({"crop": 28}, "crop must be an int from 0 to 27, got 28"),
        ({"crop": True}, "crop must be an int"),
        ({"flip": 1}, "flip must be True or False, got 1"),
        ({"mixup": -0.1}, "mixup must be a number from 0 to 100"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=f"^images: {message}"):
        ImageClasses(**options)


# Views of training images.


def views(tmp_path, **options):
    task = ImageClasses(path=write_images(tmp_path), **options)
    return task, opened(task, tmp_path / "data")


def test_mixtures_are_those_of_the_paper(tmp_path):
    """Equation 1 of mixup, for the images and for the loss, by hand; evaluation sees none."""
    task, data = views(tmp_path, mixup=0.4)
    batch = train_batches(data, count=1, size=16)[0]
    plain = ImageClasses(path=task.path)
    first, second = (plain.inputs({"inputs": batch[name]})["images"] for name in ("inputs", "inputs2"))
    share = batch["share"][:, None, None, None]
    np.testing.assert_allclose(task.inputs(batch)["images"], share * first + (1 - share) * second, atol=1e-6)
    logits = jax.random.normal(jax.random.key(0), (16, 10))
    soft = share[:, :, 0, 0] * jax.nn.one_hot(batch["targets"], 10)
    soft = soft + (1 - share[:, :, 0, 0]) * jax.nn.one_hot(batch["targets2"], 10)
    values, weights = task.metrics(logits, {key: jnp.asarray(x) for key, x in batch.items()})["loss"]
    np.testing.assert_allclose(values, -(soft * jax.nn.log_softmax(logits)).sum(-1), rtol=1e-5)
    assert weights.sum() == 16
    assert "share" not in next(data.batches("validation", 4, seed=0, shuffle=False, epochs=1))


def test_shares_are_beta(tmp_path):
    random = np.random.default_rng(0).random
    for alpha in (0.2, 1.0, 3.0):
        drawn = np.array([image_augmentation._beta(random, alpha) for _ in range(4000)])
        assert ((drawn >= 0) & (drawn <= 1)).all()
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(drawn.mean() - 0.5) < 0.03 and abs(drawn.var() - variance) < 0.1 * variance
    assert np.isfinite(image_augmentation._beta(random, 1e-3))


def test_views_depend_on_seed_example_and_epoch_alone(tmp_path):
    """Two shards see what one process sees; a run that goes on sees what it would have seen."""
    _, data = views(tmp_path, mixup=0.4)
    whole = train_batches(data, count=12)
    shards = [train_batches(data, count=12, size=2, shard_index=index, shard_count=2) for index in (0, 1)]
    for one, *two in zip(whole, *shards, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(array, np.concatenate([part[name] for part in two]))
    batches = data.batches("train", 4, seed=0, shuffle=True, epochs=None)
    for _ in range(5):
        next(batches)
    later = data.batches("train", 4, seed=0, shuffle=True, epochs=None)
    later.set_state(batches.get_state())
    for name, array in next(later).items():
        np.testing.assert_array_equal(array, whole[5][name])
    other = train_batches(data, count=1, seed=1)[0]
    assert not np.array_equal(other["view"], whole[0]["view"])
    in_epochs = {tuple(word) for batch in whole for word in batch["view"].tolist()}
    assert len(in_epochs) == 48  # 36 images: those seen again have another view


def test_flips_and_crops(tmp_path):
    """Every view is the image, or its mirror image, moved; both kinds and several moves occur."""
    pytest.importorskip("dm_pix")
    task, data = views(tmp_path, flip=True, crop=2)
    found = set()
    for batch in train_batches(data, count=4, size=8):
        images = jax.jit(task.inputs)(batch)["images"]
        plain = np.asarray(ImageClasses(path=task.path).inputs({"inputs": batch["inputs"]})["images"])
        for image, view in zip(plain, np.asarray(images), strict=True):
            for mirrored in (False, True):
                padded = np.pad(image[:, ::-1] if mirrored else image, ((2, 2), (2, 2), (0, 0)), mode="reflect")
                found |= {(mirrored, row, column) for row in range(5) for column in range(5)
                          if np.allclose(padded[row : row + 28, column : column + 28], view)}  # fmt: skip
    assert {mirrored for mirrored, _, _ in found} == {False, True} and len(found) > 12


@pytest.mark.full
def test_a_run_trains_resumes_and_predicts(tmp_path):
    """From a folder of images by augmented training to predictions on files and arrays."""
    path = write_image_folder(tmp_path / "pictures")
    config = {
        "name": "colours",
        "attention": {"name": "full", "position": {"name": "shaw_2d"}},
        "model": {"name": "vision", "patch_size": 3, "num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16},
        "task": {"name": "images", "source": "folder", "path": path, "size": 6, "mixup": 0.2},
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"num_steps": 30, "batch_size": 8, "eval_every": 30, "checkpoint_every": 10, "log_every": 10},
    }
    whole = xformer.fit(config, tmp_path / "whole", data_dir=tmp_path / "data")
    with pytest.raises(xformer.train.Interrupted):
        xformer.fit(config, tmp_path / "cut", data_dir=tmp_path / "data", overrides={"train.stop_at_step": 15})
    again = xformer.fit(config, tmp_path / "cut", data_dir=tmp_path / "data")
    assert whole["test"] == again["test"] and whole["test"]["accuracy"] > 0.9
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert next(row for row in rows if row["split"] == "train" and row["step"] == 10)["tokens"] == 10 * 8 * 4  # patches
    run = xformer.load(tmp_path / "whole")
    files = [tmp_path / "pictures" / name / "1.bmp" for name in WORDS]
    assert run.predict(files).labels == list(WORDS)
    arrays = [np.full((6, 6, 3), np.eye(3)[index] * 150, np.uint8) for index in range(3)]
    assert run.predict(arrays, batch_size=2).labels == list(WORDS)
    assert load_preprocessing(tmp_path / "whole").fingerprint == run.preprocess.fingerprint
    with pytest.raises(
        ValueError, match=r"image 1 must be a path or a uint8 array \[6, 6, 3\], got float64\[6, 6, 3\]"
    ):
        run.predict([arrays[0], np.zeros((6, 6, 3))])
    with pytest.raises(ValueError, match=r"images must be a list of paths or arrays, got 'cat\.png'"):
        run.predict("cat.png")


def test_the_command_predict_reads_image_files_and_folders(tmp_path, capsys, monkeypatch):
    folder = Path(write_image_folder(tmp_path / "pictures", 2))
    (folder / "Thumbs.db").write_text("no image")
    model = {"name": "vision", "patch_size": 3, "num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16}
    task = {"name": "images", "source": "folder", "path": str(folder), "size": 6}
    given = {"name": "a", "attention": {"name": "full"}, "model": model, "task": task}
    built = experiment.build(given | {"optimizer": {"learning_rate": 1e-3}, "train": {"num_steps": 1, "batch_size": 1}})
    values = vocab.ImageValues(6, 6, 3)
    preprocess = Preprocessing(values, 108, sorted(WORDS))
    made = built.model_fn(**{**built.task.sizes(), "num_classes": len(WORDS)})(nnx.Rngs(0))
    run = loading.Loaded(made, preprocess, sorted(WORDS), 1, built.config, built.task.family)
    monkeypatch.setattr(loading, "load", lambda *args: run)
    monkeypatch.setattr(cli.Parser, "trained", lambda self, args, overrides: tmp_path)
    files = {f"{name}/{index}.{ending}" for name in WORDS for index, ending in enumerate(("png", "bmp"))}
    expected = run.predict([folder / file for file in sorted(files)]).labels

    def execute(given, *flags):
        code = cli.exit_code(predict.command, ["--workdir=run", f"--input={given}", *flags])
        return code, *capsys.readouterr()

    code, out, _ = execute(folder)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["place"] for row in rows] == sorted(files) and [row["label"] for row in rows] == expected
    code, out, _ = execute(folder / sorted(files)[0], f"--out={tmp_path / 'out.csv'}")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert code == 0 and [row["label"] for row in csv.DictReader(file)] == expected[:1]
    (tmp_path / "a.txt").write_text("0 1 2")
    (tmp_path / "broken.png").write_text("no image")
    for given, flags, message in (
        (tmp_path / "a.txt", (), "a.txt is no image: takes files that end in"),
        (tmp_path / "broken.png", (), "broken.png can't be read as an image"),
        (tmp_path / "none", (), "takes a file or folder that is there"),
        (folder, ("--text_field=a",), "takes no --text_field, as the model reads images, got 'a'"),
    ):
        code, _, err = execute(given, *flags)
        assert code == 2 and err.startswith("error: --input: ") and message in err and err.count("\n") == 1
    pixels = dataclasses.replace(run, preprocess=dataclasses.replace(preprocess, vocabulary=vocab.Pixels(256)))
    monkeypatch.setattr(loading, "load", lambda *args: pixels)
    code, _, err = execute(folder / sorted(files)[0])
    assert code == 2 and "this model reads an image as a text, its pixels as numbers from 0 to 255" in err


@pytest.mark.full
def test_a_run_on_larger_images_starts_from_one_on_smaller_ones(tmp_path, capsys):
    path = write_image_folder(tmp_path / "pictures")
    config = {
        "name": "colours",
        "attention": {"name": "full", "position": {"name": "shaw_2d"}},
        "model": {"name": "vision", "patch_size": 3, "num_layers": 1, "width": 16, "num_heads": 2, "mlp_dim": 16,
                  "pooling": "cls", "position_embedding": "learned"},
        "task": {"name": "images", "source": "folder", "path": path, "size": 6},
        "optimizer": {"name": "adamw", "learning_rate": 1e-2, "warmup_steps": 2},
        "train": {"num_steps": 30, "batch_size": 8, "eval_every": 30, "checkpoint_every": 30, "log_every": 30},
    }  # fmt: skip
    small = xformer.fit(config, tmp_path / "small", data_dir=tmp_path / "data")
    larger = {"task.size": 12, "train.num_steps": 1, "train.init_from": str(tmp_path / "small")}
    large = xformer.fit(config, tmp_path / "large", data_dir=tmp_path / "data", overrides=larger)
    fitted = large["init_from"]["fitted"]
    assert "positions/grid ([2, 2, 16] there, [4, 4, 16] here), interpolated" in fitted and len(fitted) == 5
    assert not large["init_from"]["left"] and not large["init_from"]["missing"]
    assert "tables of positions fitted: " in capsys.readouterr().err
    assert small["test"]["accuracy"] > 0.9 and large["test"]["accuracy"] > 0.8


def test_an_upright_image_is_read_from_a_turned_one(tmp_path):
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, :4] = 200
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    PIL.Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    upright = read(tmp_path / "turned.png", 8, 4, 1)[..., 0]
    assert upright[:4].mean() > 190 and upright[4:].mean() < 10


def test_grey_values_of_sixteen_bits_keep_their_shades(tmp_path):
    ramp = np.linspace(0, 65_535, 64).round().astype(np.uint16).reshape(8, 8)
    PIL.Image.fromarray(ramp).save(tmp_path / "ramp.png")
    found = read(tmp_path / "ramp.png", 8, 8, 1)[..., 0]
    np.testing.assert_array_equal(found, ramp // 257)
