"""Two sides of a connection show each other that they know a secret, before anything else is said. Pure.

    side that connects                side that accepts
    nonce ───────────────────▶ ◀───── nonce
    proof ───────────────────▶        HMAC-SHA-256 of its role, both nonces, and what else both have said so far
                             ◀─────── proof            the same of the other role

How nonces and proofs are framed, and what else is proved by them, is the matter of each protocol: leader and worker
(`dispatch/handshake.py`), members of a cluster (`cluster/greeting.py`).

Rule 1: the side that accepts proves last: who merely connects to it gets nothing to guess the secret by.
Rule 2: a proof says whose it is, so a peer cannot pass by sending back what it was sent.
Rule 3: nonces are random and used once, so a peer cannot pass by what it has recorded.
"""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256
from typing import Final

from motorcade.core.errors import MotorcadeError

NONCE_SIZE: Final = 32
PROOF_SIZE: Final = sha256().digest_size


class HandshakeError(MotorcadeError):
    """The peer does not know the secret, or does not ask for one that this side has, or does not fit otherwise."""


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_SIZE)


class Prover:
    """The secret of a protocol. Facts that are proved have a fixed size: they are joined without marks."""

    __slots__ = ("_context", "_secret")

    def __init__(self, secret: bytes, context: bytes) -> None:
        self._secret = secret
        self._context = context  #: so that a proof is worth nothing in another protocol

    def prove(self, role: bytes, *facts: bytes) -> bytes:
        """Return the proof of a role about facts."""
        return hmac.digest(self._secret, b"".join((self._context, role, *facts)), sha256)

    def proves(self, proof: bytes, role: bytes, *facts: bytes) -> bool:
        """Return True if this is the proof of that role about these facts."""
        return hmac.compare_digest(proof, self.prove(role, *facts))
