"""Pathfinder: the stated geometry, recomputed; and nothing but the path tells the classes apart."""

import dataclasses

import numpy as np
import pytest
from scipy import optimize

from xformer.tasks import Pathfinder, chunks, pathfinder_images, pathfinder_scenes, vocab
from xformer.tasks.pathfinder import PRESETS

SLACK = 0.75  # pixels: what is taken is kept on a grid of half pixels, of whole ones for pathx


def drawn(preset, seed=0, rounds=1):
    """(drawing, scenes, labels, dots, images) with as many scenes as some rounds keep."""
    drawing = PRESETS[preset].drawing
    random = np.random.Generator(np.random.Philox(seed))
    margins = (drawing.margins * rounds)[:rounds]
    parts = [pathfinder_scenes.sample(drawing, random, margin) for margin in margins]
    scenes = pathfinder_scenes.Scenes(*map(np.concatenate, zip(*parts, strict=True)))
    labels, dots, rows = pathfinder_images.label(drawing, random, scenes)
    scenes = scenes.select(rows)
    return drawing, scenes, labels, dots, pathfinder_images.render(drawing, scenes.dashes, dots)


@pytest.fixture(scope="module")
def many():
    """Labelled images of the arena's 32 x 32, enough for a classifier of patches."""
    return drawn("pathfinder_32", rounds=12)


def turns(dashes):
    """Angles between each dash and the one before, of contours [..., dashes, 2 ends, 2]."""
    ahead = dashes[..., 1, :] - dashes[..., 0, :]
    angle = np.arctan2(ahead[..., 1], ahead[..., 0])
    return (np.diff(angle, axis=-1) + np.pi) % (2 * np.pi) - np.pi


def split_up(drawing, scenes):
    """(contours [scenes, 2, dashes, 2, 2], distractors [scenes, distractors, dashes, 2, 2])."""
    count = len(scenes.dashes)
    both = scenes.dashes[:, : 2 * drawing.contour_length].reshape(count, drawing.contour_length, 2, 2, 2)
    rest = scenes.dashes[:, 2 * drawing.contour_length :]
    return np.moveaxis(both, 2, 1), rest.reshape(count, drawing.num_distractors, drawing.distractor_length, 2, 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_scenes_have_the_stated_geometry(preset):
    drawing, scenes, *_ = drawn(preset, rounds=2)
    contours, distractors = split_up(drawing, scenes)
    assert len(scenes.dashes) > 20 and set(scenes.margin) == set(drawing.margins)
    assert scenes.dashes.shape[1] == 2 * drawing.contour_length + drawing.num_distractors * drawing.distractor_length
    lengths = np.hypot(*np.moveaxis(scenes.dashes[..., 1, :] - scenes.dashes[..., 0, :], -1, 0))
    np.testing.assert_allclose(lengths, drawing.dash_length, atol=1e-3)
    assert scenes.dashes.min() >= 1 - 1e-3 and scenes.dashes.max() <= drawing.side - 1 + 1e-3
    starts = contours[:, :, 0, 0]
    np.testing.assert_allclose(np.hypot(*(starts[:, 0] - starts[:, 1]).T), drawing.seed_distance, atol=1e-3)
    for dashes in (contours, distractors):
        turn = turns(dashes)
        assert np.abs(turn).max() <= np.pi / 2 / drawing.continuity + 1e-3
        gap = np.hypot(*np.moveaxis(dashes[..., 1:, 0, :] - dashes[..., :-1, 1, :], -1, 0))
        margin = scenes.margin[:, None, None]  # a margin on either side of the bend
        np.testing.assert_allclose(gap, 2 * margin * np.cos(turn / 2), atol=1e-3)
    share = np.linspace(0, 1, 7)[:, None]
    for index in range(0, len(scenes.dashes), 8):  # no two dashes too near but those that follow one another
        dashes = scenes.dashes[index]
        points = dashes[:, :1] + share * (dashes[:, 1:] - dashes[:, :1])
        apart = np.linalg.norm(points[:, None, :, None] - points[None, :, None], axis=-1).min((2, 3))
        turn_of = np.arange(2 * drawing.contour_length)
        chain = np.concatenate([turn_of % 2, 2 + np.arange(len(dashes) - len(turn_of)) // drawing.distractor_length])
        place = np.concatenate([turn_of // 2, np.arange(len(dashes) - len(turn_of)) % drawing.distractor_length])
        follow = (chain[:, None] == chain) & (np.abs(place[:, None] - place) <= 1)
        assert apart[~follow].min() >= 2 * scenes.margin[index] - SLACK


def test_turns_have_the_stated_density_where_there_is_room():
    """Without other contours: cos(angle * continuity) ** 2, Kolmogorov-Smirnov at the 0.1 % level."""
    drawing = dataclasses.replace(PRESETS["pathx"].drawing, side=600)
    canvas = pathfinder_scenes._Canvas(drawing, 2, 1)
    last = np.tile(np.float32([[[300, 300], [305, 300]]]), (4000, 1, 1))
    none = last[:, None][:, :0]
    dash, found = canvas.extend(np.random.Generator(np.random.Philox(1)), np.zeros(4000, int), last, none)
    turn = np.sort(turns(np.stack([last, dash], axis=1))[:, 0])
    widest = np.pi / 2 / drawing.continuity
    below = (turn + widest) / (2 * widest) + np.sin(2 * drawing.continuity * turn) / (2 * np.pi)
    assert found.all() and np.abs(below - (np.arange(4000) + 0.5) / 4000).max() < 1.95 / np.sqrt(4000)


def test_dots_lie_on_ends_of_one_contour_or_of_two(many):
    drawing, scenes, labels, dots, _ = many
    contours, _ = split_up(drawing, scenes)
    nearest = lambda dot, tips: np.linalg.norm(tips - dot[:, None], axis=-1)
    start, end = nearest(dots[:, 0], contours[:, :, 0, 0]), nearest(dots[:, 1], contours[:, :, -1, 1])
    assert start.min(1).max() == 0 and end.min(1).max() == 0
    assert (labels == (start.argmin(1) == end.argmin(1))).all()
    distance = np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1)
    assert distance.min() >= drawing.side / 4
    assert labels.mean() == 0.5
    bins = (distance * 32 / drawing.side).astype(int)
    assert (np.bincount(bins[labels == 1]) == np.bincount(bins[labels == 0])).all()


def test_ink_is_what_the_drawing_says(many):
    """Dashes of this area, rounded at their ends, and two discs; edges are smooth over a pixel on either side."""
    drawing, scenes, labels, _, images = many
    dash = drawing.dash_length * drawing.thickness + np.pi * drawing.thickness**2 / 4
    ink = images.astype(float).sum((1, 2)) / (pathfinder_images.LEVELS - 1)
    discs = 2 * np.pi * drawing.dot_radius**2
    stated = scenes.dashes.shape[1] * dash * drawing.contrast + discs
    assert stated < ink.mean() < 2.5 * stated  # smooth edges of so thin a line are as much as the line
    assert images.max() == pathfinder_images.LEVELS - 1 and images.min() == 0
    both = [ink[labels == answer] for answer in (0, 1)]
    spread = np.sqrt(sum(part.var() / len(part) for part in both))
    assert abs(both[0].mean() - both[1].mean()) < 4 * spread


def probe(features, labels):
    """Test accuracy of logistic regression fitted to half of the examples."""
    features = np.asarray(features, float).reshape(len(labels), -1)
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    features = np.concatenate([features, np.ones((len(labels), 1))], axis=1)
    half = len(labels) // 2
    sign = 2.0 * labels - 1

    def loss(weight):
        margin = sign[:half] * (features[:half] @ weight)
        slope = -sign[:half] / (1 + np.exp(margin))
        penalty = 0.02 * weight
        return np.logaddexp(0, -margin).mean() + weight @ penalty / 2, features[:half].T @ slope / half + penalty

    weight = optimize.minimize(loss, np.zeros(features.shape[1]), jac=True, method="L-BFGS-B").x
    return ((features[half:] @ weight > 0) == labels[half:]).mean()


def patches(images, dots, reach):
    """The surroundings of each dot, [images, 2, size, size]."""
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * reach + 1,) * 2, axis=(1, 2))
    column, row = np.moveaxis(np.clip(dots.astype(int), 0, images.shape[1] - 1), -1, 0)
    return windows[np.arange(len(images))[:, None], row, column]


def chance(count):
    return 0.5 + 4 * 0.5 / np.sqrt(count // 2)  # four standard errors of the half that is tested


@pytest.mark.parametrize("reach", [3, 4])
def test_what_surrounds_the_dots_does_not_tell(many, reach):
    _, _, labels, dots, images = many
    found = patches(images, dots, reach)
    assert probe(found, labels) < chance(len(labels))
    corner = np.concatenate([found.reshape(len(labels), -1) > 60, np.ptp(found, axis=1).reshape(len(labels), -1)], 1)
    assert probe(corner, labels) < chance(len(labels))


def test_statistics_of_the_whole_image_do_not_tell(many):
    drawing, _, labels, dots, images = many
    flat = images.reshape(len(labels), -1) / 254
    apart = np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1)
    quadrants = images.reshape(len(labels), 2, drawing.side // 2, 2, drawing.side // 2).mean((2, 4)).reshape(-1, 4)
    levels = np.stack([np.quantile(flat, q, axis=1) for q in (0.5, 0.7, 0.8, 0.9, 0.95)], axis=1)
    statistics = [flat.sum(1), (flat > 0.2).sum(1), flat.std(1), apart, apart**2, *dots.reshape(-1, 4).T]
    features = np.concatenate([np.stack(statistics, axis=1), quadrants, levels], axis=1)
    assert probe(features, labels) < chance(len(labels))


def test_a_probe_finds_a_leak_where_there_is_one(many):
    """Dots a pixel larger in positive images: the probe of patches sees it."""
    drawing, scenes, labels, dots, images = many
    larger = dataclasses.replace(drawing, dot_radius=drawing.dot_radius + 1)
    leaking = np.where(labels[:, None, None] == 1, pathfinder_images.render(larger, scenes.dashes, dots), images)
    assert probe(patches(leaking, dots, 3), labels) > 0.95


def test_data_depend_on_the_seed_alone_and_small_splits_on_nothing_else():
    task = Pathfinder("pathfinder_16", num_train=40, num_validation=5, num_test=7)
    first, again = task.generate(num_workers=1), task.generate(num_workers=3)
    more = dataclasses.replace(task, num_train=150).generate()
    other = dataclasses.replace(task, data_seed=1).generate()
    for split in first:
        assert (first[split].tokens == again[split].tokens).all() and (first[split].labels == again[split].labels).all()
        assert (first[split].tokens == more[split].tokens[: first[split].tokens.size]).all()
        assert not (first[split].tokens == other[split].tokens).all()
    images = {more[split][i].tobytes() for split in more for i in range(len(more[split]))}
    assert len(images) == 150 + 5 + 7 and all((more[split].lengths == 256).all() for split in more)
    assert min(more["train"].tokens) == 1 and max(more["train"].tokens) == pathfinder_images.LEVELS


def test_published_sizes():
    assert Pathfinder().split_sizes == {"train": 160_000, "validation": 20_000, "test": 20_000}
    assert (Pathfinder().length, Pathfinder("pathx").length) == (1024, 16_384)
    assert Pathfinder("pathfinder_16", num_test=3).split_sizes == {"train": 20_000, "validation": 1_000, "test": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "pathfinder_64"}, "preset must be one of pathfinder_16, pathfinder_32, pathx"),
        ({"num_train": 0}, "num_train must be an int of at least 1, got 0"),
        ({"data_seed": True}, "data_seed must be an int of at least 0, got True"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pathfinder(**options)


def test_progress_is_said(monkeypatch):
    monkeypatch.setattr(chunks, "SAY_EVERY", -1.0)
    lines = []
    Pathfinder("pathfinder_16", num_train=2, num_validation=1, num_test=1).generate(progress=lines.append)
    assert lines[0] == "pathfinder: generating 4 images, preset=pathfinder_16"
    assert lines[1] == "pathfinder: 0 of 4 images" and len(lines) == 4


def test_pixels_are_numbers_and_come_back():
    pixels = vocab.Pixels(255)
    assert pixels.encode("0 17\n254") == [1, 18, 255] and pixels.decode([1, 18, 255, 0]) == "0 17 254"
    assert vocab.from_json(pixels.to_json()) == pixels and pixels.size == 256
    for wrong in ("255", "-1", "1.5", "red"):
        with pytest.raises(ValueError, match=f"a pixel must be a number from 0 to 254, got '{wrong}'"):
            pixels.encode(f"3 {wrong}")
