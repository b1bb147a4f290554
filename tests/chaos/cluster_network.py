"""The ways between members, and from members to the servers of their store; each can be broken, slow or silent.

    member ─▶ way ─▶ link port of another member         one for each ordered pair: the member that dials is known
    member ─▶ way ─▶ server of the store                 one for each member and server

`Trouble` is about one direction: what `source` sends to `target`. Several may hold at once, also on the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from tests.support.proxy import Proxy

#: A name of all servers of the store in a `Trouble`.
STORE = "store"


@dataclass(frozen=True)
class Trouble:
    """What happens to the bytes from `source` to `target`."""

    source: str
    target: str
    lost: bool = False  #: nothing arrives, and no connection breaks
    delay: float = 0.0  #: seconds
    rate: int = 0  #: bytes a second; 0: as fast as it goes


def partition(one: str, other: str) -> list[Trouble]:
    """Nothing gets through, either way."""
    return [Trouble(one, other, lost=True), Trouble(other, one, lost=True)]


class Network:
    """All ways. They belong to the event loop that opens them."""

    def __init__(self, members: dict[str, str], servers: Iterable[str]) -> None:
        """`members`: addresses of links by name; `servers`: addresses of the store."""
        pairs = itertools.permutations(members, 2)
        self._ways: dict[tuple[str, str], Proxy] = {
            (one, members[other]): Proxy(members[other]) for one, other in pairs
        }
        self._ways |= {(one, server): Proxy(server) for one in members for server in servers}
        self._names = {address: name for name, address in members.items()}
        self._troubles: list[Trouble] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for way in self._ways.values():
            await self._stack.enter_async_context(way)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def routes(self, member: str) -> dict[str, str]:
        """The addresses that this member has to connect to in place of others (`cluster_node`)."""
        return {target: way.address for (source, target), way in self._ways.items() if source == member}

    def begin(self, troubles: Iterable[Trouble]) -> None:
        self._troubles += troubles
        self._apply()

    def end(self, troubles: Iterable[Trouble]) -> None:
        for trouble in troubles:
            self._troubles.remove(trouble)
        self._apply()

    def reset(self, one: str, other: str) -> None:
        """Break the connections between the two."""
        for (source, address), way in self._ways.items():
            if {source, self._name(address)} == {one, other}:
                way.cut()

    def _name(self, address: str) -> str:
        return self._names.get(address, STORE)

    def _apply(self) -> None:
        for (source, address), way in self._ways.items():
            there = [each for each in self._troubles if (each.source, each.target) == (source, self._name(address))]
            back = [each for each in self._troubles if (each.target, each.source) == (source, self._name(address))]
            way.delay = max((each.delay for each in (*there, *back)), default=0.0)
            way.rate = min((each.rate for each in (*there, *back) if each.rate), default=0)
            lost = (any(each.lost for each in there), any(each.lost for each in back))
            if lost != (way.stopped_to_target, way.stopped_to_client):
                way.go()
                way.stop(to_target=lost[0], to_client=lost[1])
