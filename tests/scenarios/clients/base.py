"""What all drivers have in common: the interface, the records that scenarios compare, a loop for asyncio clients."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tests.support.node import Endpoint

#: Seconds a scenario waits for a client to do what it was asked for.
PATIENCE = 60.0

#: Session expiry of sessions that shall outlive their connection, in seconds.
LASTING = 300

Result = TypeVar("Result")


@dataclass(frozen=True)
class Listeners:
    """Where a broker listens."""

    tcp: Endpoint
    ws: Endpoint

    def of(self, transport: str) -> Endpoint:
        return self.ws if transport == "ws" else self.tcp


@dataclass(frozen=True)
class Details:
    """The properties of an MQTT 5 message that concern its receiver."""

    content_type: str
    response_topic: str
    correlation_data: bytes
    user: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Will:
    topic: str
    payload: bytes
    qos: int = 1


@dataclass(frozen=True)
class Received:
    """A message as its library has handed it over. `details` is None where no property was there."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    details: Details | None = None


class RealClient(ABC):
    """One client. After `disconnect` or `drop` it may `connect` again, also with the same client id."""

    name: ClassVar[str]
    transports: ClassVar[tuple[str, ...]] = ("tcp", "ws")

    def __init__(self, listeners: Listeners, transport: str, version: int) -> None:
        self.address = listeners.of(transport)
        self.transport = transport
        self.version = version
        self.leaves_with_will = False  #: whether `disconnect` asks the broker to publish the will (DISCONNECT 0x04)
        self.inbox: queue.Queue[Received] = queue.Queue()

    @abstractmethod
    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        """Return when the broker has accepted. Without `clean` the session outlives the connection."""

    @abstractmethod
    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Return when the broker has granted exactly this QoS."""

    @abstractmethod
    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        """Return when the broker has acknowledged; QoS 0 when it was written."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave with a DISCONNECT."""

    @abstractmethod
    def drop(self) -> None:
        """Lose the connection without a DISCONNECT."""

    @abstractmethod
    def close(self) -> None:
        """Release everything at the end of a test, in whatever state the client is."""

    def receive(self) -> Received:
        """The next message."""
        try:
            return self.inbox.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"{self.name} got no message") from None


def cut(file_descriptor: int) -> None:
    """End a connection below its owner, as a network would."""
    with socket.socket(fileno=os.dup(file_descriptor)) as same:
        same.shutdown(socket.SHUT_RDWR)


class Loop:
    """An event loop in a thread of its own, for the asyncio clients."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="client-loop", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` there and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def close(self) -> None:
        if self.loop.is_closed():
            return
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE)
        self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
