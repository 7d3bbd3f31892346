"""A site: one client as a transport meets it, with its data, its model and what it keeps between rounds.

`train` and `evaluate` take a message and return one, as bytes. A site uses nothing but its messages and its own store.
Simulations run the same code without the envelopes; `SiteEngine` is an engine whose sites are elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .. import disk
from ..errors import ProtofedError
from ..evaluate import Confusion, Drawn, Pool, Scores, Snapshot
from ..evaluate.accuracy import QUALITIES, SHARE
from ..evaluate.confusion import PREDICTIONS
from ..evaluate.embedding import EMBEDDING
from ..wire import Bundle, Message, WireError, decode, encode
from .checkpoint import StoredStates, write_states
from .engine import ArchitectureInputs, Downloads, PlainEngine, Taught
from .judge import Evaluation
from .local import ClientState, Outcome
from .mixed import MixedEngine

MEASURED = (*EMBEDDING, SHARE, *(f"{measure}_{prediction}" for measure in QUALITIES for prediction in PREDICTIONS))
HEADER = 2**20  # the most bytes of an envelope's header


def sealed(header: Mapping[str, Any], payload: Message) -> bytes:
    """An envelope: a header as JSON, and the message itself."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + text + payload


def opened(message: Message, source: str) -> tuple[dict[str, Any], bytes]:
    """The header of an envelope, and the message in it."""
    length = int.from_bytes(message[:4], "little")
    try:
        if length > min(HEADER, len(message) - 4):
            raise ValueError(f"{len(message)} bytes, cut short in the header")
        header = json.loads(bytes(message[4 : 4 + length]))
        if not isinstance(header, dict):
            raise ValueError("the header is not a mapping")
    except ValueError as error:
        raise WireError(f"{source}: not an envelope ({error})") from None
    return header, bytes(message[4 + length :])


class FolderStates(MutableMapping[int, ClientState]):
    """The clients' states as files of a folder. A file is replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, client: int) -> Path:
        return self.folder / f"client-{client}.safetensors"

    def __getitem__(self, client: int) -> ClientState:
        if not self._file(client).exists():
            raise KeyError(client)
        return StoredStates(self._file(client))[client]

    def __setitem__(self, client: int, state: ClientState) -> None:
        file = self._file(client)
        with disk.writing(file):
            write_states(file.with_suffix(".tmp"), {client: state})
            file.with_suffix(".tmp").replace(file)
            disk.sync_folder(self.folder)

    def __delitem__(self, client: int) -> None:
        self._file(client).unlink()

    def __iter__(self) -> Iterator[int]:
        return (int(file.stem.removeprefix("client-")) for file in sorted(self.folder.glob("client-*.safetensors")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Site:
    """One client of a federation.

    `states` is where it keeps its state: in memory, or in its folder.

    Example:
        `reply = Site(inputs, client=3).train(message)`
    """

    def __init__(
        self, inputs: ArchitectureInputs, client: int, states: MutableMapping[int, ClientState] | None = None
    ) -> None:
        if inputs.task.local.shared_optimiser:
            raise ProtofedError(
                "shared_optimiser=true: sites train at the same time and send no optimiser state, so none can be passed on "
                "from one to the next; it is for simulations"
            )
        self.client = client
        self.engine = PlainEngine(inputs, inputs.build())
        if states is not None:
            self.engine.states = states

    def _downloads(self, message: Message, purpose: str) -> tuple[Downloads, dict[str, Any]]:
        source = f"server's message to {self.engine.data.name_of(self.client)}"
        header, payload = opened(message, source)
        if type(header.get("round")) is not int:
            raise WireError(f"{source}: it names no round")
        return Downloads(header["round"], [payload], {self.client: 0}, purpose), header

    def train(self, message: Message) -> bytes:
        """Train from a message of the server.

        Args:
            message: An envelope with the round and the encoded bundle.

        Returns:
            An envelope with the upload, the loss terms, and the reason of a failure.
        """
        downloads, _ = self._downloads(message, "train")
        ((_, outcome),) = self.engine.train(downloads)
        header = {
            "round": downloads.round,
            "terms": outcome.terms,
            "failure": outcome.failure,
            "pseudo": outcome.pseudo,
            "measures": outcome.measures,
        }
        return sealed({**header, "returned": outcome.upload is not None}, outcome.upload or b"")

    def evaluate(self, message: Message) -> bytes:
        """Score the site's model on its own test samples.

        Args:
            message: An envelope with the round, the options of the evaluation and the encoded bundle.

        Returns:
            An envelope with the scores.
        """
        downloads, header = self._downloads(message, "evaluate")
        try:
            options = Evaluation(**header["how"])
        except (KeyError, TypeError) as error:
            raise WireError(
                f"server's message to {self.engine.data.name_of(self.client)}: no way to evaluate ({error})"
            ) from None
        scores = self.engine.evaluate(downloads, options)[self.client]
        return sealed({"round": downloads.round}, encode(bundle_of(scores)))


def bundle_of(scores: Scores) -> Bundle:
    """Scores as a bundle, for a message."""
    arrays = {"votes": scores.votes}
    for name in PREDICTIONS:
        confusion = getattr(scores, f"by_{name}")
        arrays[name] = None if confusion is None else confusion.rows
    for name, part in (("snapshot", scores.snapshot), ("pool", scores.pool), ("drawn", scores.drawn)):
        if part is not None:
            arrays |= {f"{name}.{f.name}": getattr(part, f.name) for f in dataclasses.fields(part)}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items() if a is not None}
    shape = {} if scores.silhouette is None else {"silhouette": scores.silhouette}
    return Bundle(tensors=tensors, scalars={**scores.measures, **shape})


def scores_of(bundle: Bundle, source: str) -> Scores:
    """The scores in a bundle."""
    try:
        arrays = {name: value.numpy() for name, value in bundle.tensors.items()}
        snapshot, pool, drawn = (
            {n.removeprefix(part): a for n, a in arrays.items() if n.startswith(part)}
            for part in ("snapshot.", "pool.", "drawn.")
        )
        for name in PREDICTIONS:
            if name in arrays and (arrays[name].ndim != 2 or arrays[name].shape[1] != 3):
                raise ValueError(f"{name} has shape {arrays[name].shape}")
        measures = {name: value for name, value in bundle.scalars.items() if name != "silhouette"}
        for name, value in measures.items():
            if name not in MEASURED or not 0 <= value <= 1:
                raise ValueError(f"it measures {name} = {value:g}")
        return Scores(
            Confusion(arrays["head"]),
            Confusion(arrays["prototype"]) if "prototype" in arrays else None,
            arrays.get("votes"),
            bundle.scalars.get("silhouette"),
            Snapshot(**snapshot) if snapshot else None,
            measures,
            Pool(**pool) if pool else None,
            Drawn(**drawn) if drawn else None,
            Confusion(arrays["mix"]) if "mix" in arrays else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"{source}: not an evaluation ({error})") from None


class SiteConnection(Protocol):
    """A connection to a site, in this process or through a transport."""

    def train(self, message: Message, /) -> bytes:
        """Send the message of a round and return the site's reply."""

    def evaluate(self, message: Message, /) -> bytes:
        """Send the message of an evaluation and return the site's reply."""


def outcome_of_reply(reply: Message, round: int, source: str) -> Outcome:
    """The outcome of a client's training that a site's reply describes."""
    header, payload = opened(reply, source)
    try:
        if header["round"] != round:
            raise ValueError(f"it is of round {header['round']!r}, and this is round {round}")
        terms, pseudo, measures = (
            {str(k): float(v) for k, v in header[part].items()} for part in ("terms", "pseudo", "measures")
        )
        return Outcome(payload if header["returned"] else None, terms, str(header["failure"]), pseudo, measures)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"{source}: not a reply ({type(error).__name__}: {error})") from None


class SiteEngine:
    """An engine whose sites are elsewhere. It sends each its message and takes the reply, and holds no client's state."""

    def __init__(self, sites: Mapping[int, SiteConnection], server: PlainEngine | MixedEngine) -> None:
        """
        Args:
            sites: A connection for each client.
            server: An engine of the same architectures, for a server that trains and for the shapes of weights.
        """
        self.sites, self.server = sites, server
        self.starts, self.owner = server.starts, server.owner
        self.dim, self.parameters = server.dim, server.parameters

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's own model at the server."""
        return self.server.teach(state, round)

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Send each site its message and yield the outcomes. A site whose reply is malformed has failed."""
        for client in downloads.clients:
            reply = self.sites[client].train(sealed({"round": downloads.round}, downloads[client]))
            try:
                outcome = outcome_of_reply(reply, downloads.round, "its reply")
            except WireError as error:  # a malformed reply of one site does not end the round
                outcome = Outcome(None, {}, str(error))
            yield client, outcome

    def evaluate(self, downloads: Downloads, options: Evaluation) -> dict[int, Scores]:
        """Ask each site for its scores."""
        scores: dict[int, Scores] = {}
        for client in downloads.clients:
            header = {"round": downloads.round, "how": dataclasses.asdict(options)}
            _, payload = opened(self.sites[client].evaluate(sealed(header, downloads[client])), f"client {client}")
            scores[client] = scores_of(decode(payload, f"client {client}"), f"client {client}")
        return scores

    def export(self) -> Mapping[int, ClientState]:
        """Return no states, because the sites keep their own."""
        return {}

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Restore nothing, because the sites keep their own states."""

    def close(self) -> None:
        """There is nothing to release."""
