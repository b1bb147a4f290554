"""A fleet: makes vehicles, lets them in at a pace the broker can bear, counts, and waits for what a test expects.

    admit ─▶ [ line ] ─ rate, max_connecting ─▶ vehicle.open ─▶ VehicleLink ─▶ broker

Rule 1: one event loop, no thread, and a task only while a connection is being opened.
Rule 2: vehicles know their fleet, not each other. Whatever a vehicle does it tells by `changed`, which is cheap:
        conditions that are waited for are checked every few milliseconds, however much has happened meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
import ssl
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from motorcade.core.vin import check_vin, make_vin
from motorcade.fleet.link import VehicleLink
from motorcade.fleet.profile import PROFILES, Behaviour, FleetError, Leave, Profile
from motorcade.fleet.records import FleetFigures, VehicleCounts
from motorcade.fleet.vehicle import Vehicle, VehicleState
from motorcade.mqtt.packets import V5, V311

_BUFFER = 65536  # bytes of one read
_SPARE_FILES = 64  # descriptors that are not connections of vehicles
_PER_ADDRESS = 20_000  # connections from one loopback address: below the usual range of outgoing ports
_MAX_DIGESTS = 10_000  # payloads whose digest is kept once for all who get them
_MAX_TROUBLES = 20  # different texts that are counted on their own
_LOOK_SOON = 0.002  # seconds from a change to the next look at conditions
_LOOK_AGAIN = 0.05  # seconds after which they are looked at although no vehicle has moved
_MADE_UP = 0.05  # seconds by which the line may be late and still keep its rate
_FAREWELL = 5.0  # seconds for goodbyes to leave
OTHER_TROUBLES = "other reasons"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet: its vehicles, its broker and its pace."""

    host: str = "127.0.0.1"
    port: int = 1883
    vehicles: int = 10
    first: int = 1  #: number of the first vehicle; VINs follow from the numbers
    wmi: str = "LMC"  #: first three characters of the VINs
    vins: tuple[str, ...] = ()  #: these vehicles instead of made ones
    profile: Profile = PROFILES["steady"]
    version: int = V5  #: of MQTT: 5, or 4 for 3.1.1
    both_versions: bool = False  #: every other vehicle speaks 3.1.1
    qos: int = 1  #: of the subscription: 0 or 1
    topic_prefix: str = "agent/{VIN}/proxy/request"  #: of the requests, as the node's plugins.fanout.topic_prefix
    seed: int = 0  #: the same seed gives the same lives
    speed: float = 1.0  #: days pass so many times faster
    rate: float = 500.0  #: connections per second; 0: as fast as it goes
    max_connecting: int = 100  #: connections that may be on their way to SUBACK at once
    max_received: int = 10_000  #: messages of one vehicle that are remembered
    username: str | None = None  #: may contain {VIN}
    password: str | None = None  #: may contain {VIN}
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.vehicles < 1:
            raise FleetError(f"a fleet of {self.vehicles} vehicles; at least 1")
        if self.version not in (V311, V5):
            raise FleetError(f"vehicles speak MQTT 5 or 3.1.1 (4), not {self.version}")
        if self.qos not in (0, 1):
            raise FleetError(f"vehicles subscribe with QoS 0 or 1, not {self.qos}")
        if "{VIN}" not in self.topic_prefix.split("/"):
            raise FleetError(f"topic prefix {self.topic_prefix!r}: one level must be {{VIN}}")
        if not 0 < self.speed < float("inf"):
            raise FleetError(f"a speed of {self.speed:g}; more than 0, 1 is as it is")
        if self.max_received < 2 or self.max_connecting < 1 or self.rate < 0:
            raise FleetError("max_received is at least 2, max_connecting at least 1, and rate not negative")

    def all_vins(self) -> Iterator[str]:
        """Return the VINs of all vehicles, in order."""
        if self.vins:
            yield from self.vins
            return
        for number in range(self.first, self.first + self.vehicles):
            yield make_vin(number, self.wmi)


class Fleet:
    """Vehicles of one process. `async with Fleet(options) as fleet: …`, or `start` and `stop`."""

    def __init__(self, options: FleetOptions) -> None:
        self.options = options
        self.vehicles: dict[str, Vehicle] = {}  #: by VIN
        self.links: set[VehicleLink] = set()  #: connections that are open, also silent ones and those taken over
        self.view = memoryview(bytearray(_BUFFER))
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # `start` knows it
        self._tallies: dict[str, VehicleCounts] = {}
        self._troubles: dict[str, int] = {}
        self._digests: dict[bytes, bytes] = {}
        self._prefix = options.topic_prefix.rstrip("/") + "/"
        self._address: tuple[str, int] = (options.host, options.port)
        self._line: deque[Vehicle] = deque()
        self._connecting = 0
        self._next_at = 0.0  # when the rate lets the next one in
        self._pump: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._looking: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._started = self._stopped = 0.0
        self._make()

    def _make(self) -> None:
        options = self.options
        vins = list(options.all_vins())
        for number, (vin, kind) in enumerate(zip(vins, options.profile.assign(len(vins)), strict=True)):
            check_vin(vin)
            if vin in self.vehicles:
                raise FleetError(f"VIN {vin} is there twice; every vehicle is one client")
            tally = self._tallies.setdefault(kind.name, VehicleCounts())
            tally.vehicles += 1
            version = V311 if options.both_versions and number % 2 else options.version
            behaviour = kind.behaviour.at_speed(options.speed)
            self.vehicles[vin] = Vehicle(self, vin, version, behaviour, tally)

    # --- from start to stop -------------------------------------------------------------------------------------------

    async def start(
        self,
        *,
        vins: Iterable[str] | None = None,
        wait: bool = True,
        timeout: float = 60.0,  # noqa: ASYNC109 - one word for all who wait here
    ) -> None:
        """Wake the fleet, or only these vehicles; the others stay parked, as if they had never been there.

        With `wait`, all who begin awake have come online afterwards. Raises if the first one cannot connect.
        """
        self.loop = asyncio.get_running_loop()
        self._started = self.now()
        allow_files(len(self.vehicles) + _SPARE_FILES)
        addresses = await self._resolve()
        self._address = addresses[0]
        chosen = list(self.vehicles.values()) if vins is None else [self.vehicles[vin] for vin in vins]
        if chosen:
            await self._send_scout(chosen[0], addresses, timeout)
        for vehicle in chosen:
            if vehicle.state is VehicleState.PARKED:
                vehicle.begin()
        if not wait:
            return
        awake = [vehicle for vehicle in chosen if vehicle.state is not VehicleState.ASLEEP]
        await self.wait_until(
            lambda: all(vehicle.arrivals for vehicle in awake),
            "all vehicles that begin awake have come online",
            timeout,
        )

    async def _send_scout(
        self,
        scout: Vehicle,
        addresses: list[tuple[str, int]],
        timeout: float,  # noqa: ASYNC109 - one word for all who wait here
    ) -> None:
        """Connect one vehicle first: a wrong address or password is reported at once, and not thousands of times."""
        for self._address in addresses:
            scout.trouble = ""
            scout.come()
            await self.wait_until(lambda: scout.is_online or bool(scout.trouble), "an answer from the broker", timeout)
            if scout.is_online:
                return
            scout.park()
        raise FleetError(
            f"vehicle {scout.vin} cannot connect to {self.options.host}:{self.options.port}: {scout.trouble}"
        )

    async def _resolve(self) -> list[tuple[str, int]]:
        host, port = self.options.host, self.options.port
        try:
            found = await self.loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise FleetError(f"there is no host {host!r}: {error.strerror or error}") from error
        return list(dict.fromkeys((str(entry[4][0]), port) for entry in found))

    async def stop(self, leave: Leave = Leave.GOODBYE) -> None:
        """Disconnect all, in this way. Nothing of the fleet runs afterwards; what it has received stays readable."""
        if not self._started or self._stopped:
            return
        self._stopped = self.now()
        self._line.clear()
        if self._pump is not None:
            self._pump.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        for vehicle in self.vehicles.values():
            vehicle.park(leave)
        for link in tuple(self.links):
            if link.silent:
                link.reset()
        try:
            await self.wait_until(lambda: not self.links, "goodbyes have left", _FAREWELL)
        except FleetError:
            for link in tuple(self.links):
                link.reset()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(Leave.RESET)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(Leave.GOODBYE if kind is None else Leave.RESET)

    # --- looking and steering -----------------------------------------------------------------------------------------

    def __getitem__(self, vin: str) -> Vehicle:
        return self.vehicles[vin]

    def __iter__(self) -> Iterator[Vehicle]:
        return iter(self.vehicles.values())

    def __len__(self) -> int:
        return len(self.vehicles)

    @property
    def vins(self) -> list[str]:
        return list(self.vehicles)

    def behave(self, behaviour: Behaviour, vins: Iterable[str] | None = None) -> None:
        """Change the behaviour of these vehicles (default: all)."""
        for vin in self.vehicles if vins is None else vins:
            self.vehicles[vin].behave(behaviour)

    def figures(self) -> FleetFigures:
        """Return a copy of all counts."""
        end = self._stopped or (self.now() if self._started else 0.0)
        kinds = {name: copy.copy(tally) for name, tally in self._tallies.items()}
        return FleetFigures(end - self._started, kinds, dict(self._troubles))

    async def wait_until(
        self,
        condition: Callable[[], bool],
        what: str,
        timeout: float | None = 30.0,  # noqa: ASYNC109 - a deadline belongs to each condition
    ) -> None:
        """Wait until the condition holds; it is checked when a vehicle has moved. `FleetError` names `what` did not."""
        if condition():
            return
        waiter: asyncio.Future[None] = self.loop.create_future()
        entry = (condition, waiter)
        self._waiters.append(entry)
        self._look_in(_LOOK_AGAIN)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            raise FleetError(f"did not happen within {timeout:g} s: {what}{self._state_of_things()}") from None
        finally:
            self._waiters.remove(entry)

    def _state_of_things(self) -> str:
        figures = self.figures()
        total = figures.total
        told = f" ({total.online} of {total.vehicles} online, {total.received} received, {total.acked} acknowledged"
        if figures.troubles:
            text, times = max(figures.troubles.items(), key=lambda item: item[1])
            told += f"; {times} times: {text}"
        return told + ")"

    # --- for vehicles -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.loop.time()

    def prefix_of(self, vin: str) -> str:
        """Return the part before the request id in topics of this vehicle."""
        return self._prefix.replace("{VIN}", vin)

    def shared(self, digest: bytes) -> bytes:
        """Return the same digest as one object for all vehicles that get the same payload."""
        if len(self._digests) > _MAX_DIGESTS:
            self._digests.clear()
        return self._digests.setdefault(digest, digest)

    def trouble(self, why: str) -> None:
        """Count a vehicle that was refused or lost."""
        if why not in self._troubles and len(self._troubles) >= _MAX_TROUBLES:
            why = OTHER_TROUBLES
        self._troubles[why] = self._troubles.get(why, 0) + 1

    def changed(self) -> None:
        """Note that something has happened: conditions that are waited for are checked soon."""
        if self._waiters:
            self._look_in(_LOOK_SOON)

    def _look_in(self, seconds: float) -> None:
        due = self.now() + seconds
        if self._looking is not None:
            if self._look_at <= due:
                return
            self._looking.cancel()
        self._look_at = due
        self._looking = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._looking = None
        for condition, waiter in tuple(self._waiters):
            if waiter.done():
                continue
            try:
                if condition():
                    waiter.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised to the caller that waits for the condition
                waiter.set_exception(error)
        if self._waiters:
            self._look_in(_LOOK_AGAIN)  # conditions may be about something else than vehicles, such as time

    # --- letting in ---------------------------------------------------------------------------------------------------

    def admit(self, vehicle: Vehicle) -> None:
        """Stand in line."""
        self._line.append(vehicle)
        self._let_in()

    def settled(self) -> None:
        """Note that a connection attempt has succeeded or failed."""
        self._connecting -= 1
        if self._line:
            self._let_in_soon(0.0)

    def _let_in(self) -> None:
        options = self.options
        while self._line and self._connecting < options.max_connecting and not self._stopped:
            now = self.now()
            if options.rate and now < self._next_at:
                self._let_in_soon(self._next_at - now)
                return
            vehicle = self._line.popleft()
            if vehicle.state is not VehicleState.WAITING:
                continue  # it has been parked meanwhile
            if options.rate:
                # What the loop was late by is made up for, but a quiet minute does not become a burst.
                self._next_at = max(self._next_at, now - _MADE_UP) + 1 / options.rate
            self._connecting += 1
            link = vehicle.open()
            task = self.loop.create_task(self._open(vehicle, link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _let_in_soon(self, seconds: float) -> None:
        if self._pump is not None:
            self._pump.cancel()
        self._pump = self.loop.call_later(seconds, self._let_in)

    async def _open(self, vehicle: Vehicle, link: VehicleLink) -> None:
        host, port = self._address
        try:
            await self.loop.create_connection(
                lambda: link,
                host,
                port,
                ssl=self.options.tls,
                server_hostname=self.options.host if self.options.tls is not None else None,
                local_addr=self._local_address(vehicle),
            )
        except OSError as error:
            vehicle.could_not_open(link, f"cannot connect: {_cause(error)}")

    def _local_address(self, vehicle: Vehicle) -> tuple[str, int] | None:
        """Choose a local address: one has some 28 000 outgoing ports; on loopback (Linux) there are others."""
        if (
            len(self.vehicles) <= _PER_ADDRESS
            or self._address[0] != "127.0.0.1"
            or not sys.platform.startswith("linux")
        ):
            return None
        return f"127.0.0.{2 + zlib.crc32(vehicle.vin.encode()) % (1 + len(self.vehicles) // _PER_ADDRESS)}", 0


def allow_files(count: int) -> None:
    """Raise the process' own limit of open files as far as the system lets it; tell what to do if that is too low."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count, hard if hard == resource.RLIM_INFINITY else max(hard, count))
        )
    except (ValueError, OSError) as error:
        raise FleetError(
            f"{count} open files are needed and {hard} allowed; raise the limit (ulimit -n {count}), "
            f"or take fewer vehicles in one process"
        ) from error


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) or not error.errno:
        return str(error) or "the TLS handshake failed; does the port speak TLS?"
    return os.strerror(error.errno)  # asyncio's own text repeats the address
