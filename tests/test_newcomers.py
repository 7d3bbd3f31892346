"""Clients that are held out of a federation and join it after the last round."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import protofed as pf
from protofed import methods
from protofed.data import Dataset, federate
from protofed.data.fingerprint import fingerprint
from protofed.data.newcomers import held_out
from protofed.experiment.build import build
from protofed.experiment.run import load
from protofed.experiment.settings import resolve
from protofed.federation.newcomers import EPOCHS
from protofed.models.skeleton import Skeleton
from protofed.results.columns import new_client_columns, parse_column
from support.engines import LOOP
from support.errors import refusal
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for
from test_resume import comparable, stop_after

HELD = {**SMALL, "clients": 6, "new_clients": 2}


def sites(names="abcd", seed=0):
    """A data set of named sites, each with all classes."""
    whole = blobs(classes=3, per_class=16 * len(names), test_per_class=4 * len(names), seed=seed)
    groups = [np.array(list(names) * (len(y) // len(names))) for y in (whole.y_train, whole.y_test)]
    arrays = whole.x_train, whole.y_train, whole.x_test, whole.y_test
    return Dataset.from_arrays(*arrays, num_classes=3, group_train=groups[0], group_test=groups[1])


NATURAL = {k: v for k, v in SMALL.items() if k not in ("way", "shot", "clients", "partition")} | {
    "partition": "natural",
    "test": "local",
}


@settings(max_examples=15)
@given(st.integers(2, 9), st.integers(0, 12), st.integers(0, 2**40))
def test_everybody_is_either_here_or_new(clients, number, seed):
    data = federate(blobs(), "iid", clients, seed=1)
    if number >= clients:
        assert "at least one must train" in refusal(lambda: held_out(data, number, seed))
        return
    held = held_out(data, number, seed)
    assert len(held.newcomers) == number == len(held.newcomer_names) and len(held.clients) == clients - number
    rows = torch.cat([client.labelled.index for client in [*held.clients, *held.newcomers]])
    assert sorted(rows.tolist()) == sorted(torch.cat([c.labelled.index for c in data.clients]).tolist())
    assert held_out(data, number, seed).newcomer_names == held.newcomer_names


def test_the_federation_is_that_of_the_others():
    """Site d held out, beside a data set that never had a site d: the same bits in every client and at the server."""
    data, rest = sites(), sites()
    keep, keep_test = rest.group_train != 3, rest.group_test != 3
    arrays = rest.x_train[keep], rest.y_train[keep], rest.x_test[keep_test], rest.y_test[keep_test]
    names = [np.array(list("abc"))[ids] for ids in (rest.group_train[keep], rest.group_test[keep_test])]
    rest = Dataset.from_arrays(*arrays, num_classes=3, group_train=names[0], group_test=names[1])
    ended = []
    for dataset, more in ((data, {"new_clients": "d"}), (rest, {})):
        _, federation = build(resolve("fedproto", {**NATURAL, "data": dataset, **more}).with_engine(LOOP))
        records = list(federation)
        ended.append((federation, [(record.scores, record.up, record.loss) for record in records]))
    (held, records), (alone, others) = ended
    assert held.data.client_names == alone.data.client_names == ("a", "b", "c")
    assert records == others
    assert torch.equal(held.state.bank.means, alone.state.bank.means)


def test_names_numbers_and_mistakes():
    data = federate(sites(), "natural", seed=1)
    assert held_out(data, ["c", "a"], 1).newcomer_names == ("a", "c")
    assert held_out(data, "b", 1).client_names == ("a", "c", "d")
    assert "unknown client 'x'" in refusal(lambda: held_out(data, "x", 1))
    assert "these are all clients" in refusal(lambda: held_out(data, tuple("abcd"), 1))
    assert "have no names" in refusal(lambda: held_out(federate(blobs(), "iid", 3, seed=1), "b", 1))
    for value in (-1, 1.5):
        assert "new_clients" in refusal(lambda value=value: resolve("fedproto", {**SMALL, "new_clients": value}))
    given = {**SMALL, "new_clients": 1, "capability": [1.0] * 5}
    assert "capability" in refusal(lambda: resolve("fedproto", given))
    assert resolve("fedproto", {**SMALL, "new_clients": ["a", "b"]}).to_dict()["new_clients"] == ["a", "b"]


def test_data_without_newcomers_has_the_digest_it_had():
    data = federate(blobs(), "iid", 4, seed=1)
    assert fingerprint(data) == fingerprint(replace(data, newcomers=[], newcomer_names=()))
    assert fingerprint(held_out(data, 1, 1)) != fingerprint(replace(held_out(data, 1, 1), newcomers=[]))


@pytest.mark.parametrize("method", slow_but(("fedapa", "fedavg", "fedsap"), methods.available()))
def test_newcomers_of_every_method(method):
    keys = {**HELD, "data": blobs(), "rounds": 2, "participation": 0.8, **labels_for(method)}
    summary = pf.run(method, **keys).summary
    joined = summary["new_clients"]
    assert joined["epochs"] == [0, 1, 5] and len(joined["clients"]) == 2
    kinds = {kind for kind in ("head", "prototype", "mix") if f"accuracy_{kind}" in summary["last_five"]}
    assert joined["per_client"].keys() == kinds
    for kind in kinds:
        assert joined[kind] == pytest.approx([np.mean(row) for row in joined["per_client"][kind]])
    assert ("local" in joined) == (not labels_for(method))
    if method == "local":
        assert {k: joined[k] for k in kinds} == {k: joined["local"][k] for k in kinds}


def by_hand(federation, data, weights, bank, epochs, pull):
    """A newcomer in plain torch: some epochs of cross-entropy and a pull, then head and nearest prototype."""
    engine = federation.engine
    network = Skeleton(engine.inputs.build())
    network.load(weights)
    module, params = network.module.train(), list(network.params.values())
    x, y = data.labelled.take()
    for p in params:
        p.requires_grad_(True)
    generator = pf.seeds.torch_stream(1234, "batches", 4, federation.round + 1)
    optimiser = torch.optim.SGD(params, lr=0.01, momentum=0.5)
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(4):
            z, logits = module(x[rows])
            loss = torch.nn.functional.cross_entropy(logits, y[rows])
            if pull:
                known = bank.known[y[rows]]
                loss = loss + ((z - bank.means[y[rows]]) ** 2).mean(-1)[known].mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    module.eval()
    with torch.no_grad():
        (z, logits), tests = module(data.test.take()[0]), data.test.labels
        distances = torch.cdist(z, bank.means)
        distances[:, ~(bank.known & data.classes)] = torch.inf
    return float((logits.argmax(-1) == tests).float().mean()), float((distances.argmin(-1) == tests).float().mean())


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_figures_are_those_of_a_plain_loop(method):
    keys = {**HELD, "data": blobs(), "new_clients": 1, "clients": 5, "way": 3, "seed": 1234, "lr": 0.01}
    made = resolve(method, keys)
    joined = pf.run(made).summary["new_clients"]
    _, federation = build(made.with_engine(LOOP))
    list(federation)
    data, state = federation.data.newcomers[0], federation.state
    assert method == "fedavg" or bool(state.bank.known[data.labelled.labels].all())
    start = state.weights if method == "fedavg" else federation.engine.start
    for k, epochs in enumerate(EPOCHS):
        if method == "fedproto":
            head, prototype = by_hand(federation, data, start, state.bank, epochs, True)
            assert joined["prototype"][k] == pytest.approx(prototype, abs=0.051)  # one sample of 20 on the boundary
        else:
            some = federation.engine.state(0).bank or pf.PrototypeBank(torch.zeros(4, 5), torch.ones(4))
            head, _ = by_hand(federation, data, start, some, epochs, False)
        assert joined["head"][k] == pytest.approx(head, abs=0.051)


def test_several_architectures_and_controls(tmp_path):
    keys = {k: v for k, v in HELD.items() if k not in ("model", "embedding", "hidden")}
    models = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=9&embedding=5"], "dim": 5}
    for method, more in (("fedproc", {}), ("fedapa", {"control": "own"}), ("fedproto", {"control": "shuffled"})):
        summary = pf.run(method, **keys, **models, **more, data=blobs(), initial="own" if more else "same").summary
        assert len(summary["new_clients"]["per_client"]["head"][2]) == 2


def test_a_resumed_run_has_the_same_newcomers(tmp_path):
    data = blobs()
    keys = {**HELD, "data": data, "rounds": 4, "checkpoint_every": 2}
    pf.run("fedproto", out=tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        pf.run("fedproto", out=tmp_path / "cut", watch=stop_after(3), **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    given = {**keys, "rounds": 6, "start_from": str(tmp_path / "whole")}
    for key, value in (("new_clients", 1), ("control", "own")):
        assert f"its {key} is" in refusal(lambda key=key, value=value: pf.run("fedproto", **{**given, key: value}))


def test_columns_and_tables(call):
    words = ["rounds=1", "clients=4", "new_clients=1", "shot=4", "way=2", "hidden=[8]", "engine=loop", "workers=1"]
    code, out, _ = call("run", "fedproto", *words, "--out", "one")
    assert code == 0 and "new after the last round: client " in out and "Local from scratch" in out
    code, out, _ = call("compare", "fedproto", *words, "--seeds", "1", "--jobs", "1", "--out", "both")
    assert code == 0 and "after 0, 1 and 5 epochs" in " ".join(out.split())
    code, out, _ = call("table", "both", "--columns", "new5_head,newlocal5_head")
    assert code == 0 and "new head after 5" in out
    summary = load("one").summary
    for n, value in zip((0, 1, 5), summary["new_clients"]["head"], strict=True):
        assert parse_column(f"new{n}_head").value(summary) == pytest.approx(100 * value)
    assert parse_column("new7_head").value(summary) is None and parse_column("new0_head").value({"rounds": 1}) is None
    assert new_client_columns([summary])[:3] == ["new0_head", "new1_head", "new5_head"] and not new_client_columns([{}])
