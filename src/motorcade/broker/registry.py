"""All sessions of a node by client id: open, resume, take-over, session expiry, and wills with their delay.

A session ends when its client connects with clean start (discarded), when its session expiry interval is over
(terminated), or with its connection if the interval is 0 (terminated). Its will is published when the will delay is
over or the session ends, whichever comes first; never after a normal DISCONNECT.  [MQTT-3.1.2-8], [MQTT-3.1.3-9]

Durable sessions are stored when they change here (`store`), and come back with `restore`.

Time comes in as an argument: `wall` in seconds since the epoch.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from motorcade.broker.pubsub import PubSub
from motorcade.broker.session import Owed, Session, Wake
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode

if TYPE_CHECKING:
    from motorcade.broker.session_store import SessionStore


class Registry:
    """The sessions of one node."""

    def __init__(self, shared: SessionContext, pubsub: PubSub) -> None:
        self.sessions: dict[str, Session] = {}
        self.connected = 0
        self.maximum = 0  #: most clients ever connected at once
        self.store: SessionStore | None = None
        self._shared = shared
        self._pubsub = pubsub
        self._timers: list[tuple[float, int, Wake]] = []  # heap of (when, tie-breaker, whose)
        self._count = 0

    @property
    def stats(self) -> Stats:
        """The counters of this node."""
        return self._shared.stats

    def open(self, client: ClientInfo, *, clean: bool, wall: float) -> tuple[Session, bool, list[Message]]:
        """Return (session, whether it was there before, wills to publish) for a client that has been let in.

        A connection the client already has is ended: [MQTT-3.1.4-2], [MQTT-3.1.4-3].
        """
        overdue: list[Message] = []
        old = self.sessions.get(client.client_id)
        if old is not None and old.link is None:
            overdue = self._overdue(old, wall)  # the timers may not have come to it yet
            old = self.sessions.get(client.client_id)
        if old is None:
            return self._create(client, wall), False, overdue
        # Another user's session is not for this one, whatever client id it uses.
        resume = not clean and old.expiry > 0 and old.client.username == client.username
        wills = self._take_over(old, resume=resume, wall=wall) if old.link is not None else overdue
        if not resume:
            wills += self._end(old, "discarded", wall)  # [MQTT-3.1.2-4]
            return self._create(client, wall), False, wills
        old.will = old.will_at = old.expires_at = old.disconnected_at = None
        old.client = client
        old.connected_at = wall
        self._shared.stats.sessions["resumed"] += 1
        return old, True, wills

    def _create(self, client: ClientInfo, wall: float) -> Session:
        session = self.sessions[client.client_id] = Session(self._shared, client, wall)
        self._pubsub.is_here(client.client_id)
        self._shared.stats.sessions["created"] += 1
        return session

    def _take_over(self, session: Session, *, resume: bool, wall: float) -> list[Message]:
        """End the connection a session has now; the wills to publish."""
        link = session.link
        if resume and session.will_delay:
            session.will = None  # the client is back before the delay is over: [MQTT-3.1.3-9]
        if link is not None:
            link.flush()  # answers to the old connection are its own
        wills = self._disconnect(session, wall)
        self._notify("takenover", session)
        if link is not None:
            link.end(ReasonCode.SESSION_TAKEN_OVER, "another connection uses this client id")
        return wills

    def connect(self, session: Session) -> None:
        """Count a session whose connection is now attached."""
        self.connected += 1
        self.maximum = max(self.maximum, self.connected)
        self._pubsub.presence(session)

    def disconnect(self, session: Session, wall: float, *, with_will: bool) -> list[Message]:
        """Disconnect a session whose connection is gone; return the wills to publish now."""
        if not with_will:
            session.will = None  # [MQTT-3.1.2-10], [MQTT-3.14.4-3]
        wills = self._disconnect(session, wall)
        if not session.expiry:
            wills += self._end(session, "terminated", wall, "disconnected")
        if self.store is not None:
            self.store.disconnected(session)
        return wills

    def let_go(self, session: Session, wall: float, *, resume: bool) -> list[Message]:
        """End the connection of a client that another member serves from now on; return the wills to publish."""
        wills = self._take_over(session, resume=resume, wall=wall)
        if not session.expiry:
            wills += self._end(session, "terminated", wall, "disconnected")
        return wills

    def forget(self, session: Session) -> None:
        """Drop a session that goes on elsewhere: nothing of it ends."""
        client_id = session.client.client_id
        if self.sessions.get(client_id) is session:
            del self.sessions[client_id]
        if session.link is not None:
            self._disconnect(session, 0.0)
        self._pubsub.unsubscribe_all(session)
        if session.scheduler is not None:
            session.scheduler.end()
            session.scheduler = None
        wake, session.wake = session.wake, None
        if wake is not None:
            wake.session = None
        if self._shared.hooks.session_left is not None:
            self._shared.hooks.session_left.notify(session.client)

    def _disconnect(self, session: Session, wall: float) -> list[Message]:
        session.link = None
        session.detach()
        self._pubsub.presence(session)
        session.disconnected_at = wall
        self.connected -= 1
        hooks = self._shared.hooks
        if hooks.session_disconnected is not None:
            hooks.session_disconnected.notify(session.client)
        session.expires_at = wall + session.expiry
        if session.expiry:
            self._wake(session, session.expires_at)
        if session.will is None:
            return []
        if not session.will_delay or not session.expiry:
            return self.take_will(session)
        session.will_at = wall + session.will_delay
        self._wake(session, session.will_at)
        return []

    def restore(self, session: Session) -> None:
        """Take in a session that the process before this one has left."""
        self.sessions[session.client.client_id] = session
        self._pubsub.is_here(session.client.client_id)
        for later in (session.will_at, session.expires_at):
            if later is not None:
                self._wake(session, later)

    def _save(self, session: Session) -> None:
        if self.store is not None and (session.durable is not None or session.recorded) and not session.ended:
            self.store.save(session)

    def end(self, client_id: str, wall: float) -> list[Message]:
        """Remove a session that is not connected; the wills to publish."""
        session = self.sessions.get(client_id)
        return [] if session is None else self._end(session, "terminated", wall, "removed")

    def _end(self, session: Session, event: str, wall: float, why: str = "") -> list[Message]:
        self.sessions.pop(session.client.client_id, None)
        self._pubsub.hand_on(session, wall)
        filters = list(session.subscriptions)
        self._pubsub.unsubscribe_all(session)
        if session.scheduler is not None:
            session.scheduler.end()
            session.scheduler = None
        session.empty_queue()
        session.inflight.clear()
        session.expires_at = None
        session.ended = True
        wake, session.wake = session.wake, None
        if wake is not None:
            wake.session = None
        if self.store is not None:
            self.store.ended(session, filters)
        self._notify(event, session, why)
        return self.take_will(session)

    def take_will(self, session: Session) -> list[Message]:
        """Return the will of a session, if it has one, to be published."""
        will, session.will, session.will_at = session.will, None, None
        if will is None:
            return []
        if session.durable is not None or session.recorded:
            session.owed = Owed(will, Commit())
            will.headers["owed_by"] = session
        return [will]

    def paid(self, session: Session) -> None:
        """Note that the will of a durable session is published."""
        owed, session.owed = session.owed, None
        self._save(session)
        if owed is not None:
            owed.done.finish()

    def _notify(self, event: str, session: Session, why: str = "") -> None:
        self._shared.stats.sessions[event] += 1
        hooks = self._shared.hooks
        if event == "takenover" and hooks.session_takenover is not None:
            hooks.session_takenover.notify(session.client)
        elif event == "discarded" and hooks.session_discarded is not None:
            hooks.session_discarded.notify(session.client)
        elif event == "terminated" and hooks.session_terminated is not None:
            hooks.session_terminated.notify(session.client, why)

    # -- what happens later

    def _wake(self, session: Session, when: float) -> None:
        """Look at a session again at a time. One entry per session is enough: the earliest."""
        if session.wake_at is not None and session.wake_at <= when:
            return
        session.wake_at = when
        self._count += 1
        wake = session.wake = session.wake or Wake(session)
        heapq.heappush(self._timers, (when, self._count, wake))
        if len(self._timers) > 2 * len(self.sessions) + 1000:  # entries of sessions that ended long before their time
            self._timers = [
                entry for entry in self._timers if entry[2].session is not None and entry[2].session.wake_at == entry[0]
            ]
            heapq.heapify(self._timers)

    def due(self, wall: float, budget: int = 1000) -> list[Message]:
        """End what has expired, at most `budget` sessions; the wills to publish now."""
        wills: list[Message] = []
        timers = self._timers
        while timers and timers[0][0] <= wall and budget:
            when, _, wake = heapq.heappop(timers)
            session = wake.session
            if session is None or session.wake_at != when:
                continue  # it has ended, or an earlier entry took its place
            session.wake_at = None
            budget -= 1
            if session.link is not None:
                continue
            wills += self._overdue(session, wall)
            for later in (session.will_at, session.expires_at):
                if later is not None:
                    self._wake(session, later)
        return wills

    def _overdue(self, session: Session, wall: float) -> list[Message]:
        """End a session whose time is over, or publish its will if that is due; the wills to publish."""
        if session.expires_at is not None and session.expires_at <= wall:
            self._shared.stats.expired_sessions += 1
            return self._end(session, "terminated", wall, "expired")
        # One without a delay is due at once, also if its session was brought here a moment after `wall`.
        if session.will_at is not None and (session.will_at <= wall or not session.will_delay):
            wills = self.take_will(session)
            self._save(session)
            return wills
        return []
