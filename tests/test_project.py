"""What the project promises around its code: stable names, one version, files that other programs read."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import protofed as pf
from protofed.cli import app
from protofed.federation import checkpoint
from protofed.results import rows
from protofed.wire import frame

ROOT = Path(__file__).parent.parent
STABLE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
DESIGN = {  # what users rely on
    "PrototypeBank": {"from_embeddings", "means", "counts", "known", "num_classes", "dim"},
    "schedules": {"ramp"},
    "evaluate": {"feature_space_separation"},
    "methods": {"available"},
    "models": {"available"},
    "data": {"available"},
}


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- stable names -----------------------------------------------------------------------------------------------------
ROWS = {
    names(name)[0].removeprefix("protofed."): names(of_it)
    for name, of_it in re.findall(r"^\| (`protofed\.\w+`) \| (.+) \|$", STABLE, flags=re.M)
}


@pytest.mark.parametrize("name", ROWS)
def test_a_stable_name_exists_and_so_does_what_is_stable_of_it(name):
    thing = getattr(pf, name)
    assert name in pf.__all__
    fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for part in ROWS[name]:
        assert hasattr(thing, part) or part in fields, f"{name}.{part}"


def test_the_names_of_the_design_are_among_the_stable_ones():
    assert {"run", "compare", "Result", "losses", "aggregate", *DESIGN} <= set(ROWS)
    for name, parts in DESIGN.items():
        assert parts <= set(ROWS[name])


def test_the_commands_are_those_there_are():
    listed = names(STABLE.split("<!-- commands -->")[1].split(", the options")[0])
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_the_numbers_of_formats_are_those_of_today():
    assert re.search(r"checkpoint has a format\s+number, which is (\d+)", STABLE)[1] == str(checkpoint.FORMAT)  # type: ignore[index]
    assert re.search(r"the run folder has one, which is (\d+)", STABLE)[1] == str(rows.FORMAT)  # type: ignore[index]
    assert re.search(r"wire format has a number, which is (\d+)", STABLE)[1] == str(frame.VERSION)  # type: ignore[index]


# --- the version ------------------------------------------------------------------------------------------------------
def test_pages_that_name_the_version_name_this_one():
    found = []
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        found += re.findall(r"[Vv]ersion:? (\d+\.\d+\.\d+)", page.read_text(encoding="utf-8"))
    assert found and set(found) == {pf.__version__}


def test_the_version_is_read_without_the_rest():
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('v', sys.argv[1]); m = u.module_from_spec(s);"
    )
    code += "s.loader.exec_module(m); print(m.__version__, 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, str(ROOT / "src" / "protofed" / "version.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [pf.__version__, "False"]


# --- files that others read -------------------------------------------------------------------------------------------
def test_the_citation_file_has_what_the_format_demands():
    """Citation File Format 1.2.0: these four keys are required, and no key may be unknown."""
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert content["cff-version"] == "1.2.0" and content["authors"] == [{"name": "The protofed authors"}]
    assert {"cff-version", "message", "title", "authors"} <= content.keys()
    known = {
        "abstract",
        "authors",
        "cff-version",
        "commit",
        "contact",
        "date-released",
        "doi",
        "identifiers",
        "keywords",
    }
    known |= {"license", "license-url", "message", "preferred-citation", "references", "repository"}
    known |= {"repository-artifact", "repository-code", "title", "type", "url", "version"}
    assert content.keys() <= known
    assert content["type"] in ("software", "dataset") and content["license"] == "MIT"
    assert len(content["keywords"]) == len(set(content["keywords"]))


def test_hooks_before_a_commit_run_the_tools_of_make_lint():
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = {hook["id"]: hook["entry"] for repo in content["repos"] for hook in repo["hooks"]}
    assert list(hooks) == ["format", "lint", "types"]
    made = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    for entry in hooks.values():
        tool = entry.removeprefix(".venv/bin/").split(" --")[0]
        assert entry.startswith(".venv/bin/") and f"$(BIN)/{tool}" in made


# --- make -------------------------------------------------------------------------------------------------------------
def would_run(target: str, venv: Path, *done: str) -> str:
    """What `make target` would do where these marks of the environment are there."""
    venv.mkdir()
    for mark in ("ready", *done):
        (venv / f".{mark}").touch()
    words = ["make", "--dry-run", "--no-print-directory", f"VENV={venv}", target]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "needs"),
    [
        ("run", set()),
        ("check", {"dev"}),
        ("lint", {"dev"}),
        ("docs", {"docs"}),
        ("test", {"dev", "docs", "chromium"}),
    ],
)
def test_a_target_of_make_installs_what_it_needs_and_no_more(target, needs, tmp_path):
    text = would_run(target, tmp_path / "v")
    found = {need for need in ("dev", "docs", "chromium") if f"[{need}" in text or f"install -y -qq {need}" in text}
    assert found == needs
    assert (
        "-m venv" not in text
        and "-m venv"
        in subprocess.run(
            ["make", "--dry-run", f"VENV={tmp_path / 'none'}", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


def test_make_check_leaves_out_what_is_marked_and_make_test_what_takes_long(tmp_path):
    quick, usual, soak = (
        would_run(target, tmp_path / target, "tools", "docs", "browser") for target in ("check", "test", "soak")
    )
    assert '-m "not slow and not browser and not soak"' in quick and "mypy" in quick and "ruff format --check" in quick
    assert "not slow" not in usual and '-m "not soak"' in usual and "mkdocs build --strict" in usual
    assert soak.rstrip().endswith("-m soak")  # with the tests of `make test` these are all
    assert "pip install" not in quick + usual + soak


def test_ci_runs_all_tests():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").rstrip().endswith("\nmake test\nmake soak")
