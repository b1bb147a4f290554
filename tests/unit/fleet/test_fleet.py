"""A fleet as a whole: who is in it, how it starts and ends, what is said when it cannot."""

from __future__ import annotations

import asyncio
import resource
import ssl
from typing import Any

import pytest
import trustme

from motorcade.core.vin import VinError, check_vin
from motorcade.fleet import Behaviour, Fleet, FleetError, FleetOptions, Leave, VehicleState, digest_of
from motorcade.fleet import fleet as fleet_module
from motorcade.fleet.fleet import OTHER_TROUBLES, allow_files
from motorcade.fleet.profile import profile_of
from tests.support import wire
from tests.support.ports import free_port
from tests.unit.fleet.script import Broker, scripted

_SERVER, _CLIENT = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
QUIET = profile_of(Behaviour(heartbeat=0))


async def admit_all(broker: Broker, count: int) -> None:
    for _ in range(count):
        await (await broker.peer()).welcome()


def test_vins_are_valid_and_follow_from_numbers() -> None:
    fleet = Fleet(FleetOptions(vehicles=500, first=100))
    assert 500 == len(fleet) == len(set(fleet.vins))
    for vin in fleet.vins:
        check_vin(vin, check_digit=True)
    assert fleet.vins[10:] == list(FleetOptions(vehicles=490, first=110).all_vins())


def test_own_vins_are_checked() -> None:
    vin = next(FleetOptions().all_vins())
    assert [vin] == Fleet(FleetOptions(vins=(vin,))).vins
    with pytest.raises(VinError):
        Fleet(FleetOptions(vins=("nonsense",)))
    with pytest.raises(FleetError, match=f"{vin} is there twice"):
        Fleet(FleetOptions(vins=(vin, vin)))


def test_wrong_options_are_told() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"vehicles": 0}, "at least 1"),
        ({"version": 3}, "MQTT 5 or 3.1.1"),
        ({"qos": 2}, "QoS 0 or 1"),
        ({"topic_prefix": "agent/VIN"}, "one level must be {VIN}"),
        ({"speed": 0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"max_received": 1}, "max_received"),
    )
    for options, wanted in cases:
        with pytest.raises(FleetError, match=wanted):
            raise AssertionError(FleetOptions(**options))


def test_every_other_vehicle_speaks_the_old_version() -> None:
    fleet = Fleet(FleetOptions(vehicles=4, both_versions=True))
    assert [5, 4, 5, 4] == [vehicle.version for vehicle in fleet]


def test_the_same_seed_gives_the_same_mornings() -> None:
    """Who begins awake and when the others wake follows from the seed alone."""

    async def morning(seed: int) -> list[tuple[str, VehicleState, float]]:
        day = Behaviour(awake=(10, 20), asleep=(10, 20))
        fleet = Fleet(FleetOptions(vehicles=50, seed=seed, profile=profile_of(day), port=1))
        fleet.loop = asyncio.get_running_loop()
        began = fleet.now()
        for vehicle in fleet:
            vehicle.begin()
        result = []
        for vehicle in fleet:
            timer = vehicle._timer
            asleep = vehicle.state is VehicleState.ASLEEP and timer is not None
            result.append(
                (vehicle.vin, VehicleState.ASLEEP if asleep else VehicleState.WAITING, _rounded(timer, began, asleep))
            )
            vehicle.park()
        return result

    def _rounded(timer: asyncio.TimerHandle | None, began: float, asleep: bool) -> float:
        return round(timer.when() - began, 0) if asleep and timer is not None else 0.0

    first, again, other = (asyncio.run(morning(seed)) for seed in (1, 1, 2))
    assert {VehicleState.ASLEEP, VehicleState.WAITING} == {state for _, state, _ in first}
    assert [(vin, state) for vin, state, _ in first] == [(vin, state) for vin, state, _ in again]
    assert all(abs(one[2] - two[2]) <= 1 for one, two in zip(first, again, strict=True))
    assert [state for _, state, _ in first] != [state for _, state, _ in other]


async def test_all_come_online_and_all_say_goodbye() -> None:
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=20, profile=QUIET, rate=0))
        admitting = asyncio.create_task(admit_all(broker, 20))
        await fleet.start()
        await admitting
        assert (20, 20) == (fleet.figures().total.online, len(fleet.links))
        await fleet.stop()
        assert set() == fleet.links
        assert [b"\xe0\0"] * 20 == [await peer.closed() for peer in broker.peers]
        await fleet.stop()  # once more does no harm


async def test_only_some_are_woken() -> None:
    """The others have never been there, until they are connected one by one."""
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=5, profile=QUIET))
        await fleet.start(vins=[])
        assert [] == broker.peers, "nobody"
        admitting = asyncio.create_task(admit_all(broker, 3))
        await fleet.start(vins=fleet.vins[2:4])
        assert [0, 0, 1, 1, 0] == [vehicle.connections for vehicle in fleet]
        await fleet[fleet.vins[0]].connect()
        await admitting
        assert 3 == fleet.figures().total.online
        await fleet.stop()


async def test_no_more_are_on_their_way_than_allowed() -> None:
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=10, profile=QUIET, rate=0, max_connecting=3))
        starting = asyncio.create_task(fleet.start())
        await (await broker.peer()).welcome()  # the first one goes alone
        peers = [await broker.peer() for _ in range(3)]
        assert 3 == sum(vehicle.state is VehicleState.CONNECTING for vehicle in fleet)
        assert 6 == sum(vehicle.state is VehicleState.WAITING for vehicle in fleet)
        for peer in peers:
            await peer.welcome()
        await admit_all(broker, 6)
        await starting
        await fleet.stop()


async def test_the_rate_is_kept() -> None:
    """At one vehicle in a thousand seconds the first comes at once and the others stand in line, in order."""
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=6, profile=QUIET, rate=0.001))
        admitting = asyncio.create_task(admit_all(broker, 1))
        await fleet.start(wait=False)
        await admitting
        assert [VehicleState.ONLINE] + [VehicleState.WAITING] * 5 == [vehicle.state for vehicle in fleet]
        assert fleet.vins[1:] == [vehicle.vin for vehicle in fleet._line]
        assert 1 == len(broker.peers)
        await fleet.stop()


async def test_a_large_fleet_comes_from_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One address has too few ports for outgoing connections; the bound is lowered here."""
    monkeypatch.setattr(fleet_module, "_PER_ADDRESS", 4)
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=12, profile=QUIET, rate=500))
        admitting = asyncio.create_task(admit_all(broker, 12))
        await fleet.start()
        await admitting
        addresses = {peer.writer.get_extra_info("peername")[0] for peer in broker.peers}
        assert len(addresses) > 1
        assert addresses <= {f"127.0.0.{last}" for last in (2, 3, 4, 5)}
        await fleet.stop()


async def test_vehicles_come_over_tls() -> None:
    authority = trustme.CA()
    server, trusting, doubting = (ssl.SSLContext(kind) for kind in (_SERVER, _CLIENT, _CLIENT))
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(trusting)
    async with scripted(tls=server) as broker:
        fleet = Fleet(FleetOptions(host="localhost", port=broker.port, vehicles=2, profile=QUIET, tls=trusting))
        admitting = asyncio.create_task(admit_all(broker, 2))
        await fleet.start()
        await admitting
        peer = broker.peers[0]
        vehicle = next(iter(fleet))
        payload = b"x" * 200_000
        peer.deliver(f"agent/{vehicle.vin}/proxy/request/a", payload, 1)
        await peer.next(wire.PUBACK)
        assert [(digest_of(payload), 200_000)] == [(record.digest, record.size) for record in vehicle.received]
        await fleet.stop()
        lost = Fleet(FleetOptions(host="localhost", port=broker.port, tls=doubting))
        with pytest.raises(FleetError, match="certificate verify failed"):
            await lost.start()
        await lost.stop(Leave.RESET)


async def test_nobody_there_is_told_by_the_first_vehicle() -> None:
    port = free_port()
    refused = f"cannot connect to 127.0.0.1:{port}: cannot connect: Connection refused"
    unknown = r"no host 'no-such-host\.invalid'"
    for host, wanted, tried in (("127.0.0.1", refused, 1), ("no-such-host.invalid", unknown, 0)):
        fleet = Fleet(FleetOptions(host=host, port=port, vehicles=1000))
        with pytest.raises(FleetError, match=wanted):
            await fleet.start()
        assert tried == sum(vehicle.connections for vehicle in fleet)
        await fleet.stop(Leave.RESET)


async def test_a_refusal_is_told() -> None:
    """Of the connection, in either version, or of the subscription."""
    for version, code, wanted in (
        (5, 0x87, r"not authorized \(0x87\)"),
        (4, 5, r"not authorized \(0x87\)"),
        (5, 0x8A, "banned"),
    ):
        async with scripted(version) as broker:
            fleet = Fleet(FleetOptions(port=broker.port, version=version))
            starting = asyncio.create_task(fleet.start())
            peer = await broker.peer()
            await peer.introduced()
            peer.connack(code)
            with pytest.raises(FleetError, match=f"cannot connect to .*: the connection was refused: {wanted}"):
                await starting
            assert 1 == fleet.figures().total.denied
            await fleet.stop(Leave.RESET)
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port))
        starting = asyncio.create_task(fleet.start())
        peer = await broker.peer()
        await peer.introduced()
        peer.connack()
        await peer.subscribed(reason=0x87)
        with pytest.raises(FleetError, match="the subscription was refused: not authorized"):
            await starting
        await fleet.stop(Leave.RESET)


async def test_what_does_not_happen_is_told_with_the_state_of_things() -> None:
    async with scripted() as broker:
        fleet = Fleet(FleetOptions(port=broker.port, vehicles=1, profile=QUIET))
        admitting = asyncio.create_task(admit_all(broker, 1))
        await fleet.start()
        await admitting
        with pytest.raises(FleetError, match=r"within 0.05 s: pigs fly \(1 of 1 online, 0 received, 0 acknowledged\)"):
            await fleet.wait_until(lambda: False, "pigs fly", 0.05)
        with pytest.raises(ZeroDivisionError):
            await fleet.wait_until(lambda: fleet.now() < 0 or bool(1 / 0), "a broken condition is told as it is")
        seen = asyncio.Event()
        waiting = asyncio.create_task(fleet.wait_until(seen.is_set, "something that no vehicle does"))
        seen.set()
        await waiting
        await fleet.stop()


def test_troubles_are_counted_within_a_bound_and_figures_are_a_copy() -> None:
    fleet = Fleet(FleetOptions())
    for number in range(100):
        fleet.trouble(f"trouble {number}")
        fleet.trouble("trouble 0")
    troubles = fleet.figures().troubles
    assert (101, 80) == (troubles["trouble 0"], troubles[OTHER_TROUBLES])
    assert 21 == len(troubles)
    figures = fleet.figures()
    figures.kinds["steady"].received = 7
    assert (0, 10) == (fleet.figures().total.received, fleet.figures().total.vehicles)


def test_more_files_than_the_system_has_are_told_and_enough_change_nothing() -> None:
    with pytest.raises(FleetError, match="ulimit -n"):
        allow_files(1 << 40)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(10)
    assert before == resource.getrlimit(resource.RLIMIT_NOFILE)
