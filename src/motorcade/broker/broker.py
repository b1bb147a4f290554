"""The broker of one node: the flow plane with a clock, an event loop and its connections; what plugins call the hub.

Periodic work runs in `_tick`, four times a second, in bounded steps: session expiry, delayed wills, keep alive,
connect time-outs, stalled writers, unreleased QoS 2 messages.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import resource
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any

import structlog

from motorcade.broker.channel import Channel
from motorcade.broker.connection import Connection, Flusher
from motorcade.broker.effects import RunHook, Steps
from motorcade.broker.limits import LogLimit
from motorcade.broker.publishing import after
from motorcade.broker.pubsub import Copy
from motorcade.broker.router import first_level
from motorcade.broker.session import Session
from motorcade.broker.session_writer import RETRY
from motorcade.broker.state import BrokerState
from motorcade.clock import CLOCK, Clock, time
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.topic import check_topic
from motorcade.extension.hooks import Callback, Chain, Handled
from motorcade.extension.sources import SourceType
from motorcade.storage.ports import StoreError
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.broker")

TICK = 0.25  #: seconds between looks at what is due
LAG_TICK = 0.02  #: seconds between two looks at how late the event loop is
RECHECK_STEP = 100  #: absent sessions whose access is decided again before messages have their turn
MAX_LEVEL = 256  #: characters of these
RELIEF = 0.95  #: of `max_memory`, below which new clients and messages are taken again
MAX_DEPTH = 8  #: messages that hooks may publish because of one another
REFUSALS_LOGGED = 100  #: clients refused, or sent away for what they did, that are logged per window
LOG_WINDOW = 10.0  #: seconds
LISTENERS = 1000  #: first levels of topics whose callbacks are remembered
HELD_LONG = 60.0  #: seconds after which a message that is not acknowledged counts as held
SWEEP_STEP = 2000  #: connections looked at per tick
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  #: seconds


def resident_memory() -> int:
    """Return how many bytes of memory this process takes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - four times a second
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


#: How many messages published by hooks, one because of the other, have led to what runs now. Tasks inherit it.
_depth: ContextVar[int] = ContextVar("depth", default=0)


def _may_begin(filter_: str, level: str) -> bool:
    """Return True if a topic of this first level can match a filter. [MQTT-4.7.2-1]"""
    first = first_level(filter_)
    return first == level or (first in ("+", "#") and not level.startswith("$"))


async def _carry_out(steps: Steps) -> None:
    """Run a conversation that asks hooks and nothing else."""
    answer: Any = None
    try:
        while True:
            effect = steps.send(answer)
            answer = effect.chain.fold(*effect.args, acc=effect.acc) if isinstance(effect, RunHook) else None
            if inspect.isawaitable(answer):
                answer = await answer
    except StopIteration:
        return


class _Waiter:
    """Something the node publishes, waiting for its only receiver."""

    __slots__ = ("done",)

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done

    def caught_up(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Broker:
    """Implements `extension.plugin.Hub`."""

    def __init__(
        self,
        state: BrokerState,
        loop: asyncio.AbstractEventLoop,
        supervisor: Tasks | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.clock = clock
        self.supervisor = supervisor or Tasks()
        self.state = state
        self.loop = loop
        self.flusher = Flusher(state.shared.dirty, state.stats, loop)
        self.started = time()
        self.connections: set[Connection] = set()
        self.refusals = LogLimit(REFUSALS_LOGGED, LOG_WINDOW)
        self._loops = LogLimit(1, LOG_WINDOW)
        self.lag = [0] * (len(LAG_BUCKETS) + 1)  #: histogram of how late the event loop was
        self.lag_sum = 0.0
        self._by_listener: Counter[str] = Counter()
        self._listener_limits: dict[str, int] = {}
        self._sweep: list[Connection] = []
        self._timer: asyncio.TimerHandle | None = None
        self._lag_timer: asyncio.TimerHandle | None = None
        self._publishing: set[asyncio.Task[None]] = set()
        self.holding = self._holding = 0  #: clients that hold a message for long; of the last round, and of this one
        self.gauges: Callable[[], Mapping[str, float]] = dict  #: figures of plugins; set by the node
        self.stored: Callable[[], int] = int  #: messages waiting in the store; set by the node
        self._rules: Chain | None = state.hooks.client_authorize
        self._listeners: dict[tuple[str, str], tuple[Callback, ...]] = {}  # see `_listening`
        state.hooks.on_change(self._hooks_changed)
        state.shared.soon, state.shared.later = loop.call_soon, loop.call_later
        state.shared.sources.on_change(self._sources_changed)

    # -- connections

    def limit_listener(self, kind: str, most: int) -> None:
        """Allow at most so many connections through listeners of a kind."""
        if most:
            self._listener_limits[kind] = most

    def add(self, connection: Connection, host: str) -> bool:
        """Add a new network connection; False if it is not wanted."""
        state = self.state
        kind = connection.listener
        state.stats.connections_accepted += 1
        if not state.networks.admits(host):
            state.refuse("network")
            return False
        limit = state.limits.max_connections
        if limit and state.connections >= limit + 1000:  # some are let in far enough to be told why not
            state.refuse("max_connections")
            return False
        if kind in self._listener_limits and self._by_listener[kind] >= self._listener_limits[kind]:
            state.refuse("max_connections")
            return False
        state.connections += 1
        self._by_listener[kind] += 1
        self.connections.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a network connection that is gone."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.state.connections -= 1
            self._by_listener[connection.listener] -= 1
            self.state.stats.connections_closed += 1

    # -- time

    def start(self) -> None:
        """Begin the periodic work."""
        self._schedule()
        self._measure(self.loop.time())

    def _schedule(self) -> None:
        self._timer = self.loop.call_later(TICK, self._tick)

    def _measure(self, planned: float) -> None:
        """Measure how late the event loop is: everything that holds it up shows here."""
        now = self.loop.time()
        late = max(0.0, now - planned)
        self.lag_sum += late
        self.lag[bisect_left(LAG_BUCKETS, late)] += 1
        self._lag_timer = self.loop.call_later(LAG_TICK, self._measure, now + LAG_TICK)

    def _tick(self) -> None:
        self._schedule()
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - what failed is left; the next tick looks at the rest
            self.supervisor.note("broker.tick", error)

    def _work(self) -> None:
        step = self.clock.check()
        if step:
            log.warning(
                "clock_stepped",
                seconds=round(step, 3),
                offset=round(self.clock.offset, 3),
                consequence="lives of sessions and messages go on evenly; times that are shown draw near slowly",
            )
        for will in self.state.registry.due(time()):
            self.publish_will(will)
        if not self._sweep:
            self._sweep = list(self.connections)
            self.holding, self._holding = self._holding, 0
        now, wall = monotonic(), time()
        self._weigh()
        self.state.flapping.sweep(wall)
        for _ in range(min(len(self._sweep), max(SWEEP_STEP, len(self.connections) // 4))):
            self._look_at(self._sweep.pop(), now, wall)
        for event, limit in (("clients_refused", self.refusals), ("hooks_publish_in_a_loop", self._loops)):
            if left_out := limit.over(now):
                log.warning(event, more=left_out)
        if self.state.shared.dirty:
            self.flusher.later()

    def _weigh(self) -> None:
        """Take nothing new while this process takes more memory than it may."""
        state = self.state
        most = state.limits.max_memory
        if not most:
            return
        taken = resident_memory()
        full = taken > (most * RELIEF if state.full else most)
        if full is not state.full:
            log.warning("memory_full" if full else "memory_free", taken=taken, max_memory=most)
            state.fill(full)

    def _look_at(self, connection: Connection, now: float, wall: float) -> None:
        """End a connection that has been silent or stuck for too long."""
        if connection.closing:
            return
        state, limits = self.state, self.state.limits
        session = connection.session
        if session is None:
            asked = connection.asked
            if asked is not None:
                if limits.auth_timeout and now - asked > limits.auth_timeout:
                    state.refuse("auth_timeout")
                    connection.lose_patience()
            elif limits.connect_timeout and now - connection.opened > limits.connect_timeout:
                state.refuse("connect_timeout")
                connection.close("no CONNECT in time")
            return
        if session.held_for(now) > HELD_LONG:
            self._holding += 1
        if connection.stalled_since is not None:  # nothing is read from it, so its keep alive says nothing
            if connection.stalled(now) > limits.stall_timeout > 0:
                state.refuse("stall_timeout")
                connection.abort("takes no data")
        elif connection.deadline and now - connection.seen > connection.deadline and not connection.held:
            state.refuse("keep_alive")
            connection.end(ReasonCode.KEEP_ALIVE_TIMEOUT, "nothing heard within the keep alive time")  # [MQTT-3.1.2-22]
        elif connection.expires_at is not None and self.clock.wall() >= connection.expires_at:
            connection.end(ReasonCode.NOT_AUTHORIZED, "the credentials have expired")
        elif session.awaiting and state.session_options.await_rel_timeout:
            forgotten = session.forget_unreleased(wall - state.session_options.await_rel_timeout)
            state.stats.refused["await_rel_timeout"] += len(forgotten)
            if forgotten and session.durable is not None and state.store is not None:
                state.store.release(session, forgotten)

    def send_away(self, most: int) -> int:
        """Send at most so many clients away, while no new one is let in; how many were."""
        reason = ReasonCode.SERVER_SHUTTING_DOWN if self.state.relay is None else self.state.elsewhere
        going = [one for one in self.connections if one.session is not None and not one.closing][:most]
        for connection in going:
            connection.end(reason, self.state.draining)
        return len(going)

    async def drain(self, patience: float, rate: float = math.inf) -> None:
        """Send all clients away and wait until their sockets are empty, for a bounded time.

        `rate`: clients per second, at least; more if not all would be gone after half of the time.
        """
        self.state.draining = "this node is shutting down"
        for connection in list(self.connections):
            if connection.session is None:
                connection.close("shutting down")
        began = monotonic()
        rate = max(rate, 2 * len(self.connections) / patience) if patience > 0 else math.inf
        sent = 0
        while True:
            elapsed = monotonic() - began
            allowed = len(self.connections) if rate == math.inf else int(rate * elapsed) + 1 - sent
            sent += self.send_away(allowed)
            if not self.connections or elapsed >= patience:
                break
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.abort("shutting down")
        if self._publishing:
            await asyncio.wait(self._publishing, timeout=patience)
        for timer in (self._timer, self._lag_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.sleep(0)

    # -- hub

    @property
    def node(self) -> str:
        """The name of this node."""
        return self.state.options.node

    async def publish(self, message: Message) -> int:
        """Publish in the name of the node: hooks, then routing. Returns how many clients it went to."""
        check_topic(message.topic)
        if not message.guid:
            message.timestamp = message.timestamp or time()
            message.guid = self.state.guids.next(int(message.timestamp * 1_000_000))
        depth = _depth.get()
        if depth >= MAX_DEPTH:
            self._cut(message)
            return 0
        token = _depth.set(depth + 1)
        try:
            return await self._publish(message, None)
        finally:
            _depth.reset(token)

    def _cut(self, message: Message) -> None:
        """Drop a message that hooks have set off in a circle, and say whose they are."""
        self.state.stats.dropped["hook_loop"] += 1
        if self._loops.admits(monotonic()):
            chain = self.state.pubsub.route(message.topic).publish_hooks
            plugins = sorted({callback.owner for callback in chain.callbacks}) if chain is not None else []
            text = "a hook publishes what sets it off again; the message is dropped"
            log.error("hook_loop", plugins=plugins, topic=message.topic[:MAX_LEVEL], depth=MAX_DEPTH, detail=text)

    async def _publish(self, message: Message, client: ClientInfo | None, *, to_end: bool = False) -> int:
        """Publish; `to_end`: return when it is known what became of what plugins store of it."""
        given = message
        await self._match(message.topic)
        route = self.state.pubsub.route(message.topic)
        chain = route.retain_hooks if message.retain else route.publish_hooks
        if chain is not None:
            result = chain.fold(client, acc=message)
            if inspect.isawaitable(result):
                result = await result
            if isinstance(result, Handled):
                if to_end:
                    await _stored(given)
                return 0
            if result.topic != message.topic and not await self._may_go_to(result.topic, client):
                self.state.stats.dropped["not_authorized"] += 1
                return 0
            if result.topic != message.topic:
                await self._match(result.topic)
            message = result
        only = self.state.pubsub.route(message.topic).only
        if only is not None and only.behind and message.qos:
            await self._wait_for(only)
        relay = self.state.relay
        if message.qos and relay is not None:
            while (effect := relay.obstacle(message.topic)) is not None:
                await effect.commit
                await asyncio.sleep(0)
        copies = await self._keep(message)
        count = self.state.pubsub.publish(message, time(), copies)
        self.flusher.later()
        confirmed = relay.confirm() if message.qos and relay is not None else None
        if confirmed is not None:
            await confirmed
        if to_end:
            await _stored(message)
            await _stored(given)
        return count

    async def _match(self, topic: str) -> None:
        """Find the receivers of a topic, in several turns if there are very many filters that may match."""
        pubsub = self.state.pubsub
        matching = pubsub.begin(topic)
        if matching is None:
            return
        try:
            await asyncio.sleep(0)
            while not pubsub.go_on(matching):  # noqa: ASYNC110 - it is the work itself, in steps
                await asyncio.sleep(0)
        finally:
            pubsub.give_up(matching)

    async def _wait_for(self, session: Session) -> None:
        """Make the node's own publishing wait, too, for a receiver that is behind (session, rule 4)."""
        waiter = _Waiter(self.loop.create_future())
        if session.waiting is None:
            session.waiting = []
            self.loop.call_later(session.shared.options.patience, session.lose_patience, session.waiting)
        session.waiting.append(waiter)
        await waiter.done

    async def _keep(self, message: Message) -> list[Copy] | None:
        """Store what durable receivers get."""
        store = self.state.store
        copies = self.state.pubsub.to_keep(message) if store is not None else None
        lasting = [copy for copy in copies or () if copy.lasting]
        if store is not None and lasting:
            self.state.stats.routed += len(lasting)
            try:
                # What the node publishes by itself it may repeat after a crash (wills): its guid tells.
                await store.writer.accept(message, lasting, time(), token=message.guid if message.qos == 2 else b"")
            except Exception:
                self.state.stats.dropped["not_stored"] += 1
                raise
        return copies

    async def _may_go_to(self, topic: str, client: ClientInfo | None) -> bool:
        """Return True if a rewritten topic passes the rules too: those of topics, and the access rules of `client`."""
        check_topic(topic, self.state.limits.max_topic_levels)
        chain = self.state.hooks.client_authorize
        if client is None or client.superuser or chain is None:
            return True
        answer = chain.fold(client, "publish", topic, acc=None)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer is True or answer is None

    def publish_will(self, will: Message) -> None:
        """Publish a will, in the name of its client; while all are sent away, to durable sessions only."""
        if self.state.draining and self.state.store is None:
            return
        now = time()
        if will.expires_at is not None:
            will.expires_at += now - will.timestamp  # its life begins now, not with CONNECT
        will.timestamp = now
        client = will.headers.pop("will_of", None)
        owed_by = will.headers.pop("owed_by", None)
        attachments = self.state.store.attachments if self.state.store is not None else None
        over: Commit[None] = Commit()
        if attachments is not None and isinstance(client, ClientInfo):
            attachments.under_way(client.client_id, over)
        work = self._publish_last(
            will,
            client if isinstance(client, ClientInfo) else None,
            owed_by if isinstance(owed_by, Session) else None,
        )
        task = self.loop.create_task(work, name="will")
        self._publishing.add(task)
        task.add_done_callback(self._will_done)
        task.add_done_callback(lambda _: over.finish())

    async def _publish_last(self, will: Message, client: ClientInfo | None, session: Session | None) -> None:
        """Publish a will; that of a durable session again and again until it is stored for those who get it."""
        while True:
            try:
                store = self.state.store
                if session is None or store is None or await store.take_will(session):
                    await self._publish(will, client, to_end=self.state.relay is not None)
                break
            except StoreError as error:
                if session is None:
                    raise
                log.error("will_not_stored", client_id=session.client.client_id, error=str(error))  # noqa: TRY400
                await asyncio.sleep(RETRY)
            except Exception as error:
                # It would fail again: what waits for the will must not wait for ever.
                if session is None:
                    raise
                self.supervisor.note("broker.will", error, client_id=session.client.client_id)
                self.state.stats.dropped["will_failed"] += 1
                break
        if session is not None:
            self.state.registry.paid(session)

    def _will_done(self, task: asyncio.Task[None]) -> None:
        self._publishing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if not isinstance(error, StoreError):  # counted already
                self.state.stats.dropped["will_failed"] += 1
            self.supervisor.note("broker.will", error)

    def heard(self, topic: str, besides: str = "") -> bool:
        """Return True if a subscriber, or a plugin but this one, would get a message of this topic now."""
        for callback in self._listening(topic, besides):
            if callback.concerns(topic):
                return True
        return self.state.pubsub.heard(topic)

    def heard_below(self, level: str, besides: str = "") -> bool:
        """Return the same for all topics below this first level, which begins with `$`."""
        return bool(self._listening(level, besides)) or self.state.pubsub.heard_below(level)

    def _listening(self, topic: str, besides: str) -> tuple[Callback, ...]:
        """Return callbacks of `message.publish` that may want a topic, by its first level; kept until hooks change."""
        key = first_level(topic), besides
        found = self._listeners.get(key)
        if found is None:
            found = tuple(
                callback
                for callback in self.state.hooks.lookup("message.publish")
                if callback.owner != besides
                and not callback.retained_only
                and (not callback.topics or any(_may_begin(filter_, key[0]) for filter_ in callback.topics))
            )
            if len(self._listeners) >= LISTENERS:
                self._listeners.clear()
            if len(key[0]) <= MAX_LEVEL:
                self._listeners[key] = found
        return found

    def tell(self, client_id: str, what: object) -> bool:
        """Send `info(what)` to every generic source of a client; False if it is not connected, or has none."""
        session = self.state.registry.sessions.get(client_id)
        return session is not None and session.scheduler is not None and session.scheduler.tell(what)

    def _sources_changed(self, kind: SourceType, added: bool) -> None:
        """Bring the clients that are here up to date; the others hear of it when they come back."""
        if not added:
            for session in self.state.registry.sessions.values():
                if session.scheduler is not None:
                    session.scheduler.removed(kind)
                    session.put_down()
                    session.go_on()  # others may have room now
            return
        self.supervisor.start(partial(self._offer_source, kind), f"broker.source.{kind.name}", loop=self.loop)

    async def _offer_source(self, kind: SourceType) -> None:
        for number, session in enumerate(list(self.state.registry.sessions.values())):
            if kind not in self.state.shared.sources.kinds:
                return
            if session.greeted and session.subscriptions:
                session.schedule_sources().added(kind)
                session.put_down()
                session.go_on()
            if number % RECHECK_STEP == RECHECK_STEP - 1:
                await asyncio.sleep(0)

    async def disconnect(self, client_id: str, reason: ReasonCode = ReasonCode.ADMINISTRATIVE_ACTION) -> bool:
        """Send a client away; False if it is not connected."""
        session = self.state.registry.sessions.get(client_id)
        if session is None or session.link is None:
            return False
        session.link.end(reason, "disconnected by an operator")
        return True

    def client(self, client_id: str) -> ClientInfo | None:
        """Return a connected client by its id, or None."""
        session = self.state.registry.sessions.get(client_id)
        return session.client if session is not None and session.link is not None else None

    def clients(self) -> Iterable[ClientInfo]:
        """Return all connected clients, as they are now."""
        return [s.client for s in self.state.registry.sessions.values() if s.link is not None]

    def last_seen(self, client_id: str) -> float:
        """Return when a client's connection ended, or began if it is connected; 0: it has no session."""
        session = self.state.registry.sessions.get(client_id)
        if session is None:
            return 0.0
        return session.connected_at if session.link is not None else session.disconnected_at or 0.0

    async def seen_anywhere(self, client_id: str) -> float:
        """Return the same if its session is here, or sleeps in the store; a `StoreError` may be raised."""
        here, store = self.last_seen(client_id), self.state.store
        return here if here or store is None else await store.seen_at(client_id)

    def arriving(self, client_id: str) -> Commit[None] | None:
        """Return what a client that has come from another node waits for; None: nothing."""
        attachments = self.state.store.attachments if self.state.store is not None else None
        return attachments.drained(client_id) if attachments is not None else None

    def under_way(self, client_id: str, commit: Commit[Any]) -> None:
        """Note something that a plugin writes about a client, until its outcome is known."""
        attachments = self.state.store.attachments if self.state.store is not None else None
        if attachments is not None:
            attachments.under_way(client_id, commit)

    def recheck_access(self) -> None:
        """Forget cached access decisions, and take away subscriptions that are no longer allowed."""
        for connection in list(self.connections):
            connection.recheck()
        self.supervisor.start(self._recheck_absent, "broker.recheck", loop=self.loop)

    async def _recheck_absent(self) -> None:
        """Recheck sessions without a connection, too, a few at a time; a fault in one leaves no other its rights."""
        failure: Exception | None = None
        for number, session in enumerate(list(self.state.registry.sessions.values())):
            if session.link is None and not session.ended:
                try:
                    await _carry_out(Channel(self.state, session.client).recheck(session))
                except Exception as error:  # noqa: BLE001 - raised when the others are done
                    failure = failure or error
            if number % RECHECK_STEP == RECHECK_STEP - 1:
                await asyncio.sleep(0)
        if failure is not None:
            raise failure

    def _hooks_changed(self) -> None:
        self._listeners.clear()
        for connection in self.connections:
            if connection.channel is not None:
                connection.channel.context.use_routes()
        rules, self._rules = self._rules, self.state.hooks.client_authorize
        if self._rules is not None and self._rules is not rules:
            self.loop.call_soon(self.recheck_access)  # other rules: what was allowed may not be any more
        if self.state.hooks.client_authenticate is None:
            self.loop.call_soon(self._only_this_machine)

    def _only_this_machine(self) -> None:
        """Send away clients of other machines when no access control is left: only this machine could connect now."""
        if self.state.hooks.client_authenticate is None and not self.state.draining:
            for connection in list(self.connections):
                if connection.channel is not None and not connection.channel.client.is_loopback:
                    connection.end(ReasonCode.NOT_AUTHORIZED, "no access control is configured any more")

    def now(self) -> float:
        """Return the seconds since the epoch by the node's clock, which never steps: for intervals."""
        return time()

    def wall(self) -> float:
        """Return the seconds since the epoch by the system's clock: for what others have dated."""
        return self.clock.wall()

    def statistics(self) -> Mapping[str, float]:
        """Return the node's counters and gauges by name."""
        state = self.state
        stats, registry = state.stats, state.registry
        total = len(registry.sessions)
        return {
            "uptime": time() - self.started,
            "clock_steps": self.clock.steps,
            "clock_offset": self.clock.offset,
            "connections": state.connections,
            "connections_accepted": stats.connections_accepted,
            "connections_closed": stats.connections_closed,
            "long_matches": stats.long_matches,
            "clients_connected": registry.connected,
            "clients_disconnected": total - registry.connected,
            "clients_total": total,
            "clients_maximum": registry.maximum,
            "clients_expired": stats.expired_sessions,
            "clients_holding": self.holding,
            "packet_ids_held": stats.moved_ids,
            "bytes_received": stats.bytes_received,
            "bytes_sent": stats.bytes_sent,
            "messages_received": stats.packets_received,
            "messages_sent": stats.packets_sent,
            "messages_stored": state.shared.queued + self.stored(),
            "messages_stored_bytes": state.shared.queued_bytes,
            "session_queued": state.shared.queued,
            "session_stored": state.shared.kept,
            "publish_routed": stats.routed,
            "publish_restored": stats.restored,
            "store_sent": stats.store_sent,
            "store_delivered": stats.store_delivered,
            "publish_received": stats.publish_received,
            "publish_abandoned": stats.abandoned,
            "publish_sent": stats.publish_sent,
            "publish_dropped": sum(stats.dropped.values()) - stats.dropped["no_subscribers"],
            "publish_bytes_received": stats.publish_bytes_received,
            "publish_bytes_sent": stats.publish_bytes_sent,
            "subscriptions": state.pubsub.subscriptions,
            "shared_subscriptions": state.pubsub.shared_subscriptions,
            "sockets_opened": stats.connections_accepted,
            **self.gauges(),
        }


async def _stored(message: Message) -> None:
    """Wait until it is known what became of what plugins store of a message."""
    for commit in after(message):
        with suppress(MotorcadeError):  # the plugin has told of it
            await commit
