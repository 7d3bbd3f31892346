"""An audit of runs: the three parts for some clients of each run, as files for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import disk, seeds
from ..data import Dataset
from ..errors import ProtofedError, unknown
from ..experiment.run import reopen
from ..federation import Federation
from ..federation.choose import threads_kept
from ..version import __version__
from .disclosure import Disclosure, disclosure
from .inversion import Inversion, inversions
from .membership import Membership, Scores, candidate_scores, membership, strongest
from .message import ClientMessage, Sent, next_message
from .samples import others_of
from .statistics import Estimate, mean_estimate

CLIENTS = 4
FOLDER, NUMBERS, PAGE = "audit", "audit.json", "index.html"
FORMAT = 1
PROTECTING = ("filters", "privacy")  # settings that change what leaves a client


@dataclass(frozen=True)
class ClientFindings:
    """What one client's message gives away."""

    client: int
    name: str
    disclosure: Disclosure
    membership: dict[str, Membership]
    inversions: list[Inversion]


@dataclass(frozen=True)
class Findings:
    """What the messages of some clients give away, client by client and together.

    `own_nearer` pools the inversions: how often a result is nearer to a sample of the client than to one of others.
    """

    clients: list[ClientFindings]
    membership: dict[str, Membership]
    own_nearer: Estimate | None

    @property
    def strongest(self) -> str | None:
        """The score of the strongest membership test that needs the message."""
        return strongest(self.membership)

    @property
    def best(self) -> Membership | None:
        """What that test found."""
        return self.membership.get(self.strongest or "")

    @property
    def alone(self) -> Membership | None:
        """What the strongest test found that needs the client's model and no message; None where the model is sent."""
        return self.membership.get(strongest(self.membership, from_message=False) or "")


@dataclass(frozen=True)
class RunAudit:
    """The audit of one run. `unprotected` is None where nothing protects what the method returns."""

    run: str
    method: str
    data: str
    round: int
    rounds: int
    settings: dict[str, str]
    model_stays: bool
    weights_sent: bool
    class_names: list[str]
    sample_shape: tuple[int, ...]
    kind: str
    sent: Findings
    unprotected: Findings | None

    @property
    def protection(self) -> str:
        """The settings that change what leaves a client; empty where nothing does."""
        return ", ".join(f"{k}={v}" for k, v in self.settings.items() if k.partition(".")[0] in PROTECTING)

    @property
    def shows_samples(self) -> bool:
        """Whether the page shows true samples of the clients, beside what was computed from prototypes."""
        return any(client.inversions for client in self.sent.clients)

    def numbers(self) -> dict[str, Any]:
        """The main numbers in one flat row, for tables over several runs.

        Returns:
            `auc` is the strongest membership test that needs the message; `own_nearer` and the similarities are means
            over the inverted prototypes. What could not be measured is None.
        """
        found = self.sent
        best, alone = found.best, found.alone
        inverted = [i for client in found.clients for i in client.inversions]
        told = [client.disclosure for client in found.clients]
        return {
            "run": self.run,
            "method": self.method,
            "protection": self.protection,
            "clients": len(found.clients),
            "auc_score": found.strongest,
            **_row("auc", best.auc if best else None),
            "auc_without_message": alone.auc.value if alone else None,
            "true_positives": best.true_positives if best else None,
            **_row("own_nearer", found.own_nearer),
            "similarity_own": _mean(i.own for i in inverted),
            "similarity_others": _mean(i.others for i in inverted),
            "count_error": _mean(d.count_error for d in told),
            "class_auc": _mean(d.class_auc for d in told),
        }


@dataclass(frozen=True)
class Audit:
    """Audits of one or several runs, and the folder that they were written to."""

    runs: list[RunAudit]
    folder: Path | None = field(default=None)

    def numbers(self) -> list[dict[str, Any]]:
        """The main numbers of each run."""
        return [run.numbers() for run in self.runs]


def audit(
    folder: str | Path | Sequence[str | Path],
    *,
    clients: int | Sequence[int | str] = CLIENTS,
    out: str | Path | None = None,
    data: Dataset | None = None,
) -> Audit:
    """Ask what the next message of some clients of a run would give away: by itself, of members, and by inversion.

    The run is only read; it may have finished, or have been stopped after a checkpoint. The page that is written shows
    true samples of the clients.

    Args:
        folder: The run folder, or several that are put side by side.
        clients: How many clients, spread over all of them; or which, by number or name.
        out: The folder to write; None takes `audit` in the (first) run folder.
        data: The data, where it was given in Python.

    Returns:
        The audit, with the folder that holds `index.html` and `audit.json`.

    Example: `pf.audit("runs/digits-fedproto").numbers()`
    """
    from .page import render

    folders = _folders(folder)
    runs = [_audit_run(path, clients, data) for path in folders]
    target = folders[0] / FOLDER if out is None else Path(out)
    content = {"format": FORMAT, "protofed": __version__, "runs": [_as_json(run) for run in runs]}
    text = render(runs)
    with disk.writing(target):
        target.mkdir(parents=True, exist_ok=True)
    disk.write_atomically(target / NUMBERS, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    disk.write_atomically(target / PAGE, text.encode())
    return Audit(runs, target)


def audit_numbers(
    folder: str | Path, *, clients: int | Sequence[int | str] = CLIENTS, data: Dataset | None = None
) -> dict[str, Any]:
    """Audit a run and write nothing: its main numbers in one flat row, for a table over several runs.

    Args:
        folder: The run folder.
        clients: How many clients, spread over all of them; or which, by number or name.
        data: The data, where it was given in Python.

    Returns:
        What `RunAudit.numbers` gives.

    Example: `audit_numbers("runs/digits-fedproto")["auc"]`
    """
    return _audit_run(Path(folder), clients, data).numbers()


def _folders(folder: str | Path | Sequence[str | Path]) -> list[Path]:
    return [Path(folder)] if isinstance(folder, str | Path) else [Path(f) for f in folder]


def _audit_run(path: Path, clients: int | Sequence[int | str], data: Dataset | None) -> RunAudit:
    """The audit of one run."""
    with threads_kept():
        settings, federation = reopen(path, data=data)
        if settings.general.secure:
            raise ProtofedError(
                f"{path}: uploads were summed securely, so the server saw no message of one client; audit a run with the "
                'same settings and secure="" for what a message would give away'
            )
        if not federation.exchange.up or not federation.exchange.travels:
            control = f" with control={settings.general.control}" if settings.general.control else ""
            raise ProtofedError(
                f"{path}: clients of {settings.method.name}{control} send nothing, so there is nothing to audit"
            )
        chosen = chosen_clients(federation, clients)
        messages = [next_message(federation, client) for client in chosen]
        sent = _findings(federation, [(m, m.leaves) for m in messages])
        unprotected = None
        if any(m.protected for m in messages):
            unprotected = _findings(federation, [(m, m.returned) for m in messages])
    run_data, classes = federation.data, range(federation.data.num_classes)
    return RunAudit(
        run=path.resolve().name,
        method=settings.method.name,
        data=run_data.name,
        round=federation.round,
        rounds=federation.rounds,
        settings=_flat(settings.to_dict()),
        model_stays=federation.exchange.keeps_model,
        weights_sent=any(m.leaves.content.weights for m in messages),
        class_names=[run_data.class_names[k] if run_data.class_names else f"class {k}" for k in classes],
        sample_shape=tuple(run_data.sample_shape),
        kind=run_data.kind,
        sent=sent,
        unprotected=unprotected,
    )


def chosen_clients(federation: Federation, clients: int | Sequence[int | str]) -> list[int]:
    """The numbers of the clients that are audited.

    Args:
        federation: The federation.
        clients: How many, spread over all of them; or which, by number or name.

    Returns:
        Numbers of clients, without repetition.
    """
    total = len(federation.data.clients)
    if isinstance(clients, int):
        if clients < 1:
            raise ProtofedError(f"clients={clients}: expected at least one client to audit")
        return sorted({round(k) for k in np.linspace(0, total - 1, min(clients, total))})
    names = {federation.name_of(k): k for k in range(total)}
    numbers = {str(k): k for k in range(total)}
    chosen = []
    for client in map(str, clients):
        if client not in names and client not in numbers:
            raise unknown("client", client, names)
        chosen.append(names[client] if client in names else numbers[client])
    if not chosen:
        raise ProtofedError("clients: expected a number of clients, or their names")
    return list(dict.fromkeys(chosen))


def _findings(federation: Federation, sent: Sequence[tuple[ClientMessage, Sent]]) -> Findings:
    """What some messages give away. The random streams are the same for every version of a message."""
    data, seed = federation.data, federation.seed
    has_head = federation.method.predict.trains_head
    clients, scores = [], []
    for message, version in sent:
        rng = np.random.default_rng(seeds.derive(seed, "audit", message.client))
        generator = seeds.torch_stream(seed, "audit inversion", message.client)
        trained_elsewhere = others_of(data, message, rng, tests=False)
        scores.append(candidate_scores(message, version, trained_elsewhere, has_head, rng))
        found = []
        if message.members.x.is_floating_point():
            found = inversions(message, version, others_of(data, message, rng), generator)
        own = membership(scores[-1:], bool(version.content.weights), rng)
        told = disclosure(message, version, data.num_classes)
        clients.append(ClientFindings(message.client, message.name, told, own, found))
    return _pooled(clients, scores, any(v.content.weights for _, v in sent), seed)


def _pooled(clients: list[ClientFindings], scores: list[dict[str, Scores]], weights_sent: bool, seed: int) -> Findings:
    rng = np.random.default_rng(seeds.derive(seed, "audit"))
    nearer = [i.own_nearer for client in clients for i in client.inversions if i.own_nearer is not None]
    own_nearer = mean_estimate(np.array(nearer), rng) if nearer else None
    return Findings(clients, membership(scores, weights_sent, rng), own_nearer)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as texts by keys with dots."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in ("", [], ()):
            flat[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return flat


def _as_json(run: RunAudit) -> dict[str, Any]:
    """An audit as JSON: all numbers, and no sample."""
    content = asdict(run)
    for findings in (content["sent"], content["unprotected"] or {"clients": ()}):
        for client in findings["clients"]:
            for inversion in client["inversions"]:
                del inversion["shown"]
    return {"numbers": run.numbers(), **content}


def _row(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """An estimate as three entries of a flat row."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that there are."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
