"""The link from a session to its connection, and to publishers that wait for its client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from motorcade.commit import Commit
from motorcade.core.reasons import ReasonCode


class Waiter(Protocol):
    """A publisher that waits for a client."""

    def caught_up(self) -> None:
        """Go on: the client is no longer behind."""


class ClientLink(Protocol):
    """The connection of a session, as far as a session may know it."""

    direct: Callable[[bytes], int] | None  #: `send` of a socket that takes bytes right now

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket."""

    def write_rest(self, data: bytes) -> None:
        """Hand over bytes that `direct` did not take."""

    def abort(self, why: str) -> None:
        """Close at once."""

    def flush(self) -> None:
        """Write what this connection's window has in `out` now."""

    def write_later(self) -> None:
        """Write it at the end of this turn of the event loop."""

    def end(self, reason: ReasonCode, detail: str = "") -> None:
        """Say goodbye with a reason (MQTT 5) and close."""

    def pump_later(self) -> None:
        """Call `pump` again in the next turn of the event loop."""

    def less_crowded(self) -> None:
        """Take packets again: fewer answers wait for the store."""

    def acknowledge(self, numbers: list[bytes], commit: Commit[Any]) -> None:
        """Tell the client that its messages are stored, or could not be."""

    def caught_up(self) -> None:
        """Go on: the client that this connection's publisher has waited for is no longer behind."""
