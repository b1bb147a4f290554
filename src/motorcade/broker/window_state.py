"""The states of an inflight window, and whether publishers wait for its client (`session`, rules 3 and 4)."""

from __future__ import annotations

import enum


class WindowState(enum.IntEnum):
    """The way of a message that comes now. Each state allows what those before it allow, and more."""

    OFFLINE = 0  #: no connection is attached
    CONNECTING = 1  #: a connection is attached, but its client has no CONNACK yet: nothing may go out before
    FULL_SOCKET = 2  #: the socket takes no bytes: QoS 0 is dropped, everything else waits
    WAITING = 3  #: the socket takes bytes, but something waits already, and goes first
    READY = 4  #: a message may go straight to the socket (`session`, rule 3)


class Lag(enum.Enum):
    """The state of a client that publishers may wait for (`session`, rule 4)."""

    NONE = enum.auto()  #: it keeps up with them
    BEHIND = enum.auto()  #: those who publish to it alone wait
    GIVEN_UP = enum.auto()  #: they have waited long enough: what does not fit is dropped


OFFLINE, CONNECTING, FULL_SOCKET, WAITING, READY = WindowState
BEHIND = Lag.BEHIND
