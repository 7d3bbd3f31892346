"""What the command line loads before it does anything, what the package loads, and what the shell completes."""

import json
import os
import pkgutil
import subprocess
import sys
import typing

import numpy as np
import pytest

import protofed as pf
from protofed import methods
from protofed.cli.options import method_names
from protofed.data.sources import digits_rows

pytestmark = pytest.mark.slow

HEAVY = {"torch", "numpy", "scipy", "pydantic", "sklearn", "matplotlib", "kornia", "transformers", "pandas", "PIL"}
NEEDED = {"torch", "numpy", "pydantic"}  # by every command that does more than print its help
PROBE = """
import json, os, runpy, sys
sys.argv[0] = "protofed"
try:
    runpy.run_module("protofed", run_name="__main__")
except SystemExit as end:
    os.write(2, json.dumps([end.code or 0, sorted(sys.modules)]).encode())
"""


def probed(*words, cwd, **env):
    """What a command prints, and the heavy packages that it loads."""
    environment = {**os.environ, **env}
    command = [sys.executable, "-c", PROBE, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return done.stdout, {name.partition(".")[0] for name in modules} & HEAVY


COMMANDS = (
    "run compare sweep reproduce table confusion report watch figures resume audit bench methods models settings data"
)


@pytest.mark.parametrize("words", ["--help", "--version", *(f"{name} --help" for name in COMMANDS.split())])
def test_help_loads_nothing_heavy(words, tmp_path):
    shown, loaded = probed(*words.split(), cwd=tmp_path)
    assert shown and loaded == set()


RUN = ["rounds=1", "clients=3", "shot=6", "engine=loop", "layout=contiguous", "workers=1", "threads=1", "--out", "r"]


@pytest.mark.parametrize(
    "words", [["methods"], ["settings"], ["data"], ["run", "fedavg", *RUN], ["run", "fedproto", "data=x.npz", *RUN]]
)
def test_a_command_loads_what_it_needs_alone(words, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", x_train=rng.normal(size=(200, 4)), y_train=np.arange(200) % 10)
    assert probed(*words, cwd=tmp_path)[1] == NEEDED


def test_the_package_loads_a_name_when_it_is_used():
    code = (
        "import sys, protofed as pf\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert pf.ProtofedError and set(pf.__all__) <= set(dir(pf))\n"
        "assert pf.schedules is sys.modules['protofed.schedules'] and 'torch' not in sys.modules\n"
        "from protofed import methods, run\n"
        "assert methods.available() and callable(run) and run is pf.run is pf.experiment.run\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    star: dict[str, typing.Any] = {}
    exec("from protofed import *", star)
    assert set(pf.__all__) == star.keys() - {"__builtins__"}
    assert callable(pf.compare) and callable(pf.sweep) and callable(pf.resume), (
        "functions, not the modules of that name"
    )
    with pytest.raises(AttributeError, match="'protofed' has no attribute 'nothing'"):
        _ = pf.nothing


@pytest.mark.soak
def test_every_room_can_be_the_first_to_be_loaded():
    """No room relies on another having been loaded before: each is loaded by a fork of a process that has torch alone."""
    names = [module.name for module in pkgutil.iter_modules(pf.__path__, "protofed.") if "__main__" not in module.name]
    code = (
        "import importlib, os, sys, traceback, torch, pydantic, numpy\n"
        "for name in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except BaseException:\n"
        "            os.write(1, f'{name}: {traceback.format_exc()}'.encode())\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True)
    assert len(names) > 15 and done.stdout == ""


def test_digits_are_scikit_learns(monkeypatch):
    from sklearn.datasets import load_digits

    there = load_digits()
    rows = digits_rows()
    assert rows.dtype == np.float64 and np.array_equal(rows[:, :-1].reshape(-1, 8, 8), there.images)
    assert np.array_equal(rows[:, -1], there.target)
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: False)  # an installation that has them elsewhere
    assert np.array_equal(digits_rows(), rows)


def completed(shell, line, cwd):
    """What the shell is offered for the last word of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_TYPER_COMPLETE_ARGS": line}
    asked = {"_PROTOFED_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    shown, loaded = probed(cwd=cwd, **asked, **words)
    assert loaded == set()
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes(shell, tmp_path):
    assert "sweep" in completed(shell, "protofed sw", tmp_path) and "run" not in completed(
        shell, "protofed sw", tmp_path
    )
    assert "--columns" in completed(shell, "protofed compare --co", tmp_path)
    for line in ("protofed run fedp", "protofed compare fedavg fedp"):
        shown = completed(shell, line, tmp_path)
        assert "fedproto" in shown and "fedprox" in shown and "fedavg" not in shown


def test_method_names_are_those_of_the_registry():
    ours = [name for name in methods.available() if methods.registry[name].__module__.startswith("protofed.")]
    assert method_names() == ours and method_names("fedpro") == ["fedproc", "fedproto", "fedprox"]
