"""Hook points: where plugins see and change what the broker does.

A hook point holds a chain of callbacks, higher priority first, ties in order of registration. It is either

    FOLD     the last argument is an accumulator. A callback answers
                None           continue, accumulator unchanged
                Continue(acc)  continue with a new accumulator
                Stop(acc)      end the chain with a new accumulator
                STOP           end the chain, accumulator unchanged
             A fold callback may be a coroutine function (but not of message.nack); then the client it works for
             waits, no other.
    OBSERVE  answers are ignored, except STOP, which ends the chain. Observers are plain functions: they run
             between two packets, so they must be quick.

A callback that raises (or runs into its time-out) is counted and logged. At access points (`closed`) the chain
then ends with the point's refusal; elsewhere the callback is skipped.

When a callback of `client.authorize` is added, connected clients are checked again: subscriptions and wills that it
refuses, or fails to judge, are taken away.

The broker reads a point as an attribute (`hooks.message_publish`), which is None without callbacks:
an unused point costs one load and one comparison. Register callbacks of `message.publish` with `topics`
or `retained_only` where possible: messages they do not concern stay on the broker's fast path.

| point | arguments | accumulator or nothing |
|---|---|---|
| client.connect | client | ReasonCode; Stop with an error code refuses the client before authentication |
| client.authenticate | client, credentials | Decision or None; Stop(Allow/Deny/Challenge) decides, None passes on |
| client.authorize | client, "publish" or "subscribe", topic or filter | bool or None; Stop(True/False) decides |
| client.subscribe | client, user properties | list of Subscription, ReasonCode or Verdict, one per filter asked for |
| client.unsubscribe | client, user properties | list of filters |
| client.connected | client | |
| client.disconnected | client, reason | |
| session.created / .resumed / .disconnected / .takenover / .discarded | client | |
| session.terminated | client, why (str) | |
| session.left | client: its session sleeps, or another node has it; only with several nodes | |
| session.subscribed | client, Subscription, is_new | |
| session.unsubscribed | client, filter | |
| message.publish | client, or None for the node | Message, or Handled: not routed, the publisher hears the answer |
| message.nack | client, Message | bool; Stop(True) takes a message back that does not fit the client's window |
| message.delivered | client, Message | called when it is handed to the connection |
| message.acked | client, Message, ReasonCode | PUBACK or PUBREC |
| delivery.completed | client, Message, ReasonCode | PUBACK, PUBCOMP, or written (QoS 0) |
| message.dropped | client or None, Message, why (str) | |
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from motorcade.commit import Commit, commit_of
from motorcade.core import topic as topics_
from motorcade.core.client import ClientInfo
from motorcade.core.errors import HookError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 1.0  #: seconds an asynchronous callback may take
MAX_LEVEL = 256  #: characters of a first level that is remembered
MAX_LEVELS = 1000  #: first levels of topics of which is remembered who may want them


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on with this accumulator."""

    value: Any


@dataclass(frozen=True, slots=True)
class Stop:
    """End the chain with this accumulator."""

    value: Any


class _StopUnchanged:
    __slots__ = ()


STOP: Final = _StopUnchanged()  #: end the chain, accumulator unchanged


@dataclass(frozen=True, slots=True)
class Allow:
    """`client.authenticate`: let the client in."""

    superuser: bool = False
    username: str | None = None  #: replaces what the client said, e.g. by the name in its certificate
    client_id: str | None = None  #: binds the client id to the identity
    attributes: dict[str, str] = field(default_factory=dict)
    expires_at: float | None = None  #: seconds since the epoch; the client is disconnected then
    data: bytes | None = None  #: enhanced authentication: last data for the client


@dataclass(frozen=True, slots=True)
class Deny:
    """`client.authenticate`: refuse the client."""

    reason: ReasonCode = ReasonCode.BAD_USER_NAME_OR_PASSWORD
    detail: str = ""  #: for the log, and for the client as reason string


@dataclass(frozen=True, slots=True)
class Challenge:
    """`client.authenticate`: enhanced authentication goes on with one more step."""

    data: bytes | None = None


Decision = Allow | Deny | Challenge


@dataclass(frozen=True, slots=True)
class Verdict:
    """`client.subscribe`: what becomes of one filter, with a word to the client (MQTT 5) about it."""

    outcome: Subscription | ReasonCode
    detail: str


AFTER: Final = "acknowledge_after"  #: header of a message


class Pending(list[Any]):
    """The commits and futures that the answer to a publisher waits for."""

    taken = False  #: the message will be delivered later


def acknowledge_after(message: Message, done: Commit[Any] | asyncio.Future[Any], *, taken: bool = False) -> None:
    """Acknowledge a message to its publisher, from `message.publish`, only when `done` is done.

    If `done` fails, it hears that the message is not taken: a `StoreFullError` (any error that is `certain` and not
    `away`) refuses it, after any other error the connection is closed, so that the client sends it again. Nothing waits
    meanwhile, not even the publisher's next packets. `taken`: it will be delivered later, so the publisher is not told
    that it has no subscribers.
    """
    pending = message.headers.setdefault(AFTER, Pending())
    assert isinstance(pending, Pending)  # noqa: S101 - only this function writes this header
    pending.append(done if isinstance(done, Commit) else commit_of(done))
    pending.taken = pending.taken or taken


@dataclass(frozen=True, slots=True)
class Handled:
    """`message.publish`: the plugin has taken the message; do not route it, answer the publisher with this."""

    reason: ReasonCode = ReasonCode.SUCCESS  #: an error code refuses: MQTT 5 hears it, MQTT 3 is disconnected
    reason_string: str | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    #: Asked for the answer when what `acknowledge_after` was told to wait for is done; None: this is the answer.
    outcome: Callable[[], Handled] | None = None


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    fold: bool
    refusal: object = None  #: for access points: accumulator when a callback fails
    closed: bool = False
    waits: bool = True  #: its callbacks may be asynchronous


_DENIED = Deny(ReasonCode.NOT_AUTHORIZED, "the check failed")
POINTS: Final = {
    point.name: point
    for point in (
        _Point("client.connect", fold=True, refusal=ReasonCode.UNSPECIFIED_ERROR, closed=True),
        _Point("client.authenticate", fold=True, refusal=_DENIED, closed=True),
        _Point("client.authorize", fold=True, refusal=False, closed=True),
        _Point("client.subscribe", fold=True),
        _Point("client.unsubscribe", fold=True),
        _Point("client.connected", fold=False),
        _Point("client.disconnected", fold=False),
        _Point("session.created", fold=False),
        _Point("session.subscribed", fold=False),
        _Point("session.unsubscribed", fold=False),
        _Point("session.resumed", fold=False),
        _Point("session.disconnected", fold=False),
        _Point("session.discarded", fold=False),
        _Point("session.takenover", fold=False),
        _Point("session.terminated", fold=False),
        _Point("session.left", fold=False),
        _Point("message.publish", fold=True),
        _Point("message.delivered", fold=False),
        _Point("message.acked", fold=False),
        _Point("message.nack", fold=True, waits=False),
        _Point("message.dropped", fold=False),
        _Point("delivery.completed", fold=False),
    )
}


#: `message.publish`: a callback may take plain messages as they come (client, topic, payload, guid). This is called in
#: place of the callback for a message of QoS 1 without properties that is not retained, if no other callback wants its
#: topic. It takes the message, and answers with what the publisher's acknowledgement waits for, as if the callback had
#: told `acknowledge_after` and answered `Handled()`; or it answers None, and the callback is called. Messages of one
#: read that wait for the same commit, or future, are answered together.
Plain = Callable[[ClientInfo, str, bytes, bytes], "Commit[Any] | asyncio.Future[Any] | None"]


@dataclass(eq=False, slots=True)
class Callback:
    """One registered function. `errors` counts how often it raised or timed out."""

    function: Callable[..., Any]
    priority: int
    owner: str  #: name of the plugin, for logs and counters
    topics: tuple[str, ...] = ()  #: `message.publish` only: called for topics matching one of these; empty is all
    retained_only: bool = False  #: `message.publish` only: called for messages with the retain flag
    timeout: float = DEFAULT_TIMEOUT
    takes: bool = False  #: `message.publish` only: it handles all messages of its topics, no subscriber ever gets one
    errors: int = 0
    plain: Plain | None = None  #: `message.publish` only

    def take_plain(
        self, client: ClientInfo, topic: str, payload: bytes, guid: bytes
    ) -> Commit[Any] | asyncio.Future[Any] | None:
        """Let it take a plain message; None if it does not, or fails to."""
        try:
            return self.plain(client, topic, payload, guid) if self.plain is not None else None
        except Exception:
            self.errors += 1
            log.exception("hook_failed point=message.publish plugin=%s", self.owner)
            return None

    def concerns(self, topic: str) -> bool:
        """Return True if this callback wants messages of a topic."""
        return not self.topics or any(topics_.matches(f, topic) for f in self.topics)

    def may_concern(self, level: str) -> bool:
        """Return True if this callback may want messages of some topics that begin with a level."""
        return not self.topics or any(f.split("/", 1)[0] in (level, "+", "#") for f in self.topics)


class Chain:
    """The callbacks of one hook point, in order."""

    __slots__ = ("callbacks", "point")

    def __init__(self, point: _Point, callbacks: tuple[Callback, ...]) -> None:
        self.point = point
        self.callbacks = callbacks

    def notify(self, *args: object) -> None:
        """Tell all observers."""
        for callback in self.callbacks:
            try:
                if callback.function(*args) is STOP:
                    return
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(callback)

    def fold(self, *args: object, acc: Any) -> Any:
        """Run the chain. Returns the accumulator, or an awaitable of it as soon as a callback is asynchronous."""
        for index, callback in enumerate(self.callbacks):
            try:
                answer = callback.function(*args, acc)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                if self._failed(callback):
                    return self.point.refusal
                continue
            if inspect.isawaitable(answer):
                return self._fold_waiting(index, answer, args, acc)
            if answer is None:
                continue
            if answer is STOP:
                return acc
            if isinstance(answer, Stop):
                return answer.value
            if not isinstance(answer, Continue):
                if self._misspoke(callback, answer):
                    return self.point.refusal
                continue
            acc = answer.value
        return acc

    async def _fold_waiting(self, index: int, answer: Awaitable[Any], args: tuple[object, ...], acc: Any) -> Any:
        """Return the rest of `fold`, from the first callback that must be waited for."""
        callback = self.callbacks[index]
        rest = Chain(self.point, self.callbacks[index + 1 :])
        try:
            result = await asyncio.wait_for(answer, callback.timeout)
        except (Exception, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # we are to stop, not the callback
            if self._failed(callback):
                return self.point.refusal
            result = None
        if result is STOP:
            return acc
        if isinstance(result, Stop):
            return result.value
        if isinstance(result, Continue):
            acc = result.value
        elif result is not None and self._misspoke(callback, result):
            return self.point.refusal
        final = rest.fold(*args, acc=acc)
        return await final if inspect.isawaitable(final) else final

    def _misspoke(self, callback: Callback, answer: object) -> bool:
        """Count and log an answer that is none; True if the chain must end with the refusal."""
        callback.errors += 1
        kind = type(answer).__name__
        log.error("hook_bad_answer point=%s plugin=%s answer=%s", self.point.name, callback.owner, kind)
        return self.point.closed

    def _failed(self, callback: Callback) -> bool:
        """Count and log a failure; True if the chain must end with the refusal."""
        callback.errors += 1
        log.error("hook_failed point=%s plugin=%s", self.point.name, callback.owner, exc_info=True)  # noqa: LOG014 - called while it is handled
        return self.point.closed


def _attribute(point: str) -> str:
    return point.replace(".", "_")


class Hooks:
    """All hook points of one node. Each point is an attribute: a `Chain`, or None without callbacks."""

    __slots__ = (*(_attribute(name) for name in POINTS), "_by_level", "_on_change", "_publish_chains", "_taken")

    client_connect: Chain | None
    client_authenticate: Chain | None
    client_authorize: Chain | None
    client_subscribe: Chain | None
    client_unsubscribe: Chain | None
    client_connected: Chain | None
    client_disconnected: Chain | None
    session_created: Chain | None
    session_subscribed: Chain | None
    session_unsubscribed: Chain | None
    session_resumed: Chain | None
    session_disconnected: Chain | None
    session_discarded: Chain | None
    session_takenover: Chain | None
    session_terminated: Chain | None
    session_left: Chain | None
    message_publish: Chain | None
    message_delivered: Chain | None
    message_acked: Chain | None
    message_nack: Chain | None
    message_dropped: Chain | None
    delivery_completed: Chain | None

    def __init__(self) -> None:
        self._on_change: list[Callable[[], None]] = []
        # Of `message.publish`: who may want topics of a first level, and the chains of those who want the same topics.
        self._by_level: dict[str, tuple[Callback, ...]] = {}
        self._taken: dict[str, bool] = {}
        self._publish_chains: dict[tuple[Callback, ...], tuple[Chain | None, Chain | None]] = {}
        for name in POINTS:
            setattr(self, _attribute(name), None)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this whenever a callback is added or removed (the router drops its cached routes)."""
        self._on_change.append(callback)

    def add(self, point: str, callback: Callback) -> None:
        """Register a callback; `HookError` if the point does not exist or the callback does not fit it."""
        if point not in POINTS:
            raise HookError(f"there is no hook point {point!r}; there are: {', '.join(POINTS)}")
        waits = POINTS[point].fold and POINTS[point].waits
        if not waits and inspect.iscoroutinefunction(callback.function):
            raise HookError(f"{callback.owner}: a callback of {point} must be a plain function, not a coroutine")
        if (callback.topics or callback.retained_only or callback.takes) and point != "message.publish":
            raise HookError(f"{callback.owner}: topics, retained_only and takes are for message.publish, not {point}")
        for filter_ in callback.topics:
            topics_.check_filter(filter_)
        present = self.lookup(point)
        if any(c.function == callback.function for c in present):
            raise HookError(f"{callback.owner}: this callback is registered for {point} already")
        self._set(point, sorted((*present, callback), key=lambda c: -c.priority))

    def remove(self, point: str, function: Callable[..., Any]) -> bool:
        """Take a callback away; False if it was not there."""
        present = self.lookup(point)
        kept = [c for c in present if c.function != function]
        self._set(point, kept)
        return len(kept) < len(present)

    def remove_owner(self, owner: str) -> None:
        """Take away everything a plugin has registered."""
        for point in POINTS:
            present = self.lookup(point)
            kept = [c for c in present if c.owner != owner]
            if len(kept) < len(present):
                self._set(point, kept)

    def lookup(self, point: str) -> tuple[Callback, ...]:
        """Return the callbacks of a point, in the order in which they run."""
        chain: Chain | None = getattr(self, _attribute(point))
        return chain.callbacks if chain else ()

    def publish_chains(self, topic: str) -> tuple[Chain | None, Chain | None]:
        """Return the callbacks of `message.publish` that want a topic: those of ordinary and of retained messages."""
        wanted = tuple([c for c in self._who_may_want(topic) if c.concerns(topic)])
        chains = self._publish_chains.get(wanted)
        if chains is None:
            ordinary = tuple(c for c in wanted if not c.retained_only)
            point = POINTS["message.publish"]
            chains = (Chain(point, ordinary) if ordinary else None), (Chain(point, wanted) if wanted else None)
            self._publish_chains[wanted] = chains
        return chains

    def are_taken(self, level: str) -> bool:
        """Return True if all topics below a first level have the same callbacks, of which one handles all messages."""
        taken = self._taken.get(level)
        if taken is None:
            whole = f"{level}/#"
            wanted = self._who_may_want(level)
            taken = all(not c.topics or whole in c.topics for c in wanted) and any(
                c.takes and not c.retained_only and whole in c.topics for c in wanted
            )
            if len(level) <= MAX_LEVEL:
                self._taken[level] = taken
        return taken

    def _who_may_want(self, topic: str) -> tuple[Callback, ...]:
        level = topic.split("/", 1)[0]
        found = self._by_level.get(level)
        if found is None:
            if len(self._by_level) >= MAX_LEVELS:
                self._by_level.clear()
                self._taken.clear()
            found = tuple(c for c in self.lookup("message.publish") if c.may_concern(level))
            if len(level) <= MAX_LEVEL:
                self._by_level[level] = found
        return found

    def _set(self, point: str, callbacks: list[Callback]) -> None:
        setattr(self, _attribute(point), Chain(POINTS[point], tuple(callbacks)) if callbacks else None)
        self._by_level.clear()
        self._taken.clear()
        self._publish_chains.clear()
        for changed in self._on_change:
            changed()
