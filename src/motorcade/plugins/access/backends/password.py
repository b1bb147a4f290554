"""Passwords from a file, checked by a few threads.

One check costs tens of milliseconds of processor time on purpose. So it never runs on the event loop, only `workers`
run at once, only `max_waiting` wait, in turns by address (`FairQueue`), and a right password is remembered for a while.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access.backends import Accepted, Answer
from motorcade.plugins.access.config import Password
from motorcade.plugins.access.fair import FairQueue
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
        self._queue = FairQueue(config.workers, config.max_waiting)
        self._cache: SuccessCache[Accepted] = SuccessCache(config.cache_seconds, config.cache_size)

    async def check(self, client: ClientInfo, credentials: Credentials, now: float, flow: str = "") -> Answer:
        username, password = client.username, credentials.password
        if not username or password is None or credentials.method is not None:
            return None
        known = self.remembered(client, credentials, now)
        if known is not None:
            return known
        if len(password) > MAX_PASSWORD:
            return Deny()
        stored, own = self._file.stored(username)
        if not await self._queue.enter(flow):
            return Deny(ReasonCode.SERVER_BUSY, "too many log-ins at once")
        try:
            checking = asyncio.get_running_loop().run_in_executor(self._threads, stored.verify, password)
        except RuntimeError:  # closed meanwhile: there are new files
            self._queue.leave()
            return Deny(ReasonCode.SERVER_BUSY, "the log-in is to be tried again")
        checking.add_done_callback(self._done)
        # If the client goes away meanwhile, its check is let finish: the thread is taken until then.
        right = await asyncio.shield(checking)
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

    def _done(self, checking: asyncio.Future[bool]) -> None:
        if not checking.cancelled():
            checking.exception()  # its waiter gets it; if the client has gone, there is none
        self._queue.leave()

    async def close(self) -> None:
        self._queue.close()
        self._threads.shutdown(wait=False)  # what has begun, one check for each thread, is let finish
