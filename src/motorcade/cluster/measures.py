"""Metrics of a member: the other members, its links, its view, its feeds.

Labels are states and names of nodes: the number of series depends on how many nodes there are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from motorcade.extension.cluster import MemberState, MemberView
from motorcade.extension.metrics import Family, Labels, counter, gauge

if TYPE_CHECKING:
    from motorcade.cluster.member import ClusterMember

#: Figures of a link (`Link.figures`) that are told for each peer: figure, name, text.
_OF_PEER = (
    ("linked", "cluster_link_up", "1 while the link to a node is open."),
    ("round_trip", "cluster_link_round_trip_seconds", "Duration of the last ping of a node that was answered."),
    ("full", "cluster_link_full", "1 while a node takes no more: QoS 0 for it is dropped, publishers to it wait."),
    ("unacknowledged", "cluster_link_queued_items", "Items for a node that it has not acknowledged."),
    ("unacknowledged_bytes", "cluster_link_queued_bytes", "Bytes of these items."),
)
#: Sums over all links, also those that are gone (`Links.totals`).
_EVENTS = (
    *("sent", "received", "resent", "dropped", "over_full", "too_large"),
    *("impatient", "unknown", "errors", "unknown_asks", "busy_asks"),
)


def metrics_of(member: ClusterMember) -> list[Family]:
    """Return all families of a member."""
    if not member.me:
        return []
    return [*_members(member), *_links(member), *_views(member)]


def _members(member: ClusterMember) -> list[Family]:
    members = member.members()
    states = Counter(view.state for view in members)
    differing = [({"node": _name(id_)}, len(keys)) for id_, keys in sorted(member.differing().items())]
    text = "Members of the cluster by state, as this one sees them."
    return [
        gauge("cluster_members", text, [({"state": str(state)}, states[state]) for state in MemberState]),
        counter("cluster_condemned_total", "Members that this one has found dead.", [({}, member.condemned)]),
        gauge("cluster_options_differing", "Options that should agree and do not, by node.", differing),
        gauge(
            "cluster_clock_offset_seconds",
            "How far the clock of this machine is ahead of the clock of the store's server.",
            [({}, member.clock_offset)],
        ),
    ]


def _links(member: ClusterMember) -> list[Family]:
    of_peer: dict[str, list[tuple[Labels, float]]] = {name: [] for _, name, _ in _OF_PEER}
    newest: dict[str, MemberView] = {}
    for view in member.members()[1:]:  # of two incarnations the newer one
        if view.name not in newest or newest[view.name].number < view.number:
            newest[view.name] = view
    figures = member.links.figures()
    for view in newest.values():
        known = figures.get(view.id)
        for key, name, _ in _OF_PEER:
            if known is not None:
                of_peer[name].append(({"node": view.name}, known[key]))
    totals = member.links.totals()
    return [
        *(gauge(name, text, of_peer[name]) for _, name, text in _OF_PEER),
        counter(
            "cluster_link_items_total",
            "Items and questions on the links of this node, by what became of them.",
            [({"event": event}, totals[event]) for event in _EVENTS],
        ),
        counter(
            "cluster_link_connections_total",
            "Connections between this node and others: opened, or refused before both knew each other.",
            [({"result": "open"}, totals["connections"]), ({"result": "refused"}, totals["strangers"])],
        ),
    ]


def _views(member: ClusterMember) -> list[Family]:
    notes = member.notes
    return [
        gauge("cluster_view_holds", "0 while publishers of QoS 1 and 2 wait for other nodes.", [({}, member.holds)]),
        gauge(
            "cluster_view_left_seconds",
            "For how long the view holds without another answer; negative: since when it does not.",
            [({}, member.left_of_view())],
        ),
        gauge(
            "cluster_feeds_reading",
            "Cells that are read again, since notes were missing; publishers of QoS 1 and 2 wait meanwhile.",
            [({}, notes.reading)],
        ),
        gauge(
            "cluster_notes_behind",
            "Notes that others have named and this node has not handled yet: the lag of its feeds.",
            [({}, member.notes_behind)],
        ),
        counter("cluster_feed_gaps_total", "Times that notes were missing in a feed.", [({}, notes.gaps)]),
        counter("cluster_note_errors_total", "Notes that could not be handled.", [({}, notes.errors)]),
    ]


def _name(member: str) -> str:
    return member.rpartition("~")[0] or member
