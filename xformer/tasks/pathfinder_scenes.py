"""Pathfinder images by the hundred: two dots, two long dashed contours, short dashed distractors.

A positive image has both dots on the ends of one contour, a negative one a dot on an end of each (Linsley et al. 2018,
arXiv:1805.08315, section 3; Kim et al. 2020, arXiv:1906.01558). Sizes are those of the Long Range Arena's builders and
of the script they name. In words: both contours start `seed_distance` apart near the middle and grow in turns, dash by
dash. After a dash the next one begins beyond a gap of two margins, turned by an angle drawn with density cos(angle *
continuity) ** 2, among those angles that keep it clear of the border and of what is there. Where none does, the scene
is given up. Distractors grow likewise from places drawn at random.

Some things differ from the script. Where there is no room for the next dash, some are taken back before the scene is
given up, contours turn away from the border where they can, and each scene has all its distractors (the script leaves
some out). So that only the path tells the classes apart, the dots' distances are equally distributed in both (there,
nothing sees to that), and no two dots are nearer than a quarter of the side, so that no small patch holds both.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

_ANGLES = 16  # candidates for the next dash
_TRIALS = 60  # places tried for a distractor before the scene is given up
_BORDER = 1.0
ROUND = 256  # scenes begun at a time
_BACK, _MOST_TAKEN_BACK = 4, 10  # where there is no room, 4 dashes are taken back, then 8, ..., so many times
_OUTWARD = 0.05  # how much rarer a dash is whose straight continuation would leave the image

Points = np.ndarray
"""float32 [scenes, ..., 2], x and y in pixels from the upper left corner."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How an image is drawn; lengths in pixels, counts in dashes.

    margins: half of the gap between two dashes, one of them for each scene. seed_distance: between the starts of the
    two contours; both are at least about two of it from the border, where the side allows. continuity: 1 allows turns
    of 90 degrees, more makes contours straighter. contrast: grey of a dash, 1 is white as the dots are.
    """

    side: int
    contour_length: int
    dash_length: float
    thickness: float
    margins: tuple[float, ...]
    seed_distance: float
    dot_radius: float
    continuity: float
    distractor_length: int
    num_distractors: int
    contrast: float

    @property
    def least_dot_distance(self) -> float:
        return self.side / 4

    def clearance(self, margin: float) -> float:
        """The least distance between the middle lines of two dashes that don't follow one another."""
        return 2 * margin


class Scenes(NamedTuple):
    """dashes: [scenes, dashes, 2 ends, 2], those of both contours in turn, then the distractors; margin [scenes]."""

    dashes: Points
    margin: np.ndarray

    def select(self, rows: np.ndarray) -> Scenes:
        return Scenes(self.dashes[rows], self.margin[rows])


class _Canvas:
    """What is taken, for `scenes` scenes of one margin, on a grid of half pixels (of whole ones for large images)."""

    def __init__(self, drawing: Drawing, margin: float, num_scenes: int):
        self.drawing, self.margin = drawing, margin
        self.scale = 2 if drawing.side <= 64 else 1
        size = drawing.side * self.scale
        self.taken = np.zeros((num_scenes, size, size), bool)
        self.clearance = drawing.clearance(margin)
        reach = int(np.ceil(self.clearance * self.scale))
        offsets = np.mgrid[-reach : reach + 1, -reach : reach + 1].reshape(2, -1)
        self.disc = offsets[:, np.hypot(*offsets) <= self.clearance * self.scale]
        # Three points stand for a dash: the line between them comes nearer to others by a fifth of a pixel at most.
        self.along = np.linspace(0, 1, 3, dtype=np.float32)

    def points(self, dashes: Points) -> Points:
        """Points along dashes [..., 2 ends, 2]: [..., points, 2]."""
        start, end = dashes[..., :1, :], dashes[..., 1:, :]
        return start + self.along[:, None] * (end - start)

    def stamp(self, scene: np.ndarray, dashes: Points) -> None:
        """Takes the surroundings of dashes [n, 2, 2], each of its scene."""
        cells = (self.points(dashes) * self.scale).astype(np.int64)
        x, y = (cells[..., axis, None] + self.disc[axis] for axis in (0, 1))
        inside = (x >= 0) & (y >= 0) & (x < self.taken.shape[2]) & (y < self.taken.shape[1])
        self.taken[np.broadcast_to(scene[:, None, None], x.shape)[inside], y[inside], x[inside]] = True

    def free(self, scene: np.ndarray, dashes: Points, others: Points) -> np.ndarray:
        """Which of dashes [n, angles, 2, 2] are clear of what is taken, the border and others [n, dashes, 2, 2]."""
        points = self.points(dashes)
        inside = ((points >= _BORDER) & (points <= self.drawing.side - _BORDER)).all((-1, -2))
        x, y = np.moveaxis(np.clip(points * self.scale, 0, self.taken.shape[1] - 1).astype(np.int64), -1, 0)
        clear = inside & ~self.taken[scene[:, None, None], y, x].any(-1)
        for other in np.moveaxis(self.points(others), 1, 0):  # [n, points, 2]
            across, down = (points[..., None, axis] - other[:, None, None, :, axis] for axis in (0, 1))
            clear &= (across**2 + down**2 >= self.clearance**2).all((-1, -2))
        return clear

    def extend(
        self, random: np.random.Generator, scene: np.ndarray, last: Points, others: Points
    ) -> tuple[Points, np.ndarray]:
        """(the dash after each of `last` [n, 2, 2], which of them there is room for, bool [n])."""
        drawing = self.drawing
        start, end = last[:, 0], last[:, 1]
        ahead = (end - start) / drawing.dash_length
        turn = (np.arange(_ANGLES) + random.random((len(last), 1))) / _ANGLES * np.pi - np.pi / 2
        angle = (np.arctan2(ahead[:, 1], ahead[:, 0])[:, None] + turn).astype(np.float32)
        heading = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
        pivot = (end + self.margin * ahead)[:, None]
        begin = pivot + self.margin * heading
        dashes = np.stack([begin, begin + drawing.dash_length * heading], axis=-2)
        weight = np.cos(np.minimum(np.abs(turn) * drawing.continuity, np.pi / 2)) ** 2
        onward = dashes[..., 1, :] + (drawing.dash_length + 2 * self.margin) * heading
        weight = np.where(((onward > 0) & (onward < drawing.side)).all(-1), weight, _OUTWARD * weight)
        weight = np.where(self.free(scene, dashes, others), weight, 0)
        total = np.cumsum(weight, axis=1)
        chosen = np.argmax(total > random.random((len(last), 1)) * total[:, -1:], axis=1)
        return dashes[np.arange(len(last)), chosen], total[:, -1] > 1e-4


def sample(drawing: Drawing, random: np.random.Generator, margin: float) -> Scenes:
    """Those of `ROUND` scenes begun for which there was room."""
    canvas = _Canvas(drawing, margin, ROUND)
    contours = _contours(canvas, random)
    scene = contours.scene
    distractors = np.empty((ROUND, drawing.num_distractors, drawing.distractor_length, 2, 2), np.float32)
    for index in range(drawing.num_distractors):
        lacking = scene
        for _ in range(_TRIALS):
            done, dashes = _distractor(canvas, random, lacking)
            distractors[done, index] = dashes
            for dash in np.moveaxis(dashes, 1, 0):
                canvas.stamp(done, dash)
            lacking = np.setdiff1d(lacking, done)
            if not lacking.size:
                break
        scene = np.setdiff1d(scene, lacking)
    dashes = np.concatenate([contours.dashes[scene], distractors[scene].reshape(len(scene), -1, 2, 2)], axis=1)
    return Scenes(dashes, np.full(len(scene), margin, np.float32))


class _Contours(NamedTuple):
    """dashes: float32 [ROUND, 2 * contour_length, 2 ends, 2], those of both contours in turn; scene: the finished."""

    dashes: Points
    scene: np.ndarray


def _contours(canvas: _Canvas, random: np.random.Generator) -> _Contours:
    """Both contours of each scene, all of them stamped where they are finished."""
    whole = 2 * canvas.drawing.contour_length
    dashes = np.empty((ROUND, whole, 2, 2), np.float32)
    dashes[:, 0], dashes[:, 1] = _seeds(canvas.drawing, random, ROUND)
    everyone = np.arange(ROUND)
    active = everyone[
        canvas.free(everyone, dashes[:, :1], dashes[:, 1:2])[:, 0]
        & canvas.free(everyone, dashes[:, 1:2], dashes[:, :1])[:, 0]
    ]
    drawn = np.full(ROUND, 2)  # dashes of each scene so far; the last two are not stamped
    taken_back = np.zeros(ROUND, np.int64)
    while active.size:
        place = drawn[active]
        dash, found = canvas.extend(random, active, dashes[active, place - 2], dashes[active, place - 1][:, None])
        grown, stuck = active[found], active[~found]
        dashes[grown, drawn[grown]] = dash[found]
        canvas.stamp(grown, dashes[grown, drawn[grown] - 2])
        drawn[grown] += 1
        taken_back[stuck] += 1
        # Ever more of them, as what is left may be at fault.
        drawn[stuck] = np.maximum(drawn[stuck] - _BACK * taken_back[stuck], 2)
        canvas.taken[stuck] = False
        for place in range(drawn[stuck].max(initial=2) - 2):
            again = stuck[drawn[stuck] - 2 > place]
            canvas.stamp(again, dashes[again, place])
        active = active[(drawn[active] < whole) & (taken_back[active] <= _MOST_TAKEN_BACK)]
    scene = np.flatnonzero(drawn == whole)
    for place in (-2, -1):
        canvas.stamp(scene, dashes[scene, place])
    return _Contours(dashes, scene)


def _seeds(drawing: Drawing, random: np.random.Generator, count: int) -> tuple[Points, Points]:
    """The first dashes of both contours, which begin at their own ends: [scenes, 2, 2] each."""
    low = min(2 * drawing.seed_distance, drawing.side / 2)
    first = low + random.random((count, 2)) * (drawing.side - 2 * low)
    second = first + drawing.seed_distance * _heading(random.random(count))
    return _dash(drawing, random, first), _dash(drawing, random, second)


def _dash(drawing: Drawing, random: np.random.Generator, tip: Points) -> Points:
    """Dashes from tips [n, 2] in directions drawn at random: [n, 2, 2]."""
    return np.stack([tip, tip + drawing.dash_length * _heading(random.random(len(tip)))], axis=1).astype(np.float32)


def _distractor(canvas: _Canvas, random: np.random.Generator, scene: np.ndarray) -> tuple[np.ndarray, Points]:
    """Tries a distractor in each of the scenes: (those where there was room, its dashes there [n, dashes, 2, 2])."""
    dashes = _dash(canvas.drawing, random, random.random((len(scene), 2)) * canvas.drawing.side)[:, None]
    room = canvas.free(scene, dashes, dashes[:, :0])[:, 0]
    for index in range(1, canvas.drawing.distractor_length):
        scene, dashes = scene[room], dashes[room]
        dash, room = canvas.extend(random, scene, dashes[:, -1], dashes[:, : index - 1])
        dashes = np.concatenate([dashes, dash[:, None]], axis=1)
    return scene[room], dashes[room]


def _heading(share: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(2 * np.pi * share), np.sin(2 * np.pi * share)], axis=-1)
