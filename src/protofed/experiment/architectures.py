"""The models of the clients: one for all, or several that share one embedding space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import models, seeds
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..grammar import parse_choice
from ..models import Bert, ModelSpec, Projected
from ..models.decomposed import Halved
from ..models.frozen import Frozen
from ..models.guided import GuidedModel
from ..models.published import is_pretrained, rescaled

if TYPE_CHECKING:
    from .settings import Settings

IMAGES, OTHERS = 512, 128  # FedPAGR's widths of the common space, for images and for text


def parse(entry: str) -> tuple[str, dict[str, Any]]:
    """Read a model as a setting names it.

    Args:
        entry: `name`, `name?key=value&key=value` or `bert:PATH?…`.

    Returns:
        The model's name and its options.

    >>> parse("mlp?hidden=64")
    ('mlp', {'hidden': 64})
    """
    name, options = parse_choice(entry, "model")
    name, colon, path = name.partition(":")
    return name, {**({"path": path} if colon else {}), **options}


def make(entry: str) -> ModelSpec:
    """Make the specification of a model from the text of a setting: `make("mlp?hidden=64")`."""
    name, options = parse(entry)
    return models.registry.make(name, options)


def labels(entries: Sequence[str]) -> list[str]:
    """The names of models in results: a model's name, or the whole entry where names repeat.

    >>> labels(["cnn", "mlp"]), labels(["mlp?hidden=64", "mlp?hidden=32"])
    (['cnn', 'mlp'], ['mlp?hidden=64', 'mlp?hidden=32'])
    """
    names = [parse(entry)[0] for entry in entries]
    return names if len(set(names)) == len(names) else list(entries)


@dataclass(frozen=True)
class Architectures:
    """The models of all clients. Client c has `specs[owner[c]]`, which results call `labels[owner[c]]`.

    `projection` and `dim` are what was chosen where the settings left it open.
    """

    specs: tuple[ModelSpec, ...]
    labels: tuple[str, ...]
    owner: tuple[int, ...]
    projection: str
    dim: int
    frozen: tuple[Frozen, ...] = ()
    """The models whose body is frozen and whose features are computed once."""

    @property
    def of_clients(self) -> tuple[str, ...]:
        """The label of each client's model."""
        return tuple(self.labels[index] for index in self.owner)


def capabilities(settings: Settings, data: FederatedData) -> list[float]:
    """The capability of each client: the setting's numbers, or without them its number of training samples."""
    given = settings.general.capability
    if not given:
        return [float(len(c.labelled)) for c in data.clients]
    if len(given) != len(data.clients):
        raise ProtofedError(f"capability: {len(given)} numbers for {len(data.clients)} clients; expected one for each")
    return list(given)


def architectures(settings: Settings, data: FederatedData) -> Architectures:
    """Assign models to clients, and choose the projection that lets several models share one embedding space.

    Args:
        settings: The settings of the run.
        data: The data of all clients.

    Returns:
        The model of every client.
    """
    g = settings.general
    clients = len(data.clients)
    if not g.models:
        model: Any = settings.model
        specs, names, owner = [model], [model.name], [0] * clients
    else:
        if len(g.models) > clients:
            raise ProtofedError(f"models: {len(g.models)} for {clients} clients; expected at most one for each")
        chosen = [g.models[rank * len(g.models) // clients] for rank in _ranks(settings, data)]
        if g.assignment == "round-robin":
            chosen = [g.models[c % len(g.models)] for c in range(clients)]
        used = [entry for entry in dict.fromkeys(g.models) if entry in chosen]
        specs, names = [make(entry) for entry in used], labels(used)
        owner = [used.index(entry) for entry in chosen]
    for spec in specs:
        _check_tokens(spec, settings)
    if len(data.sample_shape) == 3 and data.sample_shape[0] in (1, 3):
        specs = [_as_published(spec, data) for spec in specs]
    kind, dim = _projection(settings, data, specs)
    if kind != "none":
        specs = [Projected(spec, kind, dim, g.projection_dropout) for spec in specs]  # type: ignore[arg-type]
    frozen = [_frozen(spec, settings, data) for spec in specs] if g.train == "head" else []
    specs = frozen or specs
    halves = settings.method.predict.halves
    if halves is not None:
        specs = [Halved(spec, halves) for spec in specs]
    common = settings.method.predict.common
    if common and frozen:
        raise ProtofedError(
            f"{settings.method.name} with train=head: its common space is that of the samples; give it the encoder's "
            "features as data"
        )
    if common:
        same = len(specs) == 1 and is_pretrained(specs[0]) and settings.method.predict.common_space == "auto"
        specs = [GuidedModel(spec, common, same) for spec in specs]
    cached = tuple(spec for spec in frozen if spec.cached)
    return Architectures(tuple(specs), tuple(names), tuple(owner), kind, dim, cached)


def _as_published(spec: ModelSpec, data: FederatedData) -> ModelSpec:
    """A model with published weights that sees images as these were trained with."""
    seen = rescaled(spec, data.mean, data.std)
    if seen is not spec and data.site_mean is not None:
        raise ProtofedError(
            f"standardise=site: the published weights of model {spec.name!r} need images in one scale for all sites; use "
            "standardise=all, or scaling=data"
        )
    return seen


def _frozen(spec: ModelSpec, settings: Settings, data: FederatedData) -> Frozen:
    """A model with a frozen body, which is that of the clients' common start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(settings.general.seed, "initialisation"))
        return Frozen.of(spec, data.sample_shape, data.num_classes, settings.general.features != "each")


def _check_tokens(spec: ModelSpec, settings: Settings) -> None:
    """Raise an error where the tokens were not made for the encoder: another encoder cannot interpret them."""
    tokenizer = getattr(settings.data, "tokenizer", None)
    if not isinstance(spec, Bert) or tokenizer is None:
        return
    hashed = tokenizer.startswith("hash:")
    if hashed != (spec.path == "tiny") or (not hashed and tokenizer != spec.path):
        expected = "hash:8192" if spec.path == "tiny" else spec.path
        raise ProtofedError(f"model bert with path={spec.path} needs data.tokenizer={expected}; it is {tokenizer}")


def _ranks(settings: Settings, data: FederatedData) -> list[int]:
    """Each client's rank from the weakest to the strongest."""
    return torch.tensor(capabilities(settings, data)).argsort(stable=True).argsort().tolist()


def _projection(settings: Settings, data: FederatedData, specs: Sequence[ModelSpec]) -> tuple[str, int]:
    """The projection between encoder and head that the settings, the method or a mix of models need, and its width."""
    kind: str = settings.general.projection
    dim = settings.general.dim
    automatic = kind == "auto"
    if automatic:
        kind = "consensus" if settings.method.predict.space == "consensus" else "linear" if dim else "none"
    if kind == "none" and dim:
        raise ProtofedError(f"dim={dim} needs a projection; with projection=none a model's own width stands")
    widths = [_width(spec, data) for spec in specs] if kind == "none" and len(specs) > 1 else []
    if len(set(widths)) > 1 and automatic:
        kind = "linear"
    elif len(set(widths)) > 1:
        listing = ", ".join(f"{spec.name} {width}" for spec, width in zip(specs, widths, strict=True))
        raise ProtofedError(
            f"clients meet in one embedding space, but these models' have different widths ({listing}); "
            "use projection=linear or projection=consensus"
        )
    if kind == "none" or dim:
        return kind, dim
    if len(specs) > 1:
        return kind, IMAGES if len(data.sample_shape) == 3 else OTHERS
    return kind, _width(specs[0], data)


def _width(spec: ModelSpec, data: FederatedData) -> int:
    with torch.random.fork_rng(devices=[]):
        return int(spec.build(data.sample_shape, data.num_classes).dim)  # type: ignore[arg-type]
