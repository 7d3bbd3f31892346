"""The server's side of a run between sites: it learns who they are, agrees on classes, and runs the rounds."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..data import Dataset
from ..data.fingerprint import fingerprint
from ..data.types import Samples
from ..errors import ProtofedError
from ..experiment.build import engine_inputs, make_federation
from ..experiment.run import Watcher, run_federation
from ..experiment.settings import Settings, resolve
from ..federation import checkpoint
from ..federation.choose import EngineSettings, threads_kept
from ..federation.site import opened, sealed
from ..outcome import Result
from ..results.folder import read_about, read_settings
from ..results.read import is_run
from .cards import Card, agreed_classes, check_shapes, federation_data
from .policy import refuse_simulated
from .remote import Limits, RemoteEngine
from .transport import Failure, Transport

log = logging.getLogger("protofed")
PLAIN = EngineSettings("loop", "loop", "contiguous", "grouped", 1, 1)


def serve(
    method: str | None,
    given: Mapping[str, Any],
    transport: Transport,
    sites: Sequence[str],
    out: Path,
    *,
    limits: Limits | None = None,
    data: Dataset | None = None,
    watch: Watcher | None = None,
) -> Result:
    """Run a method between sites, or go on with a run that was stopped.

    Args:
        method: The method's name; None where `given` has it.
        given: The settings, as for a simulation; those of data, partition and models are the sites' own.
        transport: What reaches the sites.
        sites: The names of all sites of the project.
        out: The run folder: a new one, or that of a run that was stopped.
        limits: Time limit and quorum of a round.
        data: Samples of the server's own, for methods whose server trains.
        watch: A function that is called with the record of each round and the number of rounds.

    Returns:
        The result, as that of a simulation.
    """
    refuse_simulated(given)
    limits = limits or Limits(quorum=len(sites))
    run, cards = read_begun(out)
    cards = cards or ask_cards(transport, sites, limits)
    run = run or f"{out.resolve().name}-{secrets.token_hex(4)}"
    check_shapes(cards)
    classes, number = agreed_classes(cards)
    settings = _stored_settings(out, cards) if is_run(out) else _settings(method, given, cards)
    roster = federation_data(cards, classes, number)
    if data is not None:
        if tuple(data.x_train.shape[1:]) != roster.sample_shape:
            raise ProtofedError(
                f"the server's samples have shape {tuple(data.x_train.shape[1:])}, and the sites' {roster.sample_shape}"
            )
        labels = data.y_train
        roster = replace(roster, server=Samples(data.x_train, labels, labels.new_tensor(range(len(labels)))))
    teacher = settings.method.teacher
    if teacher is not None and teacher.statistics == "all":
        raise ProtofedError(
            "server_statistics=all: the server has no samples of the sites; use server_statistics=server"
        )
    settings, inputs, names = engine_inputs(settings, roster, secret=True)

    def begin(client: int) -> bytes:
        header = {
            "run": run,
            "settings": _sent(settings),
            "client": client,
            "cards": [card.to_json() for card in cards],
            "classes": list(classes),
            "num_classes": number,
        }
        return sealed(header, b"")

    engine = RemoteEngine(transport, [card.name for card in cards], inputs.engine(PLAIN), run, begin, limits)
    engine.oldest_checkpoint = lambda: _oldest(out / "checkpoint")
    settings = settings.with_engine(PLAIN)
    with threads_kept():
        torch.set_num_threads(PLAIN.threads)  # sums depend on it, so it may not depend on the number of cores
        federation = make_federation(settings, engine, inputs, names)
        about = {"data": fingerprint(roster), "run": run, "sites": [card.to_json() for card in cards]}
        return run_federation(settings, federation, out, about, watch)


def read_begun(out: Path) -> tuple[str, list[Card]]:
    """The name by which the sites know the run in a folder, and the sites; nothing where no run was begun there."""
    if not is_run(out):
        return "", []
    about = read_about(out)
    if "sites" not in about:
        raise ProtofedError(f"{out}: not a run between sites; `protofed resume {out}` goes on with it")
    return str(about["run"]), [Card.from_json(card, str(out)) for card in about["sites"]]


def ask_cards(transport: Transport, sites: Sequence[str], limits: Limits) -> list[Card]:
    """Wait for the sites of a project and ask each what it is.

    All of them must come before a run begins: how many there are and what networks they have decides what is sent.
    """
    deadline = time.monotonic() + limits.patience
    cards: dict[str, Card] = {}
    while True:
        new = [name for name in transport.sites() if name in sites and name not in cards]
        if new:
            for name, reply in transport.call(
                "describe", {name: sealed({}, b"") for name in new}, limits.seconds
            ).items():
                if isinstance(reply, Failure):
                    log.warning("%s: %s", name, reply)
                    continue
                card = Card.from_json(opened(reply, name)[0], name)
                if card.name != name:
                    raise ProtofedError(f"{name}: it says that its name is {card.name!r}")
                cards[name] = card
                log.info("%s joins: %s, %d labelled samples", name, card.model, card.labelled)
        missing = [name for name in sites if name not in cards]
        if not missing:
            return [cards[name] for name in sorted(cards)]
        if time.monotonic() > deadline:
            raise ProtofedError(f"sites that have not joined within {limits.patience:g} s: {', '.join(missing)}")
        time.sleep(0.2)


def _settings(method: str | None, given: Mapping[str, Any], cards: Sequence[Card]) -> Settings:
    """The settings of a run between these sites: one model for each, in the order of the sites."""
    for key in ("models", "model", "partition", "data"):
        if key in given:
            raise ProtofedError(f"{key}: each site has its own; it is given where the site joins")
    if given.get("shared_optimiser"):
        raise ProtofedError("shared_optimiser: sites train at the same time, so none can take over another's optimiser")
    models = [card.model for card in cards]
    chosen = {**given, "clients": len(cards), "models": models, "assignment": "round-robin", "data": _no_data(cards)}
    return resolve(method, chosen)


def _stored_settings(out: Path, cards: Sequence[Card]) -> Settings:
    return resolve(None, {**read_settings(out), "data": _no_data(cards)})


def _no_data(cards: Sequence[Card]) -> Dataset:
    x = torch.zeros((1, *cards[0].shape), dtype=torch.int64 if cards[0].tokens else torch.float32)
    return Dataset(x, torch.zeros(1, dtype=torch.int64), num_classes=1, name="sites")


def _sent(settings: Settings) -> dict[str, Any]:
    """The settings that a site needs: all but where the server's data is."""
    content = json.loads(json.dumps(settings.to_dict()))
    for key in ("data", "partition", "start_from", "track"):
        content.pop(key, None)
    return dict(content)


def _oldest(folder: Path) -> int:
    """The round of the oldest checkpoint: a server that is resumed may go back to it, and no further."""
    saved = checkpoint.rounds_in(folder)
    return int(saved[-1].name.removeprefix("round-")) if saved else 0
