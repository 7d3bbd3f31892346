"""Fixed-point numbers: sums of floats by name become one vector of 64-bit words, and come back.

Masks hide a number only in arithmetic modulo a power of two, so what clients add up is made of integers. A value is
rounded to the nearest multiple of `STEP` = 2⁻²⁴ and must lie within ±`LIMIT` = ±2²⁴; negative integers are words in two's
complement, modulo 2⁶⁴. A client's integer is at most 2⁴⁸, so a total over up to `MOST_CLIENTS` = 2¹⁴ clients is at most 2⁶²
and never wraps.

Rounding errs by at most STEP / 2 a client, so |total − plain sum| ≤ clients · STEP / 2 for every number. The total becomes
a float64, which is exact below 2²⁹ and otherwise relatively precise to 2⁻⁵³, and then has the dtype of the plain sum.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ProtofedError
from ..parts.reduce import Sums

STEP = 2.0**-24
LIMIT = 2.0**24
MOST_CLIENTS = 2**14
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Layout:
    """Which number stands where in the vector: names, shapes and dtypes, in the order of the names.

    Both sides must have the same layout; equal fingerprints say so. Sums that lack a name of the layout count as zero there.

    >>> layout = Layout.of(Sums({"means/": torch.zeros(2, 3)}, {"clients": 0.0}))
    >>> layout.length
    7
    >>> layout.unpack(layout.pack(Sums({"means/": torch.ones(2, 3)}, {"clients": 1.0}))).numbers
    {'clients': 1.0}
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    numbers: tuple[str, ...] = ()
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def of(cls, sums: Sums) -> Layout:
        """The layout that holds all names of these sums."""
        return cls(
            tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(sums.tensors.items())),
            tuple(sorted(sums.numbers)),
            tuple(sorted(sums.dtypes.items())),
        )

    @property
    def length(self) -> int:
        """How many words the vector has."""
        return sum(math.prod(shape) for _, shape, _ in self.tensors) + len(self.numbers)

    def fingerprint(self) -> bytes:
        """Thirty-two bytes that are equal for equal layouts alone."""
        tensors = [(name, shape, str(dtype)) for name, shape, dtype in self.tensors]
        dtypes = [(name, str(dtype)) for name, dtype in self.dtypes]
        return hashlib.sha256(json.dumps([tensors, self.numbers, dtypes]).encode()).digest()

    def pack(self, sums: Sums) -> Words:
        """Make the vector of sums.

        Args:
            sums: of one client, or of several.

        Returns:
            the words, `length` of them.

        Raises:
            ProtofedError: a value is not finite or out of range, a shape is another one, or a name is not in the layout.
        """
        shapes = {name: shape for name, shape, _ in self.tensors}
        extra = sorted((sums.tensors.keys() - shapes.keys()) | (sums.numbers.keys() - set(self.numbers)))
        if extra:
            raise ProtofedError(f"the layout of the secure sum has no {extra[0]!r}")
        vector = torch.zeros(self.length, dtype=torch.int64)
        start = 0
        for name, shape in shapes.items():
            end = start + math.prod(shape)
            if name in sums.tensors:
                value = sums.tensors[name]
                if tuple(value.shape) != shape:
                    raise ProtofedError(f"{name!r} has shape {tuple(value.shape)}; the secure sum has {shape}")
                vector[start:end] = _integers(name, value.detach().reshape(-1))
            start = end
        for place, name in enumerate(self.numbers, start):
            value = torch.tensor([sums.numbers.get(name, 0.0)], dtype=torch.float64)
            vector[place : place + 1] = _integers(name, value)
        return vector.numpy().view(np.uint64)

    def unpack(self, vector: Words) -> Sums:
        """Make sums of a vector.

        Args:
            vector: the words of one client or of a total.

        Returns:
            the sums, with every name of the layout.

        Raises:
            ProtofedError: the vector has another length.
        """
        if vector.shape != (self.length,):
            raise ProtofedError(f"a secure sum of {vector.size} words; its layout has {self.length}")
        values = torch.from_numpy(vector.view(np.int64).astype(np.float64)) * STEP
        sums, start = Sums(dtypes=dict(self.dtypes)), 0
        for name, shape, dtype in self.tensors:
            end = start + math.prod(shape)
            part = values[start:end] if dtype.is_floating_point else values[start:end].round()
            sums.tensors[name] = part.to(dtype, copy=True).reshape(shape)
            start = end
        sums.numbers = {name: values[place].item() for place, name in enumerate(self.numbers, start)}
        return sums


def _integers(name: str, value: Tensor) -> Tensor:
    """The nearest multiples of the step, counted in steps."""
    exact = value.to("cpu", torch.float64)
    wrong = ~(exact.abs() <= LIMIT)  # NaN too
    if wrong.any():  # the error travels to the server, so it does not say which number
        what = "a number that is too large" if bool(exact.isfinite().all()) else "NaN or infinity"
        raise ProtofedError(f"{name!r} holds {what}; a secure sum takes finite numbers within ±{LIMIT:.0f}")
    return (exact / STEP).round_().to(torch.int64)
