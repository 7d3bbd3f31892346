"""The rooms of the house: which module may import which, as the table in docs/architecture.md says, and no cycles.

Imports are read from the source, those inside functions too; those that only a type checker sees do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "protofed"
TOP = {"", "__main__"}  # the package itself and `python -m protofed`: they import what they offer

# Rooms of the table that are not there yet, and imports that are still to go: both sets are to be empty.
COMING = {"grammar"}
PENDING: set[str] = set()
PENDING_CYCLES: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Import:
    module: str  # who imports, without the leading `protofed.`
    target: str  # the module that is imported
    line: int
    local: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.module or 'protofed'} line {self.line}: imports {self.target or 'protofed'}"


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def statements(node: ast.AST, local: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from statements(other, local)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child, local
        else:
            yield from statements(child, local or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def read_imports(module: str, text: str, package: bool) -> Iterator[Import]:
    """What one module imports of protofed. `from . import x` is the module x where there is one, else the package."""
    here = ["protofed", *module.split(".")] if module else ["protofed"]
    folder = here if package else here[:-1]
    for statement, local in statements(ast.parse(text)):
        if isinstance(statement, ast.Import):
            names = [name.name.split(".") for name in statement.names]
            targets = [name for name in names if name[0] == "protofed"]
        else:
            base = folder[: len(folder) - statement.level + 1] if statement.level else []
            base = [*base, *(statement.module.split(".") if statement.module else [])]
            if base[:1] != ["protofed"]:
                continue
            targets = [
                [*base, name.name] if ".".join([*base[1:], name.name]) in MODULES else base for name in statement.names
            ]
        for target in targets:
            yield Import(module, ".".join(target[1:]), statement.lineno, local)


def all_imports() -> list[Import]:
    found = []
    for module, path in MODULES.items():
        found += read_imports(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")
    return found


IMPORTS = all_imports()


def room_of(module: str) -> str:
    return module.partition(".")[0]


def table() -> dict[str, set[str]]:
    """By room, the rooms and modules it may import, from the table under "The rooms" in docs/architecture.md.

    "all above" is every room of the lines above.
    """
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The rooms")[1].split("\n## ")[0]
    allowed: dict[str, set[str]] = {}
    for line in re.findall(r"^\| (`.*) \|$", section, flags=re.M):
        room, _, may = re.split(r"\s\|\s", line)
        above = set(allowed)
        rooms = [name.strip("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", room)]
        may, _, but = may.partition(" but ")
        names = {name.strip("/") for name in re.findall(r"`([^`]+)`", may)}
        names |= above if "all above" in may else set()
        names -= {name.strip("/") for name in re.findall(r"`([^`]+)`", but)}
        for name in rooms:
            assert name not in allowed, f"{name} is in the table twice"
            allowed[name] = names
    return allowed


ALLOWED = table()


def is_allowed(entry: Import) -> bool:
    room, target = room_of(entry.module), entry.target
    if room in TOP or room == room_of(target):
        return True
    parts = target.split(".")
    return any(".".join(parts[:n]) in ALLOWED[room] for n in range(1, len(parts) + 1))


# --- the tests --------------------------------------------------------------------------------------------------------
def test_every_module_has_a_room_and_every_room_is_there():
    rooms = {room_of(module) for module in MODULES} - TOP
    assert rooms <= set(ALLOWED), "write the room into docs/architecture.md"
    assert set(ALLOWED) - rooms <= COMING
    known = set(ALLOWED) | set(MODULES)
    assert {name for names in ALLOWED.values() for name in names} <= known


def test_imports_keep_to_the_table():
    wrong: dict[str, list[str]] = {}
    for entry in IMPORTS:
        if not is_allowed(entry):
            pair = f"{room_of(entry.module)} -> {room_of(entry.target) or 'protofed'}"
            wrong.setdefault(pair, []).append(str(entry))
    new = [line for pair, lines in wrong.items() if pair not in PENDING for line in lines]
    assert not new, "\n".join(new)
    assert wrong.keys() >= PENDING, f"no longer pending: {PENDING - wrong.keys()}"


@pytest.mark.parametrize("room", ["bank", "losses", "aggregate", "schedules", "geometry", "wire", "pieces"])
def test_the_mathematics_and_the_wire_need_nothing_but_each_other(room):
    """Stated here as well, whatever the table becomes."""
    pure = {"bank", "losses", "aggregate", "schedules", "geometry", "wire", "errors", "pieces"}
    assert ALLOWED[room] <= pure


def test_experiments_do_not_know_reports_nor_the_command_line():
    assert not ALLOWED["experiment"] & {"report", "cli", "bench"}
    assert not ALLOWED["federation"] & {"experiment", "report", "results", "cli", "bench"}
    assert not ALLOWED["methods"] & {"data", "models", "evaluate", "federation"}
    assert "models.base" in ALLOWED["methods"], "the type of a model's output, and no more"


def test_no_module_cycles():
    """At import time: a module that imports itself by a detour works only by luck of the order."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for entry in IMPORTS:
        if not entry.local and entry.target != entry.module and (entry.module, entry.target) not in PENDING_CYCLES:
            graph[entry.module].add(entry.target)
    cyclic = {module or "protofed" for module in graph if module in reached(graph, module)}
    assert not cyclic, sorted(cyclic)


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph[module]
    return seen


# --- of the test itself -----------------------------------------------------------------------------------------------
SAMPLE = """
from typing import TYPE_CHECKING
import protofed.wire
from ..bank import PrototypeBank
from . import base, nothing
if TYPE_CHECKING:
    from ..report import Row
def late():
    from ..cli import app
"""


def test_imports_are_read_as_python_reads_them():
    found = [(e.target, e.local) for e in read_imports("methods.mine", SAMPLE, package=False)]
    assert found == [("wire", False), ("bank", False), ("methods.base", False), ("methods", False), ("cli", True)]
    assert [e.target for e in read_imports("methods", "from .base import Method", package=True)] == ["methods.base"]
    assert not is_allowed(Import("methods.mine", "cli", 1, True))
    assert is_allowed(Import("methods.mine", "models.base", 1, True))
    assert not is_allowed(Import("methods.mine", "models.resnet", 1, True))


def test_a_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert {module for module in graph if module in reached(graph, module)} == {"b", "c"}


def test_the_real_imports_are_seen():
    pairs = {(room_of(e.module), room_of(e.target)) for e in IMPORTS}
    assert {("losses", "bank"), ("federation", "wire"), ("cli", "bench")} <= pairs
    assert len(IMPORTS) > 300
