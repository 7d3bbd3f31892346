"""A federation of sites on this machine: data of one data set shared out to files, kits, processes, and a run."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ProtofedError
from ..experiment.build import prepare_data
from ..experiment.run import Watcher
from ..experiment.settings import AutoModel, Settings, resolve
from ..grammar import write_choice
from ..outcome import Result
from ..registry import as_options
from .flare import Server
from .keys import Project, make_kits, need_flare
from .policy import refuse_simulated
from .remote import Limits
from .serve import serve

log = logging.getLogger("protofed")
START = 60.0  # seconds that a site's process may take to join


def try_out(
    method: str, given: Mapping[str, Any], sites: int, out: Path, folder: Path, watch: Watcher | None = None
) -> Result:
    """Run a method between sites on this machine: each a process of its own, with certificates, over TLS.

    Args:
        method: The method's name.
        given: The settings, as for a simulation: the data set is shared out by its partition, one client a site.
        sites: How many sites.
        out: The run folder to write.
        folder: Where kits, data files and the sites' own folders are put.
        watch: A function that is called with the record of each round and the number of rounds.

    Returns:
        The result, as that of a simulation.
    """
    need_flare()
    settings = resolve(method, {**given, "clients": sites})
    refuse_simulated(vars(settings.general))
    names = [f"site-{k + 1}" for k in range(sites)]
    files = share_out(settings, names, folder / "data")
    models = models_of(settings, sites)
    kits = make_kits(Project("trial", "127.0.0.1", tuple(names), free_port()), folder / "kits")
    own = (
        "data",
        "partition",
        "model",
        "models",
        "clients",
        "assignment",
        "way",
        "shot",
        "spread",
        "shot_spread",
        "alpha",
        "shift",
        "unseen",
    )
    shared = {key: value for key, value in given.items() if key.partition(".")[0] not in own}
    shared = {"checkpoint_every": 1, **shared}
    with contextlib.ExitStack() as stack:
        transport = stack.enter_context(Server(kits["server"], kits["admin"]))
        for k, name in enumerate(names):
            words = ["join", kits[name], "--data", files[k], "--model", models[k], "--folder", folder / name]
            stack.enter_context(_process([*map(str, words)], folder / f"{name}.log"))
        limits = Limits(seconds=300, quorum=sites, patience=START)
        return serve(method, shared, transport, names, out, limits=limits, watch=watch)


def share_out(settings: Settings, names: list[str], folder: Path) -> list[Path]:
    """Write the data of each client of a simulation into a file of its own, as a site would have it."""
    data = prepare_data(settings)
    classes = data.class_names or tuple(map(str, range(data.num_classes)))
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, client in zip(names, data.clients, strict=True):
        x, y = client.labelled.take()
        x_test, y_test = client.test.take()
        tensors = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
        arrays: dict[str, Any] = {key: value.numpy() for key, value in tensors.items()}
        files.append(folder / f"{name}.npz")
        np.savez(files[-1], class_names=np.array(classes), **arrays)
    return files


def models_of(settings: Settings, sites: int) -> list[str]:
    """The network of each site, as a setting is written: those of `models` in turn, or one for all."""
    models = settings.general.models
    if models:
        return [models[k % len(models)] for k in range(sites)]
    model = settings.model
    if isinstance(model, AutoModel):
        return ["auto"] * sites
    return [write_choice(model.name, as_options(model))] * sites


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _process(words: list[str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of ours in a process of its own, which ends with this block."""
    with log_file.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "protofed", *words], stdout=file, stderr=file)
    try:
        time.sleep(0.05)
        if process.poll() is not None:
            raise ProtofedError(f"{log_file}: a site could not start; its log says why")
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
