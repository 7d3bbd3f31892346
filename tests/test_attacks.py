"""Attacks: who attacks, what attackers send and train on, that only they do, and that figures are the honest clients'."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
import torch

import protofed as pf
from protofed import methods, wire
from protofed.bank import PrototypeBank
from protofed.data.fingerprint import fingerprint
from protofed.data.poison import relabelled, triggered
from protofed.deploy.node import Node
from protofed.deploy.serve import serve
from protofed.deploy.trial import try_out
from protofed.errors import ProtofedError
from protofed.experiment.build import build, prepare_data
from protofed.experiment.run import load
from protofed.experiment.settings import resolve
from protofed.models.base import Output
from protofed.parts import Batch
from protofed.parts.attacks import (
    BRIGHT,
    Attack,
    Attackers,
    Backdoor,
    Colluders,
    FreeRiders,
    Hijack,
    LabelSwap,
    Noise,
    Random,
    Scaling,
    SignFlip,
    with_trigger,
)
from protofed.registry import as_text, parse_part
from protofed.seeds import SeededNormals
from protofed.wire import Bundle
from support.departure import departure
from support.engines import ENGINES, LOOP, assert_same, finish
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

torch.set_num_threads(1)
NAMES = Attack.registry.names()
VECTORS = [SignFlip(), Scaling(), Random(), Colluders(), FreeRiders()]


def given_to(method, **changes):
    """Settings without the guard, which would drop the long vectors of some attacks."""
    return {**SMALL, "data": blobs(), "rounds": 2, "guard": 0.0, **labels_for(method), **changes}


def noise(client=0, round=1):
    return Noise(SeededNormals(0, "attack", client, round), SeededNormals(0, "attack"))


def bundle(seed=0):
    g = torch.Generator().manual_seed(seed)
    bank = PrototypeBank(torch.randn(4, 3, generator=g), torch.tensor([2.0, 1.0, 3.0, 0.0]))
    bank.means[3] = 0
    return Bundle(bank, weights={"a": torch.randn(2, 3, generator=g), "b": torch.randn(5, generator=g)})


SENT = {"a": torch.full((2, 3), 0.5), "b": torch.full((5,), -0.5)}


def change(content):
    return torch.cat([(content.weights[n] - SENT[n]).flatten() for n in ("a", "b")])


# --- who --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "clients", "number"), [(0.2, 20, 4), (0.2, 5, 1), (0.01, 10, 1), (0.9, 3, 2)])
def test_a_share_of_the_clients_attacks_at_least_one_and_never_all(share, clients, number):
    attack = SignFlip(share=share)
    who = attack.attackers(clients, seed=3)
    assert len(who) == number and who <= set(range(clients)) and who == attack.attackers(clients, seed=3)
    assert number in (clients - 1, 1) or len({attack.attackers(clients, seed) for seed in range(5)}) > 1


def test_only_attackers_send_something_else():
    upload, left = bundle(), departure(client=1, weights=SENT)
    filter = Attackers(SignFlip(scale=2.0), frozenset({0}), seed=1)
    assert filter.leave(upload, left) is upload
    assert torch.equal(filter.leave(upload, replace(left, client=0)).bank.means, -2 * upload.bank.means)


@pytest.mark.parametrize("attack", VECTORS, ids=as_text)
def test_an_attack_may_begin_and_end(attack):
    timed, upload = replace(attack, first=2, last=3), bundle()
    acts = [timed.craft(upload, departure(round=r, weights=SENT), noise()) is not upload for r in range(1, 6)]
    assert acts == [False, True, True, False, False]


# --- what attackers send ----------------------------------------------------------------------------------------------
def test_sign_flip_and_scaling_stretch_prototypes_and_the_change_of_weights():
    upload = bundle()
    for attack, factor in ((SignFlip(scale=3.0), -3.0), (Scaling(factor=7.0), 7.0)):
        lie = attack.craft(upload, departure(weights=SENT), noise())
        torch.testing.assert_close(lie.bank.means, factor * upload.bank.means)
        torch.testing.assert_close(change(lie), factor * change(upload))
        assert torch.equal(lie.bank.counts, upload.bank.counts) and not bool(lie.bank.means[3].any())


@pytest.mark.parametrize("attack", [Random(scale=4.0), Colluders(scale=4.0)], ids=as_text)
def test_random_directions_have_the_length_of_the_honest_vectors(attack):
    upload = bundle()
    lie = attack.craft(upload, departure(weights=SENT), noise())
    torch.testing.assert_close(lie.bank.means[:3].norm(dim=-1), 4 * upload.bank.means[:3].norm(dim=-1))
    assert float(change(lie).norm()) == pytest.approx(4 * float(change(upload).norm()), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(lie.bank.means[:3], upload.bank.means[:3])
    assert float(cosine.max()) < 0.999


def test_colluders_agree_in_all_rounds_and_random_attackers_do_not():
    for attack, agree in ((Colluders(), True), (Random(), False)):
        filter = Attackers(attack, frozenset({0, 1}), seed=5)
        rows = [
            filter.leave(bundle(seed=c), departure(client=c, round=r, weights=SENT)).bank.means[0]
            for c in (0, 1)
            for r in (1, 2)
        ]
        cosines = [float(torch.nn.functional.cosine_similarity(rows[0], row, dim=0)) for row in rows[1:]]
        assert all(c > 0.9999 for c in cosines) == agree


def test_free_riders_send_back_what_they_received():
    received = PrototypeBank(torch.tensor([[3.0, 4.0, 0.0]] * 4), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    lie = FreeRiders(noise=0.1).craft(bundle(), departure(bank=received, weights=SENT), noise())
    away = (lie.bank.means - received.means).norm(dim=-1)
    torch.testing.assert_close(away[[0, 2]], torch.tensor([0.5, 0.5]))
    own = bundle().bank.means[1]
    assert float(lie.bank.means[1].norm()) == pytest.approx(0.1 * float(own.norm()), rel=1e-5)  # nothing was received
    assert float(change(lie).norm()) == pytest.approx(0.1 * float(change(bundle()).norm()), rel=1e-5)


def test_a_hijacker_sends_another_classs_prototype():
    upload = bundle()
    lie = Hijack(target=2, source=1, scale=2.0).craft(upload, departure(), noise()).bank
    torch.testing.assert_close(lie.means[2], 2 * upload.bank.means[1])
    assert torch.equal(lie.counts, upload.bank.counts) and torch.equal(lie.means[:2], upload.bank.means[:2])
    claimed = Hijack(target=3, source=2).craft(upload, departure(), noise()).bank
    assert torch.equal(claimed.means[3], upload.bank.means[2]) and claimed.counts.tolist() == [2.0, 1.0, 3.0, 3.0]
    other = Hijack(target=0, source=3).craft(upload, departure(), noise()).bank  # which it does not hold
    assert torch.equal(other.means[0], upload.bank.means[1])
    alone = Bundle(PrototypeBank(upload.bank.means, torch.tensor([0.0, 1.0, 0.0, 0.0])))
    assert Hijack(target=1, source=0).craft(alone, departure(), noise()) is alone


def test_a_backdoor_moves_the_targets_prototype_to_the_triggered_samples():
    x = torch.zeros(5, 1, 4, 4)
    x[3:] = with_trigger(x[3:])
    y, z = torch.tensor([0, 1, 1, 0, 0]), torch.tensor([[0.0], [5.0], [7.0], [10.0], [20.0]])

    class Client:
        def outputs(self):
            return Output(z, z), Batch(x, y, torch.ones(5))

    upload = Bundle(PrototypeBank.from_embeddings(z, y, 2), weights={"a": SENT["a"] + 1})
    lie = Backdoor(target=0, blend=0.5, scale=3.0).craft(upload, departure(Client(), weights=SENT), noise())
    assert lie.bank.means.tolist() == [[12.5], [6.0]]  # halfway from 10 to 15
    torch.testing.assert_close(lie.weights["a"], SENT["a"] + 3)


def test_a_trigger_is_drawn_into_pictures_and_features_and_not_into_text():
    flat = with_trigger(torch.zeros(2, 30))
    assert flat[:, -4:].eq(BRIGHT).all() and not flat[:, :-4].any()
    picture = with_trigger(torch.zeros(1, 3, 28, 28))
    assert int(picture.eq(BRIGHT).sum()) == 3 * 4 * 4
    with pytest.raises(ProtofedError, match="text"):
        with_trigger(torch.zeros(2, 5, dtype=torch.int64))


# --- what attackers train on ------------------------------------------------------------------------------------------
def test_labels_are_swapped_among_the_classes_a_client_holds():
    labels = torch.tensor([2, 5, 9, 5, 2])
    assert LabelSwap().labels(labels).tolist() == [5, 9, 2, 9, 5]
    assert LabelSwap(source=5, target=1).labels(labels).tolist() == [2, 1, 9, 1, 2]
    assert labels.tolist() == [2, 5, 9, 5, 2]


def test_relabelled_data_differs_in_the_attackers_training_labels_alone():
    data = prepare_data(resolve("fedproto", given_to("fedproto")))
    bad = relabelled(data, {1, 3}, LabelSwap().labels, "attack")
    for c, (old, new) in enumerate(zip(data.clients, bad.clients, strict=True)):
        assert torch.equal(old.test.labels, new.test.labels)
        wrong = old.labelled.labels != new.labelled.labels
        assert bool(wrong.all()) if c in (1, 3) else not bool(wrong.any())
        assert set(new.labelled.labels.tolist()) == set(old.labelled.labels.tolist())
    assert len({id(c.labelled.y) for c in bad.clients}) == 1  # clients of a stack share their tensors
    with pytest.raises(ProtofedError, match=r"attack: class 99; expected 0 to \d"):
        relabelled(data, {1}, LabelSwap(source=int(data.clients[1].labelled.labels[0]), target=99).labels, "attack")


def test_triggered_data_has_copies_at_attackers_and_tests_at_the_others():
    data = prepare_data(resolve("fedproto", given_to("fedproto")))
    bad = triggered(data, {2}, with_trigger, 0, 0.5, "attack")
    before, after = data.clients[2].labelled, bad.clients[2].labelled
    others = int((before.labels != 0).sum())
    assert len(after) == len(before) + -(-others // 2)
    x, y = after.take()
    assert torch.equal(x[: len(before)], before.take()[0]) and bool((y[len(before) :] == 0).all())
    assert bool((with_trigger(x[len(before) :]) == x[len(before) :]).all())
    assert bad.clients[2].triggered is None
    for old, new in zip(data.clients[:2], bad.clients[:2], strict=True):
        assert torch.equal(old.labelled.take()[0], new.labelled.take()[0])
        x, y = new.triggered.take()
        truth = old.test.labels != 0
        assert len(x) == int(truth.sum()) and bool((y == 0).all())
        assert torch.equal(x, with_trigger(old.test.take()[0][truth]))
    assert fingerprint(replace(bad, clients=[replace(c, triggered=None) for c in bad.clients])) == fingerprint(bad)
    with pytest.raises(ProtofedError, match="attack: class 77"):
        triggered(data, {2}, with_trigger, 77, 0.5, "attack")


# --- in a run ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attack", NAMES)
@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto", "local", "fedproc"), methods.available()))
def test_every_attack_with_every_method_runs_or_is_refused_in_one_line(method, attack):
    changes = given_to(method, attack=attack, labels_per_class=4)
    kinds = {part.kind for part in methods.get(method).exchange.up}
    if not kinds & Attack.registry[attack].kinds:
        with pytest.raises(ProtofedError) as refused:
            resolve(method, changes)
        assert "\n" not in str(refused.value) and f"attack={attack}" in str(refused.value)
        return
    if attack == "label-swap" and changes.get("labels") == "server":
        with pytest.raises(ProtofedError, match="changes labels of training samples, and client"):
            build(resolve(method, changes))
        return
    _, federation = build(resolve(method, changes).with_engine(LOOP))
    record = federation.step()
    assert not record.dropped and record.metrics and federation.attackers


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers", "workers stack"]))
@pytest.mark.parametrize("attack", ["random", "label-swap", "backdoor"])
@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_attacks_on_every_engine_equal_the_plain_loop(method, attack, engine):
    assert_same(resolve(method, given_to(method, attack=attack)), ENGINES[engine])


def test_figures_are_those_of_the_honest_clients(tmp_path):
    settings = given_to("fedproto", attack="sign-flip?share=0.4&scale=9", rounds=3, clients=5)
    result = pf.run("fedproto", out=tmp_path / "run", **settings)
    who = result.summary["attackers"]
    assert len(who) == 2 and f"clients {who[0]}, {who[1]} are attackers" in result.summary["notes"][0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    figures = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row, figure in zip(rows, figures, strict=True):
        accuracies = row["accuracy_prototype"]
        assert [c for c, a in enumerate(accuracies) if a is None] == who
        assert figure["accuracy_prototype"] == pytest.approx(mean(a for a in accuracies if a is not None))
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert all(len(row["participants"]) == 5 for row in rounds)
    read = load(tmp_path / "run", data=settings["data"])
    assert read.settings.general.attack == settings["attack"] and read.summary["attackers"] == who


def test_a_table_says_that_its_figures_are_those_of_the_honest_clients(tmp_path):
    settings = given_to("fedproto", attack="random?share=0.4", seeds=2, jobs=1)
    pf.compare(["fedproto", "fedavg"], local=False, out=tmp_path / "c", **settings)
    table = (tmp_path / "c" / "table.md").read_text()
    for method in ("fedproto", "fedavg"):
        assert f"attacked: {method}, 2 of 5 clients are attackers; figures are those of the others" in table


def test_a_run_without_attackers_has_nothing_to_say_of_them():
    result = pf.run("fedproto", **given_to("fedproto"))
    assert "attackers" not in result.summary and "attack_success" not in result.summary["last_five"]


def test_an_attacked_run_that_is_resumed_ends_the_same(tmp_path):
    settings = given_to("fedavg", attack="colluders?share=0.3", checkpoint_every=1, rounds=4)
    whole = pf.run("fedavg", out=tmp_path / "whole", **settings)

    class Enough(Exception):
        pass

    def stop(record, rounds):
        if record.round == 2:
            raise Enough

    with pytest.raises(Enough):
        pf.run("fedavg", out=tmp_path / "cut", watch=stop, **settings)
    again = pf.resume(tmp_path / "cut", data=settings["data"])
    assert again.summary["last_five"] == whole.summary["last_five"]
    assert again.summary["attackers"] == whole.summary["attackers"]


def test_the_success_of_a_backdoor_is_counted_by_hand():
    """FedAvg's clients all have the server's model, so their predictions of triggered samples can be counted directly."""
    settings = resolve("fedavg", given_to("fedavg", attack="backdoor?share=0.4&target=1", epochs=4, rounds=3))
    server, _, records = finish(settings, LOOP)
    _, federation = build(settings.with_engine(LOOP))
    engine = federation.engine
    engine.skeleton.load({**engine.start, **server.weights})
    plain = prepare_data(settings)
    shares = []
    for c, client in enumerate(plain.clients):
        x, y = client.test.take()
        if c not in federation.attackers and bool((y != 1).any()):
            shares.append(
                float((engine.skeleton.outputs(with_trigger(x[y != 1])).logits.argmax(-1) == 1).float().mean())
            )
    assert records[-1].metrics["attack_success"] == pytest.approx(np.mean(shares))


def test_a_robust_rule_withstands_what_a_mean_does_not():
    figures = {}
    for rule in ("mean", "median", "geometric-median", "krum", "multi-krum"):
        changes = given_to(
            "fedavg", attack="sign-flip?scale=20", reduce=rule, clients=10, way=4, shot=4, rounds=4, epochs=3
        )
        figures[rule] = pf.run("fedavg", **changes).accuracy
    assert min(value for rule, value in figures.items() if rule != "mean") > figures["mean"] + 0.1


def test_attackers_act_before_filters_compress(tmp_path):
    settings = resolve("fedproto", given_to("fedproto", attack="scaling?factor=3", filters="clip?norm=0.5"))
    _, federation = build(settings.with_engine(LOOP))
    assert [f.name for f in federation.filters] == ["attack", "clip"]
    downloads, _ = federation.downloads(range(5), 1)
    for _, outcome in federation.engine.train(downloads):
        assert float(wire.decode(outcome.upload).bank.means.norm(dim=-1).max()) <= 0.5 + 1e-5


# --- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        *("sign-flip?share=0", "sign-flip?share=1", "sign-flip?size=2", "flip", "hijack?target=1&source=1"),
        *("label-swap?source=1", "backdoor?poison=0", "backdoor?target=-1", "scaling?factor=x"),
    ],
)
def test_a_wrong_attack_is_said_in_one_line(text):
    with pytest.raises(ProtofedError) as refused:
        resolve("fedproto", given_to("fedproto", attack=text))
    assert "\n" not in str(refused.value)


def test_one_client_alone_is_not_attacked():
    with pytest.raises(ProtofedError, match="one client alone"):
        build(resolve("fedproto", given_to("fedproto", attack="random", clients=1)))


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_is_written_as_it_is_read(name):
    attack = Attack.registry.make(name, {"share": 0.3})
    assert parse_part(Attack.registry, as_text(attack)) == attack


def test_runs_between_sites_refuse_attacks(tmp_path, monkeypatch):
    with pytest.raises(ProtofedError, match="attacks are for simulations"):
        serve("fedproto", {"attack": "random"}, None, ["a"], tmp_path / "run")
    monkeypatch.setattr("protofed.deploy.trial.need_flare", lambda: None)
    with pytest.raises(ProtofedError, match="attacks are for simulations"):
        try_out("fedproto", {"attack": "random"}, 2, tmp_path / "run", tmp_path / "folder")
    assert not (tmp_path / "run").exists() and not (tmp_path / "folder").exists()
    node = Node("a", tmp_path / "a", blobs(), "mlp")
    asked = {"method": "fedproto", "rounds": 1, "clients": 1, "models": [node.model], "attack": "random"}
    header = {"settings": asked, "cards": [node.card().to_json()], "client": 0, "classes": [], "num_classes": 4}
    with pytest.raises(ProtofedError, match="attacks are for simulations"):
        node._build(header, tmp_path)
    assert node._build({**header, "settings": {**asked, "attack": ""}}, tmp_path)[0].client == 0
