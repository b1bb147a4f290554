"""Who takes part in a run, and what each of them does until the end.

    publishers    two strict clients (MQTT 5 and 3.1.1; a window of messages in flight), two paho clients (QoS 1)
    receivers     steady    always there
                  flicker   leaves and comes back at random, in peace or by a reset; MQTT 3.1.1
                  sleeper   away for several kills in a row: its queue has to outlive them
                  slow      receive maximum 3, and takes its time with every acknowledgement
                  toggler   subscribes and unsubscribes all the time
                  group     a shared subscription of two clients
                  paho-1, paho-2    paho at QoS 1 (3.1.1) and at QoS 2 (MQTT 5)
    others        setter publishes retained values, probes look at them, doomed clients die and leave wills to watcher

All topics are below `chaos/`. Messages of one topic have one QoS: order is promised for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from random import Random

from tests.chaos.client import PATIENCE, SESSION_EXPIRY, Deliver, Gone, StrictClient, dial, read_packet
from tests.chaos.judge import Delivery, History, Probe, Publication, Receiver, Retained, Will, Window, allowed_values
from tests.chaos.messages import any_size, make_payload, read_payload
from tests.chaos.third import PahoPublisher, PahoSubscriber
from tests.support import wire
from tests.support.wire import Address, Packet

#: Topics of each publisher and QoS; topics with retained messages, and how many of these change at the same time.
TOPICS = 3
KEPT = 24
SERIES = 6

#: Clients that wait for their death at the same time.
DOOMED = 3

WILL_DELAY = 0x18

#: Seconds: of wills that are due, and of wills whose client comes back before.
DELAYS = (0, 0, 1, 2)
LONG_DELAY = 12

#: Seconds until somebody who still waits for an answer at the end waits in vain.
END_PATIENCE = 60.0


class Cast:
    """Everybody but the node."""

    def __init__(
        self,
        address: Address,
        history: History,
        random: Random,
        *,
        qos: tuple[int, ...],
        rate: float,
        patience: float,
    ) -> None:
        self.address = address
        self.history = history
        self.random = random
        self.qos = qos
        self.rate = rate
        self.patience = patience  #: seconds that a probe waits for retained messages before it is taken at its word
        self.kills = 0  #: told by the conductor
        self.stopping = asyncio.Event()
        self.clients: list[StrictClient] = []
        self.paho_publishers: list[PahoPublisher] = []
        self.paho_subscribers: list[PahoSubscriber] = []
        self.strict_publishers = [self._strict("pub-a", 5), self._strict("pub-b", 4)]
        self.setter = self._strict("setter", 5)
        self.watcher = self._strict("watcher", 5, deliver=self._take_will)
        self._numbers: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []
        self._probes: set[asyncio.Task[None]] = set()
        self._doomed = itertools.count(1)
        self._make_receivers()
        self._make_paho()

    # -- the cast

    def _strict(self, name: str, version: int, deliver: Deliver | None = None, **options: object) -> StrictClient:
        client = StrictClient(name, self.address, self.history, version=version, deliver=deliver, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def _make_receivers(self) -> None:
        self.receivers: dict[StrictClient, Receiver] = {}

        def take_part(name: str, version: int, receiver: str = "", **options: object) -> StrictClient:
            into = self.history.receiver(receiver or name, shared=bool(receiver))
            client = self._strict(name, version, self._write_down(into, name), **options)
            self.receivers[client] = into
            return client

        self.steady = take_part("steady", 5)
        self.flicker = take_part("flicker", 4)
        self.sleeper = take_part("sleeper", 5)
        self.slow = take_part("slow", 5, receive_maximum=3, pause=self._hesitate)
        self.toggler = take_part("toggler", 5)
        self.members = [take_part("group-a", 5, "group"), take_part("group-b", 4, "group")]

    def _make_paho(self) -> None:
        for name, version, qos in (("paho-1", 4, 1), ("paho-2", 5, 2)):
            receiver = self.history.receiver(name)
            self.paho_subscribers.append(
                PahoSubscriber(
                    name,
                    self.address,
                    self.history,
                    version=version,
                    receiver=receiver,
                    pattern="chaos/load/#",
                    qos=qos,
                )
            )
        if 1 in self.qos:
            for name, version in (("paho-x", 4), ("paho-y", 5)):
                self.paho_publishers.append(self._paho_publisher(name, version))

    def _paho_publisher(self, name: str, version: int) -> PahoPublisher:
        random = Random(self.random.random())  # its own: it runs in its own thread

        def compose() -> tuple[Publication, bytes]:
            return self._compose(name, 1, random)

        return PahoPublisher(
            name,
            self.address,
            self.history,
            version=version,
            compose=compose,
            pause=lambda: random.expovariate(self.rate),
        )

    def _write_down(self, receiver: Receiver, member: str) -> Deliver:
        def take(packet: Packet, connection: int) -> None:
            name = read_payload(packet.payload)
            now = self.history.clock()
            delivery = Delivery(name, packet.topic, packet.qos, packet.dup, connection, now, member)
            receiver.deliveries.append(delivery)

        return take

    def _take_will(self, packet: Packet, connection: int) -> None:
        self.history.willed[packet.payload.decode()] += 1

    # -- the play

    async def enter(self) -> None:
        """Connect and subscribe; returns when every SUBACK is here."""
        for client in self.clients:
            client.start()
        for paho in self.paho_subscribers:
            await asyncio.to_thread(paho.start)
        everything = [
            client.subscribe(self.receivers[client], "chaos/load/#", 2)
            for client in (self.steady, self.flicker, self.sleeper, self.slow)
        ]
        everything += [
            member.subscribe(self.receivers[member] if member is self.members[0] else None, "$share/g/chaos/load/#", 2)
            for member in self.members
        ]
        everything.append(self.watcher.subscribe(None, "chaos/will/#", 1))
        await asyncio.gather(*everything)
        for paho in self.paho_subscribers:
            assert await asyncio.to_thread(paho.granted.wait, PATIENCE), f"no SUBACK for {paho.name}"

    async def play(self) -> None:
        """Begin the load."""
        for publisher in self.paho_publishers:
            await asyncio.to_thread(publisher.start)
        acts = [(client.name, self._publish(client)) for client in self.strict_publishers]
        acts += [("setter", self._keep(series)) for series in range(SERIES)]
        acts += [("toggler", self._toggle())]
        acts += [("flicker", self._flicker()), ("sleeper", self._sleep())]
        acts += [("doomed", self._doom()) for _ in range(DOOMED)]
        self._tasks = [asyncio.create_task(act, name=name) for name, act in acts]

    async def end_load(self) -> None:
        """Nothing new is published, everybody comes back and stays."""
        self.stopping.set()
        for publisher in self.paho_publishers:
            publisher.finish()
        for client in self.clients:
            client.come_back()
        await self._finish(self._tasks)

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for what has to come to its end by itself; what does not waits for an answer that never came."""
        _, waiting = await asyncio.wait(tasks, timeout=END_PATIENCE)
        for task in waiting:
            self.history.odd("unanswered", f"{task.get_name()} still waits for the node after {END_PATIENCE:.0f} s")
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def say_goodbye(self) -> None:
        """One more message on every topic, behind which nothing old may come any more."""

        async def speak(publisher: StrictClient) -> None:
            for qos, topic in itertools.product(self.qos, range(TOPICS)):
                await self._send(publisher, qos, topic)

        await self._finish([asyncio.create_task(speak(client), name=client.name) for client in self.strict_publishers])

    def check(self) -> None:
        """Raise what went wrong in the harness itself."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        for client in self.clients:
            client.check()

    @property
    def is_together(self) -> bool:
        """Everybody is connected."""
        paho = [client.connected.is_set() for client in (*self.paho_subscribers, *self.paho_publishers)]
        return all(paho) and all(client.connected.is_set() for client in self.clients)

    async def exit(self) -> None:
        for task in (*self._tasks, *self._probes):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._probes, return_exceptions=True)
        for client in self.clients:
            await client.stop()
        for paho in (*self.paho_publishers, *self.paho_subscribers):
            await asyncio.to_thread(paho.stop)

    # -- publishing

    def _compose(self, publisher: str, qos: int, random: Random, topic: int | None = None) -> tuple[Publication, bytes]:
        self._numbers[publisher] += 1
        number = self._numbers[publisher]
        place = f"chaos/load/{publisher}/q{qos}/{random.randrange(TOPICS) if topic is None else topic}"
        name = f"{publisher}:{number:06}:q{qos}:{place[-1]}"
        return Publication(name, publisher, place, number, qos), make_payload(name, any_size(random))

    async def _send(self, client: StrictClient, qos: int, topic: int | None = None) -> None:
        publication, payload = self._compose(client.name, qos, self.random, topic)
        await client.publish(publication, payload)
        self.history.publications[publication.name] = publication

    async def _publish(self, client: StrictClient) -> None:
        while not self.stopping.is_set():
            burst = self.random.choices((1, 4, 12), (0.8, 0.15, 0.05))[0]
            for _ in range(burst):
                await self._send(client, self.random.choice(self.qos))
            await asyncio.sleep(self.random.expovariate(self.rate / burst))

    # -- receivers with habits

    async def _pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the load."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)

    def _hesitate(self) -> float:
        """Seconds before an acknowledgement of the slow one, which hurries up at the end."""
        return 0.0 if self.stopping.is_set() else self.random.expovariate(1 / 0.002)

    async def _flicker(self) -> None:
        while not self.stopping.is_set():
            await self._pause(self.random.uniform(0.02, 1.0))
            self.flicker.leave(politely=self.random.random() < 0.5)
            await self._pause(self.random.uniform(0.0, 0.8))
            self.flicker.come_back()

    async def _sleep(self) -> None:
        while not self.stopping.is_set():
            self.sleeper.leave(politely=self.random.random() < 0.5)
            wake_up = self.kills + self.random.randint(2, 8)
            while self.kills < wake_up and not self.stopping.is_set():
                await self._pause(0.1)
            self.sleeper.come_back()
            await self._pause(self.random.uniform(0.5, 3.0))

    async def _toggle(self) -> None:
        topics = [
            f"chaos/load/{client.name}/q{qos}/{topic}"
            for client, qos, topic in itertools.product(self.strict_publishers, self.qos, range(TOPICS))
        ]
        held: dict[str, Window] = {}
        while not self.stopping.is_set():
            topic = self.random.choice(topics)
            if topic in held:
                await self.toggler.unsubscribe(held.pop(topic))
            else:
                held[topic] = await self.toggler.subscribe(self.receivers[self.toggler], topic, 2)
            await self._pause(self.random.uniform(0.0, 0.6))

    # -- retained messages

    async def _keep(self, series: int) -> None:
        """One value after the other; the next one of a topic only when the last one is acknowledged."""
        for number in itertools.count(1):
            if self.stopping.is_set():
                return
            topic = f"chaos/kept/{self.random.randrange(series, KEPT, SERIES)}"
            value = b"" if self.random.random() < 0.15 else f"{series}:{number:05}".encode()
            qos = self.random.choice(self.qos)
            publication = Publication(f"kept {series}:{number:05}", "setter", topic, number, qos)
            outgoing = await self.setter.publish(publication, value, retain=True)
            self.history.retained[topic].append(Retained(value, publication))
            await outgoing.done.wait()
            await self._pause(self.random.expovariate(self.rate / SERIES))

    def probe(self) -> None:
        """Look at the retained messages with a new client, beside everything else."""
        task = asyncio.create_task(self._probe())
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def settle_probes(self) -> None:
        await asyncio.gather(*self._probes)

    async def _probe(self) -> None:
        connect = wire.connect_packet(f"probe-{next(self._doomed)}", version=5, clean=True, keepalive=0)
        try:
            reader, writer, _ = await dial(self.address, connect, 5)
        except Gone:
            return
        seen: dict[str, bytes] = {}
        began, whole = self.history.clock(), True
        try:
            writer.write(wire.subscribe_packet(1, [("chaos/kept/#", 0)]) + wire.PINGREQ)
            async with asyncio.timeout(self.patience):
                answered = False
                while not (answered and self._has_seen_all(began, seen)):
                    packet = await read_packet(reader, 5)
                    answered |= packet.type == wire.PINGRESP
                    if packet.type == wire.PUBLISH and packet.retain:
                        seen[packet.topic] = packet.payload
        except TimeoutError:
            pass  # what is not there now is missing
        except Gone:
            whole = False
        finally:
            writer.transport.abort()
        self.history.probes.append(Probe(began, self.history.clock(), seen, whole))

    def _has_seen_all(self, began: float, seen: dict[str, bytes]) -> bool:
        now = Probe(began, self.history.clock(), seen)
        return all(
            topic in seen or b"" in allowed_values(values, now) for topic, values in self.history.retained.items()
        )

    # -- wills

    async def _doom(self) -> None:
        """Clients that die: cut off, or left behind by the node; and some that come back in time."""
        while not self.stopping.is_set():
            kind = self.random.choices(("cut", "left", "back"), (0.3, 0.4, 0.3))[0]
            with contextlib.suppress(Gone):
                await self._die(kind)
            await self._pause(self.random.uniform(0.0, 0.5))

    async def _die(self, kind: str) -> None:
        name, version = f"doomed-{next(self._doomed)}", self.random.choice((4, 5))
        if kind == "back":
            version = 5  # only there a will can wait
        delay = LONG_DELAY if kind == "back" else self.random.choice(DELAYS)
        properties = wire.prop(WILL_DELAY, delay) if delay and version == 5 else b""
        will = wire.Will(f"chaos/will/{name}", name.encode(), 1, properties=properties)
        connect = self._connect(name, version, will)
        reader, writer, connack = await dial(self.address, connect, version)
        try:
            if connack.reason:
                return
            if kind == "cut":
                await self._pause(self.random.uniform(0.0, 0.3))
            else:
                await self._until_the_end(reader, version)
        finally:
            writer.transport.abort()
        died = self.history.clock()
        if kind == "back":
            await self._return(name, died)
        else:
            words = f"MQTT {version}, {kind}, delay {delay if properties else 0} s"
            self.history.wills.append(Will(name, due=True, deaths=words))

    async def _until_the_end(self, reader: asyncio.StreamReader, version: int) -> None:
        """Until the node is killed; at the end of the load the client goes by itself."""
        ending = asyncio.create_task(self.stopping.wait())
        reading = asyncio.create_task(read_packet(reader, version))
        await asyncio.wait((ending, reading), return_when=asyncio.FIRST_COMPLETED)
        for task in (ending, reading):
            task.cancel()
        await asyncio.gather(ending, reading, return_exceptions=True)

    async def _return(self, name: str, died: float) -> None:
        """Come back before the delay is over, without a will, and leave in peace."""
        while self.history.clock() < died + LONG_DELAY / 2:
            try:
                _, writer, connack = await dial(self.address, self._connect(name, 5, None), 5)
            except Gone:
                await asyncio.sleep(0.05)
                continue
            came = self.history.clock()
            if connack.reason == 0 and came < died + LONG_DELAY / 2:
                self.history.reconnects += 1
                if not connack.session_present:
                    self.history.odd("session forgotten", name)
                words = f"back after {came - died:.1f} of {LONG_DELAY} s"
                self.history.wills.append(Will(name, due=False, deaths=words))
            writer.write(wire.disconnect_packet(version=5))
            writer.close()
            return

    def _connect(self, name: str, version: int, will: wire.Will | None) -> bytes:
        properties = wire.prop(SESSION_EXPIRY, 3600) if version == 5 else b""
        return wire.connect_packet(name, version=version, clean=False, keepalive=0, will=will, properties=properties)
