"""Live messages that wait in memory until the window has room for them. Made when the first one waits.

Rule: a full queue drops its oldest QoS 0 message (which may be the one arriving), else its oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from motorcade.broker.frames import Frame, qos_of, topic_of
from motorcade.broker.revoked import Revoked

if TYPE_CHECKING:
    from motorcade.broker.session import Session


class LiveQueue:
    """The messages that wait for one client: an `Upstream` of its window."""

    __slots__ = ("_frames", "_window", "qos0", "size")

    def __init__(self, window: Session) -> None:
        self._window = window
        self._frames: deque[Frame] = deque()
        self.size = 0  #: bytes
        self.qos0 = 0  #: messages of QoS 0 among them

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._frames)

    @property
    def waits(self) -> bool:
        """Return True if it has a message to send."""
        return bool(self._frames)

    @property
    def needs_room(self) -> bool:
        """Return True if the next message must find room in the window."""
        return bool(self._frames) and bool(self._frames[0][0][0] & 6)

    def turn(self, now: float) -> bool:
        """Send the next message; False if there is none, or it must wait."""
        window, frames = self._window, self._frames
        if not frames or window.unsent or (window.durable is not None and window.durable.catch_up_to):
            return False
        frame = frames[0]
        if frame[0][0] & 6 and len(window.inflight) >= window.limit:
            return False
        frames.popleft()
        self._count(frame, -1)
        fresh = window.fresh(frame, now)
        if fresh is not None:
            window.send(fresh)
        return True

    def add(self, frame: Frame) -> None:
        """Append a message; drop by the rule above if there is no room for it."""
        frames = self._frames
        size = len(frame[0]) + len(frame[1])
        if frames and self._is_full(size):
            self._make_room(frame, size)
            return
        frames.append(frame)
        self._count(frame, 1)
        self._window.note_backlog(len(frames), self.size)

    def _is_full(self, size: int) -> bool:
        options = self._window.shared.options
        if options.queue and len(self._frames) >= options.queue:
            return True
        return bool(options.queue_bytes) and self.size + size > options.queue_bytes

    def _make_room(self, frame: Frame, size: int) -> None:
        frames, qos = self._frames, qos_of(frame)
        while frames and self._is_full(size):
            if self.qos0:
                index = next(i for i, waiting in enumerate(frames) if not qos_of(waiting))
                victim = frames[index]
                del frames[index]
            elif qos == 0:
                self._window.drop(frame, "queue_full")
                return
            else:
                victim = frames.popleft()
            self._count(victim, -1)
            self._window.drop(victim, "queue_full")
        frames.append(frame)
        self._count(frame, 1)

    def _count(self, frame: Frame, one: int) -> None:
        """Bring the figures up to date when a message has entered (1) or left (-1)."""
        size = (len(frame[0]) + len(frame[1])) * one
        self.size += size
        if not frame[0][0] & 6:
            self.qos0 += one
        shared = self._window.shared
        shared.queued += one
        shared.queued_bytes += size

    def replace(self, frames: Iterable[Frame]) -> None:
        """Have these wait instead of what does."""
        for frame in self._frames:
            self._count(frame, -1)
        self._frames = deque(frames)
        for frame in self._frames:
            self._count(frame, 1)

    def purge(self, revoked: Revoked) -> None:
        """Drop what may not be read any more."""
        kept: list[Frame] = []
        for frame in self._frames:
            if revoked.hides(topic_of(frame).decode()):
                self._window.drop(frame, "revoked")
            else:
                kept.append(frame)
        self.replace(kept)
