"""Members in the event loop that a node has, whose transports differ from those of the standard library."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from motorcade.cluster.options import LinkOptions
from tests.support.proxy import Proxy
from tests.support.waiting import until
from tests.unit.cluster.members import OPTIONS, Papers, member

SECRET = b"correct horse battery staple"


async def wait(condition, _what: str) -> None:
    await until(condition)


def run(what: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(what)


@pytest.fixture(params=["plain", "secret", "tls"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> LinkOptions:
    papers = Papers(tmp_path)
    found = {"plain": lambda: OPTIONS, "secret": lambda: papers.secret(SECRET), "tls": papers.options}
    return replace(found[request.param](), max_bytes=1 << 30)


def test_items_of_all_sizes_pass(options: LinkOptions) -> None:
    async def meeting() -> None:
        async with member("a", 1, options) as a, member("b", 2, options) as b:
            of_a, of_b = await a.meets(b, until=wait)
            sizes = [1, 100_000, 0, 20_000_000, 5, *range(1000), 300_000, 262_143, 262_144]
            for size in sizes:
                of_a.send("item", bytes(size))
                of_b.send("item", b"small")
            await until(lambda: not of_a.unacknowledged and not of_b.unacknowledged)
            assert sizes == [len(body) for _, body in b.items]
            assert len(sizes) == len(a.items)
            assert 1 == of_a.connections == of_b.connections

    run(meeting())


def test_nothing_is_lost_or_repeated_by_breaks(options: LinkOptions) -> None:
    chance = random.Random(7)

    async def meeting() -> None:
        async with member("a", 1, options) as a, member("b", 2, options) as b, Proxy(a.address) as way:
            of_a, of_b = await a.meets(b, way.address, until=wait)
            sent = 0
            while of_a.connections < 8:
                for _ in range(200):
                    of_a.send("item", b"%d" % sent)
                    of_b.send("item", b"%d" % sent)
                    sent += 1
                await asyncio.sleep(0)
                if chance.random() < 0.01:
                    way.cut()
                if of_a.full or of_b.full:
                    way.cut()
                    await of_a.room()
                    await of_b.room()
            await until(lambda: not of_a.unacknowledged and not of_b.unacknowledged)
            expected = [b"%d" % number for number in range(sent)]
            assert expected == [body for _, body in a.items] == [body for _, body in b.items]

    run(meeting())


def test_a_refusal_is_told(tmp_path: Path) -> None:
    """The last bytes before a connection is closed arrive."""
    papers = Papers(tmp_path)

    async def meeting() -> None:
        async with member("a", 1, papers.secret(SECRET)) as a, member("b", 2, papers.secret(SECRET[::-1])) as b:
            b.expects(a)
            await until(lambda: bool(b.refusals))
            assert "a~1 and b~2 have different secrets" in b.refusals[0]
        async with member("a", 1, papers.options()) as a, member("b", 2, papers.options(foreign=True)) as b:
            b.expects(a)
            await until(lambda: bool(b.links.peers[0].problem))
            assert "trust the certificate of b~2" in b.links.peers[0].problem
            assert not a.links.peers and not b.linked_to(a)

    run(meeting())
