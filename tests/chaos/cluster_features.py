"""Features of the broker that take part in a run on several nodes, beside plain subscribers: each with its own clients.

    Feature      what the run asks of one: `config` of the members, clients that enter and act, what is left after the
                 faults, what is said at each member after them, and what the judge has to look at
    Queues       a queue with three workers that move; each message to one of them
    Streams      a stream with two readers that move, from its beginning
    Compacted    exclusive and shared compacted queues, with the producers and consumers of `ecq_cast`
    FanOut       the platform and the vehicles of `fanout`, who come to any member by a balancer

What the moving publishers say goes to the topics of queues and streams as well (`root`), so that the common judge sees
what is lost, what comes out of order, and what is repeated on one connection: a queue is a receiver that is shared, a
reader of a stream one that has subscribed before everything began. Rules of their own:

Rule 1: a queue whose messages have all been acknowledged is empty, as each member tells.
Rule 2: an offset of a stream is that of one message, at every reader and member. A reader gets offsets without a hole,
        and on one connection in order. A message is in a stream as often as it was sent at most; also one of QoS 2, of
        which streams promise no more (docs/streams.md: the client sends it again). That is counted.
Rule 3: compacted queues: the rules of `ecq_judge`, but `repeated` (a consumer that moves may get again what it has
        acknowledged in the moments before). What a member tells of a consumer's progress when all is at rest is never
        smaller later, unless it was taken back.
Rule 5: fan-out: the rules of `audit`; a receipt that says that a delivery has begun or ended is there once. When all is
        at rest every delivery has ended. Each member tells the same counts. Of what a store has forgotten `two at once`
        is judged all the same.
Rule 4: what a store has forgotten is excused as in `cluster_judge`, rule 7. Of a compacted queue of which it has
        forgotten something only `lost` and `invented` are judged, without the values that were under way then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import httpx

from motorcade.core.receipt import FINAL, Receipt, State
from motorcade.core.receipt import decode as decode_receipt
from motorcade.fleet import Behaviour, Fleet, FleetOptions, Leave, VehicleState
from tests.chaos import ecq_judge, fanout
from tests.chaos.audit import Audit, audit
from tests.chaos.client import StrictClient
from tests.chaos.cluster_judge import CLIENT, Ledger, Verdict
from tests.chaos.cluster_members import Member
from tests.chaos.ecq_cast import Consumer, Producer
from tests.chaos.ecq_judge import Place, Story
from tests.chaos.judge import NEVER, Publication, Receiver, Window
from tests.chaos.messages import read_payload
from tests.chaos.platform import TRY_AGAIN, Platform
from tests.support.compacted import FORMS
from tests.support.flows import USER_PROPERTY
from tests.support.node import Endpoint
from tests.support.proxy import Carried, Proxy
from tests.support.wire import Packet

if TYPE_CHECKING:
    from tests.chaos.cluster_cast import ClusterCast

OFFSET = "stream-offset"
QUEUE, STREAM = "jobs", "trips"
PATIENCE = 10.0  #: seconds that a member may take to tell something
LIMIT = 1000  #: records of one answer
TWO = "two at once"  #: messages that are not acknowledged on one connection
STRICT = frozenset({"lost", "invented"})  #: findings about a compacted queue that a forgetting store does not excuse


class Feature:
    """One of them. The cast makes it, and tells it when."""

    config: ClassVar[str] = ""  #: of all members
    root: ClassVar[str] = ""  #: below `chaos/`: publishers say something there, too

    def __init__(self, cast: ClusterCast) -> None:
        self.cast = cast
        self.ledger: Ledger = cast.ledger

    async def enter(self) -> None:
        """Connect and subscribe; returns when that is granted."""

    def acts(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """What goes on until the end of the load, by name."""
        return ()

    def rest(self) -> None:
        """Publish nothing, stay where they are, and take what comes."""

    def go_on(self) -> None:
        """The rest is over."""

    async def left(self) -> list[str]:
        """What should be over by now, in words."""
        return []

    def missing(self, name: str) -> list[str]:
        """Who has not got what was said below `root`."""
        return []

    async def speak(self, prober: StrictClient, patience: float) -> str:
        """Say something at one member, of what is not below `root`; who did not get it."""
        return ""

    async def at_rest(self) -> None:
        """Everything is over: look."""

    async def end(self) -> None:
        """The load is over, and everything has drained: look at what is there."""

    async def exit(self) -> None:
        """Leave."""

    def judge(self, verdict: Verdict) -> None:
        """Add what is wrong."""

    def told(self) -> str:
        """Counts, for the report."""
        return ""

    # -- for those that are below `root`

    def _receiver(self, name: str, homes: list[str], *, shared: bool = False) -> Receiver:
        """A receiver that is owed everything from now on."""
        receiver = self.ledger.receiver(name, shared=shared)
        now = self.ledger.clock()
        receiver.windows.append(Window(f"chaos/{self.root}/#", 1, asked=now, granted=now))
        self.ledger.homes[name] = homes
        return receiver

    def _not_there(self, receivers: Iterable[Receiver], name: str) -> list[str]:
        return [each.name for each in receivers if not any(one.name == name for one in reversed(each.deliveries))]

    async def _ask(self, member: Member, path: str, **params: Any) -> dict[str, Any] | None:
        """What a member tells; None: there is no such thing. `httpx.HTTPError` if it does not answer."""
        address = f"http://{member.http}/api/v1/"
        async with httpx.AsyncClient(base_url=address, headers=member.auth, trust_env=False, timeout=PATIENCE) as web:
            answer = await web.get(path, params=params)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


class Queues(Feature):
    """Rule 1."""

    config = f'[plugins.queues.queue.{QUEUE}]\ntopics = ["chaos/{QUEUE}/#"]\nmax_attempts = 0\nmax_messages = 0\n'
    root = QUEUE
    workers = ("worker-a", "worker-b", "worker-c")

    def __init__(self, cast: ClusterCast) -> None:
        super().__init__(cast)
        self.receiver = self._receiver(QUEUE, [f"queue:{QUEUE}"], shared=True)
        versions = itertools.cycle((5, 4))
        self.clients = [
            cast.strict(name, next(versions), cast.write_down(self.receiver, name), receive_maximum=maximum)
            for name, maximum in zip(self.workers, (4, 0, 20), strict=True)
        ]

    async def enter(self) -> None:
        await asyncio.gather(*(client.subscribe(None, f"$queue/{QUEUE}", 1) for client in self.clients))

    def acts(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        return [(client.name, self.cast.move(client, 0.5, 6.0)) for client in self.clients]

    def missing(self, name: str) -> list[str]:
        return self._not_there([self.receiver], name)

    async def left(self) -> list[str]:
        found = []
        for member in self.cast.trio.members.values():
            try:
                shown = await self._ask(member, f"queues/{QUEUE}")
            except httpx.HTTPError as error:
                found.append(f"{member.name} does not tell of {QUEUE}: {error!r}")
                continue
            if shown is None or shown["messages"] or shown["inflight"]:
                kept = shown and (shown["messages"], shown["inflight"])
                found.append(f"{QUEUE} has (messages, in flight) {kept} at {member.name}")
        return found

    def told(self) -> str:
        names = {delivery.name for delivery in self.receiver.deliveries}
        return f"queue: {len(names)} messages, delivered {len(self.receiver.deliveries)} times"


class Streams(Feature):
    """Rule 2."""

    config = f'[plugins.streams.stream.{STREAM}]\ntopics = ["chaos/{STREAM}/#"]\nretention = 0\nmax_bytes = 0\n'
    root = STREAM
    readers = ("reader-a", "reader-b")

    def __init__(self, cast: ClusterCast) -> None:
        super().__init__(cast)
        self.receivers = [self._receiver(name, [STREAM, CLIENT + name]) for name in self.readers]
        self.offsets: dict[str, list[int]] = {name: [] for name in self.readers}  #: of each delivery
        self.clients = [
            cast.strict(receiver.name, 5, self._write_down(receiver), receive_maximum=maximum)
            for receiver, maximum in zip(self.receivers, (0, 5), strict=True)
        ]
        self.stored: dict[str, list[tuple[int, str]]] = {}  #: by member: offsets and names, at the end

    def _write_down(self, receiver: Receiver) -> Any:
        write = self.cast.write_down(receiver, receiver.name)

        def take(packet: Packet, connection: int) -> None:
            told = [int(value) for name, value in packet.prop_all(USER_PROPERTY) if name == OFFSET]
            if len(told) != 1:
                self.ledger.odd("odd", f"{receiver.name}: {OFFSET} {told}")
            self.offsets[receiver.name].append(told[0] if told else 0)
            write(packet, connection)

        return take

    async def enter(self) -> None:
        await asyncio.gather(*(client.subscribe(None, f"$stream/{STREAM}/earliest", 1) for client in self.clients))

    def acts(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        return [(client.name, self.cast.move(client, 0.5, 6.0)) for client in self.clients]

    def missing(self, name: str) -> list[str]:
        return self._not_there(self.receivers, name)

    async def end(self) -> None:
        for member in self.cast.trio.members.values():
            try:
                self.stored[member.name] = [one async for one in self._records(member)]
            except httpx.HTTPError as error:
                self.ledger.odd("no look", f"{member.name} does not tell of {STREAM}: {error!r}")

    async def _records(self, member: Member) -> Any:
        after = 0
        while True:
            found = await self._ask(member, f"streams/{STREAM}/messages", after=after, limit=LIMIT)
            if found is None or not found["data"]:
                return
            for message in found["data"]:
                after = message["position"]
                yield after, read_payload(message["payload"].encode())

    def judge(self, verdict: Verdict) -> None:
        forgot = self.ledger.excuses(STREAM, 0.0, NEVER)
        seen: dict[int, str] = {}
        pairs = [pair for stored in self.stored.values() for pair in stored]
        for receiver in self.receivers:
            pairs += zip(self.offsets[receiver.name], (one.name for one in receiver.deliveries), strict=True)
            self._judge_reader(receiver, verdict, excused=forgot)
        for offset, name in pairs:
            if seen.setdefault(offset, name) != name:
                words = f"offset {offset} of {STREAM} is {seen[offset]} and {name}"
                verdict.blame("reused", words, excused=forgot)
        for member, stored in self.stored.items():
            self._judge_stored(member, stored, verdict)

    def _judge_reader(self, receiver: Receiver, verdict: Verdict, *, excused: bool) -> None:
        highest, before, connection = 0, 0, 0
        for offset, delivery in zip(self.offsets[receiver.name], receiver.deliveries, strict=True):
            if delivery.connection != connection:
                before, connection = 0, delivery.connection
            if offset > highest + 1:
                words = f"{receiver.name} got offset {offset} after {highest}, at {delivery.at:.3f}"
                verdict.blame("skipped", words, excused=excused)
            if offset <= before and not delivery.dup:
                words = f"{receiver.name} got offset {offset} after {before} on connection {connection}"
                verdict.blame("unordered", words, excused=excused)
            before, highest = max(before, offset), max(highest, offset)

    def _judge_stored(self, member: str, stored: list[tuple[int, str]], verdict: Verdict) -> None:
        times = Counter(name for _, name in stored)
        for name, publication in self.ledger.publications.items():
            if not publication.topic.startswith(f"chaos/{STREAM}/"):
                continue
            excused = self._is_excused(publication)
            if publication.is_acknowledged and not times[name]:
                verdict.blame("lost", f"{name} is not in {STREAM}, as {member} tells", excused=excused)
            elif times[name] > len(publication.sent):
                words = f"{name} is {times[name]} times in {STREAM}, as {member} tells"
                verdict.blame("stored too often", words, excused=excused)

    def _is_excused(self, publication: Publication) -> bool:
        homes = (STREAM, CLIENT + publication.publisher)
        return any(self.ledger.excuses(home, publication.sent[0], publication.completed) for home in homes)

    def told(self) -> str:
        records = max((len(stored) for stored in self.stored.values()), default=0)
        again = records - len({name for stored in self.stored.values() for _, name in stored})
        delivered = sum(map(len, self.offsets.values()))
        return f"stream: {records} records, {again} of them sent and stored again, delivered {delivered} times"


class Compacted(Feature):
    """Rule 3."""

    exclusive, shared, each, producers, rate = 3, 2, 2, 2, 8.0

    def __init__(self, cast: ClusterCast) -> None:
        super().__init__(cast)
        random = Random(cast.random.random())
        self.places = [Place("exclusive", f"car-{number}") for number in range(self.exclusive)]
        self.places += [Place("shared", f"fleet-{number}") for number in range(self.shared)]
        stories = [
            Story(place, place.name if place.kind == "exclusive" else f"{place.name}-{number}")
            for place in self.places
            for number in range(1 if place.kind == "exclusive" else self.each)
        ]
        visits = itertools.count()
        self.consumers = [
            Consumer(story, cast.places.any, Random(random.random()), lambda: next(visits)) for story in stories
        ]
        self.making = [
            Producer(number, cast.places.any, self.places, Random(random.random()), self.rate)
            for number in range(self.producers)
        ]
        self.said: list[ecq_judge.Publication] = []  #: by probers
        self.progress: dict[Story, tuple[int, int]] = {}  #: visits with a rewind so far, and progress, at rest
        self.stored: dict[str, dict[Place, Mapping[str, tuple[int, int]]]] = {}  #: by member, at the end
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers: Counter[str] = Counter()

    @property
    def publications(self) -> list[ecq_judge.Publication]:
        return [one for producer in self.making for one in producer.publications] + self.said

    async def enter(self) -> None:
        for consumer in self.consumers:
            consumer.open.set()
        runs = [one.run() for one in self.making] + [one.run() for one in self.consumers]
        self._tasks = [asyncio.create_task(run) for run in runs]

    def acts(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        return [("producers", self._move(producer)) for producer in self.making]

    async def _move(self, producer: Producer) -> None:
        while not self.cast.stopping.is_set():
            await self.cast.pause(self.cast.random.uniform(0.5, 6.0))
            producer.move()
        producer.ending.set()

    def rest(self) -> None:
        for producer in self.making:
            producer.flowing.clear()
        for consumer in self.consumers:
            consumer.steady.set()

    def go_on(self) -> None:
        for producer in self.making:
            producer.flowing.set()
        if not self.cast.stopping.is_set():
            for consumer in self.consumers:
                consumer.steady.clear()

    async def left(self) -> list[str]:
        """Who lacks the newest acknowledged value of a key."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        newest: dict[Place, dict[str, ecq_judge.Publication]] = defaultdict(dict)
        for one in self.publications:
            if one.is_acknowledged and not self._is_excused(one):
                newest[one.place][one.key] = one
        found = []
        for consumer in self.consumers:
            story = consumer.story
            got: dict[str, int] = {}
            for delivery in story.deliveries:
                got[delivery.key] = max(got.get(delivery.key, -1), delivery.value)
            lacks = [one for key, one in newest[story.place].items() if got.get(key, -1) < one.value]
            if lacks and not self._has_forgotten(story.place, story):
                words = f"{story.client} has not got {len(lacks)} values of {story.place}, first {lacks[0].key}"
                found.append(f"{words}: {lacks[0].value} (answered {lacks[0].answered:.3f})")
        return found

    async def speak(self, prober: StrictClient, patience: float) -> str:
        place = self.places[-1]
        self._numbers[prober.name] += 1
        number = self._numbers[prober.name]
        said = ecq_judge.Publication(place, prober.name, number, sent=self.ledger.clock())
        topic = f"{FORMS[place.kind][0]}/w/{place.name}/{prober.name}"
        message = Publication(f"{prober.name} {number}", prober.name, topic, number, 1)
        consumers = [consumer for consumer in self.consumers if consumer.story.place == place]
        missing = "anybody: it was not taken"
        try:
            async with asyncio.timeout(patience):
                self.said.append(said)
                outgoing = await prober.publish(message, b"%d" % number)
                await outgoing.done.wait()
                said.reason, said.answered = message.refused, self.ledger.clock()
                while missing := ", ".join(  # noqa: ASYNC110 - no event for it
                    one.story.client for one in consumers if not _has(one.story, said)
                ):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return missing
        return ""

    async def at_rest(self) -> None:
        """Rule 3: progress."""
        shown = await asyncio.gather(*map(self._shown, self.consumers))
        for consumer, progress in zip(self.consumers, shown, strict=True):
            if progress is None:
                continue
            story = consumer.story
            rewinds = sum(visit.rewound for visit in story.visits)
            before = self.progress.get(story, (rewinds, 0))
            if before[0] == rewinds and progress < before[1] and not self._has_forgotten(story.place, story):
                self.ledger.odd("progress", f"{story.client}: {progress}, and {before[1]} after an earlier fault")
            self.progress[story] = rewinds, progress

    async def _shown(self, consumer: Consumer) -> int | None:
        story, members = consumer.story, list(self.cast.trio.members.values())
        try:
            found = await self._ask(
                self.cast.random.choice(members), f"compacted/{story.place.kind}/{story.place.name}"
            )
        except httpx.HTTPError:
            return None  # what every member must do is looked at elsewhere
        views = found["consuming"] if found is not None and not found.get("unanswered") else []
        return next((int(view["progress"]) for view in views if view["client"] == story.client), None)

    async def end(self) -> None:
        for member in self.cast.trio.members.values():
            try:
                self.stored[member.name] = {place: await self._messages(member, place) for place in self.places}
            except httpx.HTTPError as error:
                self.ledger.odd("no look", f"{member.name} does not tell of compacted queues: {error!r}")

    async def _messages(self, member: Member, place: Place) -> Mapping[str, tuple[int, int]]:
        found = await self._ask(member, f"compacted/{place.kind}/{place.name}/messages", limit=LIMIT)
        return {
            message["properties"]["key"]: (message["position"], int(message["payload"].split()[0]))
            for message in (found or {"data": []})["data"]
        }

    async def exit(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def judge(self, verdict: Verdict) -> None:
        for place in self.places:
            stories = [consumer.story for consumer in self.consumers if consumer.story.place == place]
            publications = [one for one in self.publications if one.place == place and not self._is_excused(one)]
            known = {(one.place, one.key, one.value) for one in self.publications}
            for member, stored in self.stored.items():
                found = ecq_judge.judge(publications, stories, {place: stored[place]}, known)
                forgot = any(self._has_forgotten(place, story) for story in stories)
                for kind, each in found.by_kind.items():
                    for words in each if kind != "repeated" else ():
                        verdict.blame(kind, f"{words} (as {member} tells)", excused=forgot and kind not in STRICT)
        for consumer in self.consumers:
            for words in consumer.odd:
                verdict.add("odd", words)

    def _homes(self, place: Place) -> list[str]:
        return [CLIENT + place.name if place.kind == "exclusive" else f"scq:{place.name}"]

    def _is_excused(self, one: ecq_judge.Publication) -> bool:
        return any(self.ledger.excuses(home, one.sent, one.answered) for home in self._homes(one.place))

    def _has_forgotten(self, place: Place, story: Story) -> bool:
        homes = (*self._homes(place), CLIENT + story.client)
        return any(self.ledger.excuses(home, 0.0, self.ledger.clock()) for home in homes)

    def told(self) -> str:
        acknowledged = sum(one.is_acknowledged for one in self.publications)
        delivered = sum(len(list(consumer.story.deliveries)) for consumer in self.consumers)
        return f"compacted: {acknowledged} values acknowledged, {delivered} delivered"


class Balancer(Proxy):
    """One address for all members: a connection leads to any that serves."""

    def __init__(self, members: Iterable[Member], random: Random) -> None:
        super().__init__("")
        self._members = list(members)
        self._random = random

    async def connect(self, carried: Carried) -> None:
        serving = [member for member in self._members if member.serves]
        if serving:
            await self.carry(carried, str(self._random.choice(serving).mqtt))
        else:
            carried.abort()


class FanOut(Feature):
    """Rule 5."""

    config = fanout.CONFIG
    vehicles = 14
    rate = 15.0  #: batches per second

    def __init__(self, cast: ClusterCast) -> None:
        super().__init__(cast)
        self._random = Random(cast.random.random())
        self._balancer = Balancer(cast.trio.members.values(), self._random)
        self._lives: dict[str, Behaviour] = {}
        self._fleet: Fleet
        self._platform: Platform
        self._receipts: list[Receipt] = []
        self._counts: dict[str, dict[str, dict[State, int]]] = {}  # by member and request
        self._found: Audit | None = None

    async def enter(self) -> None:
        host, _, port = (await self._balancer.__aenter__()).address.rpartition(":")
        self._fleet = Fleet(
            FleetOptions(
                host=host,
                port=int(port),
                vehicles=self.vehicles,
                profile=fanout.LIVES,
                both_versions=True,
                seed=self._random.randrange(2**32),
                rate=0.0,
            )
        )
        self._lives = {vehicle.vin: vehicle.behaviour for vehicle in self._fleet}
        self._platform = Platform(Endpoint(host, int(port)), self._fleet.vins, self._random, self.rate)
        await self._fleet.start()

    def acts(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        return [("platform", self._publish())]

    async def _publish(self) -> None:
        """Publish until the load ends, and everything is answered."""
        publishing = [asyncio.create_task(work) for work in (self._platform.run(), self._platform.make())]
        try:
            await self.cast.stopping.wait()
            self._platform.end()
            while self._platform.open:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(TRY_AGAIN)
        finally:
            for task in publishing:
                task.cancel()
            await asyncio.gather(*publishing, return_exceptions=True)

    def rest(self) -> None:
        self._platform.resting = True
        self._fleet.behave(fanout.STEADY)

    def go_on(self) -> None:
        if not self.cast.stopping.is_set():
            self._platform.resting = False
            for vin, behaviour in self._lives.items():
                self._fleet.behave(behaviour, [vin])

    async def left(self) -> list[str]:
        for vehicle in self._fleet:
            if vehicle.state is VehicleState.ASLEEP:
                vehicle.come()
        try:
            counts = await self._counted(self._random.choice(list(self.cast.trio.members.values())))
        except httpx.HTTPError as error:
            return [f"a member does not tell of requests: {error!r}"]
        pending = {
            request: left
            for request, states in counts.items()
            if (left := sum(count for state, count in states.items() if state not in FINAL))
        }
        found: list[str] = []
        if pending and not self.ledger.lapses:  # else data of a message, or its receipt, may be forgotten
            found.append(f"{sum(pending.values())} deliveries have not ended, first of {min(pending)}")
        return found + ([f"{self._platform.open} batches have no answer"] if self._platform.open else [])

    async def _counted(self, member: Member) -> dict[str, dict[State, int]]:
        """What `fanout list` shows at a member."""
        found: dict[str, dict[State, int]] = {}
        cursor: str | None = ""
        while cursor is not None:
            page = await self._ask(member, "fanout/requests", limit=LIMIT // 2, cursor=cursor)
            assert page is not None, "no such path"
            for view in page["data"]:
                found[view["request_id"]] = {State(state): count for state, count in view["states"].items()}
            cursor = page["meta"].get("cursor")
        return found

    async def end(self) -> None:
        for member in self.cast.trio.members.values():
            try:
                self._counts[member.name] = await self._counted(member)
            except httpx.HTTPError as error:
                self.ledger.odd("no look", f"{member.name} does not tell of requests: {error!r}")
        member, after = self._random.choice(list(self.cast.trio.members.values())), 0
        while True:
            page = await self._ask(member, "streams/receipts/messages", after=after, limit=LIMIT)
            messages = page["data"] if page is not None else []
            if not messages:
                return
            self._receipts += [decode_receipt(message["payload"].encode()) for message in messages]
            after = messages[-1]["position"]

    async def exit(self) -> None:
        await self._fleet.stop(Leave.RESET)
        await self._balancer.__aexit__()

    def judge(self, verdict: Verdict) -> None:
        received = {vehicle.vin: vehicle.received for vehicle in self._fleet}
        forgot = bool(self.ledger.lapses)
        for name, counts in self._counts.items():
            found = audit(self._platform.batches, received, self._receipts, counts, fanout.ACK_TIMEOUT)
            for kind, each in found.by_kind.items():
                if self._found is not None and kind != "wrong count":
                    continue  # as the first one
                for words in each:
                    verdict.blame(f"fan-out: {kind}", f"{words} (as {name} tells)", excused=forgot and kind != TWO)
            self._found = self._found or found
        for words in self._platform.odd:
            verdict.blame("fan-out: odd", words, excused=forgot)

    def told(self) -> str:
        found = self._found
        if found is None:
            return ""
        ended = ", ".join(f"{count} {state}" for state, count in found.ended.items())
        return (
            f"fan-out: {found.batches} batches acknowledged, {found.published_again} sent again, {found.deliveries} "
            f"deliveries: {ended}; {found.received} received, {found.duplicated} again"
        )


#: By the word of the option.
FEATURES: Mapping[str, type[Feature]] = {
    "queues": Queues,
    "streams": Streams,
    "compacted": Compacted,
    "fanout": FanOut,
}


def config_of(names: Iterable[str]) -> str:
    """What members need in their configuration."""
    return "".join(FEATURES[name].config for name in names)


def _has(story: Story, said: ecq_judge.Publication) -> bool:
    return any(
        one.key == said.key and one.value == said.value for visit in story.visits[-3:] for one in visit.deliveries
    )


def report(features: Iterable[Feature]) -> Iterator[str]:
    """Their lines."""
    for feature in features:
        if words := feature.told():
            yield words
