"""Passwords from a file, checked by a few threads.

One check costs tens of milliseconds of processor time on purpose. So it never runs on the event loop, only `workers`
run at once, only `max_waiting` wait, and a right password is remembered for a while.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access.backends import Accepted, Answer
from motorcade.plugins.access.config import Password
from motorcade.plugins.access.memory import SuccessCache
from motorcade.plugins.access.passwords import PasswordFile

MAX_PASSWORD = 4096  #: bytes; longer ones are refused without hashing


class PasswordBackend:
    """Allows a user of the file with the right password, denies a wrong one, passes unknown users on."""

    def __init__(self, config: Password) -> None:
        self.name = f"password file {config.file}"
        self._file = PasswordFile.load(config.file)
        self._superusers = frozenset(config.superusers)
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="password")
        self._capacity = config.workers + config.max_waiting
        self._under_way = 0
        self._cache: SuccessCache[Accepted] = SuccessCache(config.cache_seconds, config.cache_size)

    async def check(self, client: ClientInfo, credentials: Credentials, now: float) -> Answer:
        username, password = client.username, credentials.password
        if not username or password is None or credentials.method is not None:
            return None
        known = self.remembered(client, credentials, now)
        if known is not None:
            return known
        if len(password) > MAX_PASSWORD:
            return Deny()
        if self._under_way >= self._capacity:
            return Deny(ReasonCode.SERVER_BUSY, "too many log-ins at once")
        stored, own = self._file.stored(username)
        self._under_way += 1
        try:
            # If the client goes away meanwhile, a check that waits is dropped; one that runs is let finish.
            right = await asyncio.wrap_future(self._threads.submit(stored.verify, password))
        finally:
            self._under_way -= 1
        if not own:
            return None
        if not right:
            return Deny()
        accepted = Accepted(Allow(superuser=username in self._superusers))
        self._cache.put((username, stored.encoded, password), accepted, now)
        return accepted

    def remembered(self, client: ClientInfo, credentials: Credentials, now: float) -> Accepted | None:
        if not client.username or credentials.password is None or credentials.method is not None:
            return None
        stored, _ = self._file.stored(client.username)
        return self._cache.get((client.username, stored.encoded, credentials.password), now)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
