"""The beginning of a connection between two members: each says who it is, and proves that it knows the secret. Pure.

    side that connects (higher number)        side that accepts
    HELLO ───────────────────────────▶        version, cluster, store, who it is, a nonce
                                     ◀─────── HELLO, or REFUSED and why
    PROOF, received up to ───────────▶
                                     ◀─────── PROOF, received up to, or REFUSED
    from here on items

A proof is about both HELLOs as they were sent, so about names, numbers, tokens and nonces, and about what its side has
received: nothing of it can be changed on the way. `core/handshake.py` has the rules. Without a secret proofs are empty,
and TLS tells who may connect (`security.py`).

`received up to` is the number of the last item that this incarnation has taken over from that one: what is above it is
sent again.

Rule 1: a refusal is a sentence that names both sides and, if one is wrong, the option: it stands in the log of both.
Rule 2: until the other side has proved who it is, nothing is kept of what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Final

import msgspec

from motorcade.cluster.frames import (
    HELLO,
    MAX_HELLO,
    PROOF,
    REFUSED,
    FrameReader,
    LinkFrameError,
    hello_frame,
    proof_frame,
    read_proof,
    read_sentence,
)
from motorcade.core.handshake import HandshakeError, Prover, new_nonce

PROTOCOL: Final = 1  #: what is said after HELLO
OLDEST: Final = 1  #: the oldest protocol that this version still speaks

_CONTEXT: Final = b"motorcade cluster link "
_CONNECTS: Final = b"connects"
_ACCEPTS: Final = b" accepts"

Text = Annotated[str, msgspec.Meta(max_length=255)]
Bytes = Annotated[bytes, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class OtherMemberError(HandshakeError):
    """Another member has the address now: the one that was dialled is gone, or will soon be known to be."""


class PeerRefusesError(HandshakeError):
    """The other side has said that it refuses, and why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """An incarnation of a member."""

    cluster: str
    store: str  #: id of the store that all members share
    name: str
    number: int
    token: bytes  #: of this incarnation: a number may be given twice after a fail-over of the store
    software: str

    @property
    def id(self) -> str:
        return f"{self.name}~{self.number}"


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a side; fields that a version does not know are left out of account."""

    protocol: Number
    oldest: Number
    software: Text = ""
    name: Text = ""
    number: Number = 0
    cluster: Text = ""
    store: Text = ""
    token: Bytes = b""
    nonce: Bytes = b""
    secret: bool = False
    max_frame: Number = 0
    wanted: Text = ""  #: whom the side that connects believes to be here

    @property
    def id(self) -> str:
        return f"{self.name}~{self.number}"


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Hello).decode

#: Given the other side's HELLO: what was received from that incarnation; `HandshakeError` if it is refused.
Resume = Callable[[Hello], int]


class Greeting:
    """One side of one connection."""

    def __init__(self, me: Identity, secret: bytes, max_frame: int, resume: Resume, wanted: str = "") -> None:
        self.done = False
        self.peer: Hello | None = None  #: not proved until it is done
        self.received = 0  #: the number of the last item that the other side has of this one's
        self.rest = b""  #: what has come after it
        self._me = me
        self._wanted = wanted  #: id of the member to connect to; empty on the side that accepts
        self._resume = resume
        self._prover = Prover(secret, _CONTEXT) if secret else None
        self._reader = FrameReader(MAX_HELLO)
        self._hello = _encode(
            Hello(
                protocol=PROTOCOL,
                oldest=OLDEST,
                software=me.software,
                name=me.name,
                number=me.number,
                cluster=me.cluster,
                store=me.store,
                token=me.token,
                nonce=new_nonce(),
                secret=bool(secret),
                max_frame=max_frame,
                wanted=wanted,
            )
        )
        self._digests = b""  #: of both HELLOs, that of the side that connects first

    def begin(self) -> bytes:
        """Return what this side says without being asked."""
        return hello_frame(self._hello) if self._wanted else b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the answer; `HandshakeError` says why the connection is to be closed."""
        answer = b""
        try:
            for kind, frame, start, stop in self._reader.feed(data):
                answer += self._take(kind, frame, start, stop)
                if self.done:
                    self.rest = frame[stop:]
                    break
        except LinkFrameError as error:
            raise HandshakeError(
                f"{self._me.id} cannot read what {self._other} says: {error}. Is TLS configured on one side only, "
                "or is it no member?"
            ) from None
        return answer

    @property
    def _other(self) -> str:
        return self.peer.id if self.peer is not None else self._wanted or "the other side"

    def _take(self, kind: int, frame: bytes, start: int, stop: int) -> bytes:
        if kind == REFUSED:
            raise PeerRefusesError(f"{self._other} refuses {self._me.id}: {read_sentence(frame, start, stop)}")
        if kind == HELLO and self.peer is None:
            return self._take_hello(frame[start:stop])
        if kind == PROOF and self.peer is not None:
            return self._take_proof(self.peer, *read_proof(frame, start, stop))
        raise HandshakeError(f"{self._other} has sent a frame of kind {kind} to {self._me.id} before it said who it is")

    def _take_hello(self, body: bytes) -> bytes:
        try:
            peer = _decode(body)
        except msgspec.MsgspecError as error:
            raise HandshakeError(f"{self._other} has sent {self._me.id} a HELLO that cannot be read: {error}") from None
        if why := self._misfit(peer):
            raise HandshakeError(why)
        if self._wanted and peer.id != self._wanted:
            raise OtherMemberError(f"{self._me.id} has connected to {self._wanted}, but {peer.id} is there now")
        if self._wanted and peer.number >= self._me.number:
            raise HandshakeError(f"{self._me.id} has connected to {peer.id}, which has to connect to {self._me.id}")
        self.peer = peer
        mine, theirs = sha256(self._hello).digest(), sha256(body).digest()
        if self._wanted:
            self._digests = mine + theirs
            return self._own_proof(peer)
        self._digests = theirs + mine
        return hello_frame(self._hello)

    def _take_proof(self, peer: Hello, received: int, proof: bytes) -> bytes:
        role = _ACCEPTS if self._wanted else _CONNECTS
        if self._prover is not None and not self._prover.proves(proof, role, self._digests, _fact(received)):
            raise HandshakeError(f"{self._me.id} and {peer.id} have different secrets (option cluster.secret_file)")
        if not self._wanted and (peer.wanted != self._me.id or peer.number <= self._me.number):
            # Its own side has seen that in the HELLO, if it is what it says.
            raise HandshakeError(f"{peer.id} has connected to {peer.wanted}, but {self._me.id} is here")
        self.received = received
        answer = b"" if self._wanted else self._own_proof(peer)
        self.done = True
        return answer

    def _own_proof(self, peer: Hello) -> bytes:
        received = self._resume(peer)
        if self._prover is None:
            return proof_frame(received, b"")
        role = _CONNECTS if self._wanted else _ACCEPTS
        return proof_frame(received, self._prover.prove(role, self._digests, _fact(received)))

    def _misfit(self, peer: Hello) -> str:
        """Return the reason why the two cannot speak to each other."""
        me = self._me
        if not f"{peer.name}{peer.cluster}{peer.store}{peer.software}{peer.wanted}".isprintable():
            return f"{self._other} has told {me.id} a name that cannot be shown"
        if peer.oldest > PROTOCOL or peer.protocol < OLDEST:
            return (
                f"{me.id} (Motorcade {me.software}) speaks {_versions(OLDEST, PROTOCOL)} of the links between members, "
                f"{peer.id} (Motorcade {peer.software}) {_versions(peer.oldest, peer.protocol)}: update the older one"
            )
        if peer.cluster != me.cluster:
            theirs = f"{peer.id} of {peer.cluster!r}"
            return f"{me.id} is a member of the cluster {me.cluster!r}, {theirs} (option cluster.name)"
        if peer.store != me.store:
            return (
                f"{me.id} and {peer.id} have different stores ({me.store} and {peer.store}): all members of a cluster "
                "share one (option store.url)"
            )
        if peer.secret != (self._prover is not None):
            with_, without = (peer.id, me.id) if peer.secret else (me.id, peer.id)
            return (
                f"{with_} has a secret and {without} has none: all members need the same (option cluster.secret_file)"
            )
        return ""


def _fact(received: int) -> bytes:
    return received.to_bytes(8, "little")


def _versions(oldest: int, newest: int) -> str:
    return f"protocol {newest}" if oldest == newest else f"protocols {oldest} to {newest}"
