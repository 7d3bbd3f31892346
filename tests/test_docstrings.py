"""What docstrings show is true: their examples are run, and public functions of the mathematics have all they should."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import protofed
from protofed import aggregate, bank, geometry, losses, schedules

PURE = (bank, losses, aggregate, schedules, geometry)
ROOMS = (
    "wire",
    "parts",
    "privacy",
    "methods",
    "data",
    "models",
    "evaluate",
    "experiment.reproduce",
    "experiment.presets",
)


def modules() -> list[str]:
    names = [module.__name__ for module in PURE]
    for room in ROOMS:
        package = importlib.import_module(f"protofed.{room}")
        names += [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    return names


MODULES = modules()


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    assert sum(bool(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name))) > 50


@pytest.mark.parametrize("module", PURE, ids=lambda module: module.__name__)
def test_the_mathematics_is_documented(module):
    """Every public function says what it takes, what it gives, and shows it."""
    members = inspect.getmembers(module, inspect.isfunction)
    public = [f for n, f in members if n[0] != "_" and f.__module__.startswith(module.__name__)]
    assert public
    for function in public:
        text = inspect.getdoc(function) or ""
        assert "Args:" in text and "Returns:" in text and ">>> " in text, f"{module.__name__}.{function.__name__}"
        undocumented = [name for name in inspect.signature(function).parameters if f"    {name}: " not in text]
        assert not undocumented, f"{module.__name__}.{function.__name__}: {undocumented}"


def test_everything_offered_has_a_docstring():
    for room in ("wire", "parts", "data", "models", "methods"):
        package = importlib.import_module(f"protofed.{room}")
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith(protofed.__name__)):
                own = thing.__doc__ if inspect.isfunction(thing) else thing.__dict__.get("__doc__")
                assert own and not own.startswith(f"{name}("), f"{room}.{name}"


ROOMS_OF_SENTENCES = ("federation", "evaluate", "data", "models", "bench")


def public_things(module):
    """The public functions and classes that a module defines, and the public methods of these classes, by name."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing):
            yield name, thing, ()
        elif inspect.isclass(thing):
            yield name, thing, ()
            for member, value in vars(thing).items():
                function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
                if (
                    not member.startswith("_")
                    and inspect.isfunction(function)
                    and function.__module__ == module.__name__
                ):
                    bases = [base for base in thing.__mro__[1:] if base.__module__.startswith(protofed.__name__)]
                    yield f"{name}.{member}", function, [vars(base).get(member) for base in bases]


@pytest.mark.parametrize("room", ROOMS_OF_SENTENCES)
def test_everything_public_has_a_docstring(room):
    """A method that overrides one of protofed's may leave the docstring to it; what torch's classes say does not count."""
    package = importlib.import_module(f"protofed.{room}")
    names = [package.__name__, *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    found = 0
    for module in map(importlib.import_module, names):
        assert module.__doc__, module.__name__
        for name, thing, overridden in public_things(module):
            found += 1
            text = next((t for t in (thing.__doc__, *(o.__doc__ for o in overridden if o)) if t), "")
            assert text and not text.startswith(f"{name}("), f"{module.__name__}.{name} has no docstring"
            first = text.strip().split("\n\n")[0].rstrip()
            assert first[-1] in ".:`", f"{module.__name__}.{name} does not end its first sentence: {first!r}"
    assert found > 20


def test_all_that_runs_and_reports_is_documented():
    """In the rooms that run, store, report and command, everything public has a docstring, and the examples hold."""
    names = ["errors", "disk", "grammar", "outcome", "pretrained", "ranks", "registry", "seeds"]
    names += ["experiment", "results", "report", "cli"]
    checked = 0
    for name in names:
        module = importlib.import_module(f"protofed.{name}")
        inner = pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}.")
        for part in [module, *(importlib.import_module(m.name) for m in inner)]:
            assert part.__doc__, part.__name__
            public = [
                (n, v) for n, v in vars(part).items() if n[0] != "_" and getattr(v, "__module__", "") == part.__name__
            ]
            for n, thing in public:
                if inspect.isclass(thing):
                    public += [(f"{n}.{k}", v) for k, v in vars(thing).items() if k[0] != "_"]
                thing = getattr(thing, "__wrapped__", thing)
                thing = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
                if isinstance(thing, property) or inspect.isfunction(thing) or inspect.isclass(thing):
                    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
                    assert text and not text.startswith(f"{n}("), f"{part.__name__}.{n}"
                    checked += 1
            assert doctest.testmod(part, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0, part.__name__
    assert checked > 300
