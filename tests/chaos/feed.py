"""A publisher that knows exactly what is in the stream, whatever happens to the servers.

Every message has a number, and its stream entry has that number as its id. So a batch without an answer can be sent
again: what is there already is refused by Redis, for its id is not above the last one. In a cluster a batch counts when
a replica has it too; what a failover has taken along before that is sent again, under the same ids.
"""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.dispatch import PUBLISHED
from tests.support.redis import RedisCluster, RedisServer

BATCH = 20
PAUSE = 0.05  # seconds until a batch that failed is tried again
TIMEOUT = 2.0  # seconds for an answer of Redis
BESIDE = f"{{{PUBLISHED}}}:chaos"  # written with each batch, so that WAIT has something to wait for
NEVER = Retry(NoBackoff(), 0)  # the client must not repeat anything by itself
IN_PLACE = "equal or smaller"  # what Redis says of an id that is not above the last


def text(number: int) -> bytes:
    """Message 7 and message 8 have the same `message_id`, which means nothing to the dispatcher."""
    return json.dumps({"message_id": f"device-{number // 2}", "n": number}).encode()


class Feed:
    """Publishes numbers 1, 2, 3, … at `rate` a second, from a thread, until it is stopped."""

    def __init__(self, backing: RedisServer | RedisCluster, rate: float) -> None:
        self.backing = backing
        self.rate = rate
        self.confirmed = 0  #: all numbers up to this one are in the stream
        self.attempts = 0
        self._client: Any = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch under way."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        begun, skipped = time.monotonic(), 0.0
        while not self._stopping.is_set():
            ahead = self.confirmed / self.rate - (time.monotonic() - begun - skipped)
            if ahead > 0:
                self._stopping.wait(ahead)
            elif ahead < -1:  # Redis was away: go on at the same rate, do not catch up
                skipped -= ahead
            self._send(range(self.confirmed + 1, self.confirmed + BATCH + 1))
            self.confirmed += BATCH

    def _send(self, numbers: range) -> None:
        while True:
            self.attempts += 1
            try:
                if self._written(numbers):
                    return
            except (redis.RedisError, OSError):
                self._forget()
            time.sleep(PAUSE)

    def _written(self, numbers: range) -> bool:
        if self._client is None:
            self._client = self._master()
        line = self._client.pipeline(transaction=False)
        for number in numbers:
            line.xadd(PUBLISHED, {"payload": text(number)}, id=f"{number}-1")
        line.set(BESIDE, numbers[-1])
        for answer in line.execute(raise_on_error=False):
            if isinstance(answer, redis.RedisError) and IN_PLACE not in str(answer):
                raise answer
        if isinstance(self.backing, RedisServer):
            return True
        return int(self._client.wait(1, int(TIMEOUT * 500))) >= 1

    def _master(self) -> Any:
        """A connection to the server that has the stream; it never repeats anything by itself."""
        address = (self.backing.host, self.backing.port) if isinstance(self.backing, RedisServer) else self._owner()
        return redis.Redis(*address, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=NEVER)

    def _owner(self) -> tuple[str, int]:
        """As some server sees it; before a failover is over that may be one that is dead, so it is tried again."""
        assert isinstance(self.backing, RedisCluster)
        server = random.choice(self.backing.running)
        with redis.Redis(server.host, server.port, socket_timeout=TIMEOUT, retry=NEVER) as client:
            slot = client.execute_command("CLUSTER", "KEYSLOT", PUBLISHED)
            for first, last, (host, port, *_), *_replicas in client.execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    return host.decode(), port
        raise redis.ConnectionError("nobody has the stream")

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
