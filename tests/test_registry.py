"""Choosing by name: options from text, nested options, and errors that name the nearest right spelling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from protofed import methods, models
from protofed.errors import ProtofedError
from protofed.registry import Registry, as_options, as_text, coerce, parse_part
from support import registries
from support.errors import refusal
from support.registries import registries_unchanged


@dataclass(frozen=True)
class Slope:
    start: int = 0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        if self.maximum < 0:
            raise ValueError(f"maximum={self.maximum} is below 0")


@dataclass(frozen=True)
class Fruit:
    name: ClassVar[str]
    size: int = 3
    share: float = 0.5
    ripe: bool = False
    shape: Literal["round", "long"] = "round"
    rings: tuple[int, ...] = (1,)
    pair: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    file: str | None = None
    limit: int | None = None
    slope: Slope = Slope()
    maybe: Slope | None = None
    either: float | Slope = 0.0
    many: tuple[Slope, ...] = ()
    derived: int = field(default=7, init=False)


fruits: Registry[Fruit] = Registry("fruit")
fruits.register("red-apple", "pomme")(Fruit)


def make(**options: Any) -> Fruit:
    return fruits.make("red-apple", options)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("size", "12", 12),
        ("size", "-1", -1),
        ("share", "1e-3", 1e-3),
        ("share", 1, 1.0),
        ("ripe", "true", True),
        ("ripe", "no", False),
        ("shape", "long", "long"),
        ("rings", "4,5", (4, 5)),
        ("rings", "(4, 5,)", (4, 5)),
        ("rings", "[4]", (4,)),
        ("rings", "4", (4,)),
        ("rings", 4, (4,)),
        ("rings", [4, "5"], (4, 5)),
        ("rings", "", ()),
        ("pair", "8,9", (8, 9)),
        ("words", "a, b", ("a", "b")),
        ("file", "none", None),
        ("file", "some,name.txt", "some,name.txt"),
        ("limit", "None", None),
        ("limit", "5", 5),
        ("slope", {"start": "4"}, Slope(4)),
        ("slope", Slope(5), Slope(5)),
        ("maybe", {"maximum": "2"}, Slope(0, 2.0)),
        ("maybe", "none", None),
        ("either", "0.25", 0.25),
        ("either", {"start": 2}, Slope(2)),
        ("many", [{"start": "1"}, {"start": 2}], (Slope(1), Slope(2))),
    ],
)
def test_options_are_converted_by_their_annotation(key: str, text: object, value: object) -> None:
    made = getattr(make(**{key: text}), key)
    assert made == value and type(made) is type(value)


def test_an_entry_is_found_by_name_and_alias() -> None:
    assert fruits["red-apple"] is fruits["Red_Apple"] is fruits["pomme"] is Fruit
    assert "RED_APPLE" in fruits and "pear" not in fruits
    assert list(fruits) == fruits.names() == ["red-apple"]
    assert fruits.make("pomme") == fruits.make("red-apple", {}) == Fruit()
    assert Fruit.name == "red-apple"


def test_a_name_with_capitals_or_underscores_is_found() -> None:
    things: Registry[Any] = Registry("thing")

    @things.register("My_Thing")
    @dataclass(frozen=True)
    class Thing:
        name: ClassVar[str]

    assert things["My_Thing"] is things["my-thing"] is Thing
    assert things.names() == ["My_Thing"]


@dataclass(frozen=True)
class Cut:
    registry: ClassVar[Registry[Any]] = Registry("cut")
    name: ClassVar[str]


@Cut.registry.register("slice", paper="Knife, 2020")
@dataclass(frozen=True)
class Slice(Cut):
    width: float = 0.5
    thin: bool = False


@Cut.registry.register("halve")
@dataclass(frozen=True)
class Halve(Cut):
    pass


@dataclass(frozen=True)
class Salad:
    name: ClassVar[str]
    cut: Cut = Slice()
    slope: Slope = Slope()
    size: int = 2


salads: Registry[Salad] = Registry("salad")
salads.register("green")(Salad)


def test_a_part_is_written_as_a_name_with_its_settings() -> None:
    for text, part in (("slice", Slice()), ("slice?width=2&thin=true", Slice(2.0, True)), ("halve", Halve())):
        assert parse_part(Cut.registry, text) == part and type(parse_part(Cut.registry, text)) is type(part)
        assert salads.make("green", {"cut": text}).cut == salads.make("green", {"cut": part}).cut == part
        assert parse_part(Cut.registry, as_text(part)) == part
    assert as_text(Slice(2.0)) == "slice?width=2.0&thin=false" and as_text(Halve()) == "halve"
    assert parse_part(Cut.registry, "slice?width=2&thin=no") == parse_part(
        Cut.registry, " slice ? width = 2 & thin=False "
    )


def test_the_settings_of_an_entry_as_plain_values_make_it_again() -> None:
    salad = Salad(Slice(2.0), Slope(4), 5)
    plain = as_options(salad)
    assert plain == {"cut": "slice?width=2.0&thin=false", "slope": {"start": 4, "maximum": 1.0}, "size": 5}
    assert salads.make("green", plain) == salad


def test_a_wrong_part_is_one_line() -> None:
    assert "unknown cut 'slise'; did you mean 'slice'?" in refusal(lambda: salads.make("green", {"cut": "slise"}))
    assert "did you mean 'width'?" in refusal(lambda: salads.make("green", {"cut": "slice?widht=3"}))
    assert "width='wide'" in refusal(lambda: salads.make("green", {"cut": "slice?width=wide"}))
    assert "cut 'slice?width': expected key=value" in refusal(lambda: salads.make("green", {"cut": "slice?width"}))
    assert "cut 'slice?': expected key=value" in refusal(lambda: salads.make("green", {"cut": "slice?"}))
    assert "'width' is given twice" in refusal(lambda: salads.make("green", {"cut": "slice?width=1&width=2"}))
    assert "cut=3" in refusal(lambda: salads.make("green", {"cut": 3}))


def test_papers_are_listed_by_name() -> None:
    assert Cut.registry.papers == {"slice": "Knife, 2020", "halve": ""}


def test_options_lists_what_can_be_set() -> None:
    assert "size" in fruits.options("pomme")
    assert not {"name", "derived"} & fruits.options("pomme").keys()


def test_only_a_dataclass_can_be_registered() -> None:
    with pytest.raises(TypeError, match="must be a dataclass"):
        fruits.register("plain")(type("Plain", (), {}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sise": 3}, "unknown setting of fruit 'red-apple': 'sise'; did you mean 'size'? Known: "),
        ({"name": "x"}, "unknown setting of fruit 'red-apple': 'name'"),
        ({"derived": 3}, "unknown setting of fruit 'red-apple': 'derived'"),
        ({"slope": {"stat": 3}}, "unknown setting of fruit 'red-apple' slope: 'stat'; did you mean 'start'?"),
        ({"maybe": {"stat": 3}}, "unknown setting of fruit 'red-apple' maybe: 'stat'; did you mean 'start'?"),
        ({"either": {"stat": 3}}, "unknown setting of fruit 'red-apple' either: 'stat'; did you mean 'start'?"),
        ({"many": [{"stat": 3}]}, "unknown setting of fruit 'red-apple' many: 'stat'; did you mean 'start'?"),
        ({"size": "big"}, "fruit 'red-apple': size='big': Input should be a valid integer"),
        ({"size": 2.5}, "fruit 'red-apple': size=2.5: "),
        ({"size": None}, "fruit 'red-apple': size=None: "),
        ({"share": "half"}, "share='half': Input should be a valid number"),
        ({"ripe": "perhaps"}, "ripe='perhaps': "),
        ({"shape": "square"}, "shape='square': Input should be 'round' or 'long'"),
        ({"rings": "4,x"}, "rings.1='x': Input should be a valid integer"),
        ({"pair": "4"}, "pair"),
        ({"pair": "4,5,6"}, "pair"),
        ({"slope": 3}, "slope=3: "),
        ({"slope": {"start": "soon"}}, "slope.start='soon': Input should be a valid integer"),
        ({"slope": {"maximum": -1}}, "maximum=-1.0 is below 0"),
        ({"either": {"start": "soon"}}, "start='soon': Input should be a valid integer"),
        ({"file": ["x" * 500]}, "..."),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], says: str) -> None:
    text = refusal(lambda: make(**options))
    assert says in text and len(text) < 300


def test_an_unknown_name_is_one_line() -> None:
    assert refusal(lambda: fruits["red-aple"]) == "unknown fruit 'red-aple'; did you mean 'red-apple'? Known: red-apple"
    assert refusal(lambda: fruits.make("zzz")) == "unknown fruit 'zzz'. Known: red-apple"
    assert "unknown fruit" in refusal(lambda: fruits.options("zzz"))


def test_what_is_missing_is_named() -> None:
    @dataclass(frozen=True)
    class Needy:
        size: int

    assert refusal(lambda: coerce(Needy, {}, "thing 'needy'")) == "thing 'needy': size is missing"


def test_an_error_of_ours_passes_as_it_is() -> None:
    @dataclass(frozen=True)
    class Picky:
        size: int = 1

        def __post_init__(self) -> None:
            raise ProtofedError("picky: no")

    assert refusal(lambda: coerce(Picky, {"size": 2}, "thing 'picky'")) == "picky: no"


# --- for a while ------------------------------------------------------------------------------------------------------
def test_what_is_registered_temporarily_is_forgotten() -> None:
    entries, papers = dict(Cut.registry._entries), dict(Cut.registry.papers)
    with pytest.raises(KeyError), Cut.registry.temporarily() as registry:
        assert registry is Cut.registry
        registry.register("dice", "cube", paper="Board, 2021")(dataclasses.make_dataclass("Dice", [], frozen=True))
        registry.register("slice")(dataclasses.make_dataclass("Other", [], frozen=True))
        assert registry.names() == ["dice", "halve", "slice"] and "cube" in registry and registry["slice"] is not Slice
        del registry._entries["halve"]
        raise KeyError
    assert (Cut.registry._entries, Cut.registry.papers) == (entries, papers)
    assert Cut.registry["slice"] is Slice and "cube" not in Cut.registry


def test_a_test_that_leaves_an_entry_behind_fails_and_is_cleaned_up_after() -> None:
    with pytest.raises(AssertionError, match=r"model 'left-behind'.*own_names"), registries_unchanged():
        models.register_module("left-behind", lambda shape, classes: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match="method 'fedproto'"), registries_unchanged():
        del methods.registry._entries["fedproto"]
    assert "left-behind" not in models.registry and "fedproto" in methods.registry
    with registries_unchanged(), models.registry.temporarily():
        models.register_module("left-behind", lambda shape, classes: None)  # type: ignore[arg-type, return-value]
    kinds = {registry.kind for registry in registries.ALL}
    assert kinds >= {"method", "model", "data set", "partition", "filter", "reduce", "term"}
