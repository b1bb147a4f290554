"""Simulated vehicles and a real node: what is published arrives, through sleep, tunnels, reboots and take-overs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.client import Client
from motorcade.fleet import Behaviour, Fleet, FleetOptions, Leave, Vehicle, digest_of
from motorcade.fleet.profile import Profile, VehicleKind, profile_of
from tests.support.node import NodeProcess

QUIET = Behaviour(heartbeat=0)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess() as running:
        yield running


@pytest.fixture
async def platform(node: NodeProcess) -> AsyncIterator[Client]:
    async with await Client.connect(port=node.port) as client:
        yield client


async def ask(platform: Client, vin: str, request: str, payload: bytes = b"payload") -> None:
    await platform.publish(f"agent/{vin}/proxy/request/{request}", payload, 1)


def requests(vehicle: Vehicle) -> list[str]:
    return [record.request_id for record in vehicle.received]


async def test_each_vehicle_gets_its_own_once_and_in_order(node: NodeProcess, platform: Client) -> None:
    """Three hundred vehicles of both versions, ten requests each, some of them large."""
    options = FleetOptions(port=node.port, vehicles=300, first=1, both_versions=True, rate=0, profile=profile_of(QUIET))
    async with Fleet(options) as fleet:
        for number in range(10):
            sent = [
                await platform.send(
                    f"agent/{vin}/proxy/request/r{number}", f"{vin} {number}".encode() * 20 ** (number % 3), 1
                )
                for vin in fleet.vins
            ]
            await asyncio.gather(*(one for one in sent if one is not None))
        await fleet.wait_until(lambda: fleet.figures().total.acked == 3000, "all is acknowledged")
        for vehicle in fleet:
            assert [f"r{number}" for number in range(10)] == requests(vehicle)
            wanted = [digest_of(f"{vehicle.vin} {number}".encode() * 20 ** (number % 3)) for number in range(10)]
            assert wanted == [record.digest for record in vehicle.received]
        total = fleet.figures().total
    assert (3000, 0, 0, 0, 0) == (total.received, total.dup, total.repeated, total.strays, total.broken)
    assert {} == fleet.figures().troubles


@pytest.mark.parametrize("version", [4, 5])
async def test_what_a_tunnel_swallowed_comes_again(node: NodeProcess, platform: Client, version: int) -> None:
    """The vehicle reads nothing any more, and the node does not know; a new connection takes over and gets it all."""
    options = FleetOptions(port=node.port, vehicles=1, first=1000 + version, version=version, profile=profile_of(QUIET))
    async with Fleet(options) as fleet:
        (vehicle,) = fleet
        await ask(platform, vehicle.vin, "before")
        await fleet.wait_until(lambda: fleet.figures().total.acked == 1, "the first is acknowledged")
        vehicle.park(Leave.SILENCE)
        for number in range(3):
            await ask(platform, vehicle.vin, f"in-{number}")
        assert ["before"] == requests(vehicle)
        await vehicle.connect()
        await fleet.wait_until(lambda: fleet.figures().total.acked == 4, "the others are acknowledged")
        assert ["before", "in-0", "in-1", "in-2"] == requests(vehicle)
        assert [(1, False)] + [(2, True)] * 3 == [(record.connection, record.dup) for record in vehicle.received]
        assert vehicle.session_present


async def test_a_restless_fleet_loses_nothing(node: NodeProcess, platform: Client) -> None:
    """Vehicles that come and go in every way while messages are published: what was acknowledged to us arrives."""
    restless = {"awake": (0.05, 0.3), "asleep": (0.02, 0.2), "heartbeat": 0.0}
    ways = [
        VehicleKind(leave.value, Behaviour(leave=leave, answer=(0, 0.05), **restless))  # type: ignore[arg-type]
        for leave in Leave
    ]
    options = FleetOptions(
        port=node.port, vehicles=60, first=2000, both_versions=True, rate=0, profile=Profile("restless", tuple(ways))
    )
    fleet = Fleet(options)
    try:
        fleet.behave(QUIET)  # until each has its session
        await fleet.start()
        for vehicle, kind in zip(fleet, options.profile.assign(60), strict=True):
            vehicle.behave(kind.behaviour)
        for number in range(20):
            for vin in fleet.vins:
                await ask(platform, vin, f"r{number}")
        await fleet.wait_until(
            lambda: all(len({r.request_id for r in vehicle.received if r.acked}) == 20 for vehicle in fleet),
            "every request is acknowledged by its vehicle",
            60,
        )
        assert fleet.figures().total.connects > 120
        assert (0, 0) == (fleet.figures().total.strays, fleet.figures().total.broken)
        for vehicle in fleet:
            # A repeat is only right if the connection of the acknowledgement ended before the node could take it.
            again = Counter(requests(vehicle))
            assert all(count <= vehicle.connections for count in again.values())
            assert all(record.dup for record in vehicle.received if record.repeated)
    finally:
        await fleet.stop()


async def test_a_fleet_survives_the_restart_of_its_node() -> None:
    """The node is killed; vehicles come back by themselves and find their sessions."""
    first = NodeProcess()
    with first:
        fleet = Fleet(FleetOptions(port=first.port, vehicles=20, profile=profile_of(QUIET)))
        await fleet.start()
        data = first.data
        first.process.kill()  # type: ignore[union-attr]  # it runs
        await fleet.wait_until(lambda: fleet.figures().total.online == 0, "all have noticed")
        second = NodeProcess(data=data)
        second.mqtt = first.mqtt
        with second:
            await fleet.wait_until(lambda: fleet.figures().total.online == 20, "all are back", 60)
            async with await Client.connect(port=second.port) as platform:
                for vin in fleet.vins:
                    await ask(platform, vin, "after")
            await fleet.wait_until(lambda: fleet.figures().total.acked == 20, "all got it")
            total = fleet.figures().total
            assert (20, 20, 0) == (total.lost, total.resumed, total.repeated)
            await fleet.stop()
