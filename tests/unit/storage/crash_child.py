"""Appends until it is killed; prints the number of a batch only after the store has said that it is durable."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from motorcade.storage.ports import Draft
from motorcade.storage.rocks import RocksStore

OWNERS = [f"v{number}" for number in range(20)]
NOW = 1_000_000.0


def body(number: int) -> bytes:
    return b"%d" % number


async def main() -> None:
    store = RocksStore(Path(sys.argv[1]))
    await store.open()
    numbers = iter(range(int(sys.argv[2]), 10**9))

    async def publisher() -> None:
        for number in numbers:
            batch = store.batch()
            # One payload for all owners, one record and one stream row: all or nothing of each batch must be there.
            batch.append(OWNERS, Draft(body(number), b"%d " % number * 100), NOW)
            batch.put("batches", str(number), b"")
            batch.stream("log", [body(number)], NOW)
            await batch.commit()
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    await asyncio.gather(*(publisher() for _ in range(8)))


if __name__ == "__main__":
    asyncio.run(main())
