"""Into a Redis server or cluster: messages are sent in numbered groups, and each is there once.

    take ─▶ queue ─▶ group: up to 500 messages, one script call ─▶ WAIT, if the server has a replica ─▶ captured
              ▲         │ retried, with the same numbers, until its outcome is known
              └─────────┘ certainly nothing was done, and some of it has timed out

While a group is in flight, the next one collects in the queue; the more is published, the larger the groups. The script
(capture.lua) carries out a number once, so a retry does no harm, whatever became of the first attempt.

Rule 1: one group is in flight. That keeps the order, and makes the numbers work.
Rule 2: a message that was never sent, or of which the server said that it did nothing, may be given up with certainty.
        A publisher waits no longer than `patience` for that, give or take one attempt. QoS 0 messages stay queued.
Rule 3: a group of unknown outcome (sent, and no answer) is never given up. When `patience` is over its publishers are
        not answered; the retries go on until the outcome is known, so that no retry of ours makes a second copy.
Rule 4: each sink has connections of its own. A WAIT holds up what is behind it.

This module needs the library hiredis, which is an extra; `rules` imports it when a rule asks for Redis.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import deque
from importlib.resources import files
from typing import Final, NamedTuple

import structlog

from motorcade.extension.plugin import Spawn
from motorcade.plugins.capture import forms
from motorcade.plugins.capture.options import RuleOptions, TargetKind, hash_tag
from motorcade.plugins.capture.sink import CapturedMessage, NotCapturedError, RuleCounts, Sink
from motorcade.redis.resp import Argument, LostError, RedisConnection, ServerError
from motorcade.redis.scripts import Script
from motorcade.redis.servers import FIRST_PAUSE, FULL, LONGEST_PAUSE, PASSING, Purpose, Servers
from motorcade.redis.slots import slot_of
from motorcade.redis.url import RedisOptions, parse_url
from motorcade.storage.ports import StoreError, StoreFullError
from motorcade.storage.redis import RedisStore

#: Messages and bytes in one call: a few milliseconds of the server's time. One message may be larger by itself.
MAX_GROUP: Final = 500
MAX_GROUP_BYTES: Final = 1 << 20
#: Milliseconds that a server remembers the numbers of a writer: as long may the outcome of a group be unknown.
REMEMBERED: Final = 3_600_000
#: Milliseconds that one WAIT may take. Less than a connection may be silent.
WAIT_TIME: Final = 1000


def _script() -> Script:
    source = (files("motorcade.plugins.capture") / "capture.lua").read_bytes()
    # The server names scripts by SHA-1; nothing is protected by it.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


SCRIPT: Final = _script()


class RedisGroup:
    """Messages that are sent together, unchanged in each attempt."""

    __slots__ = ("arguments", "copies", "unknown")

    def __init__(self, copies: list[CapturedMessage], arguments: list[Argument]) -> None:
        self.copies = copies
        self.arguments = arguments
        self.unknown = False  #: it was sent, and its outcome is unknown


class RuleServers(NamedTuple):
    """The servers of a rule."""

    servers: Servers
    replicas: int | None  #: that must confirm; None: one, if the server has any


def servers_of(url: str, store: object) -> RuleServers:
    """Return the servers of a URL, or those of the node's own store; `NotCapturedError` says what to do."""
    if url:
        place = parse_url(url, RedisOptions())
        servers = Servers(place.addresses, place.access, place.clustered, place.options.patience)
        return RuleServers(servers, place.options.replicas)
    if not isinstance(store, RedisStore):
        raise NotCapturedError('the node\'s own store is no Redis; say which one: redis = "redis://HOST:PORT"')
    own = store.core.servers
    return RuleServers(Servers(own.seeds, own.access, own.clustered, own.patience), None)


class RedisSink(Sink):
    """The way to one Redis stream or channel."""

    def __init__(
        self,
        name: str,
        options: RuleOptions,
        target: RuleServers,
        counts: RuleCounts,
        spawn: Spawn,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        super().__init__(options, counts)
        kind, self._target = options.target
        tag = hash_tag(self._target)
        assert tag is not None  # noqa: S101 - such options cannot be made
        self._name = name
        self._is_stream = kind is TargetKind.REDIS_STREAM
        self._servers, self._replicas = target
        self._spawn = spawn
        self._log = log.bind(rule=name, to=options.to)
        writer = f"motorcade:capture:{{{tag}}}:{secrets.token_hex(6)}"
        self._keys = [writer, self._target] if self._is_stream else [writer]
        self._slot = slot_of(writer)
        self._queue: deque[CapturedMessage] = deque()
        self._group: RedisGroup | None = None  #: in flight
        self._number = 0  #: of the last message that is known to be there, or that must never be sent again
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._by_source = False  #: the server does not know the script
        self._asked: RedisConnection | None = None  #: connection whose server was asked for replicas, last
        self._confirmations = 0  #: that this server has to bring

    def tune(self, options: RuleOptions) -> None:
        super().tune(options)
        self._max_length = options.max_length
        self._form = options.form

    def start(self) -> None:
        self._task = self._spawn(self._run, f"redis.{self._name}")

    def _begin(self, copy: CapturedMessage) -> None:
        self._queue.append(copy)
        self._work.set()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.problem and self.pending:
            self._log.warning("capture_given_up", messages=self.pending)
        why = "the rule has ended"
        if self._group is not None and self._group.unknown:
            self._end_group(StoreError(f"{why}, {self._target!r} has not answered"))
        self._requeue()
        self.finish(list(self._queue), NotCapturedError(why))
        self._queue.clear()
        await self._servers.close()

    # -- the task

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            try:
                await self._step()
            except Exception:
                # A fault of ours must not leave publishers waiting for ever; the task is run again.
                if self._group is not None:
                    self._end_group(StoreError(f"capture rule {self._name!r} has failed"))
                raise

    async def _step(self) -> None:
        """Make one attempt with the group in flight, or the next one."""
        group = self._group or self._next_group()
        if group is None:
            self._work.clear()
            return
        address = self._servers.master(self._slot)
        if address is None:
            await self._back_off("no server has the slot")
            return
        try:
            connection = await self._servers.connection(address, Purpose.WRITE)
            await self._ask_for_replicas(connection)
        except StoreError as error:
            await self._back_off(str(error))
            return
        before, group.unknown = group.unknown, True
        answer, confirmed = await self._send(connection, group)
        if isinstance(answer, ServerError):
            group.unknown = before
            await self._denied(group, answer, str(address))
        elif isinstance(answer, LostError):
            await self._back_off(str(answer))
        elif confirmed < self._confirmations:
            await self._back_off(f"{address}: {confirmed} of {self._confirmations} replicas have confirmed")
        else:
            self._pause = 0.0
            if self.problem:
                self.problem = ""
                self._log.info("capture_resumed", pending=self.pending)
            self._end_group()

    def _next_group(self) -> RedisGroup | None:
        """Take what is queued, as far as it fits in one call."""
        copies: list[CapturedMessage] = []
        arguments: list[Argument] = []
        size = 0
        while self._queue and len(copies) < MAX_GROUP and size < MAX_GROUP_BYTES:
            copy = self._queue.popleft()
            try:
                found = self._arguments(copy)
            except (TypeError, ValueError) as error:  # a plugin has made it of something that is no text or no bytes
                self.finish([copy], NotCapturedError(f"the message cannot be written: {error}"))
                continue
            copies.append(copy)
            arguments.append(len(found))
            arguments += found
            size += copy.size_bytes
        self._group = RedisGroup(copies, arguments) if copies else None
        return self._group

    def _arguments(self, copy: CapturedMessage) -> list[str | bytes | int]:
        """Return a message as the script takes it."""
        message = copy.message
        assert message is not None  # noqa: S101 - it has not ended
        if not isinstance(message.payload, bytes):
            raise TypeError(f"the payload is {type(message.payload).__name__}, not bytes")
        if self._is_stream:
            return forms.fields(message)
        return [forms.envelope(message) if self._form == "envelope" else message.payload]

    async def _send(self, connection: RedisConnection, group: RedisGroup) -> tuple[object, int]:
        """Return the answer, or the error; and how many replicas have confirmed."""
        head = ("EVAL", SCRIPT.source) if self._by_source else ("EVALSHA", SCRIPT.digest)
        numbers = (self._number + 1, len(group.copies), self._max_length, self._target, REMEMBERED)
        replies = [connection.call(*head, len(self._keys), *self._keys, *numbers, *group.arguments)]
        if self._confirmations:
            replies.append(connection.call("WAIT", self._confirmations, WAIT_TIME))
        answer, *counts = await asyncio.gather(*replies, return_exceptions=True)
        self._by_source = False
        return answer, counts[0] if counts and isinstance(counts[0], int) else 0

    async def _ask_for_replicas(self, connection: RedisConnection) -> None:
        """Find out how many have to confirm: as many as the URL says, else one, if this server has any now."""
        if self._replicas is not None:
            self._confirmations = self._replicas
        elif connection is not self._asked:
            try:
                told: bytes = await connection.call("INFO", "replication")
            except ServerError:  # a user that may only write need not be able to
                told = b""
            self._confirmations = int(b"connected_slaves:" in told and b"connected_slaves:0" not in told)
            self._asked = connection

    # -- outcomes

    def _end_group(self, error: StoreError | None = None) -> None:
        """End the messages of the group in flight; their numbers are not used again."""
        group, self._group = self._group, None
        assert group is not None  # noqa: S101 - only then
        self._number += len(group.copies)
        self.finish(group.copies, error)

    def _requeue(self) -> None:
        """Put the group in flight back; certainly nothing of it was done."""
        if self._group is not None:
            self._queue.extendleft(reversed(self._group.copies))
            self._group = None

    async def _denied(self, group: RedisGroup, error: ServerError, address: str) -> None:
        """Handle an error that the server has answered: it has done nothing."""
        if error.code == "NOSCRIPT":
            self._by_source = True
            return
        if error.code in PASSING:
            alone = error.code == "MOVED" and not self._servers.clustered
            hint = " (it is part of a cluster: its URL begins with redis+cluster://)" if alone else ""
            await self._back_off(f"{address}: {error}{hint}")
            return
        self._note_problem(f"{address} refuses: {_advice(error, self._target)}")
        if group.unknown:  # an earlier attempt may have arrived, or may do so yet
            self._end_group(StoreError(f"perhaps captured, perhaps not: {self.problem}"))
        else:
            refusal = StoreFullError if error.code in FULL else NotCapturedError
            self._end_group(refusal(self.problem))

    async def _back_off(self, problem: str) -> None:
        """Retry in a while; answer publishers that have waited too long."""
        self._note_problem(problem)
        self._time_out()
        self._servers.refresh()
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        await asyncio.sleep(self._pause)

    def _note_problem(self, problem: str) -> None:
        if not self.problem:  # log it once until it works again
            self._log.warning("capture_held", error=problem, pending=self.pending)
        self.problem = problem

    def _time_out(self) -> None:
        patience = self._servers.patience
        before = self._loop.time() - patience
        if self._group is not None and self._group.unknown:
            for copy in self._group.copies:
                if copy.since < before:
                    copy.answer(StoreError(f"not confirmed within {patience:g} s: {self.problem}"))
        else:
            self._requeue()
        overdue = [copy for copy in self._queue if copy.commit is not None and copy.since < before]
        if overdue:
            gone = set(overdue)
            self._queue = deque(copy for copy in self._queue if copy not in gone)
            self.finish(overdue, NotCapturedError(f"not captured within {patience:g} s: {self.problem}"))


def _advice(error: ServerError, target: str) -> str:
    match error.code:
        case "WRONGTYPE":
            return f"{target!r} is there and no stream ({error}); remove it, or give the rule another key"
        case "NOPERM" | "NOAUTH":
            return f"{error}; the user of the rule's URL needs EVAL, EVALSHA, and what the script uses"
        case _:
            return str(error)
