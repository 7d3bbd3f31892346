"""The built wheel in an environment of its own, without the checkout: all files are inside, and the quickstart works."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import protofed as pf
from protofed import methods
from protofed.experiment import reproduce

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(protofed (?!demo).+)$", QUICKSTART, flags=re.M)  # tests/test_demo.py has the demo
SHORT = {  # what makes a command of the quickstart short
    "run": ["rounds=2", "clients=3"],
    "compare": ["rounds=1", "clients=3", "--seeds", "1", "--jobs", "1", "--out", "c"],
}
ONE_AFTER_ANOTHER = """
import json, sys
from protofed.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"{words} ended with {stop.code}")
"""
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is written into the checkout."""
    place = tmp_path_factory.mktemp("build")
    source = shutil.copytree(
        ROOT / "src", place / "source/src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source.parent)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", place, source.parent)
    [built] = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel.

    What protofed needs is taken from the environment of the tests, by a line in a `.pth` file: such a path comes after
    the environment's own, and `.pth` files there (that of a checkout that is installed to be edited) are not read.
    """
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, with_pip=False, symlinks=True)
    pip("--python", place / "bin/python", "install", "--no-deps", "--no-index", wheel)
    own = sysconfig.get_path("purelib", vars={"base": str(place)})
    others = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(own) / "others.pth").write_text("".join(f"{other}\n" for other in others))
    return place / "bin/python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of a person who has no checkout."""
    return tmp_path_factory.mktemp("person")


@pytest.fixture(scope="module")
def run(python: Path, folder: Path) -> Run:
    return lambda *words: ended_well([python.with_name(words[0]), *words[1:]], folder)


def pip(*words: object) -> None:
    ended_well([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], ROOT)


def ended_well(words: list[object], place: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV"))}
    done = subprocess.run(
        list(map(str, words)), cwd=place, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def test_every_file_of_the_package_is_inside(wheel: Path) -> None:
    source = ROOT / "src"
    files = [path for path in (source / "protofed").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    inside = [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(f"protofed-{pf.__version__}.")]
    assert sorted(inside) == sorted(path.relative_to(source).as_posix() for path in files)
    for needed in ("py.typed", "examples/digits.toml", "experiment/presets/fedsap/table1.toml"):
        assert f"protofed/{needed}" in inside


def test_the_wheel_is_what_is_imported_and_its_version_is_the_one_there_is(run: Run, python: Path) -> None:
    code = "import importlib.metadata as m, protofed; print(protofed.__file__, protofed.__version__, m.version('protofed'))"
    file, *versions = run("python", "-c", code).split()
    assert Path(file).is_relative_to(python.parent.parent) and versions == [pf.__version__] * 2
    assert run("protofed", "--version").split() == ["protofed", pf.__version__]


def test_the_version_is_written_once() -> None:
    literal = re.compile(rf"\b{re.escape(pf.__version__)}\b")
    files = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    assert [file.name for file in files if literal.search(file.read_text(encoding="utf-8"))] == ["version.py"]
    assert version("protofed") == pf.__version__


@pytest.mark.soak
def test_the_quickstart_works(run: Run, folder: Path) -> None:
    """Its commands in their order, each as it is written there but for what makes it short; and a report at the end."""
    assert len(COMMANDS) >= 9 and "--config digits" in COMMANDS[0]
    lines = [shlex.split(line, comments=True) for line in COMMANDS]
    lines = [[*words, *SHORT.get(words[1], [])] for words in lines]
    more = [["protofed", "reproduce"], ["protofed", "report", "c"]]
    out = run("python", "-c", ONE_AFTER_ANOTHER, json.dumps([*lines, *more]))  # in one process, which is quicker
    assert all(name in out for name in (*methods.available(), *reproduce.available()))
    assert (folder / "clients.png").stat().st_size > 1000 and (folder / "runs/cosine/summary.json").is_file()
    assert "<script" in (folder / "c/report.html").read_text(encoding="utf-8")
