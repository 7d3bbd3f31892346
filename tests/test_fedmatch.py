"""FedMatch: two halves with losses of their own, agreement labels, helpers, and the bytes of ProtoFSSL's Table 2."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import protofed as pf
from protofed import wire
from protofed.evaluate.cost import client_bytes
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.mixed import for_architecture
from protofed.methods.fedmatch import FedMatch, fixed_input
from protofed.methods.server import Setup
from protofed.models.decomposed import PSI, Decomposed
from protofed.models.skeleton import Skeleton, TrainingNetwork
from protofed.parts import Batch, Received, Upload
from protofed.wire import Bundle
from support.engines import updated
from support.small import SMALL, blobs

C = 4
SEMI = {**SMALL, "labels": "client", "labels_per_class": 4, "shot": 16, "lr": 0.002}


def network(method, seed=0):
    """A network in training with both halves, as an engine has it."""
    torch.manual_seed(seed)
    model = pf.models.build("mlp", (6,), C, hidden=[7], embedding=5)
    skeleton = Skeleton(Decomposed(model, method.predict.halves))
    return TrainingNetwork(skeleton, skeleton.params)


def plain_model(skeleton):
    """The model whose parameters are the sums, by itself."""
    return skeleton.module.whole[0]


def collapsed(weights):
    """The weights of the whole model: σ + ψ, and buffers as they are."""
    whole = {n: v for n, v in weights.items() if not n.startswith(PSI)}
    return {n: v + weights[PSI + n] if PSI + n in weights else v for n, v in whole.items()}


def batch_of():
    g = torch.Generator().manual_seed(1)
    u = 4 * torch.randn(9, 6, generator=g)
    return Batch(
        3 * torch.randn(5, 6, generator=g),
        torch.tensor([0, 3, 1, 1, 0]),
        torch.tensor([1.0, 1, 1, 1, 0]),
        unlabelled=u,
        weak=u,
        strong=u + torch.randn(9, 6, generator=g),
        unlabelled_weight=torch.tensor([1.0] * 8 + [0.0]),
    )


def helper_models(method, number=2):
    made = [network(method, seed=10 + k).params for k in range(number)]
    return {f"helper{k}": {n: 3 * v.detach() for n, v in own.items()} for k, own in enumerate(made)}


def halves(net):
    sigma = {n: p for n, p in net.params.items() if not n.startswith(PSI)}
    return sigma, {n: net.params[PSI + n] for n in sigma}


# --- two halves ---------------------------------------------------------------------------------------------------------
class Small(nn.Module):
    """One parameter and one buffer, whose values are the outputs."""

    dim = 2

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.full((3,), 5.0))

    def forward(self, x):
        return pf.models.base.Output(self.a.expand(len(x), -1), self.buffer.expand(len(x), -1))


def test_a_model_becomes_two_halves_and_runs_as_their_sum():
    method = FedMatch(psi_start=0.2)
    assert method.predict.halves == 0.2
    skeleton = Skeleton(Decomposed(Small(), method.predict.halves))
    expanded = skeleton.weights()
    assert set(expanded) == {"a", "buffer", "psi.a"} and torch.equal(expanded["psi.a"], torch.full((2,), 0.2))
    assert set(skeleton.params) == {"a", "psi.a"}
    whole = skeleton.outputs(torch.zeros(1, 6))
    assert torch.allclose(whole.embedding, torch.full((1, 2), 1.2))
    assert torch.equal(whole.logits, torch.full((1, 3), 5.0)), "buffers are not halved"
    assert torch.allclose(collapsed(expanded)["a"], torch.full((2,), 1.2))


def test_each_half_learns_from_its_own_terms_alone():
    method = FedMatch(threshold=0.3, helpers=2)
    net, batch = network(method), batch_of()
    received = Received(models=helper_models(method))
    made = method.terms(net, batch, received, 2)
    sigma, psi = halves(net)
    assert set(psi) == set(sigma) == set(dict(plain_model(net.skeleton).named_parameters()))
    theta = {n: (sigma[n] + psi[n]).detach().requires_grad_() for n in sigma}

    def run(x, params=None):
        return functional_call(plain_model(net.skeleton), theta if params is None else params, (x,)).logits

    # σ: λ_s times cross-entropy at θ, and nothing else
    ce = nn.functional.cross_entropy(run(batch.x)[:4], batch.y[:4])
    expected = torch.autograd.grad(10 * ce, list(theta.values()))
    whole = torch.autograd.grad(sum(made.terms.values()), list(sigma.values()), retain_graph=True)
    for one, other in zip(whole, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    # ψ: agreement, helpers, L1 and L2
    p = run(batch.weak).softmax(-1).detach()
    helped = [run(batch.weak, collapsed(received.models[f"helper{k}"])).softmax(-1).detach() for k in (0, 1)]
    mask = (p.max(-1).values >= 0.3)[:8]
    assert bool(mask.any())
    labels = []
    for k in range(9):
        votes = Counter(int(q[k].argmax()) for q in (p, *helped))
        labels.append(min(votes, key=lambda c: (-votes[c], c)))
    assert made.pseudo.label.tolist() == labels
    loss = torch.zeros(())
    for k in range(8):
        if mask[k]:
            loss = loss - 0.01 * run(batch.strong)[k].log_softmax(-1)[labels[k]] / 8
            for q in helped:
                kl = (q[k] * (q[k].log() - run(batch.weak)[k].log_softmax(-1))).sum()
                loss = loss + 0.01 * kl / 8 / 2
    expected = torch.autograd.grad(loss, list(theta.values()))
    made_psi = torch.autograd.grad(sum(made.terms.values()), list(psi.values()))
    for name, one, other in zip(psi, made_psi, expected, strict=True):
        regular = 1e-4 * psi[name].sign() - 2 * 10 * (sigma[name] - psi[name]).detach()
        torch.testing.assert_close(one, other + regular, rtol=1e-4, atol=1e-5)


def test_terms_by_hand():
    method = FedMatch(l1=0.5, l2=2.0)
    net = network(method)
    terms = method.terms(net, batch_of(), Received(), 1).terms
    sigma, psi = halves(net)
    assert terms["l1"].item() == pytest.approx(0.5 * sum(float(p.detach().abs().sum()) for p in psi.values()), rel=1e-5)
    apart = sum(float(((sigma[n] - psi[n]).detach() ** 2).sum()) for n in sigma)
    assert terms["l2"].item() == pytest.approx(2 * apart, rel=1e-5)
    assert terms["helpers"].item() == 0, "no helper yet"
    labelled = method.terms(net, batch_of()._replace(weak=None, strong=None), Received(), 1)
    assert set(labelled.terms) == {"ce", "l1", "l2"} and labelled.pseudo is None


# --- agreement ----------------------------------------------------------------------------------------------------------
class Linear(nn.Module):
    """Logits are the sample times one matrix, so that anyone's answer can be written down."""

    dim = 3

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return pf.models.base.Output(x, x @ self.w)


def answers(*helpers, own=1.0, threshold=0.5):
    """What the client whose logits are its sample takes for the label, beside helpers with these matrices."""
    method = FedMatch(threshold=threshold)
    skeleton = Skeleton(Decomposed(Linear(), 0.0))
    x = torch.tensor([[own, 0.0, 0.0]])
    batch = Batch(x, torch.tensor([0]), torch.ones(1), unlabelled=x, weak=x, strong=x, unlabelled_weight=torch.ones(1))
    sent = {
        f"helper{k}": {"w": torch.tensor(rows) / 2, f"{PSI}w": torch.tensor(rows) / 2} for k, rows in enumerate(helpers)
    }
    return method.terms(TrainingNetwork(skeleton, skeleton.params), batch, Received(models=sent), 2).pseudo


TO_1 = [[0.0, 9.0, 0.0], [0.0] * 3, [0.0] * 3]
TO_2 = [[0.0, 0.0, 9.0], [0.0] * 3, [0.0] * 3]


def test_the_label_is_what_most_agree_on():
    assert answers().label.tolist() == [0]
    assert answers(TO_1, TO_1).label.tolist() == [1], "two helpers outvote the client"
    assert answers(TO_2, TO_2).label.tolist() == [2]
    assert answers(TO_1, TO_2).label.tolist() == [0], "all differ: the first class"


def test_whether_it_counts_is_the_clients_own_confidence():
    assert answers(TO_1, TO_1, own=5.0).accepted.tolist() == [1]
    assert answers(TO_1, TO_1, own=0.1).accepted.tolist() == [0]


# --- helpers ------------------------------------------------------------------------------------------------------------
def server(method, number=6, architectures=None, rounds=1, who=None):
    architectures = architectures or (0,) * number
    setup = Setup(C, 5, number, {"w": torch.zeros(1)}, 0, architectures)
    state = method.start(setup)
    for round in range(1, rounds + 1):
        uploads = [upload(c, 100 * round + c) for c in (range(number) if who is None else who[round - 1])]
        state = updated(method, state, uploads, round, setup)
    return state


def upload(client, value):
    """Clients whose numbers are near answer alike."""
    response = torch.full((C,), float(client) ** 2)
    return Upload(client, 1, Bundle(weights={"w": torch.full((1,), float(value))}, tensors={"response": response}))


def helpers_of(method, state, client, round=2):
    models = method.exchange.message(state, client, round).models
    return [int(weights["w"]) % 100 for _, weights in sorted(models.items())]


def test_helpers_are_the_nearest_and_never_the_client_itself():
    method = FedMatch(helpers=2)
    state = server(method)
    for client in range(6):
        distance = {c: abs(c**2 - client**2) for c in range(6) if c != client}
        assert helpers_of(method, state, client) == sorted(distance, key=lambda c: distance[c])[:2]
    for number, found in ((9, 5), (0, 0)):
        other = FedMatch(helpers=number)
        assert len(helpers_of(other, server(other), 0)) == found, "no more than there are"


def test_helpers_are_sent_in_the_round_after_their_own_every_refresh():
    method = FedMatch(helpers=1, refresh=3)
    for rounds in range(10):
        state = server(method, rounds=rounds) if rounds else method.start(Setup(C, 5, 6, {}, 0, (0,) * 6))
        sent = method.exchange.message(state, 2, rounds + 1).models
        assert bool(sent) == (rounds + 1 in (2, 5, 8)), rounds
        if sent:
            (weights,) = sent.values()
            assert int(weights["w"]) // 100 == rounds, "the models of the round before"


def test_candidates_are_the_clients_of_the_refresh_round():
    method = FedMatch(helpers=5, refresh=2)
    state = server(method, rounds=3, who=[[0, 1, 2, 3, 4, 5], [0, 5], [1, 4]])
    assert sorted(helpers_of(method, state, 0, round=4)) == [1, 4]
    assert helpers_of(method, state, 1, round=4) == [4]
    assert set(state.candidates) == {1, 4}, "the server keeps no more models"


def test_a_client_that_has_not_answered_takes_any():
    method = FedMatch(helpers=2)
    state = server(method, who=[[1, 4]])
    assert sorted(helpers_of(method, state, 0)) == [1, 4]


def test_helpers_have_the_clients_architecture():
    method = FedMatch(helpers=5)
    setup = Setup(C, 5, 4, {}, 0, (0, 1, 0, 1))
    marked = [
        Upload(c, 1, Bundle(weights={f"{c % 2}:w": torch.full((1,), float(c))}, tensors={"response": torch.zeros(C)}))
        for c in range(4)
    ]
    state = updated(method, method.start(setup), marked, 1, setup)
    for client in range(4):
        sent = for_architecture(method.exchange.message(state, client, 2), client % 2)
        assert sent.models == {"helper0": {"w": torch.tensor([float((client + 2) % 4)])}}


def test_a_client_keeps_its_helpers_until_new_ones_come():
    settings = resolve("fedmatch", {**SEMI, "data": blobs(per_class=60), "rounds": 5, "refresh": 3, "threshold": 0.3})
    _, federation = build(settings)
    kept, own = [], {}
    for record in federation:
        memories = {c: s.memory.models for c, s in federation.engine.export().items()}
        kept.append({c: m["helper0"]["head.weight"].clone() for c, m in memories.items() if m})
        if record.round == 1:
            own = {c: federation.state.candidates[c]["head.weight"] for c in range(5)}
        if record.round == 2:
            for client, helper in kept[-1].items():
                assert not torch.equal(helper, own[client])
                assert any(torch.equal(helper, value) for c, value in own.items() if c != client)
            assert record.terms["helpers"] > 0
    assert kept[0] == {} and len(kept[1]) == 5
    for client in range(5):
        assert torch.equal(kept[1][client], kept[2][client]) and torch.equal(kept[2][client], kept[3][client])
        assert not torch.equal(kept[3][client], kept[4][client])


def test_the_response_is_that_of_the_whole_model_to_fixed_noise():
    settings = resolve("fedmatch", {**SEMI, "data": blobs(per_class=60), "rounds": 1})
    _, federation = build(settings)
    list(federation)
    whole = Skeleton(plain_model(federation.engine.skeleton))
    x = fixed_input(torch.zeros(3, 6))
    assert x.shape == (1, 6) and torch.equal(x, fixed_input(torch.ones(1, 6)))
    assert not fixed_input(torch.ones(2, 5, dtype=torch.int64)).any()
    for client in range(5):
        whole.load(collapsed(federation.state.candidates[client]))
        torch.testing.assert_close(federation.state.response[client], whole.outputs(x).logits[0])


def test_it_is_evaluated_by_the_sum_of_both_halves():
    settings = resolve("fedmatch", {**SEMI, "data": blobs(per_class=60), "rounds": 3})
    _, federation = build(settings)
    records = list(federation)
    whole = Skeleton(plain_model(federation.engine.skeleton))
    whole.load(collapsed(federation.state.weights))
    right = [
        float((whole.outputs(c.test.take()[0]).logits.argmax(-1) == c.test.labels).float().mean())
        for c in federation.data.clients
    ]
    assert records[-1].metrics["accuracy"] == pytest.approx(sum(right) / 5)


@pytest.mark.parametrize(("option", "value"), [("helpers", -1), ("refresh", 0), ("threshold", 2.0)])
def test_bad_settings_are_one_line(option, value):
    with pytest.raises(pf.ProtofedError) as error:
        resolve("fedmatch", {option: value})
    assert option in str(error.value) and "\n" not in str(error.value)


# --- the paper's Table 2 ------------------------------------------------------------------------------------------------
def test_ten_rounds_of_fedmatch_on_cifar10_are_115_6_mb_each():
    parameters = 6_568_640
    with torch.device("meta"):
        assert pf.models.parameter_count(pf.models.build("resnet9", (3, 32, 32), 10)) == parameters
    method = FedMatch(helpers=2, refresh=10)
    both = {name: torch.zeros(parameters) for name in ("model", f"{PSI}model")}
    setup = Setup(10, 512, 3, both, 0, (0,) * 3)
    up = Bundle(weights=both, tensors={"response": torch.zeros(10)})
    state = updated(method, method.start(setup), [Upload(c, 540, up) for c in range(3)], 1, setup)
    rounds = []
    for round in range(2, 12):
        down = method.exchange.message(state, 0, round)
        if round in (2, 3):  # with helpers and without; the others are as the second
            rounds.append(sum(wire.sizes(wire.encode(b))["weights"] for b in (up, down)))
        assert bool(down.models) == (round == 2)
    mean = (rounds[0] + 9 * rounds[1]) / 10
    formula = client_bytes("fedmatch", parameters, helpers=2, refresh=10, classes=10, dim=512)
    assert mean == pytest.approx(formula, rel=1e-12) and mean == pytest.approx(115.6e6, abs=0.05e6)


def test_a_response_of_the_wrong_length_is_dropped_with_its_client(monkeypatch):
    """One bad client must not stop the round."""
    honest = FedMatch.returned

    def short(self, trained, received, round):
        bundle = honest(self, trained, received, round)
        if len(trained.outputs()[1].y) == largest:
            return replace(bundle, tensors={"response": bundle.tensors["response"][:1]})
        return bundle

    monkeypatch.setattr(FedMatch, "returned", short)
    keys = {**SMALL, "data": blobs(per_class=60), "labels": "client", "labels_per_class": 4, "shot": 16, "lr": 0.001}
    _, federation = build(resolve("fedmatch", {**keys, "shot_spread": 3.0, "rounds": 1}))
    sizes = [len(c.labelled) for c in federation.data.clients]
    largest = max(sizes)
    record = federation.step()
    assert set(record.dropped) == {c for c, n in enumerate(sizes) if n == largest}
    assert all("response" in why for why in record.dropped.values())
