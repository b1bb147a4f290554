"""Who takes part in a run on several nodes, and what each of them does until the end.

    publishers    two that move from member to member (MQTT 5 and 3.1.1), one that moves only when it has to, paho
    durable       steady    moves only when it has to           mover     moves all the time; MQTT 3.1.1
                  sleeper   away for several faults in a row    slow      receive maximum 3, and takes its time
                  toggler   subscribes and unsubscribes         group     a shared subscription of two that move
                  paho-1    paho at QoS 1
    live          one at each member and one that moves: no session, another receiver on each connection (judge, rule 6)
    others        doomed clients leave wills to watcher, setter and looks: retained messages
    features      queues, streams and compacted queues: `cluster_features`
    probers       one at each member: what they say after a fault must reach everybody

Whoever moves goes in peace, by a reset, or without a word: then the old member believes it to be there. Clients do not
know who is alive and mostly find out at once; some of them try a member that stands still.

All topics are below `chaos/`. Messages of one topic have one QoS: order is promised for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

from motorcade.storage.redis import INLINE_MANY
from tests.chaos.client import SESSION_EXPIRY, Deliver, Gone, StrictClient, dial, read_packet
from tests.chaos.cluster_features import FEATURES, Feature
from tests.chaos.cluster_judge import CLIENT, Arrival, Ledger, homes_of
from tests.chaos.cluster_members import Member, Trio
from tests.chaos.judge import NEVER, Debts, Delivery, Probe, Publication, Receiver, Retained, Will, Window
from tests.chaos.messages import any_size, make_payload, read_payload
from tests.chaos.third import PahoPublisher, PahoSubscriber
from tests.support import wire
from tests.support.wire import Address, Packet

LOAD = "chaos/load/#"
ROOT = "load"
PLAIN = 3  #: times that something is said to plain subscribers, for once to a feature
TOPICS = 3  #: of each publisher and QoS
KEPT = 12  #: topics with retained messages
SERIES = 3  #: how many of these change at the same time
DOOMED = 2  #: clients that wait for their death at the same time
BLIND = 0.1  #: of the connections: to any member, whether it can serve or not

WILL_DELAY = 0x18
DELAYS = (0, 0, 1, 2)  #: seconds, of wills that are due
LONG_DELAY = 30  #: and of those whose client comes back before

PING = 0.25  #: seconds between two signs of life of a live receiver
RETRY = 0.05
GOODBYE = 0.2  #: seconds until a connection that was left in peace is closed


class Places:
    """Where clients connect."""

    def __init__(self, trio: Trio, random: Random) -> None:
        self.trio = trio
        self.random = random

    def any(self) -> Address:
        """A member, most often one that may serve."""
        members = list(self.trio.members.values())
        if self.random.random() >= BLIND:
            members = [member for member in members if member.serves] or members
        return self.random.choice(members).mqtt

    def near(self, member: Member) -> Callable[[], Address]:
        """This member while it lives; whoever stays with it does not notice that it stands still."""
        return lambda: member.mqtt if member.is_alive else self.any()

    def at(self, member: Member) -> Callable[[], Address]:
        return lambda: member.mqtt


class LiveClient:
    """Receives without a session: each connection is a receiver of its own.

    What was acknowledged a while before its last sign of life is owed to it (`slack`): when a member dies, what others
    gave it that it had not sent on dies with it, until they know of that.
    """

    def __init__(
        self,
        name: str,
        choose: Callable[[], Address],
        ledger: Ledger,
        deliver: Callable[[Receiver, str], Deliver],
        slack: float,
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.connections = 0
        self.receiver: Receiver | None = None  #: of the present connection, once it is granted
        self.stays = True
        self._choose = choose
        self._deliver = deliver
        self._slack = slack
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def move(self) -> None:
        """Break the connection and make another."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(Gone):
                await self._connection()
            await asyncio.sleep(RETRY)

    async def _connection(self) -> None:
        connect = wire.connect_packet(self.name, version=5, clean=True, keepalive=0)
        reader, self._writer, connack = await dial(self._choose(), connect, 5)
        writer = self._writer
        window = Window(LOAD, 2, asked=self.ledger.clock())
        pinging: asyncio.Task[None] | None = None
        try:
            if connack.reason:
                return
            self.connections += 1
            receiver = self.ledger.receiver(f"{self.name}#{self.connections}")
            receiver.windows.append(window)
            deliver = self._deliver(receiver, self.name)
            writer.write(wire.subscribe_packet(1, [(LOAD, 2)]))
            pinging = asyncio.create_task(self._ping(writer))
            await self._read(reader, writer, receiver, window, deliver)
        finally:
            self.receiver, self._writer = None, None
            if pinging is not None:
                pinging.cancel()
            # Nothing is owed that the members may not have told each other of when this connection ended.
            window.left = self.ledger.clock()
            window.leaving = max(window.granted, self._heard - self._slack) if window.granted != NEVER else window.asked
            writer.transport.abort()

    async def _ping(self, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(PING)
            writer.write(wire.PINGREQ)

    async def _read(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        receiver: Receiver,
        window: Window,
        deliver: Deliver,
    ) -> None:
        unreleased: set[int] = set()
        self._heard = self.ledger.clock()
        while True:
            packet = await read_packet(reader, 5)
            self._heard = self.ledger.clock()
            match packet.type:
                case wire.PUBLISH:
                    if packet.qos < 2 or packet.packet_id not in unreleased:
                        deliver(packet, self.connections)
                    if packet.qos:
                        assert packet.packet_id is not None
                        kind = wire.PUBACK if packet.qos == 1 else wire.PUBREC
                        if packet.qos == 2:
                            unreleased.add(packet.packet_id)
                        writer.write(wire.ack_packet(kind, packet.packet_id))
                case wire.PUBREL:
                    assert packet.packet_id is not None
                    unreleased.discard(packet.packet_id)
                    writer.write(wire.ack_packet(wire.PUBCOMP, packet.packet_id))
                case wire.SUBACK:
                    if packet.reasons[0] >= 0x80:
                        raise Gone
                    window.granted = self._heard
                    self.receiver = receiver
                case wire.DISCONNECT:
                    raise Gone


class ClusterCast:
    """Everybody but the members."""

    def __init__(
        self,
        trio: Trio,
        ledger: Ledger,
        random: Random,
        *,
        rate: float,
        slack: float,
        retained: bool,
        features: Iterable[str] = (),
    ) -> None:
        """`rate`: messages per second of each publisher; `features`: their names."""
        self.trio = trio
        self.ledger = ledger
        self.random = random
        self.rate = rate
        self.slack = slack
        self.retained = retained
        self.places = Places(trio, random)
        self.faults = 0  #: told by the conductor
        self.flowing = asyncio.Event()  #: habits go on; else everybody stays where it is and is silent
        self.stopping = asyncio.Event()
        self.clients: list[StrictClient] = []
        self.live: list[LiveClient] = []
        self._numbers: Counter[str] = Counter()
        self._doomed = itertools.count(1)
        self._looks = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._make_publishers()
        self._make_receivers()
        self.features: list[Feature] = [FEATURES[name](self) for name in features]
        self._roots = [ROOT] * PLAIN + [feature.root for feature in self.features if feature.root]
        self._debts = Debts(ledger)

    # -- the cast

    def strict(
        self,
        name: str,
        version: int,
        deliver: Deliver | None = None,
        at: Callable[[], Address] | None = None,
        **options: Any,
    ) -> StrictClient:
        choose = at or self.places.any
        client = StrictClient(name, choose, self.ledger, version=version, deliver=deliver, **options)
        self.clients.append(client)
        return client

    def _make_publishers(self) -> None:
        members = list(self.trio.members.values())
        self.moving_publishers = [self.strict("pub-a", 5), self.strict("pub-b", 4)]
        self.staying_publisher = self.strict("pub-c", 5, at=self.places.near(members[0]))
        self.setter = self.strict("setter", 5)
        self.watcher = self.strict("watcher", 5, deliver=self._take_will)
        self.probers = {
            member.name: self.strict(f"prober-{member.name}", 5, at=self.places.at(member)) for member in members
        }
        random = Random(self.random.random())  # its own: it runs in its own thread

        def compose() -> tuple[Publication, bytes]:
            return self._compose("paho-x", 1, random)

        def pause() -> float:
            return random.expovariate(self.rate) if self.flowing.is_set() else 0.2

        self.paho_publisher = PahoPublisher(
            "paho-x",
            self.places.any,
            self.ledger,
            version=5,
            compose=compose,
            pause=pause,
            may=self.flowing.is_set,
            keepalive=5,
        )

    def _make_receivers(self) -> None:
        self.receivers: dict[StrictClient, Receiver] = {}

        def take_part(name: str, version: int, receiver: str = "", **options: Any) -> StrictClient:
            into = self.ledger.receiver(receiver or name, shared=bool(receiver))
            client = self.strict(name, version, self.write_down(into, name), **options)
            self.receivers[client] = into
            return client

        members = list(self.trio.members.values())
        self.steady = take_part("steady", 5, at=self.places.near(members[1]))
        self.mover = take_part("mover", 4)
        self.sleeper = take_part("sleeper", 5)
        self.slow = take_part("slow", 5, receive_maximum=3, pause=self._hesitate)
        self.toggler = take_part("toggler", 5)
        self.group = [take_part("group-a", 5, "group"), take_part("group-b", 4, "group")]
        self.ledger.members_of["group"] = ["group-a", "group-b"]
        self.paho_receiver = PahoSubscriber(
            "paho-1",
            self.places.any,
            self.ledger,
            version=4,
            receiver=self.ledger.receiver("paho-1"),
            pattern=LOAD,
            qos=1,
            keepalive=5,
        )
        for member in members:
            self.live.append(self._live(f"live-{member.name}", self.places.at(member)))
        self.live.append(self._live("live-mover", self.places.any))
        self.live[-1].stays = False

    def _live(self, name: str, choose: Callable[[], Address]) -> LiveClient:
        return LiveClient(name, choose, self.ledger, self.write_down, self.slack)

    def write_down(self, receiver: Receiver, member: str) -> Deliver:
        def take(packet: Packet, connection: int) -> None:
            name = read_payload(packet.payload)
            now = self.ledger.clock()
            receiver.deliveries.append(Delivery(name, packet.topic, packet.qos, packet.dup, connection, now, member))

        return take

    def _take_will(self, packet: Packet, connection: int) -> None:
        self.ledger.willed[packet.payload.decode()] += 1

    @property
    def _everybody(self) -> list[StrictClient | LiveClient]:
        return [*self.clients, *self.live]

    # -- the play

    async def enter(self) -> None:
        """Connect and subscribe; returns when every SUBACK is here."""
        for one in self._everybody:
            one.start()
        for paho in (self.paho_receiver, self.paho_publisher):
            await asyncio.to_thread(paho.start)
        everything: list[Coroutine[Any, Any, Any]] = [
            client.subscribe(self.receivers[client], LOAD, 2)
            for client in (self.steady, self.mover, self.sleeper, self.slow)
        ]
        everything += [
            member.subscribe(self.receivers[member] if member is self.group[0] else None, f"$share/g/{LOAD}", 2)
            for member in self.group
        ]
        everything.append(self.watcher.subscribe(None, "chaos/will/#", 1))
        everything += [feature.enter() for feature in self.features]
        await asyncio.gather(*everything)
        await asyncio.to_thread(self.paho_receiver.granted.wait)

    def play(self) -> None:
        """Begin the load."""
        self.go_on()
        acts: list[tuple[str, Coroutine[Any, Any, None]]] = [
            (client.name, self._publish(client)) for client in (*self.moving_publishers, self.staying_publisher)
        ]
        restless = [(client, 1.0, 5.0) for client in self.moving_publishers]
        restless += [(self.mover, 0.1, 3.0), (self.setter, 1.0, 6.0)]
        acts += [(client.name, self.move(client, least, most)) for client, least, most in restless]
        acts += [(client.name, self.move(client, 3.0, 15.0)) for client in (*self.group, self.slow, self.watcher)]
        acts += [("toggler", self._toggle()), ("toggler", self.move(self.toggler, 2.0, 10.0))]
        acts += [("sleeper", self._sleep()), ("live-mover", self._move_live())]
        acts += [("doomed", self._doom()) for _ in range(DOOMED)]
        for feature in self.features:
            acts += feature.acts()
        if self.retained:
            acts += [("setter", self._keep(series)) for series in range(SERIES)]
        self._tasks = [asyncio.create_task(act, name=name) for name, act in acts]

    def rest(self) -> None:
        """Everybody stays where it is and is silent."""
        self.flowing.clear()
        for feature in self.features:
            feature.rest()

    def go_on(self) -> None:
        """Habits go on."""
        self.flowing.set()
        for feature in self.features:
            feature.go_on()

    async def end_load(self, patience: float) -> None:
        """Nothing new is published, everybody comes back and stays."""
        self.stopping.set()
        self.rest()
        self.go_on()
        self.paho_publisher.finish()
        for client in self.clients:
            client.come_back()
        if not self._tasks:
            return
        _, waiting = await asyncio.wait(self._tasks, timeout=patience)
        for task in waiting:
            self.ledger.odd("unanswered", f"{task.get_name()} still waits for an answer after {patience:.0f} s")
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def check(self) -> None:
        """Raise what went wrong in the harness itself."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        for client in self._everybody:
            client.check()

    async def exit(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._everybody:
            await client.stop()
        for paho in (self.paho_publisher, self.paho_receiver):
            await asyncio.to_thread(paho.stop)
        for feature in self.features:
            await feature.exit()

    # -- what is left to be done

    def owed(self) -> dict[str, list[Publication]]:
        """By durable receiver that is awake: what is acknowledged, not there, and forgotten by no store."""
        asleep = {self.receivers[client].name for client in self.receivers if not client.is_wanted}
        found: dict[str, list[Publication]] = {}
        for name, owed in self._debts.owed().items():
            if "#" in name or name in asleep:
                continue
            homes = homes_of(self.ledger, self.ledger.receivers[name])
            windows = self.ledger.receivers[name].windows
            left = [each for each in owed if not self._excused(homes, windows, each)]
            if left:
                found[name] = left
        return found

    def _excused(self, homes: list[str], windows: list[Window], publication: Publication) -> bool:
        return (
            any(
                self.ledger.excuses(home, publication.sent[0], publication.completed)
                or any(self.ledger.excuses(home, window.asked, window.granted) for window in windows)
                for home in homes
            )
            or self.ledger.lacks_payload(publication)
            or any(client in homes for client in (CLIENT + name for name, *_ in self.ledger.forgotten_sessions))
        )

    def open_flows(self) -> list[Publication]:
        """What was sent, and has no answer yet."""
        return [publication for publication in self.ledger.sent() if publication.sent and publication.is_open]

    async def speak(self, after: str, patience: float) -> None:
        """Each prober says something, which must reach everybody who is awake: durable receivers, and the live ones
        that stay connected.
        """
        words = [self._speak(after, name, patience) for name in self.probers]
        for feature, name in itertools.product(self.features, self.probers):
            if feature.root:
                words.append(self._speak(after, name, patience, feature))
            else:
                words.append(self._speak_of(after, name, patience, feature))
        await asyncio.gather(*words)

    async def _speak_of(self, after: str, member: str, patience: float, feature: Feature) -> None:
        """Say something that only a feature knows of."""
        arrival = Arrival(after, member, self.ledger.clock(), missing="the end")
        self.ledger.arrivals.append(arrival)
        arrival.missing = await feature.speak(self.probers[member], patience)
        if not arrival.missing:
            arrival.arrived = self.ledger.clock()

    async def _speak(self, after: str, member: str, patience: float, feature: Feature | None = None) -> None:
        prober = self.probers[member]
        root = feature.root if feature is not None else ROOT
        publication, payload = self._compose(prober.name, 1, self.random, topic=0, root=root)
        arrival = Arrival(after, member, self.ledger.clock())
        self.ledger.arrivals.append(arrival)
        live = {client: client.receiver for client in self.live}

        def missing_now() -> list[str]:
            return feature.missing(publication.name) if feature is not None else self._missing(publication.name, live)

        try:
            async with asyncio.timeout(patience):
                self.ledger.publications[publication.name] = publication
                await prober.publish(publication, payload)
                while missing := missing_now():
                    arrival.missing = ", ".join(missing)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            arrival.missing = arrival.missing or "anybody: it was not taken"
            if not publication.sent:
                del self.ledger.publications[publication.name]
        else:
            arrival.missing, arrival.arrived = "", self.ledger.clock()

    def _missing(self, name: str, live: dict[LiveClient, Receiver | None]) -> list[str]:
        """Those who have not got a message. A live receiver that has another connection by now does not owe it."""
        wanted = {self.receivers[client].name: client for client in self.receivers if client.is_wanted}
        wanted.pop("toggler", None)
        everybody = [*map(self.ledger.receiver, wanted), self.ledger.receiver("paho-1")]
        missing = [receiver.name for receiver in everybody if not _has(receiver, name)]
        for client, receiver in live.items():
            if client.receiver is None:
                missing.append(f"{client.name} (not connected)")
            elif client.receiver is receiver and not _has(receiver, name):
                missing.append(client.name)
        return missing

    # -- publishing

    def _compose(
        self, publisher: str, qos: int, random: Random, topic: int | None = None, root: str = ROOT
    ) -> tuple[Publication, bytes]:
        self._numbers[publisher] += 1
        number = self._numbers[publisher]
        place = f"chaos/{root}/{publisher}/q{qos}/{random.randrange(TOPICS) if topic is None else topic}"
        name = f"{publisher}:{number:06}:q{qos}:{place[-1]}"
        payload = make_payload(name, any_size(random))
        digest = hashlib.sha256(payload).digest() if len(payload) > INLINE_MANY else b""
        return Publication(name, publisher, place, number, qos, payload=digest), payload

    async def _publish(self, client: StrictClient) -> None:
        while not self.stopping.is_set():
            await self.flowing.wait()
            burst = self.random.choices((1, 4, 12), (0.8, 0.15, 0.05))[0]
            for _ in range(burst):
                qos = self.random.choice((0, 1, 1, 2, 2))
                root = self.random.choice(self._roots) if qos else ROOT
                publication, payload = self._compose(client.name, qos, self.random, root=root)
                if publication.qos:
                    await client.publish(publication, payload)
                elif not client.publish_unacknowledged(publication, payload):
                    continue
                self.ledger.publications[publication.name] = publication
            await self.pause(self.random.expovariate(self.rate / burst))

    # -- habits

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the load; go on only while habits do."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        await self.flowing.wait()

    def _hesitate(self) -> float:
        """Seconds before an acknowledgement of the slow one, which hurries up while nobody publishes."""
        return self.random.expovariate(1 / 0.002) if self.flowing.is_set() and not self.stopping.is_set() else 0.0

    async def move(self, client: StrictClient, least: float, most: float) -> None:
        while not self.stopping.is_set():
            await self.pause(self.random.uniform(least, most))
            if self.stopping.is_set() or not client.is_wanted:
                continue
            how = self.random.choices(("goodbye", "reset", "abandon"), (0.3, 0.4, 0.3))[0]
            if how == "abandon":
                client.abandon()
            else:
                client.leave(politely=how == "goodbye")
                client.come_back()

    async def _move_live(self) -> None:
        while not self.stopping.is_set():
            await self.pause(self.random.uniform(1.0, 8.0))
            for client in self.live:
                if not client.stays:
                    client.move()

    async def _sleep(self) -> None:
        while not self.stopping.is_set():
            self.sleeper.leave(politely=self.random.random() < 0.5)
            wake_up = self.faults + self.random.randint(1, 5)
            while self.faults < wake_up and not self.stopping.is_set():
                await self.pause(0.2)
            self.sleeper.come_back()
            await self.pause(self.random.uniform(0.5, 6.0))

    async def _toggle(self) -> None:
        topics = [
            f"chaos/load/{client.name}/q{qos}/{topic}"
            for client, qos, topic in itertools.product(
                (*self.moving_publishers, self.staying_publisher), (1, 2), range(TOPICS)
            )
        ]
        held: dict[str, Window] = {}
        while not self.stopping.is_set():
            topic = self.random.choice(topics)
            if topic in held:
                await self.toggler.unsubscribe(held.pop(topic))
            else:
                held[topic] = await self.toggler.subscribe(self.receivers[self.toggler], topic, 2)
            await self.pause(self.random.uniform(0.0, 1.0))

    # -- retained messages

    async def _keep(self, series: int) -> None:
        """One value after the other; the next one of a topic only when the last one is acknowledged."""
        for number in itertools.count(1):
            if self.stopping.is_set():
                return
            topic = f"chaos/kept/{self.random.randrange(series, KEPT, SERIES)}"
            value = b"" if self.random.random() < 0.15 else f"{series}:{number:05}".encode()
            publication = Publication(f"kept {series}:{number:05}", "setter", topic, number, self.random.choice((1, 2)))
            outgoing = await self.setter.publish(publication, value, retain=True)
            self.ledger.retained[topic].append(Retained(value, publication))
            await outgoing.done.wait()
            await self.pause(self.random.expovariate(self.rate / SERIES))

    async def look(self, patience: float, *, final: bool = False) -> None:
        """Look at the retained messages at each member, when nothing has changed for a while."""
        if self.retained:
            await asyncio.gather(*(self._look(member, patience, final) for member in self.trio.members.values()))

    async def _look(self, member: Member, patience: float, final: bool) -> None:
        connect = wire.connect_packet(f"look-{next(self._looks)}", version=5, clean=True, keepalive=0)
        seen: dict[str, bytes] = {}
        began = self.ledger.clock()
        try:
            reader, writer, _ = await dial(member.mqtt, connect, 5)
        except Gone:
            self.ledger.odd("no look", f"{member.name} takes no client")
            return
        try:
            writer.write(wire.subscribe_packet(1, [("chaos/kept/#", 0)]) + wire.PINGREQ)
            async with asyncio.timeout(patience):
                answered = False
                while not (answered and self._has_seen_all(seen)):
                    packet = await read_packet(reader, 5)
                    answered |= packet.type == wire.PINGRESP
                    if packet.type == wire.PUBLISH and packet.retain:
                        seen[packet.topic] = packet.payload
        except TimeoutError:
            pass  # what is not there now is missing
        except Gone:
            self.ledger.odd("no look", f"{member.name} has ended a look")
            return
        finally:
            writer.transport.abort()
        now = NEVER if final else self.ledger.clock()
        self.ledger.probes.append(Probe(NEVER if final else began, now, seen))

    def _has_seen_all(self, seen: dict[str, bytes]) -> bool:
        return all(topic in seen or not values[-1].value for topic, values in self.ledger.retained.items())

    # -- wills

    async def _doom(self) -> None:
        """Clients that die: cut off, or left behind by their member; and some that come back in time."""
        while not self.stopping.is_set():
            kind = self.random.choices(("cut", "left", "back"), (0.3, 0.4, 0.3))[0]
            with contextlib.suppress(Gone):
                await self._die(kind)
            await self.pause(self.random.uniform(0.0, 1.0))

    async def _die(self, kind: str) -> None:
        name, version = f"doomed-{next(self._doomed)}", self.random.choice((4, 5))
        if kind == "back":
            version = 5  # only there a will can wait
        delay = LONG_DELAY if kind == "back" else self.random.choice(DELAYS)
        properties = wire.prop(WILL_DELAY, delay) if delay and version == 5 else b""
        will = wire.Will(f"chaos/will/{name}", name.encode(), 1, properties=properties)
        reader, writer, connack = await dial(self.places.any(), self._connect(name, version, will), version)
        try:
            if connack.reason:
                return
            if kind == "left":
                await self._until_the_end(reader, version)
            else:
                await asyncio.sleep(self.random.uniform(0.0, 0.3))
        finally:
            writer.transport.abort()
        died = self.ledger.clock()
        if kind == "back":
            await self._return(name, died)
        else:
            words = f"MQTT {version}, {kind} at {died:.3f}, delay {delay if properties else 0} s"
            self.ledger.wills.append(Will(name, due=True, deaths=words))

    async def _until_the_end(self, reader: asyncio.StreamReader, version: int) -> None:
        """Until the member lets it go, or the end of the load; one that stays away from trouble for long goes too."""
        ending = asyncio.create_task(self.stopping.wait())
        reading = asyncio.create_task(read_packet(reader, version))
        await asyncio.wait((ending, reading), return_when=asyncio.FIRST_COMPLETED, timeout=20.0)
        for task in (ending, reading):
            task.cancel()
        await asyncio.gather(ending, reading, return_exceptions=True)

    async def _return(self, name: str, died: float) -> None:
        """Come back before the delay is over, without a will, and leave in peace."""
        while self.ledger.clock() < died + LONG_DELAY / 2:
            try:
                _, writer, connack = await dial(self.places.any(), self._connect(name, 5, None), 5)
            except Gone:
                await asyncio.sleep(0.05)
                continue
            came = self.ledger.clock()
            if connack.reason == 0 and came < died + LONG_DELAY / 2:
                self.ledger.reconnects += 1
                if not connack.session_present:
                    self.ledger.forgotten(name, name)
                words = f"back after {came - died:.1f} of {LONG_DELAY} s"
                self.ledger.wills.append(Will(name, due=False, deaths=words))
            writer.write(wire.disconnect_packet(version=5))
            writer.close()
            return

    def _connect(self, name: str, version: int, will: wire.Will | None) -> bytes:
        properties = wire.prop(SESSION_EXPIRY, 3600) if version == 5 else b""
        return wire.connect_packet(name, version=version, clean=False, keepalive=0, will=will, properties=properties)


def _has(receiver: Receiver, name: str) -> bool:
    """Whether a message has come; it is among the last ones."""
    return any(delivery.name == name for delivery in reversed(receiver.deliveries))
