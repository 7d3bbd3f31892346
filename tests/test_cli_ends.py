"""How a command ends that does not come to its end: one line, an exit code, and no traceback."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest

from protofed.cli.options import out_folder
from protofed.errors import Stopped

pytestmark = pytest.mark.slow

RUN = import_module("protofed.experiment.run")  # `protofed.experiment.run` is the function
KEYS = ["clients=3", "shot=6", "way=2", "checkpoint_every=1", "snapshots=0"]
KEYS += ["engine=loop", "inner=loop", "layout=contiguous", "convolution=grouped", "workers=1", "threads=1"]
LONG = [*KEYS, "rounds=100000"]


def started(*words, cwd, prepare=lambda: None, **pipes):
    def begin():
        # a shell that starts tests in the background has them ignore Ctrl-C, and their children would too
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prepare()

    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, **pipes}
    command = [sys.executable, "-m", "protofed", *words]
    return subprocess.Popen(command, cwd=cwd, preexec_fn=begin, start_new_session=True, **pipes)


def interrupted(process, *files, number=signal.SIGINT):
    """Its exit code and what it says when a signal reaches it and its children, once these files are there."""
    deadline = time.monotonic() + 120
    try:
        while not all(file.is_file() for file in files):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said


def test_ctrl_c_in_a_run_says_how_to_go_on(tmp_path):
    process = started("run", "fedproto", *LONG, "--out", "my run", cwd=tmp_path)
    code, said = interrupted(process, tmp_path / "my run/confusion.json")
    assert code == 130 and said.count("\n") == 1 and "protofed resume" in said and "my run" in said


def test_ctrl_c_in_a_comparison_says_how_to_go_on(tmp_path):
    process = started("compare", "fedproto", *LONG, "--seeds", "1", "--jobs", "2", "--out", "c", cwd=tmp_path)
    files = [tmp_path / f"c/{name}-seed1234/confusion.json" for name in ("local", "fedproto")]
    code, said = interrupted(process, *files)
    assert code == 130 and "Traceback" not in said and "protofed resume c" in said.splitlines()[-1]


def last_rounds(folder):
    """The rounds of the newest checkpoint and of the last row."""
    saved = sorted((folder / "checkpoint").glob("round-*"))[-1].name
    return int(saved.removeprefix("round-")), len((folder / "rounds.jsonl").read_text().splitlines())


@pytest.mark.parametrize("engine", [[], ["engine=workers", "workers=2"]])
def test_sigterm_in_a_run_finishes_the_round(engine, tmp_path):
    keys = [*LONG, "checkpoint_every=100000", *engine]
    process = started("run", "fedproto", *keys, "--out", "my run", cwd=tmp_path)
    code, said = interrupted(process, tmp_path / "my run/rounds.jsonl", number=signal.SIGTERM)
    assert code == 143 and "protofed resume 'my run'" in said.splitlines()[-1] and "dropped" not in said
    saved, written = last_rounds(tmp_path / "my run")
    assert saved == written and f"stopped after round {saved}" in said


def test_sigterm_in_a_comparison_finishes_the_rounds(tmp_path):
    keys = [*LONG, "checkpoint_every=100000"]
    process = started("compare", "fedproto", *keys, "--seeds", "1", "--jobs", "2", "--out", "c", cwd=tmp_path)
    files = [tmp_path / f"c/{name}-seed1234/rounds.jsonl" for name in ("local", "fedproto")]
    code, said = interrupted(process, *files, number=signal.SIGTERM)
    assert code == 143 and "Traceback" not in said and "protofed resume c" in said.splitlines()[-1]
    for file in files:
        saved, written = last_rounds(file.parent)
        assert saved == written
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing of it is left


def ending(monkeypatch, error, made=True):
    """A run that makes its folder, or does not yet, and ends with an error."""

    def run(chosen, *, out, watch):
        if made:
            out.mkdir(parents=True, exist_ok=True)
        raise error

    monkeypatch.setattr(RUN, "run", run)


def test_ctrl_c_before_there_is_a_folder(call, monkeypatch):
    ending(monkeypatch, KeyboardInterrupt(), made=False)
    assert call("run", "local", *KEYS, "--out", "r") == (130, "", "stopped\n")


def test_the_folder_that_was_chosen_is_named(call, monkeypatch):
    ending(monkeypatch, KeyboardInterrupt())
    code, _, said = call("run", "local", *KEYS)
    assert code == 130 and "protofed resume runs/" in said and "-local-digits" in said


def test_a_name_with_a_space_is_quoted(call, monkeypatch):
    ending(monkeypatch, KeyboardInterrupt())
    assert "`protofed resume 'my run'`" in call("run", "local", *KEYS, "--out", "my run")[2]


@pytest.mark.parametrize("code", [130, 143])
def test_a_run_that_was_stopped_says_so_itself(code, call, monkeypatch):
    ending(monkeypatch, Stopped("stopped after\nround 3 [of 9]", code))
    assert call("run", "local", *KEYS, "--out", "r") == (code, "", "stopped after round 3 [of 9]\n")


REFUSED = {
    "a full disk": (OSError(errno.ENOSPC, "No space left on device"), "r: No space left on device"),
    "a read-only disk": (OSError(errno.EROFS, "Read-only file system", "r/x"), "r/x: Read-only file system"),
    "a file of another": (PermissionError(errno.EACCES, "Permission denied", "r/x"), "r/x: Permission denied"),
    "memory": (MemoryError("Unable to allocate 1 TiB"), "the memory is not enough (Unable to allocate 1 TiB)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_system_refuses_is_one_line(case, call, monkeypatch):
    error, said = REFUSED[case]
    ending(monkeypatch, error)
    line = f"error: {said}; `protofed resume r` goes on from the last checkpoint\n"
    assert call("run", "local", *KEYS, "--out", "r") == (2, "", line)


def test_without_a_folder_there_is_nothing_to_resume(call, monkeypatch):
    ending(monkeypatch, OSError(errno.ENOSPC, "No space left on device"), made=False)
    assert call("run", "local", *KEYS, "--out", "r") == (2, "", "error: r: No space left on device\n")


def test_an_error_that_the_system_did_not_give_is_a_bug(call, monkeypatch):
    ending(monkeypatch, OSError("who knows"))
    with pytest.raises(OSError, match="who knows"):
        call("run", "local", *KEYS, "--out", "r")


def test_files_that_may_not_grow(tmp_path):
    """The system's own refusal, in a process of its own: no file may be larger than 4 kB, and a checkpoint is."""
    refuse = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
    process = started("run", "fedavg", *KEYS, "rounds=2", "--out", "r", cwd=tmp_path, prepare=refuse)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and said.count("\n") == 1 and said.startswith("error: "), said
    assert "File too large" in said and str(tmp_path.name) not in said and "r" in said


def test_nobody_reads_what_is_printed(tmp_path):
    process = started("methods", cwd=tmp_path, stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 1


def test_a_setting_written_as_an_option(call, monkeypatch):
    code, _, said = call("run", "fedavg", "--nonsense", "3")
    assert code == 2 and "No such option" in said and "--nonsense" in said
    told = {"--rounds": "a setting: rounds=3"}
    monkeypatch.setattr("protofed.experiment.settings.hint_for_option", told.get, raising=False)
    code, _, said = call("run", "fedavg", "--rounds", "3")
    assert code == 2 and "No such option" in said and "--rounds" in said and "a setting: rounds=3" in said
    assert "a setting" not in call("run", "fedavg", "--nonsense", "3")[2]


def test_other_mistakes_of_usage_have_exit_code_2(call):
    for words in (["run"], ["runn"], ["compare", "--jobs", "x"], ["table", "c", "--format", "word"]):
        code, out, said = call(*words)
        assert code == 2 and out == "" and "Usage: " in said and "Traceback" not in said, words


def test_a_folder_that_is_there_is_never_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = [out_folder(None, "fedavg-digits") for _ in range(20)]  # several of them in one second
    assert len(set(chosen)) == 20 and all(path.is_dir() for path in chosen)
    assert all(path.parent.name == "runs" and "-fedavg-digits" in path.name for path in chosen)
    assert out_folder(chosen[0], "x") == chosen[0]
