"""Registries that are after a test what they were before it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import protofed.experiment.settings  # with it come all rooms that have a registry  # noqa: F401
from protofed.registry import Registry

ALL: list[Registry] = [thing for thing in gc.get_objects() if type(thing) is Registry]


@contextlib.contextmanager
def registries_restored() -> Iterator[None]:
    """Whatever is registered inside is forgotten on leaving."""
    with contextlib.ExitStack() as stack:
        for registry in ALL:
            stack.enter_context(registry.temporarily())
        yield


@contextlib.contextmanager
def registries_unchanged() -> Iterator[None]:
    """What is registered, replaced or removed inside, and is still so on leaving, is an error; it is undone all the same."""
    with registries_restored():
        before = _entries()
        yield
        after = _entries()
    changed = [key for key in before | after if before.get(key) is not after.get(key)]
    assert not changed, f"changed in a registry: {', '.join(changed)} (use the fixture own_names)"


def _entries() -> dict[str, type]:
    return {f"{registry.kind} {name!r}": entry for registry in ALL for name, entry in registry._entries.items()}
