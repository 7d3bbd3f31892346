"""The classifiers of a run by client, each made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ProtofedError, unknown
from .core import Classifier

HELD = 4  # how many classifiers are kept once they have been made


class Classifiers:
    """The classifiers of a run, by the client's name or number.

    Example: `Classifiers(["a", "b"], make)["a"]`
    """

    def __init__(self, clients: Sequence[str], make: Callable[[int], Classifier]) -> None:
        """
        Args:
            clients: The names of all clients.
            make: Makes the classifier of a client, by number.
        """
        self.clients, self._make = tuple(clients), make
        self._held: dict[int, Classifier] = {}

    def number(self, client: str | int | None) -> int:
        """The number of a client, given by name or number; None stands for the only one."""
        names = self.clients
        if client is None:
            if len(names) > 1:
                shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
                raise ProtofedError(f"the run has {len(names)} clients, each with its classifier; name one of {shown}")
            return 0
        if isinstance(client, str):
            if client in names:
                return names.index(client)
            if not client.isdecimal() or int(client) >= len(names):
                raise unknown("client", client, names)
            client = int(client)
        if isinstance(client, bool) or not 0 <= int(client) < len(names):
            raise ProtofedError(f"client {client}: the run has clients 0 to {len(names) - 1}")
        return int(client)

    def __getitem__(self, client: str | int | None) -> Classifier:
        number = self.number(client)
        if number not in self._held:
            while len(self._held) >= HELD:
                self._held.pop(next(iter(self._held)))
            self._held[number] = self._make(number)
        return self._held[number]
