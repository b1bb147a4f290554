"""The frames between dispatcher and workers, written from the description alone, and workers that behave badly.

version (1 byte, 1) | command (1 byte) | length (4 bytes, big-endian) | payload
0 PROCESS_MESSAGE   UUID ':' JSON
1 ACK_MESSAGE       UUID

with Actor(answer) as worker: ...      a listener on `worker.name`; `answer` is called with what it has got
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.ports import free_port

HEAD = struct.Struct(">BBI")
VERSION, PROCESS, ACK = 1, 0, 1
ID_LENGTH = 36
PATIENCE = 30.0  # seconds


def frame(command: int, payload: bytes, version: int = VERSION) -> bytes:
    return HEAD.pack(version, command, len(payload)) + payload


def ack(identifier: str) -> bytes:
    return frame(ACK, identifier.encode())


def process(identifier: str, text: bytes) -> bytes:
    return frame(PROCESS, identifier.encode() + b":" + text)


def split(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Take the whole frames out of `buffer`: (command, payload). Anything that is no frame of version 1 fails."""
    found = []
    while len(buffer) >= HEAD.size:
        version, command, length = HEAD.unpack_from(buffer)
        assert version == VERSION, f"version {version}"
        if len(buffer) < HEAD.size + length:
            break
        found.append((command, bytes(buffer[HEAD.size : HEAD.size + length])))
        del buffer[: HEAD.size + length]
    return found


@dataclass(frozen=True)
class Work:
    """A message that was given to a worker."""

    id: str
    text: bytes
    connection: int  #: 1 for the first that the leader has made
    at: float = field(default_factory=time.monotonic)


def work(payload: bytes, connection: int = 1) -> Work:
    """The payload of PROCESS_MESSAGE; the identifier must be a UUID in its usual form."""
    identifier, colon, text = payload[:ID_LENGTH].decode(), payload[ID_LENGTH : ID_LENGTH + 1], payload[ID_LENGTH + 1 :]
    assert colon == b":", payload
    assert str(uuid.UUID(identifier)) == identifier
    return Work(identifier, text, connection)


Answer = Callable[[socket.socket, list[Work]], None]


class Actor:
    """A worker played by a test.

    `answer(connection, works)` is called in the thread of the connection with everything that has just come, and may
    send whatever it likes. With `reads` off it accepts connections and never reads from them.
    """

    def __init__(self, answer: Answer | None = None, *, reads: bool = True, port: int = 0) -> None:
        self.answer = answer
        self.reads = reads
        self.port = port or free_port()
        self.got: list[Work] = []
        self.connections = 0
        self.closed = 0  #: connections that the leader has ended
        self.failures: list[BaseException] = []
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._listener: socket.socket | None = None

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ids(self) -> list[str]:
        return [one.id for one in self.got]

    def start(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), name=self.name, daemon=True).start()
        return self

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                self.connections += 1
                self._sockets.append(connection)
                self._changed.notify_all()
            if self.reads:
                number = self.connections
                threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        buffer = bytearray()
        try:
            while data := connection.recv(65536):
                buffer += data
                works = []
                for command, payload in split(buffer):
                    assert command == PROCESS, f"a worker was sent command {command}"
                    works.append(work(payload, number))
                if works:
                    with self._changed:
                        self.got += works
                        self._changed.notify_all()
                    if self.answer is not None:
                        self.answer(connection, works)
        except OSError:
            pass
        except BaseException as error:  # noqa: BLE001 - told by `check`, in the thread of the test
            self.failures.append(error)
        with self._changed:
            self.closed += 1
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Wait until something holds that changes with connections and messages."""
        with self._changed:
            assert self._changed.wait_for(condition, patience), f"{self.name}: not within {patience:g} s: {what}"

    def wait_for(self, count: int) -> list[Work]:
        self.wait(lambda: len(self.got) >= count, f"{count} messages have come")
        return self.got

    def hang_up(self) -> None:
        """End all connections; new ones are still accepted."""
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()
        self._sockets.clear()

    def stop(self) -> None:
        if self._listener is not None:
            # Without it the thread in `accept` keeps the port open.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.hang_up()

    def check(self) -> None:
        """What its threads have stumbled over."""
        assert not self.failures, self.failures

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.check()


def acknowledge(connection: socket.socket, works: list[Work]) -> None:
    """An answer: all is well. It writes nothing anywhere."""
    connection.sendall(b"".join(ack(one.id) for one in works))
