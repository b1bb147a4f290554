"""A reliable publisher: QoS 1 messages to a broker, retried over new connections until each is acknowledged.

    posts ─▶ pace ─▶ [ window: sent, not acknowledged ] ─▶ broker
                            ▲                │ connection lost
                            └─ sent again ───┘ over the next one, in order, after what `first` says

Rule 1: a message is sent until it is acknowledged or refused, so it may reach the broker twice. To prevent that, give
        it an id by which the broker dedupes (fan-out: `batch_id`).
Rule 2: the first refusal ends it: whatever is wrong with a message is likely to be wrong with the next. Those in flight
        are waited for, no further one is sent.
Rule 3: a broker that is away is waited for, for at most `patience` seconds without an acknowledgement. So a
        message at which the broker hangs up again and again ends it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from motorcade.client import Client, ClientError, ConnectionLostError, RefusedError
from motorcade.core.errors import MotorcadeError
from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.properties import NONE, Properties
from motorcade.publisher.address import BrokerAddress
from motorcade.publisher.batches import broker_words

WINDOW: Final = 8  #: messages sent and not acknowledged
PATIENCE: Final = 60.0  #: seconds without an acknowledgement

FIRST_DELAY: Final = 0.2  #: seconds before the second attempt to connect; then twice as long each time,
MAX_DELAY: Final = 5.0  #: up to this

#: A broker that says this is there again soon, or busy for a moment. Everything else it says about us or our message.
PASSING: Final = frozenset(
    {
        ReasonCode.SERVER_UNAVAILABLE,
        ReasonCode.SERVER_BUSY,
        ReasonCode.SERVER_SHUTTING_DOWN,
        ReasonCode.KEEP_ALIVE_TIMEOUT,
        ReasonCode.CONNECTION_RATE_EXCEEDED,
        ReasonCode.MAXIMUM_CONNECT_TIME,
        ReasonCode.UNSPECIFIED_ERROR,
        ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
        ReasonCode.ADMINISTRATIVE_ACTION,
        ReasonCode.USE_ANOTHER_SERVER,
        ReasonCode.SERVER_MOVED,
    }
)

T = TypeVar("T")


class PublishError(MotorcadeError):
    """Not everything was accepted."""


class Post(NamedTuple):
    """One message."""

    topic: str
    payload: bytes
    properties: Properties = NONE
    retain: bool = False
    weight: int = 1  #: what the pace counts: vehicles of a batch
    name: str = ""  #: what it is called in errors


#: Hears of each message that was acknowledged: the broker's reason, and user properties. It may raise `PublishError`.
Accept = Callable[[Post, ReasonCode, Mapping[str, str]], None]


class Pace:
    """So many per second, and no more to make up for time that was lost.

    What is taken has its time afterwards; `settle` waits for the end of it, so that many short runs in a row are not
    faster than a long one.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    async def take(self, weight: int) -> None:
        """Wait for our turn."""
        if self._rate is None:
            return
        await self.settle()
        self._due = self._clock() + weight / self._rate

    async def settle(self) -> None:
        """Wait until everything that was taken has had its time."""
        if (left := self._due - self._clock()) > 0:
            await self._sleep(left)


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """All bounds."""

    window: int = WINDOW
    patience: float = PATIENCE
    rate: float | None = None  #: weight per second


class ReliablePublisher:
    """Sends once; make a new one for the next time."""

    def __init__(
        self,
        address: BrokerAddress,
        accept: Accept,
        options: PublisherOptions | None = None,
        *,
        first: Sequence[Post] = (),
        name: str = "motorcade",
    ) -> None:
        self.reconnected = 0  #: times that a connection was lost
        self.sent_again = 0  #: messages that were in flight then
        self._address = address
        self._accept = accept
        self._options = options or PublisherOptions()
        self._pace = Pace(self._options.rate)
        self._first = first
        self._name = name
        self._open: dict[int, Post] = {}  # sent, or about to be, and not acknowledged; by number, in order
        self._number = 0
        self._in_flight = 0  # on this connection
        self._lost: ConnectionLostError | None = None  # what ended the connection, as the broker has said it
        self._changed = asyncio.Event()
        self._failure: MotorcadeError | None = None
        self._troubled: float | None = None  # since when nothing was acknowledged, because of the connection

    async def send(self, posts: AsyncIterator[Post]) -> None:
        """Send until all are acknowledged; `PublishError` if one is refused or the broker stays away.

        There is no connection before there is something to send, which may take its time, or never come.
        """
        async for post in posts:
            await self._take(post)
            break
        else:
            return
        delay = FIRST_DELAY
        again = False
        while True:
            try:
                await self._over_one_connection(posts, again)
            except ClientError as error:
                self._check_worth_it(error)
            else:
                await self._pace.settle()
                return
            if self._troubled is None:  # something was acknowledged since
                self._troubled, delay = time.monotonic(), FIRST_DELAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)
            again = True

    def _check_worth_it(self, error: ClientError) -> None:
        """Raise if the next connection cannot do better."""
        if self._failure is not None:
            raise self._failure from error
        reason = getattr(error, "reason", None)
        if reason is not None and reason not in PASSING:
            raise PublishError(f"{self._address}: {broker_words(error)}") from error
        if self._troubled is not None and time.monotonic() - self._troubled > self._options.patience:
            raise PublishError(
                f"{self._address}: nothing was acknowledged for {self._options.patience:g} s; last error: {error}"
            ) from error

    async def _over_one_connection(self, posts: AsyncIterator[Post], again: bool) -> None:
        self._lost = None
        client = await self._address.connect(name=self._name)
        try:
            for post in self._first:
                await self._introduce(client, post)
            if again:
                self.reconnected += 1
                self.sent_again += len(self._open)
            for number in list(self._open):
                await self._hand_over(client, number)
            async for post in posts:
                await self._take(post)
                await self._hand_over(client, self._number)
            await self._until(client, lambda: not self._open)
        finally:
            await client.disconnect()

    async def _take(self, post: Post) -> None:
        await self._pace.take(post.weight)
        self._number += 1
        self._open[self._number] = post

    async def _introduce(self, client: Client, post: Post) -> None:
        """Send first what the other messages depend on."""
        answers: dict[str, str] = {}
        try:
            future = await client.send(post.topic, post.payload, 1, told=partial(_note, answers))
            reason = await _in_time(_result(future), self._options.patience)
        except RefusedError as error:
            raise PublishError(f"{post.name} was refused: {broker_words(error)}") from error
        self._accept(post, reason, answers)

    async def _hand_over(self, client: Client, number: int) -> None:
        await self._until(client, lambda: self._in_flight < self._options.window)
        post = self._open[number]
        answers: dict[str, str] = {}
        future = await client.send(
            post.topic,
            post.payload,
            1,
            retain=post.retain,
            properties=post.properties,
            told=partial(_note, answers),
        )
        assert future is not None, "QoS 1 has one"  # noqa: S101
        self._in_flight += 1
        future.add_done_callback(partial(self._done, number, answers))

    def _done(self, number: int, answers: Mapping[str, str], future: asyncio.Future[ReasonCode]) -> None:
        self._in_flight -= 1
        self._changed.set()
        error = future.exception()
        if isinstance(error, ConnectionLostError):
            self._lost = error
            return  # it stays open
        post = self._open.pop(number)
        try:
            if error is not None:
                raise PublishError(f"{post.name} was refused: {broker_words(_plain(error))}") from error
            self._accept(post, future.result(), answers)
        except MotorcadeError as failure:
            self._failure = self._failure or failure
        else:
            self._troubled = None

    async def _until(self, client: Client, condition: Callable[[], bool]) -> None:
        """Wait for acknowledgements; raises what has gone wrong meanwhile."""
        while True:
            if self._failure is not None:
                await self._drained(client)
                raise self._failure
            if condition():
                return
            if not self._in_flight:  # the connection has ended, and with it what was in flight
                raise self._lost or ConnectionLostError("the connection was lost")
            self._changed.clear()
            await self._wait(client)

    async def _drained(self, client: Client) -> None:
        """Wait for the acknowledgements of what is in flight, so that they are counted."""
        while self._in_flight:
            self._changed.clear()
            try:
                await self._wait(client)
            except ConnectionLostError:
                return

    async def _wait(self, client: Client) -> None:
        try:
            await _in_time(self._changed.wait(), self._options.patience)
        except ConnectionLostError:
            client.abort()  # it answers pings, perhaps, but nothing else
            raise


async def _in_time(awaited: Awaitable[T], patience: float) -> T:
    try:
        async with asyncio.timeout(patience):
            return await awaited
    except TimeoutError:
        raise ConnectionLostError(f"the broker did not acknowledge anything for {patience:g} s") from None


async def _result(future: asyncio.Future[ReasonCode] | None) -> ReasonCode:
    return ReasonCode.SUCCESS if future is None else await future


def _plain(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else PublishError(repr(error))


def _note(answers: dict[str, str], told: Properties) -> None:
    answers.update(told.user_properties)


async def pulled(items: Iterator[T]) -> AsyncIterator[T]:
    """Yield from a plain iterator, in a thread: while it blocks, the connection stays alive."""
    end = object()
    while (item := await asyncio.to_thread(next, items, end)) is not end:
        yield item  # type: ignore[misc]
