"""One value of a config against the annotation of the argument that takes it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from xformer import schema
from xformer.schema import ConfigError, Parameter, Text

Norm = Literal["pre", "post"]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (5, int, 5),
        (5, float, 5.0),
        (0.5, float, 0.5),
        (5, int | None, 5),
        (None, int | None, None),
        ("pre", Norm, "pre"),
        ("pre", Norm | None, "pre"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ((1, 2), list[int], [1, 2]),
        ({"data": -1}, Mapping[str, int], {"data": -1}),
        ({"x": object}, Any, {"x": object}),
        (Text("5"), int, 5),
        (Text("-1"), int, -1),
        (Text("5"), float, 5.0),
        (Text("1e-3"), float, 1e-3),
        (Text("5"), str, "5"),
        (Text("true"), bool, True),
        (Text("False"), bool, False),
        (Text("true"), str, "true"),
        (Text("None"), int | None, None),
        (Text("null"), str | None, None),
        (Text("pre"), Norm, "pre"),
        (Text("None"), Literal["None", "some"], "None"),
        (Text("(1, 2)"), tuple[int, ...], (1, 2)),
        (Text("[]"), tuple[int, ...], ()),
        (Text('{"data": 4}'), Mapping[str, int], {"data": 4}),
        (Text("/data/a b.csv"), str | None, "/data/a b.csv"),
    ],
)
def test_takes(value, annotation, expected):
    got = schema.check("key", value, annotation)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "key: got True, takes an integer"),
        (True, float, "key: got True, takes a number"),
        (1, bool, "key: got 1, takes True or False"),
        (1.0, int, "key: got 1.0, takes an integer"),
        ("5", int, "key: got '5', takes an integer"),
        (5, str, "key: got 5, takes a string"),
        (None, int, "key: got None, takes an integer"),
        (True, Literal[1, 2], "key: got True, takes one of 1, 2"),
        (float("nan"), float, "key: got nan, takes a number"),
        (10**400, float, "takes a number"),
        ("prE", Norm, "key: got 'prE', takes one of 'pre', 'post'; nearest match 'pre'"),
        ("post ", Norm | None, "key: got 'post ', takes one of 'pre', 'post' or None; nearest match 'post'"),
        ([1, True], tuple[int, ...], "key[1]: got True, takes an integer"),
        ([1], tuple[int, str], "key: got [1], takes a sequence of 2: an integer, a string"),
        ("12", tuple[int, ...], "key: got '12', takes a sequence, each an integer"),
        ({"data": 1.5}, Mapping[str, int], "key.data: got 1.5, takes an integer"),
        ({1: 1}, Mapping[str, int], "key: got {1: 1}, takes a mapping from names to an integer"),
        (Text("inf"), float, "key: got 'inf', takes a number"),
        (Text("1e3"), int, "key: got 1000.0, takes an integer"),
        (Text("None"), int, "key: got None, takes an integer"),
        (Text("two\nlines"), int, r"key: got 'two\nlines', takes an integer"),
        (Text("("), int, "key: got '(', takes an integer"),
    ],
)
def test_refuses(value, annotation, message):
    with pytest.raises(ConfigError) as error:
        schema.check("key", value, annotation)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Ring:
    radius: int = 4
    rate: float = 0.5
    sizes: tuple[int, ...] = dataclasses.field(default_factory=lambda: (1, 2))


class Layer:
    def __init__(self, width: int, *, norm: Norm = "pre", rngs: Any):
        pass


@dataclasses.dataclass(frozen=True)
class Holder:
    position: Ring | None = None
    causal: bool = False


@dataclasses.dataclass(frozen=True)
class Plain:
    causal: bool = False


TABLE = {"holder": Holder, "plain": Plain}
POSITIONS = {"none": None, "ring": Ring}


def named(section):
    return schema.check_named("attention", section, TABLE, nested={"position": POSITIONS})


def test_parameters_come_from_the_signature():
    assert schema.parameters(Layer, exclude=("rngs",)) == {"width": Parameter(int), "norm": Parameter(Norm, "pre")}
    assert "self" not in schema.parameters(Layer)
    assert schema.parameters(Ring)["sizes"] == Parameter(tuple[int, ...], (1, 2))


def test_defaults_are_filled_in_and_missing_keys_named():
    assert schema.check_keys("ring", {"rate": 1}, schema.parameters(Ring), "a ring") == {
        "radius": 4,
        "rate": 1.0,
        "sizes": (1, 2),
    }
    with pytest.raises(ConfigError, match=r"^model.width: missing; takes an integer$"):
        schema.check_keys("model", {}, schema.parameters(Layer, ("rngs",)), "the model")


def test_a_key_that_nothing_reads_is_named_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        schema.check_keys("ring", {"radios": 3}, schema.parameters(Ring), "a ring")
    assert str(error.value) == (
        "ring.radios: got 3, but a ring reads no such key; it takes radius, rate, sizes; nearest match 'radius'"
    )


@pytest.mark.parametrize("none", [{}, {"position": None}, {"position": {"name": "none"}}, {"position": Text("None")}])
@pytest.mark.parametrize("name", ["holder", "plain"])
def test_no_position_has_one_spelling(name, none):
    assert named({"name": name, **none}) == {"name": name, "position": {"name": "none"}, "causal": False}


def test_nested_sections_fill_in_their_defaults():
    position = {"name": "ring", "radius": 4, "rate": 0.5, "sizes": (1, 2)}
    assert named({"name": "holder", "position": {"name": "ring"}})["position"] == position
    assert named(Text('{"name": "holder", "position": {"name": "ring"}}'))["position"] == position


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "holdre"}, "attention.name: got 'holdre', takes one of 'holder', 'plain'; nearest match 'holder'"),
        ({}, "attention.name: missing; takes one of 'holder', 'plain'"),
        ("holder", "attention: got 'holder', takes a section of keys"),
        ({"name": ["holder"]}, "attention.name: got ['holder'], takes one of 'holder', 'plain'"),
        (
            {"name": "plain", "position": {"name": "ring"}},
            "attention.position.name: got 'ring', but plain takes 'none'",
        ),
        (
            {"name": "holder", "position": {"name": "rang"}},
            "attention.position.name: got 'rang', takes one of 'none', 'r",
        ),
        (
            {"name": "holder", "position": {"name": "ring", "radius": 2.5}},
            "attention.position.radius: got 2.5, takes an",
        ),
        ({"name": "holder", "position": {"name": "none", "radius": 2}}, "attention.position.radius: got 2, but"),
        ({"name": "holder", "size": 1}, "attention.size: got 1, but attention 'holder' reads no such key"),
    ],
)
def test_named_sections_refuse(section, message):
    with pytest.raises(ConfigError) as error:
        named(section)
    assert str(error.value).startswith(message), error.value
