"""Leader election: a lease in Redis, an epoch that grows with every term, and fences that refuse former leaders.

    campaign ─▶ lock taken, epoch + 1 ─▶ fences raised, all of them ─▶ term ─ renewed every quarter of the lease ─▶ over

The lock alone is not enough: a leader that was stopped for longer than its lease and goes on does not know better, and
a failover may forget the lock. So every key that a leader writes has a fence beside it with the epoch and the token of
who may, and every script that writes compares. A new leader raises all fences before it does anything else; if one is
as high as its own epoch (a failover has lost the counter's last step), it takes a higher epoch.

Rule 1: a term is over when its lease may be over, counted from when the last successful renewal was *sent*, by this
        process's own clock; or when any write is refused by a fence.
Rule 2: a leader that finds its fence gone steps down, and may be elected again. A fence is never repaired in a term.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from typing import Final

import structlog

from motorcade.core.errors import StoreError
from motorcade.dispatch.calls import ACQUIRE, OUTBID, RAISE, RELEASE, RENEW, Calls
from motorcade.dispatch.options import DispatchOptions
from motorcade.redis.servers import Purpose

log = structlog.get_logger("motorcade.dispatch")

#: Seconds between two attempts of a candidate, so that a lock that was released is taken at once.
ATTEMPT_INTERVAL: Final = 0.2
#: Part of the lease that a leader does not use: its clock and the server's need not run alike.
MARGIN: Final = 0.1
#: Leases for which a leader's report is kept, so that `status` shows who led last.
SHOWN: Final = 2
#: Seconds that a leader tries to give up the lock.
RELEASE_TIMEOUT: Final = 1.0
#: Times that a higher epoch is taken because of a fence; each one means that another candidate was quicker.
OUTBIDS: Final = 5


class TermOverError(Exception):
    """This process does not lead any more."""


def new_token() -> str:
    """Return a name that is unique to this candidate and tells where it runs."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


class LeaderTerm:
    """One term of a leader."""

    __slots__ = ("epoch", "expires", "fence", "token")

    def __init__(self, token: str, epoch: int, expires: float) -> None:
        self.token = token
        self.epoch = epoch
        self.fence = f"{epoch} {token}"
        self.expires = expires  #: loop time

    def check(self, now: float) -> None:
        """Raise if the lease may be over."""
        if now >= self.expires:
            raise TermOverError("the lease was not renewed in time")


class Election:
    """One candidate."""

    def __init__(self, calls: Calls, options: DispatchOptions) -> None:
        self.token = new_token()
        self._calls = calls
        self._lease = options.lease
        self._lock = options.key("lock")
        self._epoch = options.beside("lock", "epoch")
        self._state = options.beside("lock", "state")
        written = {options.source, "pending", "dead", "registry"}
        self._fences = [options.beside(name, "fence") for name in sorted(written)]

    async def campaign(self, stop: asyncio.Event) -> LeaderTerm | None:
        """Wait until this process leads. Return None if it is stopped before."""
        loop = asyncio.get_running_loop()
        trouble = ""
        while not stop.is_set():
            began = loop.time()
            try:
                epoch, left = await self._calls.run(
                    ACQUIRE,
                    [self._lock, self._epoch],
                    self.token,
                    self._milliseconds,
                    durable=True,
                    patience=self._lease,
                )
                if epoch:
                    term = LeaderTerm(self.token, epoch, began + self._lease * (1 - MARGIN))
                    if await self._raise_fences(term):
                        return term
                    left = 0
            except StoreError as error:
                left = 0
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("dispatch_election_held", error=trouble)
            pause = min(ATTEMPT_INTERVAL, left / 1000 if left > 0 else ATTEMPT_INTERVAL)
            try:
                await asyncio.wait_for(stop.wait(), max(pause, 0.005))
            except TimeoutError:
                pass
        return None

    async def renew(self, term: LeaderTerm, state: bytes) -> None:
        """Renew the lease, or raise `TermOverError`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            held = await self._calls.run(
                RENEW,
                [self._lock, self._state],
                self.token,
                self._milliseconds,
                state,
                self._milliseconds * SHOWN,
                patience=max(term.expires - began, 0.0),
                purpose=Purpose.READ,  # nothing with a WAIT holds it up there
            )
        except StoreError as error:
            raise TermOverError(f"the lease cannot be renewed: {error}") from None
        if not held:
            raise TermOverError("another process holds the lock, or it was lost")
        term.expires = began + self._lease * (1 - MARGIN)

    async def release(self) -> None:
        """Release the lock, so that another candidate leads at once."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT):
                await self._calls.run(RELEASE, [self._lock, self._state], self.token, purpose=Purpose.READ)
        except (StoreError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("dispatch_lock_not_released", error=why, effect="it expires with the lease")

    async def _raise_fences(self, term: LeaderTerm) -> bool:
        loop = asyncio.get_running_loop()
        for _ in range(OUTBIDS):
            answers = await asyncio.gather(
                *(
                    self._calls.run(RAISE, [fence], term.epoch, term.token, durable=True, patience=self._lease)
                    for fence in self._fences
                )
            )
            highest = max(answers)
            if not highest:
                if loop.time() < term.expires:
                    return True
                break
            term.epoch = await self._calls.run(OUTBID, [self._lock, self._epoch], self.token, highest, durable=True)
            term.fence = f"{term.epoch} {term.token}"
            if not term.epoch:
                break
        log.warning("dispatch_fences_not_raised", effect="another attempt is made")
        return False

    @property
    def _milliseconds(self) -> int:
        return int(self._lease * 1000)
