"""Frozen encoders: only the head trains, and features that are computed once give what features computed each time give."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import protofed as pf
from protofed import models
from protofed.classifier import load, save
from protofed.classifier.export import export
from protofed.classifier.store import MODELS
from protofed.data import Dataset, Samples
from protofed.errors import ProtofedError
from protofed.experiment import features as features_module
from protofed.experiment.build import build, engine_inputs, prepare_data
from protofed.experiment.run import reopen
from protofed.experiment.settings import resolve

SMALL: dict[str, Any] = {"partition": "iid", "clients": 3, "rounds": 2, "lr": 0.1, "silhouette": False, "snapshots": 0}


def pictures(n: int = 90) -> Dataset:
    """Bright and dark halves: what a random encoder can tell apart."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = rng.random((n, 1, 16, 16)) * 0.5
    x[y == 1, :, :8] += 0.5
    x[y == 2, :, :, :8] += 0.5
    return Dataset.from_arrays(x.astype(np.float32), y, x[::4].astype(np.float32), y[::4], name="halves").standardised()


def both(method: str, **given: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The figures of the last round, with features computed once and each time."""
    common = {**SMALL, "data": pictures(), "train": "head", **given}
    once, each = (pf.run(method, **common, features=way) for way in ("once", "each"))
    return tuple({k: v for k, v in run.metrics[-1].items() if k != "seconds"} for run in (once, each))  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize(
    ("method", "model"), [("fedproto", "cnn?norm=batch"), ("fedavg", "resnet18?width=0.05&embedding=6")]
)
def test_features_computed_once_give_the_same_run(method: str, model: str, engine: str) -> None:
    once, each = both(method, model=model, engine=engine)
    assert once == pytest.approx(each, abs=1e-4)
    assert once["bytes_up"] == each["bytes_up"]


def test_several_networks_shifts_and_unseen_groups(tmp_path: Path) -> None:
    data = pictures()
    groups = torch.arange(len(data.y_train)) // 3 % 3
    data = Dataset.from_arrays(data.x_train, data.y_train, group_train=groups)
    world = {
        "shift": "rotation?most=30",
        "unseen": "2",
        "validation_share": 0.2,
        "labels": "client",
        "labels_per_class": 4,
    }
    once, each = both("fedproto", data=data, models=["cnn", "mlp?hidden=7"], dim=5, **world)
    assert once == pytest.approx(each, abs=1e-4) and "unseen_head" in once and "validation" in once


def test_the_body_is_no_part_of_what_trains_and_never_changes() -> None:
    settings = resolve(
        "fedavg", {**SMALL, "data": pictures(), "train": "head", "model": "resnet18", "embedding": 6, "width": 0.05}
    )
    _, federation = build(settings)
    engine = federation.engine
    assert set(engine.starts[0]) == {"encoder.project.weight", "encoder.project.bias", "head.weight", "head.bias"}
    whole_settings = settings.with_general(features="each")
    _, inputs, _ = engine_inputs(whole_settings, prepare_data(whole_settings))
    network, plain = (
        inputs.network(0),
        engine_inputs(
            resolve("fedavg", {**SMALL, "data": pictures(), "model": "resnet18", "embedding": 6, "width": 0.05}),
            prepare_data(settings),
        )[1].network(0),
    )
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in network.state_dict().items()), (
        "one start"
    )
    x = pictures().x_train[:9]
    before = network.train()(x).embedding
    assert torch.equal(before, network.eval()(x).embedding), "batch norm stays in eval mode"
    torch.testing.assert_close(before, plain.eval()(x).embedding)
    view, data = inputs.seen_by(0), inputs.data
    assert view is data
    cached = engine_inputs(settings, prepare_data(settings))[1]
    (features,) = cached.views
    assert features.sample_shape == (26,) and cached.data.sample_shape == (1, 16, 16)
    body = network.encoder.body[0]
    for client, own in zip(features.clients, cached.data.clients, strict=True):
        for part in ("labelled", "test"):
            z, y = getattr(client, part).take()
            x, labels = getattr(own, part).take()
            assert torch.equal(y, labels)
            torch.testing.assert_close(z, body(x))
    assert (
        len({id(client.labelled.x) for client in features.clients}) == 1
        and features.clients[0].test.x is features.central_test.x
    )  # type: ignore[union-attr]


def test_rows_that_nobody_holds_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve(
        "local", {**SMALL, "data": pictures(), "partition": "n-way", "way": 2, "shot": 3, "spread": 0, "train": "head"}
    )
    asked: list[int] = []
    compute = features_module.features_of
    monkeypatch.setattr(features_module, "features_of", lambda f, x, d: (asked.append(len(x)), compute(f, x, d))[1])
    engine_inputs(settings, prepare_data(settings))
    assert sorted(asked) == [3 * 2 * 3, 23]


def test_a_server_without_samples_knows_the_sizes_of_its_sites() -> None:
    settings = resolve("fedavg", {**SMALL, "data": pictures(), "train": "head", "model": "mlp"})
    data = prepare_data(settings)
    x, y = data.clients[0].labelled.x[:0], torch.zeros(30, dtype=torch.long)
    clients = [
        replace(c, labelled=Samples(x, y, torch.arange(30)), test=Samples(x, y, torch.arange(9))) for c in data.clients
    ]
    (seen,) = engine_inputs(settings, replace(data, clients=clients, central_test=None))[1].views
    assert seen.sample_shape == (64,) and [len(c.labelled) for c in seen.clients] == [30] * 3
    assert seen.clients[0].labelled.x.shape == (0, 64)


def test_kept_features_are_read_again_and_damage_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    common = {**SMALL, "data": pictures(), "train": "head", "features": str(tmp_path / "kept"), "model": "cnn"}
    first = pf.run("fedproto", **common)
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == 2 and all(file.suffix == ".safetensors" for file in files)
    with caplog.at_level(logging.INFO, "protofed"):
        again = pf.run("fedproto", **common)
        assert caplog.text.count("read from") == 2
        caplog.clear()
        other = pf.run("fedproto", **{**common, "seed": 2})  # another random encoder
        assert "read from" not in caplog.text and len(list((tmp_path / "kept").iterdir())) == 4
        files[0].write_bytes(b"cut")
        repaired = pf.run("fedproto", **common)
        assert "damaged" in caplog.text and files[0].stat().st_size > 100
    assert (
        again.metrics[-1]["loss"]
        == first.metrics[-1]["loss"]
        == repaired.metrics[-1]["loss"]
        != other.metrics[-1]["loss"]
    )


def test_a_stopped_run_goes_on_and_its_whole_network_can_be_had(tmp_path: Path) -> None:
    common = {**SMALL, "data": "digits", "limit_train": 60, "limit_test": 30, "train": "head", "model": "mlp?hidden=9"}
    run = pf.run("fedproto", **common, out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    resumed = pf.resume(tmp_path / "run")
    assert resumed.metrics[-1]["accuracy_head"] == run.metrics[-1]["accuracy_head"]
    _, federation = reopen(tmp_path / "run")
    skeleton = federation.engine.skeleton
    accuracies = []
    for number, client in enumerate(federation.data.clients):
        x, y = client.test.take()
        assert x.shape[1:] == (1, 8, 8)
        logits = skeleton.outputs(x, federation.engine.state(number).weights).logits
        accuracies.append((logits.argmax(1) == y).float().mean().item())
    assert np.mean(accuracies) == pytest.approx(run.metrics[-1]["accuracy_head"], abs=1e-6)


def judged(result: pf.Result, by: str) -> list[float]:
    """Each client's accuracy from its predictions of raw samples, on the test samples that the judge scores it by."""
    data, found = prepare_data(result.settings), []
    for number, client in enumerate(data.clients):
        x, y = client.test.take()
        mean, std = data.scaling(number)
        assert mean is not None and std is not None
        raw = x * std[:, None, None] + mean[:, None, None]
        found.append(float(np.mean(result.predict(raw, number, by).labels == y.numpy())))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("method", "model", "features"),
    [
        ("fedproto", {"model": "resnet18?width=0.05&embedding=6"}, "once"),
        ("fedavg", {"models": ["cnn?norm=batch", "mlp?hidden=7"], "dim": 5}, "once"),
        ("fedavg", {"model": "cnn?norm=batch"}, "each"),
        ("fedmatch", {"model": "mlp?hidden=9", "labels": "client", "labels_per_class": 4}, "each"),
    ],
)
def test_classifiers_are_whole_networks_that_predict_as_the_judge_does(
    method: str, model: dict[str, Any], features: str, tmp_path: Path
) -> None:
    common = {**SMALL, **model, "data": pictures(), "train": "head", "features": features}
    written = pf.run(method, **common, out=tmp_path / "run")
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    by = written.settings.method.predict.by
    assert judged(written, by) == row[f"accuracy_{by}"]
    assert judged(pf.run(method, **common), by) == row[f"accuracy_{by}"], "from memory"
    bodies = sorted(file.name for file in (tmp_path / "run" / MODELS).glob("body-*"))
    assert len(bodies) == len(model.get("models", [""])), "one for all clients of an architecture"
    stored = pf.load(tmp_path / "run").model(1)
    x = torch.rand(5, 1, 16, 16)
    save(stored, tmp_path / "one.safetensors")
    shutil.rmtree(tmp_path / "run" / MODELS)
    remade = pf.load(tmp_path / "run", data=pictures()).model(1)
    for other in (load(tmp_path / "one.safetensors"), remade):
        for mine, theirs in zip(stored.outputs(x), other.outputs(x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["head", pytest.param("all", marks=pytest.mark.soak)])
def test_published_weights_are_in_the_folder(train: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    network = models.build("resnet18", (3, 32, 32), 3, stem="imagenet", embedding=None)
    torch.save({**network.encoder.state_dict(), "fc.weight": network.head.weight, "fc.bias": network.head.bias}, file)
    model = {"model": "resnet18", "stem": "imagenet", "pretrained": str(file), "embedding": 6}
    common = {**SMALL, **model, "data": pictures(45), "train": train, "rounds": 1}
    written = pf.run("fedproto", **common, out=tmp_path / "run")
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    assert judged(written, "head") == row["accuracy_head"]
    memory = written.model(0)
    file.unlink()  # neither the file of weights nor the data is needed any more
    stored = pf.load(tmp_path / "run").model(0)
    x = torch.rand(5, 1, 16, 16)
    for mine, theirs in zip(stored.outputs(x), memory.outputs(x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    if train == "head":
        pytest.importorskip("onnxscript")
        assert export(stored, tmp_path / "model.onnx", "onnx", x) < 1e-5


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("fedavg", {"features": "each"}, "features=each needs train=head"),
        ("fedavg", {"train": "heads"}, "train='heads'"),
        (
            "fixmatch-fedavg",
            {"train": "head", "labels": "client"},
            "fixmatch-fedavg trains on augmented samples, whose features cannot be computed once; use features=each",
        ),
        ("fedproto", {"train": "head", "attack": "backdoor"}, "looks for its trigger in samples; use features=each"),
        (
            "protofssl",
            {"train": "head", "model": "resnet8", "resize": 16},
            "model 'resnet8' has no head that could train",
        ),
        ("local", {"train": "head", "model": "piece"}, "model 'piece' is one piece .* use projection=linear"),
    ],
)
def test_what_makes_no_sense_is_one_line(method: str, given: dict[str, Any], message: str, own_names: None) -> None:
    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = self.layer(x.flatten(1))
            return z, z @ torch.ones(5, 10)

    models.register_module("piece", lambda shape, classes: Piece())
    with pytest.raises(ProtofedError, match=message):
        pf.run(method, **{**SMALL, "data": "digits", "limit_train": 60, **given})


def test_a_network_of_ones_own_behind_a_projection(own_names: None) -> None:
    models.register_module("own", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.Tanh()))
    once, each = both("fedproto", model="own", dim=4)
    assert once == pytest.approx(each, abs=1e-4)


@pytest.mark.slow
def test_an_augmenting_method_computes_features_each_time() -> None:
    run = pf.run(
        "fixmatch-fedavg", **SMALL, data=pictures(), labels="client", train="head", features="each", model="mlp"
    )
    assert 0 <= run.metrics[-1]["accuracy_head"] <= 1


@pytest.mark.slow
def test_text_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = [f"{word} {k},{word}" for k in range(20) for word in ("cold", "warm")]
    (tmp_path / "notes.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    data = {"data": str(tmp_path / "notes.csv"), "length": 8, "model": "bert", "trainable_layers": 0}
    common = {**SMALL, **data, "train": "head"}
    once, each = (pf.run("fedavg", **common, features=way).metrics[-1] for way in ("once", "each"))
    assert once["loss"] == pytest.approx(each["loss"], abs=1e-4)
    assert once["accuracy_head"] == pytest.approx(each["accuracy_head"], abs=1e-4)
    pf.run("fedavg", **common, out=tmp_path / "run")
    tokens = torch.randint(0, 50, (4, 8))
    memory, stored = pf.run("fedavg", **common).model(0), pf.load(tmp_path / "run").model(0)
    torch.testing.assert_close(stored.outputs(tokens).logits, memory.outputs(tokens).logits)
