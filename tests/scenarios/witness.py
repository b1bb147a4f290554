"""What the bad-input and limit tests look at besides the offender: other clients, memory, counters, the log.

A test of bad input is only worth something if it also shows that nobody else was harmed. `Witness` is a pair of clients
that talk over the node before, while and after somebody misbehaves; `Guard` adds the node's memory and its log.
"""

from __future__ import annotations

import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import psutil

from tests.support.node import NodeProcess, RunningNode
from tests.support.wire import Address, Client

#: Seconds a condition may take to become true. Generous: machines that run tests are busy.
PATIENCE = 60.0

#: Bytes by which the node may stay larger than before: freed memory that Python keeps for itself.
SLACK = 48 * 1024 * 1024


def wait_until(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Wait for a condition, looking every few milliseconds; fail with `what` if it does not come."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {patience:g} s: {what}"
        time.sleep(0.02)


class Witness:
    """An honest publisher and an honest subscriber, MQTT 3.1.1 and 5, whose messages must all arrive, in order."""

    def __init__(self, node: Address) -> None:
        self.node = node
        self.count = 0
        name = f"witness-{uuid.uuid4().hex[:8]}"  # one of its own each time, or it would count as flapping
        # One after the other: a node may have little patience with connections that say nothing.
        self.subscriber = Client(node, version=5)
        assert self.subscriber.connect(f"{name}-sub", keepalive=0).reason == 0
        self.publisher = Client(node, version=4)
        assert self.publisher.connect(f"{name}-pub", keepalive=0).reason == 0
        assert [2] == self.subscriber.subscribe("witness/#", 2).reasons

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """One message of each QoS goes through, and nothing else has come in between."""
        for qos in (0, 1, 2):
            self.count += 1
            payload = b"%d" % self.count
            self.publisher.publish(f"witness/{qos}", payload, qos)
            message = self.subscriber.receive()
            assert (f"witness/{qos}", payload, qos) == (message.topic, message.payload, message.qos)

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()


def rss(node: NodeProcess) -> int:
    """Bytes of memory that the node's process holds."""
    return int(psutil.Process(node.pid).memory_info().rss)


def metrics(node: RunningNode) -> dict[str, float]:
    """The node's metrics by series, labels as they are printed."""
    assert node.http is not None, "the node was started without its control port"
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


def refusals(node: RunningNode, limit: str) -> float:
    """How often a limit was hit, as the node tells it."""
    return metrics(node)[f'motorcade_limit_refused_total{{limit="{limit}"}}']


def assert_no_crash(node: NodeProcess, since: int = 0) -> None:
    """The node runs, and has logged no error of its own; `since` is the number of its lines that do not count."""
    assert node.process is not None
    assert node.process.poll() is None, f"the node died:\n{node.log[-4000:]}"
    log = "".join(node.output[since:])
    for sign in ("connection_failed", "Traceback", '"level":"error"', "Task exception was never retrieved"):
        assert sign not in log, f"{sign}:\n{log[max(0, log.index(sign) - 500) :][:4000]}"


@contextmanager
def guarded(node: NodeProcess, baseline: int | None = None, slack: int = SLACK) -> Iterator[Witness]:
    """Around whatever misbehaves: the witness is served before and after, memory comes back, nothing has crashed."""
    with Witness(node) as witness:
        witness.check()
        lines = len(node.output)
        before = rss(node) if baseline is None else baseline
        yield witness
        witness.check()
        assert_no_crash(node, lines)
        wait_until(
            lambda: rss(node) < before + slack, f"memory comes back to {before >> 20} MiB, is {rss(node) >> 20} MiB"
        )
        witness.check()
