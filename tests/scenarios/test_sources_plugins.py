"""Sources that a user has written: small plugins, loaded by path into one running node.

Each does what `motorcade.extension.sources` allows, or what it forbids; the tests look at what clients get, at what
the plugin has counted, and at the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import (
    ack_all,
    connected,
    fill,
    lasting,
    numbered,
    numbers,
    payloads,
    receive_maximum,
    settled,
    subscribe,
    take,
    take_until,
    unique,
    unsubscribe,
)
from tests.support.flows import MESSAGE_EXPIRY, SUBSCRIPTION_ID, both_versions
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client, prop

WINDOW = 32

HEAD = """
from typing import ClassVar

import msgspec

from motorcade.core.message import Message
from motorcade.extension.plugin import Plugin, hook
from motorcade.extension.sources import RECREATE, ROOM, Destroy, Given, Kind, Source, Why
"""

#: `rows/{name}/{count}`: messages 0 … count-1 on topic `{name}`, as many at a time as there is room for. Goes on after
#: a disconnect; counts what happens to it.
ROWS = (
    HEAD
    + """
class Rows(Source):
    def __init__(self, feed, counters):
        super().__init__(feed)
        self.counters = counters
        counters["made"] += 1
        self.given = 0

    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        _, self.topic, count = subscription.filter.split("/")
        self.count = int(count)
        self.counters["subscribe_" + why] += 1
        self.given = self.feed.kept or 0
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        return self.more(desired)

    def delivered(self, given, ack):
        self.counters["delivered"] += 1
        self.counters["refused"] += ack.refused
        self.counters["dropped_" + (ack.dropped or "no")] += 1
        return self.more(ack.desired)

    def more(self, desired):
        self.counters["most_desired"] = max(self.counters["most_desired"], desired)
        end = min(self.given + desired, self.count)
        rows = [
            Given(Message(self.topic, b"%d" % number, qos=1), self.filter, number) for number in range(self.given, end)
        ]
        self.given = end
        return rows

    def unsubscribe(self, filter_, why):
        self.counters["unsubscribe_" + why] += 1
        self.feed.kept = self.given - len(self.feed.unsent)

    def terminate(self):
        self.counters["terminated"] += 1


class RowsPlugin(Plugin):
    async def start(self):
        make = lambda feed: Rows(feed, self.context.counters)
        self.context.add_source(Kind(self.context.name, make, prefix="rows/"))
"""
)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "rocksdb://", http=True) as running:
        yield running
    for sign in ("connection_failed", "Exception in callback", "never retrieved", "never awaited"):
        assert sign not in running.log, running.log[max(0, running.log.index(sign) - 1000) :][:4000]


@pytest.fixture
def desk(node: NodeProcess) -> Iterator[Operator]:
    """The control port; plugins of the test are gone after it."""
    with Operator(node) as operator:
        before = set(operator.plugins())
        yield operator
        for name in set(operator.plugins()) - before:
            operator.unload(name)


@pytest.fixture
def plugin(desk: Operator) -> Callable[..., str]:
    """`plugin(text)`: its name when it is loaded."""

    def load(text: str, **config: Any) -> str:
        name = unique("source")
        desk.load(name, text, **config)
        return name

    return load


Load = Callable[..., str]


def counter(desk: Operator, plugin: str, event: str) -> int:
    return desk.counters(plugin).get(event, 0)


# --- a source for one topic ---------------------------------------------------------------------------------------


@both_versions
def test_a_source_is_asked_for_what_there_is_room_for(
    node: NodeProcess, desk: Operator, plugin: Load, version: int
) -> None:
    """All its messages come in order, and it is never asked for more than one client may hold."""
    name = plugin(ROWS)
    with connected(node, "", version) as client:
        subscribe(client, "rows/t/1000")
        assert list(range(1000)) == numbers(take(client, 1000))
        wait_until(lambda: counter(desk, name, "delivered") == 1000, "the source hears of every acknowledgement")
    assert 0 < counter(desk, name, "most_desired") < 1000
    wait_until(lambda: counter(desk, name, "terminated") == 1, "its end")
    counts = desk.counters(name)
    assert (1, 1, 1) == (counts["made"], counts["subscribe_new"], counts["unsubscribe_ended"])


def test_identifier_and_qos_are_those_of_the_subscription(node: NodeProcess, plugin: Load) -> None:
    plugin(ROWS)
    with connected(node) as client:
        subscribe(client, "rows/t/3", 1, prop(SUBSCRIPTION_ID, 77))
        subscribe(client, "rows/u/3", 0)
        seen = {(m.topic, m.qos, *m.prop_all(SUBSCRIPTION_ID)) for m in take(client, 6)}
    assert {("t", 1, 77), ("u", 0)} == seen


def test_one_instance_per_filter(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """Each has its own way, they take turns, and one ends without the others."""
    name = plugin(ROWS)
    with connected(node, "", 5, receive_maximum(4)) as client:
        for topic in "abc":
            subscribe(client, f"rows/{topic}/100")
        seen = take(client, 60)
        held = unsubscribe(client, "rows/b/100")
        ack_all(client, held)
        seen += held
        for topic in "abc":
            of_topic = numbers(message for message in seen if message.topic == topic)
            assert list(range(len(of_topic))) == of_topic
            assert 15 <= len(of_topic) <= 25, "the three take turns"
        rest = take(client, 200 - sum(message.topic != "b" for message in seen))
        assert {"a", "c"} == {message.topic for message in rest}
    assert 3 == counter(desk, name, "made")
    wait_until(lambda: counter(desk, name, "terminated") == 3, "all are ended")


def test_a_refusal_reaches_the_source(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """An error code in PUBACK is told, and does not hold up what follows."""
    name = plugin(ROWS)
    with connected(node) as client:
        subscribe(client, "rows/t/40")
        ack_all(client, take(client, WINDOW, ack=False), reason=0x97)
        take(client, 40 - WINDOW)
        wait_until(lambda: counter(desk, name, "delivered") == 40, "all answers")
        assert WINDOW == counter(desk, name, "refused")


@both_versions
def test_a_source_goes_on_after_a_disconnect(node: NodeProcess, desk: Operator, plugin: Load, version: int) -> None:
    """What was in flight is sent again by the session, the source goes on with what it had not sent."""
    name = plugin(ROWS)
    client_id = unique("away")
    with lasting(node, client_id, version) as client:
        subscribe(client, "rows/t/200")
        take(client, 50)
        held = take(client, WINDOW, ack=False)
        client.disconnect()
    with lasting(node, client_id, version) as client:
        again = take(client, WINDOW)
        assert (numbers(held), {True}) == (numbers(again), {message.dup for message in again})
        assert list(range(50 + WINDOW, 200)) == numbers(take(client, 200 - 50 - WINDOW))
        wait_until(lambda: counter(desk, name, "delivered") == 200, "acknowledgements reach the new instance")
        counts = desk.counters(name)
        assert (2, 1, 1) == (counts["made"], counts["subscribe_resumed"], counts["unsubscribe_disconnected"])


def test_a_source_that_is_loaded_later_serves_those_who_are_there(node: NodeProcess, desk: Operator) -> None:
    """Subscriptions that nobody wanted come to life; after unloading they sleep again."""
    name = unique("source")
    with connected(node) as client:
        subscribe(client, "rows/t/100")
        assert [] == settled(client)
        desk.load(name, ROWS)
        assert list(range(50)) == numbers(take(client, 50))
        held = take(client, WINDOW, ack=False)
        desk.unload(name)
        ack_all(client, held)
        with connected(node) as publisher:
            publisher.publish("rows/t/100", b"live", 1)
        assert [] == take_until(client, b"live"), "nothing of a source that is gone"


def test_subscribing_again_does_not_start_it_again(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """Without `renew` the instance that is there goes on."""
    name = plugin(ROWS)
    with connected(node) as client:
        subscribe(client, "rows/t/100")
        first = take(client, 50)
        subscribe(client, "rows/t/100")
        assert list(range(100)) == numbers(first + take(client, 50))
        assert 1 == counter(desk, name, "made")


def rows(*changes: tuple[str, str]) -> str:
    """The plugin `ROWS` with something changed."""
    text = ROWS
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def kind(options: str) -> tuple[str, str]:
    return 'prefix="rows/")', f'prefix="rows/", {options})'


def test_a_source_may_want_fewer_in_flight_than_the_window_allows(
    node: NodeProcess, desk: Operator, plugin: Load
) -> None:
    """`max_unacked` messages of it, and room for the others."""
    plugin(rows(kind("max_unacked=2")))
    with connected(node) as client, connected(node) as publisher:
        subscribe(client, "rows/t/50")
        subscribe(client, "live")
        held = take(client, 2, ack=False)
        publisher.publish("live", b"live", 1)
        assert [] == take_until(client, b"live")
        seen = numbers(held)
        while len(seen) < 50:
            ack_all(client, held)
            held = take(client, 2, ack=False)
            assert [] == settled(client)
            seen += numbers(held)
    assert list(range(50)) == seen


def test_a_source_may_start_again_when_it_is_subscribed_again(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """With `renew` the old instance ends and a new one begins; nothing that the old one had given comes after that."""
    name = plugin(rows(kind("renew=True"), ("self.given = self.feed.kept or 0", "self.given = 0")))
    with connected(node) as client:
        subscribe(client, "rows/t/100")
        held = take(client, WINDOW, ack=False)
        subscribe(client, "rows/t/100")
        ack_all(client, held)
        assert list(range(100)) == numbers(take(client, 100))
        assert (2, 1) == (counter(desk, name, "made"), counter(desk, name, "terminated"))


@both_versions
def test_a_source_may_take_back_what_a_client_held_when_it_left(
    node: NodeProcess, desk: Operator, plugin: Load, version: int
) -> None:
    """With `release` the session forgets it: what comes again is given again by the source, as a new message."""
    plugin(
        rows(
            kind("release=True"),
            ("self.feed.kept = self.given - len(self.feed.unsent)", "self.feed.kept = self.counters['delivered']"),
        )
    )
    name = unique("c")
    with lasting(node, name, version) as client:
        subscribe(client, "rows/t/100")
        take(client, 20)
        take(client, WINDOW, ack=False)
        settled(client)
        client.disconnect()
    with lasting(node, name, version) as client:
        messages = take(client, 80)
        assert (list(range(20, 100)), {False}) == (numbers(messages), {message.dup for message in messages})


SENDING = """
    def sending(self, given):
        if given.tag % 3 == 0:
            return None
        return Message(self.topic, b"-" + given.message.payload, qos=1) if given.tag % 3 == 1 else given.message

    def more(self, desired):
"""


def test_a_source_has_the_last_word_before_a_message_is_sent(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """It may send a newer one in its place, or none."""
    name = plugin(rows(("\n    def more(self, desired):\n", SENDING)))
    with connected(node) as client:
        subscribe(client, "rows/t/300")
        seen = numbers(take(client, 200))
        assert [-number if number % 3 == 1 else number for number in range(300) if number % 3] == seen
        wait_until(lambda: counter(desk, name, "dropped_withdrawn") == 100, "it hears of those that were withdrawn")


# --- one source for all topics, and generic messages --------------------------------------------------------------

MULTI = (
    HEAD
    + """
class Board(Source):
    def __init__(self, feed, counters):
        super().__init__(feed)
        self.counters = counters
        counters["made"] += 1

    def subscribe(self, subscription, why):
        self.feed.send(subscription.filter)
        return True

    def delivered(self, given, ack):
        return Destroy([given.filter]) if given.filter == "board/once" else None

    def info(self, what, desired):
        return [Given(Message(what, b"%d" % len(self.feed.subscriptions), qos=1), what)]

    def unsubscribe(self, filter_, why):
        self.counters["unsubscribe"] += 1

    def terminate(self):
        self.counters["terminated"] += 1

class Boards(Plugin):
    async def start(self):
        make = lambda feed: Board(feed, self.context.counters)
        self.context.add_source(Kind(self.context.name, make, prefix="board/", multi_topic=True))
"""
)


def test_one_instance_for_all_filters_of_a_client(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """It knows all of them, hears when one goes, and ends with the last."""
    name = plugin(MULTI)
    with connected(node) as client, connected(node) as other:
        for number in range(1, 4):
            subscribe(client, f"board/{number}")
            assert [b"%d" % number] == payloads(take(client, 1))
        subscribe(other, "board/1")
        assert [b"1"] == payloads(take(other, 1))
        assert 2 == counter(desk, name, "made")
        for number in range(1, 4):
            assert 0 == counter(desk, name, "terminated")
            unsubscribe(client, f"board/{number}")
        wait_until(lambda: counter(desk, name, "terminated") == 1, "the end with the last filter")
        assert 3 == counter(desk, name, "unsubscribe")
        subscribe(client, "board/9")
        assert [b"1"] == payloads(take(client, 1))
        assert 3 == counter(desk, name, "made")


def test_a_source_for_many_topics_may_be_done_with_one(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """The others stay with it; when the last is done, it ends."""
    name = plugin(MULTI)
    with connected(node) as client:
        subscribe(client, "board/1")
        subscribe(client, "board/once")
        take(client, 2)
        settled(client)
        subscribe(client, "board/2")
        assert [b"2"] == payloads(take(client, 1)), "one of three is gone"
        assert 0 == counter(desk, name, "terminated")
        unsubscribe(client, "board/1")
        unsubscribe(client, "board/2")
        wait_until(lambda: counter(desk, name, "terminated") == 1, "the end")


GENERIC = (
    HEAD
    + """
class Inbox(Source):
    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        return True

    def info(self, what, desired):
        return [Given(Message("inbox", what, qos=1), self.filter)] if isinstance(what, bytes) and desired else None

class Post(Plugin):
    async def start(self):
        self.context.add_source(Kind(self.context.name, Inbox, prefix="inbox", generic=True))

    @hook("message.publish", topics=["post/+"])
    def publish(self, client, message):
        found = self.context.hub.tell(message.topic.split("/")[1], message.payload)
        self.context.counters["told" if found else "nobody"] += 1
"""
)


def test_whoever_knows_a_client_can_tell_its_source(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """`hub.tell` reaches the generic source of that client, and says when there is none."""
    name = plugin(GENERIC)
    anna, berta = unique("anna"), unique("berta")
    with connected(node, anna) as first, connected(node, berta) as second, connected(node) as publisher:
        subscribe(first, "inbox")
        subscribe(second, "inbox")
        for word in (b"one", b"two"):
            publisher.publish(f"post/{anna}", word, 1)
        publisher.publish(f"post/{berta}", b"three", 1)
        publisher.publish("post/nobody", b"lost", 1)
        assert [b"one", b"two"] == payloads(take(first, 2))
        assert [b"three"] == payloads(take(second, 1))
        unsubscribe(first, "inbox")
        publisher.publish(f"post/{anna}", b"late", 1)
    assert {"told": 3, "nobody": 2} == desk.counters(name)


# --- sources that misbehave ---------------------------------------------------------------------------------------

FAULTY = (
    HEAD
    + """
class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    where: str

class Faulty(Source):
    where = ""

    def __init__(self, feed):
        super().__init__(feed)
        if self.where == "make": raise RuntimeError("make")

    def subscribe(self, subscription, why):
        if self.where == "subscribe": raise RuntimeError("subscribe")
        self.filter = subscription.filter
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        if self.where == "info": raise RuntimeError("info")
        return [Given(Message("faulty", b"x", qos=1), self.filter)] if what == "begin" else None

    def delivered(self, given, ack):
        if self.where == "delivered": raise RuntimeError("delivered")

    def sending(self, given):
        if self.where == "sending": raise RuntimeError("sending")
        return given.message

    def unsubscribe(self, filter_, why):
        if self.where == "unsubscribe": raise RuntimeError("unsubscribe")

    def terminate(self):
        if self.where == "terminate": raise RuntimeError("terminate")

class FaultyPlugin(Plugin):
    Config: ClassVar = Config

    async def start(self):
        kind = type("F", (Faulty,), {"where": self.config.where})
        wants = None
        if self.config.where == "wants":
            def wants(client, subscription, why): raise RuntimeError("wants")
        self.context.add_source(Kind(self.context.name, kind, prefix="faulty", wants=wants))
"""
)


@both_versions
@pytest.mark.parametrize(
    "where", ["wants", "make", "subscribe", "info", "delivered", "sending", "unsubscribe", "terminate"]
)
def test_a_source_that_raises_hurts_only_itself(
    node: NodeProcess, desk: Operator, plugin: Load, where: str, version: int
) -> None:
    """SUBACK says yes, other sources and live messages of the same client flow, the failure is counted."""
    faulty = plugin(FAULTY, where=where)
    plugin(ROWS)
    with connected(node, "", version) as client, connected(node) as publisher:
        subscribe(client, "faulty")
        subscribe(client, "rows/t/100")
        subscribe(client, "live")
        rows: list[int] = []
        while len(rows) < 100:
            rows += numbers(message for message in take(client, 1) if message.topic == "t")
        assert list(range(100)) == rows
        unsubscribe(client, "faulty")
        publisher.publish("live", b"live", 1)
        assert {"faulty"} >= {message.topic for message in take_until(client, b"live")}
    wait_until(lambda: desk.counted(faulty, "failed") >= 1, "the failure is counted in /metrics")


TORMENTED = (
    HEAD
    + """
class Tormented(Source):
    counters = None

    def __init__(self, feed):
        super().__init__(feed)
        self.counters["made"] += 1

    def subscribe(self, subscription, why):
        self.counters[why] += 1
        self.feed.send("break")
        return True

    def info(self, what, desired):
        return RECREATE

    def unsubscribe(self, filter_, why):
        self.counters["unsubscribed"] += 1

    def terminate(self):
        self.counters["terminated"] += 1

class TormentedPlugin(Plugin):
    async def start(self):
        kind = type("T", (Tormented,), {"counters": self.context.counters})
        self.context.add_source(Kind(self.context.name, kind, prefix="tormented"))
"""
)


def test_a_source_that_always_wants_to_be_made_anew(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """It is, after a pause each time, and each instance before has ended: nothing leaks, and nobody is kept busy."""
    name = plugin(TORMENTED)
    plugin(ROWS)
    with connected(node) as client:
        subscribe(client, "tormented")
        wait_until(lambda: counter(desk, name, "made") >= 3, "made anew")
        before = counter(desk, name, "made")
        subscribe(client, "rows/t/2000")
        assert list(range(2000)) == numbers(take(client, 2000))
        counts = desk.counters(name)
        assert counts["made"] - before < 200, "it is made anew all the time, without a pause"
        assert counts["made"] - counts["terminated"] in (0, 1), "one instance at a time"
        unsubscribe(client, "tormented")
        wait_until(
            lambda: counter(desk, name, "made") == counter(desk, name, "terminated"), "no instance is left behind"
        )
        made = counter(desk, name, "made")
        subscribe(client, "rows/u/1000")
        take(client, 1000)
        assert made == counter(desk, name, "made"), "nobody makes it anew for who is not subscribed any more"
    assert desk.counted(name, "recreated") >= 2


STUMBLING = (
    HEAD
    + """
class Stumbling(Source):
    \"\"\"Gives 0 to 99, and stumbles after every seventeenth.\"\"\"

    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        self.at = self.feed.kept or 0
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        if self.at % 17 == 0 and what == "again":
            return RECREATE
        return self.more(desired)

    def delivered(self, given, ack):
        if given.tag % 17 == 16:
            self.feed.send("again")
        return None

    def more(self, desired):
        end = min(self.at + desired, (self.at // 17 + 1) * 17, 100)
        rows = [Given(Message("s", b"%d" % n, qos=1), self.filter, n) for n in range(self.at, end)]
        self.at = end
        return rows

    def unsubscribe(self, filter_, why):
        self.feed.kept = self.at - len(self.feed.unsent)

class StumblingPlugin(Plugin):
    async def start(self):
        self.context.add_source(Kind(self.context.name, Stumbling, prefix="stumbling"))
"""
)


def test_a_source_that_is_made_anew_goes_on_where_it_was(node: NodeProcess, plugin: Load) -> None:
    """What the instance before has kept is there, and nothing it had given comes twice or is lost."""
    plugin(STUMBLING)
    with connected(node) as client:
        subscribe(client, "stumbling")
        assert list(range(100)) == numbers(take(client, 100))


DONE = (
    HEAD
    + """
class Done(Source):
    counters = None

    def subscribe(self, subscription, why):
        self.counters["subscribed"] += 1
        self.filter = subscription.filter
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        return [Given(Message("done", b"all there is", qos=1), self.filter)] if what == "begin" else None

    def delivered(self, given, ack):
        self.feed.send("late")
        self.feed.send_later(0.01, "later")
        return Destroy()

    def unsubscribe(self, filter_, why):
        self.counters["unsubscribed"] += 1

    def terminate(self):
        self.counters["terminated"] += 1

class DonePlugin(Plugin):
    async def start(self):
        kind = type("D", (Done,), {"counters": self.context.counters})
        self.context.add_source(Kind(self.context.name, kind, prefix="done/", multi_topic=False))
"""
)


def test_a_source_that_is_done_goes_away(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """At once, with the connection and the subscription staying; who subscribes anew gets a new one."""
    name = plugin(DONE)
    with connected(node) as client, connected(node) as publisher:
        subscribe(client, "done/1")
        assert [b"all there is"] == payloads(take(client, 1))
        wait_until(lambda: counter(desk, name, "terminated") == 1, "the end of the source")
        publisher.publish("done/1", b"live", 1)
        assert [b"live"] == payloads(take(client, 1)), "the subscription is an ordinary one besides"
        unsubscribe(client, "done/1")
        subscribe(client, "done/1")
        assert [b"all there is"] == payloads(take(client, 1))
        wait_until(lambda: counter(desk, name, "terminated") == 2, "the end of the second")
    assert 2 == counter(desk, name, "subscribed")
    assert 0 == desk.counted(name, "failed")


CLOCK = (
    HEAD
    + """
class Clock(Source):
    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        self.ticks = 0
        self.feed.send_later(0.01, "tick")
        self.feed.send_later(0.005, "cancelled").cancel()
        return True

    def info(self, what, desired):
        if what is ROOM:
            return None
        self.feed.send_later(0.01, "tick")
        self.ticks += 1
        return [Given(Message("clock", b"%d" % self.ticks if what == "tick" else b"wrong", qos=0), self.filter)]

class ClockPlugin(Plugin):
    async def start(self):
        self.context.add_source(Kind(self.context.name, Clock, prefix="clock"))
"""
)


def test_delayed_messages_of_a_source_to_itself(node: NodeProcess, plugin: Load) -> None:
    """They come in time, can be taken back, and end with the subscription."""
    plugin(CLOCK)
    with connected(node) as client:
        subscribe(client, "clock", 0)
        assert list(range(1, 21)) == numbers(take(client, 20))
        unsubscribe(client, "clock")
        subscribe(client, "clock", 0)
        assert list(range(1, 21)) == numbers(take(client, 20)), "only the new instance ticks"


GREEDY = (
    HEAD
    + """
class Greedy(Source):
    def subscribe(self, subscription, why):
        self.filter = subscription.filter
        self.at = 0
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        start, self.at = self.at, self.at + 500
        if start >= 5000:
            return None
        if self.at < 5000:
            self.feed.send("more")
        return [Given(Message("greedy", b"%d" % n, qos=1), self.filter) for n in range(start, self.at)]

class GreedyPlugin(Plugin):
    async def start(self):
        self.context.add_source(Kind(self.context.name, Greedy, prefix="greedy"))
"""
)


def test_a_source_that_gives_more_than_it_was_asked_for(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """It is counted, the window holds, the order too, and others are served beside it."""
    name = plugin(GREEDY)
    plugin(ROWS)
    with connected(node, "", 5, receive_maximum(10)) as client:
        subscribe(client, "greedy")
        held = take(client, 10, ack=False)
        assert [] == settled(client)
        wait_until(lambda: desk.counted(name, "overshoot") > 0, "giving too much is counted")
        subscribe(client, "rows/t/50")
        ack_all(client, held)
        seen, rows = numbers(held), 0
        while rows < 50:
            message = take(client, 1)[0]
            if message.topic == "t":
                rows += 1
            else:
                seen += numbers([message])
        assert seen == sorted(set(seen)), "in order, none twice"
        assert len(seen) <= 10 + 10 * 50, "the other source waited for more than a round at a time"


EXPIRING = ROWS.replace("qos=1), self.filter, number)", "qos=1, expires_at=1.0), self.filter, number)")


def test_expired_messages_of_a_source_are_dropped_and_told(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """The source hears that they were not sent, and goes on with the next ones."""
    name = plugin(EXPIRING)
    with connected(node) as client, connected(node) as publisher:
        subscribe(client, "rows/t/100")
        wait_until(lambda: counter(desk, name, "dropped_expired") == 100, "all of them are expired")
        subscribe(client, "live")
        publisher.publish("live", b"live", 1, properties=prop(MESSAGE_EXPIRY, 60))
        assert [] == take_until(client, b"live")


def test_streams_are_not_disturbed(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """A source in the box and one of a user take turns for one client."""
    plugin(ROWS)
    stream = unique("stream")
    desk.create("streams", stream, topics=[f"{stream}/#"])
    fill(node, numbered(f"{stream}/a", 300))
    with connected(node) as client:
        subscribe(client, "rows/t/300")
        subscribe(client, f"$stream/{stream}/earliest")
        seen = take(client, 600)
    for topic in ("t", f"{stream}/a"):
        assert list(range(300)) == numbers(message for message in seen if message.topic == topic)


def test_clients_are_let_go(node: NodeProcess, desk: Operator, plugin: Load) -> None:
    """After hundreds of connections no instance is left."""
    name = plugin(ROWS)
    clients: list[Client] = []
    for number in range(300):
        client = connected(node)
        clients.append(client)
        subscribe(client, f"rows/t/{number + 1}")
        if number % 3:
            take(client, 1)
    for client in clients:
        client.abort()
    wait_until(lambda: counter(desk, name, "terminated") == 300, "all instances have ended")
    assert 300 == counter(desk, name, "made")
