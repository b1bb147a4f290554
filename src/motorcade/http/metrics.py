"""`/metrics` in the text format of Prometheus (version 0.0.4).

Names end in `_total` if they only grow, units are base units (bytes, seconds), and no label has a client id in it:
the number of series depends on the configuration, never on the fleet. docs/metrics.md lists all of them.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade import __version__
from motorcade.control import Control, LoopLag, PluginView, Statistics
from motorcade.extension.metrics import Family, Labels, Table, counter, gauge
from motorcade.http.bridge import Bridge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "motorcade_"


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the route of the scrape."""

    async def metrics(_request: Request) -> Response:
        statistics = await bridge.call(control.statistics)
        return Response(render([*families(statistics), *process_families()]), media_type=CONTENT_TYPE)

    return [Route("/metrics", metrics)]


def families(statistics: Statistics) -> Iterator[Family]:
    """Return all metric families of the node."""
    yield gauge("build_info", "Always 1; the version is in the label.", [({"version": __version__}, 1)])
    figures = statistics.figures
    for name, key, text in _GAUGES:
        if key in figures:
            yield gauge(name, text, [({}, figures[key])])
    for name, key, text in _COUNTERS:
        yield counter(name, text, [({}, figures[key])])
    for name, received, sent, text in _BOTH_WAYS:
        ways = [({"direction": "in"}, figures[received]), ({"direction": "out"}, figures[sent])]
        yield counter(name, text, ways)
    for name, label, counts, text in (
        ("messages_dropped_total", "reason", statistics.dropped, "Messages that a client did not get."),
        ("messages_withdrawn_total", "reason", statistics.withdrawn, "Copies that no client has or waits for."),
        ("limit_refused_total", "limit", statistics.refused, "Times a limit was hit."),
        ("protocol_errors_total", "reason", statistics.protocol_errors, "Connections closed for breaking the rules."),
        ("session_events_total", "event", statistics.session_events, "What happened to sessions."),
        ("cluster_moves_total", "event", statistics.moves, "Clients that have come from other members, or gone."),
        ("auth_total", "result", statistics.auth, "Decisions on who may connect."),
        ("acl_total", "result", statistics.acl, "Decisions on what a client may do."),
    ):
        yield counter(name, text, [({label: key}, value) for key, value in counts.items()])
    for way, counts in statistics.cluster.items():
        text = f"Messages of other members, or for them, that were {way}, by kind of item."
        yield counter(f"cluster_messages_{way}_total", text, [({"kind": kind}, n) for kind, n in counts.items()])
    tasks = [({"task": task}, count) for task, count in statistics.task_failures.items()]
    yield counter("task_failures_total", "Background tasks that have failed and were run again.", tasks)
    text = "Background tasks that have failed and do not run well again yet."
    yield gauge("tasks_standing_still", text, [({}, statistics.tasks_standing)])
    yield from _store_families(statistics)
    yield from statistics.families
    yield from _plugin_families(statistics.plugins)
    sources = [
        ({"source": source, "event": event}, value)
        for source, counts in statistics.sources.items()
        for event, value in counts.items()
    ]
    yield counter("source_total", "What became of messages that clients get from sources.", sources)
    nouns = [({"noun": noun}, count) for noun, count in statistics.declared.items()]
    yield gauge("declared", "Queues, streams and capture rules, from the configuration and from commands.", nouns)
    ends = [
        ({"listener": listener, "file": file}, end)
        for listener, files in statistics.certificates.items()
        for file, end in files.items()
    ]
    text = "When the first certificate of a file ends, or its revocation list is due, since the epoch."
    yield gauge("certificate_expiry_timestamp_seconds", text, ends)
    yield from _table_families(statistics.tables)
    yield _lag_family(statistics.lag)


_GAUGES = (
    ("uptime_seconds", "uptime", "Time since the node started."),
    ("clock_offset_seconds", "clock_offset", "How far the system's clock is ahead of the node's, which never steps."),
    ("connections", "connections", "Network connections now."),
    ("clients_connected", "clients_connected", "Clients connected now."),
    ("clients_connected_max", "clients_maximum", "Most clients that were connected at once."),
    ("clients_holding", "clients_holding", "Clients that have not acknowledged a message for more than a minute."),
    ("sessions", "clients_total", "Sessions, of connected clients and of those away."),
    ("subscriptions", "subscriptions", "Subscriptions, without shared ones."),
    ("shared_subscriptions", "shared_subscriptions", "Shared subscriptions."),
    ("queued_messages", "messages_stored", "Messages waiting in the queues of all clients."),
    ("queued_bytes", "messages_stored_bytes", "Bytes of these messages."),
    ("session_queued_messages", "session_queued", "Messages waiting in the queues that sessions have in memory."),
    (
        "session_stored_messages",
        "session_stored",
        "Messages that this process has stored for durable sessions, waiting or in flight.",
    ),
)
_COUNTERS = (
    ("connections_accepted_total", "connections_accepted", "Network connections opened."),
    ("clock_steps_total", "clock_steps", "Steps of the system's clock that the node has noticed."),
    ("connections_closed_total", "connections_closed", "Network connections ended."),
    ("long_matches_total", "long_matches", "New topics that took several turns to be compared with all filters."),
    ("packet_ids_held_total", "packet_ids_held", "Packet ids passed over, because a client has not acknowledged them."),
    (
        "messages_abandoned_total",
        "publish_abandoned",
        "Messages sent to a client and given up before it had acknowledged them.",
    ),
    ("messages_routed_total", "publish_routed", "Copies of messages, one for each client that a message goes to."),
    (
        "messages_restored_total",
        "publish_restored",
        "Messages stored for durable sessions before this process began, counted when they leave the store.",
    ),
    (
        "store_messages_sent_total",
        "store_sent",
        "PUBLISH packets to durable sessions from the store, also repeated ones.",
    ),
    (
        "store_messages_delivered_total",
        "store_delivered",
        "Messages in the store that durable sessions have acknowledged, or were sent with QoS 0.",
    ),
    ("sessions_expired_total", "clients_expired", "Sessions that ended because their client stayed away too long."),
)
_BOTH_WAYS = (
    ("messages_total", "publish_received", "publish_sent", "PUBLISH packets."),
    ("message_bytes_total", "publish_bytes_received", "publish_bytes_sent", "Bytes of messages' payloads."),
    ("network_bytes_total", "bytes_received", "bytes_sent", "Bytes from and to clients."),
)


def _store_families(statistics: Statistics) -> Iterator[Family]:
    """Return the store's metrics: the writer as of now, counts and sizes as of the last housekeeping, if any."""
    store, condition, sweeps = statistics.store, statistics.condition, statistics.sweeps
    if condition is not None:
        engine = {"engine": condition.engine}
        for name, value, text in (
            ("store_queued", condition.queued, "Batches that wait for the writer."),
            ("store_full", condition.full, "1 while the store takes no new entries."),
            ("store_available", not condition.trouble, "0 while the store has no room, cannot be written, or is away."),
        ):
            yield gauge(name, text, [(engine, value)])
        for name, value, text in (
            ("store_commits_total", condition.commits, "Groups of batches committed by this node."),
            ("store_writes_total", condition.writes, "Batches written by this node."),
        ):
            yield counter(name, text, [(engine, value)])
    if store is not None:
        engine = {"engine": store.engine}
        for name, value, text in (
            ("store_entries", store.entries, "Entries in all mailboxes."),
            ("store_blobs", store.blobs, "Payloads stored apart from their entries."),
            ("store_blob_bytes", store.blob_octets, "Bytes of these payloads."),
            ("store_records", store.records, "Records in all collections."),
            ("store_disk_bytes", store.disk_octets, "Size of the store's files; 0 where that cannot be known."),
            ("store_memory_bytes", store.memory_bytes, "Memory of an embedded store: cached blocks and write buffers."),
        ):
            yield gauge(name, text, [(engine, value)])
    if sweeps is not None:
        yield counter("store_swept_total", "Entries, records and payloads that sweeps removed.", [({}, sweeps.removed)])
        yield counter("store_swept_bytes_total", "Bytes that sweeps gave back.", [({}, sweeps.octets)])
        results = [({"result": "complete"}, sweeps.rounds), ({"result": "failed"}, sweeps.errors)]
        yield counter("store_sweeps_total", "Rounds of housekeeping.", results)
        yield gauge("store_sweep_seconds", "Duration of the last complete round.", [({}, sweeps.seconds)])


def _plugin_families(plugins: list[PluginView]) -> Iterator[Family]:
    counters = [({"plugin": p.name, "event": event}, value) for p in plugins for event, value in p.counters.items()]
    yield counter("plugin_total", "Deprecated, see the families of the plugins: what they count.", counters)
    gauges = [({"plugin": p.name, "name": name}, value) for p in plugins for name, value in p.gauges.items()]
    yield gauge("plugin_gauge", "Deprecated, see the families of the plugins: what they measure.", gauges)
    errors: dict[tuple[str, str], int] = {}
    for plugin in plugins:
        for hook in plugin.hooks:
            key = (plugin.name, hook.point)
            errors[key] = errors.get(key, 0) + hook.errors
    failed = [({"plugin": plugin, "point": point}, count) for (plugin, point), count in errors.items()]
    yield counter("hook_errors_total", "Callbacks of plugins that raised or ran out of time.", failed)


def _table_families(tables: list[Table]) -> Iterator[Family]:
    for name, text, values in (
        ("table_entries", "Entries of a table in memory.", [(t.name, t.entries) for t in tables]),
        ("table_bytes", "Bytes of a table in memory, estimated.", [(t.name, t.size_bytes) for t in tables]),
        ("table_limit_bytes", "Bytes that it takes at its bound.", [(t.name, t.bound) for t in tables if t.bound]),
    ):
        yield gauge(name, text, [({"table": table}, value) for table, value in values])


def _lag_family(lag: LoopLag) -> Family:
    samples: list[tuple[str, Labels, float]] = [("_bucket", {"le": f"{le:g}"}, count) for le, count in lag.buckets]
    samples += [("_bucket", {"le": "+Inf"}, lag.count), ("_sum", {}, lag.total), ("_count", {}, lag.count)]
    return Family("loop_lag_seconds", "histogram", "How late the event loop that serves the clients was.", samples)


def process_families() -> Iterator[Family]:
    """Return metrics of the process, under the names that Prometheus' own clients use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime
    yield Family("process_cpu_seconds_total", "counter", "CPU time of the process.", [("", {}, seconds)])
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough
    except OSError:  # not Linux
        return
    memory = pages * resource.getpagesize()
    yield Family("process_resident_memory_bytes", "gauge", "Memory of the process.", [("", {}, memory)])
    yield Family("process_open_fds", "gauge", "Open file descriptors.", [("", {}, files)])


def render(metrics: Iterable[Family]) -> str:
    """Render the page. Families without samples are left out; of two with one name, the first is shown."""
    lines: list[str] = []
    names: set[str] = set()
    for family in metrics:
        name = family.name if family.name.startswith("process_") else PREFIX + family.name
        if not family.samples or name in names:
            continue
        names.add(name)
        lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += [f"{name}{suffix}{_labels(labels)} {_number(value)}" for suffix, labels, value in family.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
