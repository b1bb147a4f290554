"""Writes until it is killed; prints what it has done only after the store has said that it is durable.

number position    batch `number` is written; the position that it got in the first mailbox of DRAINED
mark number        its entry in the first mailbox of OWNERS is marked
forgotten number   the mailbox that was made for it is forgotten
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from motorcade.storage import deltas
from motorcade.storage.ports import Batch, Draft
from motorcade.storage.rocks import RocksStore

OWNERS = [f"v{number}" for number in range(20)]
DRAINED = [f"drained{number}" for number in range(10)]  #: their entries are acknowledged at once
NOW = 1_000_000.0


def body(number: int) -> bytes:
    return b"%d" % number


def mark(number: int) -> int:
    return number % 255 + 1


def forgotten(number: int) -> str:
    return f"forgotten{number}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def publish(store: RocksStore, number: int) -> None:
    batch = Batch()
    # One message for all owners, one record and one stream row: all or nothing of each batch must be there.
    batch.append(OWNERS, Draft(body(number), b"%d " % number * 100), NOW)
    batch.append([*DRAINED, forgotten(number)], Draft(body(number), bytes(50)), NOW)
    batch.put("batches", str(number), b"")
    batch.stream("log", [body(number)], NOW)
    answers = (await store.write(batch)).appended
    say(f"{number} {answers[len(OWNERS)].position}")
    await store.mailboxes.mark(OWNERS[0], answers[0].position, mark(number))
    say(f"mark {number}")
    for answer in answers[len(OWNERS) : -1]:
        await store.mailboxes.acknowledge(answer.owner, [answer.position])
    await store.mailboxes.forget(forgotten(number))
    say(f"forgotten {number}")


async def main() -> None:
    # Small generations, so that kills hit the moments between them too.
    deltas.MAX_ROWS = 50
    store = RocksStore(Path(sys.argv[1]))
    await store.open()
    numbers = iter(range(int(sys.argv[2]), 10**9))

    async def publisher() -> None:
        for number in numbers:
            await publish(store, number)

    await asyncio.gather(*(publisher() for _ in range(8)))


if __name__ == "__main__":
    asyncio.run(main())
