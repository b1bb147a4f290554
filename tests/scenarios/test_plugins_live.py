"""Plugins come and go over the control port while clients are connected and messages flow."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.local import LocalNode
from tests.support.operator import Operator
from tests.support.wire import PATIENCE, PUBACK, PUBLISH, Client, Packet, ack_packet, publish_packet

NOT_AUTHORIZED = 0x87

HEAD = """
import asyncio
from dataclasses import replace
from typing import ClassVar
import msgspec
from motorcade.extension.hooks import STOP, Continue, Handled, Stop
from motorcade.extension.plugin import Plugin, hook
"""

#: Writes a line for each call of each hook it has.
WITNESS = (
    HEAD
    + """
class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str

class Witness(Plugin):
    Config: ClassVar = Config

    def note(self, *words):
        with open(self.config.file, "a") as file:
            file.write(" ".join(str(word) for word in words) + "\\n")

    @hook("client.connect")
    def c1(self, client, reason): self.note("client.connect", client.client_id)
    @hook("client.authenticate")
    def c2(self, client, credentials, decision): self.note("client.authenticate", client.client_id, client.username)
    @hook("client.connected")
    def c3(self, client): self.note("client.connected", client.client_id)
    @hook("client.authorize")
    def c4(self, client, action, topic, decision): self.note("client.authorize", client.client_id, action, topic)
    @hook("client.subscribe")
    def c5(self, client, properties, asked): self.note("client.subscribe", client.client_id, *(s.filter for s in asked))
    @hook("client.unsubscribe")
    def c6(self, client, properties, filters): self.note("client.unsubscribe", client.client_id, *filters)
    @hook("client.disconnected")
    def c7(self, client, reason): self.note("client.disconnected", client.client_id)
    @hook("session.created")
    def s1(self, client): self.note("session.created", client.client_id)
    @hook("session.subscribed")
    def s2(self, client, wanted, is_new): self.note("session.subscribed", client.client_id, wanted.filter, is_new)
    @hook("session.unsubscribed")
    def s3(self, client, filter): self.note("session.unsubscribed", client.client_id, filter)
    @hook("session.disconnected")
    def s4(self, client): self.note("session.disconnected", client.client_id)
    @hook("session.terminated")
    def s5(self, client, why): self.note("session.terminated", client.client_id, why)
    @hook("message.publish")
    def m1(self, client, message):
        self.note("message.publish", client.client_id, message.topic, message.payload.decode())
    @hook("message.delivered")
    def m2(self, client, message): self.note("message.delivered", client.client_id, message.topic)
    @hook("message.acked")
    def m3(self, client, message, reason): self.note("message.acked", client.client_id, message.topic)
    @hook("delivery.completed")
    def m4(self, client, message, reason): self.note("delivery.completed", client.client_id, message.topic)
    @hook("message.dropped")
    def m5(self, client, message, why): self.note("message.dropped", client and client.client_id, message.topic, why)
"""
)


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


class Api(Operator):
    """The control port, as far as plugins are concerned."""

    def load(self, name: str, text: str, **config: Any) -> None:
        super().load(name, text if text.startswith(HEAD) else HEAD + text, **config)


@pytest.fixture
def api(node: LocalNode) -> Iterator[Api]:
    """What a test loads is unloaded at its end."""
    with Api(node) as running:
        before = set(running.plugins())
        yield running
        for name in set(running.plugins()) - before:
            running.unload(name)


@pytest.fixture
def connect(node: LocalNode) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:

        def connected(client_id: str, version: int = 5, **options: Any) -> Client:
            client = stack.enter_context(Client(node, version=version))
            assert 0 == client.connect(client_id, **options).reason
            return client

        yield connected


Connect = Callable[..., Client]


# --- messages flow on ---------------------------------------------------------------------------------------------


class Stream(threading.Thread):
    """Publishes numbers with QoS 1 until told to stop.

    It keeps to 50 unacknowledged messages, and to 500 that the listener has not read: its queue must not overflow.
    """

    def __init__(self, client: Client, listener: Listener) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.listener = listener
        self.stopping = threading.Event()
        self.sent = 0
        self.unacknowledged: deque[int] = deque()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                if self.sent - len(self.listener.payloads) < 500:
                    self._send()
                else:
                    self.stopping.wait(0.001)
            while self.unacknowledged:
                self._acknowledged()
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.error = error

    def _send(self) -> None:
        number = self.sent % 65535 + 1
        self.client.send(
            publish_packet("stream/x", b"%d" % self.sent, version=self.client.version, qos=1, packet_id=number)
        )
        self.sent += 1
        self.unacknowledged.append(number)
        if len(self.unacknowledged) > 50:
            self._acknowledged()

    def _acknowledged(self) -> None:
        answer = self.client.expect(PUBACK)
        assert self.unacknowledged.popleft() == answer.packet_id, "acknowledgements in the order of the messages"

    def goes_on(self, how: str) -> None:
        """Wait for some more messages."""
        at = self.sent
        wait_until(lambda: self.sent > at + 50 or not self.is_alive(), f"messages {how}")

    def finish(self) -> int:
        self.stopping.set()
        self.join(PATIENCE)
        assert self.error is None, self.error
        assert not self.is_alive()
        return self.sent


class Listener(threading.Thread):
    """Takes and acknowledges messages until it has the one with this payload."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.payloads: list[bytes] = []
        self.repeated = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.payloads or self.payloads[-1] != b"end":
                packet = self.client.expect(PUBLISH)
                self.payloads.append(packet.payload)
                self.repeated += packet.dup
                if packet.packet_id is not None:
                    self.client.send(ack_packet(PUBACK, packet.packet_id, version=self.client.version))
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.error = error


OBSERVER = """
class Observer(Plugin):
    @hook("message.publish")
    def publish(self, client, message): self.context.counters["publish"] += 1
    @hook("message.delivered")
    def delivered(self, client, message): self.context.counters["delivered"] += 1
    @hook("message.acked")
    def acked(self, client, message, reason): self.context.counters["acked"] += 1
    @hook("delivery.completed")
    def completed(self, client, message, reason): self.context.counters["completed"] += 1
"""
WAITER = """
class Waiter(Plugin):
    @hook("message.publish", topics=["stream/#"])
    async def publish(self, client, message):
        self.context.counters["publish"] += 1
        await asyncio.sleep(0)
        return Continue(message)
"""
GUARD = """
class Guard(Plugin):
    @hook("client.authorize")
    async def authorize(self, client, action, topic, decision):
        self.context.counters["publish"] += 1
        await asyncio.sleep(0)
"""


@pytest.mark.parametrize("text", [OBSERVER, WAITER, GUARD], ids=["observer", "waiter", "guard"])
def test_a_stream_goes_on_while_plugins_come_and_go(api: Api, connect: Connect, text: str) -> None:
    """Nothing is lost, nothing comes twice, everything in order, each acknowledged once."""
    watch = connect("watch", 4)
    watch.subscribe("stream/#", 1)
    listener = Listener(watch)
    stream = Stream(connect("car", 5), listener)
    listener.start()
    stream.start()
    for _ in range(5):
        stream.goes_on("without the plugin")
        api.load("coming", text)
        wait_until(lambda: api.plugins()["coming"]["counters"].get("publish", 0) > 0, "the plugin to see messages")
        stream.goes_on("with the plugin")
        api.unload("coming")
    sent = stream.finish()
    stream.client.publish("stream/end", b"end", 1)
    listener.join(PATIENCE)
    assert listener.error is None, listener.error
    assert [b"%d" % number for number in range(sent)] + [b"end"] == listener.payloads
    assert 0 == listener.repeated


def test_an_observer_sees_every_message_while_it_is_loaded(api: Api, connect: Connect) -> None:
    """Of clients that were there before, too, and none when it is gone."""
    car, watch = connect("car"), connect("watch")
    watch.subscribe("t", 1)
    car.publish("t", b"before", 1)
    watch.receive()
    watch.expect_nothing()
    api.load("observer", OBSERVER)
    for _ in range(20):
        car.publish("t", b"seen", 1)
        watch.receive()
    watch.expect_nothing()
    assert {"publish": 20, "delivered": 20, "acked": 20, "completed": 20} == api.plugins()["observer"]["counters"]


# --- what hooks see -----------------------------------------------------------------------------------------------


def test_hooks_see_what_happens_in_its_order(api: Api, connect: Connect, node: LocalNode) -> None:
    record = api.folder / "record"
    api.load("witness", WITNESS, file=str(record))
    with Client(node) as car:
        assert 0 == car.connect("car", username="driver").reason
        car.subscribe("t/#", 1)
        car.publish("t/1", b"one", 1)
        car.receive()
        car.publish("nobody", b"", 0)
        car.unsubscribe("t/#")
        car.disconnect()
    wait_until(lambda: "session.terminated" in record.read_text(), "the end of the session")
    wait_until(lambda: "client.disconnected" in record.read_text(), "the end of the client")
    seen = record.read_text().splitlines()
    expected = [
        "client.connect car",
        "client.authenticate car driver",
        "session.created car",
        "client.connected car",
        "client.subscribe car t/#",
        "client.authorize car subscribe t/#",
        "session.subscribed car t/# True",
        "client.authorize car publish t/1",
        "message.publish car t/1 one",
        "message.delivered car t/1",
        "message.acked car t/1",
        "delivery.completed car t/1",
        "client.authorize car publish nobody",
        "message.publish car nobody ",
        "message.dropped None nobody no_subscribers",
        "client.unsubscribe car t/#",
        "session.unsubscribed car t/#",
    ]
    assert expected == seen[: len(expected)]
    ends = {"session.disconnected car", "session.terminated car disconnected", "client.disconnected car"}
    assert ends == set(seen[len(expected) :])


# --- plugins that fail --------------------------------------------------------------------------------------------


def test_a_plugin_that_hangs_holds_up_its_own_client_only(api: Api, connect: Connect) -> None:
    """The client it works for waits; all others are served; after its time-out the message goes on unchanged."""
    api.load(
        "hanging",
        """
class Hanging(Plugin):
    async def start(self): self.released = asyncio.Event()

    @hook("message.publish", topics=["hang/until-released"], timeout=60)
    async def hold(self, client, message): await self.released.wait()

    @hook("message.publish", topics=["release"])
    def release(self, client, message): self.released.set()

    @hook("message.publish", topics=["hang/for-ever"], timeout=0.2)
    async def hang(self, client, message): await asyncio.Event().wait()
""",
    )
    watch, held, free = connect("watch"), connect("held"), connect("free")
    watch.subscribe("#", 1)
    held.send(publish_packet("hang/until-released", b"held", qos=1, packet_id=1))
    held.send(publish_packet("t", b"behind", qos=1, packet_id=2))
    for number in range(5):
        free.publish("t", b"%d" % number, 1)
        assert b"%d" % number == watch.receive().payload
    free.publish("release", b"release", 1)
    assert {b"release", b"held"} == {watch.receive().payload for _ in range(2)}
    assert b"behind" == watch.receive().payload
    assert [1, 2] == [held.expect(PUBACK).packet_id for _ in range(2)]
    held.publish("hang/for-ever", b"late", 1)
    assert b"late" == watch.receive().payload
    assert 1 in [hook["errors"] for hook in api.plugins()["hanging"]["hooks"]]


def test_a_plugin_unloaded_while_a_client_waits_for_it(api: Api, connect: Connect) -> None:
    """The client's message goes on as if the plugin had never been there."""
    api.load(
        "leaving",
        """
class Leaving(Plugin):
    async def start(self): self.work = self.context.spawn(asyncio.Event().wait(), "work")

    @hook("message.publish", topics=["t"], timeout=60)
    async def hold(self, client, message):
        self.context.counters["waiting"] += 1
        await self.work
""",
    )
    watch, car = connect("watch"), connect("car")
    watch.subscribe("t", 1)
    car.send(publish_packet("t", b"held", qos=1, packet_id=1))
    wait_until(lambda: api.plugins()["leaving"]["counters"].get("waiting") == 1, "the client to wait")
    api.unload("leaving")
    assert b"held" == watch.receive().payload
    assert 1 == car.expect(PUBACK).packet_id
    car.publish("t", b"next", 1)
    assert b"next" == watch.receive().payload


# --- rewriting under access rules ---------------------------------------------------------------------------------

REWRITER = """
class Rewriter(Plugin):
    @hook("message.publish", topics=["in/#"])
    def rewrite(self, client, message):
        return Continue(replace(message, topic=message.payload.decode()))
"""


def test_a_rewritten_topic_passes_the_access_rules(tmp_path: Path) -> None:
    """Whatever a plugin makes of a topic, the client must be allowed to publish to it."""
    rules = tmp_path / "acl.conf"
    rules.write_text('{allow, all, subscribe, ["#"]}.\n{allow, all, publish, ["in/#", "out/${clientid}/#"]}.\n')
    config = f'[plugins.access]\nanonymous = "allow"\nacl_file = "{rules}"\n'
    with LocalNode(config) as node, Api(node) as api, Client(node) as watch, Client(node) as car:
        api.load("rewriter", REWRITER)
        watch.connect("watch")
        car.connect("car")
        watch.subscribe("#", 1)

        def published(topic: str, payload: bytes) -> int | None:
            answer: Packet | None = car.publish(topic, payload, 1)
            assert answer is not None
            return answer.reason

        assert 0 == published("in/1", b"out/car/x")
        assert "out/car/x" == watch.receive().topic
        assert NOT_AUTHORIZED == published("in/1", b"out/bus/x")
        assert NOT_AUTHORIZED == published("in/1", b"elsewhere")
        watch.expect_nothing()
        api.unload("rewriter")
        assert 0 == published("in/1", b"as it is")
        assert "in/1" == watch.receive().topic


AUTHORIZER = """
class Rules(Plugin):
    @hook("client.authorize")
    def authorize(self, client, action, topic, so_far):
        return Stop(False) if topic.startswith("secret/") else None
"""


def test_rules_that_are_loaded_hold_for_those_who_are_connected(api: Api, connect: Callable[..., Client]) -> None:
    """A subscription that new rules forbid is taken away, without waiting for its client to come again."""
    spy, friend = connect("spy"), connect("friend")
    spy.subscribe([("secret/x", 1), ("open/x", 1)])
    api.load("rules", AUTHORIZER)
    spy.expect_nothing()
    api.unload("rules")
    friend.publish("secret/x", b"no longer", 1)
    friend.publish("open/x", b"still", 1)
    assert b"still" == spy.receive().payload


def test_a_topic_that_a_plugin_spoils_is_not_the_clients_fault(api: Api, connect: Callable[..., Client]) -> None:
    api.load(
        "spoiler",
        """
from dataclasses import replace

class Spoiler(Plugin):
    @hook("message.publish", topics=["spoil/#"])
    def spoil(self, client, message):
        return Continue(replace(message, topic="a/#"))
""",
    )
    car = connect("car")
    answer = car.publish("spoil/x", b"", 1)
    assert answer is not None and 0x83 == answer.reason
    car.expect_nothing()


def test_clients_of_before_may_retain_though_nobody_keeps_it_now() -> None:
    """Unloading the retained plugin does not cost those their connection who were told that messages are retained."""
    with LocalNode() as node, Client(node) as car, node.web() as web:
        car.connect("car")
        assert 200 == web.delete("/plugins/retained").status_code
        car.publish("t", b"", 1, retain=True)
        car.expect_nothing()


def test_a_plugin_that_does_not_stop_well_is_unloaded_and_told(api: Api) -> None:
    api.load(
        "clingy",
        """
class Clingy(Plugin):
    async def stop(self):
        raise RuntimeError("cannot let go")
""",
    )
    answer = api.web.delete("plugins/clingy")
    assert 400 <= answer.status_code < 500 and "cannot let go" in answer.json()["message"]
    assert "clingy" not in api.plugins()
