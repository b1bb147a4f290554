"""A broker in this process for the raw client of `wire`: no sockets, no threads, and time that passes when it is told.

    with VirtualBroker() as broker:
        client = broker.connect("car", version=4)       a `wire.Client` that was let in
        broker.let_pass(3)                              seconds, in no time

Bytes go through the broker's own connections, and everything that they set off has happened when the client reads. So
a client that reads nothing knows that nothing comes: no test over this broker waits for a moment.
"""

from __future__ import annotations

import itertools
import logging
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import structlog

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.state import BrokerOptions
from motorcade.extension.plugin import Plugins
from motorcade.storage.memory import MemoryStore
from tests.support.virtual import MemoryNode, Peer, Turns, standing
from tests.support.wire import Client


class MemorySocket:
    """The client's end of a connection to a `MemoryNode`, with as much of a socket's face as `wire.Client` uses."""

    def __init__(self, node: MemoryNode, version: int) -> None:
        self.node = node
        self.peer: Peer = node.peer(version)
        self._unsent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self._unsent.append(data)
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what waits while the broker reads, and let it work."""
        self.node.turn()
        while self._unsent and self.peer.open and self.peer.wire.reading:
            self.peer.send(self._unsent.pop(0))
            self.node.turn()

    def recv(self, most: int) -> bytes:
        """What has come; `TimeoutError` at once if there is nothing, since nothing more is under way."""
        self._deliver()
        written = self.peer.wire.written
        data = bytes(written[:most])
        del written[:most]
        if not data and self.peer.open:
            raise TimeoutError("nothing comes")
        return data

    def shutdown(self, how: int) -> None:
        """End the sending side."""
        if how == socket.SHUT_WR and self.peer.open and not self.peer.connection.eof_received():
            self.peer.wire.close()

    def setsockopt(self, *_option: object) -> None:
        """There is no network to tell."""

    def settimeout(self, _seconds: float | None) -> None:
        """Nothing takes time here."""

    def close(self) -> None:
        self.peer.close()
        self.node.turn()


class VirtualBroker:
    """A broker with the default limits, but for those that count clients per second of a clock that stands.

    Sessions that outlive their connections are in a store, as in a node.
    """

    def __init__(self, options: BrokerOptions | None = None, session: SessionOptions | None = None) -> None:
        limits = Limits(connect_rate=0.0, flapping_count=0)
        store = MemoryStore()
        store.gate.is_open = True
        self.node = MemoryNode(session, limits, store=store)
        self.node.state.options = options or BrokerOptions()
        self._numbers = itertools.count(1)
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        self._patches.enter_context(standing(self.node.clock))
        self._patches.callback(structlog.configure, **structlog.get_config())
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        self.node.broker._schedule()  # what the broker does four times a second
        return self

    def __exit__(self, *_: object) -> None:
        assert isinstance(self.node.loop, Turns)
        self.node.loop.die()
        self._patches.close()

    def load(self, plugin: str) -> None:
        """Load a plugin that needs no store."""
        plugins = Plugins(self.node.broker, self.node.hooks, Path(), self.node.state.shared.sources)
        self.node.run(plugins.load(plugin, {}))

    def open(self, version: int = 5) -> Client:
        """A client that has said nothing yet."""
        return Client(MemorySocket(self.node, version), version=version)

    def connect(self, client_id: str | None = None, *, version: int = 5, **options: Any) -> Client:
        """A client that was let in, with an id of its own unless it has one."""
        client = self.open(version)
        answer = client.connect(f"virtual-{next(self._numbers)}" if client_id is None else client_id, **options)
        assert answer.reason == 0, f"CONNECT refused with 0x{answer.reason or 0:02x}"
        client.connack = answer
        return client

    def let_pass(self, seconds: float) -> None:
        """Let time pass, and everything happen when it is due."""
        self.node.wait(seconds)
