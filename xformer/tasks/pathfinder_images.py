"""Pathfinder images from scenes: where the dots lie, the pixels, and examples in chunks."""

from __future__ import annotations

import numpy as np

from xformer.tasks.pathfinder_scenes import ROUND, Drawing, Points, Scenes, sample
from xformer.tasks.ragged import Ragged

LEVELS = 255
"""Grey values, 0 is black; an id is the value plus one, so that a pixel takes a byte and 0 is left for padding."""


def label(drawing: Drawing, random: np.random.Generator, scenes: Scenes) -> tuple[np.ndarray, Points, np.ndarray]:
    """(labels int32, dots [rows, 2 dots, 2], rows of `scenes` int64), as many positive as negative ones.

    A dot lies on the start of either contour and one on the end of the same (1) or of the other (0). Scenes are left
    out until both labels are equally frequent in every bin of dot distances.
    """
    count = len(scenes.dashes)
    contours = scenes.dashes[:, : 2 * drawing.contour_length].reshape(count, drawing.contour_length, 2, 2, 2)
    which, positive = (random.random((2, count)) < 0.5).astype(np.int64)
    rows = np.arange(count)
    dots = np.stack([contours[rows, 0, which, 0], contours[rows, -1, np.where(positive, which, 1 - which), 1]], axis=1)
    distance = np.hypot(*(dots[:, 0] - dots[:, 1]).T)
    bins = np.where(distance < drawing.least_dot_distance, -1, (distance * 32 / drawing.side).astype(np.int64))
    kept = np.zeros(count, bool)
    for value in np.unique(bins[bins >= 0]):
        ones, zeros = (np.flatnonzero((bins == value) & (positive == answer)) for answer in (1, 0))
        fewer = min(len(ones), len(zeros))
        kept[ones[:fewer]] = kept[zeros[:fewer]] = True
    rows = rows[kept]
    return positive[rows].astype(np.int32), dots[rows], rows


def render(drawing: Drawing, dashes: Points, dots: Points) -> np.ndarray:
    """Images uint8 [scenes, side, side] of grey values below LEVELS; edges are smooth over a pixel."""
    side = drawing.side
    image = np.zeros((len(dashes), side, side), np.float32)
    for shapes, half_width, grey in (
        (dashes, drawing.thickness / 2, drawing.contrast),
        (dots, drawing.dot_radius, 1.0),
    ):
        ends = shapes if shapes.ndim == 4 else np.repeat(shapes[:, :, None], 2, axis=2)
        start, along = ends[..., 0, :], ends[..., 1, :] - ends[..., 0, :]
        reach = int(np.ceil(drawing.dash_length / 2 + half_width)) + 1
        grid = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2), axis=-1).reshape(-1, 2)
        pixel = np.floor(start + along / 2).astype(np.int64)[:, :, None] + grid
        offset = (pixel + np.float32(0.5) - start[:, :, None]).astype(np.float32)
        square = np.maximum(np.square(along).sum(-1), np.float32(1e-9))
        share = np.clip((offset * along[:, :, None]).sum(-1) / square[:, :, None], 0, 1)
        distance = np.sqrt(np.square(offset - share[..., None] * along[:, :, None]).sum(-1))
        value = grey * np.clip(half_width + np.float32(0.5) - distance, 0, 1)
        drawn = (value > 0) & (pixel >= 0).all(-1) & (pixel < side).all(-1)
        scene = np.broadcast_to(np.arange(len(dashes))[:, None, None], drawn.shape)[drawn]
        np.maximum.at(image, (scene, pixel[..., 1][drawn], pixel[..., 0][drawn]), value[drawn])
    return np.rint(image * (LEVELS - 1)).astype(np.uint8)


def chunk(drawing: Drawing, source: np.random.Philox) -> Ragged:
    """Examples: a token a pixel, row by row, id 1 is black; labels 1 where a contour joins the dots, else 0."""
    random = np.random.Generator(source)  # only `random()` is used: NumPy promises its values for ever
    equal: list[Scenes] = []
    for margin in drawing.margins:  # equally many scenes of each, however much room one leaves
        found = [sample(drawing, random, margin)]
        while sum(len(part.dashes) for part in found) < ROUND:
            found.append(sample(drawing, random, margin))
        equal.append(Scenes(*map(np.concatenate, zip(*found, strict=True))).select(np.arange(ROUND)))
    scenes = Scenes(*map(np.concatenate, zip(*equal, strict=True)))
    scenes = scenes.select(np.argsort(random.random(len(scenes.dashes)), kind="stable"))
    labels, dots, rows = label(drawing, random, scenes)
    images = render(drawing, scenes.dashes[rows], dots)
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * drawing.side**2
    return Ragged(images.reshape(-1) + np.uint8(1), offsets, labels)
