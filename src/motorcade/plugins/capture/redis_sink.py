"""Into a Redis server or cluster: messages go out in numbered groups, and each is there once.

    take ─▶ queue ─▶ flight: up to 500 messages, one script call ─▶ WAIT, if the server has a replica ─▶ captured
              ▲         │ sent again, with the same numbers, until it is known what became of it
              └─────────┘ known that nothing was done, and time is up for some of it

While a flight is under way, the next one collects in the queue; the more is published, the larger the flights. The
script (capture.lua) carries out a number once, so sending again does no harm, whatever became of the first sending.

Rule 1: one flight at a time. That is what keeps the order, and what makes the numbers work.
Rule 2: a message that was never sent, or of which the server said that it did nothing, may be given up with certainty.
        Nobody waits for longer than `patience` for that, give or take one attempt. QoS 0 messages wait on: nobody does.
Rule 3: a flight in doubt (sent, and no answer) is never given up. When `patience` is over, who waits is not answered;
        the flight goes on until it is known, so that nothing is there twice because of us.
Rule 4: each sink has connections of its own. A WAIT holds up what is behind it.

This module needs the library hiredis, which is an extra; `rules` imports it when a rule asks for Redis.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from importlib.resources import files
from typing import Final

import structlog

from motorcade.extension.plugin import Spawn
from motorcade.plugins.capture import forms
from motorcade.plugins.capture.options import Kind, RuleOptions, hash_tag
from motorcade.plugins.capture.sink import Entry, NotCapturedError, Sink, Tally
from motorcade.redis.place import RedisOptions, parse_url
from motorcade.redis.resp import Argument, Connection, LostError, ServerError
from motorcade.redis.scripts import Script
from motorcade.redis.servers import FIRST_PAUSE, FULL, LONGEST_PAUSE, PASSING, Purpose, Servers
from motorcade.redis.slots import slot_of
from motorcade.storage.ports import StoreError, StoreFullError
from motorcade.storage.redis import RedisStore

#: Messages and octets in one call: a few milliseconds of the server's time. One message may be larger by itself.
MAX_FLIGHT: Final = 500
MAX_OCTETS: Final = 1 << 20
#: Milliseconds that a server remembers the numbers of a writer: as long may a flight be in doubt.
REMEMBERED: Final = 3_600_000
#: Milliseconds that one WAIT may take. Less than a connection may be silent.
WAIT_TIME: Final = 1000


def _script() -> Script:
    source = (files("motorcade.plugins.capture") / "capture.lua").read_bytes()
    # The server names scripts by SHA-1; nothing is protected by it.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


SCRIPT: Final = _script()


class Flight:
    """Messages that are sent together, unchanged however often."""

    __slots__ = ("doubtful", "entries", "words")

    def __init__(self, entries: list[Entry], words: list[Argument]) -> None:
        self.entries = entries
        self.words = words
        self.doubtful = False  #: it was sent, and nobody knows what became of that


class Place:
    """The servers of a rule."""

    def __init__(self, servers: Servers, replicas: int | None) -> None:
        self.servers = servers
        self.replicas = replicas  #: that must confirm; None: one, if the server has any


def place_of(url: str, store: object) -> Place:
    """The servers that a URL names, or those of the node's own store; `NotCapturedError` says what to do."""
    if url:
        place = parse_url(url, RedisOptions())
        servers = Servers(place.addresses, place.access, place.clustered, place.options.patience)
        return Place(servers, place.options.replicas)
    if not isinstance(store, RedisStore):
        raise NotCapturedError('the node\'s own store is no Redis; say which one: redis = "redis://HOST:PORT"')
    own = store.core.servers
    return Place(Servers(own.seeds, own.access, own.clustered, own.patience), None)


class RedisSink(Sink):
    """The way to one Redis stream or channel."""

    def __init__(
        self,
        name: str,
        options: RuleOptions,
        place: Place,
        tally: Tally,
        spawn: Spawn,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        super().__init__(tally, options.max_pending, options.max_pending_bytes)
        kind, target = options.target
        tag = hash_tag(target)
        assert tag is not None  # noqa: S101 - such options cannot be made
        self.max_length = options.max_length
        self.form = options.form
        self._name = name
        self._target = target
        self._is_stream = kind is Kind.REDIS_STREAM
        self._servers = place.servers
        self._replicas = place.replicas
        self._spawn = spawn
        self._log = log.bind(rule=name, to=options.to)
        writer = f"motorcade:capture:{{{tag}}}:{secrets.token_hex(6)}"
        self._keys = [writer, target] if self._is_stream else [writer]
        self._slot = slot_of(writer)
        self._queue: deque[Entry] = deque()
        self._flight: Flight | None = None
        self._number = 0  #: of the last message that is known to be there, or that must never be sent again
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._by_source = False  #: the server does not know the script
        self._asked: Connection | None = None  #: connection whose server was asked for replicas, last
        self._confirmations = 0  #: that this server has to bring

    def start(self) -> None:
        self._task = self._spawn(self._run, f"redis.{self._name}")

    def _begin(self, entry: Entry) -> None:
        self._queue.append(entry)
        self._work.set()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        flight, self._flight = self._flight, None
        why = "the rule has ended"
        if flight is not None:
            error = (
                StoreError(f"{why}, {self._target!r} has not answered") if flight.doubtful else NotCapturedError(why)
            )
            self.finish(flight.entries, error)
        left, self._queue = list(self._queue), deque()
        if left:
            self.finish(left, NotCapturedError(why))
        if self.problem and (left or flight is not None):
            self._log.warning("capture_given_up", messages=len(left) + (len(flight.entries) if flight else 0))
        await self._servers.close()

    # -- the task

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            try:
                await self._step()
            except Exception:
                # A fault of ours must not leave publishers waiting for ever; the task is run again.
                flight, self._flight = self._flight, None
                if flight is not None:
                    self._number += len(flight.entries)
                    self.finish(flight.entries, StoreError(f"capture rule {self._name!r} has failed"))
                raise

    async def _step(self) -> None:
        """One attempt with what is next."""
        flight = self._flight or self._freeze()
        if flight is None:
            self._work.clear()
            return
        address = self._servers.master(self._slot)
        if address is None:
            await self._hold("nobody serves the slot")
            return
        try:
            connection = await self._servers.connection(address, Purpose.WRITE)
            await self._ask_for_replicas(connection)
        except StoreError as error:
            await self._hold(str(error))
            return
        before, flight.doubtful = flight.doubtful, True
        answer, confirmed = await self._send(connection, flight)
        if isinstance(answer, ServerError):
            flight.doubtful = before
            await self._denied(flight, answer, str(address))
        elif isinstance(answer, LostError):
            await self._hold(str(answer))
        elif confirmed < self._confirmations:
            await self._hold(f"{address}: {confirmed} of {self._confirmations} replicas have confirmed")
        else:
            self._arrived(flight)

    def _freeze(self) -> Flight | None:
        """Take what waits, as far as it fits in one call."""
        entries: list[Entry] = []
        words: list[Argument] = []
        octets = 0
        while self._queue and len(entries) < MAX_FLIGHT and octets < MAX_OCTETS:
            entry = self._queue.popleft()
            try:
                found = self._words(entry)
            except (TypeError, ValueError) as error:  # a plugin has made it of something that is no text or no bytes
                self.finish([entry], NotCapturedError(f"the message cannot be written: {error}"))
                continue
            entries.append(entry)
            words.append(len(found))
            words += found
            octets += entry.octets
        if not entries:
            return None
        self._flight = Flight(entries, words)
        return self._flight

    def _words(self, entry: Entry) -> list[str | bytes | int]:
        """A message as the script wants it."""
        message = entry.message
        assert message is not None  # noqa: S101 - it has not ended
        if not isinstance(message.payload, bytes):
            raise TypeError(f"the payload is {type(message.payload).__name__}, not bytes")
        if self._is_stream:
            return forms.fields(message)
        return [forms.envelope(message) if self.form == "envelope" else message.payload]

    async def _send(self, connection: Connection, flight: Flight) -> tuple[object, int]:
        """The answer, or the error; and how many replicas have confirmed."""
        head = ("EVAL", SCRIPT.source) if self._by_source else ("EVALSHA", SCRIPT.digest)
        numbers = (self._number + 1, len(flight.entries), self.max_length, self._target, REMEMBERED)
        replies = [connection.call(*head, len(self._keys), *self._keys, *numbers, *flight.words)]
        if self._confirmations:
            replies.append(connection.call("WAIT", self._confirmations, WAIT_TIME))
        answer, *counts = await asyncio.gather(*replies, return_exceptions=True)
        self._by_source = False
        return answer, counts[0] if counts and isinstance(counts[0], int) else 0

    async def _ask_for_replicas(self, connection: Connection) -> None:
        """How many have to confirm: as many as the URL says, else one, if this server has any now."""
        if self._replicas is not None:
            self._confirmations = self._replicas
        elif connection is not self._asked:
            try:
                told: bytes = await connection.call("INFO", "replication")
            except ServerError:  # somebody who may only write here need not know
                told = b""
            self._confirmations = int(b"connected_slaves:" in told and b"connected_slaves:0" not in told)
            self._asked = connection

    # -- what becomes of a flight

    def _arrived(self, flight: Flight) -> None:
        self._flight = None
        self._number += len(flight.entries)
        self._pause = 0.0
        if self.problem:
            self.problem = ""
            self._log.info("capture_resumed", pending=self.pending)
        self.finish(flight.entries)

    async def _denied(self, flight: Flight, error: ServerError, address: str) -> None:
        """The server has answered, with an error: it has done nothing."""
        if error.code == "NOSCRIPT":
            self._by_source = True
            return
        if error.code in PASSING:
            alone = error.code == "MOVED" and not self._servers.clustered
            hint = " (it is part of a cluster: its URL begins with redis+cluster://)" if alone else ""
            await self._hold(f"{address}: {error}{hint}")
            return
        self._trouble(f"{address} refuses: {_advice(error, self._target)}")
        self._flight = None
        if flight.doubtful:  # an earlier sending may have arrived, or may do so yet
            self._number += len(flight.entries)
            self.finish(flight.entries, StoreError(f"perhaps captured, perhaps not: {self.problem}"))
        else:
            refusal = StoreFullError if error.code in FULL else NotCapturedError
            self.finish(flight.entries, refusal(self.problem))

    async def _hold(self, trouble: str) -> None:
        """Try again in a while; tell those who have waited too long."""
        self._trouble(trouble)
        self._lose_patience()
        self._servers.refresh()
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        await asyncio.sleep(self._pause)

    def _trouble(self, text: str) -> None:
        if not self.problem:  # until it works again, once is enough
            self._log.warning("capture_held", error=text, pending=self.pending)
        self.problem = text

    def _lose_patience(self) -> None:
        before = self._loop.time() - self._servers.patience
        flight = self._flight
        if flight is not None and flight.doubtful:
            for entry in flight.entries:
                if entry.since < before:
                    entry.fail(StoreError(f"not confirmed within {self._servers.patience:g} s: {self.problem}"))
        elif flight is not None:
            self._queue.extendleft(reversed(flight.entries))
            self._flight = None
        overdue = [entry for entry in self._queue if entry.done is not None and entry.since < before]
        if overdue:
            gone = set(overdue)
            self._queue = deque(entry for entry in self._queue if entry not in gone)
            self.finish(overdue, NotCapturedError(f"not captured within {self._servers.patience:g} s: {self.problem}"))


def _advice(error: ServerError, target: str) -> str:
    match error.code:
        case "WRONGTYPE":
            return f"{target!r} is there and no stream ({error}); remove it, or give the rule another key"
        case "NOPERM" | "NOAUTH":
            return f"{error}; the user of the rule's URL needs EVAL, EVALSHA, and what the script uses"
        case _:
            return str(error)
