"""Models: parameter counts, shapes, torchvision's names, running as a stack of clients, and errors in one line."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from protofed import models
from protofed.models.base import adapt
from protofed.models.norm import BatchNorm2d
from support.errors import refusal
from support.marks import slow_but
from support.networks import assert_stack_equals_loop, count, draw_statistics

pytestmark = pytest.mark.usefixtures("seeded")


def torchvision_keys() -> list[str]:
    """The 122 keys of torchvision's ResNet-18, by its rules."""

    def norm(prefix: str) -> list[str]:
        return [f"{prefix}.{p}" for p in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]

    keys = ["conv1.weight", *norm("bn1")]
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at = f"layer{layer}.{block}"
            keys += [f"{at}.conv1.weight", *norm(f"{at}.bn1"), f"{at}.conv2.weight", *norm(f"{at}.bn2")]
            if layer > 1 and block == 0:
                keys += [f"{at}.downsample.0.weight", *norm(f"{at}.downsample.1")]
    return [*keys, "fc.weight", "fc.bias"]


def as_torchvision(model: nn.Module) -> dict[str, Tensor]:
    parts = {k.replace("head.", "fc.").removeprefix("encoder."): v for k, v in model.state_dict().items()}
    return {k: v.clone() for k, v in parts.items() if not k.startswith("project.")}


# --- counts and shapes --------------------------------------------------------------------------------------------


def test_cnn_has_the_parameters_of_fedsap_table_2() -> None:
    assert count("cnn", (1, 128, 128), 62) == 849_492
    assert count("cnn", (1, 28, 28), 10) == 21_840  # FedProto's network for MNIST


def test_resnet18_has_torchvisions_parameters() -> None:
    assert count("resnet18", (3, 224, 224), 1000, stem="imagenet") == 11_689_512
    assert count("resnet18", (3, 224, 224), 10, stem="imagenet") == 11_181_642
    assert count("resnet18", (3, 32, 32), 10) == 11_181_642 - 64 * 3 * (49 - 9)


def test_mlp_counts_any_shape() -> None:
    assert count("mlp", (3, 4, 5), 7) == 60 * 128 + 128 + 128 * 64 + 64 + 64 * 7 + 7
    assert count("mlp", (9,), 3, hidden=(), embedding=4) == 9 * 4 + 4 + 4 * 3 + 3
    assert count("mlp", (9,), 3, hidden="8,5", embedding="4") == 80 + 45 + 24 + 15


@pytest.mark.parametrize(
    ("name", "shape", "options", "dim"),
    [
        ("mlp", (7,), {}, 64),
        ("mlp", (2, 30), {"embedding": 5}, 5),
        ("cnn", (1, 16, 16), {}, 50),
        ("cnn", (4, 17, 23), {"channels": (3, 6), "embedding": 8}, 8),
        ("cnn", (1, 10, 10), {"kernel": 3}, 50),
        ("dropout-cnn", (3, 6, 9), {"channels": (2, 3), "embedding": 5}, 5),
        ("resnet18", (3, 32, 32), {}, 512),
        ("resnet18", (3, 64, 64), {"stem": "imagenet"}, 512),
        ("resnet18", (1, 28, 28), {}, 512),
        ("resnet18", (1, 28, 28), {"stem": "imagenet", "embedding": 50}, 50),
    ],
)
def test_a_model_gives_embedding_and_logits(name: str, shape: tuple[int, ...], options: dict, dim: int) -> None:
    model = models.build(name, shape, 6, **options).eval()
    output = model(torch.randn(2, *shape))
    assert isinstance(output, models.Output)
    assert output.embedding.shape == (2, dim) and output.logits.shape == (2, 6)
    assert model.dim == dim
    assert isinstance(model.head, nn.Linear)
    torch.testing.assert_close(output.logits, model.head(output.embedding))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_the_embedding_comes_after_a_relu(name: str) -> None:
    z, _ = models.build(name, (1, 16, 16), 3)(torch.randn(20, 1, 16, 16))
    assert bool((z >= 0).all()) and bool((z == 0).any())


def test_cnn_is_fedprotos_forward() -> None:
    model = models.build("cnn", (1, 28, 28), 10)
    e, x = model.encoder, torch.randn(3, 1, 28, 28)
    inner = F.relu(F.max_pool2d(e.conv1(x), 2))
    inner = F.relu(F.max_pool2d(e.conv2(inner), 2))
    z = F.relu(e.fc1(inner.flatten(1)))
    torch.testing.assert_close(model(x).embedding, z)
    assert not any(isinstance(m, nn.Dropout | nn.Dropout2d) for m in model.modules())


def test_cnn_drops_before_the_head_and_after_the_second_convolution() -> None:
    model = models.build("cnn", (1, 16, 16), 4, dropout=0.5)
    x = torch.randn(6, 1, 16, 16)
    model.encoder.eval()  # only the head's dropout is left
    first, second = model(x), model(x)
    torch.testing.assert_close(first.embedding, second.embedding)
    assert not torch.equal(first.logits, second.logits)
    model.encoder.train()
    assert not torch.equal(model(x).embedding, model(x).embedding)
    model.eval()
    torch.testing.assert_close(model(x).logits, model(x).logits)
    assert models.parameter_count(model) == count("cnn", (1, 16, 16), 4)


def test_dropout_runs_in_a_stack() -> None:
    clients = [models.build("cnn", (1, 16, 16), 4, dropout=0.5) for _ in range(2)]
    params, buffers = stack_module_state(clients)
    x = torch.randn(2, 3, 1, 16, 16)
    run = vmap(lambda p, b, x: functional_call(clients[0], {**p, **b}, (x,)), randomness="different")
    z, logits = run(params, buffers, x)
    assert z.shape == (2, 3, 50) and logits.shape == (2, 3, 4)


def test_the_same_seed_builds_the_same_model() -> None:
    def built(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return models.build("cnn", (1, 16, 16), 3).state_dict()

    assert all(torch.equal(a, b) for a, b in zip(built(5).values(), built(5).values(), strict=True))
    assert not torch.equal(built(5)["head.weight"], built(6)["head.weight"])


# --- a stack of clients -------------------------------------------------------------------------------------------


class OwnNetwork(nn.Module):
    """Someone's own network, with PyTorch's batch norm, which counts its batches in place."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = F.relu(self.norm(self.conv(x))).mean((-2, -1))
        return z, self.fc(z)


def own_network() -> nn.Module:
    return adapt(OwnNetwork((3, 16, 16), 3), (3, 16, 16), 3)


@pytest.mark.parametrize(
    "name", slow_but(("mlp", "cnn", "own"), ["mlp", "cnn", "resnet18", "resnet18-imagenet", "own"])
)
def test_vmap_over_clients_equals_a_loop(name: str) -> None:
    kind, _, stem = name.partition("-")
    options = {"stem": stem} if stem else {}
    shape, classes, clients, batch = (3, 16, 16), 3, 2, 4
    nets = [own_network() if kind == "own" else models.build(kind, shape, classes, **options) for _ in range(clients)]
    if stem:
        nets = [
            net.double() for net in nets
        ]  # one pixel is left at the end: batch norm over 4 values magnifies rounding
    dtype = next(nets[0].parameters()).dtype
    x = torch.randn(clients, batch, *shape, dtype=dtype)
    y = torch.randint(classes, (clients, batch))
    assert_stack_equals_loop(nets, x, y, atol=1e-6, rtol=1e-5)
    running = [value for net in nets for value in net.buffers() if value.is_floating_point()]
    assert not any(torch.equal(v, torch.zeros_like(v)) or torch.equal(v, torch.ones_like(v)) for v in running)


def test_batch_norm_is_pytorchs_but_for_the_count() -> None:
    ours, theirs = BatchNorm2d(3), nn.BatchNorm2d(3)
    for _ in range(3):
        x = torch.randn(5, 3, 4, 4)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert int(ours.num_batches_tracked) == 0 and list(ours.state_dict()) == list(theirs.state_dict())


# --- ResNet-18 and torchvision's files ------------------------------------------------------------------------------


def test_resnet18_has_torchvisions_keys_and_shapes() -> None:
    with torch.device("meta"):
        state = as_torchvision(models.build("resnet18", (3, 224, 224), 1000, stem="imagenet"))
    assert len(torchvision_keys()) == 122
    assert set(state) == set(torchvision_keys())
    assert list(state) == torchvision_keys()  # and in its order
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer3.0.downsample.0.weight"].shape == (256, 128, 1, 1)
    assert state["fc.weight"].shape == (1000, 512)


def test_resnet18_is_the_forward_of_the_paper() -> None:
    """Against an independent one that reads the state dict only."""
    model = models.build("resnet18", (3, 40, 40), 5, stem="imagenet")
    draw_statistics(model)
    s, x = as_torchvision(model), torch.randn(2, 3, 40, 40)

    def norm(at: str, x: Tensor) -> Tensor:
        column = {k: s[f"{at}.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")}
        x = (x - column["running_mean"]) / (column["running_var"] + 1e-5).sqrt()
        return x * column["weight"] + column["bias"]

    h = F.conv2d(x, s["conv1.weight"], stride=2, padding=3)
    h = F.max_pool2d(norm("bn1", h).relu(), 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            inner = norm(f"{at}.bn1", F.conv2d(h, s[f"{at}.conv1.weight"], stride=stride, padding=1)).relu()
            inner = norm(f"{at}.bn2", F.conv2d(inner, s[f"{at}.conv2.weight"], padding=1))
            if stride == 2:
                h = norm(f"{at}.downsample.1", F.conv2d(h, s[f"{at}.downsample.0.weight"], stride=2))
            h = (inner + h).relu()
    z = F.adaptive_avg_pool2d(h, 1).flatten(1)
    output = model.eval()(x)
    torch.testing.assert_close(output.embedding, z, rtol=1e-4, atol=1e-4 * float(z.abs().max()))
    logits = z @ s["fc.weight"].T + s["fc.bias"]
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """As a file of torchvision's: ImageNet stem, here with 7 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = models.build("resnet18", (3, 64, 64), 7, stem="imagenet")
        model.encoder.bn1.running_mean.normal_()
    return as_torchvision(model)


def write(state: object, file: Path) -> str:
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return str(file)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights.pth"])
def test_pretrained_weights_load(published: dict[str, Tensor], tmp_path: Path, name: str) -> None:
    file = write(published, tmp_path / name)
    model = models.build("resnet18", (3, 32, 32), 7, stem="imagenet", pretrained=file)
    loaded = as_torchvision(model)
    assert set(loaded) == set(published)
    assert all(torch.equal(loaded[k], published[k]) for k in published)


def test_another_number_of_classes_or_width_leaves_the_head_as_built(
    published: dict[str, Tensor], tmp_path: Path
) -> None:
    old = {k: v for k, v in published.items() if "num_batches_tracked" not in k}  # as torchvision's oldest files
    file = write(old, tmp_path / "weights.pth")
    model = models.build("resnet18", (3, 32, 32), 10, stem="imagenet", pretrained=file)
    assert model.head.weight.shape == (10, 512)
    assert torch.equal(model.encoder.bn1.running_mean, published["bn1.running_mean"])
    narrow = models.build("resnet18", (3, 32, 32), 7, stem="imagenet", pretrained=file, embedding=20)
    assert narrow(torch.randn(2, 3, 32, 32)).embedding.shape == (2, 20)
    assert torch.equal(narrow.encoder.layer4[1].conv2.weight, published["layer4.1.conv2.weight"])
    bare = {k: v for k, v in published.items() if not k.startswith("fc.")}
    models.build("resnet18", (3, 32, 32), 7, stem="imagenet", pretrained=write(bare, tmp_path / "bare.safetensors"))


class Danger:
    def __reduce__(self) -> tuple:
        return (os.mkdir, (self.target,))

    def __init__(self, target: str) -> None:
        self.target = target


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "ran"
    for name, content in (("zip.pt", None), ("raw.pth", pickle.dumps({"conv1.weight": Danger(str(victim))}, 2))):
        file = tmp_path / name
        if content is None:
            torch.save({"conv1.weight": Danger(str(victim))}, file)
        else:
            file.write_bytes(content)
        text = refusal(lambda file=file: models.build("resnet18", (3, 32, 32), 7, pretrained=str(file)))
        assert str(file) in text and "never run" in text
        assert not victim.exists()


@pytest.mark.slow
def test_a_file_that_does_not_fit_is_one_line(published: dict[str, Tensor], tmp_path: Path) -> None:
    def message(file: str, shape: tuple[int, ...] = (3, 32, 32), stem: str = "imagenet") -> str:
        text = refusal(lambda: models.build("resnet18", shape, 7, stem=stem, pretrained=file))
        assert file in text
        return text

    good = write(published, tmp_path / "good.safetensors")
    assert "no such file" in message(str(tmp_path / "absent.pt"))
    assert "no such file" in message(str(tmp_path))
    text = message(good, stem="cifar")
    assert "[64, 3, 7, 7]" in text and "[64, 3, 3, 3]" in text and "use stem=imagenet" in text
    assert "1 channel" in message(good, shape=(1, 32, 32))
    small = dict(published, **{"conv1.weight": torch.zeros(64, 3, 3, 3)})
    assert "use stem=cifar" in message(write(small, tmp_path / "cifar.safetensors"))

    for name in ("bad.safetensors", "bad.pt", "empty.pt", "empty.safetensors"):
        (tmp_path / name).write_bytes(b"" if "empty" in name else b"not weights at all " * 9)
        message(str(tmp_path / name))
    whole = Path(write({"conv1.weight": torch.zeros(9)}, tmp_path / "cut.pth"))
    whole.write_bytes(whole.read_bytes()[:-60])
    message(str(whole))
    (tmp_path / "weights.onnx").write_bytes(b"")
    assert "'.onnx'" in message(str(tmp_path / "weights.onnx"))

    without = {k: v for k, v in published.items() if k not in ("layer2.1.bn1.bias", "conv1.weight", "bn1.bias")}
    text = message(write(without, tmp_path / "without.pt"))
    assert "without bn1.bias, conv1.weight and 1 more key" in text
    text = message(write(dict(published, extra=torch.zeros(1)), tmp_path / "extra.pt"))
    assert "with extra" in text and "ResNet-18" in text
    wide = dict(published, **{"layer1.0.conv1.weight": torch.zeros(8, 64, 3, 3)})
    assert "layer1.0.conv1.weight has shape [8, 64, 3, 3]; expected [64, 64, 3, 3]" in message(
        write(wide, tmp_path / "wide.pt")
    )
    text = message(write({"model": published, "epoch": 3}, tmp_path / "run.pt"))
    assert "model, epoch" in text
    assert "found list" in message(write([torch.zeros(1)], tmp_path / "list.pt"))


# --- choosing by name ---------------------------------------------------------------------------------------------


def test_available_names_each_model_with_its_parameters() -> None:
    before = torch.random.get_rng_state()
    convnets = {"tinyconvnet4": 9_994, "middleconvnet4": 16_154, "largeconvnet4": 461_466}
    expected = {
        "cnn": 10 * 75 + 10 + 5020 + 20 * 25 * 50 + 50 + 510,
        "dropout-cnn": 32 * 28 + 64 * 289 + 128 * (64 * 14 * 14 + 1) + 10 * 129,
        "googlenet": 6_624_904 - 64 * 147 - 64**2 - 192 * 64 * 9 - 4 * 64 + 192 * 27 - 990 * 1025,
        "mlp": 3072 * 128 + 128 + 128 * 64 + 64 + 650,
        "mobilenetv2": 3_504_872 - 990 * 1281,
        "resnet18": 11_173_962,
        "resnet8": 6_563_520,
        "resnet9": 6_568_640,
        "wideresnet": 1_467_610,
        **convnets,
    }
    found = models.available()
    assert {name: found[name] for name in expected} == expected
    assert torch.equal(before, torch.random.get_rng_state())


def test_default_for_images_and_other_samples() -> None:
    assert models.default_for((1, 28, 28)) == models.default_for((3, 16, 16)) == "cnn"
    assert [models.default_for(s) for s in ((64,), (1, 8, 8), (3, 16, 15), (90, 3), (1, 2, 3, 4))] == ["mlp"] * 5
    assert models.build("auto", (1, 28, 28), 10).dim == 50
    assert models.build("auto", (1, 8, 8), 10, embedding=9).dim == 9


def test_settings_can_be_given_as_an_object() -> None:
    assert models.build(models.CNN(embedding=7), (1, 16, 16), 2).dim == 7
    assert models.make(models.CNN(embedding=7, kernel=3), (1, 16, 16), dropout="0.2") == models.CNN(
        embedding=7, kernel=3, dropout=0.2
    )
    assert "did you mean 'dropout'" in refusal(lambda: models.make(models.CNN(), (1, 16, 16), droput=1))


@pytest.mark.parametrize(
    ("name", "shape", "options", "says"),
    [
        ("cnn", (1, 15, 28), {}, "at least 16x16; a sample has shape [1, 15, 28]. Try model=mlp"),
        ("cnn", (64,), {}, "a sample has shape [64]. Try model=mlp"),
        ("resnet18", (28, 28), {}, "a sample has shape [28, 28]. Try model=mlp"),
        ("cn", (1, 28, 28), {}, "did you mean 'cnn'"),
        ("cnn", (1, 28, 28), {"chanels": (3, 4)}, "did you mean 'channels'"),
        ("cnn", (1, 28, 28), {"channels": (3, 4, 5)}, "model 'cnn': channels"),
        ("cnn", (1, 28, 28), {"dropout": 1.0}, "dropout=1.0; expected at least 0 and below 1"),
        ("cnn", (1, 28, 28), {"kernel": 0}, "kernel=0; expected at least 1"),
        ("dropout-cnn", (1, 28, 28), {"dropout": (0.1, 1.0)}, "dropout=1.0; expected at least 0 and below 1"),
        ("dropout-cnn", (1, 5, 28), {}, "at least 6x6; a sample has shape [1, 5, 28]"),
        ("mlp", (4,), {"embedding": 0}, "embedding=0; expected at least 1"),
        ("mlp", (4,), {"hidden": (8, -1)}, "hidden=-1; expected at least 1"),
        ("resnet18", (3, 32, 32), {"stem": "large"}, "model 'resnet18': stem='large'"),
        ("resnet18", (3, 32, 32), {"embedding": 0}, "embedding=0"),
        ("mlp", (), {}, "shape []"),
        ("mlp", (3, 0), {}, "shape [3, 0]"),
    ],
)
def test_what_cannot_be_built_is_one_clear_line(name: str, shape: tuple[int, ...], options: dict, says: str) -> None:
    assert says in refusal(lambda: models.build(name, shape, 4, **options))


def test_no_classes_and_a_wrong_stem_given_in_python() -> None:
    assert "0 classes" in refusal(lambda: models.build("mlp", (4,), 0))
    assert "stem='large'" in refusal(lambda: models.ResNet18(stem="large"))  # type: ignore[arg-type]


# --- a person's own network -----------------------------------------------------------------------------------------


def test_an_own_network_in_one_line(own_names: None) -> None:
    models.register_module("My_Net", OwnNetwork)
    model = models.build("my-net", (3, 32, 32), 10)
    assert models.build("my_net", (3, 32, 32), 10).dim == model.dim == 4
    output = model(torch.randn(5, 3, 32, 32))
    assert isinstance(output, models.Output) and output.logits.shape == (5, 10)
    assert model.training and "conv.weight" in model.state_dict()
    assert models.available()["My_Net"] == 4 * 27 + 4 + 8 + 50
    assert isinstance(copy.deepcopy(model)(torch.randn(2, 3, 32, 32)), models.Output)
    assert "unknown setting of model 'My_Net'" in refusal(lambda: models.build("my-net", (3, 8, 8), 2, width=3))


def test_checking_an_own_network_draws_no_random_numbers_and_leaves_statistics(own_names: None) -> None:
    class Noisy(OwnNetwork):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x + torch.randn_like(x))

    net = Noisy((3, 8, 8), 2)
    before = torch.random.get_rng_state()
    adapt(net, (3, 8, 8), 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(net.norm.running_mean, torch.zeros(4))


def test_lazy_layers_are_shaped_by_the_check() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.LazyLinear(6), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.fc(x.flatten(1))
            return z, self.head(z)

    assert models.parameter_count(adapt(Lazy(), (2, 5), 3)) == 66 + 21


class Gives(nn.Module):
    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda x: x.long(), "got [2, 4] of torch.int64"),
        (lambda x: x[0], "got [4]"),
        (lambda x: x[:1], "got [1, 4]"),
        (lambda x: x.reshape(2, 1, 2, 2), "got [2, 1, 2, 2]; end it with a global pooling or flatten"),
        (lambda x: (x, x, x), "got tuple of 3"),
        (lambda x: {"z": x}, "got dict"),
        (lambda x: (x[:, :, None], x[:, :3]), "got [2, 4, 1] and [2, 3]; end it with a global pooling or flatten"),
        (lambda x: (x, x), "got [2, 4] and [2, 4]"),
        (lambda x: (x, x[:1, :3]), "got [2, 4] and [1, 3]"),
        (lambda x: (x.long(), x[:, :3]), "got [2, 4] of torch.int64 and [2, 3]"),
        (lambda x: (None, x[:, :3]), "got NoneType and [2, 3]"),
        (lambda x: x @ x, "failed on a batch of shape (2, 4) (RuntimeError"),
    ],
)
def test_an_own_network_that_gives_something_else(make: Callable, says: str, own_names: None) -> None:
    models.register_module("odd", lambda shape, classes: Gives(make))
    text = refusal(lambda: models.build("odd", (4,), 3))
    assert says in text and "model 'odd'" in text


def test_an_own_network_that_gives_flat_features_gets_a_head(own_names: None) -> None:
    class Features(nn.Module):
        dim = "not ours"  # only a module that gives the pair keeps its width there

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).mean((-2, -1))

    models.register_module("features", lambda shape, classes: Features())
    model = models.build("features", (3, 8, 8), 7)
    assert isinstance(model, models.Classifier) and model.dim == 5 and model.training
    assert set(dict(model.named_parameters())) == {
        *("encoder.conv.weight", "encoder.conv.bias", "encoder.norm.weight", "encoder.norm.bias"),
        *("head.weight", "head.bias"),
    }
    x = torch.randn(4, 3, 8, 8)
    output = model.eval()(x)
    torch.testing.assert_close(output.embedding, model.encoder(x))
    torch.testing.assert_close(output.logits, output.embedding @ model.head.weight.T + model.head.bias)
    assert models.available()["features"] == 5 * 27 + 5 + 10 + 60
    params, buffers = stack_module_state([model.train(), copy.deepcopy(model)])  # batch norm counts nothing
    run = vmap(lambda p, b, x: functional_call(model, {**p, **{k: v.clone() for k, v in b.items()}}, (x,)))
    assert run(params, buffers, torch.randn(2, 4, 3, 8, 8)).logits.shape == (2, 4, 7)


def test_an_own_network_with_another_dim_or_none_at_all(own_names: None) -> None:
    def with_dim(shape: tuple[int, ...], classes: int) -> nn.Module:
        net = OwnNetwork(shape, classes)
        net.dim = 99  # type: ignore[assignment]
        return net

    models.register_module("dims", with_dim)
    assert "'dim' is 99" in refusal(lambda: models.build("dims", (3, 8, 8), 2))
    models.register_module("nothing", lambda shape, classes: None)  # type: ignore[arg-type, return-value]
    assert "got NoneType" in refusal(lambda: models.build("nothing", (3, 8, 8), 2))


@pytest.mark.slow
def test_an_own_model_with_settings(own_names: None) -> None:
    @models.register("tiny")
    @dataclass(frozen=True)
    class Tiny:
        name: ClassVar[str]
        width: int  # no default: cannot be listed with a count

        def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module:
            return models.Classifier(nn.Sequential(nn.Flatten(), nn.LazyLinear(self.width)), self.width, num_classes)

    assert models.build("tiny", (5,), 2, width="3").dim == 3
    assert models.available()["tiny"] is None
    assert "width is missing" in refusal(lambda: models.build("tiny", (5,), 2))
