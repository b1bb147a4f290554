"""The requests of a channel to its connection: the values that its generators yield.

SendPacket(packet)            write a packet to this client
RunHook(chain, …)             run a hook chain, which may wait; the answer is sent back into the generator
RECEIVE                       wait for the client's next packet; it is sent back into the generator
NEXT_TURN                     go on in the next turn of the event loop; others have theirs first
BindSession(session, …)       the client is let in: bind this connection to the session
RenewCredentials(expires_at)  the client has shown new credentials
AwaitReceiver(session)        go on when a receiver that is behind has caught up
AwaitMembers(commit, view)    go on when other members can be relied on again, or have room for more
Await(commit)                 go on when something is stored, in the order in which it was asked for; other packets
                              of the client are taken meanwhile, unless `hold`
PublishWill(message)          publish a will of some session
Close(with_will)              close the connection; with_will tells whether the client's will is due
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

from motorcade.broker.session import Session
from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.extension.hooks import Chain
from motorcade.mqtt.packets import Packet


@dataclass(frozen=True, slots=True)
class SendPacket:
    """Write a packet to this client."""

    packet: Packet


@dataclass(frozen=True, slots=True)
class RunHook:
    """Run a hook chain and send its result back."""

    chain: Chain
    args: tuple[object, ...]
    acc: object


@dataclass(frozen=True, slots=True)
class BindSession:
    """The client is let in."""

    session: Session
    keep_alive: int  #: seconds
    expires_at: float | None  #: when its credentials end, seconds since the epoch


@dataclass(frozen=True, slots=True)
class RenewCredentials:
    """The client has authenticated again."""

    expires_at: float | None  #: when its credentials end, seconds since the epoch


@dataclass(frozen=True, slots=True)
class PublishWill:
    """Publish a will."""

    message: Message


@dataclass(frozen=True, slots=True)
class AwaitReceiver:
    """Go on when a client that is behind has caught up, or has been waited for long enough."""

    session: Session


@dataclass(frozen=True, slots=True)
class Await:
    """Go on when a commit is done, and everything that the session has asked for before."""

    commit: Commit[Any]
    hold: bool = False  #: take no packets meanwhile
    size: int = 0  #: bytes of the message that waits
    routed: bool = False  #: the message is delivered already, and only its answer waits


@dataclass(frozen=True, slots=True)
class AwaitMembers:
    """Go on when a commit of the cluster is done; take no packets meanwhile."""

    commit: Commit[None]
    view: bool  #: members may know of subscribers that are not known here; else one of them has no room for more


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection."""

    with_will: bool


class _Receive:
    __slots__ = ()


class _NextTurn:
    __slots__ = ()


RECEIVE: Final = _Receive()
NEXT_TURN: Final = _NextTurn()
Effect = (
    SendPacket
    | RunHook
    | BindSession
    | RenewCredentials
    | AwaitReceiver
    | AwaitMembers
    | Await
    | PublishWill
    | Close
    | _Receive
    | _NextTurn
)
Steps = Generator[Effect, Any, None]
