"""FixMatch with FedAvg and FedProx, and FedRGD: losses against plain loops, views, and how groups are averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import protofed as pf
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.batches import batches
from protofed.methods.fedrgd import FedRGD
from protofed.methods.fixmatch import FixMatchFedAvg, FixMatchFedProx
from protofed.methods.server import Setup
from protofed.models.skeleton import Skeleton, TrainingNetwork
from protofed.parts import Batch, Paired, Received, Upload
from protofed.parts.feed import epoch_rows
from protofed.wire import Bundle
from support.engines import updated
from support.small import SMALL, blobs

C = 4
SEMI = {**SMALL, "labels": "client", "labels_per_class": 4, "shot": 16}


def network():
    torch.manual_seed(0)
    skeleton = Skeleton(pf.models.build("mlp", (6,), C, hidden=[7], embedding=5))
    return TrainingNetwork(skeleton, skeleton.params)


def batch_of(unlabelled=True):
    g = torch.Generator().manual_seed(1)
    x, y = 3 * torch.randn(5, 6, generator=g), torch.tensor([0, 3, 1, 1, 0])
    batch = Batch(x, y, torch.tensor([1.0, 1, 1, 1, 0]))
    if not unlabelled:
        return batch
    u = 4 * torch.randn(9, 6, generator=g)
    weight = torch.tensor([1.0] * 8 + [0.0])
    return batch._replace(unlabelled=u, weak=u, strong=u + torch.randn(9, 6, generator=g), unlabelled_weight=weight)


def softmax(row):
    top = max(row)
    weights = [math.exp(v - top) for v in row]
    return [w / sum(weights) for w in weights]


def naive(net, batch, threshold, weight):
    with torch.no_grad():
        labelled, weak, strong = (net(x).logits.tolist() for x in (batch.x, batch.weak, batch.strong))
    there = [k for k in range(len(labelled)) if batch.weight[k] > 0]
    ce = -sum(math.log(softmax(labelled[k])[int(batch.y[k])]) for k in there) / len(there)
    pool = [k for k in range(len(weak)) if batch.unlabelled_weight[k] > 0]
    total, accepted, labels = 0.0, [], []
    for k, row in enumerate(weak):
        p = softmax(row)
        labels.append(p.index(max(p)))
        accepted.append(float(max(p) >= threshold))
        if k in pool and accepted[-1]:
            total -= math.log(softmax(strong[k])[labels[-1]])
    return ce, weight * total / len(pool), labels, accepted


@pytest.mark.parametrize("threshold", [0.0, 0.38, 0.48, 0.95, 1.0])
def test_the_loss_equals_plain_loops(threshold):
    net, batch = network(), batch_of()
    made = FixMatchFedAvg(threshold=threshold, unlabelled_weight=0.7).terms(net, batch, Received(), 1)
    ce, unlabelled, labels, accepted = naive(net, batch, threshold, 0.7)
    assert made.terms["ce"].item() == pytest.approx(ce, rel=1e-5)
    assert made.terms["unlabelled"].item() == pytest.approx(unlabelled, rel=1e-5)
    assert made.pseudo.label.tolist() == labels and made.pseudo.accepted.tolist() == accepted
    assert set(made.terms) == {"ce", "unlabelled"}


def test_thresholds_make_a_difference_in_between():
    shares = []
    for threshold in (0.0, 0.38, 0.48, 1.0):
        made = FixMatchFedAvg(threshold=threshold).terms(network(), batch_of(), Received(), 1)
        shares.append(float(made.pseudo.accepted.mean()))
    assert shares[0] == 1 and shares[-1] == 0 and 0 < shares[2] < shares[1] < 1


def test_a_probability_that_is_the_threshold_counts():
    net, batch = network(), batch_of()
    sure = float(net(batch.weak).logits.softmax(-1).max(-1).values[2])
    at = FixMatchFedAvg(threshold=sure).terms(net, batch, Received(), 1).pseudo
    above = FixMatchFedAvg(threshold=sure + 1e-4).terms(net, batch, Received(), 1).pseudo
    assert at.accepted[2] == 1 and above.accepted[2] == 0


def test_no_gradient_goes_through_the_pseudo_label():
    """The gradient of the term is that of cross-entropy with fixed labels."""
    net, batch = network(), batch_of()
    made = FixMatchFedAvg(threshold=0.35).terms(net, batch, Received(), 1)
    params = list(net.params.values())
    grads = torch.autograd.grad(made.terms["unlabelled"], params)
    label, accepted = made.pseudo.label, made.pseudo.accepted
    each = torch.nn.functional.cross_entropy(net(batch.strong).logits, label, reduction="none")
    expected = torch.autograd.grad((each * accepted)[:8].sum() / 8, params)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_fedprox_adds_its_term_and_without_unlabelled_samples_it_is_fedprox():
    net = network()
    received = Received(weights={name: torch.zeros_like(p) for name, p in net.params.items()})
    norm = sum(float((p.detach() ** 2).sum()) for p in net.params.values())
    for batch in (batch_of(), batch_of(False)):
        terms = FixMatchFedProx(mu=0.2).terms(net, batch, received, 1).terms
        assert terms["prox"].item() == pytest.approx(0.1 * norm, rel=1e-5)
    assert set(terms) == {"ce", "prox"}
    assert FixMatchFedProx().mu == 0.01 and FixMatchFedAvg().mu == 0


def test_with_labels_all_it_is_fedavg():
    """Nothing unlabelled and no augmentation: the same numbers."""
    keys = {**SMALL, "data": blobs(), "augmentation": "none"}
    one, other = pf.run("fixmatch-fedavg", **keys), pf.run("fedavg", **keys)
    for a, b in zip(one.metrics, other.metrics, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["accuracy"] == b["accuracy"]


# --- steps and views ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("labelled", "unlabelled", "batch"), [(10, 35, 4), (10, 2, 4), (9, 1, 4), (3, 100, 8)])
def test_an_epoch_goes_through_both_sets(labelled, unlabelled, batch):
    labels = torch.zeros(labelled, dtype=torch.int64)
    steps = list(Paired().steps(labels, unlabelled, 2, batch, 1, torch.Generator().manual_seed(0)))
    plain = list(epoch_rows(labelled, 2, batch, torch.Generator().manual_seed(0)))
    assert len(steps) == len(plain), "as many steps as the labelled set gives"
    half = len(steps) // 2
    for epoch in (steps[:half], steps[half:]):
        assert sorted(torch.cat([s.labelled for s in epoch]).tolist()) == list(range(labelled))
        drawn = torch.cat([s.unlabelled for s in epoch]).tolist()
        assert set(drawn) == set(range(unlabelled)) and min(len(s.unlabelled) for s in epoch) >= 1
        if unlabelled >= half:
            assert len(drawn) == unlabelled, "each once"
        sizes = {len(s.unlabelled) for s in epoch}
        assert max(sizes) - min(sizes) <= 1
    assert all(s.unlabelled is None for s in Paired().steps(labels, 0, 1, batch, 1, torch.Generator()))


seen: list[Batch] = []


@dataclass(frozen=True)
class Watched(FixMatchFedAvg):
    def terms(self, net, batch, received, round):
        seen.append(batch)
        return super().terms(net, batch, received, round)


Watched.name = "watched"


def batches_with(augmentation):
    seen.clear()
    settings = resolve(
        "fixmatch-fedavg", {**SEMI, "data": blobs(per_class=60), "rounds": 1, "augmentation": augmentation}
    )
    _, federation = build(replace(settings, method=Watched()))
    list(federation)
    return list(seen), federation


def test_weak_and_strong_views_and_labelled_samples_weak():
    plain, federation = batches_with("none")
    viewed, _ = batches_with("features")
    rows = {tuple(row) for client in federation.data.clients for row in client.labelled.take()[0].tolist()}
    deviations = {"x": [], "weak": [], "strong": []}
    for one, other in zip(plain, viewed, strict=True):
        assert torch.equal(one.weak, one.unlabelled) and torch.equal(one.strong, one.unlabelled)
        assert all(tuple(row) in rows for row in one.x.tolist())
        assert torch.equal(one.unlabelled, other.unlabelled) and torch.equal(one.y, other.y)
        for name, base in (("x", one.x), ("weak", one.unlabelled), ("strong", one.unlabelled)):
            deviations[name].append((getattr(other, name) - base).flatten())
    spread = {name: float(torch.cat(values).std()) for name, values in deviations.items()}
    assert spread["x"] == pytest.approx(0.05, rel=0.2) and spread["weak"] == pytest.approx(0.05, rel=0.2)
    assert spread["strong"] > 4 * spread["weak"]


# --- FedRGD -------------------------------------------------------------------------------------------------------------
SETUP = Setup(C, 5, 8, {"w": torch.zeros(3)}, seed=0)


def upload(client, samples, value):
    return Upload(client, samples, Bundle(weights={"w": torch.full((3,), float(value))}))


def test_groups_are_averaged_apart_and_then_together():
    method = FedRGD(groups=2, together=2)
    state = method.start(SETUP)
    uploads = [upload(c, 10 * (c + 1), c) for c in range(8)]
    means = []
    for k in (0, 1):
        own = [u for u in uploads if state.group(u.client, 1) == k]
        total = sum(u.samples for u in own)
        means.append(sum(u.samples * u.client for u in own) / total)
    assert means[0] != means[1]
    after = updated(method, state, uploads, 1, SETUP)
    for client in range(8):
        sent = method.exchange.message(after, client, 2).weights["w"]
        assert sent.tolist() == pytest.approx([means[after.group(client, 2)]] * 3)
        assert method.exchange.audience(after, client, 2) == after.group(client, 2), "one message for a group"
    assert after.average["w"].tolist() == pytest.approx([sum(means) / 2] * 3), "each group alike"
    joined = updated(method, after, [upload(c, 1, 6) for c in range(8)], 2, SETUP)
    assert not joined.apart and joined.average["w"].tolist() == [6, 6, 6]
    assert all(method.exchange.message(joined, c, 3).weights["w"].tolist() == [6, 6, 6] for c in range(8))
    assert len({method.exchange.audience(joined, c, 3) for c in range(8)}) == 1


def test_a_group_nobody_came_from_keeps_its_model():
    method = FedRGD(groups=2, together=3)
    state = updated(method, method.start(SETUP), [upload(c, 1, c + 1) for c in range(8)], 1, SETUP)
    alone = [c for c in range(8) if state.group(c, 2) == 0]
    before = state.apart[1]["w"].clone()
    after = updated(method, state, [upload(c, 1, 9) for c in alone], 2, SETUP)
    assert torch.equal(after.apart[1]["w"], before) and after.apart[0]["w"].tolist() == [9, 9, 9]


def test_clients_are_dealt_anew_each_round():
    state = FedRGD(groups=3).start(SETUP)
    deals = [tuple(state.group(c, round) for c in range(30)) for round in (1, 2, 3)]
    assert len(set(deals)) == 3 and all(set(deal) == {0, 1, 2} for deal in deals)


def test_a_client_is_evaluated_by_the_model_of_its_group():
    """It is sent that one for the next round, while the groups are apart."""
    keys = {**SEMI, "data": blobs(per_class=60), "rounds": 1, "epochs": 3, "lr": 0.1, "seed": 1}
    _, federation = build(resolve("fedrgd", keys))
    record = federation.step()
    state, skeleton = federation.state, federation.engine.skeleton
    assert len(state.apart) == 2 and {state.group(c, 2) for c in range(5)} == {0, 1}

    def right(weights, client):
        skeleton.load(weights)
        x, y = federation.data.clients[client].test.take()
        return int((skeleton.outputs(x).logits.argmax(-1) == y).sum())

    mine = [right(state.apart[state.group(c, 2)], c) for c in range(5)]
    assert [s.head for s in record.scores] == mine
    assert mine != [right(state.average, c) for c in range(5)]
    assert mine != [right(state.apart[1 - state.group(c, 2)], c) for c in range(5)]


def test_one_group_is_fixmatch():
    keys = {**SEMI, "data": blobs(per_class=60), "threshold": 0.3}
    one, other = pf.run("fedrgd", groups=1, **keys), pf.run("fixmatch-fedavg", **keys)
    assert [row["loss"] for row in one.metrics] == [row["loss"] for row in other.metrics]


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("fixmatch-fedavg", "threshold", 1.5),
        ("fixmatch-fedavg", "unlabelled_weight", -1),
        ("fixmatch-fedprox", "mu", -1),
        ("fedrgd", "groups", 0),
        ("fedrgd", "together", 0),
    ],
)
def test_bad_settings_are_one_line(method, option, value):
    with pytest.raises(pf.ProtofedError) as error:
        resolve(method, {option: value})
    assert option in str(error.value) and "\n" not in str(error.value)


def test_pseudo_labels_are_recorded():
    result = pf.run(
        "fixmatch-fedavg", **{**SEMI, "data": blobs(per_class=60), "rounds": 12, "lr": 0.05, "threshold": 0.6}
    )
    measures = result.summary["measures"]
    assert 0 < measures["acceptance"] <= 1 and measures["pseudo_accuracy"] > 0.6
    assert "rejection_auroc" not in measures, "no samples of other classes"


@pytest.mark.parametrize("view", ["weak", "none"])
def test_labelled_samples_are_seen_weakly_or_as_they_are(view):
    keys = {**SEMI, "data": blobs(per_class=60), "labelled_view": view, "augmentation": "features"}
    _, federation = build(resolve("fixmatch-fedavg", keys))
    engine, data = federation.engine, federation.data.clients[0]
    own = {tuple(row) for row in data.labelled.take()[0].tolist()}
    seen = [
        tuple(row) for _, batch in batches(engine.task, engine.skeleton, data, None, 0, 1) for row in batch.x.tolist()
    ]
    assert len(seen) == len(own) and (set(seen) == own if view == "none" else not set(seen) & own)
