"""One absurd upload may cost its sender a round, and the others nothing; honest runs are not touched at all."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

import protofed as pf
from protofed import methods, wire
from protofed.bank import PrototypeBank
from protofed.deploy.node import Node
from protofed.deploy.remote import Limits
from protofed.deploy.serve import serve
from protofed.deploy.transport import LocalTransport
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import Federation, rounds
from protofed.federation.guard import FACTOR, Guard, norms_of, problem_of
from protofed.federation.local import Outcome
from protofed.federation.site import opened, sealed
from protofed.methods.fedproto import FedProto
from protofed.parts import Filter, Upload
from protofed.results.tables import Row
from protofed.results.tables import notes as table_notes
from protofed.wire import Bundle, Exchange, WireError, bank, number, weights
from support.engines import ENGINES, LOOP, leaves
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for
from test_resume import comparable

EXCHANGING = [name for name in methods.available() if methods.get(name).exchange.up]
ROOT = Path(__file__).parent.parent
LIAR = 1
FEW = {"clients": 4, "rounds": 3, "shot": 6, "way": 3, "silhouette": False, "snapshots": 0}


def settings_of(method, **changes):
    gentle = {"fedmatch": {"lr": 0.005}, "fedtgp": {"weight": 1.0, "server_epochs": 5}}.get(method, {})
    phases = {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0} if method == "fedarpl" else {}
    return resolve(method, {**SMALL, **FEW, "data": blobs(), **labels_for(method), **gentle, **phases, **changes})


# --- absurd uploads ---------------------------------------------------------------------------------------------------
def filled(value):
    return lambda tensor: torch.full_like(tensor, value)


def scaled(value):
    return lambda tensor: value * tensor


def with_values(change):
    def changed(content: Bundle) -> Bundle:
        banks = {n: replace(b, means=change(b.means)) for n, b in content.all_banks().items()}
        return replace(
            content,
            bank=banks.pop("", None),
            banks=banks,
            weights={n: change(v) for n, v in content.weights.items()},
            tensors={n: change(v) for n, v in content.tensors.items()},
        )

    return changed


def with_counts(value):
    def changed(content: Bundle) -> Bundle:
        banks = {n: replace(b, counts=torch.where(b.known, value, 0.0)) for n, b in content.all_banks().items()}
        scalars = {**content.scalars, "samples": value}
        return replace(content, bank=banks.pop("", None), banks=banks, scalars=scalars)

    return changed


ABSURD = {
    "1e30": with_values(filled(1e30)),
    "3e38": with_values(filled(3e38)),
    "-100x": with_values(scaled(-100.0)),
    "counts 3e38": with_counts(3e38),
    "counts 1e9": with_counts(1e9),
    "1e-45": with_values(filled(1e-45)),
    "zeros": with_values(filled(0.0)),
}
HARMLESS = ("1e-45", "zeros")  # nothing in them is large, so they are taken: they pull a mean towards 0


def lying(federation: Federation, change, round=2, liar=LIAR):
    """The federation with one client whose upload is changed on its way, in one round; None makes it absent."""
    original = federation.engine.train

    def train(downloads):
        for client, outcome in original(downloads):
            if client == liar and downloads.round == round and outcome.upload is not None:
                if change is None:
                    outcome = Outcome(None, {}, "absent")
                else:
                    outcome = replace(outcome, upload=wire.encode(change(wire.decode(outcome.upload))))
            yield client, outcome

    federation.engine.train = train
    return federation


def finish(federation):
    try:
        return federation.state, list(federation)
    finally:
        federation.engine.close()


def run(method, change, engine=LOOP, **changes):
    federation = lying(build(settings_of(method, **changes).with_engine(engine))[1], change)
    records = finish(federation)[1]
    return federation, records


def assert_equal_states(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for place, value in one.items():
        same = torch.equal(value, other[place]) if isinstance(value, torch.Tensor) else value == other[place]
        assert same, place


def accuracy(records):
    metrics = records[-1].metrics
    return metrics.get("accuracy_head", metrics.get("accuracy_prototype"))


# constellation's clients send something in their first round alone: tests/test_constellation.py
REPEATED = [name for name in EXCHANGING if name != "constellation"]


@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto", "fedtgp"), REPEATED))
def test_every_method_recovers_from_every_absurd_upload_in_the_next_round(method):
    absent, without = run(method, None)
    for name, change in ABSURD.items():
        federation, records = run(method, change)
        assert not records[0].dropped and not records[2].dropped, name
        assert all(math.isfinite(r.loss) for r in records), name
        assert all(torch.isfinite(v).all() for v in leaves(federation.state).values() if torch.is_tensor(v)), name
        if name in HARMLESS:
            assert not records[1].dropped
            assert abs(accuracy(records) - accuracy(without)) < 0.35, name
        else:  # as if the client had been absent in that round, to the last bit
            assert list(records[1].dropped) == [LIAR] and f"client {LIAR}: " in records[1].dropped[LIAR]
            assert_equal_states(federation.state, absent.state)
            assert [r.metrics for r in records] == [r.metrics for r in without]


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers"]))
def test_every_engine_drops_it(engine):
    for name in ("3e38", "counts 1e9"):
        absent, _ = run("fedproc", None, ENGINES[engine])
        federation, records = run("fedproc", ABSURD[name], ENGINES[engine])
        assert list(records[1].dropped) == [LIAR]
        assert_equal_states(federation.state, absent.state)


def test_without_the_guard_they_do_stop_a_federation():
    """What the guard is for: FedProto after one such upload, as it was before."""
    _, records = run("fedproto", ABSURD["1e30"], guard=0, rounds=4)
    assert not records[1].dropped and len(records[2].dropped) == len(records[3].dropped) == 4


@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto"), EXCHANGING))
@pytest.mark.parametrize("more", slow_but("mixed", ["mixed", "alone", "two"]))
def test_an_honest_run_is_the_same_with_and_without_it(method, more):
    changes = {"mixed": {}, "alone": {"participation": 0.25, "rounds": 8}, "two": {"participation": 0.5, "rounds": 8}}
    given = changes[more]
    if more == "mixed" and methods.get(method).teacher is None and method != "fedmatch":
        several = {"models": ["mlp?hidden=7", "mlp?hidden=3,3"], "projection": "linear", "dim": 6}
        one_model = ("model", "embedding", "hidden")
        keys = {**{k: v for k, v in SMALL.items() if k not in one_model}, **FEW, "data": blobs(), **several}
        runs = [build(resolve(method, {**keys, "guard": factor}).with_engine(LOOP))[1] for factor in (0.0, 10.0)]
    else:
        runs = [build(settings_of(method, **given, guard=factor).with_engine(LOOP))[1] for factor in (0.0, 10.0)]
    (_, without), (_, guarded) = (finish(federation) for federation in runs)
    assert_equal_states(runs[0].state, runs[1].state)
    assert [(r.loss, r.terms, r.metrics, r.dropped) for r in without] == [
        (r.loss, r.terms, r.metrics, r.dropped) for r in guarded
    ]
    assert not any(r.dropped or r.notes for r in guarded)


# --- uploads that come a few at a time --------------------------------------------------------------------------------
@pytest.mark.parametrize("liar", [0, 3])
@pytest.mark.parametrize("round", [1, 2])
def test_large_uploads_are_judged_two_at_a_time(liar, round, monkeypatch):
    """In the first chunk nobody knows yet what is usual; what the client was sent tells."""
    monkeypatch.setattr(rounds, "CHUNK_BYTES", 1)
    absent = lying(build(settings_of("fedproc").with_engine(LOOP))[1], None, round, liar)
    finish(absent)
    federation = lying(build(settings_of("fedproc").with_engine(LOOP))[1], ABSURD["1e30"], round, liar)
    records = finish(federation)[1]
    assert list(records[round - 1].dropped) == [liar]
    for place, value in leaves(absent.state).items():  # the sums of others are added in another order
        torch.testing.assert_close(leaves(federation.state)[place], value, rtol=1e-5, atol=1e-6)


@given(
    norms=st.lists(st.floats(1.0, 3.0), min_size=3, max_size=12),
    absurd=st.floats(1e3, 1e38),
    place=st.integers(0, 11),
    chunk=st.integers(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_whatever_the_chunks_exactly_the_absurd_one_is_refused(norms, absurd, place, chunk):
    norms = list(norms)
    place = place % len(norms)
    norms[place] = absurd
    uploads = [
        Upload(c, 1.0, Bundle(bank=PrototypeBank(torch.tensor([[n]]), torch.ones(1)))) for c, n in enumerate(norms)
    ]
    inspection = Guard(10.0, Exchange(up=(bank(),)), lambda client: 1).inspection(lambda upload: {}, [0] * len(norms))
    accepted, refused = [], {}
    for k in range(0, len(uploads), chunk):
        some, reasons = inspection.judge(uploads[k : k + chunk], k + chunk >= len(uploads))
        accepted += some
        refused |= reasons
    assert list(refused) == [place] and "guard=10" in refused[place]
    assert sorted(u.client for u in accepted) == [c for c in range(len(norms)) if c != place]


# --- claims -----------------------------------------------------------------------------------------------------------
CLAIMS = Exchange(up=(bank(), weights(), number("share", most=1.0)))


def claims(upload, exchange=CLAIMS, size=10):
    try:
        Guard(10.0, exchange, lambda client: size).check_claims(upload, "client 0")
    except WireError as error:
        return str(error)
    return ""


def test_a_client_cannot_claim_more_samples_than_it_has():
    def upload(counts, samples, **scalars):
        return Upload(0, samples, Bundle(bank=PrototypeBank(torch.ones(2, 3), torch.tensor(counts)), scalars=scalars))

    assert claims(upload([4.0, 6.0], 10.0, share=1.0)) == claims(upload([0.5, 6.0], 7.0, share=0.0)) == ""
    assert "11 samples, and has 10" in claims(upload([4.0, 6.0], 11.0))
    assert "claim 11 samples, and it has 10" in claims(upload([5.0, 6.0], 10.0))
    assert "claim 1e+09" in claims(upload([1e9, 6.0], 10.0))
    assert "share is -1e+30" in claims(upload([1.0, 1.0], 10.0, share=-1e30))
    assert "share is 1.5; expected a number from 0 to 1" in claims(upload([1.0, 1.0], 10.0, share=1.5))
    twice = Exchange(up=(bank(most=2.0),))
    assert claims(upload([9.0, 9.0], 10.0), twice) == "" and claims(upload([19.0, 9.0], 10.0), twice)


def test_norms_of_numbers_whose_squares_overflow():
    large = torch.tensor([3e38, 3e38])
    content = Bundle(bank=PrototypeBank(large[None], torch.ones(1)), weights={"w": large}, tensors={"t": large})
    assert all(norm == pytest.approx(3e38 * 2**0.5) for norm in norms_of(content).values())
    unknown = PrototypeBank(large[None], torch.zeros(1))
    assert norms_of(Bundle(bank=unknown)) == {"prototypes": 0.0}


# --- the state --------------------------------------------------------------------------------------------------------
def test_a_state_that_is_not_finite_or_absurdly_larger_has_a_problem():
    def state(value):
        return Bundle(bank=PrototypeBank(torch.full((2, 2), value), torch.full((2,), 1e20)))

    assert problem_of(state(1.0), state(1e5)) == problem_of(state(0.0), state(1e30)) == ""
    assert "2e+06 times" in problem_of(state(1.0), state(2e6))
    assert problem_of(state(1.0), state(math.nan)) == "bank.means became NaN or infinite"


@dataclass(frozen=True)
class Spoilt(FedProto):
    """FedProto whose server makes nonsense of one round, as a method with a mistake of its own would."""

    value: float = math.nan
    at: int = 2

    def update(self, state, reduced, round, setup):
        new = super().update(state, reduced, round, setup)
        if round != self.at:
            return new
        return replace(new, bank=replace(new.bank, means=torch.full_like(new.bank.means, self.value)))


def spoilt(value, **changes):
    chosen = settings_of("fedproto", **changes)
    return build(replace(chosen, method=_named(Spoilt(value=value))).with_engine(LOOP))[1]


def _named(method):
    type(method).name = "spoilt"
    return method


def test_the_last_good_state_is_kept_and_named():
    federation = spoilt(math.nan)
    first = federation.step()
    before, second = federation.state, federation.step()
    assert not first.notes and federation.state is before
    assert second.notes == ["the server kept its last good state: after the update, bank.means became NaN or infinite"]
    assert not federation.step().notes and federation.state is not before


def test_a_state_nobody_can_train_from_is_rolled_back():
    with mock.patch.object(rounds, "problem_of", lambda before, after: ""):
        federation = spoilt(1e25)
        federation.step()
        good = federation.state
        federation.step()
        assert federation.state is not good
        third = federation.step()
        assert len(third.dropped) == 4 and federation.state is good and federation.trusted is None
        assert third.notes == [
            "no client could train from what it was sent; the server returned to its last good state"
        ]
        fourth = federation.step()
        assert not fourth.dropped and not fourth.notes and math.isfinite(fourth.loss)


@pytest.mark.parametrize("method", ["fedavg", "fedtgp", "fedproc", "fedmps", "fedapa", "protofssl", "fedarpl"])
def test_whatever_the_server_keeps_a_spoilt_state_is_left_behind(method):
    """Every number of the server's state becomes absurd after round 2, as if no check had caught it."""
    federation = build(settings_of(method, rounds=6).with_engine(LOOP))[1]
    with mock.patch.object(rounds, "problem_of", lambda before, after: ""):
        federation.step(), federation.step()
        federation.state = tree_map(lambda v: v * 1e25 if torch.is_tensor(v) else v, federation.state)
        third = federation.step()
        fourth = federation.step()
    assert not third.dropped or "returned to its last good state" in third.notes[0]
    assert not fourth.dropped and math.isfinite(fourth.loss)


def test_a_client_that_is_not_reached_rolls_nothing_back():
    federation = build(settings_of("fedproto").with_engine(LOOP))[1]
    federation.step(), federation.step()
    state = federation.state
    federation.engine.train = lambda downloads: iter([(c, Outcome(None, {}, "not reached")) for c in downloads.clients])
    record = federation.step()
    assert len(record.dropped) == 4 and not record.notes and federation.state is state


def test_a_run_that_can_never_train_has_nothing_to_return_to():
    federation = build(settings_of("fedavg", lr=1e30).with_engine(LOOP))[1]
    records = finish(federation)[1]
    assert all(len(r.dropped) == 4 and not r.notes for r in records)


def stop_after(round):
    def watch(record, total):
        if record.round == round:
            raise KeyboardInterrupt

    return watch


@pytest.mark.parametrize("stopped", slow_but(2, [1, 2, 3, 4]))
def test_a_run_stopped_before_during_or_after_a_return_resumes_with_the_same_bits(stopped, tmp_path):
    """The checkpoint holds the state to return to. The server's state is spoilt in round 2, and round 3 returns."""
    data = blobs()
    keys = {**SMALL, **FEW, "rounds": 6, "checkpoint_every": 1, "data": data}

    original = FedProto.update

    def update(self, state, reduced, round, setup):
        new = original(self, state, reduced, round, setup)
        means = torch.full_like(new.bank.means, 1e25)
        return replace(new, bank=replace(new.bank, means=means)) if round == 2 else new

    with mock.patch.object(rounds, "problem_of", lambda *_: ""), mock.patch.object(FedProto, "update", update):
        result = pf.run("fedproto", out=tmp_path / "whole", **keys)
        with pytest.raises(KeyboardInterrupt):
            pf.run("fedproto", out=tmp_path / "cut", watch=stop_after(stopped), **keys)
        pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in lines if row.get("notes")] == [3]
    assert len(lines[2]["dropped"]) == 4 and not lines[3]["dropped"] and not lines[5]["dropped"]
    row = Row("fedproto", "fedproto", {}, [result.summary])
    assert any(
        note.startswith("noted: ") and "seed 1234, round 3: no client could" in note for note in table_notes([row])
    )


def test_a_liar_among_real_sites_is_dropped_and_named(tmp_path):
    """The messages of one site are changed behind the server's back, in two rounds."""

    class Liar(Node):
        def handle(self, function, message):
            reply = super().handle(function, message)
            round = opened(message, "server")[0].get("round")
            if function != "train" or round not in (2, 3):
                return reply
            about, upload = opened(reply, "site")
            change = ABSURD["3e38" if round == 2 else "counts 1e9"]
            return sealed(about, wire.encode(change(wire.decode(upload))))

    names = ("north", "south", "west")
    kinds = {"north": Node, "south": Liar, "west": Node}
    sites = {
        name: kinds[name](name, tmp_path / name, blobs(seed=k), "mlp?hidden=7&embedding=5")
        for k, name in enumerate(names)
    }
    keys = {"rounds": 4, "batch": 4, "dim": 5, "validation_share": 0.2}
    limits = Limits(seconds=20, quorum=2, patience=20)
    serve("fedproto", keys, LocalTransport(sites), names, tmp_path / "run", limits=limits)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [list(row["dropped"]) for row in lines] == [[], ["1"], ["1"], []]
    assert "south: the norm of its prototypes" in lines[1]["dropped"]["1"]
    assert "south: it claims to have trained on 1e+09 samples" in lines[2]["dropped"]["1"]
    assert all(math.isfinite(row["loss"]) for row in lines)


def test_uploads_that_the_server_cannot_read_are_not_judged(own_names):
    """A filter that hides or adds noise says so; what became of the state is looked at all the same."""

    @Filter.registry.register("hidden")
    @dataclass(frozen=True)
    class Hidden(Filter):
        guarded = False

    federation = lying(build(settings_of("fedproto", filters="hidden").with_engine(LOOP))[1], ABSURD["counts 1e9"])
    assert federation.guard is None and federation.guarded
    assert not any(record.dropped for record in federation)


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_a_guard_that_is_no_factor_is_refused(value):
    with pytest.raises(ProtofedError, match="guard"):
        resolve("fedavg", {"guard": value})


def test_the_default_leaves_room_for_every_honest_upload_that_was_measured():
    rows = json.loads((ROOT / "docs" / "results" / "guard.json").read_text(encoding="utf-8"))
    largest = max(row["largest"] for row in rows)
    assert {row["method"] for row in rows} == set(EXCHANGING) and 2 * largest < FACTOR
    assert f"is {largest:.1f} (of pFedKnow's response" in (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
