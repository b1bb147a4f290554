"""This node as a member of a cluster: what `extension.cluster.Cluster` promises, put together.

    Roster        records of members in the store                   Links       links to the other members
    Membership    who is alive, dead, to step back (pure)           NoteReader  feeds of all cells, and their handlers
    View          what may be relied on and granted (pure)

    enter ─▶ record, number ─▶ broker and plugins register what they handle ─▶ join: links, all cells read ─▶ LIVE
      every `lease / BEATS`: renew ─▶ look at all records ─▶ links to those that are new; dead ones are fenced
      leave: LEAVING ─▶ (clients go) ─▶ depart: everything sent is confirmed, the record goes

Rule 1: a member is LIVE, and serves clients, when it has links with all that serve clients and all that are older, has
        read all cells, and its view holds. So of two that join together the younger one waits for the link. One that
        another member refuses says why, and does not join.
Rule 2: a member that is no longer one (condemned, fenced, cut off from all others) tells `lost` why, once. Its node
        closes its clients and joins again as another incarnation: nothing of it is kept.
Rule 3: a peer is there from when its record is seen or its link opens, whichever comes first, until it is fenced or has
        left. It is relied on (`View.need`) from when its link opens, which is before it may grant anything.
Rule 4: times of the view are those of a clock that goes on while the machine is suspended, read when they are needed:
        that of the event loop stands still during a callback.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time as system
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, Final

import msgspec
import structlog

from motorcade import __version__
from motorcade.clock import CLOCK, time
from motorcade.cluster.greeting import Hello, Identity
from motorcade.cluster.link import Link, LinkStatus
from motorcade.cluster.links import Links
from motorcade.cluster.measures import metrics_of
from motorcade.cluster.membership import (
    ALARM_OFFSET,
    ALIVE,
    BEATS,
    SERVING,
    ClusterRecord,
    MemberRecord,
    Membership,
    MembershipChange,
    drift,
    objection,
    other_patterns,
    same_name,
    steward,
    too_far_apart,
)
from motorcade.cluster.notes import NoteReader
from motorcade.cluster.options import LinkOptions
from motorcade.cluster.roster import Roster
from motorcade.cluster.security import LinkSecurity
from motorcade.cluster.view import LINK, View
from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError
from motorcade.extension.cluster import (
    AskHandler,
    End,
    ItemHandler,
    MemberState,
    MemberView,
    NoteHandler,
    Peer,
    Reload,
)
from motorcade.extension.metrics import Family
from motorcade.storage.ports import FeedEnd, Store, StoreError, StoreFencedError
from motorcade.tasks import Tasks, Work

log = structlog.stdlib.get_logger("motorcade.cluster")

NAMED: Final = "named"  #: kind of the items: notes that their sender grants something with
HANDLED: Final = "handled"  #: and the answers to them
GOODBYE: Final = "goodbye"  #: and the last one of a member that leaves after its last client
WAIT: Final = 0.02  #: seconds between two looks at what joining waits for
TELL_AGAIN: Final = 10.0  #: seconds between two lines in the log about what joining waits for
CLOCKS_APART: Final = 60.0  #: seconds between two looks at the clock of the store
SUSPENDED: Final = 0.05  #: seconds that the machine was suspended for, at least, to count as such
DEPARTURE: Final = 2.0  #: seconds that others may take to confirm what a member sent that leaves
MAX_UNHELD: Final = 86_400.0  #: seconds; the longest time that is told for which a view has not held
MAX_OPTIONS: Final = 512  #: options that are compared with those of others

_encode = msgspec.msgpack.Encoder().encode
_decode_positions = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode

#: The time of the view (rule 4).
view_time: Final = partial(system.clock_gettime, getattr(system, "CLOCK_BOOTTIME", system.CLOCK_MONOTONIC))


class MemberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of this member; `node.py` fills them from the configuration."""

    cluster: str  #: name, alike on all members
    name: str  #: of this node
    links: LinkOptions
    advertise: str = ""  #: address that others are told; empty: the one that is listened on
    lease: float = 3.0  #: seconds
    view_lease: float = 5.0  #: seconds
    addressed: tuple[str, ...] = ()  #: patterns of filters that need no route
    compared: dict[str, str] = {}  #: options that should agree on all members, as short marks


class _Departed:
    """A member that is gone, until what it may have granted is handled here."""

    __slots__ = ("ends", "id")

    def __init__(self, id_: str, ends: Sequence[FeedEnd]) -> None:
        self.id = id_
        self.ends = {feed: end.number for feed, end in enumerate(ends)}


class ClusterMember:
    """One incarnation of this node in its cluster."""

    def __init__(
        self,
        options: MemberOptions,
        security: LinkSecurity,
        store: Store,
        tasks: Tasks,
        lost: Callable[[str], None],
        clocks: tuple[Callable[[], float], Callable[[], float]] = (view_time, monotonic),
    ) -> None:
        """`lost`: called with the reason when this is no member any more (rule 2).

        `clocks`: of the view, and of the event loop.
        """
        self.options = options
        self.me = ""  #: id; known from `enter` on
        self.number = 0
        self.condemned = 0  #: members that this one has found dead
        self.clock_offset = 0.0  #: seconds by which the clock of this machine is ahead of the store's
        self.notes = NoteReader(store.feeds, self, tasks)
        self.view = View(options.view_lease, self.notes.handled)
        self.links: Links
        self._security = security
        self._store = store
        self._supervisor = tasks
        self._lost_callback: Callable[[str], None] | None = lost
        self._loop = asyncio.get_running_loop()
        self._now, self._even = clocks
        self._roster = Roster(store)
        self._membership: Membership
        self._tasks: set[asyncio.Task[None]] = set()
        self._soon = asyncio.Event()  # renew at once, and look
        self._renewing = asyncio.Lock()
        self._address = ""  # of its links, when they are open
        self._looked = False  # at the records of all others, after its own had an address
        self._changed: list[Callable[[], None]] = []
        self._told_peers: dict[str, Link] = {}
        self._fencing: set[str] = set()
        self._departed: list[_Departed] = []
        self._left: set[str] = set()  # members that have said goodbye, until their records are gone
        self._unconfirmed: dict[int, list[tuple[int, int, str]]] = {}  # by feed: number needed, number named, member
        self._awaited: dict[int, list[tuple[int, Commit[None]]]] = {}  # by feed: number needed
        self._again: list[Commit[None]] = []
        self._grant_timer: asyncio.TimerHandle | None = None
        self._grant_due = math.inf
        self._beat: asyncio.TimerHandle | None = None
        self._suspended = self._now() - self._even()
        self._resumed_at = -math.inf  # loop time of when the machine went on
        self._held = True  # the view held at the last beat
        self._renewed_at = self._loop.time()
        self._alone_since: float | None = None
        self._wanted = MemberState.JOINING
        self._differing: dict[str, list[str]] = {}
        self._refusals: dict[str, str] = {}  # what the log was told last, by member; bounded by those that are linked
        self._apart = False  # the log was told that the clocks are

    # -- life

    async def enter(self, stopping: asyncio.Event) -> None:
        """Get a number, unless `stopping` is set before. `MotorcadeError` if this node must not be a member."""
        options = self.options
        offset = CLOCK.wall() - await self._store.coordination.time()
        if why := too_far_apart(options.name, offset):
            raise MotorcadeError(why)
        self._note_offset(offset)
        me = MemberRecord(
            name=options.name,
            number=0,
            token=secrets.token_bytes(16),
            writer=self._store.writer,
            address="",
            since=time(),
            software=__version__,
            lease=options.lease,
            view_lease=options.view_lease,
            addressed=tuple(sorted(set(options.addressed))),
            options=dict(list(options.compared.items())[:MAX_OPTIONS]),
        )
        shared = await self._roster.shared()
        if shared is not None:
            await self._hear_objections(me, shared, stopping)
        if stopping.is_set():
            return
        me, shared = await self._roster.enter(me, options.cluster)
        self.number, self.me = me.number, me.id
        identity = Identity(options.cluster, shared.store, me.name, me.number, me.token, __version__)
        self.links = Links(identity, self, options.links, self._security, self._supervisor)
        self.links.on_item(NAMED, self._on_named)
        self.links.on_item(HANDLED, self._on_handled)
        self.links.on_item(GOODBYE, self._on_goodbye)
        self._membership = Membership(me, options.lease)
        self._renewed_at = self._loop.time()
        self._start(self._renew_forever, "cluster.renew")

    async def _hear_objections(self, me: MemberRecord, shared: ClusterRecord, stopping: asyncio.Event) -> None:
        """Raise `MotorcadeError` if a member that lives cannot have this one beside it; fence those that are dead."""
        cluster = self.options.cluster
        first = {record.id: record for record in await self._roster.read() if record.state is not MemberState.FENCED}
        why = objection(me, cluster, shared, first.values())
        if not why:
            return
        lease = max(record.lease for record in first.values())
        log.info("waiting", reason=f"are members alive that stand against it? {why}", members=list(first))
        since = looked_at = self._loop.time()
        while self._loop.time() - since < lease:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), lease / BEATS)
            found = await self._roster.read()
            moved = [record for record in found if record.id not in first or first[record.id].beat != record.beat]
            why = objection(me, cluster, shared, moved)
            if stopping.is_set():
                return
            if why:
                raise MotorcadeError(why)
            if self._loop.time() - looked_at > lease / 2:
                since = self._loop.time()  # the store was slow: their renewals may have been, too
            looked_at = self._loop.time()
        for record in found:
            if record.id in first and first[record.id].beat == record.beat and record.state is not MemberState.FENCED:
                log.warning("member_dead", member=record.id, address=record.address, lease=lease)
                await self._roster.fence(record, me.name)

    async def join(self, stopping: asyncio.Event) -> None:
        """Have links with the others, and return when this member is LIVE (rule 1), or `stopping` is set."""
        self._address = self.options.advertise or await self.links.open()
        log.info("member_joins", member=self.me, address=self._address, cluster=self.options.cluster)
        self._beat = self._loop.call_later(self._interval, self._on_beat)
        self._soon.set()
        await self._unless(stopping, self.notes.begin())
        told_at = self._loop.time()
        while not stopping.is_set():
            self._check_refusals()
            waits_for = self._waits_for()
            if not waits_for:
                self._wanted = MemberState.LIVE
                await self._unless(stopping, self._renew())
                if self._membership.me.state is MemberState.LIVE:
                    break
            if self._loop.time() - told_at >= TELL_AGAIN:
                told_at = self._loop.time()
                log.warning("member_waits", member=self.me, waits_for=waits_for)
            await asyncio.sleep(WAIT)
        if not stopping.is_set():
            log.info("member_live", member=self.me, peers=[peer.id for peer in self.links.peers])
            self._start(self._tidy, "cluster.tidy")
            self._start(self._compare_clocks, "cluster.clock")

    async def _unless(self, stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
        """Do some work until it is over, or this node is to stop."""
        doing, stopped = self._loop.create_task(work), self._loop.create_task(stopping.wait())
        await asyncio.wait({doing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if doing.done():
            await doing
        else:
            doing.cancel()

    def _check_refusals(self) -> None:
        """Raise `MotorcadeError` if this member cannot join, and waiting will not help (rule 1)."""
        twin = self._membership.moving(self.options.name)
        if twin is not None:
            raise MotorcadeError(same_name(self._membership.me, twin))
        alive = {record.number for record in self._membership.of_state(*ALIVE) if self._membership.moves(record.id)}
        for number, why in self.links.refusals().items():
            if number in alive:
                raise MotorcadeError(why)

    def _waits_for(self) -> list[str]:
        """Return what has to come before this member may be LIVE."""
        linked = set(self.links.linked())
        waits: list[str] = []
        for record in self._membership.others:
            if record.name == self.options.name and record.state is not MemberState.FENCED:
                waits.append(f"{record.id}, which had this name, is not known to be dead yet")
            elif record.number not in linked and (
                record.state in SERVING or (record.state is MemberState.JOINING and record.number < self.number)
            ):
                link = self.links.peer(record.id)
                waits.append(f"no link with {record.id} at {record.address}: {link.problem if link else 'not yet'}")
        if not self._looked:
            waits.append("the records of the others are not read yet")
        if not waits and not self.holds:
            waits.append("what the others have granted is not all known here yet")
        return waits

    async def leave(self) -> None:
        """Tell the others that this member takes no new clients."""
        if self.state is not MemberState.LIVE:
            return
        self._wanted = MemberState.LEAVING
        try:
            async with asyncio.timeout(self.options.lease):
                await self._renew()
        except (StoreError, TimeoutError) as error:
            log.info("member_leaves_untold", member=self.me, error=str(error) or "no answer in time")

    async def take_clients(self) -> None:
        """Tell the others that this member takes clients again after it was to leave."""
        if self.state is MemberState.LEAVING:
            self._wanted = MemberState.LIVE
            async with asyncio.timeout(self.options.lease):
                await self._renew()

    async def depart(self, *, clean: bool) -> None:
        """End: what was sent is confirmed, and the record goes. `clean`: no client is attached to this member."""
        was_member, self._lost_callback = self._lost_callback is not None and bool(self.me), None
        if was_member:
            try:
                async with asyncio.timeout(DEPARTURE):
                    for link in self.links.peers:
                        if clean:
                            link.send(GOODBYE, b"")
                    for link in self.links.peers:
                        if link.status is LinkStatus.OPEN:
                            await link.confirm()
                    async with self._renewing:
                        await self._go(clean=clean)
            except (StoreError, TimeoutError) as error:
                log.warning("member_left_untold", member=self.me, error=str(error) or "no answer in time")
        for task in self._tasks:
            task.cancel()
        for timer in (self._beat, self._grant_timer):
            if timer is not None:
                timer.cancel()
        self.notes.close()
        if self.me:
            await self.links.close()

    async def _go(self, *, clean: bool) -> None:
        """Remove the record; if clients are attached, others take care of them as if this member had died."""
        me = self._membership.me
        if clean:
            await self._roster.remove(me)
            log.info("member_left", member=me.id)
        else:
            await self._roster.renew(me, msgspec.structs.replace(me, state=MemberState.CONDEMNED, by=me.id))
            log.warning("member_left", member=me.id, consequence="others take care of clients that are attached to it")

    def _lost(self, why: str) -> None:
        """Be a member no longer (rule 2)."""
        lost, self._lost_callback = self._lost_callback, None
        if lost is not None:
            log.error("membership_lost", member=self.me, why=why, consequence="its clients are closed; it joins again")
            lost(why)

    def _start(self, work: Work, name: str) -> None:
        task = self._supervisor.start(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- records

    @property
    def _interval(self) -> float:
        return self.options.lease / BEATS

    async def _renew_forever(self) -> None:
        while self._lost_callback is not None:
            began = self._loop.time()
            self._soon.clear()
            try:
                await self._renew()
            except StoreFencedError as error:
                self._lost(str(error))
                return
            except StoreError as error:
                log.warning("member_not_renewed", error=str(error))
            left = began + self._interval - self._loop.time()
            try:
                async with asyncio.timeout(max(left, 0.01)):
                    await self._soon.wait()
            except TimeoutError:
                pass

    async def _renew(self) -> None:
        """Count one more, and look at the others."""
        async with self._renewing:
            if self._lost_callback is None:
                return
            membership = self._membership
            after = msgspec.structs.replace(
                membership.renewal(self.links.linked(), self._wanted), address=self._address
            )
            stored = await self._roster.renew(membership.me, after)
            if stored is not None:
                by = f" by {stored.by}" if stored.by else ""
                self._lost(f"{self.me} was found dead{by}: its counter stood still, or could not be seen, for a lease")
                return
            membership.me = after
            self._renewed_at = self._loop.time()
            records = await self._roster.read()
            heard = {link.id: link.heard_at for link in self.links.peers}
            self._take(membership.look(records, self._loop.time(), heard))
            self._looked = bool(after.address)

    def _take(self, found: MembershipChange) -> None:
        """Do what a look at the records asks for."""
        for record in found.joined:
            log.info("member_seen", member=record.id, address=record.address, state=str(record.state))
            self._compare(record)
        for record in found.gone:
            self._gone(record)
        others = self._membership.others
        for record in others:  # both have started at once, and each has looked before the other was there
            alive = record.state in ALIVE and self._membership.moves(record.id)
            if alive and record.number < self.number and (why := other_patterns(self._membership.me, record)):
                self._lost(why)
                return
        if self._address:  # else what others say could not be handled yet
            reached = [record for record in others if record.state in ALIVE and record.address]
            self.links.expect((record.id, record.number, record.address) for record in reached)
        known = {record.id for record in others if record.state is not MemberState.FENCED}
        for link in self.links.peers:  # connected, and gone before its record was ever seen
            if link.id not in known and self._loop.time() - link.heard_at > self.options.lease:
                self.links.close_dead(link.id, "it is no member")
                self._leave_view(link.id)
        for record in (*found.condemn, *found.fence):
            if record.id not in self._fencing:
                self._fencing.add(record.id)
                self._start(partial(self._fence, record), f"cluster.fence.{record.id}")
        if found.unseen and self._lost_callback is not None:
            names = ", ".join(record.id for record in found.unseen)
            self._lost(f"nothing was heard of {names} for {self.options.lease:g} s, though the store hears of it")
        self._look_at_peers()

    async def _fence(self, record: MemberRecord) -> None:
        """Have a member that is dead write nothing more."""
        try:
            if record.state is not MemberState.CONDEMNED:
                self.condemned += 1
                log.warning("member_dead", member=record.id, address=record.address, lease=self.options.lease)
            if await self._roster.fence(record, self.me):
                log.warning("member_fenced", member=record.id, consequence="its clients are taken care of")
        except StoreError as error:  # the next look finds it again
            log.warning("member_not_fenced", member=record.id, error=str(error))
        finally:
            self._fencing.discard(record.id)
            self._soon.set()

    def _gone(self, record: MemberRecord) -> None:
        """Forget a member that is fenced, or has left."""
        left = self._membership.other(record.id) is None
        log.info("member_gone", member=record.id, reason="it has left" if left else "it was fenced")
        self.links.close_dead(record.id, "it has left" if left else "it was found dead")
        self._differing.pop(record.id, None)
        self._refusals.pop(record.id, None)
        if left and record.id in self._left:  # the record of one that was found dead may be gone before it was seen so
            self.view.left(record.id)
        self._left.discard(record.id)
        self._leave_view(record.id)

    def _leave_view(self, member: str) -> None:
        """Rely on a member no longer, as soon as what it may have granted is handled (`View`, rule 2)."""
        self.view.gone(member)
        if member in self.view.others:
            self._start(partial(self._await_last_notes, member), f"cluster.last_notes.{member}")

    async def _await_last_notes(self, member: str) -> None:
        while True:
            try:
                departed = _Departed(member, await self._store.feeds.ends())
            except StoreError as error:
                log.info("last_notes_not_read", member=member, error=str(error))
                await asyncio.sleep(self._interval)
            else:
                break
        self._departed.append(departed)
        for feed in departed.ends:
            self.notes.look(feed)
        self._look_at_departed()

    def _look_at_departed(self) -> None:
        for departed in self._departed:
            for feed in [feed for feed, number in departed.ends.items() if self._has(feed, number)]:
                del departed.ends[feed]
        for departed in [departed for departed in self._departed if not departed.ends]:
            self._departed.remove(departed)
            self.view.forget(departed.id)
        self._look_at_view()

    def _has(self, feed: int, number: int) -> bool:
        return not self.notes.is_reading(feed) and self.notes.handled(feed) >= number

    def _compare(self, record: MemberRecord) -> None:
        """Tell of options that should agree on all members, and do not."""
        keys = drift(self._membership.me, record)
        if keys:
            self._differing[record.id] = keys
            log.warning("configuration_drift", member=record.id, differs_in=keys[:20], more=max(0, len(keys) - 20))

    async def _tidy(self) -> None:
        """Remove records of fenced members of which nothing is left; the oldest member does."""
        while True:
            await asyncio.sleep(1.0)
            membership = self._membership
            serving = [record.number for record in membership.of_state(*SERVING)]
            if min([*serving, self.number]) != self.number:
                continue
            for record in membership.of_state(MemberState.FENCED):
                if not await self._has_clients(record.id) and await self._roster.remove(record):
                    log.info("member_forgotten", member=record.id)

    async def _has_clients(self, member: str) -> bool:
        for feed in range(self.notes.count):
            async for _ in self._store.coordination.attached(member, feed):
                return True
        return False

    # -- clocks

    async def _compare_clocks(self) -> None:
        while True:
            await asyncio.sleep(CLOCKS_APART)
            self._note_offset(CLOCK.wall() - await self._store.coordination.time())

    def _note_offset(self, offset: float) -> None:
        self.clock_offset = offset
        apart = abs(offset) > ALARM_OFFSET
        if apart and not self._apart:
            log.warning("clocks_apart", node=self.options.name, seconds=round(offset, 3), remedy="set the clock (NTP)")
        elif self._apart and not apart:
            log.info("clocks_agree", node=self.options.name, seconds=round(offset, 3))
        self._apart = apart

    def _on_beat(self) -> None:
        """Look at what goes by time, several times a lease."""
        self._beat = self._loop.call_later(self._interval, self._on_beat)
        self._look_for_suspension()
        holds = self.holds
        if holds is not self._held and self._membership.me.state in SERVING:
            self._held = holds
            if holds:
                log.info("view_holds", member=self.me)
            else:
                log.warning(
                    "view_lost",
                    member=self.me,
                    behind=self._behind(),
                    consequence="publishers of QoS 1 and 2 wait until all members have answered",
                )
        self._look_at_grants()
        self._look_whether_alone()

    def _look_for_suspension(self) -> None:
        suspended = self._now() - self._even()
        if suspended - self._suspended > SUSPENDED:
            self._resumed_at = self._even()
        self._suspended = max(suspended, self._suspended)

    def _look_whether_alone(self) -> None:
        """Step back if neither the store nor any other member is heard of: all others have found this one dead."""
        now = self._loop.time()
        others = self._membership.of_state(*SERVING)
        cut_off = (
            bool(others)
            and now - self._renewed_at > self.options.lease
            and all(now - link.heard_at > self.options.lease for link in self.links.peers)
        )
        if not cut_off:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self.options.view_lease:
            self._lost(f"{self.me} hears neither of the store nor of {', '.join(record.id for record in others)}")

    # -- callbacks of the links

    def admit(self, hello: Hello) -> str:
        record = self._membership.other(hello.id)
        if record is not None and record.token == hello.token and record.state not in ALIVE:
            return f"{self.me} has found {hello.id} dead: it has to join the cluster again"
        if self._lost_callback is None:
            return f"{self.me} is no member any more"
        return ""

    def linked(self, link: Link) -> None:
        self._refusals.pop(link.id, None)
        self.view.need(link.id)
        self._look_at_peers()
        self._look_at_view()
        self._soon.set()

    def unlinked(self, link: Link, why: str) -> None:  # noqa: ARG002 - the links have logged it
        self._soon.set()

    def refused(self, member: str, why: str) -> None:
        if self._refusals.get(member) != why:
            self._refusals[member] = why
            log.warning("member_refused", member=member, why=why)
        self._soon.set()  # it may have found this one dead: the store knows

    def pong(self, link: Link) -> bytes:
        self.view.told(link.id, self._now())
        return b""

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:  # noqa: ARG002 - names come as items
        self._look_for_suspension()
        if sent_at <= self._resumed_at:
            return  # sent before this process was suspended: its age is not known
        self.view.answered(link.id, sent_at + self._suspended)
        self._look_at_view()

    def _on_named(self, peer: Peer, body: bytes) -> None:
        positions = _decode_positions(body)
        self.view.named(peer.id, positions)
        for feed, number in positions:
            if self._has(feed, number):
                self._confirm(peer.id, feed, number)
            else:
                needed = 0 if self.notes.is_reading(feed) else number
                self._unconfirmed.setdefault(feed, []).append((needed, number, peer.id))
                self.notes.look(feed)

    def _confirm(self, member: str, feed: int, number: int) -> None:
        link = self.links.peer(member)
        if link is not None:
            link.send(HANDLED, _encode([(feed, number)]))

    def _on_goodbye(self, peer: Peer, _body: bytes) -> None:
        self._left.add(peer.id)

    def _on_handled(self, peer: Peer, body: bytes) -> None:
        for feed, number in _decode_positions(body):
            self.view.confirmed(peer.id, feed, number)

    # -- callbacks of the notes

    def reads(self, feed: int) -> None:
        self.view.reads(feed)
        waiting = self._unconfirmed.get(feed)
        if waiting:  # the reading has them, whatever their numbers are now (`View`, rule 4)
            self._unconfirmed[feed] = [(0, number, member) for _, number, member in waiting]
        if feed in self._awaited:
            self._awaited[feed] = [(0, commit) for _, commit in self._awaited[feed]]

    def note_handled(self, feed: int) -> None:
        self.view.handled(feed)
        self._look_at_awaited(feed)
        waiting = self._unconfirmed.get(feed)
        if waiting:
            handled = self.notes.handled(feed)
            left = [one for one in waiting if one[0] > handled]
            for needed, number, member in waiting:
                if needed <= handled:
                    self._confirm(member, feed, number)
            if left:
                self._unconfirmed[feed] = left
            else:
                del self._unconfirmed[feed]
        if self._departed:
            self._look_at_departed()
        else:
            self._look_at_view()

    def _look_at_awaited(self, feed: int) -> None:
        """Finish what waits for a note of a feed to be handled here (`reached`)."""
        awaited = self._awaited.pop(feed, None)
        if awaited:
            handled = self.notes.handled(feed)
            left = [one for one in awaited if one[0] > handled]
            if left:
                self._awaited[feed] = left
            for needed, commit in awaited:
                if needed <= handled:
                    commit.finish()

    # -- what is relied on, and granted

    @property
    def holds(self) -> bool:
        """See `Cluster`. Read for all that a client sends at once, so it asks for the time only if there are others."""
        until = self.view.until
        return until == math.inf or self._now() < until

    def again(self) -> Commit[None]:
        commit: Commit[None] = Commit()
        if self.holds:
            commit.finish()
        else:
            self._again.append(commit)
        return commit

    def _look_at_view(self) -> None:
        if self._again and self.holds:
            again, self._again = self._again, []
            for commit in again:
                commit.finish()

    def known(self) -> Commit[None]:
        wanted: dict[str, int] = {}
        for link in self.links.peers:
            wanted[link.id] = number = link.sent
            self.view.confirmed(link.id, LINK, link.acknowledged)
            if number > link.acknowledged:
                # After that the peer is not waited for any more.
                until = self._now() + 2 * self.options.view_lease
                link.confirm().then(partial(self._acknowledged, link, number, until))
        return self._grant(wanted, LINK)

    def _acknowledged(self, link: Link, number: int, until: float) -> None:
        """Note what a peer has; ask again if only the patience of the confirmation has ended."""
        self.view.confirmed(link.id, LINK, link.acknowledged)
        if link.acknowledged < number and link.status is not LinkStatus.DEAD and self._now() < until:
            link.confirm().then(partial(self._acknowledged, link, number, until))

    def synced(self, feed: int, number: int) -> Commit[None]:
        body = _encode([(feed, number)])
        wanted: dict[str, int] = {}
        for link in self.links.peers:
            # At once: the answer to a ping that is handled next must come after it.
            link.send(NAMED, body)
            wanted[link.id] = number
        return self._grant(wanted, feed)

    def _grant(self, wanted: dict[str, int], feed: int) -> Commit[None]:
        commit = self.view.grant(wanted, feed, self._now())
        self._look_at_grants()
        return commit

    def _look_at_grants(self) -> None:
        """Wait no longer for those that cannot rely on their view any more; have a timer for the next one."""
        now = self._now()
        if self.view.deadline <= now:
            self.view.tick(now)
        due = self.view.deadline
        if due < self._grant_due or self._grant_timer is None:
            if self._grant_timer is not None:
                self._grant_timer.cancel()
            self._grant_due = due
            self._grant_timer = self._loop.call_later(due - now + 0.001, self._on_grant_due) if due < math.inf else None

    def _on_grant_due(self) -> None:
        self._grant_timer, self._grant_due = None, math.inf
        self._look_at_grants()

    # -- members and what they say

    @property
    def peers(self) -> Sequence[Peer]:
        return self.links.peers if self.me else ()

    def peer(self, member: str) -> Peer | None:
        return self.links.peer(member) if self.me else None

    @property
    def state(self) -> MemberState:
        """The state of this member."""
        if self._lost_callback is None:
            return MemberState.FENCED
        return self._membership.me.state if self.me else MemberState.JOINING

    def members(self) -> Sequence[MemberView]:
        me = self._membership.me
        views = [MemberView(me.id, me.name, me.number, self.state, me.address, me.since, me.software, linked=True)]
        linked = set(self.links.linked())
        for record in self._membership.others:
            link = self.links.peer(record.id)
            views.append(
                MemberView(
                    record.id,
                    record.name,
                    record.number,
                    record.state,
                    record.address,
                    record.since,
                    record.software,
                    linked=record.number in linked,
                    round_trip=link.round_trip if link is not None else 0.0,
                )
            )
        return views

    def troubles(self) -> list[tuple[str, str]]:
        """Return why clients should be sent to other members: in plain words, and for the operator."""
        found: list[tuple[str, str]] = []
        state = self.state
        if state is MemberState.FENCED:
            found.append(
                ("the node is no member of its cluster any more", f"{self.me} was found dead, and joins again")
            )
        elif state is MemberState.JOINING:
            waits = "; ".join(self._waits_for()) if self.me else "it has no number yet"
            found.append(("the node joins its cluster", f"{self.me or self.options.name} joins its cluster: {waits}"))
        elif state is MemberState.LEAVING:
            found.append(("the node is leaving its cluster", f"{self.me} takes no clients and sends its own away"))
        if state in SERVING and not self.holds:
            behind = ", ".join(self._behind()) or "none any more"
            found.append(
                (
                    "publishers wait: not all nodes of the cluster have answered",
                    f"publishers of QoS 1 and 2 wait: {self.me} cannot rely on what it knows of {behind}",
                )
            )
        return found

    def metrics(self) -> list[Family]:
        """Return what is measured of members, links and feeds."""
        return metrics_of(self)

    @property
    def notes_behind(self) -> int:
        """Return how many notes others have named that are not handled here."""
        return sum(map(len, self._unconfirmed.values()))

    def left_of_view(self) -> float:
        """Return for how many seconds the view holds yet, at most its lease; negative: since when it does not."""
        return max(min(self.view.until - self._now(), self.options.view_lease), -MAX_UNHELD)

    def _behind(self) -> list[str]:
        now = self._now()
        return [member for member in self.view.others if self.view.behind(member) or self.view.until_of(member) <= now]

    def differing(self) -> dict[str, list[str]]:
        """Return the options that other members have otherwise, by member."""
        return dict(self._differing)

    def _look_at_peers(self) -> None:
        peers = {link.id: link for link in self.links.peers}
        if peers != self._told_peers:
            self._told_peers = peers
            for told in list(self._changed):
                told()

    def on_item(self, kind: str, handler: ItemHandler) -> End:
        self.links.on_item(kind, handler)
        return partial(self.links.drop_item, kind, handler)

    def on_ask(self, noun: str, handler: AskHandler) -> End:
        self.links.on_ask(noun, handler)
        return partial(self.links.drop_ask, noun, handler)

    async def ask(self, member: str, noun: str, body: bytes = b"", *, patience: float = 5.0) -> bytes:
        return await self.links.ask(member, noun, body, patience=patience)

    def on_note(self, code: str, handler: NoteHandler, reload: Reload) -> End:
        return self.notes.on_note(code, handler, reload)

    def on_change(self, told: Callable[[], None]) -> End:
        self._changed.append(told)
        return lambda: self._changed.remove(told)

    def handled(self, feed: int) -> int:
        return self.notes.handled(feed)

    def reached(self, feed: int, number: int) -> Commit[None]:
        commit: Commit[None] = Commit()
        if self._has(feed, number):
            commit.finish()
        else:
            needed = 0 if self.notes.is_reading(feed) else number
            self._awaited.setdefault(feed, []).append((needed, commit))
            self.notes.look(feed)
        return commit

    def reload(self, feed: int) -> None:
        self.notes.reload(feed)

    def gap_end(self, feed: int) -> int | None:
        return self.notes.gap_end(feed)

    @property
    def feeds(self) -> int:
        return self.notes.count

    def is_steward(self, feed: int) -> bool:
        if self.state is not MemberState.LIVE:
            return False
        live: Iterable[str] = (record.id for record in self._membership.of_state(MemberState.LIVE))
        return steward([self.me, *live], feed) == self.me

    def fenced(self) -> Sequence[str]:
        return [record.id for record in self._membership.of_state(MemberState.FENCED)]


async def ensure_alone(store: Store, name: str) -> None:
    """Refuse a store that members of a cluster serve, to a node that is none; fence those that have died."""
    roster = Roster(store)
    before = {record.id: record for record in await roster.read() if record.state is not MemberState.FENCED}
    if not before:
        return
    lease = max(record.lease for record in before.values())
    log.info("waiting", reason="members of a cluster have served this store; are they alive?", members=list(before))
    await asyncio.sleep(lease)
    for record in await roster.read():
        known = before.get(record.id)
        if known is None or known.beat != record.beat:
            raise MotorcadeError(
                f"{name} is a node by itself (no cluster.bind), and its store is served by the cluster with "
                f"{record.id} at {record.address}: set cluster.bind to join it, or give {name} a store of its own"
            )
        await roster.fence(record, name)
    for record in await roster.read():
        await roster.remove(record)
