"""Wrong passwords without end: what they cost, and who gets in all the same. Work is counted, not time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import argon2
import pytest

from motorcade.extension.hooks import Allow
from motorcade.plugins.access.fair import FairQueue
from motorcade.plugins.access.memory import WINDOW, Known
from motorcade.plugins.access.passwords import Argon2Hash

from .conftest import Node, Start

CHEAP = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
ATTACKER = "203.0.113.9"
FLEET = 80


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The passwords that were hashed."""
    hashed: list[bytes] = []
    verify = Argon2Hash.verify

    def counted(self: Argon2Hash, password: bytes) -> bool:
        hashed.append(password)
        return verify(self, password)

    monkeypatch.setattr(Argon2Hash, "verify", counted)
    return hashed


@pytest.fixture
async def node(start: Start, tmp_path: Path) -> Node:
    file = tmp_path / "passwords"
    hashed = CHEAP.hash("right")
    file.write_text("".join(f"v{i}:{hashed}\n" for i in range(FLEET)))
    return await start(authentication=[{"type": "password", "file": str(file), "workers": 1}], timeout=30)


def reasons(answers: list[Any]) -> set[str]:
    return {"ALLOWED" if isinstance(answer, Allow) else answer.reason.name for answer in answers}


async def test_a_fleet_comes_back_during_a_flood(node: Node, work: list[bytes]) -> None:
    """500 wrong passwords wait already when the fleet comes, each vehicle from its own address: all get in at once."""
    flood = [asyncio.create_task(node.log_in(f"name{i}", "wrong", host=ATTACKER)) for i in range(500)]
    await asyncio.sleep(0)
    fleet = [asyncio.create_task(node.log_in(f"v{i}", "right", f"c{i}", host=f"198.51.100.{i}")) for i in range(FLEET)]
    assert {"ALLOWED"} == reasons(await asyncio.gather(*fleet))
    before_the_last = len(work)
    assert FLEET == work.count(b"right")
    assert before_the_last <= 2 * FLEET + 2, "the fleet waits for one check of the flood before each of its own"
    await asyncio.gather(*flood)
    assert "ALLOWED" not in reasons([task.result() for task in flood])


async def test_failures_of_an_address_are_bounded_for_all_names(node: Node, work: list[bytes]) -> None:
    """After 100 in a minute there is no more hashing for the address, and others do not notice."""
    answers = [await node.log_in(f"name{i}", "wrong", host=ATTACKER) for i in range(500)]
    assert (100, "CONNECTION_RATE_EXCEEDED") == (len(work), answers[-1].reason.name)
    assert 400 == node.counter("throttled")
    assert "CONNECTION_RATE_EXCEEDED" == (await node.log_in("v1", "right", host=ATTACKER)).reason.name
    assert isinstance(await node.log_in("v1", "right", host="198.51.100.1"), Allow)
    node.time += WINDOW
    assert isinstance(await node.log_in("v1", "right", host=ATTACKER), Allow)


async def test_who_is_known_behind_the_same_gateway_gets_in(node: Node, work: list[bytes]) -> None:
    """Long after its password was forgotten, while wrong ones keep coming from the address that all share."""
    for i in range(FLEET):
        assert isinstance(await node.log_in(f"v{i}", "right", f"c{i}", host=ATTACKER), Allow)
    node.time += 3600
    work.clear()
    flood = [asyncio.create_task(node.log_in(f"name{i}", "wrong", host=ATTACKER)) for i in range(500)]
    await asyncio.sleep(0)
    fleet = [asyncio.create_task(node.log_in(f"v{i}", "right", f"c{i}", host=ATTACKER)) for i in range(FLEET)]
    assert {"ALLOWED"} == reasons(await asyncio.gather(*fleet))
    assert len(work) <= 2 * FLEET + 2
    await asyncio.gather(*flood)
    assert {"ALLOWED"} == reasons([await node.log_in("v1", "right", "c1", host=ATTACKER)])
    for _ in range(20):  # the name itself is bounded as before
        last = await node.log_in("v2", "wrong", "c2", host=ATTACKER)
    assert "CONNECTION_RATE_EXCEEDED" == last.reason.name


async def test_flows_take_turns_and_the_longest_gives_way() -> None:
    queue = FairQueue(at_once=1, max_waiting=4)
    order: list[str] = []

    async def ask(flow: str) -> bool:
        if not await queue.enter(flow):
            return False
        order.append(flow)
        await asyncio.sleep(0)
        queue.leave()
        return True

    tasks = [asyncio.create_task(ask(flow)) for flow in "aaaaaaabbc"]
    assert [True] * 2 + [False] * 5 + [True] * 3 == [await task for task in tasks]
    assert ["a", "a", "b", "c", "b"] == order
    assert (0, 0) == (queue.running, queue.waiting)


async def test_who_leaves_while_waiting_takes_no_place() -> None:
    queue = FairQueue(at_once=1, max_waiting=2)
    assert await queue.enter("a")
    waiting = asyncio.create_task(queue.enter("b"))
    granted = asyncio.create_task(queue.enter("c"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert 1 == queue.waiting
    queue.leave()  # gives the turn to c, which goes away before it knows
    granted.cancel()
    await asyncio.wait([granted])
    assert (0, 0) == (queue.running, queue.waiting)
    assert await queue.enter("d")


def test_the_table_of_known_names_is_bounded() -> None:
    known = Known(2)
    for i in range(5):
        known.add(f"v{i}", "2001:db8::1")
    assert (2, True, False) == (len(known), known.has("v4", "2001:db8::2"), known.has("v0", "2001:db8::1"))
