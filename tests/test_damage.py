"""A run folder that was damaged, shared or cut off gives the same bits or one clear line, never something else."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import protofed as pf
from protofed import disk
from protofed.errors import ProtofedError, Stopped
from protofed.federation import checkpoint
from protofed.federation.local import ClientState
from protofed.results.folder import make_folder, reserve
from protofed.results.lock import FolderLock
from protofed.results.read import read_finished
from support.small import SMALL, blobs
from test_resume import checkpoint_of, comparable, stop_after

pytestmark = pytest.mark.slow

KEYS = {**SMALL, "rounds": 8, "checkpoint_every": 2, "participation": 0.8, "snapshots": 8}


def everything(folder):
    """All that a run left, but for the clock's readings."""
    pictures = {file.name: file.read_bytes() for file in sorted((folder / "snapshots").iterdir())}
    return {**comparable(folder), "confusions": (folder / "confusion.json").read_bytes(), "snapshots": pictures}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in round 5 and has checkpoints of rounds 2 and 4; another one; and the whole run."""
    root, data = tmp_path_factory.mktemp("damage"), blobs()
    torch.set_num_threads(1)
    pf.run("fedsap", out=root / "whole", data=data, **KEYS)
    for name, seed in (("cut", 1234), ("foreign", 7)):
        with pytest.raises(KeyboardInterrupt):
            pf.run("fedsap", out=root / name, data=data, watch=stop_after(5), **{**KEYS, "seed": seed})
    return root, data, everything(root / "whole")


FILES = [
    *("run.json", "settings.toml", "rounds.jsonl", "metrics.jsonl", "clients.jsonl", "confusion.json", ".lock"),
    *("snapshots/round-000001.npz", "snapshots/round-000005.npz"),
    *(
        f"checkpoint/round-000004/{n}"
        for n in ("state.json", "server.safetensors", "clients.safetensors", "manifest.json")
    ),
    *(f"checkpoint/round-000002/{n}" for n in ("server.safetensors", "manifest.json")),
]


def truncate(file, foreign):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def delete(file, foreign):
    file.unlink()


def zero(file, foreign):
    file.write_bytes(bytes(file.stat().st_size))


def flip(file, foreign):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def swap(file, foreign):
    shutil.copy(foreign, file)


@pytest.mark.parametrize("damage", [truncate, delete, zero, flip, swap])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_the_same_bits_or_one_line(name, damage, stopped, tmp_path):
    root, data, whole = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    damage(folder / name, root / "foreign" / name)
    try:
        pf.resume(folder, data=data)
    except ProtofedError as error:
        text = str(error)
        assert "\n" not in text and str(folder) in text and len(text) < 600
    else:
        assert everything(folder) == whole


@pytest.mark.parametrize("name", ["server.safetensors", "clients.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, delete, flip])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(name, damage, stopped, tmp_path, caplog):
    root, data, whole = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    damage(checkpoint_of(folder) / name, None)
    pf.resume(folder, data=data)
    assert everything(folder) == whole
    assert "going on from the checkpoint before, of round 2" in caplog.text


def test_two_damaged_checkpoints_are_one_line(stopped, tmp_path):
    root, data, _ = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    for place in (folder / "checkpoint").iterdir():
        flip(place / "server.safetensors", None)
    with pytest.raises(ProtofedError, match="no whole checkpoint to go on from"):
        pf.resume(folder, data=data)


@pytest.mark.parametrize("lost", range(1, 6))
def test_rows_lost_from_the_end(lost, stopped, tmp_path):
    """A power cut may take rows that were never on the disk: then an older checkpoint serves, or none."""
    root, data, whole = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    for name in ("rounds.jsonl", "metrics.jsonl", "clients.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join(lines[:-lost]))
    if lost <= 3:  # round 2's checkpoint counts two rows of each
        pf.resume(folder, data=data)
        assert everything(folder) == whole
    else:
        with pytest.raises(ProtofedError, match="rows are missing or changed"):
            pf.resume(folder, data=data)


def test_files_that_were_swapped_with_each_other(stopped, tmp_path):
    root, data, _ = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    (folder / "rounds.jsonl").rename(folder / "x")
    (folder / "metrics.jsonl").rename(folder / "rounds.jsonl")
    (folder / "x").rename(folder / "metrics.jsonl")
    with pytest.raises(ProtofedError, match="rows are missing or changed"):
        pf.resume(folder, data=data)


@pytest.mark.parametrize("damage", [truncate, zero, flip])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_a_damaged_finished_run_is_noticed_and_made_again(name, damage, stopped, tmp_path, caplog):
    root, data, whole = stopped
    folder = shutil.copytree(root / "whole", tmp_path / "whole")
    damage(folder / name, None)
    with pytest.raises(ProtofedError):
        read_finished(folder)
    if name == "summary.json":
        pf.resume(folder, data=data)
        assert everything(folder) == whole and "the run is resumed" in caplog.text
    else:  # what the last two checkpoints count is not there any more
        with pytest.raises(ProtofedError):
            pf.resume(folder, data=data)


def test_a_finished_run_needs_nothing_to_be_resumed(stopped, tmp_path):
    root, data, _ = stopped
    folder = shutil.copytree(root / "whole", tmp_path / "whole")
    shutil.rmtree(folder / "checkpoint")
    assert pf.resume(folder, data=data).summary["rounds"] == 8


# --- one writer -------------------------------------------------------------------------------------------------------
def forked(work):
    """Run something in a child process; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except ProtofedError as error:
            os.write(2, f"{error}\n".encode())
            code = 2
        finally:
            os._exit(code)
    return child


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_process_is_told_who_writes(stopped, tmp_path):
    root, data, whole = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    ready, go = os.pipe(), os.pipe()

    def wait(record, rounds):
        if record.round == 5:
            os.write(ready[1], b"x")
            os.read(go[0], 1)

    child = forked(lambda: pf.resume(folder, data=data, watch=wait))
    os.read(ready[0], 1)
    with pytest.raises(ProtofedError, match=f"process {child} on .* has been writing to this folder since"):
        pf.resume(folder, data=data)
    os.write(go[1], b"x")
    assert code_of(child) == 0
    assert everything(folder) == whole


def test_two_resumes_at_once_never_both_write(stopped, tmp_path):
    root, data, whole = stopped
    folder = shutil.copytree(root / "cut", tmp_path / "cut")
    children = [forked(lambda: pf.resume(folder, data=data)) for _ in range(4)]
    codes = [code_of(child) for child in children]
    assert 0 in codes and set(codes) <= {0, 2}
    assert everything(folder) == whole


def test_a_lock_within_one_process_and_after_its_end(tmp_path):
    first = FolderLock(tmp_path).acquire()
    with pytest.raises(ProtofedError, match=f"process {os.getpid()} "):
        FolderLock(tmp_path).acquire()
    child = forked(lambda: FolderLock(tmp_path).acquire())
    assert code_of(child) == 2
    first.release()
    with FolderLock(tmp_path):
        pass
    child = forked(lambda: (FolderLock(tmp_path).acquire(), os.kill(os.getpid(), signal.SIGKILL)))
    assert code_of(child) == -9
    FolderLock(tmp_path).acquire().release()  # the lock file of a dead process locks nothing


def test_folders_that_are_asked_for_at_once_are_different(tmp_path):
    children = [forked(lambda: reserve(tmp_path / "runs" / "now")) for _ in range(8)]
    assert [code_of(child) for child in children] == [0] * 8
    assert len(list((tmp_path / "runs").iterdir())) == 8
    children = [forked(lambda: make_folder(tmp_path / "one", {"comparison.json": b"{}"})) for _ in range(8)]
    assert sorted(code_of(child) for child in children) == [0] + [2] * 7
    assert {file.name for file in tmp_path.iterdir()} == {"runs", "one"}


def test_a_folder_that_is_no_run_is_not_called_one(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(ProtofedError, match="exists already and is not a run folder"):
        pf.run("local", out=tmp_path / "photos", data=blobs(), **SMALL)
    with pytest.raises(ProtofedError, match="shot=1000"):
        pf.run("local", out=tmp_path / "none", data=blobs(), **{**SMALL, "shot": 1000})
    assert not (tmp_path / "none").exists()


# --- kills ------------------------------------------------------------------------------------------------------------
def killed_at(moment, work):
    """A child that is killed at its n-th wait for the disk (a number), or after some seconds."""

    def dies():
        if isinstance(moment, int):
            waits, sync = iter(range(10_000)), os.fsync

            def fsync(handle):
                if next(waits) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                sync(handle)

            os.fsync = fsync
        work()

    child = forked(dies)
    if not isinstance(moment, int):
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    return code_of(child)


MOMENTS = [*range(0, 60, 2), *(round(random.Random(k).uniform(0.05, 1.2), 3) for k in range(20))]


@pytest.mark.parametrize(
    "moments", [MOMENTS[::5], *(pytest.param(MOMENTS[k::5], marks=pytest.mark.soak) for k in range(1, 5))]
)
def test_kill_9_at_fifty_moments_is_bit_equal(moments, stopped, tmp_path):
    _, data, whole = stopped
    for moment in moments:
        folder = tmp_path / f"run-{moment}"
        if killed_at(moment, lambda place=folder: pf.run("fedsap", out=place, data=data, **KEYS)) == 0:
            continue  # it had ended before
        if not folder.exists():
            continue  # nothing was there yet, and nothing is left
        again = killed_at(moment, lambda place=folder: pf.resume(place, data=data))
        assert again in (0, -9)
        pf.resume(folder, data=data)
        assert everything(folder) == whole, moment
        assert not list(folder.rglob("*.tmp"))


# --- signals ----------------------------------------------------------------------------------------------------------
def test_sigterm_finishes_the_round_and_writes_a_checkpoint(stopped, tmp_path):
    _, data, whole = stopped

    def ask(record, rounds):
        if record.round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"stopped after round 4; `protofed resume .*` goes on after round 4") as stop:
        pf.run("fedsap", out=tmp_path / "run", data=data, watch=ask, **KEYS)
    assert stop.value.code == 143 and checkpoint_of(tmp_path / "run").name == "round-000004"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    pf.resume(tmp_path / "run", data=data)
    assert everything(tmp_path / "run") == whole


def test_sigterm_between_checkpoints_writes_one_more(stopped, tmp_path):
    _, data, whole = stopped

    def ask(record, rounds):
        if record.round == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="after round 5"):
        pf.run("fedsap", out=tmp_path / "run", data=data, watch=ask, **KEYS)
    assert checkpoint_of(tmp_path / "run").name == "round-000005"
    pf.resume(tmp_path / "run", data=data)
    assert everything(tmp_path / "run") == whole


def test_ctrl_c_says_how_to_go_on(tmp_path):
    with pytest.raises(Stopped, match=r"stopped; `protofed resume .*run` goes on after round 2") as stop:
        pf.run("fedsap", out=tmp_path / "run", data=blobs(), watch=stop_after(3), **KEYS)
    assert stop.value.code == 130
    with pytest.raises(Stopped, match="goes on from the first round"):
        pf.run("fedsap", out=tmp_path / "early", data=blobs(), watch=stop_after(1), **KEYS)
    with pytest.raises(KeyboardInterrupt) as plain:
        pf.run("fedsap", data=blobs(), watch=stop_after(1), **KEYS)
    assert not isinstance(plain.value, Stopped)


# --- pieces -----------------------------------------------------------------------------------------------------------
def test_a_sealed_object_notices_every_changed_byte(tmp_path):
    text = disk.sealed({"round": 3, "name": "fedsap", "list": [1, 2.5, None]})
    assert disk.opened(text, tmp_path) == {"round": 3, "name": "fedsap", "list": [1, 2.5, None]}
    harmless = 0
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        try:
            assert disk.opened(bytes(changed), tmp_path) == disk.opened(text, tmp_path)
            harmless += 1  # a blank between two words of JSON
        except ProtofedError:
            pass
    assert harmless < len(text) / 4


def test_states_are_written_one_after_another(tmp_path):
    """Writing takes little memory beside the states; one tensor may stand in several of them."""
    shared = torch.randn(1000, 1000)
    states = {c: ClientState({"w": torch.randn(1000, 1000) if c else shared, "v": shared}) for c in range(40)}

    def peak():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

    def write():
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        checkpoint.write_states(tmp_path / "states.safetensors", states)
        assert peak() - before < 30, peak() - before  # MiB, of 320 that are written

    assert code_of(forked(write)) == 0
    stored = checkpoint.StoredStates(tmp_path / "states.safetensors")
    assert list(stored) == list(range(40))
    for client, state in stored.items():
        for name, value in states[client].weights.items():
            assert torch.equal(state.weights[name], value)


def test_a_full_disk_is_one_line(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProtofedError, match=r"cannot be written \(No space left on device\); make space and resume"):
        disk.write_atomically(tmp_path / "x", b"content")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProtofedError, match="No space left"):
        pf.run("local", out=tmp_path / "run", data=blobs(), **SMALL)
    assert not list(tmp_path.iterdir())


def test_summary_and_rows_hold_the_format_number(stopped):
    root, _, _ = stopped
    assert json.loads((root / "whole" / "summary.json").read_text())["format"] == 2
    assert json.loads((root / "whole" / "run.json").read_text())["format"] == 2
    newer = json.loads((root / "cut" / "run.json").read_text()) | {"format": 3}
    newer.pop("digest")
    folder = shutil.copytree(root / "cut", root / "newer")
    (folder / "run.json").write_bytes(disk.sealed(newer))
    with pytest.raises(ProtofedError, match="run folder format 3"):
        pf.resume(folder, data=blobs())
