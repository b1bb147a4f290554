"""The writers: every store object that is open registers its writer, in every cell, and leaves when it is closed.

    open ──> join ──> w:writer in each cell, w in the first one lists it      commit.lua: no key, no write
    fence_member ──> w:writer closed in each cell, then off the list          the writer meets it with its next call

Rule 1: a writer is listed before it is registered anywhere, and taken off the list when it is fenced everywhere. So
        every registration can be found, also of a process that died while it opened or closed its store.
Rule 2: no key of a writer expires while it is registered. A process that stood still goes on if it was not fenced.
Rule 3: an open store shows every `PULSE` that it is alive. One that was not seen for `OVERDUE` is fenced by the sweep
        of another one: its process has died, or was cut off from the servers for as long.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from motorcade.storage.ports import Member, StoreAwayError, StoreError, StoreFencedError
from motorcade.storage.redis_scripts import JOIN
from motorcade.storage.redis_writer import FENCED, JobStage, Operation

if TYPE_CHECKING:
    from motorcade.storage.redis import Core

log = structlog.get_logger("motorcade.storage.redis")

#: Seconds between two signs of life of a writer, and without any after which it is fenced.
PULSE: Final = 3600.0
OVERDUE: Final = 86_400
#: Seconds that a store which is being closed tries to leave.
LEAVING: Final = 1.0
#: Seconds that replicas have to confirm a registration.
CONFIRMED: Final = 2.0

LIST: Final = "w"


async def join(core: Core, replicas: int) -> None:
    """Register the writer of a store that is being opened."""
    (slot, key), *others = core.writer.places
    told = f"{time.time():.3f}"
    answers = [await core.servers.evaluate(slot, JOIN, [key, core.key(0, LIST)], core.writer.name, told)]
    registering = (core.servers.evaluate(slot, JOIN, [key], core.writer.name, told) for slot, key in others)
    answers += await asyncio.gather(*registering)
    if not all(answers):
        raise StoreFencedError(FENCED)
    if replicas:
        masters = {core.servers.master(slot): slot for slot, _ in core.writer.places}
        waiting = (core.servers.ask(slot, "WAIT", replicas, int(CONFIRMED * 1000)) for slot in masters.values())
        if min(await asyncio.gather(*waiting)) < replicas:
            raise StoreAwayError(f"fewer than {replicas} replicas have confirmed that this store may write")
    _beat(core)


def _beat(core: Core) -> None:
    """Show that the writer is alive, and do so again in a while."""
    if core.pulse is not None:  # joining has shown it already
        core.writer.later(_seen(core))
    core.pulse = asyncio.get_running_loop().call_later(PULSE, _beat, core)


def _seen(core: Core) -> Operation:
    return Operation(("seen", 0, core.writer.name, OVERDUE))


async def leave(core: Core) -> None:
    """Remove the registration of a store that is being closed. If its servers are away, a sweep will find it."""
    if core.pulse is not None:
        core.pulse.cancel()
    if core.writer.fenced:
        return
    try:
        async with asyncio.timeout(LEAVING):
            await asyncio.gather(*(core.servers.ask(slot, "DEL", key) for slot, key in core.writer.places))
            await core.ask(0, "HDEL", LIST, b"", core.writer.name)
    except (StoreError, TimeoutError) as error:
        log.info("redis_writer_left_behind", writer=core.writer.name, error=str(error))


async def listed(core: Core) -> list[Member]:
    stored = await core.ask(0, "HGETALL", LIST)
    told = zip(stored[::2], stored[1::2], strict=True)
    return [Member(writer.decode(), float(text.partition(b":")[2])) for writer, text in told]


async def fence(core: Core, writer: str) -> bool:
    """Close the registration of a writer everywhere; False if it was not listed.

    It is closed all the same then: a fail-over may have forgotten the list, and not what other servers know.
    """
    listed = bool(await core.ask(0, "HEXISTS", LIST, b"", writer))
    cells = range(len(core.writer.places))
    await core.writer.submit([JobStage([Operation(("fence", cell, writer)) for cell in cells])])
    if writer == core.writer.name:
        core.writer.fenced = True
    if listed:
        await core.ask(0, "HDEL", LIST, b"", writer)
        log.warning("redis_writer_fenced", writer=writer)
    return listed


async def sweep(core: Core) -> None:
    """Show that this writer is alive, and fence those that are overdue."""
    for writer in await core.one(_seen(core), durable=False):
        await fence(core, writer)
