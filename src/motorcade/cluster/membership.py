"""Membership: which members are alive, which are dead, and which has to step back. Pure.

    JOINING ─ linked with all, all read ─▶ LIVE ─ SIGTERM ─▶ LEAVING ─ its clients are gone ─▶ removed
       └──────────────┴── its counter stands still ──┴─▶ CONDEMNED ─ may not write ─▶ FENCED ─ nothing left ─▶ removed

Every member has a record in the store, under its id, which it replaces every `BEATS`th part of a lease with one that
counts one more. Each write expects what was stored before, so a member that was condemned finds out by its next one.

Rule 1: a member is dead when its counter has stood still for a lease of an observer's own clock during which the
        observer's own renewals have succeeded. While the store is away no member is taken for dead.
Rule 2: only the member itself writes its record; another one writes it to condemn it.
Rule 3: of two members that both renew and have not heard of each other for a lease, the younger one steps back. It
        joins again, and is not live before it has links with all others. A member lists whom it is linked with: who
        is still listed by the older one is not cut off from it.

Times are those of one clock that never steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from motorcade.extension.cluster import MemberState

PROTOCOL: Final = 1  #: of what members write into the store for each other
OLDEST: Final = 1  #: the oldest protocol that this version can share a store with
BEATS: Final = 6  #: renewals per lease
MAX_OFFSET: Final = 30.0  #: seconds that the clock of a member may differ from the store's when it joins
ALARM_OFFSET: Final = 1.0  #: seconds from which on the log tells it

#: States of members that may serve clients, and those in which a member is alive at all.
SERVING: Final = frozenset({MemberState.LIVE, MemberState.LEAVING})
ALIVE: Final = SERVING | {MemberState.JOINING}


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record that all members share."""

    name: str
    store: str  #: random: of the store itself
    last: int = 0  #: number of the member that joined last


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one member, by which the others know it."""

    name: str
    number: int  #: grows with every start of any member
    token: bytes  #: random: a fail-over of the store may forget a number, and give it again
    writer: str  #: under which it writes to the store
    address: str  #: of its links
    state: MemberState = MemberState.JOINING
    beat: int = 0
    since: float = 0.0  #: when it joined, seconds since the epoch
    software: str = ""
    protocol: int = PROTOCOL
    oldest: int = OLDEST
    sees: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()  #: numbers of members it is linked with
    lease: float = 3.0  #: seconds
    view_lease: float = 5.0  #: seconds
    options: dict[str, str] = {}  #: those that should agree, by key; short
    by: str = ""  #: who has condemned it
    addressed: tuple[str, ...] = ()  #: patterns of filters that need no route, sorted

    @property
    def id(self) -> str:
        return f"{self.name}~{self.number}"


class MembershipChange(msgspec.Struct):
    """The changes that were found in the records."""

    joined: list[MemberRecord] = []
    gone: list[MemberRecord] = []  #: as they were; their records are no longer there, or are fenced since now
    condemn: list[MemberRecord] = []  #: their counters stand still
    fence: list[MemberRecord] = []  #: condemned by others, who have not gone on
    unseen: list[MemberRecord] = []  #: older members that are alive and not to be reached: step back
    changed: bool = False


class _Watched:
    """A counter, and since when it stands."""

    __slots__ = ("heard_at", "moved", "record", "since")

    def __init__(self, record: MemberRecord, now: float) -> None:
        self.record = record
        self.since = now
        self.heard_at = now  #: or first seen
        self.moved = False


class Membership:
    """The members, as one of them sees them."""

    def __init__(self, me: MemberRecord, lease: float) -> None:
        self.me = me  #: as it was stored last
        self._lease = lease
        self._watched: dict[str, _Watched] = {}
        self._looked_at: float | None = None

    @property
    def others(self) -> list[MemberRecord]:
        """Return the records of all others, the older ones first."""
        return sorted((one.record for one in self._watched.values()), key=lambda record: record.number)

    def other(self, member: str) -> MemberRecord | None:
        """Return the record of another member."""
        watched = self._watched.get(member)
        return watched.record if watched is not None else None

    def of_state(self, *states: MemberState) -> list[MemberRecord]:
        """Return the records of others in these states, the older ones first."""
        return [record for record in self.others if record.state in states]

    def renewal(self, sees: Iterable[int], state: MemberState | None = None) -> MemberRecord:
        """Return the record to write next."""
        me = self.me
        return msgspec.structs.replace(me, beat=me.beat + 1, sees=tuple(sorted(sees)), state=state or me.state)

    def moving(self, name: str) -> MemberRecord | None:
        """Return another member of a name that is alive for sure: its counter has moved."""
        for watched in self._watched.values():
            if watched.record.name == name and watched.moved and watched.record.state in ALIVE:
                return watched.record
        return None

    def moves(self, member: str) -> bool:
        """Return True if the counter of another member has moved since it was seen first."""
        watched = self._watched.get(member)
        return watched is not None and watched.moved

    def look(self, records: Iterable[MemberRecord], now: float, heard: Mapping[str, float]) -> MembershipChange:
        """Take what is stored after a renewal that has succeeded. `heard`: when something came of a member last."""
        if self._looked_at is None or now - self._looked_at > self._lease / 2:
            for watched in self._watched.values():  # rule 1
                watched.since = now
        self._looked_at = now
        found = MembershipChange()
        stored = {record.id: record for record in records if record.id != self.me.id}
        for id_ in [id_ for id_ in self._watched if id_ not in stored]:
            watched = self._watched.pop(id_)
            found.changed = True
            if watched.record.state is not MemberState.FENCED:
                found.gone.append(watched.record)
        for id_, record in stored.items():
            self._look_at(self._watched.get(id_), record, now, found)
            watched = self._watched[id_]
            watched.heard_at = max(watched.heard_at, heard.get(id_, watched.heard_at))
            self._judge(watched, now, found)
        return found

    def _look_at(self, watched: _Watched | None, record: MemberRecord, now: float, found: MembershipChange) -> None:
        if watched is None:
            self._watched[record.id] = _Watched(record, now)
            found.changed = True
            if record.state is not MemberState.FENCED:
                found.joined.append(record)
            return
        before, watched.record = watched.record, record
        if (before.beat, before.state) != (record.beat, record.state):
            watched.since = now
            watched.moved = True
        if before.state is not record.state:
            found.changed = True
            if record.state is MemberState.FENCED:
                found.gone.append(before)

    def _judge(self, watched: _Watched, now: float, found: MembershipChange) -> None:
        record = watched.record
        stood = now - watched.since
        if record.state is MemberState.CONDEMNED:
            if stood >= self._lease:
                watched.since = now
                found.fence.append(record)
        elif record.state in ALIVE:
            if stood >= self._lease:
                found.condemn.append(record)
            elif (
                record.number < self.me.number
                and self.me.state is MemberState.LIVE
                and record.state in SERVING
                and stood < self._lease / 2
                and now - watched.heard_at >= self._lease
                and self.me.number not in record.sees
            ):
                found.unseen.append(record)


def objection(me: MemberRecord, cluster: str, shared: ClusterRecord, others: Iterable[MemberRecord]) -> str:
    """Return why a node must not join, and what to do; nothing if it may."""
    alive = [record for record in others if record.state is not MemberState.FENCED]
    if shared.name != cluster and alive:
        names = ", ".join(record.id for record in alive[:5])
        return (
            f"{me.name} belongs to the cluster {cluster!r}, and its store to the cluster {shared.name!r} with {names}: "
            "give it the same cluster.name, or another store.url"
        )
    for record in alive:
        if record.oldest > PROTOCOL or record.protocol < OLDEST:
            return (
                f"{me.name} (Motorcade {me.software}) and {record.id} (Motorcade {record.software}) keep what they "
                "share in different ways: update the older one"
            )
        if (record.lease, record.view_lease) != (me.lease, me.view_lease):
            return (
                f"{me.name} has cluster.lease = {me.lease:g} and cluster.view_lease = {me.view_lease:g}, "
                f"{record.id} has {record.lease:g} and {record.view_lease:g}: they rely on each other's, give all the "
                "same"
            )
        if why := other_patterns(me, record):
            return why
    return ""


def other_patterns(me: MemberRecord, other: MemberRecord) -> str:
    """Return why two members cannot serve one cluster, since they do not address the same filters."""
    if me.addressed == other.addressed:
        return ""
    return (
        f"{me.name} has cluster.addressed = {list(me.addressed)}, {other.id} has {list(other.addressed)}: what one "
        "publishes would not reach clients of the other. Give all nodes the same; to change it, stop all of them first"
    )


def too_far_apart(me: str, offset: float) -> str:
    """Return why a node whose clock differs from the store's must not join; nothing if it may."""
    if abs(offset) <= MAX_OFFSET:
        return ""
    way = "ahead of" if offset > 0 else "behind"
    return (
        f"the clock of {me} is {abs(offset):.1f} s {way} that of the store's server, and more than {MAX_OFFSET:g} s "
        "would end sessions and messages too early or too late: set the clock (NTP), then start it again"
    )


def same_name(me: MemberRecord, other: MemberRecord) -> str:
    """Return the sentence for two members of one name."""
    return (
        f"{me.id} cannot join: {other.id} at {other.address} is alive and has the same name; give each node a "
        "broker.node of its own"
    )


def drift(me: MemberRecord, other: MemberRecord) -> list[str]:
    """Return the keys of options that must agree and do not."""
    return sorted(
        key for key in me.options.keys() | other.options.keys() if me.options.get(key) != other.options.get(key)
    )


def steward(members: Iterable[str], feed: int) -> str:
    """Return which of some members keeps a cell in order: the one with the highest weight there."""
    return max(members, key=lambda member: (_weight(member, feed), member))


def _weight(member: str, feed: int) -> int:
    value = 14_695_981_039_346_656_037  # FNV-1a: the same on all members and machines
    for byte in b"%s/%d" % (member.encode(), feed):
        value = (value ^ byte) * 1_099_511_628_211 & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 32  # names that differ in their last letter only must not win together
    return value * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
