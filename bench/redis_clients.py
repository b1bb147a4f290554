#!/usr/bin/env python3
"""What one Redis command costs in the client: the thin connection beside redis-py and valkey-glide.

    .venv/bin/python bench/redis_clients.py [--rounds 5] [--commands 20000] [--loop uvloop|asyncio]

One HGET of a short value, from one process, to a server that is started for it. The figure to carry over is CPU per
command, of all threads of the client process; rates depend on what else the machine does. Clients take turns in every
round, and the median of the rounds counts, with the least and the most beside it. A client that is not installed is
left out: valkey-glide is no dependency (`pip install valkey-glide redis hiredis msgspec structlog uvloop` into a
scratch environment, and PYTHONPATH=src).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version

from motorcade.redis.resp import Access, ServerAddress, connect

Ask = Callable[[], Awaitable[object]]
IN_FLIGHT = 64
VALUE = b"value"


@contextmanager
def server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="motorcade-bench-redis-") as folder:
        line = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        try:
            yield port
        finally:
            process.terminate()
            process.wait()


async def ready(port: int) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            connection = await connect(ServerAddress("127.0.0.1", port), Access())
            await connection.call("HSET", "bench", "field", VALUE)
            connection.close()
            return
        except Exception:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)


@asynccontextmanager
async def thin(port: int) -> AsyncIterator[tuple[Ask, int]]:
    connection = await connect(ServerAddress("127.0.0.1", port), Access())
    yield lambda: connection.call("HGET", "bench", "field"), 1
    connection.close()


@asynccontextmanager
async def redis_py(port: int) -> AsyncIterator[tuple[Ask, int]]:
    import redis.asyncio  # noqa: PLC0415

    client = redis.asyncio.Redis(host="127.0.0.1", port=port)
    yield lambda: client.hget("bench", "field"), 1
    await client.aclose()


@asynccontextmanager
async def redis_py_pipeline(port: int) -> AsyncIterator[tuple[Ask, int]]:
    import redis.asyncio  # noqa: PLC0415

    client = redis.asyncio.Redis(host="127.0.0.1", port=port)

    async def ask() -> object:
        pipeline = client.pipeline(transaction=False)
        for _ in range(IN_FLIGHT):
            pipeline.hget("bench", "field")
        return (await pipeline.execute())[-1]

    yield ask, IN_FLIGHT
    await client.aclose()


@asynccontextmanager
async def glide(port: int) -> AsyncIterator[tuple[Ask, int]]:
    from glide import GlideClient, GlideClientConfiguration, NodeAddress  # noqa: PLC0415

    client = await GlideClient.create(GlideClientConfiguration([NodeAddress("127.0.0.1", port)]))
    yield lambda: client.hget("bench", "field"), 1
    await client.close()


#: name, what must be installed, how to make it, commands in flight
CASES = [
    ("thin connection", "hiredis", thin, 1),
    ("redis-py with hiredis", "redis", redis_py, 1),
    ("valkey-glide", "glide", glide, 1),
    ("thin connection", "hiredis", thin, IN_FLIGHT),
    ("redis-py with hiredis", "redis", redis_py, IN_FLIGHT),
    (f"redis-py, pipeline of {IN_FLIGHT}", "redis", redis_py_pipeline, IN_FLIGHT),
    ("valkey-glide", "glide", glide, IN_FLIGHT),
]


@dataclass
class Figures:
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  #: microseconds per command


async def measure(make, port: int, in_flight: int, commands: int) -> tuple[float, float]:
    async with make(port) as (ask, each):
        callers = in_flight // each
        turns = max(commands // (callers * each), 1)
        assert VALUE == await ask()

        async def caller() -> None:
            for _ in range(turns):
                await ask()

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(caller() for _ in range(callers)))
        taken, used = time.perf_counter() - started, time.process_time() - cpu
        done = turns * callers * each
        return done / taken, used / done * 1e6


async def run(rounds: int, commands: int, port: int) -> dict[tuple[str, int], Figures]:
    await ready(port)
    figures: dict[tuple[str, int], Figures] = {}
    for _ in range(rounds):
        for name, module, make, in_flight in CASES:
            if importlib.util.find_spec(module) is None:
                continue
            rate, cpu = await measure(make, port, in_flight, commands)
            found = figures.setdefault((name, in_flight), Figures())
            found.rates.append(rate)
            found.cpu.append(cpu)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    arguments = parser.parse_args()
    factory = None
    if arguments.loop == "uvloop":
        import uvloop  # noqa: PLC0415

        factory = uvloop.new_event_loop
    with server() as port, asyncio.Runner(loop_factory=factory) as runner:
        figures = runner.run(run(arguments.rounds, arguments.commands, port))
    packages = ("hiredis", "redis", "valkey-glide", "uvloop")
    modules = {"valkey-glide": "glide"}
    present = [name for name in packages if importlib.util.find_spec(modules.get(name, name))]
    print(f"{', '.join(f'{name} {version(name)}' for name in present)}; loop: {arguments.loop}\n")
    print("| client | in flight | commands/s | client CPU per command, µs (least–most) |")
    print("|---|---|---|---|")
    for (name, in_flight), found in figures.items():
        cpu = f"{statistics.median(found.cpu):.1f} ({min(found.cpu):.1f}–{max(found.cpu):.1f})"
        print(f"| {name} | {in_flight} | {statistics.median(found.rates):,.0f} | {cpu} |")


if __name__ == "__main__":
    main()
