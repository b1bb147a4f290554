"""Nodes for operators: list them, drain one, let it leave.

    serving ── drain ──▶ draining ── its last client is gone, all sessions are written down ──▶ drained ─ leave ─▶ ends
       ▲                    └──────────────────────────── resume ──────────────────────────────────┘

Everything handed out is a copy. `LocalNode` is a node that is alone; with several nodes `cluster_nodes` puts together
what each of them tells, and `NodeDrain` is what one of them does about its own clients.

Rule 1: a node that is drained takes no clients, and stays a member: it hears what the others tell, and resumes at once.
Rule 2: sessions that last go to sleep as their clients go (`broker.attachments`), so any other node serves them then,
        not when the last client is gone.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum, auto
from time import monotonic
from typing import Final, Protocol

import msgspec
import structlog

from motorcade import __version__
from motorcade.broker.broker import Broker
from motorcade.client_control import NotFoundError
from motorcade.clock import time
from motorcade.extension.declared import ConflictError
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.node")

LOOK: Final = 0.05  #: seconds between two steps of a drain
MAX_RATE: Final = 1_000_000.0  #: clients per second


class DrainAction(StrEnum):
    """The step that a node is asked for."""

    DRAIN = auto()
    RESUME = auto()
    LEAVE = auto()  #: drain, then end


class DrainState(StrEnum):
    """The state of a drain."""

    DRAINING = auto()
    DRAINED = auto()


class NodeOrder(msgspec.Struct, frozen=True):
    """An operator's order to a node."""

    action: DrainAction
    rate: float = 0.0  #: clients sent away per second; 0: as configured
    permanent: bool = False  #: of a node that leaves: it will not come back, and its clients are told so


class DrainView(msgspec.Struct, frozen=True, kw_only=True):
    """A drain under way, or ended."""

    state: DrainState
    leaves: bool  #: the node ends when it is drained
    restarts: bool  #: and is started again by the command that runs it
    began_at: float
    seconds: float  #: it took, or has taken so far
    rate: float  #: clients per second
    permanent: bool = False  #: its clients are told that it will not come back
    clients_before: int  #: connected when it began


class NodeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a node about its own clients."""

    state: str  #: of the member, as it knows it itself
    clients: int  #: connected
    sessions: int  #: in its memory, connected or not
    attached: int  #: clients whose session no other node serves yet
    drain: DrainView | None


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of nodes."""

    name: str
    id: str  #: of the member: name and number, which is new at every start; empty: the node is alone
    state: str  #: of the member
    address: str  #: of its links
    since: float  #: when it joined, seconds since the epoch
    software: str
    here: bool  #: it is the node that was asked
    linked: bool  #: with the node that was asked
    round_trip: float | None  #: seconds, of the last ping between both, to a thousandth; None: there is no link
    clients: int | None  #: connected; None, like the next two: it did not answer
    sessions: int | None
    attached: int | None
    drain: DrainView | None


class NodeList(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes."""

    nodes: list[NodeEntry]
    unanswered: dict[str, str] = {}  #: nodes that did not tell their figures, and why


class Nodes(Protocol):
    """The nodes of a cluster, or the one that is alone."""

    async def list(self) -> NodeList:
        """Return all nodes, the one that is asked first."""

    async def show(self, name: str) -> NodeEntry:
        """Return one node; `NotFoundError`."""

    async def order(self, name: str, order: NodeOrder) -> NodeEntry:
        """Have a node do something; how it is then."""


class LocalNode:
    """A node that is alone."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def list(self) -> NodeList:
        return NodeList(nodes=[self._entry()])

    async def show(self, name: str) -> NodeEntry:
        entry = self._entry()
        if name != entry.name:
            raise NotFoundError(f"there is no node {name!r}: this one, {entry.name}, is alone")
        return entry

    async def order(self, name: str, order: NodeOrder) -> NodeEntry:
        entry = await self.show(name)
        raise ConflictError(
            f"{entry.name} is alone (no cluster.bind): no other node would serve its clients, so it cannot "
            f"{order.action}; SIGTERM ends it"
        )

    def _entry(self) -> NodeEntry:
        registry = self._broker.state.registry
        return NodeEntry(
            name=self._broker.node,
            id="",
            state="alone",
            address="",
            since=self._broker.started,
            software=__version__,
            here=True,
            linked=False,
            round_trip=None,
            clients=registry.connected,
            sessions=len(registry.sessions),
            attached=registry.connected,
            drain=None,
        )


class DrainHost(Protocol):
    """The node's side of a drain."""

    restarts: bool  #: the command that runs it starts it again

    def state(self) -> str:
        """Return the state of this member."""

    async def begin_leaving(self) -> None:
        """Tell the others that this node takes no clients; `ConflictError` if none of them would take them."""

    async def end_leaving(self) -> None:
        """Tell the others that it takes clients again."""

    async def close_listeners(self) -> None:
        """Take no new connections."""

    async def open_listeners(self) -> None:
        """Take new connections again; `ConfigError`."""

    def remember(self, order: NodeOrder | None) -> None:
        """Keep what was told, for the case that this node has to join again."""

    def attached(self) -> int:
        """Return how many clients no other node can serve without asking this one."""

    def stop(self) -> None:
        """End this node."""


class NodeDrain:
    """Sends the clients of one node away, and takes them again."""

    def __init__(self, broker: Broker, host: DrainHost, rate: float, tasks: Tasks) -> None:
        self._broker = broker
        self._host = host
        self._rate = self._usual_rate = rate
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self._leaves = False
        self._began = self._ended = 0.0  # monotonic; 0: not yet
        self._began_at = 0.0
        self._before = 0

    @property
    def rate(self) -> float:
        """Return how many clients are sent away per second."""
        return self._rate

    @property
    def leaves(self) -> bool:
        """Return True if the node ends when it is drained."""
        return self._leaves

    def figures(self) -> NodeFigures:
        registry = self._broker.state.registry
        view: DrainView | None = None
        if self._task is not None:
            view = DrainView(
                state=DrainState.DRAINED if self._ended else DrainState.DRAINING,
                leaves=self._leaves,
                restarts=self._leaves and self._host.restarts,
                began_at=self._began_at,
                seconds=round((self._ended or monotonic()) - self._began, 3),
                rate=self._rate,
                permanent=self._broker.state.moved,
                clients_before=self._before,
            )
        return NodeFigures(
            state=self._host.state(),
            clients=registry.connected,
            sessions=len(registry.sessions),
            attached=self._host.attached(),
            drain=view,
        )

    async def order(self, order: NodeOrder) -> NodeFigures:
        """Do what is told; the figures after that."""
        async with self._busy:
            if order.action is DrainAction.RESUME:
                await self._resume()
            else:
                await self._drain(order)
        return self.figures()

    async def _drain(self, order: NodeOrder) -> None:
        if order.permanent and self._host.restarts:
            raise ConflictError(
                f"{self._broker.node} is started again by the command that runs it, so it cannot leave for good; start "
                "that command with fewer nodes"
            )
        self._rate = order.rate or self._usual_rate
        self._broker.state.moved = self._broker.state.moved or order.permanent
        if self._task is None:
            await self._host.begin_leaving()
            self._broker.state.draining = "this node is drained"
            await self._host.close_listeners()
            self._began, self._ended, self._began_at = monotonic(), 0.0, time()
            self._before = self._broker.state.registry.connected
            self._task = self._tasks.start(self._run, "node.drain")
            log.info("node_drains", node=self._broker.node, clients=self._before, rate=self._rate)
        self._leaves = self._leaves or order.action is DrainAction.LEAVE
        action = DrainAction.LEAVE if self._leaves else DrainAction.DRAIN
        self._host.remember(NodeOrder(action, self._rate, self._broker.state.moved))

    async def _resume(self) -> None:
        if self._task is None:
            raise ConflictError(f"{self._broker.node} is not drained")
        if self._leaves and self._ended:
            raise ConflictError(f"{self._broker.node} is leaving, and all its clients are gone")
        await self._host.open_listeners()
        self._task.cancel()
        self._task, self._leaves = None, False
        self._broker.state.draining, self._broker.state.moved = "", False
        self._host.remember(None)
        await self._host.end_leaving()
        log.info("node_resumes", node=self._broker.node)

    async def _run(self) -> None:
        """Send clients away until none is left, also those that were about to be let in."""
        credit, looked_at = 1.0, monotonic()
        while True:
            if credit >= 1:
                credit -= self._broker.send_away(int(credit))
            if not self._ended and not self._broker.state.registry.connected and not self._host.attached():
                self._ended = monotonic()
                seconds = round(self._ended - self._began, 3)
                log.info("node_drained", node=self._broker.node, clients=self._before, seconds=seconds)
            if self._ended and self._leaves:
                self._host.stop()
                return
            await asyncio.sleep(LOOK)
            now = monotonic()
            credit = min(credit + self._rate * (now - looked_at), max(self._rate, 1.0))
            looked_at = now
