"""Queries of operators: leader, workers, backlog and dead letters; and the retry of dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from motorcade.core.errors import StoreError
from motorcade.dispatch.calls import RETRY, Calls
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.views import DeadLetterView, LeaderView, Status

#: Entries of the dead letters that are read at once.
PAGE: Final = 200
#: Milliseconds in which a dead letter is sent back once, however often that is asked for: longer than any retry.
RETRIED: Final = 3_600_000


@asynccontextmanager
async def _calls(options: DispatchOptions) -> AsyncIterator[Calls]:
    calls = Calls(options)
    await calls.open()
    try:
        yield calls
    finally:
        await calls.close()


async def status(options: DispatchOptions) -> Status:
    async with _calls(options) as calls:
        lock, state = options.key("lock"), options.beside("lock", "state")
        token, left, told, epoch, pending, dead, processed, registered, lag, lost = await asyncio.gather(
            calls.ask(lock, "GET", lock),
            calls.ask(lock, "PTTL", lock),
            calls.ask(state, "GET", state),
            calls.ask(lock, "GET", options.beside("lock", "epoch")),
            _size(calls, "ZCARD", options.key("pending")),
            _size(calls, "XLEN", options.key("dead")),
            _size(calls, "XLEN", options.key("processed")),
            _registered(calls, options),
            _lag(calls, options),
            _trimmed(calls, options),
        )
        view = msgspec.json.decode(told, type=LeaderView) if told and token else None
        return Status(
            leader=token.decode().rpartition(":")[0] if token else "",
            epoch=int(epoch or 0),
            lease_left=max(left, 0) / 1000,
            lag=lag,
            trimmed=lost[0],
            unfinished=lost[1],
            pending=pending,
            dead=dead,
            processed=processed,
            registered=registered,
            view=view if view is not None and view.token.encode() == token else None,
        )


async def _size(calls: Calls, command: str, key: str) -> int:
    size: int = await calls.ask(key, command, key)
    return size


async def _registered(calls: Calls, options: DispatchOptions) -> tuple[str, ...]:
    key = options.key("registry")
    seconds, microseconds = await calls.ask(key, "TIME")
    now = int(seconds) * 1000 + int(microseconds) // 1000
    names = await calls.ask(key, "ZRANGEBYSCORE", key, now, "+inf")
    return tuple(sorted(name.decode("utf-8", "replace") for name in names))


async def _trimmed(calls: Calls, options: DispatchOptions) -> tuple[int, int]:
    """Return what the leaders have counted: entries that were trimmed unread, and unfinished."""
    key = options.beside(options.source, "trimmed")
    unread, unfinished = await calls.ask(key, "HMGET", key, "unread", "unfinished")
    return int(unread or 0), int(unfinished or 0)


async def _lag(calls: Calls, options: DispatchOptions) -> int:
    """Return how many entries the group has not read.

    The server knows it, unless entries were deleted out of order. Older servers include those that were trimmed.
    """
    key = options.key(options.source)
    length = await _size(calls, "XLEN", key)
    if not length:
        return 0
    for group in await calls.ask(key, "XINFO", "GROUPS", key):
        facts: dict[bytes, Any] = dict(zip(group[::2], group[1::2], strict=True))
        if facts[b"name"] == options.group.encode():
            most = max(length - int(facts[b"pending"]), 0) if not options.keep_published else length
            return min(int(facts[b"lag"]), most) if facts.get(b"lag") is not None else most
    return length  # no group has ever read it


async def dead_list(options: DispatchOptions, limit: int = 100, after: str = "") -> list[DeadLetterView]:
    """Return dead letters, oldest first, behind the entry `after`."""
    async with _calls(options) as calls:
        return await _dead(calls, options, limit, after)


async def _dead(calls: Calls, options: DispatchOptions, limit: int, after: str) -> list[DeadLetterView]:
    key = options.key("dead")
    rows = await calls.ask(key, "XRANGE", key, f"({after}" if after else "-", "+", "COUNT", limit)
    return [_letter(entry, fields) for entry, fields in rows]


def _letter(entry: bytes, fields: list[bytes]) -> DeadLetterView:
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return DeadLetterView(
        entry=entry.decode(),
        id=named.get(b"id", b"").decode("utf-8", "replace"),
        payload=named.get(b"payload", b""),
        reason=named.get(b"reason", b"").decode("utf-8", "replace"),
        deliveries=int(named.get(b"deliveries", b"0")),
        worker=named.get(b"worker", b"").decode("utf-8", "replace"),
        time=float(named.get(b"time", b"0")),
    )


async def dead_retry(options: DispatchOptions, entries: Sequence[str] | None = None) -> int:
    """Send dead letters back to the intake, as new messages: all, or those with these entries or message ids.

    Each is put into the intake once, then removed here; after an interruption in between, ask again.
    `StoreError` names what is not among the dead letters; the others have been sent back then.
    """
    wanted = None if entries is None else set(entries)
    count = 0
    async with _calls(options) as calls:
        after = ""
        while page := await _dead(calls, options, PAGE, after):
            after = page[-1].entry
            for letter in page:
                if wanted is None or {letter.entry, letter.id} & wanted:
                    count += await _retry(calls, options, letter)
                    if wanted is not None:
                        wanted -= {letter.entry, letter.id}
            if wanted is not None and not wanted:
                break
    if wanted:
        raise StoreError(f"not among the dead letters: {', '.join(sorted(wanted))}; {count} others were sent back")
    return count


async def _retry(calls: Calls, options: DispatchOptions, letter: DeadLetterView) -> int:
    stream = options.key(options.source)
    mark = options.beside(options.source, f"retried:{letter.entry}")
    await calls.run(RETRY, [stream, mark], letter.payload, RETRIED, durable=True)
    key = options.key("dead")
    removed: int = await calls.ask(key, "XDEL", key, letter.entry)
    return removed
