"""Scaling by each site's own statistics beside everything else that depends on the scale of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import protofed as pf
from protofed.data import Dataset, FederatedData, federate
from protofed.data.newcomers import held_out
from protofed.data.shift import Colour, Noise, shifted
from protofed.data.unseen import with_unseen, without_group
from protofed.deploy.cards import Card
from protofed.deploy.node import site_data
from protofed.errors import ProtofedError
from protofed.experiment.build import prepare_data
from protofed.experiment.settings import resolve

SMALL: dict[str, Any] = {"partition": "natural", "clients": 0, "rounds": 2, "silhouette": False, "snapshots": 0}
IMAGES: dict[str, Any] = {"model": "mlp?hidden=9", "lr": 0.1}


def pictures(n: int = 90, sites: int = 3, channels: int = 1) -> Dataset:
    """Images from 0 to 1 of sites of different brightness."""
    rng = np.random.default_rng(0)
    y, site = np.arange(n) % 3, np.arange(n) // 3 % sites
    x = rng.random((n, channels, 12, 12)) * 0.4 + 0.15 * site[:, None, None, None]
    x[y == 1, :, :6] += 0.2
    x[y == 2, :, :, :6] += 0.2
    return Dataset.from_arrays(x.astype(np.float32), y, group_train=site, name="places")


def raw(x: Tensor, data: FederatedData, client: int) -> Tensor:
    """Samples of a client as they were before they were scaled."""
    mean, std = data.scaling(client)
    assert mean is not None and std is not None
    return x * std[:, None, None] + mean[:, None, None]


def test_a_shift_is_of_levels_and_each_site_scales_what_it_sees() -> None:
    plain = shifted(federate(pictures(channels=3), "natural", seed=1), Colour(0.3), seed=1)
    seen = shifted(federate(pictures(channels=3).standardised("site"), "natural", seed=1), Colour(0.3), seed=1)
    for number, (before, after) in enumerate(zip(plain.clients, seen.clients, strict=True)):
        for part in ("labelled", "test"):
            x, z = getattr(before, part).take()[0], getattr(after, part).take()[0]
            torch.testing.assert_close(raw(z, seen, number), x, atol=1e-4, rtol=0)
        z = after.labelled.take()[0]
        assert abs(float(z.mean())) < 1e-4 and float(z.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_a_shift_with_rows_without_labels_and_unseen_samples() -> None:
    rest, unseen = without_group(pictures(120, 4).standardised("site"), "3")
    data = federate(rest, "natural", seed=1, labels="client", labels_per_class=3, validation_share=0.2)
    data = shifted(with_unseen(data, unseen, (rest.mean, rest.std)), Noise(0.5), seed=1)
    whole = pictures(120, 4)
    assert whole.group_train is not None
    for number, client in enumerate(data.clients):
        assert client.unlabelled is not None and client.validation is not None and client.unseen is not None
        rows = torch.cat([client.labelled.take()[0], client.unlabelled.take(), client.validation.take()[0]])
        assert abs(float(rows.mean())) < 1e-4
        x = raw(client.unseen.take()[0], data, number)
        torch.testing.assert_close(x, whole.x_train[whole.group_train == 3], atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", ["all", "site", "none"])
@pytest.mark.parametrize("test", ["central", "local"])
def test_unseen_samples_are_in_each_clients_scale(scaling: Any, test: Any) -> None:
    whole = pictures()
    rest, unseen = without_group(whole if scaling == "none" else whole.standardised(scaling), "2")
    data = with_unseen(federate(rest, "natural", seed=1, test=test), unseen, (rest.mean, rest.std))
    assert whole.group_train is not None and (data.site_mean is not None) == (scaling == "site")
    for number, client in enumerate(data.clients):
        assert client.unseen is not None
        x = client.unseen.take()[0]
        x = x if scaling == "none" else raw(x, data, number)
        torch.testing.assert_close(x, whole.x_train[whole.group_train == 2], atol=1e-5, rtol=0)


def test_newcomers_keep_their_scale() -> None:
    data = federate(pictures(120, 4).standardised("site"), "natural", seed=1)
    rest = held_out(data, 2, seed=1)
    old = [c for c in range(4) if any(data.clients[c] is client for client in rest.clients)]
    new = [c for c in range(4) if c not in old]
    for place, client in enumerate([*old, *new]):
        for mine, theirs in zip(rest.scaling(place), data.scaling(client), strict=True):
            assert mine is not None and theirs is not None and torch.equal(mine, theirs)


@pytest.mark.parametrize("given", [{"new_clients": 1}, {"train": "head"}, {"shift": "style"}, {"unseen": "1"}])
def test_predictions_are_the_judges_with_a_scale_for_each_site(given: dict[str, Any], tmp_path: Path) -> None:
    common = {**SMALL, **IMAGES, **given, "data": pictures().standardised("site"), "out": tmp_path / "run"}
    result = pf.run("fedproto", **common)
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    data = prepare_data(result.settings)
    found = []
    for number, client in enumerate(data.clients):
        x, y = client.test.take()
        labels = pf.load(tmp_path / "run").predict(raw(x, data, number), number, "prototype").labels
        found.append(float(np.mean(labels == y.numpy())))
    assert found == row["accuracy_prototype"]


def test_a_site_of_a_federation_scales_by_its_own_rows() -> None:
    whole = pictures()
    cards = [Card(name, "cnn", (1, 12, 12), 3, 90, 0, False) for name in "ab"]
    settings = resolve("fedproto", {**SMALL, **IMAGES, "data": whole, "partition": "iid", "clients": 2})
    one, other = (
        site_data(whole.standardised(scaling), settings, cards, 1, (), 3)  # type: ignore[arg-type]
        for scaling in ("site", "all")
    )
    assert torch.equal(one.clients[1].labelled.take()[0], other.clients[1].labelled.take()[0])
    assert one.scaling(1)[0] is not None and one.site_mean is None


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        (
            "fedavg",
            {"model": "resnet18", "pretrained": "weights.pth"},
            "standardise=site: the published weights of model 'resnet18' need images in one scale for all sites; use "
            "standardise=all, or scaling=data",
        ),
        ("fixmatch-fedavg", {"labels": "client"}, "standardise=site: augmentation changes the levels of images"),
        ("fedavg", {"train": "head", "ensemble": True}, "standardise=site: the ensemble's test set .* features=each"),
    ],
)
def test_what_needs_one_scale_for_all_says_so(method: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtofedError, match=message):
        pf.run(method, **{**SMALL, **given, "data": pictures().standardised("site")})
