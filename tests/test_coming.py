"""Classes that come and go: who holds what in which round, on every engine, resumed with the same bits."""

import json
from dataclasses import replace

import pytest
import torch

import protofed as pf
from protofed import ProtofedError
from protofed.data.coming import Timetable
from protofed.data.types import FederatedData
from protofed.experiment.build import prepare_data
from protofed.experiment.settings import resolve
from support.marks import slow_but
from support.small import SMALL, blobs

CHANGES = {"classes_appear": "1@3", "classes_vanish": "2@5"}


def small(**changes):
    return {**SMALL, "data": blobs(), "rounds": 6, "partition": "iid", "checkpoint_every": 1, **changes}


def federated(**changes):
    given = {k: v for k, v in small(**changes).items() if k not in ("way", "shot")}
    return prepare_data(resolve("fedproto", given))


def iid(**changes):
    return {k: v for k, v in small(**changes).items() if k not in ("way", "shot")}


@pytest.mark.parametrize("labels", [{}, {"labels": "client", "labels_per_class": 4}, {"validation_share": 0.3}])
def test_a_round_has_the_samples_of_the_classes_that_are_there(labels):
    data = federated(**labels)
    table = Timetable.of("1@3", "2@5", data, 6)
    table.check(data)
    for round in range(1, 7):
        absent = {c for c, gone in ((1, round < 3), (2, round >= 5)) if gone}
        assert table.absent(round) == absent
        now = table.at(data, round)
        for k, (before, after) in enumerate(zip(data.clients, now.clients, strict=True)):
            for part in ("labelled", "test", "validation"):
                samples, kept = getattr(before, part), getattr(after, part)
                assert (samples is None) == (kept is None)
                if samples is not None:
                    pairs = zip(samples.index.tolist(), samples.labels.tolist(), strict=True)
                    assert kept.index.tolist() == [row for row, label in pairs if label not in absent]
            assert after.classes.tolist() == [
                bool(holds) and c not in absent for c, holds in enumerate(before.classes.tolist())
            ]
            if before.unlabelled is not None:
                truth = data.held_back[k].tolist()
                pairs = zip(before.unlabelled.index.tolist(), truth, strict=True)
                assert after.unlabelled.index.tolist() == [row for row, label in pairs if label not in absent]
                assert now.held_back[k].tolist() == [label for label in truth if label not in absent]
        assert isinstance(now, FederatedData) and (now is data) == (not absent)


def test_clients_that_share_test_rows_still_do():
    data = federated()
    shared = replace(data, clients=[replace(c, test=data.clients[0].test) for c in data.clients])
    now = Timetable.of("1@3", "", data, 6).at(shared, 1)
    assert len({id(c.test.index) for c in now.clients}) == 1


@pytest.mark.parametrize("engine", slow_but("loop", ["loop", "stack"]))
def test_tests_follow_and_a_class_that_is_gone_keeps_its_prototype(engine, tmp_path):
    seen, states = {}, []

    def watch(record, rounds):
        rows = torch.as_tensor(record.board.by("head").rows)
        seen[record.round] = set(rows[:, 0].tolist())

    result = pf.run("fedproto", watch=watch, out=tmp_path / "run", **iid(engine=engine, **CHANGES))
    assert seen == {1: {0, 2, 3}, 2: {0, 2, 3}, 3: {0, 1, 2, 3}, 4: {0, 1, 2, 3}, 5: {0, 1, 3}, 6: {0, 1, 3}}
    states = [result.model(k) for k in range(SMALL["clients"])]
    assert all(bool(model.counts[2] > 0) and not bool(model.candidates[2]) for model in states)


def test_forget_takes_the_class_out_of_the_bank(tmp_path):
    kept, forgotten = (
        pf.run("compose", loss=["ce", "align"], after=after, **iid(candidates="all", **CHANGES))
        for after in ([], ["forget?after=1"])
    )
    assert float(kept.model(0).counts[2]) > 0
    assert float(forgotten.model(0).counts[2]) == 0 and float(forgotten.model(0).counts[1]) > 0


@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize("method", slow_but("fedproto", ["fedproto", "fedapa", "fedavg", "fedtgp"]))
def test_a_run_that_was_stopped_at_any_round_goes_on_with_the_same_bits(method, engine, tmp_path):
    given = iid(engine=engine, participation=0.7, **CHANGES)
    data = given["data"]
    whole = pf.run(method, out=tmp_path / "whole", **given)
    for until in (2, 3, 4, 5):
        folder = tmp_path / f"until-{until}"
        pf.run(method, out=folder, until=until, **given)
        again = pf.resume(folder, data=data)
        for name in ("metrics.jsonl", "clients.jsonl", "rounds.jsonl"):
            one, other = (
                [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (f / name).open()]
                for f in (tmp_path / "whole", folder)
            )
            assert one == other
        for k in range(SMALL["clients"]):
            weights, others = (r.model(k).state_dict() for r in (whole, again))
            assert all(torch.equal(weights[n], others[n]) for n in weights)


def test_engines_agree():
    rows = [pf.run("compose", **iid(engine=engine, **CHANGES)).metrics for engine in ("loop", "stack")]
    for one, other in zip(*rows, strict=True):
        assert one["accuracy_prototype"] == pytest.approx(other["accuracy_prototype"], abs=0.02)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
def test_worker_processes_have_the_samples_of_the_round():
    one, two = (pf.run("fedproto", **iid(workers=workers, **CHANGES)).metrics for workers in (1, 2))
    drop = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]  # noqa: E731
    assert drop(one) == drop(two)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"classes_appear": "1"}, "expected CLASS@ROUND"),
        ({"classes_appear": "1@soon"}, "expected CLASS@ROUND"),
        ({"classes_appear": "9@3"}, "no class '9'"),
        ({"classes_appear": "1@1"}, "expected a round from 2 to 6"),
        ({"classes_vanish": "1@7"}, "expected a round from 2 to 6"),
        ({"classes_appear": "1@3,1@4"}, "is there twice"),
        ({"classes_appear": "1@4", "classes_vanish": "1@3"}, "before it appears"),
        ({"classes_vanish": "0@3,1@3,2@3,3@3"}, "every client needs another class"),
    ],
)
def test_nonsense_is_one_line(given, reason):
    with pytest.raises(ProtofedError, match=reason) as caught:
        pf.run("fedproto", **iid(**given))
    assert "\n" not in str(caught.value)


def test_secure_sums_go_on_after_a_change():
    plain, summed = (pf.run("fedproto", **iid(secure=secure, **CHANGES)).metrics[-1] for secure in ("", "sums"))
    assert summed["accuracy_prototype"] == pytest.approx(plain["accuracy_prototype"], abs=0.02)
