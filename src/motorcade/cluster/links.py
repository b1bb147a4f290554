"""All links of a member: sockets, timers, reconnects.

    expect([(id, number, address), …])     the other members; those with a lower number are dialled from here
    linked, unlinked, refused              what becomes of them (`LinksOwner`)
    peer(id).send(…), ask(id, …)           items and questions
    close_dead(id, why)                    this incarnation lives no more

    dialler (higher number) ─ TCP, TLS ─▶ greeting ─▶ link ─ lost, silent for a lease ─▶ pause ─▶ dialled again
    listener ◀──────────────────────────  greeting ─▶ link

Rule 1: a peer has one connection. A new one of the same incarnation takes the place of the old one, which is broken.
Rule 2: a member with the id of another incarnation is another peer: the link to the one before is dead.
Rule 3: all that comes is read. After a long read the other sockets of this process have their turn first.
Rule 4: a link that has heard nothing for a lease is closed. All members ping each other, so silence means that nothing
        gets through, in one direction at least.
Rule 5: sockets that have not proved who they are cost little: few, small, and not for long.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import ssl
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Final, Protocol, cast

import structlog

from motorcade.cluster.frames import LinkFrameError, refused_sentence
from motorcade.cluster.greeting import Greeting, Hello, Identity, OtherMemberError, PeerRefusesError
from motorcade.cluster.link import Link, LinkClosedError, LinkStatus, LinkWire
from motorcade.cluster.options import LinkOptions
from motorcade.cluster.security import LinkSecurity
from motorcade.core.errors import ConfigError, MotorcadeError
from motorcade.core.handshake import HandshakeError
from motorcade.core.recent import RecentSet
from motorcade.extension.cluster import AskError, AskHandler, ItemHandler
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.cluster")

#: Seconds between attempts to reach a member, doubled each time; and after it has refused.
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
REFUSED_PAUSE: Final = 5.0
CONNECT_TIMEOUT: Final = 3.0
GREETING_TIMEOUT: Final = 5.0  #: seconds that the other side has to prove who it is
MAX_STRANGERS: Final = 128  #: sockets that have not proved yet who they are; the oldest go first
CLOSE_GRACE: Final = 1.0  #: seconds for what is still to be written when a connection is closed
REFUSED_INTERVAL: Final = 10.0  #: seconds between two lines in the log about refused strangers
BEATS: Final = 6  #: pings per lease
FULL_READ: Final = 65_536  #: bytes of a read after which the others have their turn
#: Bytes that the transport holds: what ACKs and answers wait for at most, beside a frame that is being written.
WRITE_HIGH: Final = 524_288
WRITE_LOW: Final = 131_072
MAX_ANSWERING: Final = 10_000  #: questions of others that are worked on
MAX_DEAD: Final = 1024  #: incarnations that are known to be dead, at least

_GROWING: Final = (
    "sent",
    "received",
    "resent",
    "dropped",
    "over_full",
    "too_large",
    "impatient",
    "unknown",
    "errors",
    "connections",
)


class LinksOwner(Protocol):
    """Callbacks of the links. They must not raise."""

    def admit(self, hello: Hello) -> str:
        """Return why a member may not connect, in a sentence; nothing if it may."""

    def linked(self, link: Link) -> None:
        """Handle that a link is open."""

    def unlinked(self, link: Link, why: str) -> None:
        """Handle that it is no longer; `link.status` tells whether the peer is dead."""

    def refused(self, member: str, why: str) -> None:
        """Handle that one of both sides refuses the link: another secret, cluster, store, …; it is tried again."""

    def pong(self, link: Link) -> bytes:
        """Return what the answer to a ping of the peer says."""

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        """Take the answer to a ping; `sent_at` is in loop time."""


class _Contact:
    """A peer: its link, and the connection, address and timer that go with it."""

    __slots__ = ("address", "connection", "dialling", "due", "link", "refusal", "timer", "token")

    def __init__(self, link: Link, address: str) -> None:
        self.link = link
        self.address = address
        self.token = b""  #: of the incarnation; empty until it has said it
        self.refusal = ""  #: why one of both has refused the link; empty when it is open
        self.connection: LinkConnection | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.due = math.inf  #: when the timer calls


class Links:
    """The links of one member."""

    def __init__(
        self, me: Identity, owner: LinksOwner, options: LinkOptions, security: LinkSecurity, tasks: Tasks
    ) -> None:
        self.me = me
        self.options = options
        self.security = security
        self.strangers = 0  #: connections that were refused, or ended before they had proved who they are
        self.unknown_asks: Counter[str] = Counter()  #: questions without handler
        self.busy_asks = 0  #: questions that were refused, since there are too many
        self._owner = owner
        self._tasks = tasks
        self.loop = asyncio.get_running_loop()
        self._contacts: dict[str, _Contact] = {}
        self._handlers: dict[str, ItemHandler] = {}
        self._askable: dict[str, AskHandler] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._waiting: dict[LinkConnection, None] = {}  # sockets that have not proved yet who they are
        self._dead: RecentSet[tuple[str, bytes]] = RecentSet(MAX_DEAD)
        self._gone: Counter[str] = Counter()  # figures of links that are dead
        self._dirty: list[Link] = []
        self._server: asyncio.Server | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._beat_at = self.loop.time()
        self._refused_at = -math.inf
        self._unlogged = 0
        self._closed = False

    # -- life

    async def open(self) -> str:
        """Listen for other members. Return the address; `ConfigError` if it cannot be had, or is not safe."""
        bind = self.options.bind
        try:
            host, port = _host_and_port(bind)
            found = await self.loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except ConfigError as error:
            raise ConfigError(f"cluster.bind: {error}") from None
        except OSError as error:
            raise ConfigError(f"cluster.bind: {bind!r} is no address of this machine: {error.strerror}") from None
        for *_, place in found:
            if why := self.security.objection(str(place[0])):
                raise ConfigError(f"cluster.bind: {bind!r}: {why}")
        tls = self.security.accepting
        try:
            self._server = await self.loop.create_server(
                lambda: LinkConnection(self),
                [str(place[0]) for *_, place in found],
                port,
                ssl=tls,
                ssl_handshake_timeout=GREETING_TIMEOUT if tls else None,
                ssl_shutdown_timeout=CLOSE_GRACE if tls else None,
            )
        except OSError as error:
            raise ConfigError(f"cluster.bind: cannot listen on {bind}: {error.strerror or error}") from None
        self._beat_at = self.loop.time()
        self._next_beat()
        place = self._server.sockets[0].getsockname()
        return f"[{place[0]}]:{place[1]}" if ":" in place[0] else f"{place[0]}:{place[1]}"

    async def close(self) -> None:
        """Close all connections, after what was sent. All that waits for a peer is done then."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        if self._beat is not None:
            self._beat.cancel()
        for task in [contact.dialling for contact in self._contacts.values() if contact.dialling is not None]:
            task.cancel()
        self._turn_over()
        connections = [*self._waiting, *(each.connection for each in self._contacts.values() if each.connection)]
        for contact in list(self._contacts.values()):
            self._drop(contact, f"{self.me.id} stops", abort=False)
            contact.link.close_dead(f"{self.me.id} stops")
            if contact.timer is not None:
                contact.timer.cancel()
        for connection in connections:
            connection.close()
        for answering in self._answering:
            answering.cancel()
        if connections:
            await asyncio.wait([connection.ended for connection in connections], timeout=CLOSE_GRACE)
        for connection in connections:
            connection.abort()

    # -- members

    def expect(self, members: Iterable[tuple[str, int, str]]) -> None:
        """Have links to these members (id, number, address), and to those that connect; dial those with a lower number.

        Others are no longer dialled. What links they have stays, until the connection ends or `close_dead`.
        """
        named: set[str] = set()
        for id_, number, address in members:
            if number == self.me.number or self._closed:
                continue
            named.add(id_)
            contact = self._contacts.get(id_) or self._new_contact(id_, number)
            contact.address = address
            if number < self.me.number and contact.dialling is None:
                contact.dialling = self._tasks.start(partial(self._keep_linked, contact), f"cluster.dial.{id_}")
        for id_, contact in self._contacts.items():
            if id_ not in named and contact.dialling is not None:
                contact.dialling.cancel()
                contact.dialling = None

    def close_dead(self, member: str, why: str) -> None:
        """Drop a member: it is fenced, or has left. It is let in again only as another incarnation."""
        contact = self._contacts.pop(member, None)
        if contact is None:
            return
        if contact.token:
            self._dead.add((member, contact.token))
        if contact.dialling is not None:
            contact.dialling.cancel()
        if contact.timer is not None:
            contact.timer.cancel()
        link, connection = contact.link, contact.connection
        contact.connection = None
        was_open = link.status is LinkStatus.OPEN
        link.close_dead(why)
        self._gone.update({name: int(value) for name, value in link.figures().items() if name in _GROWING})
        if connection is not None:
            connection.refuse(f"{self.me.id} has closed the link to {member}: {why}")
        if was_open:
            self._owner.unlinked(link, why)

    @property
    def peers(self) -> list[Link]:
        """Return the links to all members that are not dead, open or not."""
        return [contact.link for contact in self._contacts.values()]

    def peer(self, member: str) -> Link | None:
        """Return the link to a member, open or not."""
        contact = self._contacts.get(member)
        return contact.link if contact is not None else None

    def linked(self) -> list[int]:
        """Return the numbers of the members with an open link."""
        return [contact.link.number for contact in self._contacts.values() if contact.connection is not None]

    def refusals(self) -> dict[int, str]:
        """Return the sentences of links that one of both sides has refused, by number of the member."""
        return {contact.link.number: contact.refusal for contact in self._contacts.values() if contact.refusal}

    def figures(self) -> dict[str, dict[str, float]]:
        """Return what is measured of each link (`Link.figures`)."""
        return {id_: contact.link.figures() for id_, contact in self._contacts.items()}

    def totals(self) -> dict[str, float]:
        """Return the sums of what only grows, with links that are gone, and what is counted without a link."""
        sums = Counter(self._gone)
        for figures in self.figures().values():
            sums.update({name: int(figures[name]) for name in _GROWING})
        return {
            **dict.fromkeys(_GROWING, 0),
            **sums,
            "strangers": self.strangers,
            "unknown_asks": self.unknown_asks.total(),
            "busy_asks": self.busy_asks,
        }

    # -- items and questions

    def on_item(self, kind: str, handler: ItemHandler) -> None:
        """Handle items of a kind; another handler takes the place of the one before."""
        self._handlers[kind] = handler
        for contact in self._contacts.values():
            contact.link.refresh()

    def drop_item(self, kind: str, handler: ItemHandler) -> None:
        """Handle items of a kind no longer, unless another handler has taken the place of this one."""
        if self._handlers.get(kind) == handler:
            del self._handlers[kind]
            for contact in self._contacts.values():
                contact.link.refresh()

    def drop_ask(self, noun: str, handler: AskHandler) -> None:
        """Answer questions no longer, unless another handler has taken the place of this one."""
        if self._askable.get(noun) == handler:
            del self._askable[noun]

    def on_ask(self, noun: str, handler: AskHandler) -> None:
        """Answer questions; a `MotorcadeError` is told to the member that asks."""
        self._askable[noun] = handler

    async def ask(self, member: str, noun: str, question: bytes = b"", *, patience: float = 5.0) -> bytes:
        """Ask a member; `AskError` if there is no answer in time, or it refuses, or the connection ends."""
        link = self.peer(member)
        if link is None:
            raise AskError(f"{member} is no member that is alive")
        return await link.ask(noun, question, self.loop.time() + patience)

    # -- events of links

    def wake(self, link: Link) -> None:
        self._dirty.append(link)
        if len(self._dirty) == 1:
            self.loop.call_soon(self._turn_over)

    def handler(self, kind: str) -> ItemHandler | None:
        return self._handlers.get(kind)

    def asked(self, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes) -> None:
        handler = self._askable.get(noun)
        if handler is None:
            self.unknown_asks[noun if len(self.unknown_asks) < MAX_ANSWERING else ""] += 1
            link.refuse(wire, id_, f"{self.me.id} (Motorcade {self.me.software}) does not know the question {noun!r}")
        elif len(self._answering) >= MAX_ANSWERING:
            self.busy_asks += 1
            link.refuse(wire, id_, f"{self.me.id} has {MAX_ANSWERING} questions to answer already")
        else:
            task = self.loop.create_task(self._answer(handler, link, wire, id_, noun, question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(
        self, handler: AskHandler, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes
    ) -> None:
        try:
            answer = await handler(link.id, question)
        except MotorcadeError as error:
            link.refuse(wire, id_, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the member that asks must not wait
            self._tasks.note(f"cluster.answer.{noun}", error)
            link.refuse(wire, id_, f"the question {noun!r} failed at {self.me.id}: {type(error).__name__}")
        else:
            link.answer(wire, id_, answer)

    def pong(self, link: Link) -> bytes:
        return self._owner.pong(link)

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        self._owner.answered(link, sent_at, body)

    # -- time

    def _turn_over(self) -> None:
        dirty, self._dirty = self._dirty, []
        now = self.loop.time()
        for link in dirty:
            link.flush(now)
            contact = self._contacts.get(link.id)
            if contact is not None and contact.link is link:
                self._arm(contact)

    def _arm(self, contact: _Contact) -> None:
        """Have the timer of a link call in time. It may call too early: that costs less than one timer per item."""
        deadline = contact.link.deadline
        if deadline >= contact.due:
            return
        if contact.timer is not None:
            contact.timer.cancel()
        contact.due = deadline
        # A loop that counts in milliseconds may call a bit early, and must not be asked again for nothing.
        delay = max(deadline - self.loop.time(), 0.001)
        contact.timer = self.loop.call_later(delay, self._due, contact)

    def _due(self, contact: _Contact) -> None:
        contact.timer = None
        contact.due = math.inf
        contact.link.tick(self.loop.time())
        self._arm(contact)

    def _next_beat(self) -> None:
        self._beat = self.loop.call_later(self.options.lease / BEATS, self._ping_all)

    def _ping_all(self) -> None:
        """Ping all peers; give up those that are silent, unless it is this process that stood still."""
        now, lease = self.loop.time(), self.options.lease
        stood_still = now - self._beat_at > lease / 2
        self._beat_at = now
        for contact in list(self._contacts.values()):
            link = contact.link
            if contact.connection is None:
                continue
            if not stood_still and now - link.heard_at >= lease:
                self._drop(contact, f"nothing was heard of {link.id} for {now - link.heard_at:.1f} s")
            else:
                link.ping(now)
        self._next_beat()

    # -- connections

    def resume(self, hello: Hello) -> int:
        """Return what was received from the incarnation that says hello; `HandshakeError` if it may not connect."""
        if (hello.id, hello.token) in self._dead:
            raise HandshakeError(
                f"{self.me.id} has found {hello.id} dead, or it has left: it has to join the cluster again"
            )
        if why := self._owner.admit(hello):
            raise HandshakeError(why)
        contact = self._contacts.get(hello.id)
        return contact.link.received if contact is not None and contact.token == hello.token else 0

    def greets(self, connection: LinkConnection) -> None:
        """Note a socket that has not proved yet who it is."""
        if not connection.wanted:
            self._waiting[connection] = None
            if len(self._waiting) > MAX_STRANGERS:
                next(iter(self._waiting)).refuse("too many connections have not proved who they are")

    def opened(self, connection: LinkConnection, hello: Hello, received: int) -> None:
        """Go on with the link of a peer that has proved who it is."""
        self._waiting.pop(connection, None)
        contact = self._contacts.get(hello.id)
        if contact is not None and contact.token not in {b"", hello.token}:
            why = f"another incarnation of {hello.id} has connected"
            address = contact.address
            dialling, contact.dialling = contact.dialling, None  # that is the task in which this may run
            self.close_dead(hello.id, why)
            contact = self._new_contact(hello.id, hello.number)
            contact.address, contact.dialling = address, dialling
        contact = contact or self._new_contact(hello.id, hello.number)
        contact.token = hello.token
        link = contact.link
        try:
            link.check(received)
        except HandshakeError as error:
            connection.refuse(str(error), misfit=True)
            return
        self._drop(contact, "another connection has taken its place")
        contact.connection = connection
        contact.refusal = ""
        connection.link = link
        link.opened(connection, received, hello.max_frame, self.loop.time())
        link.ping(self.loop.time())
        log.info(
            "cluster_link_open", peer=link.id, address=connection.place, received=link.received, resent=link.resent
        )
        self._owner.linked(link)

    def ended(self, connection: LinkConnection, why: str) -> None:
        """Note that a connection has ended."""
        self._waiting.pop(connection, None)
        link = connection.link
        contact = self._contacts.get(link.id) if link is not None else None
        if contact is not None and contact.connection is connection:
            self._drop(contact, why, abort=False)

    def stranger(self, connection: LinkConnection, why: str) -> None:
        """Count a connection that did not prove who it is. Log at a bounded rate, since any program can connect."""
        self._waiting.pop(connection, None)
        if self._closed:
            return
        self.strangers += 1
        self._unlogged += 1
        now = self.loop.time()
        if now - self._refused_at >= REFUSED_INTERVAL:
            log.warning("cluster_link_refused", address=connection.place, why=why, refused=self._unlogged)
            self._refused_at, self._unlogged = now, 0

    def _drop(self, contact: _Contact, why: str, *, abort: bool = True) -> None:
        connection, contact.connection = contact.connection, None
        if connection is None:
            return
        link = contact.link
        link.lost(why)
        if abort:
            connection.abort()
        tell = log.info if self._closed else log.warning
        tell("cluster_link_lost", peer=link.id, why=why, unacknowledged=link.unacknowledged)
        self._owner.unlinked(link, why)

    def _new_contact(self, id_: str, number: int) -> _Contact:
        contact = self._contacts[id_] = _Contact(Link(id_, number, self, self.options), "")
        return contact

    # -- dialling

    async def _keep_linked(self, contact: _Contact) -> None:
        """Keep the link to a member up, until the task is cancelled."""
        id_ = contact.link.id
        pause = FIRST_PAUSE
        while True:
            while contact.connection is not None:  # it was no longer expected meanwhile
                await asyncio.shield(contact.connection.ended)
            connection, problem, misfit = await self._dial(id_, contact.address)
            if connection is not None:
                try:
                    await asyncio.shield(connection.ended)
                finally:
                    if connection.link is None:
                        connection.abort()
                problem, misfit = connection.refusal, connection.misfit
            current = self._contacts.get(id_)
            if current is None:
                return
            contact = current  # another incarnation may have taken its place
            if connection is not None and connection.link is not None:
                pause = FIRST_PAUSE
            elif problem and problem != contact.link.problem:
                contact.link.problem = problem
                log.warning("cluster_link_failed", peer=id_, address=contact.address, why=problem)
            contact.refusal = problem if misfit else ""
            if misfit:
                self._owner.refused(id_, problem)
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311 - spreads attempts
            pause = min(pause * 2, REFUSED_PAUSE if misfit else LONGEST_PAUSE)

    async def _dial(self, id_: str, address: str) -> tuple[LinkConnection | None, str, bool]:
        """Connect to a member. Return the connection, or why there is none, and whether the two do not fit."""
        me, tls = self.me.id, self.security.connecting
        try:
            host, port = _host_and_port(address)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await self.loop.create_connection(
                    lambda: LinkConnection(self, id_),
                    host,
                    port,
                    ssl=tls,
                    ssl_shutdown_timeout=CLOSE_GRACE if tls else None,
                )
        except ssl.SSLError as error:
            return None, _tls_problem(me, id_, address, error), True
        except ConfigError as error:
            return None, f"{me} cannot connect to {id_}: {error}", False
        except (OSError, TimeoutError) as error:
            return None, f"{me} cannot connect to {id_} at {address}: {str(error) or 'no answer in time'}", False
        return connection, "", False


class LinkConnection(asyncio.Protocol):
    """One connection: the greeting, then the bytes of a link."""

    def __init__(self, links: Links, wanted: str = "") -> None:
        self.wanted = wanted  #: id of the member that was dialled; empty if it is the other side that dials
        self.link: Link | None = None  #: as soon as the other side has proved who it is
        self.refusal = ""  #: why there is no link
        self.misfit = False  #: one of the two sides has said so, knowing the other one
        self.place = ""  #: the other side's address
        self.ended: asyncio.Future[None] = links.loop.create_future()
        self._links = links
        self._loop = links.loop
        self._transport: asyncio.Transport | None = None
        self._greeting = Greeting(links.me, links.security.secret, links.options.max_frame, links.resume, wanted)
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        host, port, *_ = transport.get_extra_info("peername") or ("", 0)
        self.place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._links.greets(self)
        if why := self._links.security.objection(host) if host else "":
            self.refuse(f"{self._links.me.id} makes no link over the address {self.place}: {why}", misfit=True)
            return
        self._patience = self._loop.call_later(GREETING_TIMEOUT, self._out_of_patience)
        self.write(self._greeting.begin())

    def data_received(self, data: bytes) -> None:
        link = self.link
        if link is None:
            if not self._closing:
                self._greet(data)
            return
        if link.wire is not self:
            return
        if len(data) >= FULL_READ and not self._closing:
            cast("asyncio.Transport", self._transport).pause_reading()
            self._loop.call_soon(self._read_on)
        try:
            link.receive(data, self._loop.time())
        except LinkClosedError as error:
            self._links.ended(self, str(error))
            self.close()
        except LinkFrameError as error:
            self.refuse(f"{self._links.me.id} has closed the link to {link.id}: {error}")

    def _greet(self, data: bytes) -> None:
        greeting = self._greeting
        try:
            answer = greeting.feed(data)
        except PeerRefusesError as error:
            self.misfit = True
            self._give_up(str(error))
            self.close()
            return
        except HandshakeError as error:
            self.refuse(str(error), misfit=not isinstance(error, OtherMemberError))
            return
        self.write(answer)
        if greeting.done and greeting.peer is not None:
            self._no_more_patience()
            self._links.opened(self, greeting.peer, greeting.received)
            if greeting.rest:
                self.data_received(greeting.rest)

    def _read_on(self) -> None:
        if not self._closing:
            cast("asyncio.Transport", self._transport).resume_reading()

    def _out_of_patience(self) -> None:
        other = self.wanted or "the other side"
        self.refuse(
            f"{other} has not proved to {self._links.me.id} within {GREETING_TIMEOUT:g} s who it is: is TLS "
            "configured on one side only, or is it no member?"
        )

    def refuse(self, why: str, *, misfit: bool = False) -> None:
        """Tell the other side why, and close."""
        self.misfit = misfit
        self.write(refused_sentence(why))
        self._give_up(why)
        self.close()

    def _give_up(self, why: str) -> None:
        self._no_more_patience()
        if self.link is not None:
            self._links.ended(self, why)
        elif not self.refusal:
            self.refusal = why
            if not self.wanted:
                self._links.stranger(self, why)

    def _no_more_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def pause_writing(self) -> None:
        if self.link is not None and self.link.wire is self:
            self.link.pause()

    def resume_writing(self) -> None:
        if self.link is not None and self.link.wire is self:
            self.link.resume()

    def connection_lost(self, error: Exception | None) -> None:
        if self.link is None and not self.refusal:
            self._give_up(self._unproved_end(error))
        self._no_more_patience()
        self._transport = None
        self._links.ended(self, str(error) if error else "the other side has closed the connection")
        if not self.ended.done():
            self.ended.set_result(None)

    def _unproved_end(self, error: Exception | None) -> str:
        """Return the sentence for a connection that ended before the other side had proved who it is."""
        me = self._links.me.id
        if isinstance(error, ssl.SSLError) and self.wanted:
            return _tls_problem(me, self.wanted, self.place, error)
        other = self.wanted or "the other side"
        said = f"{other} at {self.place} has closed the connection to {me} without a word"
        detail = f" ({error})" if error else ""
        if self.wanted and self._links.security.connecting is not None:
            # TLS 1.3 verifies the certificate of the side that connects when that believes to be connected already.
            return (
                f"{said}{detail}: does it trust the certificate of {me}? (option cluster.certificate; its authority "
                f"must be in cluster.ca of {other})"
            )
        return f"{said}{detail}: is TLS configured on one side only, or is it no member?"

    @property
    def _closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close, after what is to be written, if that does not take long."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._loop.call_later(CLOSE_GRACE, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{address!r} is not HOST:PORT or [IPV6]:PORT")
    return "" if host == "*" else host, int(port)


def _tls_problem(me: str, id_: str, address: str, error: ssl.SSLError) -> str:
    """Return the sentence for a connection that ended in TLS."""
    detail = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{me} does not trust the certificate of {id_} at {address} (option cluster.ca): {error.verify_message}"
    if "CERT" in detail or "UNKNOWN_CA" in detail:
        return (
            f"{id_} at {address} does not trust the certificate of {me} (option cluster.certificate; its authority "
            f"must be in cluster.ca of {id_}): {detail}"
        )
    return f"{me} and {id_} at {address} cannot agree on TLS: {detail}. Is it configured on one side only?"
