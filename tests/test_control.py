"""Controls: the same loss without the exchange, and with the prototypes of wrong classes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import protofed as pf
from protofed import methods
from protofed.auditing.conduct import audit
from protofed.bank import PrototypeBank
from protofed.deploy.serve import serve
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.compare import make_grid
from protofed.experiment.settings import resolve
from protofed.methods.control import derangement, has_control
from protofed.parts import Received
from support.engines import ENGINES, LOOP, assert_same
from support.errors import refusal
from support.marks import slow_but
from support.small import AT_SERVER, SMALL, blobs
from test_resume import comparable, stop_after

CONTROLLED = [name for name in methods.available() if name not in ("local", *AT_SERVER)]
QUICK = ("fedproto", "fedapa")
RAGGED = {"rounds": 2, "batch": 5, "shot_spread": 3.0, "participation": 0.8, "epochs": 2, "projection_dropout": 0}


def settings_of(method, **changes):
    early = {"fedsap": {"alignment": {"start": 0, "end": 2}}, "fedapa": {"warm_up": {"start": 0, "end": 2}}}
    return resolve(method, {**SMALL, "data": blobs(), **early.get(method, {}), **changes})


def finished(method, **changes):
    _, federation = build(settings_of(method, **changes).with_engine(LOOP))
    return federation, list(federation)


def models_of(federation):
    return {c: {n: w.clone() for n, w in s.weights.items()} for c, s in federation.engine.export().items()}


# --- own --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", slow_but(QUICK, ["fedproto", "fedsap", "fedpagr", "fedtgp", "fedmps", "fedapa"]))
def test_own_equals_federations_of_one_client_each(method):
    """Every client in a federation whose rounds have nobody else, with the method itself and none of the control."""
    federation, records = finished(method, control="own")
    for client in range(5):
        _, alone = build(settings_of(method).with_engine(LOOP))
        alone.participants = lambda round, client=client: [client]
        ended = list(alone)
        mine, its = models_of(federation)[client], models_of(alone)[client]
        assert all(torch.equal(mine[name], its[name]) for name in its)
        for record, other in zip(records, ended, strict=True):
            assert record.scores[client] == other.scores[client]


def test_own_of_averaged_weights_is_local_training():
    """A client that is sent back its own model trains as Local does, bit by bit."""
    local, _ = finished("local")
    for method in ("fedavg", "fedprox"):
        federation, records = finished(method, control="own", **({"mu": 0.0} if method == "fedprox" else {}))
        servers = federation.state.servers
        for client, weights in models_of(local).items():
            assert all(torch.equal(servers[client].weights[name], value) for name, value in weights.items())
        assert not any(record.up or record.down for record in records)


@pytest.mark.parametrize("method", slow_but(QUICK, CONTROLLED))
def test_own_in_a_stack_equals_the_plain_loop(method):
    assert_same(settings_of(method, control="own", **RAGGED), ENGINES["stack"])


@pytest.mark.parametrize("method", slow_but("fedapa", ["fedapa", "fedavg"]))
def test_own_in_workers_equals_the_plain_loop(method):
    assert_same(settings_of(method, control="own", **RAGGED), ENGINES["workers stack"])


@pytest.mark.parametrize("method", slow_but("fedproto", ["fedproto", "fedproc", "fedapa"]))
def test_own_with_several_architectures(method):
    keys = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")}
    models = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=9&embedding=5"], "dim": 5, "control": "own"}
    settings = resolve(method, {**keys, "data": blobs(), "rounds": 2, **models})
    assert_same(settings, ENGINES["workers stack"])


@pytest.mark.parametrize("method", slow_but("fedapa", ["fedapa", "fedtgp", "fedmatch", "protofssl"]))
def test_own_resumes(method, tmp_path):
    """A server for each client is on disk; those of clients that did not take part too."""
    data = blobs()
    keys = {**SMALL, "data": data, "rounds": 5, "checkpoint_every": 2, "participation": 0.6, "control": "own"}
    whole = pf.run(method, out=tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        pf.run(method, out=tmp_path / "cut", watch=stop_after(3), **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    assert whole.summary["control"] == "own"
    assert not sum(whole.summary["bytes_up"].values()) and not sum(whole.summary["bytes_down"].values())
    assert 'control = "own"' in (tmp_path / "whole" / "settings.toml").read_text()


def test_a_client_that_takes_no_part_keeps_its_server():
    federation, records = finished("fedproto", control="own", participation=0.2, rounds=2)
    took_part = {client for record in records for client in record.participants}
    for client, server in enumerate(federation.state.servers):
        assert bool(server.bank.known.any()) == (client in took_part)


@pytest.mark.parametrize("reduce", ["mean?by=holders", "median", "krum", "bounded"])
def test_own_of_a_robust_rule_is_that_of_the_mean(reduce):
    """Of one upload every rule gives the upload."""
    mean, _ = finished("fedproto", control="own")
    other, _ = finished("fedproto", control="own", reduce=reduce)
    for one, two in zip(mean.state.servers, other.state.servers, strict=True):
        torch.testing.assert_close(one.bank.means, two.bank.means)


def test_one_client_that_fails_leaves_the_others_as_they_are():
    def nan_at_2(federation):
        train = federation.engine.train

        def broken(downloads):
            for client, outcome in train(downloads):
                yield client, replace(outcome, upload=None, failure="NaN") if client == 2 else outcome

        federation.engine.train = broken

    whole, _ = finished("fedproto", control="own")
    _, federation = build(settings_of("fedproto", control="own").with_engine(LOOP))
    nan_at_2(federation)
    list(federation)
    for client in (0, 1, 3, 4):
        assert torch.equal(federation.state.servers[client].bank.means, whole.state.servers[client].bank.means)
    assert not federation.state.servers[2].bank.known.any()


# --- shuffled ---------------------------------------------------------------------------------------------------------
@given(st.integers(2, 40), st.integers(0, 2**40))
def test_a_derangement_moves_every_class_and_loses_none(classes, seed):
    order = derangement(classes, seed)
    assert sorted(order.tolist()) == list(range(classes))
    assert not bool((order == torch.arange(classes)).any())


def test_shuffled_gives_each_class_the_prototype_of_another():
    control = resolve("fedmps", {**SMALL, "data": blobs(), "control": "shuffled"}).federated
    means = torch.arange(4.0)[:, None].expand(4, 5).contiguous()
    low = PrototypeBank(torch.arange(4.0)[:, None].expand(4, 64).contiguous(), torch.ones(4))
    tensors = {"soft_labels": torch.eye(4)}
    received = Received(PrototypeBank(means, torch.arange(4.0)), {"low": low}, {"w": torch.ones(1)}, tensors)
    order = derangement(4, SMALL.get("seed", 1234)).tolist()
    shuffled = control.shuffled(received)
    assert shuffled.bank.means[:, 0].tolist() == shuffled.bank.counts.tolist() == order
    assert shuffled.banks["low"].means[:, 0].tolist() == order
    assert shuffled.tensors["soft_labels"].argmax(-1).tolist() == order
    assert shuffled.weights is received.weights


def test_shuffled_trains_as_a_server_would_that_sends_wrong_prototypes():
    """By hand: FedProto in whose messages the rows are shuffled, which is evaluated by its own prototypes."""
    federation, records = finished("fedproto", control="shuffled")
    _, other = build(settings_of("fedproto").with_engine(LOOP))
    order = derangement(4, 1234)
    message = type(other.exchange).own_message

    class Wrong(type(other.exchange)):
        def own_message(self, state, client, round, names=None):
            sent = message(self, state, client, round, names)
            return replace(sent, bank=PrototypeBank(sent.bank.means[order], sent.bank.counts[order]))

    other.exchange = Wrong(other.exchange.down, other.exchange.up)
    ended = list(other)
    for client, weights in models_of(other).items():
        assert all(torch.equal(models_of(federation)[client][name], value) for name, value in weights.items())
    for record, its in zip(records, ended, strict=True):
        assert [s.head for s in record.scores] == [s.head for s in its.scores]
        assert record.up == its.up and record.down == its.down
    for client, score in enumerate(records[-1].scores):
        own, data = federation.engine.states[client], federation.data.clients[client]
        federation.engine.skeleton.load(own.weights)
        x, y = data.test.take()
        z = federation.engine.skeleton.outputs(x).embedding
        assert score.prototype == int((own.bank.nearest(z) == y).sum())


@pytest.mark.parametrize("method", slow_but("fedapa", ["fedapa", "fedpagr", "fedmps", "protofssl"]))
def test_shuffled_in_a_stack_equals_the_plain_loop(method):
    assert_same(settings_of(method, control="shuffled", **RAGGED), ENGINES["stack"])


# --- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "keys", "words"),
    [
        ("local", {"control": "own"}, "return nothing"),
        ("server-only", {"control": "own"}, "return nothing"),
        ("fedarpl", {"control": "own"}, "labels at the server"),
        ("fedavg", {"control": "shuffled"}, "sends no prototypes"),
        ("fedproto", {"control": "other"}, "control"),
        ("fedproto", {"control": "own", "attack": "random"}, "leave out attack=random"),
        ("fedproto", {"control": "own", "privacy": "client?epsilon=4&clip=1"}, "leave out privacy"),
        ("fedproto", {"control": "shuffled", "secure": "sums"}, "leave out secure=sums"),
        ("fedapa", {"control": "own", "choice": "diverse"}, "choice=diverse"),
    ],
)
def test_what_makes_no_sense_is_refused(method, keys, words):
    assert words in refusal(lambda: resolve(method, {**SMALL, "data": blobs(), **keys}))


def test_runs_between_sites_refuse_controls(tmp_path):
    for key, value in (("control", "own"), ("new_clients", 2)):
        with pytest.raises(ProtofedError, match=f"{key}={value}: .* simulations"):
            serve("fedproto", {key: value}, None, ["a"], tmp_path / "run")


def test_one_class_cannot_be_shuffled():
    assert "one class" in refusal(lambda: derangement(1, 0))


def test_nothing_of_a_control_can_be_audited(tmp_path):
    data = blobs()
    pf.run("fedproto", out=tmp_path / "run", **{**SMALL, "data": data, "control": "own"})
    assert "control=own send nothing" in refusal(lambda: audit(tmp_path / "run", data=data))


# --- in comparisons ---------------------------------------------------------------------------------------------------
def test_which_methods_have_a_control():
    named = {name for name in methods.available() if has_control(methods.get(name))}
    papers = {"fedproto", "fedsap", "fedapa", "fedpagr", "fedtgp", "fedmps", "fedproc", "protofssl"}
    assert named == {"compose", "constellation", *papers}


def test_controls_follow_their_methods():
    names = ["fedavg", "fedsap", "sharp=fedsap?scale=8", "fedproto?control=shuffled"]
    grid = make_grid(names, local=True, controls=True, seeds=1, given={**SMALL, "data": blobs()})
    found = [(v.label, v.folder, grid.cells[v.cell(1234)].general.control) for v in grid.variants]
    assert found == [
        ("local", "local", ""),
        ("fedavg", "fedavg", ""),
        ("fedsap", "fedsap", ""),
        ("fedsap control", "fedsap-control", "own"),
        ("sharp", "sharp", ""),
        ("sharp control", "sharp-control", "own"),
        ("fedproto", "fedproto", "shuffled"),
    ]
    assert grid.cells["sharp-control-seed1234"].method.scale == 8
    one, other = (grid.cells[f"{name}-seed1234"].to_dict() for name in ("sharp", "sharp-control"))
    assert {key for key in one if one[key] != other[key]} == {"control"}


def test_compare_with_controls_from_the_command_line(call):
    keys = ["rounds=1", "clients=3", "shot=4", "way=2", "hidden=[8]", "engine=loop", "workers=1"]
    code, out, _ = call("compare", "fedproto", "--controls", "--seeds", "1", "--out", "both", "--jobs", "1", *keys)
    assert code == 0 and "fedproto control" in out
    summary = json.loads(Path("both/fedproto-control-seed1234/summary.json").read_text())
    assert summary["control"] == "own" and summary["method"] == "fedproto"
    code, out, err = call("run", "local", "control=own")
    assert code == 2 and "no exchange to control" in err and "Traceback" not in err
