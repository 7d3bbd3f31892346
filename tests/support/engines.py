"""Federations finished on every engine, to be compared with those of the plain loop."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from protofed.data import Dataset
from protofed.experiment.build import build
from protofed.federation import rule
from protofed.federation.choose import EngineSettings
from protofed.parts.reduce import Running

LOOP = EngineSettings("loop", "loop", "contiguous", "grouped", 1, 1)
ENGINES = {
    "channels last": replace(LOOP, layout="channels_last"),
    "channels last, lean": replace(LOOP, layout="channels_last", convolution="lean"),
    "stack": EngineSettings("stack", "stack", "contiguous", "grouped", 1, 1),
    "stack unfold": EngineSettings("stack", "stack", "contiguous", "unfold", 1, 1),
    "workers": EngineSettings("workers", "loop", "contiguous", "grouped", 2, 1),
    "workers stack": EngineSettings("workers", "stack", "contiguous", "grouped", 3, 1),
}


def images(classes=4, per_class=20, size=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat_interleave(per_class)
    x = torch.randn(len(y), 1, size, size, generator=g) + y[:, None, None, None]
    return Dataset.from_arrays(x, y, x[::4], y[::4], num_classes=classes)


@contextmanager
def groups_of(clients):
    """Stacks of so many clients at most, so that few clients are several groups."""
    with mock.patch.multiple(rule, GROUP_CLIENTS=clients, GROUP_LEAST=1):
        yield


def finish(settings, engine):
    """A federation's state, its clients' and its records after all rounds, with stacks of at most three clients."""
    with groups_of(3):
        return finish_in_usual_groups(settings, engine)


def finish_in_usual_groups(settings, engine):
    settings, federation = build(settings.with_engine(engine))
    try:
        records = list(federation)
        states = {
            c: ({n: w.clone() for n, w in s.weights.items()}, s.optimiser, s.memory, s.bank)
            for c, s in federation.engine.export().items()
        }
    finally:
        federation.engine.close()
    return federation.state, states, records


last_loop: dict[object, tuple] = {}


def by_plain_loop(settings):
    """`finish(settings, LOOP)`, kept until other settings are asked for: engine after engine is compared with it."""
    data = settings.data
    samples = data.x_train.numpy().tobytes() if isinstance(data, Dataset) else data
    key = (settings.method, str(settings.to_dict()), samples)
    if key not in last_loop:
        last_loop.clear()
        last_loop[key] = finish(settings, LOOP)
    return last_loop[key]


def leaves(tree):
    """Every value in a bundle or a server's state by its place, whatever order names were put in."""
    return {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(tree)[0]}


def assert_close(its, mine):
    """Trees of one type with the same values, up to rounding."""
    assert type(its) is type(mine)
    its, mine = leaves(its), leaves(mine)
    assert its.keys() == mine.keys()
    for place, value in mine.items():
        if isinstance(value, torch.Tensor | float):
            one, other = (torch.as_tensor(v) for v in (value, its[place]))
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text, at=place: f"{at}: {text}")
        else:
            assert its[place] == value, place


def assert_same(settings, engine):
    """An engine gives the plain loop's numbers. Returns the records of the rounds, the loop's and the engine's."""
    server, states, records = by_plain_loop(settings)
    other_server, other_states, other_records = finish(settings, engine)
    assert_close(other_states, states)
    assert_close(other_server, server)
    for one, other in zip(records, other_records, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4, nan_ok=not one.participants)
        assert other.up == one.up and other.down == one.down
        for a, b in zip(one.scores, other.scores, strict=True):  # a sample on the boundary may fall to either side
            assert abs(a.head - b.head) <= 1 and abs(a.prototype - b.prototype) <= 1 and a.samples == b.samples
            assert (a.by_prototype is None) == (b.by_prototype is None)
    return records, other_records


def updated(method, state, uploads, round, setup):
    """The server's state after a round in which these uploads came."""
    running = Running(method.reduce)
    running.add(uploads)
    return method.update(state, running.result(), round, setup)
