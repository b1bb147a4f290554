"""Whole members of a cluster in one process, in virtual time: real links and brokers, machines that stop and break.

    world = ClusterWorld(3)
    with world:
        world.wait(5.0)                         all are LIVE
        world.hosts[0].stop(steps=3)            SIGSTOP after three more of its callbacks
        world.cut("n1", "n2"); world.heal()     bytes from n1 to n2 stand still, until they go on
        world.hosts[1].kill(); world.hosts[1].start()
        world.cells.forget(2, 5, world.now)     a fail-over of a cell forgets its last calls

    ClusterWorld   time, what is under way, the machines            CellStore   the store, see there
      Host         a machine: clocks, one process after the other
        HostLoop   the event loop of a process
          HostNode one incarnation of a node, put together as `node.py` does it

Rule 1: what happens at one time happens in the order in which it was set off; every process goes on until it has
        nothing to do. Nothing that leaves a process arrives at another one at the same time.
Rule 2: a process that stands still has all that comes for it when it goes on; its clocks have gone on, too, unless its
        machine was suspended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import events
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast
from unittest.mock import patch

import structlog

from motorcade.broker.addressing import Addressing
from motorcade.broker.attachments import Attachments
from motorcade.broker.broker import Broker
from motorcade.broker.connection import Connection
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.relay import Relay
from motorcade.broker.session_store import SessionStore
from motorcade.broker.shared_bans import SharedBans
from motorcade.broker.state import BrokerOptions, BrokerState
from motorcade.broker.steward import Steward
from motorcade.broker.subscription_feed import SubscriptionFeed
from motorcade.clock import Clock as SteadyClock
from motorcade.cluster import member as member_module
from motorcade.cluster import roster as roster_module
from motorcade.cluster.member import ClusterMember, MemberOptions
from motorcade.cluster.options import LinkOptions
from motorcade.cluster.security import LinkSecurity
from motorcade.core.errors import MotorcadeError
from motorcade.core.guid import GuidFactory
from motorcade.extension.cluster import MemberState
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins
from motorcade.storage.ports import Store, StoreError
from motorcade.tasks import Tasks
from tests.support.cell_store import Cell, Cells, CellStore, Work, drawing
from tests.support.virtual import START, Turns, standing

CLUSTER: Final = "fleet"
CELLS: Final = 4
DELAY: Final = 0.001  #: seconds from one process to another
LIMITS: Final = Limits(flapping_count=0, connect_rate=0.0)
SESSION: Final = SessionOptions(await_rel_timeout=0.0)
ADDRESSED: Final = ("a/{client}/#",)  #: filters without a route
LEASE: Final = 3.0
VIEW_LEASE: Final = 5.0
PATIENCE: Final = 0.5
RESTART: Final = 1.0  #: seconds until what looks after a process starts it again
FENCED_PATIENCE: Final = 1.0
DRAIN: Final = 5.0
MAX_STEPS: Final = 200_000  #: callbacks at one time: more would never end
PORT: Final = 7946
STORE: Final = "store"  #: where ways to the store lead


class LinkEnd(Protocol):
    """What a connection between members is attached to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self, error: Exception | None) -> None: ...


class _HostClock:
    """What `Turns` asks for the time of its loop."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def now(self) -> float:
        return self._host.even()


class HostLoop(Turns):
    """The event loop of one process."""

    def __init__(self, host: Host) -> None:
        super().__init__(cast("Any", _HostClock(host)))
        self.host = host
        self.listening: dict[int, Callable[[], LinkEnd]] = {}

    def due(self) -> float:
        """Return when there is something to do; in the past or now: at once."""
        if self.soon:
            return -math.inf
        while self.later and self.later[0][2].callback is None:
            heappop(self.later)
        return self.later[0][0] if self.later else math.inf

    def go_on(self, steps: int) -> int:
        """Run so many callbacks at most; how many were run."""
        count = 0
        with self.running():
            while count < steps and self.due() <= self.clock.now:
                (self.soon.popleft() if self.soon else heappop(self.later)[2]).run()
                count += 1
        if self._failed:
            failed, self._failed = self._failed, []
            raise failed[-1]
        return count

    # -- what links ask of a loop

    async def getaddrinfo(self, host: str | None, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(2, 1, 6, "", (host or "127.0.0.1", port))]

    async def create_server(self, factory: Callable[[], LinkEnd], _hosts: list[str], port: int, **_: Any) -> _Listening:
        return _Listening(self, factory, port)

    async def create_connection(
        self, factory: Callable[[], LinkEnd], host: str, _port: int, **_: Any
    ) -> tuple[asyncio.Transport, LinkEnd]:
        return await self.host.world.connect(self, factory, host)


class _Listening:
    """A server of links."""

    def __init__(self, loop: HostLoop, factory: Callable[[], LinkEnd], port: int) -> None:
        self._loop = loop
        self._port = port or PORT
        loop.listening[self._port] = factory
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._loop.host.address, self._port

    def close(self) -> None:
        self._loop.listening.pop(self._port, None)


class LinkTransport(asyncio.Transport):
    """One end of a connection between two processes."""

    def __init__(self, loop: HostLoop, other: str) -> None:
        super().__init__({"peername": ("127.0.0.1", 40000)})
        self.loop = loop
        self.other = other  #: name of the host at the other end
        self.far: LinkTransport | None = None
        self.end: LinkEnd | None = None
        self.gone = False
        self._paused = False
        self._unread: list[bytes] = []

    @property
    def here(self) -> str:
        return self.loop.host.name

    def write(self, data: Any) -> None:
        far, body = self.far, bytes(data)
        if not self.gone and far is not None:
            self.loop.host.world.carry(self.here, self.other, lambda: far.arrive(body))

    def arrive(self, data: bytes) -> None:
        self.loop.call_soon(self._receive, data)

    def _receive(self, data: bytes) -> None:
        if self._paused:
            self._unread.append(data)
        elif not self.gone and self.end is not None:
            self.end.data_received(data)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        unread, self._unread = self._unread, []
        for data in unread:
            self._receive(data)

    def is_closing(self) -> bool:
        return self.gone

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """What is under way is not counted."""

    def close(self) -> None:
        if not self.gone:
            self.break_off(None)
            self.tell()

    abort = close

    def tell(self) -> None:
        """The other end hears of the end, after all that was sent before."""
        far = self.far
        if far is not None:
            self.loop.host.world.carry(self.here, self.other, lambda: far.loop.call_soon(far.break_off, None))

    def break_off(self, error: Exception | None) -> None:
        if not self.gone:
            self.gone = True
            if self.end is not None:
                self.loop.call_soon(self.end.connection_lost, error)


class ClientWire(asyncio.Transport):
    """A client's connection. What the node writes is told to `heard` at once."""

    def __init__(self, node: HostNode, heard: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 40000)})
        self.node = node
        self.loop = node.loop
        self._heard = heard
        self._ended = ended
        self._unread: deque[bytes | None] = deque()
        self._reading = True
        self._gone = False
        self.broken = False  #: by the client: what is written goes nowhere
        self.protocol = Connection(node.broker, "ws")  # any listener whose bytes go through the transport
        self.loop.call_soon(self.protocol.connection_made, self)

    # -- the client's side

    def send(self, data: bytes) -> None:
        self._unread.append(data)
        self.loop.call_soon(self._take)

    def leave(self) -> None:
        """Close without another word."""
        if not self.broken:
            self.broken = True
            self._unread.append(None)
            self.loop.call_soon(self._take)

    # -- the node's side

    def _take(self) -> None:
        while self._unread and self._reading and not self._gone:
            data = self._unread.popleft()
            if data is None:
                self.close()
            else:
                self.protocol.data_received(data)

    def write(self, data: Any) -> None:
        if not self.broken and not self._gone:
            self._heard(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Clients take all that comes."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.loop.call_soon(self._take)

    def is_closing(self) -> bool:
        return self._gone

    def close(self) -> None:
        if not self._gone:
            self._gone = True
            self.loop.call_soon(self.protocol.connection_lost, None)
            self.over()

    abort = close

    def over(self) -> None:
        """The client hears of the end."""
        if not self.broken:
            self.broken = True
            self._ended()


class HostNode:
    """One incarnation of a node."""

    def __init__(self, host: Host, loop: HostLoop) -> None:
        self.host = host
        self.loop = loop
        self.stopping = asyncio.Event()
        self.rejoins = False
        self.lost_why = ""
        self.listens = False  #: takes clients
        self.entered = False
        self.wires: set[ClientWire] = set()
        self.tasks = Tasks()
        hooks = Hooks()
        guids = GuidFactory(host.name, 1)
        self.state = BrokerState(
            BrokerOptions(node=host.name), host.world.session, LIMITS, hooks, guids, host.clock.time()
        )
        self.broker = Broker(self.state, cast("asyncio.AbstractEventLoop", loop), self.tasks, clock=host.clock)
        self.plugins = Plugins(self.broker, hooks, Path("unused"), self.state.shared.sources, self.tasks)
        self.store: CellStore | None = None
        self.member: ClusterMember | None = None
        self.relay: Relay | None = None
        self.session_store: SessionStore | None = None
        self.attachments: Attachments | None = None

    async def run(self) -> None:
        """Serve until `stopping` is set."""
        try:
            self.store = CellStore(self.host.world.cells, HostWays(self.loop))
            self.host.stores.append(self.store)
            await self.store.open()
            await self._start(cast("Store", self.store))
            await self.stopping.wait()
        finally:
            if not self.loop._dead:
                await self._stop()

    async def _start(self, store: Store) -> None:
        host = self.host
        links = LinkOptions(bind=f"{host.address}:{PORT}", patience=PATIENCE, lease=LEASE)
        options = MemberOptions(
            cluster=CLUSTER, name=host.name, links=links, lease=LEASE, view_lease=VIEW_LEASE, addressed=host.addressed
        )
        member = self.member = ClusterMember(
            options, LinkSecurity(plain=True), store, self.tasks, self._rejoin, (host.awake, host.even)
        )
        await member.enter(self.stopping)
        if self.stopping.is_set():
            return
        self.entered = True
        self.state.guids = GuidFactory.of_member(member.number)
        self.plugins.store, self.plugins.cluster = store, member
        await self.plugins.load("retained", {})
        state, broker, loop = self.state, self.broker, cast("asyncio.AbstractEventLoop", self.loop)
        sessions = SessionStore(store, state, loop, broker.flusher.later, self.tasks)
        self.session_store = state.store = state.registry.store = sessions
        addressing = Addressing(host.addressed)
        self.relay = Relay(member, state, broker.flusher.later, self.tasks, addressing)
        SharedBans(member, store, state)
        self.attachments = Attachments(member, sessions, state.registry, broker.publish_will)
        feed = SubscriptionFeed(member, store, self.attachments, self.relay.subscribers, addressing)
        sessions.join(self.attachments, feed, addressing)
        self.attachments.start()
        await member.join(self.stopping)
        if self.stopping.is_set():
            return
        self.tasks.start(Steward(member, store, self.attachments).run, "cluster.steward")
        self.listens = True
        broker.start()

    def _rejoin(self, why: str) -> None:
        self.rejoins = True
        self.lost_why = why
        self.stopping.set()

    async def _stop(self) -> None:
        member, attachments = self.member, self.attachments
        patience = FENCED_PATIENCE if self.rejoins else DRAIN
        if member is not None:
            await member.leave()
        self.listens = False
        await self.broker.drain(patience, math.inf)
        if attachments is not None and not self.rejoins:
            end = self.loop.time() + patience
            while len(attachments) and self.loop.time() < end:  # noqa: ASYNC110 - as `node.py` does
                await asyncio.sleep(0.02)
        await self.plugins.unload_all()
        if attachments is not None:
            attachments.stop()
        if self.session_store is not None:
            await self.session_store.close(FENCED_PATIENCE if self.rejoins else DRAIN)
        if member is not None:
            await member.depart(clean=not attachments)
        if self.rejoins:
            self.tasks.cancel()
        if self.store is not None:
            await self.store.close()
        if not self.rejoins:
            self.tasks.cancel()

    @property
    def live(self) -> bool:
        return self.listens and self.member is not None and self.member.state is MemberState.LIVE

    @property
    def id(self) -> str:
        return self.member.me if self.member is not None else ""

    def connect(self, heard: Callable[[bytes], None], ended: Callable[[], None]) -> ClientWire | None:
        """A client's connection, if clients are taken."""
        if not self.listens:
            return None
        with self.loop.running():
            wire = ClientWire(self, heard, ended)
        self.wires.add(wire)
        return wire


class HostWays:
    """The way between one process and the servers of the store."""

    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop
        self._host = loop.host
        self._world = loop.host.world

    def now(self) -> float:
        return self._world.now

    def request(self, cell: Cell, arrive: Callable[[], None], refused: Callable[[], None]) -> None:
        if cell.away:
            self._world.at(DELAY, lambda: self._loop.call_soon(refused))
            return

        def carried() -> None:
            if cell.away:
                self._loop.call_soon(refused)
            else:
                arrive()

        self._world.carry(self._host.name, STORE, carried)

    def answer(self, cell: Cell, arrive: Callable[[], None]) -> None:
        self._world.carry(STORE, self._host.name, lambda: self._loop.call_soon(arrive))


class Host:
    """A machine, with one process after the other on it."""

    def __init__(self, world: ClusterWorld, number: int) -> None:
        self.world = world
        self.name = f"n{number}"
        self.address = f"127.0.0.{number}"
        self.addressed: tuple[str, ...] = ADDRESSED  #: patterns in its configuration
        self.offset = 0.0  #: of the system's clock
        self.slept = 0.0  #: seconds that the machine was suspended for
        self.loop: HostLoop | None = None  #: None: no process
        self.node: HostNode | None = None
        self.steps: int | None = None  #: callbacks until it stands still; None: it does not
        self.suspended = False  #: it stands still since the machine is suspended
        self.incarnations: list[HostNode] = []
        self.stores: list[CellStore] = []
        self.transports: list[LinkTransport] = []
        self.failures: list[str] = []  #: why processes have ended by themselves
        self.ended: list[tuple[float, str]] = []  #: when incarnations have ended, or may have, and which
        self.clock = self._new_clock()
        self._leaving = False

    # -- clocks

    def even(self) -> float:
        """Monotonic time: stands while the machine is suspended."""
        return self.world.now - self.slept

    def awake(self) -> float:
        """Time since the machine was started, with suspensions."""
        return self.world.now

    def wall(self) -> float:
        return self.world.now + self.offset

    def _new_clock(self) -> SteadyClock:
        return SteadyClock(self.wall, self.even, lambda: self.slept)

    # -- the process

    @property
    def runs(self) -> bool:
        return self.loop is not None and self.steps != 0

    @property
    def live(self) -> bool:
        return self.loop is not None and self.node is not None and self.node.live

    def start(self) -> None:
        if self.loop is None:
            self.clock = self._new_clock()
            self.loop = HostLoop(self)
            self.steps = None
            self._leaving = False
            with self.loop.running():
                self.loop.create_task(self._live(self.loop))

    async def _live(self, loop: HostLoop) -> None:
        """Run one incarnation after the other; what has failed is started again after a while."""
        while True:
            node = self.node = HostNode(self, loop)
            self.incarnations.append(node)
            try:
                await node.run()
            except (MotorcadeError, StoreError) as error:
                self.failures.append(str(error))
                self.ended.append((self.world.now, node.id))
                if node.store is not None:
                    node.store.dead = True
                self.world.at(0.0, self._exit)
                self.world.at(RESTART, self.start)
                return
            self.ended.append((self.world.now, node.id))
            if not node.rejoins:
                self.world.at(0.0, self._exit)
                return

    def _exit(self) -> None:
        self.kill()

    @property
    def leaving(self) -> bool:
        return self.loop is not None and self._leaving

    def leave(self) -> None:
        """SIGTERM."""
        if self.loop is not None and self.node is not None and not self._leaving:
            self._leaving = True
            node = self.node
            self.loop.call_soon(node.stopping.set)

    def kill(self) -> None:
        """SIGKILL. What is on its way to the store arrives; what stands still on its way to others is gone."""
        loop, node = self.loop, self.node
        if loop is None:
            return
        if node is not None:
            self.ended.append((self.world.now, node.id))
            node.listens = False
        self.loop = self.node = None
        self.world.drop_held(self.name)
        for store in self.stores:
            store.dead = True
            for tail in list(store.feeds.tails):
                tail._closed = True
                for cell, bell in zip(store.shared.cells, tail._bells, strict=True):
                    cell.readers.remove(bell)
        for transport in self.transports:
            if not transport.gone:
                transport.gone = True
                transport.tell()
        wires = [wire for one in self.incarnations for wire in one.wires]
        for one in self.incarnations:
            one.wires.clear()
        loop.die()
        self.transports.clear()
        self.stores.clear()
        self.incarnations.clear()
        for wire in wires:
            wire.over()

    def stop(self, steps: int = 0, *, suspend: bool = False) -> None:
        """SIGSTOP after so many callbacks; or the machine is suspended."""
        if self.loop is not None and self.steps is None:
            self.steps = steps
            self.suspended = suspend and steps == 0

    def go_on(self) -> None:
        """SIGCONT."""
        self.steps = None
        self.suspended = False


class ClusterWorld:
    """See above."""

    def __init__(self, count: int, *, cells: int = CELLS, session: SessionOptions = SESSION) -> None:
        self.now = START
        self.session = session
        self.cells = Cells(cells)
        self.delays: dict[tuple[str, str], float] = defaultdict(lambda: DELAY)
        self.hosts = [Host(self, number + 1) for number in range(count)]
        self._by_address = {host.address: host for host in self.hosts}
        self._cut: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], list[Callable[[], object]]] = defaultdict(list)
        self._arrivals: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        stack = self._patches
        stack.enter_context(standing(cast("Any", self.time_here)))
        stack.enter_context(drawing())
        stack.enter_context(patch.object(member_module, "time", self.time_here))
        stack.enter_context(patch.object(member_module, "CLOCK", _ClockHere(self)))
        stack.enter_context(patch.object(roster_module, "time", self.time_here))
        stack.callback(structlog.configure, **structlog.get_config())
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        self._was_disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, self._was_disabled)
        for host in self.hosts:
            host.start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if host.loop is not None:
                host.kill()
        self._patches.close()

    def host_here(self) -> Host | None:
        loop: object = events._get_running_loop()
        return loop.host if isinstance(loop, HostLoop) else None

    def time_here(self) -> float:
        host = self.host_here()
        return host.clock.time() if host is not None else self.now

    # -- time

    def at(self, delay: float, callback: Callable[[], object]) -> None:
        self._count += 1
        heappush(self._events, (self.now + delay, self._count, callback))

    def turn(self) -> None:
        """Everything that can happen now happens."""
        steps = 0
        while True:
            busy = False
            while self._events and self._events[0][0] <= self.now:
                heappop(self._events)[2]()
                busy = True
            for host in self.hosts:
                loop = host.loop
                if loop is None or not host.runs:
                    continue
                done = loop.go_on(MAX_STEPS if host.steps is None else host.steps)
                if host.steps is not None:
                    host.steps = max(0, host.steps - done)
                steps += done
                busy = busy or done > 0
                assert steps < MAX_STEPS, f"{host.name} does something again and again, and no time passes"
            if not busy:
                return

    def _next(self) -> float:
        found = self._events[0][0] if self._events else math.inf
        for host in self.hosts:
            if host.loop is not None and host.runs:
                found = min(found, host.loop.due() + host.slept)
        return found

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.until(lambda: False, seconds)

    def until(self, condition: Callable[[], bool], within: float) -> bool:
        """Time passes until something holds; False if it does not, all the while."""
        end = self.now + within
        self.turn()
        while not condition():
            when = self._next()
            if when > end:
                self._move_to(end)
                self.turn()
                return condition()
            self._move_to(max(self.now, when))
            self.turn()
        return True

    def _move_to(self, when: float) -> None:
        for host in self.hosts:
            if host.suspended:
                host.slept += when - self.now
        self.now = when

    # -- ways

    def carry(self, here: str, there: str, arrive: Callable[[], object]) -> None:
        """Have something arrive, after all that has left before by this way."""
        way = here, there
        if way in self._cut:
            self._held[way].append(arrive)
            return
        when = max(self.now + self.delays[way], self._arrivals.get(way, 0.0))
        self._arrivals[way] = when
        self.at(when - self.now, lambda: self._arrive(way, arrive))

    def _arrive(self, way: tuple[str, str], arrive: Callable[[], object]) -> None:
        if way in self._cut:  # it was cut meanwhile
            self._held[way].append(arrive)
        else:
            arrive()

    def cut(self, here: str, there: str) -> None:
        """Nothing gets through any more, by this way."""
        self._cut.add((here, there))

    def heal(self, here: str, there: str) -> None:
        """What has stood still arrives."""
        way = here, there
        self._cut.discard(way)
        held = self._held.pop(way, [])
        for arrive in held:
            self.carry(here, there, arrive)

    def drop_held(self, here: str) -> None:
        for way, held in self._held.items():
            if way[0] == here and way[1] != STORE:
                held.clear()

    def heal_all(self) -> None:
        for here, there in list(self._cut):
            self.heal(here, there)
        self.delays.clear()
        for cell in self.cells.cells:
            cell.away = False

    async def connect(
        self, loop: HostLoop, factory: Callable[[], LinkEnd], address: str
    ) -> tuple[asyncio.Transport, LinkEnd]:
        here, host = loop.host.name, self._by_address[address]
        found: asyncio.Future[LinkTransport] = loop.create_future()
        near = LinkTransport(loop, host.name)

        def answered(far: LinkTransport | None) -> None:
            def tell() -> None:
                if found.done():
                    return
                if far is None or near.gone:
                    found.set_exception(ConnectionRefusedError("nobody listens"))
                else:
                    near.end = factory()
                    near.end.connection_made(near)
                    found.set_result(near)

            loop.call_soon(tell)

        def asked() -> None:
            there = host.loop
            accepting = there.listening.get(PORT) if there is not None else None
            if there is None or accepting is None:
                self.carry(host.name, here, lambda: answered(None))
                return
            far = LinkTransport(there, here)
            near.far, far.far = far, near
            host.transports.append(far)

            def accepted() -> None:
                far.end = accepting()
                far.end.connection_made(far)

            there.call_soon(accepted)
            self.carry(host.name, here, lambda: answered(far))

        loop.host.transports.append(near)
        self.carry(here, host.name, asked)
        try:
            made = await found
        except asyncio.CancelledError:
            near.close()
            raise
        assert near.end is not None
        return made, near.end

    def break_links(self, one: str, other: str) -> None:
        """Reset the connections between two processes."""
        for host in self.hosts:
            if host.name in (one, other):
                for transport in [
                    each for each in host.transports if each.end and {each.here, each.other} == {one, other}
                ]:
                    transport.break_off(ConnectionResetError("reset"))
                    host.transports.remove(transport)

    def touch(self) -> None:
        """Have each process write to each cell: who is not registered there any more finds that out."""
        for host in self.hosts:
            store = host.node.store if host.node is not None else None
            if host.loop is not None and store is not None:
                with host.loop.running():
                    store.submit([[(cell, Work("write", (), lambda _: None)) for cell in self.cells.cells]])

    # -- what is there

    @property
    def live(self) -> list[Host]:
        return [host for host in self.hosts if host.live]

    def whole(self) -> bool:
        """All processes are members that serve, and rely on what they know of each other."""
        running = [host for host in self.hosts if host.loop is not None]
        return all(
            host.live and host.node is not None and host.node.member is not None and host.node.member.holds
            for host in running
        )


class _ClockHere:
    """The clock of the process that asks."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world

    def wall(self) -> float:
        host = self._world.host_here()
        return host.wall() if host is not None else self._world.now
