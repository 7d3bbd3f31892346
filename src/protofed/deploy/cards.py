"""What a site says of itself when it joins, and the data of a federation as one participant knows it.

The server holds no samples and a site holds its own alone. Both describe the others by stand-ins: clients of whom they know
how many samples they have, and none of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pydantic
import torch

from ..data.types import ClientData, FederatedData, Samples, Unlabelled
from ..errors import ProtofedError, first_problem


@dataclass(frozen=True)
class Card:
    """A site: its name, its network, and the sizes of its data. `classes` are their names, where they have any."""

    name: str
    model: str
    shape: tuple[int, ...]
    num_classes: int
    labelled: int
    test: int
    tokens: bool = False
    unlabelled: int = 0
    validation: int = 0
    classes: tuple[str, ...] = ()
    kind: str = "auto"

    def to_json(self) -> dict[str, Any]:
        """The card as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any, source: str) -> Card:
        """Read a card that came from elsewhere; what is wrong with it is an error that names `source`."""
        try:
            return pydantic.TypeAdapter(cls).validate_python(content)
        except pydantic.ValidationError as error:
            raise ProtofedError(f"{source}: not a site's card ({first_problem(error)})") from None


def agreed_classes(cards: Sequence[Card]) -> tuple[tuple[str, ...], int]:
    """The classes of a federation: their names in alphabetical order, or their number where they have no names.

    Sites whose classes are named and sites whose classes are numbers cannot be brought together.
    """
    named = [card for card in cards if card.classes]
    if not named:
        return (), max(card.num_classes for card in cards)
    bare = [card.name for card in cards if not card.classes]
    if bare:
        raise ProtofedError(
            f"classes: {named[0].name} names its classes and {bare[0]} does not; give class_names in every site's data file"
        )
    if len({card.classes for card in cards}) == 1:
        return cards[0].classes, len(cards[0].classes)
    names = tuple(sorted({name for card in cards for name in card.classes}))
    return names, len(names)


def check_shapes(cards: Sequence[Card]) -> None:
    """Refuse sites whose samples have different shapes: their networks would not share an embedding space."""
    for card in cards[1:]:
        if (card.shape, card.tokens) != (cards[0].shape, cards[0].tokens):
            raise ProtofedError(
                f"{card.name}: its samples have shape {card.shape}, and those of {cards[0].name} {cards[0].shape}; all "
                "sites need the same"
            )


def stand_in(card: Card, num_classes: int) -> ClientData:
    """A client whose samples are elsewhere: it has as many as the card says, and none can be read."""
    x = torch.empty((0, *card.shape), dtype=torch.int64 if card.tokens else torch.float32)
    y = torch.empty(0, dtype=torch.int64)

    def samples(number: int) -> Samples:
        return Samples(x, y, torch.zeros(number, dtype=torch.int64))

    return ClientData(
        samples(card.labelled),
        samples(card.test),
        torch.zeros(num_classes, dtype=torch.bool),
        Unlabelled(x, torch.zeros(card.unlabelled, dtype=torch.int64)) if card.unlabelled else None,
        samples(card.validation) if card.validation else None,
    )


def federation_data(cards: Sequence[Card], classes: tuple[str, ...], num_classes: int) -> FederatedData:
    """The data of a federation as its server knows it."""
    return FederatedData(
        [stand_in(card, num_classes) for card in cards],
        num_classes,
        cards[0].shape,
        class_names=classes,
        client_names=tuple(card.name for card in cards),
        kind=cards[0].kind,  # type: ignore[arg-type]
        held_back=[None] * len(cards),
    )
