"""Feature shift: every client's own look, the same for all its rows, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import protofed as pf
from protofed.data import Dataset, FederatedData, federate
from protofed.data.fingerprint import fingerprint
from protofed.data.picture import draw_samples
from protofed.data.shift import Colour, Gain, Noise, Permutation, Rotation, Samplewise, Shift, Style, shifted
from protofed.errors import ProtofedError
from protofed.experiment.build import prepare_data
from protofed.experiment.settings import resolve
from protofed.registry import parse_part

GREY, RGB = Samplewise((1, 8, 8), "image"), Samplewise((3, 9, 12), "auto")


class Fixed:
    """A stream whose uniform draws are all one value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def uniform(self, low: float, high: float, size: object = None) -> object:
        return self.value if size is None else np.full(size, self.value)

    def random(self) -> float:
        return 0.999


def pictures(n: int = 60, channels: int = 1, side: int = 8) -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.random((n, channels, side, side), dtype=np.float32), np.arange(n) % 3
    return Dataset.from_arrays(x, y, x[::3] * 0.5, y[::3], name="noise").standardised()


def worlds(shift: Shift, clients: int = 4, **split: object) -> tuple[FederatedData, FederatedData]:
    plain = federate(pictures(), "iid", clients, seed=3, **split)  # type: ignore[arg-type]
    return plain, shifted(plain, shift, seed=3)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_rotation_by_right_angles_is_exact(turns: int) -> None:
    look = Rotation(180).look(GREY, Fixed(90.0 * turns))  # type: ignore[arg-type]
    x = torch.rand(2, 1, 8, 8)
    exact = torch.rot90(x, turns, (2, 3))
    assert torch.allclose(look(x), exact, atol=1e-5) or torch.allclose(
        look(x), torch.rot90(x, -turns, (2, 3)), atol=1e-5
    )


def test_a_rotation_of_a_wide_image_keeps_its_shapes() -> None:
    """A disc in the middle stays a disc, also where images are not square."""
    rows, columns = torch.meshgrid(torch.arange(24.0) - 11.5, torch.arange(48.0) - 23.5, indexing="ij")
    disc = (1 - ((rows**2 + columns**2) / 81)).clamp(0)[None, None]
    look = Rotation(90).look(Samplewise((1, 24, 48), "image"), Fixed(33.0))  # type: ignore[arg-type]
    assert (look(disc) - disc).abs().max() < 0.05


def test_colour_and_style_by_hand() -> None:
    x = torch.rand(2, 3, 9, 12)
    tinted = Colour(0.5).look(RGB, Fixed(0.2))(x)  # type: ignore[arg-type]
    assert torch.allclose(tinted, (1.2 * x + 0.1).clamp(0, 1))
    plain = Style(0, inverted=0).look(RGB, np.random.default_rng(0))(x)
    assert torch.allclose(plain, x, atol=1e-6)
    negative = Style(0, inverted=1).look(RGB, np.random.default_rng(0))(x)
    assert torch.allclose(negative, 1 - x, atol=1e-6)
    flat = Style(1.0, inverted=0).look(RGB, np.random.default_rng(1))(torch.full_like(x, 0.5))
    assert flat.std() < 1e-6, "blur and contrast leave a flat image flat"


def test_a_permutation_moves_places_and_keeps_values() -> None:
    plain, seen = worlds(Permutation())
    for before, after in zip(plain.clients, seen.clients, strict=True):
        x, z = before.labelled.take()[0].flatten(1), after.labelled.take()[0].flatten(1)
        assert torch.equal(x.sort(1).values, z.sort(1).values) and not torch.equal(x, z)
        wires = [(x == column[:, None]).all(0).nonzero().item() for column in z.T]
        assert sorted(wires) == list(range(64))  # type: ignore[type-var]
        assert torch.equal(before.test.take()[0].flatten(1)[:, wires], after.test.take()[0].flatten(1)), "one wiring"
    half = Permutation(0.5).look(GREY, np.random.default_rng(0))(torch.arange(64.0).reshape(1, 1, 8, 8)).flatten()
    assert 0.4 * 64 <= (half == torch.arange(64)).sum() <= 0.6 * 64
    csi = torch.rand(3, 2, 5, 7)
    seen_csi = Permutation().look(Samplewise((2, 5, 7), "csi"), np.random.default_rng(0))(csi)
    assert torch.equal(csi.sort(3).values, seen_csi.sort(3).values), "time stays, subcarriers move"


def test_noise_and_gain_have_their_sizes() -> None:
    flat = Samplewise((500,), "features")
    x = torch.zeros(400, 500)
    noisy = Noise(1.0).look(flat, np.random.default_rng(4))
    deviation = np.random.default_rng(4).uniform(0, 1.0)
    assert noisy(x).std() == pytest.approx(deviation, rel=0.02)
    gain = Gain(0.3).look(flat, np.random.default_rng(0))
    offset, scale = gain(x)[0], gain(x + 1)[0] - gain(x)[0]
    assert 0.25 < offset.abs().max() <= 0.3 and 0.25 < (scale - 1).abs().max() <= 0.3
    windows = Gain(0.3).look(Samplewise((2, 5, 7), "csi"), np.random.default_rng(0))(torch.zeros(1, 2, 5, 7))
    assert (windows[:, :, 0] == windows[:, :, 4]).all(), "one calibration at all times"


def test_every_row_of_a_client_is_seen_by_its_look_and_nothing_else_changes() -> None:
    split = {"validation_share": 0.2, "labels": "client", "labels_per_class": 1, "server_labels": 6}
    plain, seen = worlds(Rotation(60), **split)
    again = shifted(plain, Rotation(60), seed=3)
    assert fingerprint(seen) == fingerprint(again) != fingerprint(plain)
    assert fingerprint(shifted(plain, Rotation(60), seed=4)) != fingerprint(seen)
    assert seen.server is plain.server and seen.central_test is plain.central_test
    mean, std = plain.mean, plain.std
    assert mean is not None and std is not None
    for number, (before, after) in enumerate(zip(plain.clients, seen.clients, strict=True)):
        rng = np.random.default_rng(pf.seeds.derive(3, "shift", number))
        look = Rotation(60).look(GREY, rng)
        for part in ("labelled", "unlabelled", "validation", "test"):
            x, z = (getattr(c, part).take() for c in (before, after))
            if part != "unlabelled":
                assert torch.equal(x[1], z[1]), "labels"
                x, z = x[0], z[0]
            assert torch.allclose(z, (look(x * std + mean) - mean) / std, atol=1e-5)
    first = seen.clients[0]
    assert len({id(c.labelled.x) for c in seen.clients} | {id(first.unlabelled.x), id(first.validation.x)}) == 1  # type: ignore[union-attr]
    assert len({id(c.test.x) for c in seen.clients}) == 1, "stacks need one tensor"
    assert len(first.test.x) == sum(len(c.test) for c in seen.clients), "no more rows than clients hold"


def test_a_client_keeps_its_look_when_others_join() -> None:
    for shift in (Style(), Permutation()):
        few, many = (shifted(federate(pictures(), "iid", n, seed=3), shift, seed=3) for n in (2, 5))
        for a, b in zip(few.clients, many.clients, strict=False):
            assert torch.equal(a.test.take()[0], b.test.take()[0])


def test_without_a_shift_nothing_changes() -> None:
    given: dict[str, object] = {"data": "digits", "clients": 3, "shot": 4}
    assert fingerprint(prepare_data(resolve("local", given))) == DIGITS_BEFORE
    assert fingerprint(prepare_data(resolve("local", {**given, "shift": "rotation"}))) != DIGITS_BEFORE


DIGITS_BEFORE = "6ce6005f67a3e531a9a45c1aae165108b24012a2500ebf435006b05fafd3e7cf"  # of 0.2, before there were shifts


@pytest.mark.slow
def test_engines_agree_and_looks_hurt_an_average() -> None:
    common = {"data": "digits", "partition": "iid", "clients": 4, "limit_train": 200, "limit_test": 60, "lr": 0.1}
    runs = {
        engine: pf.run("fedproto", **common, rounds=3, silhouette=False, shift="permutation", engine=engine)
        for engine in ("loop", "stack")
    }
    loop, stack = (run.metrics[-1] for run in runs.values())
    assert loop["accuracy_head"] == pytest.approx(stack["accuracy_head"], abs=0.02)
    assert loop["loss"] == pytest.approx(stack["loss"], rel=1e-3)
    alike, apart = (
        pf.run("fedavg", **common, rounds=8, evaluate_every=8, silhouette=False, shift=s).metrics[-1]["accuracy_head"]
        for s in ("", "permutation")
    )
    assert alike > apart + 0.05


@pytest.mark.parametrize(
    ("shift", "data", "message"),
    [
        ("spin", {}, "unknown shift 'spin'"),
        ("rotation?most=200", {}, "most must be at least 0 and at most 180, got 200"),
        ("noise?most=-1", {}, "most must be at least 0, got -1"),
        ("permutation?share=2", {}, "share must be at least 0 and at most 1"),
        ("rotation?angle=3", {}, "'angle'"),
        ("colour", {}, "shift=colour needs images of three channels; image_channels=3"),
        ("gain", {}, "shift=gain is for features and CSI windows; the data has images"),
        (
            "rotation",
            {"data": "flat.npz", "partition": "iid"},
            r"shift=rotation is for images .*; the data has samples of shape \[4\]",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    shift: str, data: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("flat.npz", x_train=np.random.default_rng(0).random((30, 4)), y_train=np.arange(30) % 3)
    with pytest.raises(ProtofedError, match=message):
        prepare_data(resolve("local", {"shift": shift, "clients": 3, **data}))


def test_tokens_and_votes_are_refused() -> None:
    with pytest.raises(ProtofedError, match=r"shift=noise is for numbers, and the data has token ids of shape \[9\]"):
        parse_part(Shift.registry, "noise").check(Samplewise((9,), "tokens", tokens=True))
    with pytest.raises(ProtofedError, match="ensemble=true votes on one test set for all"):
        resolve("local", {"shift": "noise", "ensemble": True})


@pytest.mark.slow
def test_data_show_draws_samples_and_lists_shifts(call) -> None:
    code, out, _ = call("data", "show", "clients=3", "shift=rotation?most=45", "--picture", "p.png")
    assert code == 0 and "samples: p-samples.png" in out and Path("p-samples.png").stat().st_size > 5000
    assert call("data", "show", "clients=3", "--picture", "q.png")[0] == 0 and not Path("q-samples.png").exists()
    assert call("data", "show", "clients=3", "--picture", "q.png", "--samples", "s.svg")[0] == 0
    assert Path("s.svg").is_file()
    listing = call("data")[1]
    assert all(name in listing for name in Shift.registry)
    with pytest.raises(ProtofedError, match="expected a file name ending in"):
        draw_samples(federate(pictures(), "iid", 2, seed=0), Path("x.gif"))
