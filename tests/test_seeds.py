"""Random streams: named by purpose, stable for ever, independent of each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from protofed import seeds


def test_derived_seeds_never_change() -> None:
    """Published results hang on these numbers: a change here changes every run."""
    assert seeds.derive(1234) == 3927728707180340946
    assert seeds.derive(1234, "batches", 3, 57) == 4895750896326202828
    assert seeds.derive(0, "initialisation") == 4806773427270544447
    assert seeds.derive(-1, "é/ü", 0) == 2104730114154360091


def test_a_purpose_has_one_stream_whatever_was_drawn_before() -> None:
    first = torch.rand(4, generator=seeds.torch_stream(7, "batches", 1, 2))
    torch.rand(100)
    seeds.torch_stream(7, "batches", 1, 3).initial_seed()
    assert torch.equal(first, torch.rand(4, generator=seeds.torch_stream(7, "batches", 1, 2)))
    draws = [seeds.numpy_stream(7, "partition").random(4) for _ in range(2)]
    assert np.array_equal(*draws)


def test_making_streams_leaves_the_global_generators_alone() -> None:
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch.rand(3, generator=seeds.torch_stream(1, "x"))
    seeds.numpy_stream(1, "x").random(3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_every_purpose_has_a_seed_of_its_own() -> None:
    keys = itertools.product((0, 1, 1234), ("batches", "views", "dropout"), range(40), range(40))
    values = [seeds.derive(*key) for key in keys]
    assert len(set(values)) == len(values)
    assert all(0 <= v < 2**63 for v in values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "a", "b"), (1, "a/b")),
        ((1, "a", 12), (1, "a", 1, 2)),
        ((1, "a", 1), (1, "a", "1")),
        ((1, 2), (12,)),
        ((1, "a"), (1, "a", "")),
        ((1, "a", "b"), (1, "b", "a")),
        ((1, 'a", "b'), (1, "a", "b")),
    ],
)
def test_purposes_that_look_alike_differ(one: tuple, other: tuple) -> None:
    assert seeds.derive(*one) != seeds.derive(*other)


def test_streams_are_not_correlated() -> None:
    rows = torch.stack([torch.randn(2000, generator=seeds.torch_stream(3, "batches", c, 1)) for c in range(12)])
    apart = torch.corrcoef(rows) - torch.eye(12)
    assert float(apart.abs().max()) < 0.1  # 4.5 standard deviations of 1/√2000
    both = np.stack([seeds.numpy_stream(3, "noise", c).standard_normal(2000) for c in range(12)])
    assert np.abs(np.corrcoef(both) - np.eye(12)).max() < 0.1


def test_integers_of_any_kind_name_the_same_stream() -> None:
    plain = seeds.derive(5, "client", 3)
    assert seeds.derive(np.int64(5), "client", np.int32(3)) == plain
    assert seeds.derive(5, "client", torch.tensor(3)) == plain  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        seeds.derive(5, "client", 3.0)  # type: ignore[arg-type]


def test_the_stream_of_dropout_is_that_of_its_purpose():
    with torch.random.fork_rng(devices=[]):
        seeds.start_default_stream(torch.device("cpu"), 7, "dropout", 3, 1)
        mine = torch.rand(4)
        torch.manual_seed(seeds.derive(7, "dropout", 3, 1))
        assert torch.equal(mine, torch.rand(4))
