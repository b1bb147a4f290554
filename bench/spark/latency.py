"""The latency of a node: messages at a fixed rate from one client to another, QoS 1, stored in a stream on the way.

    latency.py PORT RATE SECONDS     prints p50, p99 and the number of messages as JSON; milliseconds

Each message has a time at which it is due, and its latency counts from then, sent late or not.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time

from motorcade.client import Client

DUE = struct.Struct(">d")


async def measure(port: int, rate: float, seconds: float) -> dict[str, float]:
    latencies: list[float] = []
    async with (
        await Client.connect(port=port, client_id="bench-to") as receiver,
        await Client.connect(port=port, client_id="bench-from") as sender,
    ):
        await receiver.subscribe(("v/#", 1))
        count = int(rate * seconds)

        async def take() -> None:
            async for message in receiver:
                latencies.append(time.perf_counter() - DUE.unpack_from(message.payload)[0])
                if len(latencies) == count:
                    return

        taking = asyncio.create_task(take())
        begun = time.perf_counter()
        for number in range(count):
            due = begun + number / rate
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            await sender.send("v/bench", DUE.pack(due) + b"." * 92, 1)
        await asyncio.wait_for(taking, 30)
    latencies.sort()
    middle, high = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    return {"p50": middle * 1000, "p99": high * 1000, "messages": len(latencies)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))))
