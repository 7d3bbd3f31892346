"""The general settings: groups of keys, each of which is defined once, and `General`, which has all of them.

The groups for local training, augmentation and engines are defined in the rooms that use them, and the others here. A
field has a type with bounds, a description and a default. `General` has the fields of all groups as
flat keys, in the order in which `settings.toml` lists them.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field

from ..data.augment import AugmentSettings
from ..errors import ProtofedError
from ..federation.choose import EngineSettings
from ..federation.guard import FACTOR
from ..federation.optimiser import LocalSettings, RunLength
from ..methods.control import Kind

G = TypeVar("G")


@dataclass(frozen=True)
class FederationSettings(RunLength):
    """The clients that take part, the number of rounds, and the seed of all random draws."""

    clients: Annotated[int, Field(ge=0, description="number of clients; 0 with partition=natural: one for each id")] = (
        20
    )
    participation: Annotated[float, Field(gt=0, le=1, description="share of the clients that take part in a round")] = (
        1.0
    )
    choice: Annotated[
        Literal["random", "diverse"],
        Field(description="who takes part: random, or diverse (by prototypes and capability; fedapa)"),
    ] = "random"
    new_clients: Annotated[
        Annotated[int, Field(ge=0)] | str | tuple[str, ...],
        Field(
            description="clients held out of the training, which join after the last round: how many, or their names"
        ),
    ] = 0
    seed: Annotated[int, Field(ge=0, description="the run's one seed; every random stream is derived from it")] = 1234


@dataclass(frozen=True)
class ArchitectureSettings:
    """The models of the clients, and the projection between encoder and head."""

    initial: Annotated[
        Literal["same", "own"], Field(description="same: all clients start from one model; own: each from its own")
    ] = "same"
    models: Annotated[
        tuple[str, ...],
        Field(
            description="several models in place of one, assigned round-robin or by capability (cnn,mlp?embedding=32)"
        ),
    ] = ()
    assignment: Annotated[
        Literal["round-robin", "capability"],
        Field(description="how models are assigned: round-robin, or capability (the first listed to the weakest)"),
    ] = "round-robin"
    capability: Annotated[
        tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...],
        Field(description="one number per client, larger is stronger; none: its number of training samples"),
    ] = ()
    projection: Annotated[
        Literal["auto", "none", "linear", "consensus"],
        Field(description="between encoder and head: auto (the method's; linear for several models), or one of three"),
    ] = "auto"
    dim: Annotated[
        int,
        Field(
            ge=0,
            description="width of the projected embedding; 0: the model's own, or 512 (images) and 128 for several",
        ),
    ] = 0
    projection_dropout: Annotated[float, Field(ge=0, lt=1, description="dropout inside projection=consensus")] = 0.1
    train: Annotated[
        Literal["all", "head"],
        Field(description="what trains: all, or the head (and a projection) behind an encoder that stays as it begins"),
    ] = "all"
    features: Annotated[
        str,
        Field(
            description="with train=head, the encoder's features are computed once, each time, or kept in a FOLDER",
        ),
    ] = "once"


@dataclass(frozen=True)
class SplitSettings:
    """The held-out samples, and the holders of labels."""

    test: Annotated[
        Literal["central", "local"],
        Field(description="central: own classes of the central test set; local: a part of the client's own data"),
    ] = "central"
    test_share: Annotated[float, Field(gt=0, lt=1, description="share held out for testing where it is split off")] = (
        0.2
    )
    scope: Annotated[
        Literal["own", "all"],
        Field(description="with test=central, a client is scored on its own classes, or on all (with candidates=all)"),
    ] = "own"
    validation_share: Annotated[
        float, Field(ge=0, lt=1, description="share of a client's training data for validation; 0: none")
    ] = 0.0
    labels: Annotated[
        Literal["all", "client", "server"], Field(description="who has labels: all, client or server")
    ] = "all"
    labels_per_class: Annotated[
        int, Field(ge=1, description="labelled samples per class and client, with labels=client")
    ] = 5
    server_labels: Annotated[int, Field(ge=0, description="labelled samples at the server")] = 0
    server_label_noise: Annotated[
        float, Field(ge=0, le=1, description="share of the server's labels replaced by another class")
    ] = 0.0
    unlabelled_limit: Annotated[int, Field(ge=0, description="unlabelled samples a client, at most; 0: no limit")] = 0
    unlabelled: Annotated[
        Literal["own", "open"],
        Field(description="unlabelled samples: of the client's own classes, or open (of other classes too)"),
    ] = "own"
    open_share: Annotated[
        float,
        Field(gt=0, lt=1, description="share of other classes among the unlabelled samples, with unlabelled=open"),
    ] = 0.5


@dataclass(frozen=True)
class WorldSettings:
    """How clients' samples look, and what no client has seen."""

    shift: Annotated[
        str,
        Field(description="how clients' samples look different: rotation?most=90, colour, style, noise, permutation"),
    ] = ""
    unseen: Annotated[
        str, Field(description="a domain or natural group that no client holds, on which all clients are scored")
    ] = ""
    classes_appear: Annotated[
        str, Field(description="classes of which nobody has a sample before a round: 3@20 or 3@20,4@20")
    ] = ""
    classes_vanish: Annotated[str, Field(description="classes of which nobody has a sample from a round on: 7@30")] = ""


@dataclass(frozen=True)
class ProtectionSettings:
    """Clients that attack, and what is done to uploads on their way to the server."""

    attack: Annotated[
        str,
        Field(description="what some clients of a simulation do to spoil the result: sign-flip?share=0.2&scale=5"),
    ] = ""
    filters: Annotated[
        tuple[str, ...],
        Field(description="what is done to every upload before it leaves a client: clip?norm=1, quantise?bits=8"),
    ] = ()
    privacy: Annotated[
        str, Field(description="differential privacy: client?epsilon=4&clip=1, sample?epsilon=4&encoder=fixed; none")
    ] = ""
    guard: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="how many times the others' norm an upload's may be; 0: absurd uploads are taken as they are",
        ),
    ] = FACTOR
    secure: Annotated[
        str, Field(description="sums: the server learns the total of all uploads and none of them; sums?least=5; none")
    ] = ""


@dataclass(frozen=True)
class ControlSettings:
    """What a method is compared with, to say how much of its gain is the exchange."""

    control: Annotated[
        Kind,
        Field(
            description="the method's control: own (its loss with the client's own prototypes, nothing exchanged), "
            "shuffled (prototypes of wrong classes); none"
        ),
    ] = ""


@dataclass(frozen=True)
class RecordSettings:
    """The start of a run, and what is measured and written."""

    start_from: Annotated[
        str, Field(description="folder of a finished run whose server and clients this run starts from")
    ] = ""
    track: Annotated[
        Literal["", "tensorboard", "mlflow", "wandb"],
        Field(description="also send each round to tensorboard, mlflow or wandb (needs an --out folder)"),
    ] = ""
    silhouette: Annotated[bool, Field(description="measure the embedding space at each evaluation")] = True
    score_prototypes: Annotated[
        Literal["last", "always", "never"],
        Field(
            description="score clients sharing a model and sent no prototypes by their own: last rounds, always or never"
        ),
    ] = "last"
    embedding_measures: Annotated[
        bool,
        Field(description="after the last round also measure retrieval and few-shot accuracy of the embeddings"),
    ] = False
    snapshots: Annotated[
        int, Field(ge=0, description="the number of evaluations whose embeddings are kept for pictures; 0: none")
    ] = 8
    evaluate_every: Annotated[int, Field(ge=1, description="evaluate every so many rounds, and at the last")] = 1
    candidates: Annotated[
        Literal["own", "all"],
        Field(description="the nearest prototype is one of the client's own classes, or of all"),
    ] = "own"
    ensemble: Annotated[bool, Field(description="also score the mean vote of all clients on the shared test set")] = (
        False
    )
    checkpoint_every: Annotated[
        int, Field(ge=1, description="write a checkpoint every so many rounds, and at the last")
    ] = 10
    keep_models: Annotated[
        int, Field(ge=0, description="the most clients whose models a run folder holds, to predict with; 0: none")
    ] = 100
    device: Annotated[str, Field(description="cpu, cuda, cuda:N or mps")] = "cpu"


@dataclass(frozen=True)
class General(  # fields come from the last base to the first
    EngineSettings,
    RecordSettings,
    AugmentSettings,
    ControlSettings,
    ProtectionSettings,
    WorldSettings,
    SplitSettings,
    ArchitectureSettings,
    LocalSettings,
    FederationSettings,
):
    """The keys that are neither the method's nor the data's, partition's or model's."""

    def __post_init__(self) -> None:
        for kind in type(self).__bases__:
            self.group(kind)  # a group's own check of keys that contradict each other
        if self.precision == "bf16" and self.train == "head":
            raise ProtofedError(
                "precision=bf16: with train=head one small layer trains, which it would not make faster"
            )
        if self.precision == "bf16" and self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ProtofedError(f"precision=bf16: needs device=cpu or device=cuda, and device is {self.device}")

    def group(self, kind: type[G]) -> G:
        """The settings of one group: `general.group(LocalSettings)`."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


class KeyDescription(NamedTuple):
    """The default of a key, and one line that says what it is."""

    default: Any
    description: str


def general_keys() -> dict[str, KeyDescription]:
    """Every general key with its default and its description, in the order of `settings.toml`.

    >>> general_keys()["seed"].default
    1234
    """
    hints = typing.get_type_hints(General, include_extras=True)
    return {
        f.name: KeyDescription(f.default, hints[f.name].__metadata__[0].description)
        for f in dataclasses.fields(General)
    }
