"""The handshake in which leader and worker prove that they know the secret, before any other frame. Pure.

    leader                         worker
    CHALLENGE, nonce ────────▶ ◀── CHALLENGE, nonce     both as soon as they are connected
    PROOF ───────────────────▶                          HMAC-SHA-256 of "leader", the worker's nonce, the leader's nonce
                      ◀─────────── PROOF                the same of "worker"; the leader sends messages from now on
    REFUSED, why ────────────▶ ◀── REFUSED, why         then the connection is closed

The frames are those of `frames.py`, with commands of their own. A side without a secret knows nothing of them and
speaks as the seed does; a side with a secret takes nothing from a peer that has not proved that it knows it.
`core/handshake.py` has the proofs and their rules; the worker is the side that accepts.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from motorcade.core.handshake import NONCE_SIZE, PROOF_SIZE, HandshakeError, Prover, new_nonce
from motorcade.dispatch.frames import CHALLENGE, MAX_REASON, PROOF, REFUSED, VERSION

_HEADER: Final = Struct(">BBI")
_CONTEXT: Final = b"motorcade dispatch 1 "


def refused_frame(why: str) -> bytes:
    text = why.encode("utf-8", "replace")[:MAX_REASON]
    return _HEADER.pack(VERSION, REFUSED, len(text)) + text


class Handshake:
    """One side of one connection."""

    def __init__(self, secret: bytes, *, leads: bool) -> None:
        self.done = False
        self.rest = b""  #: what has come after the handshake
        self._prover = Prover(secret, _CONTEXT)
        self._leads = leads
        self._nonce = new_nonce()
        self._theirs = b""
        self._buffer = b""

    def hello(self) -> bytes:
        """Return the first frame."""
        return _HEADER.pack(VERSION, CHALLENGE, NONCE_SIZE) + self._nonce

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the answer; `HandshakeError` says why the connection is to be closed."""
        self._buffer += data
        answer = b""
        while not self.done and len(self._buffer) >= _HEADER.size:
            version, command, length = _HEADER.unpack_from(self._buffer)
            self._check(version, command, length)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            payload, self._buffer = self._buffer[_HEADER.size : end], self._buffer[end:]
            answer += self._take(command, payload)
        if self.done:
            self.rest, self._buffer = self._buffer, b""
        return answer

    def _check(self, version: int, command: int, length: int) -> None:
        if version != VERSION:
            raise HandshakeError(f"version {version} of the protocol is unknown; this is version {VERSION}")
        if command == REFUSED and length <= MAX_REASON:
            return
        wanted = PROOF if self._theirs else CHALLENGE
        if command != wanted or length != (PROOF_SIZE if wanted == PROOF else NONCE_SIZE):
            raise HandshakeError(
                "the other side has not shown that it knows the secret: leaders and workers need the same one (option "
                "secret_file of [dispatch])"
            )

    def _take(self, command: int, payload: bytes) -> bytes:
        if command == REFUSED:
            raise HandshakeError(f"refused: {payload.decode('utf-8', 'replace')}")
        if command == CHALLENGE:
            self._theirs = payload
            return self._own_proof() if self._leads else b""
        if not self._prover.proves(payload, _role(not self._leads), self._nonce, self._theirs):
            raise HandshakeError("leader and worker have different secrets (option secret_file of [dispatch])")
        self.done = True
        return b"" if self._leads else self._own_proof()

    def _own_proof(self) -> bytes:
        """Return the answer to the other side's nonce, together with the own one."""
        proof = self._prover.prove(_role(self._leads), self._theirs, self._nonce)
        return _HEADER.pack(VERSION, PROOF, PROOF_SIZE) + proof


def _role(leads: bool) -> bytes:
    return b"leader " if leads else b"worker "
