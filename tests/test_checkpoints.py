"""Checkpoints that are written while the next round trains, and hold links to what has not changed."""

import json
import shutil
import threading

import pytest
import torch

import protofed as pf
from protofed import disk
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import checkpoint
from protofed.federation.checkpoint import CLIENTS, Checkpoints
from support.small import SMALL, blobs
from test_resume import comparable

KEYS = {**SMALL, "clients": 8, "rounds": 9, "participation": 0.25}
ENGINES = {
    "loop": {},
    "stack": {"engine": "stack"},
    "workers": {"engine": "workers", "inner": "loop", "workers": 2},
}


def federation_of(method="fedproto", **more):
    return build(resolve(method, {"data": blobs(), **KEYS, **more}))[1]


def copied(states):
    """An independent copy of what clients keep, as numbers."""
    return {
        client: {
            **{name: value.clone() for name, value in state.weights.items()},
            **{f"optimiser {name}": value.clone() for name, value in state.optimiser.items()},
            **({} if state.bank is None else {"bank": state.bank.means.clone()}),
        }
        for client, state in states.items()
    }


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for client in ours:
        assert ours[client].keys() == theirs[client].keys()
        for name, value in ours[client].items():
            assert torch.equal(value, theirs[client][name]), (client, name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_round_does_not_change_what_is_being_written(engine, tmp_path, monkeypatch):
    """The thread is held up until the next round has ended; it still writes the states of the round before."""
    federation = federation_of(**ENGINES[engine], keep_optimiser=True, participation=1.0, clients=4)
    honest, go = checkpoint.write_tensors, threading.Event()

    def held_up(path, tensors):
        assert go.wait(60)
        return honest(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", held_up)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            for _ in range(3):
                federation.step()
                checkpoints.wait()
                before, server = copied(federation.engine.export()), federation.state.bank.means.clone()
                go.clear()
                checkpoints.begin(federation)
                federation.step()
                assert any(
                    not torch.equal(value, before[client][name])
                    for client, values in copied(federation.engine.export()).items()
                    for name, value in values.items()
                )
                go.set()
                checkpoints.wait()
                fresh = federation_of(keep_optimiser=True, participation=1.0, clients=4)
                saved = checkpoint.load(fresh, tmp_path)
                assert saved.round == federation.round - 1
                assert_same(copied(fresh.engine.export()), before)
                assert torch.equal(fresh.state.bank.means, server)
    finally:
        go.set()
        federation.engine.close()


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_only_changed_states_are_written_and_two_checkpoints_share_nothing(engine, tmp_path):
    federation = federation_of(**ENGINES[engine])
    linked, truth = 0, {}
    try:
        with Checkpoints(tmp_path) as checkpoints:
            for _ in range(federation.rounds):
                record = federation.step()
                checkpoints.begin(federation)
                checkpoints.wait()
                truth[record.round] = copied(federation.engine.export())
                newest, *older = checkpoint.rounds_in(tmp_path)
                for place in (newest, *older):  # each is whole by itself
                    alone = tmp_path.parent / "alone"
                    shutil.rmtree(alone, ignore_errors=True)
                    shutil.copytree(place, alone / place.name)
                    fresh = federation_of()
                    round = checkpoint.load(fresh, alone).round
                    assert_same(copied(fresh.engine.export()), truth[round])
                inodes = [{file.stat().st_ino for file in place.iterdir()} for place in (newest, *older)]
                assert len(set.union(*inodes)) == sum(map(len, inodes))
                holders = json.loads((newest / "manifest.json").read_text())["clients"]
                states = [client for clients in holders.values() for client in clients]
                assert sorted(states) == sorted(truth[record.round])
                linked += len(states) - len(holders[CLIENTS])
                assert len(holders[CLIENTS]) <= 2 * 4  # twice those of two rounds
    finally:
        federation.engine.close()
    assert linked > 5


def test_a_damaged_link_leaves_the_checkpoint_before(tmp_path, caplog):
    federation = federation_of()
    with Checkpoints(tmp_path) as checkpoints:
        while not list(tmp_path.glob("round-*/clients-*")):
            federation.step()
            checkpoints.begin(federation)
            checkpoints.wait()
    (file,) = sorted(tmp_path.glob("round-*/clients-*"))[-1:]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fresh = federation_of()
    assert checkpoint.load(fresh, tmp_path).round == federation.round - 1
    assert "damaged" in caplog.text


def test_without_links_everything_is_written(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(checkpoint.os, "link", refused)
    federation = federation_of()
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(5):
            federation.step()
            checkpoints.begin(federation)
    assert [file.name for file in checkpoint.rounds_in(tmp_path)[0].glob("clients*")] == [CLIENTS]
    fresh = federation_of()
    checkpoint.load(fresh, tmp_path)
    assert_same(copied(fresh.engine.export()), copied(federation.engine.export()))


def test_a_checkpoint_of_the_third_format_is_read(tmp_path):
    federation = federation_of(participation=1.0)
    federation.step()
    checkpoint.save(federation, tmp_path)
    file = tmp_path / "round-000001/manifest.json"
    content = disk.opened(file.read_bytes(), file)
    del content["clients"]
    file.write_bytes(disk.sealed({**content, "format": 3}))
    fresh = federation_of(participation=1.0)
    assert checkpoint.load(fresh, tmp_path).round == 1
    assert_same(copied(fresh.engine.export()), copied(federation.engine.export()))


def test_a_full_disk_in_the_thread_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch, caplog):
    honest, broken = checkpoint.write_tensors, []

    def full(path, tensors):
        if broken:
            raise OSError(28, "No space left on device")
        return honest(path, tensors)

    def watch(record, rounds):
        if record.round == 3:
            broken.append(True)

    data, keys = blobs(), {**KEYS, "checkpoint_every": 2}
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(ProtofedError, match=r"round-000004: cannot be written \(No space left on device\); make space"):
        pf.run("fedproto", out=tmp_path / "cut", data=data, watch=watch, **keys)
    broken.clear()
    assert len((tmp_path / "cut/rounds.jsonl").read_text().splitlines()) == 4  # noticed after the round beside it

    def stop(record, rounds):
        if record.round == 4:
            raise KeyboardInterrupt

    pf.resume(tmp_path / "cut", data=data, until=3)
    broken.append(True)
    with pytest.raises(KeyboardInterrupt):
        pf.resume(tmp_path / "cut", data=data, watch=stop)  # the interrupt is raised, and the failure is said
    assert "No space left" in caplog.text
    broken.clear()
    pf.run("fedproto", out=tmp_path / "whole", data=data, **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
