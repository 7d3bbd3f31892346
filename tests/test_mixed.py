"""Clients of different architectures: who gets which, what travels, and that every engine gives the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import protofed as pf
from protofed import methods, models, wire
from protofed.data import Dataset
from protofed.errors import ProtofedError
from protofed.evaluate.cost import forward_flops
from protofed.experiment.architectures import architectures, labels, parse
from protofed.experiment.build import build, prepare_data
from protofed.experiment.settings import resolve
from protofed.federation.mixed import for_architecture
from protofed.federation.uploads import prefixed
from protofed.wire import Bundle
from support.engines import ENGINES, LOOP, assert_same
from support.marks import slow_but
from support.small import AT_SERVER, SMALL, blobs, labels_for

MIX = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")} | {
    "models": ["mlp?hidden=7&embedding=5", "mlp?hidden=3&embedding=4"],
    "dim": 6,
    "projection_dropout": 0.0,
}
AVERAGING = {"fedproc": {"average_weights": True}, "fedmps": {"average_weights": True}}


def settings_for(method, **changes):
    return resolve(method, {**MIX, "data": blobs(), **changes})


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers", "workers stack"]))
@pytest.mark.parametrize(
    "method",
    slow_but(("fedavg", "fedproto", "fedpagr"), [name for name in methods.available() if name not in AT_SERVER]),
)
def test_every_method_with_two_architectures_equals_the_plain_loop(method, engine):
    changes = {"rounds": 2, "participation": 0.8, "shot_spread": 2.0, **AVERAGING.get(method, {})}
    assert_same(settings_for(method, **changes), ENGINES[engine])


@pytest.mark.parametrize("method", AT_SERVER)
def test_a_server_that_trains_has_one_architecture(method):
    _, federation = build(settings_for(method, **labels_for(method)).with_engine(LOOP))
    with pytest.raises(ProtofedError, match=f"{method} trains a model at the server.*one architecture"):
        federation.step()


@pytest.mark.slow
def test_one_engine_for_each_architecture_may_differ():
    settings = settings_for("fedproto", rounds=2)
    several = replace(ENGINES["workers"], inner=("loop", "stack"))
    assert_same(settings, several)
    with pytest.raises(ProtofedError, match=r"inner=.*one for each of 2 models"):
        build(settings.with_engine(replace(several, inner=("loop", "stack", "loop"))))


# --- who has which ----------------------------------------------------------------------------------------------------
def owners(**changes):
    settings = settings_for("local", **changes)
    return architectures(settings, prepare_data(settings))


def test_models_are_dealt_round():
    mix = owners()
    assert mix.owner == (0, 1, 0, 1, 0) and mix.of_clients[1] == "mlp?hidden=3&embedding=4"
    assert (mix.projection, mix.dim) == ("linear", 6)


def test_models_are_dealt_by_capability():
    assert owners(assignment="capability", capability=[5, 1, 4, 2, 3]).owner == (1, 0, 1, 0, 0)
    sized = settings_for("local", assignment="capability", shot_spread=3.0, shot=12)
    data = prepare_data(sized)
    owner = architectures(sized, data).owner
    sizes = [len(c.labelled) for c in data.clients]
    weak = [n for n, which in zip(sizes, owner, strict=True) if which == 0]
    strong = [n for n, which in zip(sizes, owner, strict=True) if which == 1]
    assert max(weak) <= min(strong)


def test_a_list_for_each_client():
    names = ["mlp", "mlp?hidden=3", "mlp", "mlp", "mlp?hidden=3"]
    assert owners(models=names).owner == (0, 1, 0, 0, 1)


def test_names_in_results():
    assert parse("bert:minilm?trainable_layers=2&pooling=cls") == (
        "bert",
        {"path": "minilm", "trainable_layers": 2, "pooling": "cls"},
    )
    assert labels(["cnn", "mlp?embedding=3"]) == ["cnn", "mlp"]
    assert labels(["mlp", "mlp?embedding=3"]) == ["mlp", "mlp?embedding=3"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ["mlp"] * 6}, "6 for 5 clients"),
        ({"models": "mlp,mpl"}, "unknown model 'mpl'"),
        ({"models": "mlp?hiden=3"}, "hiden"),
        ({"models": "mlp?hidden"}, "expected key=value"),
        ({"model": "mlp"}, "stands in place of one model"),
        ({"projection": "none"}, "dim=6 needs a projection"),
        ({"projection": "none", "dim": 0}, "one embedding space"),
        ({"capability": [1, 2]}, "2 numbers for 5 clients"),
        ({"choice": "diverse", "participation": 0.5}, "keeps the clients' prototypes"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(changes, said):
    with pytest.raises(ProtofedError, match=said):
        build(settings_for("fedproto", **changes))


@pytest.mark.usefixtures("own_names")
def test_an_own_network_of_another_width_takes_part(tiny):
    models.register_module("threefold", lambda shape, classes: nn.Sequential(nn.Linear(shape[0], 3), nn.ReLU()))
    given = {**MIX, "data": tiny, "models": "threefold,mlp", "rounds": 2}
    result = pf.run("fedpagr", **given)
    assert set(result.summary["model_parameters"]) == {"threefold", "mlp"}
    models.register_module("picture", lambda shape, classes: nn.Unflatten(1, (2, 3)))
    with pytest.raises(ProtofedError, match="flatten"):
        pf.run("fedpagr", **{**given, "models": "picture,mlp"})


# --- what travels -----------------------------------------------------------------------------------------------------
def test_marks_come_and_go():
    weights = {"a": torch.ones(2), "b": torch.zeros(1)}
    both = Bundle(weights={**prefixed(weights, 1), **prefixed({"a": torch.full((3,), 7.0)}, 11)})
    assert for_architecture(both, 1).weights.keys() == {"a", "b"}
    assert for_architecture(both, 11).weights["a"].shape == (3,)
    helpers = Bundle(models={"helper0": prefixed(weights, 1), "helper1": prefixed({"a": torch.full((3,), 7.0)}, 11)})
    assert for_architecture(helpers, 1).models["helper0"].keys() == {"a", "b"}
    assert for_architecture(helpers, 11).models["helper1"]["a"].shape == (3,)


def test_weights_are_averaged_within_each_architecture():
    """Naively: train each client from its architecture's start, average by size among its like."""
    settings = settings_for("fedavg", rounds=1, shot_spread=3.0)
    _, federation = build(settings.with_engine(LOOP))
    downloads, _ = federation.downloads(range(5), 1)
    assert downloads.clients == list(range(5)) and len(set(downloads.audience.values())) == 2
    sizes = [sum(4 * v.numel() for v in start.values()) for start in federation.engine.starts]
    for client in downloads.clients:
        assert wire.sizes(downloads[client])["weights"] == sizes[federation.engine.owner[client]]
    outcomes = list(federation.engine.train(downloads))
    assert [client for client, _ in outcomes] == list(range(5))
    uploads = {client: wire.decode(outcome.upload) for client, outcome in outcomes}
    federation.step()
    for which in (0, 1):
        mine = [c for c in range(5) if federation.engine.owner[c] == which]
        sent = [uploads[c].weights for c in mine]
        counts = [uploads[c].scalars["samples"] for c in mine]
        assert counts == [len(federation.data.clients[c].labelled) for c in mine]
        for name in sent[0]:
            mean = sum(w[name] * n for w, n in zip(sent, counts, strict=True)) / sum(counts)
            torch.testing.assert_close(federation.state.weights[f"{which}:{name}"], mean)


def test_nobody_of_an_architecture_taking_part_leaves_its_model_as_it_was():
    settings = settings_for("fedavg", rounds=1, participation=0.2)
    _, federation = build(settings.with_engine(LOOP))
    before = dict(federation.state.weights)
    (only,) = federation.step().participants
    which = federation.engine.owner[only]
    for name, value in federation.state.weights.items():
        assert torch.equal(value, before[name]) != name.startswith(f"{which}:")


@pytest.mark.parametrize("method", ["fedpagr", "fedavg", "fedapa"])
@pytest.mark.slow
def test_resuming_gives_the_same_bits(method, tmp_path):
    given = {**MIX, "data": blobs(), "checkpoint_every": 2, "participation": 0.8}
    given["rounds"] = 5
    whole = pf.run(method, **given)
    settings = resolve(method, given)

    def stop(record, rounds):
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.run(settings, out=tmp_path / "r", watch=stop)
    resumed = pf.resume(tmp_path / "r", data=given["data"])
    strip = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows]  # noqa: E731
    assert strip(resumed.metrics) == strip(whole.metrics)


# --- evaluation -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_tuning_before_evaluation_changes_no_state():
    _, a = build(settings_for("fedavg").with_engine(LOOP))
    _, b = build(settings_for("wifederated", fine_tune=20).with_engine(LOOP))
    for x, y in zip(a, b, strict=True):
        assert x.loss == y.loss
        assert y.metrics["accuracy_head"] > x.metrics["accuracy_head"]  # each at home in its two classes
    for name, value in a.state.weights.items():
        assert torch.equal(b.state.weights[name], value)


def test_candidates_and_ensemble(tiny):
    """Among all known classes a client errs at least as often as among its own."""
    own, everyone = (
        pf.run("fedproto", **{**MIX, "data": tiny}, candidates=which, ensemble=True).summary["last_round"]
        for which in ("own", "all")
    )
    assert everyone["accuracy_prototype"] <= own["accuracy_prototype"]
    assert everyone["ensemble_prototype"] == own["ensemble_prototype"]
    assert 0 <= own["ensemble_head"] <= 1 and any("@" in key for key in own)


def test_confusions_are_in_the_run_folder(tmp_path):
    import json

    data = blobs()
    data = replace(
        data, group_train=torch.arange(len(data.y_train)) % 3, group_names=("attic", "barn", "cellar"),
        class_values=(0.0, 1.0, 2.0, 3.0),
    )  # fmt: skip
    keys = {k: v for k, v in SMALL.items() if k not in ("clients", "way", "shot", "partition")}
    result = pf.run("local", **keys, data=data, partition="natural", test="local", out=tmp_path / "r")
    written = json.loads((tmp_path / "r" / "confusion.json").read_text())
    assert list(written["clients"]) == ["attic", "barn", "cellar"]
    right = [sum(n for t, p, n in c["head"] if t == p) for c in written["clients"].values()]
    total = [sum(n for *_, n in c["head"]) for c in written["clients"].values()]
    mean = sum(r / t for r, t in zip(right, total, strict=True)) / 3
    assert mean == pytest.approx(result.summary["last_round"]["accuracy_head"])
    assert result.summary["last_round"]["mae_head"] >= 0


def test_fedapas_three_networks_keep_the_sizes_of_table_2_in_one_federation():
    """Their embeddings have one width, so `auto` puts nothing between: 7,956, 18,436 and 463,748 parameters."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 8, 6, generator=generator), torch.arange(60) % 20
    data = Dataset.from_arrays(x, y, num_classes=20, kind="csi", group_train=torch.arange(60) // 20)
    names = ["tinyconvnet4", "middleconvnet4", "largeconvnet4"]
    given = {"data": data, "models": names, "partition": "natural", "clients": 0, "test": "local", "rounds": 1}
    settings, federation = build(resolve("fedapa", {**given, "batch": 16}))
    mix = architectures(settings, federation.data)
    assert (mix.projection, mix.dim) == ("none", 0) and federation.setup.dim == 256
    sizes, operations = [], []
    for spec in (mix.specs[index] for index in mix.owner):
        with torch.device("meta"):
            network = spec.build((1, 1000, 242), 20)
        sizes.append(models.parameter_count(network))
        operations.append(forward_flops(spec.build((1, 1000, 242), 20), (1, 1000, 242)))
    assert sizes == [7_956, 18_436, 463_748]
    assert [round(number / 1e6, 2) for number in operations] == [340.75, 162.85, 606.35]  # Table II
    assert operations == [340_746_240, 162_850_624, 606_349_120]
    [record] = list(federation)
    assert not record.dropped
    states = federation.engine.export().values()
    trained = [sum(v.numel() for k, v in state.weights.items() if "running" not in k) for state in states]
    assert trained == sizes


def test_networks_of_different_widths_are_projected():
    narrow = owners(models=["mlp?embedding=4", "mlp?embedding=5"], dim=0)
    assert (narrow.projection, narrow.dim) == ("linear", 128)
    alike = owners(models=["mlp?hidden=3&embedding=5", "mlp?hidden=8&embedding=5"], dim=0)
    assert (alike.projection, alike.dim) == ("none", 0)
    asked = owners(models=["mlp?hidden=3&embedding=5", "mlp?hidden=8&embedding=5"], dim=0, projection="linear")
    assert (asked.projection, asked.dim) == ("linear", 128)
