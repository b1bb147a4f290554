"""What may happen in the model, and how it comes to rest."""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from motorcade.cluster.membership import BEATS
from tests.support.cell_store import MAX_LAG, WRITER
from tests.support.cluster_world import CELLS, DRAIN, LEASE, STORE, ClusterWorld, Host
from tests.unit.cluster.model_checker import Checker
from tests.unit.cluster.model_clients import BrokenPromiseError, ModelClient, Publication

CLIENTS = 4
TOPICS = ("t/a", "t/a", "t/b", "a/c0/x", "a/c1/x")
OWN = "a/{}/#"  #: with a client's own name it has no route
FILTERS = ("t/a", "t/b", "t/#", "r/#", OWN)
PROBES = "p/#"
HEALED = LEASE + 2.0  #: seconds until a cluster must serve again when nothing hinders it any more
TRY_AGAIN = 1.0  #: seconds that a client waits for CONNACK before it comes again
ATTEMPTS = 4  #: of clients that are sent away because of what was under way
LEFT = 3.0  #: seconds after that until nothing may be left

clients = st.integers(0, CLIENTS - 1)
hosts = st.integers(0, 3)
pauses = st.sampled_from((0.0, 0.0, 0.0005, 0.002, 0.01, 0.1, 0.6))
times = st.sampled_from((0.02, 0.3, 1.0, 2.5, 4.0, 7.0))
ways = st.sampled_from(("there", "back", "both"))


class ClusterMachine(RuleBasedStateMachine):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.world: ClusterWorld

    @initialize(
        count=st.sampled_from((2, 3, 3, 4)),
        cells=st.sampled_from((1, CELLS)),
        guests=st.lists(
            st.tuples(hosts, st.booleans(), st.sampled_from((*FILTERS, ""))), min_size=CLIENTS, max_size=CLIENTS
        ),
    )
    def begin(self, count: int, cells: int, guests: list[tuple[int, bool, str]]) -> None:
        self.set_up(count, cells)
        for client, (host, durable, filter_) in zip(self.clients, guests, strict=True):
            client.connect(self.host(host), durable=durable)
            self.go_on(0.02)
            if filter_:
                client.subscribe(filter_.format(client.name), 2)
        self.go_on(0.1)

    def set_up(self, count: int, cells: int) -> None:
        self.world = ClusterWorld(count, cells=cells)
        self.world.__enter__()
        self.publications: dict[bytes, Publication] = {}
        self.clients = [ModelClient(f"c{number}", self.world, self.publications) for number in range(CLIENTS)]
        self.probes = 0
        self.checker = Checker(self.world, self.clients, self.publications)
        if not self.world.until(self.world.whole, HEALED):
            raise BrokenPromiseError("I8: they do not find together")
        self.world.wait(MAX_LAG)  # that they have registered is not forgotten any more

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.come_to_rest()
        finally:
            self.world.__exit__()

    def host(self, number: int) -> Host:
        return self.world.hosts[number % len(self.world.hosts)]

    def go_on(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.checker.check_now()

    # -- clients

    @rule(
        client=clients,
        host=hosts,
        durable=st.sampled_from((True, True, False)),
        clean=st.sampled_from((False, False, False, True)),
        before=st.sampled_from(("leave", "break", "walk")),
        will=st.booleans(),
        pause=pauses,
    )
    def connect(
        self, client: int, host: int, durable: bool, clean: bool, before: str, will: bool, pause: float
    ) -> None:
        one = self.clients[client]
        node = self.host(host).node
        if node is None or not node.listens:
            return
        if before == "leave":
            one.disconnect()
        elif before == "break":
            one.break_off()
        else:
            one.walk_away()
        one.connect(self.host(host), durable=durable, clean=clean, will=will)
        self.go_on(pause)

    @rule(client=clients, filter_=st.sampled_from(FILTERS), qos=st.sampled_from((0, 1, 2, 2)), pause=pauses)
    def subscribe(self, client: int, filter_: str, qos: int, pause: float) -> None:
        one = self.clients[client]
        one.subscribe(filter_.format(one.name), qos)
        self.go_on(pause)

    @rule(client=clients, filter_=st.sampled_from(FILTERS), pause=pauses)
    def unsubscribe(self, client: int, filter_: str, pause: float) -> None:
        one = self.clients[client]
        one.unsubscribe(filter_.format(one.name))
        self.go_on(pause)

    @rule(
        client=clients,
        topic=st.sampled_from(TOPICS),
        qos=st.sampled_from((0, 1, 1, 2)),
        count=st.integers(1, 3),
        pause=pauses,
    )
    def publish(self, client: int, topic: str, qos: int, count: int, pause: float) -> None:
        for _ in range(count):
            self.clients[client].publish(topic, qos)
        self.go_on(pause)

    @rule(client=clients, qos=st.sampled_from((1, 1, 2)), count=st.integers(1, 2), pause=pauses)
    def retain(self, client: int, qos: int, count: int, pause: float) -> None:
        for _ in range(count):
            self.clients[client].publish(f"r/{self.clients[client].name}", qos, retain=True)
        self.go_on(pause)

    @rule(client=clients)
    def refuse_to_acknowledge(self, client: int) -> None:
        self.clients[client].answers = False

    @rule(client=clients, count=st.sampled_from((1, 2, 1000)), answers=st.booleans(), pause=pauses)
    def acknowledge(self, client: int, count: int, answers: bool, pause: float) -> None:
        self.clients[client].acknowledge(count)
        self.clients[client].answers = answers
        self.go_on(pause)

    @rule(client=clients, goodbye=st.booleans(), pause=pauses)
    def go_away(self, client: int, goodbye: bool, pause: float) -> None:
        if goodbye:
            self.clients[client].disconnect()
        else:
            self.clients[client].break_off()
        self.go_on(pause)

    # -- members

    @rule(host=hosts, steps=st.integers(0, 40), suspend=st.booleans(), pause=times)
    def stop(self, host: int, steps: int, suspend: bool, pause: float) -> None:
        self.host(host).stop(steps, suspend=suspend)
        self.go_on(pause)

    @rule(host=hosts, pause=pauses)
    def resume(self, host: int, pause: float) -> None:
        self.host(host).go_on()
        self.go_on(pause)

    @rule(host=hosts, pause=pauses)
    def kill(self, host: int, pause: float) -> None:
        self.host(host).kill()
        self.go_on(pause)

    @rule(host=hosts, pause=pauses)
    def start(self, host: int, pause: float) -> None:
        self.host(host).start()
        self.go_on(pause)

    @rule(host=hosts, pause=pauses)
    def leave(self, host: int, pause: float) -> None:
        if len(self.world.live) > 1:
            self.host(host).leave()
        self.go_on(pause)

    # -- what is between them

    @rule(one=hosts, other=hosts, way=ways, pause=pauses)
    def cut(self, one: int, other: int, way: str, pause: float) -> None:
        here, there = self.host(one).name, self.host(other).name
        if here != there:
            if way != "back":
                self.world.cut(here, there)
            if way != "there":
                self.world.cut(there, here)
        self.go_on(pause)

    @rule(one=hosts, way=ways, pause=times)
    def cut_from_store(self, one: int, way: str, pause: float) -> None:
        here = self.host(one).name
        if way != "back":
            self.world.cut(here, STORE)
        if way != "there":
            self.world.cut(STORE, here)
        self.go_on(pause)

    @rule(one=hosts, other=st.integers(-1, 3), delay=st.sampled_from((0.02, 0.2, 1.0)), pause=pauses)
    def slow(self, one: int, other: int, delay: float, pause: float) -> None:
        there = STORE if other < 0 else self.host(other).name
        self.world.delays[self.host(one).name, there] = delay
        self.go_on(pause)

    @rule(one=hosts, other=hosts, pause=pauses)
    def reset(self, one: int, other: int, pause: float) -> None:
        self.world.break_links(self.host(one).name, self.host(other).name)
        self.go_on(pause)

    @rule(pause=pauses)
    def heal_ways(self, pause: float) -> None:
        self.world.heal_all()
        self.go_on(pause)

    # -- the store

    @rule(cell=st.integers(-1, CELLS - 1), pause=times)
    def store_away(self, cell: int, pause: float) -> None:
        cells = self.world.cells.cells
        for one in cells if cell < 0 else [cells[cell % len(cells)]]:
            one.away = True
        self.go_on(pause)

    @rule(cell=st.integers(0, CELLS - 1), count=st.integers(0, 6), pause=pauses)
    def fail_over(self, cell: int, count: int, pause: float) -> None:
        self.world.cells.forget(cell % len(self.world.cells.cells), count, self.world.now)
        self.go_on(pause)

    # -- time

    @rule(host=hosts, seconds=st.sampled_from((-3600.0, -20.0, 5.0, 25.0)))
    def jump(self, host: int, seconds: float) -> None:
        self.host(host).offset += seconds

    @rule(seconds=times)
    def time_passes(self, seconds: float) -> None:
        self.go_on(seconds)

    @rule()
    def rest(self) -> None:
        self.come_to_rest()

    # -- rest

    def come_to_rest(self) -> None:
        """Everything is well again: what was promised has to come."""
        world = self.world
        world.heal_all()
        for host in world.hosts:
            host.go_on()
            host.offset = 0.0
        world.until(lambda: not any(host.leaving for host in world.hosts), 2 * DRAIN)
        for host in world.hosts:
            host.start()
        for client in self.clients:
            client.answers = True
            client.acknowledge()
        healed = world.now
        for _ in range(2):
            if not world.until(world.whole, self.patience()):
                raise BrokenPromiseError(
                    f"I8: {world.now - healed:g} s after {healed:.3f} not all serve: {self._states()}"
                )
            world.touch()
            world.wait(LEASE / BEATS)
        if not world.until(lambda: not self.checker.unread(), LEFT):
            raise BrokenPromiseError(f"I8: healed at {healed:.3f}, and {self.checker.unread()} at {world.now:.3f}")
        for _ in range(ATTEMPTS):
            self._all_come(healed)
            missing = self._probe()
            if not missing:
                break
            if self._listening(healed):
                raise BrokenPromiseError(
                    f"I8: healed at {healed:.3f}, and at {world.now:.3f} probes are missing: {missing}"
                )
        else:
            raise BrokenPromiseError(
                f"I8: healed at {healed:.3f}, and clients are sent away again and again: {self._states()}"
            )
        world.wait(1.0)
        self.checker.check_now()
        self.checker.check_deliveries()
        self._look_at_retained()
        if not world.until(lambda: not self.checker.left(), LEFT):
            raise BrokenPromiseError(f"I8: healed at {healed:.3f}, and {self.checker.left()} at {world.now:.3f}")

    def patience(self) -> float:
        """Seconds until all must serve. Who was forgotten finds that out when it writes, perhaps to fence another."""
        forgotten = any(home.startswith(WRITER) for lapse in self.world.cells.lapses for home in lapse.homes)
        return HEALED + (2 * LEASE if forgotten else 0.0)

    def _states(self) -> list[str]:
        found: list[str] = []
        for host in self.world.hosts:
            node = host.node
            if node is None or node.member is None:
                found.append(f"{host.name}: no member, {host.failures[-1:]}")
            else:
                found.append(f"{node.id}: {node.member.state} {node.lost_why} {node.member.troubles()}")
        return found

    def _all_come(self, healed: float) -> None:
        """All clients are there, and subscribed to the probes."""
        world = self.world
        end = world.now + self.patience()
        while not (ready := self._listening(healed)) and world.now < end:
            live = world.live
            for number, client in enumerate(self.clients):
                if not client.ready and live:
                    durable = client.life is None or client.life.durable
                    client.walk_away()
                    client.connect(live[number % len(live)], durable=durable)
            world.until(lambda: all(client.ready for client in self.clients), TRY_AGAIN)
            for client in self.clients:
                asked = any(filter_ == PROBES for filter_, _ in client.pending.values())
                if not asked and not self._listens(client, healed):
                    client.subscribe(PROBES, 1)
            world.until(lambda: self._listening(healed), TRY_AGAIN)
        if not ready:
            absent = [client.name for client in self.clients if not self._listens(client, healed)]
            raise BrokenPromiseError(
                f"I8: healed at {healed:.3f}, and at {world.now:.3f} {absent} are not served: {self._states()}"
            )

    def _listens(self, client: ModelClient, healed: float) -> bool:
        windows = client.life.windows if client.life is not None and client.ready else ()
        return any(one.filter == PROBES and healed < one.granted < self.world.now for one in windows)

    def _listening(self, healed: float) -> bool:
        return all(self._listens(client, healed) for client in self.clients)

    def _probe(self) -> dict[str, list[str]]:
        """Publish at each member; return what clients have not got."""
        world = self.world
        probes: list[Publication] = []
        makers: list[ModelClient] = []
        for host in world.live:
            self.probes += 1
            maker = ModelClient(f"probe{self.probes}", world, self.publications)
            makers.append(maker)
            maker.connect(host, durable=False)
            world.until(lambda maker=maker: maker.ready, 2.0)  # type: ignore[misc]
            probe = maker.publish(f"p/{host.name}", 1)
            if probe is None:
                return {maker.name: [f"is not let in by {host.name}"]}
            probes.append(probe)

        def missing() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for client in self.clients:
                names = {arrival.name for arrival in client.life.arrivals} if client.life is not None else set()
                if lacking := [repr(probe) for probe in probes if probe.name not in names]:
                    found[client.name] = lacking
            return found

        world.until(lambda: not missing(), 2.0)
        for maker in makers:
            maker.disconnect()
        return missing()

    def _look_at_retained(self) -> None:
        world = self.world
        for host in world.live:
            self.probes += 1
            looker = ModelClient(f"look{self.probes}", world, self.publications)
            looker.connect(host, durable=False)
            world.until(lambda looker=looker: looker.ready, 2.0)  # type: ignore[misc]
            looker.subscribe("r/#", 1)
            world.wait(0.5)
            if looker.life is None:
                raise BrokenPromiseError(f"I8: {host.name} has sent a client away: {self._states()}")
            seen = {
                self.publications[arrival.name].topic: arrival.name
                for arrival in looker.life.arrivals
                if arrival.retained
            }
            self.checker.check_retained(host.name, seen, [f"r/{client.name}" for client in self.clients])
            looker.disconnect()
