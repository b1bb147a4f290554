"""The fan-out outlives the node: nothing that a platform was told to be accepted is lost, and nothing ends twice.

Each test ends the node in the middle of its work, by SIGTERM or SIGKILL, and goes on with a new process on the same
store. S26, S36, A8 of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import lasting, unique
from tests.support.fanout import (
    INGRESS,
    Platform,
    Watch,
    batch,
    fresh,
    get,
    octets,
    one,
    quiet,
    request_name,
    taken,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import SESSION_EXPIRY, acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.stores import Home, embedded, shared
from tests.support.wire import PUBACK, PUBLISH, Client, Closed, Packet, prop, publish_packet

each_end_once = pytest.mark.parametrize(
    ("home", "end"), [("rocksdb", "SIGKILL"), ("redis", "SIGTERM")], indirect=["home"]
)

FINAL = {"acked", "replaced", "failed", "expired", "cancelled"}
PAGE = 1000
QUOTA_EXCEEDED = 0x97


def receipts(home: Home) -> list[dict[str, Any]]:
    """All receipts in the stream, in order."""
    found: list[dict[str, Any]] = []
    after = 0
    with Operator(home.node) as desk:
        while page := desk.read("streams", "receipts", after=after, limit=PAGE):
            found += [json.loads(message["payload"]) for message in page]
            after = page[-1]["position"]
    return found


def status(home: Home, request: str) -> dict[str, Any]:
    with Operator(home.node) as desk:
        return desk.show("fanout/requests", request)


def decide(home: Home, request: str, verb: str) -> None:
    with Operator(home.node) as desk:
        answer = desk.web.post(f"fanout/requests/{request}/{verb}")
        assert 200 == answer.status_code, answer.text


def counts_are_right(home: Home) -> None:
    """What is counted is what the stream says: each delivery in the last state it has come to."""
    by_request: dict[str, dict[str, str]] = {}
    for receipt in receipts(home):
        states = by_request.setdefault(receipt["request_id"], {})
        if states.get(receipt["delivery_id"]) not in FINAL:
            states[receipt["delivery_id"]] = receipt["state"]
    expected = {request: dict(Counter(states.values())) for request, states in by_request.items()}
    assert expected == {view["request_id"]: view["states"] for view in everything(home)}


def each_ends_once(home: Home, *, repeated: bool) -> dict[str, str]:
    """The final state of each delivery. Where batches of the store are not atomic a receipt may be there twice."""
    ends: dict[str, str] = {}
    accepted: Counter[str] = Counter()
    for receipt in receipts(home):
        name, state = receipt["delivery_id"], receipt["state"]
        accepted[name] += state == "accepted"
        if state in FINAL:
            assert name not in ends or (repeated and ends[name] == state), f"{name}: {ends[name]}, then {state}"
            ends[name] = state
    assert {1} == set(accepted.values())
    assert accepted.keys() == ends.keys()
    return ends


@pytest.mark.parametrize(
    ("home", "end"),
    [("rocksdb", "SIGTERM"), ("rocksdb", "SIGKILL"), ("redis", "SIGKILL"), ("cluster", "SIGTERM")],
    indirect=["home"],
)
def test_everything_is_there_again(home: Home, end: str) -> None:
    """What waits, in order, by priority; what is in flight; what is paused and cancelled; data; counts."""
    home.start()
    away, busy, done, prior = fresh(4)
    with Platform(home) as platform, Watch(home) as watch:
        platform.store("firmware", b"\x00\xff" * 5000)
        client, other = vehicle(home, busy), vehicle(home, done)
        platform.send([done, busy], "first", "first")
        assert [b"first", b"first"] == [get(client, ack=False).payload, get(other).payload]
        for number in range(5):
            platform.trigger([away, busy], f"task_{number}", "firmware")
        platform.send([away], "paused", "paused")
        decide(home, "paused", "pause")
        platform.send([away], "cancelled", "cancelled")
        decide(home, "cancelled", "cancel")
        for name, priority in (("low", 0), ("high", 7)):
            platform.send([prior], name, name, priority=priority)
        platform.send([away], "short", "short", expires_in=0.01)
        watch.gather(lambda: {"acked", "cancelled"} <= {r["state"] for r in watch.seen}, "both receipts")
    home.again(end)
    counts_are_right(home)
    with Platform(home) as platform:
        back = lasting(home, busy)
        assert b"first" == get(back).payload
        late = vehicle(home, away)
        for number in range(5):
            for vin, car in ((busy, back), (away, late)):
                assert (topic_of(vin, f"task_{number}"), b"\x00\xff" * 5000) == told(car)
        quiet(back)
        quiet(late)
        quiet(lasting(home, done))
        decide(home, "paused", "resume")
        assert b"paused" == get(late).payload
        first = vehicle(home, prior)
        assert [b"high", b"low"] == [get(first).payload, get(first).payload]
        assert taken(1) == platform.trigger([away], "task_5", "firmware"), "the data is still there"
        assert topic_of(away, "task_5") == get(late).topic
    wait_until(lambda: all(r["pending"] == 0 for r in everything(home)), "all is over")
    counts_are_right(home)
    ends = each_ends_once(home, repeated=home.kind != "rocksdb")
    assert {"acked": 16, "cancelled": 1, "expired": 1} == dict(Counter(ends.values()))


def everything(home: Home) -> list[dict[str, Any]]:
    with Operator(home.node) as desk:
        return list(desk.web.get("fanout/requests", params={"limit": 1000}).json()["data"])


def test_killed_while_batches_come(home: Home) -> None:
    """Each batch that was acknowledged is there for all its vehicles; published again nothing comes twice."""
    home.start()
    vins = fresh(20)
    names = [f"task_{number:03d}" for number in range(100)]
    accepted = publish_until_killed(home, vins, names, after=20)
    assert 20 <= len(accepted) < len(names)
    home.start()
    views = {view["request_id"]: view for view in everything(home)}
    for name in accepted:
        assert (20, {"accepted": 20}) == (views[name]["targets"], views[name]["states"]), name
    with Platform(home) as platform:
        for name in names:
            if name not in accepted:
                platform.send(vins, name, name)
    for vin in vins[::5]:
        client = vehicle(home, vin)
        assert Counter(name.encode() for name in names) == Counter(get(client).payload for _ in names)
        quiet(client, 0.05)
    counts_are_right(home)


def publish_until_killed(home: Home, vins: list[str], names: Iterable[str], after: int) -> set[str]:
    """Batches as fast as they go, ten at a time, until the node dies; those that were acknowledged."""
    with Platform(home) as platform:
        client, accepted, waiting = platform.client, set[str](), dict[int, str]()
        killer = threading.Thread(target=home.node.kill)
        with suppress(Closed):
            for name in names:
                packet_id = client.next_id()
                waiting[packet_id] = name
                client.send(publish_packet(INGRESS, octets(batch(vins, name, name)), qos=1, packet_id=packet_id))
                while len(waiting) >= 10:
                    answer = client.expect(PUBACK)
                    assert 0 == answer.reason
                    accepted.add(waiting.pop(answer.packet_id or 0))
                if len(accepted) >= after and not killer.ident:
                    killer.start()
            killer.join()
    home.kill()
    return accepted


def test_killed_while_vehicles_acknowledge(home: Home) -> None:
    """Twenty vehicles, ten messages each, the node dies twice: all arrive, in order; what comes again was in flight."""
    home.start()
    vins, names = fresh(20), [f"task_{number}" for number in range(10)]
    chance = random.Random(5)
    seen: dict[str, list[str]] = {vin: [] for vin in vins}
    with Platform(home) as platform:
        for name in names:
            platform.send(vins, name, name)
    for most in (3, 6):
        clients = {vin: vehicle(home, vin) for vin in vins}
        stops = {vin: chance.randint(0, most) for vin in vins}
        for vin, client in clients.items():
            for _ in range(stops[vin]):
                seen[vin].append(get(client).payload.decode())
        home.crash()
    for vin in vins:
        client = vehicle(home, vin)
        while not seen[vin] or seen[vin][-1] != names[-1]:
            seen[vin].append(get(client).payload.decode())
        quiet(client, 0.02)
    wait_until(lambda: all(r["pending"] == 0 for r in everything(home)), "all is over")
    for vin in vins:
        assert names == list(dict.fromkeys(seen[vin])), "lost, or out of order"
        again = len(seen[vin]) - len(names)
        assert again <= 2, f"{seen[vin]}: at most what was on its way when the node died"
    ends = each_ends_once(home, repeated=home.kind != "rocksdb")
    assert {"acked": 200} == dict(Counter(ends.values()))
    counts_are_right(home)


def test_what_has_ended_does_not_come_again(home: Home) -> None:
    """Whoever has seen the receipt may rely on it, also if the node dies at that moment."""
    home.start()
    vin, request = one(), request_name()
    with Watch(home, request) as watch, Platform(home) as platform:
        client = vehicle(home, vin)
        platform.send([vin], request)
        get(client)
        watch.until(vin, "accepted", "sent", "acked")
        home.crash()
    back = lasting(home, vin)
    quiet(back)
    assert {"acked": 1} == status(home, request)["states"]
    counts_are_right(home)


@each_end_once
def test_attempts_are_counted_over_restarts(home: Home, end: str) -> None:
    """A vehicle that refuses does not get unlimited attempts because the node is started anew."""
    home.start("[plugins.fanout]\nretry_delay = 0.1\nretry_delay_max = 0.1\nmax_attempts = 4\n")
    vin, request = one(), request_name()
    with Platform(home) as platform, Watch(home, request) as watch:
        client = vehicle(home, vin)
        platform.send([vin], request)
        acknowledge(client, get(client, ack=False), reason=0x80)
        acknowledge(client, get(client, ack=False), reason=0x80)
        watch.gather(lambda: watch.number("retried") == 2, "two attempts in vain")
        client.disconnect()
    home.again(end)
    with Watch(home, request) as watch:
        client = lasting(home, vin)

        def refused_for_good() -> bool:
            with suppress(TimeoutError):
                message = client.recv(0.2)
                assert PUBLISH == message.type
                acknowledge(client, message, reason=0x80)
            return bool(status(home, request)["states"] == {"failed": 1})

        wait_until(refused_for_good, "it has failed")
        attempts = [receipt["attempt"] for receipt in receipts(home) if receipt["state"] == "sent"]
        assert [1, 2] == attempts[:2] and 4 == attempts[-1] and len(attempts) <= 5, attempts
    assert (4, "refused_0x80") == next((r["attempt"], r["reason"]) for r in receipts(home) if r["state"] == "failed")


@each_end_once
def test_a_message_in_flight_is_one_message(home: Home, end: str) -> None:
    """The vehicle is there again before and after; it gets the same one until it acknowledges, and then the next."""
    home.start()
    vin, names = one(), ["task_0", "task_1", "task_2"]
    with Platform(home) as platform:
        for name in names:
            platform.send([vin], name, name)
    client = vehicle(home, vin)
    for _ in range(2):
        assert b"task_0" == get(client, ack=False).payload
        quiet(client)
        home.again(end)
        client = lasting(home, vin)
    for name in names:
        message = get(client, ack=False)
        assert name.encode() == message.payload
        quiet(client, 0.05)
        acknowledge(client, message)
    quiet(client)
    wait_until(lambda: all(r["pending"] == 0 for r in everything(home)), "all is over")
    assert {"acked": 3} == dict(Counter(each_ends_once(home, repeated=home.kind != "rocksdb").values()))


@embedded
def test_whoever_is_let_in_is_served(home: Home) -> None:
    """S11, S46: a node takes connections when all it has stored is at hand: nobody is sent away, nothing is missed."""
    home.start()
    vins, request = fresh(2000), request_name()
    with Platform(home) as platform:
        platform.send(vins, request, "before")
    home.kill()
    node = home.process()
    starting = threading.Thread(target=node.start)
    starting.start()
    try:
        wait_until(lambda: accepts(node), "the node listens")
        early = vehicle(node, vins[0])
        with Platform(node) as platform:
            assert taken(1, replaced=1) == platform.send(vins[1:2], request, "after")
        assert b"before" == get(early).payload
        assert b"after" == get(vehicle(node, vins[1])).payload
    finally:
        starting.join()
        node.kill()


def accepts(node: NodeProcess) -> bool:
    with suppress(OSError), socket.create_connection((node.host, node.port), 1):
        return True
    return False


@embedded
def test_one_payload_is_stored_once(home: Home) -> None:
    """The seed, compaction: 200 vehicles, a hundred requests, one payload of 64 KiB; by either form, under any id."""
    home.start()
    vins, data = fresh(200), random.Random(1).randbytes(64 * 1024)
    with Platform(home) as platform:
        platform.store("a", data)
        platform.store("b", data)
        for number in range(50):
            assert taken(200) == platform.trigger(vins, f"task_{number}", "ab"[number % 2])
        for number in range(50, 100):
            assert taken(200) == platform.send(vins, f"task_{number}", data)
    home.restart()
    stored = sum(path.stat().st_size for path in home.data.rglob("*") if path.is_file())
    assert stored < 100 * len(data), f"{stored} bytes for 20 000 messages"
    client = vehicle(home, vins[-1])
    for number in range(100):
        assert (topic_of(vins[-1], f"task_{number}"), data) == told(client)


@embedded
def test_expiry_over_a_restart(home: Home) -> None:
    """Time goes on while the node does not run."""
    home.start("[plugins.fanout]\ngc_interval = 0.2\n")
    vin, request = one(), request_name()
    with Platform(home) as platform:
        platform.send([vin], request, expires_in=0.2)
        platform.send([vin], "task_stays", "task_stays", expires_in=3600)
    home.crash()
    wait_until(lambda: status(home, request)["states"] == {"expired": 1}, "it has expired")
    client = vehicle(home, vin)
    assert b"task_stays" == get(client).payload
    quiet(client)


@shared
def test_a_store_that_does_not_answer(home: Home, lone_redis: Any) -> None:
    """`fanout why` says so; batches are not acknowledged before they are stored, and everything goes on by itself.

    Batches that wait are bounded (S9, G14): one more is refused at once, with the option that says how many.
    """
    home.may_complain = True
    home.start("[plugins.fanout]\nmax_queued = 1\n")
    vin, request = one(), request_name()
    with Platform(home) as platform, Operator(home.node) as desk:
        platform.send([vin], request, "before")
        lone_redis.pause()
        try:
            packet_id = platform.client.next_id()
            body = octets(batch([vin], "task_later", "later"))
            platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=packet_id))
            with pytest.raises(TimeoutError):
                platform.client.recv(0.5)
            with Platform(home) as other:
                assert "max_queued" in other.refused(INGRESS, batch([vin], request), QUOTA_EXCEEDED)
            wait_until(
                lambda: desk.web.get(f"vehicles/{vin}/why").json().get("reason") == "store_unavailable", "it says so"
            )
        finally:
            lone_redis.resume()
        told_so = settled(platform.client)
        wait_until(lambda: is_let_in(home), "the node lets clients in again")
        client = vehicle(home, vin)
        assert b"before" == get(client).payload
        if told_so is None:  # nobody knows whether it was stored: the platform publishes it again
            with Platform(home) as again:  # there is room when the node knows what has become of the first one
                body = octets(batch([vin], "task_later", "later"))
                wait_until(lambda: not again.publish(INGRESS, body).reason, "it is taken")
        assert b"later" == get(client).payload


@shared
def test_a_store_that_does_not_say_what_it_has_done(home: Home, lone_redis: Any) -> None:
    """Receipts of such batches, and of what vehicles do meanwhile, are completed while the node goes on: each once."""
    home.may_complain = True
    home.url += f"{'&' if '?' in home.url else '?'}patience=1"
    home.start()
    vins, request = fresh(3), request_name()
    there = vehicle(home, vins[0])
    with Platform(home) as platform:
        platform.send(vins, request, "first")
        first = get(there, ack=False)
        lone_redis.pause()
        try:
            acknowledge(there, first)  # its receipt has to wait
            for data in ("second", "third"):
                body = octets(batch(vins, request, data))
                platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=platform.client.next_id()))
            assert settled(platform.client) is None
        finally:
            lone_redis.resume()
    wait_until(lambda: is_let_in(home), "the node lets clients in again")
    with Platform(home) as platform:
        platform.send(vins, request, "fourth")  # as a platform should
    for vin in vins:
        client = vehicle(home, vin)
        while get(client).payload != b"fourth":
            pass
        quiet(client)
    wait_until(lambda: not status(home, request)["pending"], "everything has ended")
    ends = each_ends_once(home, repeated=False)
    assert ends[f"{vins[0]}.1"] == "acked"
    assert {"acked", "replaced"} == set(ends.values())
    counts_are_right(home)


def is_let_in(home: Home) -> bool:
    with Client(home) as client:
        return client.connect(unique("probe"), clean=False, properties=prop(SESSION_EXPIRY, 3600)).reason == 0


def settled(client: Client) -> Packet | None:
    """The answer to what is under way, or None if the connection was ended instead."""
    try:
        found = client.recv(30)
    except Closed:
        return None
    return found if found.type == PUBACK else None
