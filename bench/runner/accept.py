"""A platform that hands batches to the node as fast as they are acknowledged: `python -m runner.accept`.

    {"host": …, "port": …, "pid": …, "vehicles": 20000, "targets": 1000000, "step": 100000, …}  on stdin
    {"step": 1, "targets": 100000, "seconds": …, "rss_kb": …}                                   on stdout, one per step

A process of its own, so that it can have a core of its own. The packets of a step are made before its time begins, so
what is measured is the node; `load` tells which part of the time this process was busy.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .machine import cpu_seconds

PATIENCE = 60.0  #: seconds for one answer
DATA = "d"


def text(words: str) -> bytes:
    """A string as MQTT writes it."""
    data = words.encode()
    return len(data).to_bytes(2, "big") + data


def packet(kind: int, body: bytes) -> bytes:
    """An MQTT packet."""
    length, rest = bytearray(), len(body)
    while True:
        length.append(rest & 127 | (128 if rest > 127 else 0))
        rest >>= 7
        if not rest:
            return bytes((kind,)) + bytes(length) + body


def publish(topic: str, payload: bytes, packet_id: int) -> bytes:
    return packet(0x32, text(topic) + packet_id.to_bytes(2, "big") + payload)


class Platform:
    """One connection, MQTT 3.1.1: PUBACK says that a batch is stored; one that is refused ends the connection."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(packet(0x10, text("MQTT") + bytes((4, 2, 0, 0)) + text("platform")))
        self._rest = b""
        if self._read(4)[3]:
            raise SystemExit("the node has refused the platform")

    def _read(self, size_bytes: int) -> bytes:
        while len(self._rest) < size_bytes:
            data = self._socket.recv(65536)
            if not data:
                raise SystemExit("the node has closed the connection: it has refused a batch")
            self._rest += data
        found, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
        return found

    def answers(self) -> int:
        """Wait for PUBACKs; how many have come."""
        self._rest = self._read(4) + self._rest
        count = len(self._rest) // 4
        acks, self._rest = self._rest[: 4 * count], self._rest[4 * count :]
        if any(acks[4 * index] != 0x40 for index in range(count)):
            raise SystemExit("the node has sent something else than PUBACKs")
        return count

    def send(self, batches: list[bytes], window: int) -> None:
        """All of them, so many in flight, until the last is answered."""
        sent = done = 0
        while done < len(batches):
            ready = batches[sent : done + window]
            if ready:
                self._socket.sendall(b"".join(ready))
                sent += len(ready)
            done += self.answers()


def batches(vins: list[str], first: int, count: int, per_batch: int) -> Iterator[bytes]:
    """Targets from the `first` on: vehicle by vehicle, and with every pass over all of them another request."""
    for number in range(first, first + count, per_batch):
        start = number % len(vins)
        body = {"ids": vins[start : start + per_batch], "request_id": f"r{number // len(vins)}", "data_id": DATA}
        yield publish("$SDV-FANOUT/trigger", json.dumps(body).encode(), number // per_batch % 60_000 + 1)


def memory(pid: int) -> int:
    """Resident memory in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    """One run, as told on stdin."""
    told = json.load(sys.stdin)
    pid, per_batch, step = told["pid"], told["per_batch"], told["step"]
    vins = [f"LFV3A28K{number:09d}" for number in range(told["vehicles"])]
    platform = Platform(told["host"], told["port"])
    platform.send([publish(f"$SDV-FANOUT/data/{DATA}", os.urandom(told["size"]), 1)], 1)
    for first in range(0, told["targets"], step):
        ready = list(batches(vins, first, step, per_batch))
        size_bytes = sum(map(len, ready))
        own, node, began = time.process_time(), cpu_seconds(pid), time.monotonic()
        platform.send(ready, told["window"])
        took = time.monotonic() - began
        said = {
            "step": first // step + 1,
            "targets": first + step,
            "seconds": took,
            "rate": step / took,
            "size_bytes": size_bytes,
            "rss_kb": memory(pid),
            "cpu": cpu_seconds(pid) - node,
            "load": (time.process_time() - own) / took,
        }
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
