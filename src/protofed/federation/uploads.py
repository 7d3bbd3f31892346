"""What a client sent, as the server's rules see it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..parts import Upload
from ..wire import Bundle
from ..wire.exchange import SAMPLES


def prefixed(weights: Mapping[str, Tensor], architecture: int) -> dict[str, Tensor]:
    """Weights by the names that they have at the server, which begin with the architecture's number."""
    return {f"{architecture}:{name}": value for name, value in weights.items()}


def as_upload(client: int, content: Bundle, architecture: int | None) -> Upload:
    """What one client sent, for a reduce.

    Args:
        client: The client's number.
        content: What it sent, with the number of its samples among the scalars.
        architecture: The client's architecture, where there are several.

    Returns:
        The upload, with the number of samples apart and weights by the names that they have at the server.
    """
    samples = content.scalars.get(SAMPLES, 0.0)
    scalars = {name: value for name, value in content.scalars.items() if name != SAMPLES}
    weights = content.weights if architecture is None else prefixed(content.weights, architecture)
    content = Bundle(content.bank, content.banks, weights, content.tensors, scalars, content.models)
    return Upload(client, samples, content)
