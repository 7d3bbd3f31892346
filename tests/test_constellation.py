"""Constellation: the discriminant rule of a federation is that of the pooled samples, and what it sends, it sends once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import protofed as pf
from protofed import aggregate
from protofed.bank import PrototypeBank
from protofed.classifier import load
from protofed.classifier.card import export_with_card
from protofed.common import CommonSpace
from protofed.experiment.build import build, prepare_data
from protofed.experiment.settings import resolve
from protofed.federation.local import with_memory
from protofed.methods.constellation import half_of, whole_of
from support.engines import ENGINES, LOOP
from support.errors import refusal
from support.small import SMALL, blobs
from test_guard import LIAR, lying
from test_published import published

WIDTH = 12


def federation_of(**changes):
    settings = resolve("constellation", {**SMALL, "data": blobs(), "width": WIDTH, **changes}).with_engine(LOOP)
    return build(settings)[1], prepare_data(settings)


def finished(federation):
    try:
        return list(federation)
    finally:
        federation.engine.close()


def pooled(data, clients):
    """Class means, and the covariance around each client's own, by plain loops over all samples of some clients."""
    space = CommonSpace(data.sample_shape, WIDTH)
    rows, scatter, freedom = {}, np.zeros((WIDTH, WIDTH)), 0
    for client in clients:
        x, y = data.clients[client].labelled.take()
        features = space(x).double().numpy()
        for c in set(y.tolist()):
            own = features[y.numpy() == c]
            rows.setdefault(c, []).extend(own)
            for row in own:
                scatter += np.outer(row - own.mean(0), row - own.mean(0))
            freedom += len(own) - 1
    return {c: np.mean(found, 0) for c, found in rows.items()}, scatter / freedom


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_server_knows_the_pooled_statistics_of_all_who_took_part(participation):
    federation, data = federation_of(rounds=4, participation=participation)
    records = finished(federation)
    clients = sorted({client for record in records for client in record.participants})
    means, scatter = pooled(data, clients)
    state = federation.state
    assert set(means) == set(state.stars.known.nonzero().flatten().tolist())
    for c, mean in means.items():
        assert state.stars.means[c].numpy() == pytest.approx(mean, abs=1e-4)
    assert whole_of(state.scatter.means).numpy() == pytest.approx(scatter, abs=1e-4)


def test_the_nearest_prototype_is_the_nearest_mean_by_the_covariance():
    federation, data = federation_of(rounds=2, shrinkage=0.2, trust=0.5)
    finished(federation)
    state = federation.state
    means, scatter = pooled(data, range(len(data.clients)))
    within = 0.8 * scatter + 0.2 * np.eye(WIDTH) * np.trace(scatter) / WIDTH
    x, _ = data.clients[0].test.take()
    features = CommonSpace(data.sample_shape, WIDTH)(x)
    distances = state.prototypes.distances(features @ state.discriminants.T)
    classes = sorted(means)
    for row, found in zip(features.double().numpy(), distances, strict=True):
        wanted = [0.5 * (row - means[c]) @ np.linalg.solve(within, row - means[c]) for c in classes]
        # the map leaves out what is the same for all classes, so differences are compared
        wanted, got = np.array(wanted), found[classes].double().numpy()
        assert got - got[0] == pytest.approx(wanted - wanted[0], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 9])
def test_half_of_a_symmetric_matrix_is_all_of_it(width):
    matrix = torch.randn(width, width)
    assert torch.equal(whole_of(half_of(matrix + matrix.T)), matrix + matrix.T)


def test_statistics_and_the_sky_are_sent_once():
    federation, _ = federation_of(rounds=4, width=64)
    records = finished(federation)
    up, down = ([sum(getattr(record, way).values()) for record in records] for way in ("up", "down"))
    assert all(size < up[0] / 4 for size in up[1:])
    assert down[1] > 4 * down[2] and down[2] == down[3]  # what is made in the first round is sent in the second


def test_who_was_away_is_told_what_has_changed_since():
    """At the end every client's model holds the present map, however seldom it took part."""
    federation, data = federation_of(rounds=6, participation=0.5)
    records = finished(federation)
    seen = {client for record in records for client in record.participants}
    state = federation.state
    assert set(state.heard.nonzero().flatten().tolist()) == seen
    downloads, _ = federation.downloads(range(len(data.clients)), 7, federation.method.predict.reads)
    for client in range(len(data.clients)):
        message = federation.engine.message(downloads, client)
        assert (message.bank is None) == bool(state.told[client])
        _, weights = federation.engine.begun(message, client)
        assert torch.equal(weights["map"], state.discriminants)
        assert set(weights["known"].nonzero().flatten().tolist()) >= set(state.stars.known.nonzero().flatten().tolist())


def test_a_client_that_lost_what_it_was_sent_says_so():
    federation, _ = federation_of(rounds=2)
    finished(federation)
    message = pf.wire.Bundle(scalars={"arrived": 1.0})
    assert "has not kept them" in refusal(lambda: federation.method.begin({}, with_memory(message, pf.wire.Bundle())))


def test_statistics_that_were_refused_are_asked_for_again():
    def huge(bundle):
        stars = bundle.banks["stars"]
        return pf.wire.Bundle(
            banks={**bundle.banks, "stars": PrototypeBank(1e9 * stars.means, stars.counts)}, scalars=bundle.scalars
        )

    for rounds, arrived in ((1, lambda c: c != LIAR), (2, lambda c: True)):
        federation, data = federation_of(rounds=rounds)
        records = finished(lying(federation, huge, round=1))
        assert list(records[0].dropped) == [LIAR]
        means, _ = pooled(data, filter(arrived, range(len(data.clients))))
        for c, mean in means.items():
            assert federation.state.stars.means[c].numpy() == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("engine", ["stack", "workers", "workers stack"])
def test_all_engines_score_clients_by_the_same_model(engine, average):
    """Some clients of each evaluation were away since the map changed."""
    keys = {**SMALL, "data": blobs(), "width": WIDTH, "rounds": 3, "participation": 0.5, "average_weights": average}
    settings = resolve("constellation", keys)
    one, other = (build(settings.with_engine(engine))[1] for engine in (LOOP, ENGINES[engine]))
    for record, same in zip(finished(one), finished(other), strict=True):
        for way in ("head", "prototype", "mix"):
            assert same.metrics[f"accuracy_{way}"] == pytest.approx(record.metrics[f"accuracy_{way}"], abs=1e-6)


@given(st.integers(2, 5), st.integers(1, 9), st.floats(0, 30), st.integers(0, 10**6))
def test_shrunk_prototypes_lie_between_both_by_the_variance_beyond_chance(classes, samples, apart, seed):
    rng = np.random.default_rng(seed)
    others, own = rng.normal(size=(2, classes, 4))
    own = others + apart * own
    bank = lambda means, n: PrototypeBank(torch.tensor(means), torch.full((classes,), float(n)).double())  # noqa: E731
    found = aggregate.shrunk(bank(own, samples), bank(others, 99), variance=2.0).means.numpy()
    directions = max(classes - 1, 1)
    beyond = [((own[c] - others[c]) ** 2).sum() / directions - 2.0 / samples for c in range(classes)]
    between = max(np.mean(beyond), 0)
    share = between / (between + 2.0 / samples)
    assert found == pytest.approx(others + share * (own - others), abs=1e-9)
    spread = np.mean([((mean - others.mean(0)) ** 2).sum() / directions for mean in others])
    differs = float(aggregate.difference(bank(own, samples), bank(others, 99), variance=2.0))
    assert differs == pytest.approx(between / spread, rel=1e-6, abs=1e-9)


def test_classes_that_one_side_lacks_have_the_other_sides_prototype():
    own = PrototypeBank(torch.tensor([[1.0], [5.0], [0.0]]), torch.tensor([2.0, 2.0, 0.0]))
    others = PrototypeBank(torch.tensor([[1.0], [0.0], [7.0]]), torch.tensor([9.0, 0.0, 9.0]))
    found = aggregate.shrunk(own, others, 1.0)
    assert found.known.all() and found.means.flatten().tolist() == [1.0, 5.0, 7.0]


@pytest.mark.parametrize("differ", [False, True])
def test_the_network_of_a_client_that_differs_has_a_larger_share(differ):
    """A tenth where sites are alike; more where one of them has its features in another order."""
    data = blobs(features=12)
    site = torch.arange(len(data.x_train)) % 2
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    moved = data.x_train[:, order] if differ else data.x_train
    x = torch.where(site[:, None] == 1, moved, data.x_train)
    data = replace(data, x_train=x, group_train=site)
    keys = {"data": data, "partition": "natural", "clients": 0, "test": "local", "rounds": 3, "model": "mlp"}
    federation = build(resolve("constellation", {**keys, "width": WIDTH}).with_engine(LOOP))[1]
    finished(federation)
    downloads, _ = federation.downloads(range(2), 4, federation.method.predict.reads)
    begun = [federation.engine.begun(federation.engine.message(downloads, c), c)[1] for c in range(2)]
    shares = [float(weights["share"]) for weights in begun]
    assert all(0.12 < share <= 0.5 if differ else share == pytest.approx(0.1) for share in shares), shares


def test_unknown_classes_have_rows_of_zeros():
    bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), torch.tensor([5.0, 0.0, 5.0]))
    prototypes, map = aggregate.discriminants(bank, torch.eye(2))
    assert prototypes.known.tolist() == [True, False, True]
    assert torch.isfinite(map).all() and not map[1].any() and not prototypes.means[1].any()


def test_one_sample_of_each_class_gives_no_covariance_and_no_nonsense():
    federation, _ = federation_of(rounds=2, shot=1, spread=0)
    finished(federation)
    assert (
        torch.isfinite(federation.state.discriminants).all() and torch.isfinite(federation.state.prototypes.means).all()
    )


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 7), (20,), (5,), (3, 4)])
def test_the_common_space_is_the_same_everywhere(shape):
    x = torch.randn(4, *shape)
    one, two = CommonSpace(shape, WIDTH)(x), CommonSpace(shape, WIDTH)(x)
    assert one.shape == (4, WIDTH) and torch.equal(one, two)


def test_what_makes_no_sense_is_refused_in_one_line():
    assert "shrinkage" in refusal(lambda: resolve("constellation", {**SMALL, "shrinkage": 0.0}))
    assert "auto or validated" in refusal(lambda: resolve("constellation", {**SMALL, "share": 2.0}))
    assert "features as data" in refusal(lambda: federation_of(train="head"))


@pytest.mark.slow
@pytest.mark.soak
def test_a_pretrained_encoder_is_the_common_space_and_stays_as_it_was(tmp_path):
    """Nothing of it is trained or sent; what is stored and exported has it, without the file that it came from."""
    torch.save(published("mobilenetv2"), tmp_path / "w.pth")
    keys = {"data": "digits", "limit_train": 60, "limit_test": 20, "resize": 16, "partition": "iid", "clients": 2}
    keys |= {"rounds": 2, "model": "mobilenetv2", "stem": "imagenet", "silhouette": False, "snapshots": 0}
    keys |= {"method.width": 16, "engine": "loop", "lr": 0.001}
    model = {"pretrained": str(tmp_path / "w.pth")}
    settings = resolve("constellation", {**keys, **model, "average_weights": True})
    federation = build(settings)[1]
    space = federation.engine.skeleton.module.space
    before = {name: value.clone() for name, value in space.state_dict().items()}
    finished(federation)
    assert all(torch.equal(value, before[name]) for name, value in space.state_dict().items()) and len(before) > 100
    assert all(name.startswith("network.") for name in federation.state.weights)
    plain = pf.models.build("mobilenetv2", (3, 16, 16), 10, stem="imagenet", **model).eval()
    x = torch.rand(5, 1, 16, 16)
    directions = space.fixed
    assert directions.shape == (1280, 16) and torch.allclose(directions.T @ directions, torch.eye(16), atol=1e-4)
    inner = space.encoder.inner if hasattr(space.encoder, "inner") else space.encoder
    scaled = space.encoder.scaled(x) if hasattr(space.encoder, "scaled") else x
    with torch.no_grad():
        assert torch.allclose(inner(scaled), plain.encoder(scaled), atol=1e-4)
        assert torch.allclose(space(x), plain.encoder(scaled) @ directions, atol=1e-3)
    result = pf.run("constellation", **keys, **model, out=tmp_path / "run")
    (tmp_path / "w.pth").unlink()
    classifier = pf.load(tmp_path / "run").model(0)
    found = prepare_data(result.settings).clients[0].test.take()[0]
    assert export_with_card(classifier, tmp_path / "model.onnx") < 1e-3
    assert export_with_card(classifier, tmp_path / "other.safetensors") < 1e-5
    assert np.array_equal(load(tmp_path / "other.safetensors").predict(found).labels, classifier.predict(found).labels)
    random = build(resolve("constellation", {**keys, "space": "samples"}))[1]
    assert random.engine.skeleton.module.space.encoder is None


@pytest.mark.slow
def test_clients_know_classes_that_they_never_saw():
    keys = {"data": "digits", "way": 3, "shot": 15, "clients": 10, "rounds": 8, "lr": 0.05, "scope": "all"}
    keys |= {"candidates": "all", "silhouette": False, "snapshots": 0}
    together, alone = (pf.run("constellation", **keys, control=control) for control in ("", "own"))
    assert together.accuracy_prototype > 0.8 > 0.5 > alone.accuracy_prototype
