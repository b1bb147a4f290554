"""Publishes `$SYS/broker/…` every few seconds, retained, a topic only when its text has changed.

Names, units and text forms are mosquitto's, because exporters and dashboards read them. docs/metrics.md lists them.
All figures come from `hub.statistics()` in one reading per round, so the topics of a round belong together.

    lone node            figures ─▶ $SYS/broker/…
    one of several       figures of all, asked for once a round ─┬▶ $SYS/brokers/NODE/…   each
                                                                 └▶ $SYS/broker/…         together (`total`)

Rule 1: each node publishes for its own clients; no `$SYS` message leaves a node.
Rule 2: a node that does not answer counts with what it said last, as long as it is a member. When it is gone, its
        topics go too.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec

import motorcade
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.ask_all import ask_all, name_of
from motorcade.extension.cluster import Cluster
from motorcade.extension.hooks import Handled, Stop
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.plugins.systopics.load import Load

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, float]).decode
_NO_LEVELS: Final = str.maketrans({"/": "_", "+": "_", "#": "_", "\0": "_"})

ROOT: Final = "$SYS/broker"
NODES: Final = "$SYS/brokers"  #: followed by the name of one of several nodes
QUESTION: Final = "systopics"
PATIENCE: Final = 2.0  #: seconds that other nodes may take to answer; half of the interval if that is less
QUEUED: Final = "queued"  #: a figure without a topic: messages that wait in the memory of a node

#: Figures that are alike on all nodes but for moments, or of which the largest is that of all.
LARGEST: Final = frozenset({"uptime", "retained messages/count"})
#: Figures that count what is in the store, which all nodes see, and what waits in their own memory.
STORED: Final = frozenset({"messages/stored", "store/messages/count"})

#: Topic below `$SYS/broker`, and the name of its figure in `hub.statistics()`.
FIGURES: Final[Mapping[str, str]] = {
    "clients/connected": "clients_connected",
    "clients/active": "clients_connected",  # the old name, still published by mosquitto
    "clients/disconnected": "clients_disconnected",
    "clients/inactive": "clients_disconnected",  # likewise
    "clients/expired": "clients_expired",
    "clients/maximum": "clients_maximum",
    "clients/total": "clients_total",
    "messages/received": "messages_received",
    "messages/sent": "messages_sent",
    "messages/stored": "messages_stored",
    "store/messages/count": "messages_stored",
    "store/messages/bytes": "messages_stored_bytes",
    "subscriptions/count": "subscriptions",
    "shared_subscriptions/count": "shared_subscriptions",
    "retained messages/count": "retained_messages",
    "publish/messages/received": "publish_received",
    "publish/messages/sent": "publish_sent",
    "publish/messages/dropped": "publish_dropped",
    "publish/bytes/received": "publish_bytes_received",
    "publish/bytes/sent": "publish_bytes_sent",
    "bytes/received": "bytes_received",
    "bytes/sent": "bytes_sent",
}

#: Topic below `$SYS/broker/load`, and the counter whose averages it shows.
LOADS: Final[Mapping[str, str]] = {
    "messages/received": "messages_received",
    "messages/sent": "messages_sent",
    "publish/received": "publish_received",
    "publish/sent": "publish_sent",
    "publish/dropped": "publish_dropped",
    "bytes/received": "bytes_received",
    "bytes/sent": "bytes_sent",
    "sockets": "sockets_opened",
    "connections": "connections_accepted",
}


class SysTopicsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The interval at which the node's figures are published below `$SYS`."""

    interval: Annotated[float, msgspec.Meta(gt=0)] = 10.0  #: seconds between two rounds


class SysTopicsPlugin(Plugin):
    """The node's figures as messages."""

    Config: ClassVar[type[msgspec.Struct]] = SysTopicsConfig
    description: ClassVar[str] = "publishes the node's figures under $SYS, as mosquitto does"

    config: SysTopicsConfig

    def __init__(self, context: Context, config: SysTopicsConfig) -> None:
        super().__init__(context, config)
        self._published: dict[str, str] = {}
        self._latest: dict[str, float] = {}  # of this node
        self._others: dict[str, Mapping[str, float]] = {}  # of other nodes, by name: what they have said last
        self._loads = {topic: Load() for topic in LOADS}
        self._looked_at: float | None = None

    async def start(self) -> None:
        if self.context.cluster is not None:
            self.context.at_end(self.context.cluster.on_ask(QUESTION, self._answer))
        self.context.spawn(self._run, "rounds")

    async def reload(self, config: SysTopicsConfig) -> None:
        """Take a new interval, which holds from the next round on."""
        self.config = config

    @hook("message.publish", priority=1000, topics=("$SYS/#",))
    def on_publish(self, client: ClientInfo | None, _message: Message) -> Stop | None:
        """Refuse what a client sends to `$SYS`: only the node may speak for itself."""
        return None if client is None else Stop(Handled(ReasonCode.NOT_AUTHORIZED, "$SYS belongs to the broker"))

    async def _run(self) -> None:
        cluster = self.context.cluster
        roots = [ROOT] if cluster is None else [ROOT, _root_of(name_of(cluster.me))]
        for root in roots:
            await self._publish(f"{root}/version", f"motorcade version {motorcade.__version__}")
            await self._publish(f"{root}/timestamp", _installed_at())
        while True:
            await self.publish_round()
            await asyncio.sleep(self.config.interval)

    async def publish_round(self) -> None:
        """Publish what has changed since the last round."""
        self._latest = self._read()
        cluster = self.context.cluster
        if cluster is None:
            await self._publish_all(ROOT, self._latest)
            return
        await self._ask(cluster)
        of_nodes = {name_of(cluster.me): self._latest, **self._others}
        for name, figures in of_nodes.items():
            await self._publish_all(_root_of(name), figures)
        await self._publish_all(ROOT, total(list(of_nodes.values())))

    def _read(self) -> dict[str, float]:
        """Return the figures of this node, by topic."""
        figures = self.context.hub.statistics()
        # By the node's own uptime, not by the interval: a round may come late.
        uptime = figures.get("uptime", 0.0)
        elapsed = 0.0 if self._looked_at is None else uptime - self._looked_at
        self._looked_at = uptime
        found = {"uptime": uptime, QUEUED: figures.get("session_queued", 0.0)}
        found |= {topic: figures.get(name, 0) for topic, name in FIGURES.items()}
        for topic, name in LOADS.items():
            self._loads[topic].observe(figures.get(name, 0.0), elapsed)
            averages = self._loads[topic].averages()
            found |= {f"load/{topic}/{period}": average for period, average in averages.items()}
        found["heap/current"], found["heap/maximum"] = memory()
        return found

    async def _answer(self, _member: str, _body: bytes) -> bytes:
        return _encode(self._latest)

    async def _ask(self, cluster: Cluster) -> None:
        """Ask the other nodes; delete the topics of those that are gone."""
        answers = await ask_all(cluster, QUESTION, patience=min(PATIENCE, self.config.interval / 2))
        self.context.counters["unanswered"] += len(answers.silent)
        for name, body in answers.found.items():
            self._others[name] = {topic: figure for topic, figure in _decode(body).items() if topic in self._latest}
        for name in self._others.keys() - {name_of(peer.id) for peer in cluster.peers}:
            del self._others[name]
            root = f"{_root_of(name)}/"
            for topic in [topic for topic in self._published if topic.startswith(root)]:
                await self.context.hub.publish(Message(topic, b"", retain=True))
                del self._published[topic]

    async def _publish_all(self, root: str, figures: Mapping[str, float]) -> None:
        for topic, figure in figures.items():
            if topic != QUEUED:
                await self._publish(f"{root}/{topic}", _text(topic, figure))

    async def _publish(self, topic: str, text: str) -> None:
        if self._published.get(topic) == text:
            return
        await self.context.hub.publish(Message(topic, text.encode(), retain=True))
        self._published[topic] = text


def total(of_nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several nodes together."""
    found: dict[str, float] = {}
    for topic in of_nodes[0]:
        figures = [one.get(topic, 0.0) for one in of_nodes]
        if topic in STORED:
            queued = [one.get(QUEUED, 0.0) for one in of_nodes]
            found[topic] = sum(queued) + max(all_ - own for all_, own in zip(figures, queued, strict=True))
        else:
            found[topic] = max(figures) if topic in LARGEST else sum(figures)
    return found


def _text(topic: str, figure: float) -> str:
    if topic == "uptime":
        return f"{int(figure)} seconds"
    return f"{figure:.2f}" if topic.startswith("load/") else str(int(figure))


def _root_of(node: str) -> str:
    """Return the topic above those of a node, whatever its name is."""
    return f"{NODES}/{node.translate(_NO_LEVELS)}"


def memory() -> tuple[int, int]:
    """Return the process's resident set size in bytes, now and at its largest."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return most, most
    now = pages * resource.getpagesize()
    return now, max(now, most)


def _installed_at() -> str:
    """Return when this version was installed. Mosquitto tells when it was built; a Python package is not."""
    written = Path(motorcade.__file__).stat().st_mtime
    return datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M:%S+0000")
