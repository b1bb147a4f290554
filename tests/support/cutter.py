"""A way to a server that breaks now and then, always after a request has got through and before its answer has.

    with Cutter(server.port, chance=0.02, seed=1) as way: ...      clients connect to 127.0.0.1:way.port

Whoever repeats a request because its answer was lost does so against a server that has carried it out already: just
what an idempotent request is for. Other bytes pass as they are.
"""

from __future__ import annotations

import random
import socket
import threading
from typing import Self

from tests.support.ports import free_port

CHUNK = 65536


class Cutter:
    """A listener that carries bytes to a port of this machine and back."""

    def __init__(self, target: int, chance: float, seed: int) -> None:
        self.port = free_port()
        self.chance = chance  #: of each piece of an answer to be lost, with its connection; 0 is a good network
        self.cuts = 0
        self._target = target
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            _end(one)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= {client, server}
            threading.Thread(target=self._carry, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                if answers and self._unlucky():
                    break
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            self._open.discard(one)
            _end(one)

    def _unlucky(self) -> bool:
        with self._lock:
            cut = self._random.random() < self.chance
            self.cuts += cut
            return cut


def _end(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()
