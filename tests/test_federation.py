"""The plain loop against an independent reference, and what must hold of rounds, streams, drops and counters."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils import _pytree as pytree

import protofed as pf
from protofed import methods, wire
from protofed.bank import PrototypeBank
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.parts import Upload, reduce, weighted_average
from protofed.wire import Bundle
from support.marks import slow_but
from support.reference import naive
from support.small import SMALL, blobs, labels_for

SHORT_RAMP = {"alignment": {"start": 1, "end": 3}}


def settings_for(method, data, **changes):
    extra = SHORT_RAMP if method == "fedsap" else {}
    return resolve(method, {**SMALL, "data": data, **extra, **changes})


def finish(settings):
    _, federation = build(settings)
    return federation, list(federation)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "fedproto", "fedsap"])
def test_every_method_equals_the_naive_reference(method, tiny):
    settings = settings_for(method, tiny, epochs=2, batch=5)
    federation, _ = finish(settings)
    models, server, protos = naive(method, settings, rounds=3)
    if method in ("fedavg", "fedprox"):
        for name, value in server.state_dict().items():
            torch.testing.assert_close(federation.state.weights[name], value, rtol=1e-4, atol=1e-5)
    else:
        for client, model in enumerate(models):
            for name, value in model.state_dict().items():
                mine = federation.engine.states[client].weights[name]
                torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)
    if protos and method != "local":
        bank = federation.state.bank
        if bank is not None:
            assert set(torch.nonzero(bank.known).flatten().tolist()) == set(protos)
            for c, p in protos.items():
                torch.testing.assert_close(bank.means[c], p, rtol=1e-4, atol=1e-5)


def test_fedprox_with_mu_0_is_fedavg_and_with_mu_is_not(tiny):
    plain, _ = finish(settings_for("fedavg", tiny))
    zero, _ = finish(settings_for("fedprox", tiny, mu=0.0))
    pulled, _ = finish(settings_for("fedprox", tiny, mu=5.0))
    name = "head.weight"
    torch.testing.assert_close(plain.state.weights[name], zero.state.weights[name], rtol=0, atol=0)
    assert not torch.allclose(plain.state.weights[name], pulled.state.weights[name])


@pytest.mark.parametrize("method", slow_but(("fedavg", "fedsap"), methods.available()))
def test_methods_learn(method):
    """Each method must be far above chance on separable data: a loss with the wrong sign would not be."""
    # five numbers cannot follow FedTGP's λ = 10; FedMatch multiplies its steps by λ_s = 10; pFedKnow's clients build on
    # what the server knows in their first round; Fed-ARPL sends prototypes from its second phase on
    gentle = {
        "fedtgp": {"weight": 1.0},
        "fedmatch": {"lr": 0.005},
        "pfedknow": {"epochs_at_server": 20},
        "fedarpl": {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0},
    }
    changes = {"rounds": 15, "lr": 0.05, "way": 3, **gentle.get(method, {})}
    result = pf.run(method, **{**SMALL, "data": blobs(), **changes, **labels_for(method)})
    chance = 1 / 4
    assert result.accuracy > chance + 0.25
    if not labels_for(method) or methods.get(method).exchange.prototypes:
        assert result.accuracy_prototype > 0.7
        assert "prototype" in repr(result)
    else:  # nobody who predicts has prototypes
        assert result.accuracy_prototype is None and "prototype" not in repr(result)
        assert all("prototype" not in key for row in (*result.metrics, result.summary["last_five"]) for key in row)


def test_who_is_sent_no_prototypes_yet_has_no_prototype_accuracy():
    """Fed-ARPL in its first phase: clients have no labels of their own, and the server sends a model alone."""
    keys = {**SMALL, "data": blobs(), "rounds": 3, **labels_for("fedarpl"), "phases": 1}
    _, records = finish(resolve("fedarpl", keys))
    assert all(score.by_prototype is None for record in records for score in record.scores)
    assert all("accuracy_head" in r.metrics and "accuracy_prototype" not in r.metrics for r in records)
    assert pf.run("fedarpl", **keys).accuracy_prototype is None


def test_fedsap_mechanisms_switch_off(tiny):
    terms = {}
    for name, changes in {
        "both": {},
        "no proxy": {"proxy": False},
        "no curriculum": {"curriculum": False},
    }.items():
        _, records = finish(settings_for("fedsap", tiny, **changes))
        terms[name] = [r.terms for r in records]
    assert "proxy" not in terms["no proxy"][1] and terms["both"][1]["proxy"] > 0
    # round 1 has no prototypes; round 2 is the first with alignment: in full without the curriculum, half way with it
    assert terms["both"][0]["align"] == 0
    first = methods.get("fedsap", alignment={"shape": "linear", "start": 1, "end": 3, "maximum": 0.7})
    assert first.alignment_weight(2) == pytest.approx(0.35)
    assert replace(first, curriculum=False).alignment_weight(1) == 0.7
    assert terms["no curriculum"][1]["align"] > 0


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "sigmoid", "step"])
def test_fedsap_takes_every_schedule(shape, tiny):
    settings = settings_for("fedsap", tiny, alignment={"shape": shape, "start": 1, "end": 3, "maximum": 0.5})
    _, records = finish(settings)
    assert settings.method.alignment.shape == shape
    assert records[-1].terms["align"] > 0


def test_same_seed_same_result_and_another_seed_another(tiny):
    a, b, c = (pf.run("fedsap", **{**SMALL, "data": tiny, "seed": s}) for s in (1, 1, 2))
    strip = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows]  # noqa: E731
    assert strip(a.metrics) == strip(b.metrics)
    assert strip(a.metrics) != strip(c.metrics)


def test_evaluating_less_often_changes_no_stream(tiny):
    often, _ = finish(settings_for("fedsap", tiny, rounds=9))
    rarely, records = finish(settings_for("fedsap", tiny, rounds=9, evaluate_every=3))
    evaluated = [r.round for r in records if r.scores is not None]
    assert evaluated == [3, 5, 6, 7, 8, 9]  # the last five rounds always count
    for client, state in often.engine.states.items():
        for name, value in state.weights.items():
            assert torch.equal(value, rarely.engine.states[client].weights[name])


def test_adding_a_client_changes_no_other_clients_batches(tiny):
    """Local training of client 0 must not depend on who else is there, given the same data."""
    _, five = build(settings_for("local", tiny))
    _, six = build(settings_for("local", tiny))
    six.data.clients.append(six.data.clients[0])
    six.engine.owner, six.architectures = (0,) * 6, ("mlp",) * 6
    list(five), list(six)
    for name, value in five.engine.states[0].weights.items():
        assert torch.equal(value, six.engine.states[0].weights[name])
    assert not torch.equal(six.engine.states[5].weights["head.weight"], value)


def test_partial_participation(tiny):
    federation, records = finish(settings_for("fedproto", tiny, participation=0.5, rounds=6))
    assert all(len(r.participants) == 2 for r in records)
    assert len({tuple(r.participants) for r in records}) > 1
    seen = {c for r in records for c in r.participants}
    assert set(federation.engine.states) == seen
    assert all(len(r.scores) == 5 for r in records)  # everyone is evaluated


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.slow
def test_optimisers(optimiser, keep, tiny):
    settings = settings_for("fedproto", tiny, optimiser=optimiser, keep_optimiser=keep, lr=0.003, weight_decay=0.1)
    federation, records = finish(settings)
    assert records[-1].loss < records[0].loss
    assert bool(federation.engine.states[0].optimiser) == keep
    other, _ = finish(settings_for("fedproto", tiny, optimiser=optimiser, keep_optimiser=keep, lr=0.003))
    a, b = (f.engine.states[0].weights["head.weight"] for f in (federation, other))
    assert not torch.equal(a, b)  # weight decay does something


def test_initial_models_same_or_own(tiny):
    _, same = build(settings_for("fedproto", tiny))
    _, own = build(settings_for("fedproto", tiny, initial="own"))
    name = "head.weight"
    assert torch.equal(same.engine.state(0).weights[name], same.engine.state(1).weights[name])
    assert not torch.equal(own.engine.state(0).weights[name], own.engine.state(1).weights[name])
    assert torch.equal(own.engine.state(1).weights[name], own.engine.state(1).weights[name])


def break_client(federation, client):
    """Give one client samples so large that its training overflows."""
    data = federation.data.clients[client]
    x = data.labelled.x.clone()
    x[data.labelled.index] *= 1e38
    pool = data.unlabelled
    if pool is not None:
        u = pool.x.clone()
        u[pool.index] *= 1e38
        pool = replace(pool, x=u)
    federation.data.clients[client] = replace(data, labelled=replace(data.labelled, x=x), unlabelled=pool)


@pytest.mark.parametrize(
    "method", slow_but(("fedavg", "fedproto"), [n for n in methods.available() if methods.get(n).exchange.asks_clients])
)
def test_a_client_that_goes_to_nan_is_dropped_and_keeps_its_model(method, tiny, caplog):
    _, federation = build(settings_for(method, tiny, rounds=2, **labels_for(method)))
    break_client(federation, 3)
    with caplog.at_level(logging.WARNING, "protofed"):
        records = list(federation)
    assert all(set(r.dropped) == {3} for r in records)
    assert "client 3" in caplog.text and "NaN" in caplog.text
    assert all(torch.isfinite(w).all() for w in federation.engine.state(3).weights.values())
    name = next(name for name in federation.engine.start if name.endswith("head.weight"))
    assert torch.equal(federation.engine.state(3).weights[name], federation.engine.start[name])
    assert all(v == v for v in records[-1].terms.values())
    tensors = [value for value in pytree.tree_leaves(federation.state) if isinstance(value, torch.Tensor)]
    assert tensors or method == "local"
    assert all(torch.isfinite(value).all() for value in tensors)


def test_a_round_in_which_everyone_fails_changes_nothing(tiny):
    _, federation = build(settings_for("fedproto", tiny, rounds=1))
    for client in range(5):
        break_client(federation, client)
    before = federation.state
    record = federation.step()
    assert len(record.dropped) == 5 and federation.state is before and record.loss != record.loss


def test_a_bad_upload_is_dropped_and_named(tiny):
    @dataclass(frozen=True)
    class Broken(methods.fedproto.FedProto):
        def returned(self, trained, received, round):
            bank = trained.bank()
            if int(bank.counts.sum()) == sizes[2]:
                return wire.Bundle(bank=PrototypeBank(bank.means[:, :-1], bank.counts))
            return wire.Bundle(bank=bank)

    settings = settings_for("fedproto", tiny, rounds=2, shot_spread=3.0)
    _, probe = build(settings)
    sizes = [len(c.labelled) for c in probe.data.clients]
    _, records = finish(replace(settings, method=Broken()))
    expected = {i for i, n in enumerate(sizes) if n == sizes[2]}
    assert set(records[0].dropped) == expected
    assert f"client {min(expected)}" in records[0].dropped[min(expected)]
    assert "shape" in records[0].dropped[min(expected)]


@pytest.mark.parametrize("method", ["fedproto", "fedapa"])
def test_a_bank_by_another_name_is_dropped_and_named(method, tiny):
    """`banks={"bank": …}` is not the bank that was asked for, and must not end the run."""

    @dataclass(frozen=True)
    class Renamed(methods.registry[method]):
        def returned(self, trained, received, round):
            given = super().returned(trained, received, round)
            return replace(given, bank=None, banks={"bank": given.bank}) if given.bank.known[odd] else given

    settings = settings_for(method, tiny, rounds=2)
    _, probe = build(settings)
    holders = [{k for k, client in enumerate(probe.data.clients) if client.classes[c]} for c in range(4)]
    odd, expected = min(enumerate(holders), key=lambda pair: len(pair[1]) or 9)
    assert 0 < len(expected) < 5
    _, records = finish(replace(settings, method=Renamed()))
    assert all(set(r.dropped) == expected for r in records)
    assert all(f"client {c}" in why and "bank" in why for c, why in records[0].dropped.items())


@pytest.mark.parametrize(
    ("way", "dim", "classes", "parameters"),
    [(3, 50, 10, 3_000), (3, 512, 10, 30_720), (10, 512, 100, 102_400)],
)
def test_fedsap_table_2_follows_from_the_counters(way, dim, classes, parameters):
    """20 clients, n classes each: N·n·d parameters travel up in a round (FEMNIST, CIFAR-10, CIFAR-100 settings)."""
    data = blobs(classes=classes, per_class=60, features=4, test_per_class=1)
    settings = resolve(
        "fedsap",
        {**SMALL, "data": data, "clients": 20, "way": way, "shot": 2, "spread": 0, "embedding": dim, "rounds": 1},
    )
    _, records = finish(settings)
    assert records[0].up["prototypes"] == 4 * parameters
    assert records[0].up["weights"] == records[0].down["weights"] == 0


def test_fedavg_sends_the_whole_model_both_ways(tiny):
    federation, records = finish(settings_for("fedavg", tiny, rounds=1))
    size = sum(4 * v.numel() for v in federation.engine.start.values())
    assert records[0].up["weights"] == records[0].down["weights"] == 5 * size
    assert records[0].up["prototypes"] == 0


def test_local_sends_nothing_but_empty_frames(tiny):
    _, records = finish(settings_for("local", tiny, rounds=1))
    assert records[0].up["prototypes"] == records[0].up["weights"] == records[0].up["scalars"] == 0


def test_evaluation_counts_by_hand(tiny):
    """Head accuracy over all classes, prototype accuracy among the client's own, both on its own classes' test rows."""
    federation, records = finish(settings_for("fedproto", tiny))
    bank = federation.state.bank
    for client, data in enumerate(federation.data.clients):
        own = sorted(data.labelled.labels.unique().tolist())
        x, y = data.test.take()
        assert sorted(y.unique().tolist()) == own
        federation.engine.skeleton.load(federation.engine.states[client].weights)
        z, logits = federation.engine.skeleton.outputs(x)
        head = sum(int(logits[i].argmax()) == int(y[i]) for i in range(len(y)))
        near = 0
        for i in range(len(y)):
            distances = {c: float(((z[i] - bank.means[c]) ** 2).sum()) for c in own}
            near += min(distances, key=distances.get) == int(y[i])
        scores = records[-1].scores[client]
        assert (scores.head, scores.prototype, scores.samples) == (head, near, len(y))


@pytest.mark.usefixtures("own_names")
def test_a_method_is_one_registration(tiny):
    """What CONTRIBUTING promises: a dataclass and a decorator, and it runs by name."""

    @methods.register("always-zero")
    @dataclass(frozen=True)
    class Quiet(methods.Method):
        """Nothing is learned."""

        def terms(self, net, batch, received, round):
            _, logits = net(batch.x)
            return {"nothing": 0 * logits.sum()}

    result = pf.run("always-zero", **{**SMALL, "data": tiny})
    assert result.metrics[0]["accuracy_head"] == result.metrics[-1]["accuracy_head"]


def test_best_on_validation_is_chosen_by_validation_and_never_by_test(tiny):
    result = pf.run("fedproto", **{**SMALL, "data": tiny, "rounds": 6, "validation_share": 0.25, "shot": 12})
    best = result.summary["best_on_validation"]
    assert all(row["validation"] == row["validation_prototype"] for row in result.metrics), "as FedProto predicts"
    top = max(row["validation"] for row in result.metrics)
    chosen = next(row for row in result.metrics if row["validation"] == top)
    assert best["round"] == chosen["round"] and best["accuracy_head"] == chosen["accuracy_head"]
    assert "best_on_validation" not in pf.run("fedproto", **{**SMALL, "data": tiny}).summary
    last = [row["accuracy_head"] for row in result.metrics[-5:]]
    assert result.summary["last_five"]["accuracy_head"] == pytest.approx(sum(last) / 5)
    assert result.summary["last_round"]["accuracy_head"] == last[-1]


def test_local_test_split_is_the_clients_own_data(tiny):
    _, federation = build(settings_for("fedproto", tiny, test="local", shot=10))
    for client in federation.data.clients:
        assert client.test.x is client.labelled.x
        assert not set(client.test.index.tolist()) & set(client.labelled.index.tolist())
    assert all(s.samples > 0 for s in federation.step().scores)


def test_natural_clients_are_counted_from_the_data():
    data = blobs()
    groups = torch.arange(len(data.y_train)) % 7
    natural = replace(data, group_train=groups)
    keys = {k: v for k, v in SMALL.items() if k not in ("clients", "way", "shot", "partition")}
    result = pf.run("fedproto", data=natural, partition="natural", **keys)
    assert result.summary["clients"] == 7


def test_weights_are_averaged_the_same_in_pieces_of_any_size(monkeypatch):
    uploads = [
        Upload(k, k + 1, Bundle(weights={"w": torch.randn(7, 5), **({"own": torch.randn(3)} if k else {})}))
        for k in range(4)
    ]
    wanted = sum(u.samples * u.content.weights["w"].double() for u in uploads) / 10
    wanted_own = sum(u.samples * u.content.weights["own"].double() for u in uploads[1:]) / 9
    for block in (1, 4, 35, 100):
        monkeypatch.setattr(reduce, "BLOCK", block)
        found = weighted_average(uploads, lambda upload: upload.samples)
        torch.testing.assert_close(found["w"], wanted.float())
        torch.testing.assert_close(found["own"], wanted_own.float())


def test_weights_are_averaged_within_each_architecture_by_the_marks_of_their_names():
    uploads = [Upload(k, k + 1, Bundle(weights={f"{k % 2}:w": torch.randn(3, 2)})) for k in range(4)]
    found = weighted_average(uploads, lambda upload: upload.samples)
    for which, total in ((0, 1 + 3), (1, 2 + 4)):
        wanted = sum(u.samples * u.content.weights[f"{which}:w"].double() for u in uploads[which::2]) / total
        torch.testing.assert_close(found[f"{which}:w"], wanted.float())
