"""The examples that come with protofed: found by name where there is no such file, and each is listed and makes sense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import protofed as pf
from protofed.experiment.compare import make_grid
from protofed.experiment.settings import EXAMPLES, General, read_toml
from support.errors import refusal

NAMES = sorted(file.relative_to(EXAMPLES).with_suffix("").as_posix() for file in EXAMPLES.rglob("*.toml"))


@pytest.mark.parametrize("written", ["digits", "digits.toml", "./digits"])
def test_a_name_is_an_example_where_there_is_no_such_file(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_toml(Path(written)) == read_toml(EXAMPLES / "digits.toml")
    (tmp_path / "digits").mkdir()  # a folder is no file of settings
    assert read_toml(Path(written))["data"] == "digits"


def test_a_file_comes_before_an_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").write_text("rounds = 3\n")
    assert read_toml(Path("digits")) == {"rounds": 3}
    assert read_toml(Path("digits.toml"))["rounds"] == 100


@pytest.mark.parametrize("written", ["../digits", "sweeps/../digits", "/digits", "examples/digits", "sweeps", ""])
def test_what_is_no_name_of_an_example_is_none(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pf.ProtofedError):
        read_toml(Path(written))


def test_an_unknown_name_is_said_in_one_line_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(lambda: read_toml(Path("digit")))
    assert line.startswith("unknown settings file or example 'digit'; did you mean 'digits'?")
    assert refusal(lambda: read_toml(Path("mine.toml"))) == "mine.toml: no such settings file"
    assert "not a readable TOML file" in refusal(lambda: read_toml(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_is_and_has_only_keys_that_exist(name):
    file = EXAMPLES / f"{name}.toml"
    text, content = file.read_text(encoding="utf-8"), read_toml(file)
    assert text.startswith("# ")
    after = re.search(r"[Tt]o be read after\W+([a-z0-9-]+)", text)
    base = [after[1]] if after else ["fedapa-csi-sim"] if name.startswith("sweeps/fedapa") else []
    assert set(base) <= set(NAMES)
    method = "server-only" if content.get("labels") == "server" else "fedavg"
    given = {} if "methods" in content else {"method": method}
    grid = make_grid([], over={}, seeds=1, config=[*base, name], given=given)
    assert grid.cells and all(isinstance(cell.general, General) for cell in grid.cells.values())


def test_the_list_of_examples_is_complete():
    page = (Path(__file__).parent.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    table = page.split("## Examples")[1].split("\n## ")[0]
    listed = [n for row in re.findall(r"^\| (`.+?) \|", table, flags=re.M) for n in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == NAMES


def test_an_example_is_a_config_of_python_and_of_the_command_line(call):
    quick = {"rounds": 1, "clients": 3, "engine": "loop", "layout": "contiguous", "threads": 1, "workers": 1}
    result = pf.run("local", config="digits", **quick)
    words = [f"{key}={value}" for key, value in quick.items()]
    code, _, _ = call("run", "local", "--config", "digits", *words, "--out", "r")
    assert code == 0 and pf.run("local", config="r/settings.toml").accuracy == result.accuracy
    assert read_toml(Path("r/settings.toml"))["lr"] == 0.05
