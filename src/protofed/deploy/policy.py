"""What a site lets leave: a file of its owner, which nobody else can change.

```toml
methods = ["fedproto", "fedsap"]   # what may be run here; without it, any method that is installed
kinds = ["prototypes", "scalars"]  # what an upload may hold: prototypes, weights, scalars
min_samples = 5                    # the fewest samples behind a prototype that leaves; classes with fewer are left out
max_rounds = 200                   # how many rounds this site takes part in, in one run
measures = true                    # whether the site's accuracies leave
embeddings = false                 # whether embeddings of single test samples leave, for the pictures of a report
secure = true                      # uploads leave as parts of secure sums alone; a run without secure=sums is refused
least = 3                          # with secure = true: the fewest sites that a sum is over
```
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import torch

from .. import wire
from ..bank import PrototypeBank
from ..errors import ProtofedError, first_problem
from ..methods.base import Method
from ..parts.filters import Departure, Filter
from ..privacy.mechanism import Privacy
from ..privacy.protocol import Rules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = ("prototypes", "weights", "scalars")


class Refusal(ProtofedError):
    """A request that the site's policy does not allow; the server is given the reason."""


@dataclass(frozen=True)
class Policy:
    """What a site lets leave. The defaults allow everything but embeddings of single samples."""

    methods: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    min_samples: int = 1
    max_rounds: int = 1_000_000
    measures: bool = True
    embeddings: bool = False
    epsilon: float | None = None
    delta: float = 1e-5
    trust_server: bool = True
    secure: bool = False
    least: int = 3

    @classmethod
    def read(cls, file: Path) -> Policy:
        """Read a policy file; an unknown key or a wrong value is an error, so that a misspelt limit is not lost."""
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProtofedError(f"{file}: no such policy file") from None
        except (OSError, ValueError) as error:
            raise ProtofedError(f"{file}: not readable ({error})") from None
        unknown = content.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ProtofedError(f"{file}: unknown key {sorted(unknown)[0]!r}; a policy has {known}")
        try:
            policy = pydantic.TypeAdapter(cls).validate_python(content)
        except pydantic.ValidationError as error:
            raise ProtofedError(f"{file}: {first_problem(error)}") from None
        for kind in policy.kinds:
            if kind not in KINDS:
                raise ProtofedError(f"{file}: kinds: {kind!r}; expected some of {', '.join(KINDS)}")
        return policy

    def check_run(
        self,
        method: Method,
        rounds: int,
        filters: int = 0,
        mechanism: Privacy | None = None,
        sums: Rules | None = None,
    ) -> None:
        """Refuse a run before it begins, where its method or what it would send is not allowed.

        Args:
            method: The method, with its settings.
            rounds: How many rounds the run has.
            filters: How many filters change uploads before they leave; after them nobody can count samples.
            mechanism: The run's differential privacy, where it has any.
            sums: The rules of the run's secure sums, where it has any.
        """
        if self.secure and sums is None:
            raise Refusal("this site's policy lets its uploads leave in secure sums alone: set secure=sums")
        if self.secure and sums is not None and sums.least < self.least:
            raise Refusal(
                f"this site's policy asks for sums over at least {self.least} sites, and the run's are over {sums.least}"
            )
        if self.epsilon is not None and mechanism is None:
            raise Refusal(f"this site's policy asks for differential privacy (epsilon = {self.epsilon:g})")
        if mechanism is not None and not self.trust_server and mechanism.placement == "central":
            raise Refusal("this site's policy does not trust the server with noise: set placement=local")
        if filters and self.min_samples > 1:
            raise Refusal("this site's policy counts the samples behind a prototype, which filters hide")
        if self.methods and method.name not in self.methods:
            raise Refusal(f"this site's policy does not allow the method {method.name}")
        sent = {kind_of(part) for part in method.exchange.up}
        for kind in sorted(sent - set(self.kinds)):
            raise Refusal(f"this site's policy does not let {kind} leave, and {method.name} sends them")
        if rounds > self.max_rounds:
            raise Refusal(f"this site's policy allows {self.max_rounds} rounds, and the run has {rounds}")

    def filtered(self, upload: bytes) -> bytes:
        """An upload as it may leave: without prototypes of too few samples. One of a kind that may not leave is refused."""
        for kind in KINDS:
            if kind not in self.kinds and wire.sizes(upload)[kind] and kind != "scalars":
                raise Refusal(f"this site's policy does not let {kind} leave")
        if self.min_samples <= 1:
            return upload
        return wire.encode(self.thinned(wire.decode(upload, "upload")))

    def thinned(self, bundle: wire.Bundle) -> wire.Bundle:
        """An upload without prototypes of too few samples."""
        banks = {name: self._thinned(bank) for name, bank in bundle.banks.items()}
        main = None if bundle.bank is None else self._thinned(bundle.bank)
        return replace(bundle, bank=main, banks=banks)

    def _thinned(self, bank: PrototypeBank) -> PrototypeBank:
        known = bank.counts >= self.min_samples
        return PrototypeBank(
            torch.where(known[..., None], bank.means, torch.zeros_like(bank.means)),
            torch.where(known, bank.counts, torch.zeros_like(bank.counts)),
        )


@dataclass(frozen=True)
class Thinning(Filter):
    """A site's own last filter, where its upload goes into a secure sum and nobody can look at it later."""

    name: ClassVar[str] = "policy"

    policy: Policy

    def leave(self, upload: wire.Bundle, departure: Departure) -> wire.Bundle:
        return self.policy.thinned(upload)


def kind_of(part: wire.exchange.Part) -> str:
    """What a part of an exchange counts as: prototypes, weights or scalars."""
    return {"bank": "prototypes", "weights": "weights", "models": "weights", "array": "weights"}.get(
        part.kind, "scalars"
    )


def refuse_simulated(settings: Mapping[str, Any]) -> None:
    """Refuse a run between sites with settings that are for simulations: attacks, controls and clients held out.

    Args:
        settings: General settings by key.
    """
    reasons = {
        "attack": "attacks are for simulations; a run between sites has none",
        "control": "controls are for simulations; between sites the method itself is run",
        "classes_appear": "classes come and go by a timetable in simulations; sites have what they have",
        "classes_vanish": "classes come and go by a timetable in simulations; sites have what they have",
        "new_clients": "clients are held out in simulations; a site that joins later is added to the project",
    }
    for key, reason in reasons.items():
        if value := settings.get(key):
            raise ProtofedError(f"{key}={value}: {reason}")
