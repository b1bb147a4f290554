"""The chaos run of a cluster in short, and its negative controls. `make chaos-cluster` is the long one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import pytest

from motorcade.broker.attachments import Attachments
from motorcade.broker.relay import Relay
from motorcade.cluster.member import ClusterMember
from motorcade.storage import redis as engine
from motorcade.storage.ports import Batch, Durability, StoreError
from motorcade.storage.redis import RedisStore
from tests.chaos.cluster import Options, crash, report
from tests.chaos.cluster_faults import WEIGHTS, Fault, Faults
from tests.chaos.cluster_members import NAMES, Trio
from tests.chaos.cluster_node import SWITCHES, switch_off
from tests.chaos.cluster_store import ClusterStore
from tests.contracts.engines import patient
from tests.support.members import Members
from tests.support.redis import RedisServer
from tests.support.store_trace import read_trace, violations
from tests.support.virtual import standing
from tests.unit.broker import test_attachments, test_relay

Breach = Callable[[RedisServer], Awaitable[None]]

CLASSES = ((Attachments, "drained"), (ClusterMember, "holds"), (Relay, "look_again"))


@pytest.mark.timeout(900)
def test_nothing_acknowledged_is_lost_whatever_happens_to_members_links_and_store() -> None:
    """A few faults, two at a time, under clients that move: all is there, once, in order, and comes to everybody."""
    outcome = crash(Options(faults=4, redis="lone", seed=9, lease=1.5, quiet=True, patience=180.0))
    assert outcome.verdict.passed, report(outcome)
    assert outcome.verdict.acknowledged[1] > 20 and outcome.verdict.acknowledged[2] > 20
    assert outcome.verdict.delivered >= outcome.verdict.due > 200
    assert outcome.faults.total() == 4 and outcome.traced > 500


# -- what may happen


def test_two_faults_are_never_about_the_same_process(tmp_path: Path) -> None:
    """All kinds come, and both stores' faults never together."""
    trio = Trio(ClusterStore("redis"), tmp_path, lease=2.0)
    faults = Faults(trio, Random(1), tuple(WEIGHTS), lambda words: None)
    seen: set[str] = set()
    for _ in range(2000):
        one, other = faults.choose(2)
        seen |= {one.kind, other.kind}
        assert not one.about & other.about
        assert not ("rolling" in (one.kind, other.kind) and {one.kind, other.kind} & {"kill", "stand", "restart"})
    assert set(WEIGHTS) == seen


async def test_faults_overlap_and_are_counted(tmp_path: Path) -> None:
    """The second begins while the first may still go on; the words of both are told."""
    trio, told, running = Trio(ClusterStore("redis"), tmp_path, lease=0.01), list[str](), 0
    faults = Faults(trio, Random(1), tuple(WEIGHTS), told.append)
    together = 0

    async def happen() -> None:
        nonlocal running, together
        running += 1
        together = max(together, running)
        await asyncio.sleep(0.2)
        running -= 1

    pair = [Fault(kind, f"{kind} happens", frozenset(), happen) for kind in ("kill", "cut")]
    assert "kill happens and cut happens" == await faults.happen(pair)
    assert (2, 2, {"cut + kill": 1}) == (together, faults.happened.total(), dict(faults.pairs))
    assert ["begins: kill happens", "begins: cut happens"] == told[:2]


def test_all_members_have_names_and_addresses_of_their_own(tmp_path: Path) -> None:
    trio = Trio(ClusterStore("redis"), tmp_path, lease=2.0)
    assert list(NAMES) == list(trio.members)
    assert 9 == len({str(at) for one in trio.members.values() for at in (one.mqtt, one.http, one.link)})


# -- what is switched off in negative controls


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a switch may replace is put back."""
    monkeypatch.setitem(vars(engine), "TRACED", vars(engine)["TRACED"])
    for owner, name in CLASSES:
        monkeypatch.setattr(owner, name, vars(owner)[name])


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_replaces_something(switch: str) -> None:
    """It does not miss what it was written for."""
    before = (vars(engine)["TRACED"].digest, *(vars(owner)[name] for owner, name in CLASSES))
    switch_off(switch)
    after = (vars(engine)["TRACED"].digest, *(vars(owner)[name] for owner, name in CLASSES))
    assert 1 == sum(one != other for one, other in zip(before, after, strict=True))


#: Scenarios with virtual time that rely on one thing each. Chaos runs show these two late: hints die with their member
#: within milliseconds of an append, and values that overtake each other must be the last ones.
SCENARIOS: dict[str, Callable[[Members], None]] = {
    "look-again": test_relay.test_when_a_member_is_lost_the_others_look_for_what_it_could_not_tell,
    "drain": partial(
        test_attachments.test_what_a_client_publishes_waits_for_what_its_broken_connection_has_published,
        how="displaced",
        clean=False,
    ),
}


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("switch", SCENARIOS)
def test_without_it_a_scenario_fails(switch: str) -> None:
    def play() -> None:
        members = Members(3)
        with standing(members.clock):
            SCENARIOS[switch](members)

    play()
    switch_off(switch)
    with pytest.raises(AssertionError):
        play()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@asynccontextmanager
async def traced(server: RedisServer) -> AsyncIterator[RedisStore]:
    store = patient(f"{server.url}?trace=yes", Durability.FAST)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def late_decision(server: RedisServer) -> None:
    """A member decides about a client after another one has attached it."""
    async with traced(server) as store:
        first = await store.coordination.attach("session:x", "a")
        await store.coordination.attach("session:x", "b")
        batch = Batch()
        batch.put("session", "x", b"late")
        batch.fence(first.fence)
        await asyncio.gather(store.write(batch), return_exceptions=True)


async def late_write(server: RedisServer) -> None:
    """A member that was found dead writes."""
    async with traced(server) as store, traced(server) as dead:
        await store.coordination.fence_member(dead.writer)
        try:
            await dead.records.put("c", "k", str(time.time()).encode())
        except StoreError:
            pass  # as it should be


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("switch", "breach", "found"),
    [("home-fence", late_decision, "after another attach"), ("member-fence", late_write, "after its fence")],
)
async def test_without_a_fence_the_traces_show_it(server: RedisServer, switch: str, breach: Breach, found: str) -> None:
    """With the fences the same is refused, and nothing is wrong with the traces."""
    server.empty()
    await breach(server)
    assert [] == violations(read_trace([server.client]))
    switch_off(switch)
    await breach(server)
    assert found in "".join(violations(read_trace([server.client])))
