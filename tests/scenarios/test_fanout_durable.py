"""The fan-out outlives the node: nothing that a platform was told to be accepted is lost, and nothing ends twice.

Each test ends the node in the middle of its work, by SIGTERM or SIGKILL, and goes on with a new process on the same
store; or the store itself is in trouble. S26, S36, A8 of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import lasting, unique
from tests.support.fanout import (
    INGRESS,
    PATIENCE,
    Platform,
    Watch,
    as_bytes,
    batch,
    figures,
    fresh,
    get,
    nothing_else,
    one,
    request_name,
    stored_receipts,
    taken,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import SESSION_EXPIRY, acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.redis import RedisCluster, RedisServer
from tests.support.stores import Home, embedded, on_every_store, shared
from tests.support.wire import DISCONNECT, PUBACK, Client, Closed, Packet, prop, publish_packet

FINAL = {"acked", "replaced", "failed", "expired", "cancelled"}
QUOTA_EXCEEDED = 0x97

#: What is refused is sent again soon; silence is not noticed, however busy the machine is.
PATIENT = "[plugins.fanout]\nretry_delay = 0.05\nretry_delay_max = 0.05\nmax_attempts = 4\nack_timeout = 300\n"


def receipts(home: Home) -> list[dict[str, Any]]:
    with Operator(home.node) as operator:
        return stored_receipts(operator)


def status(home: Home, request: str) -> dict[str, Any]:
    with Operator(home.node) as operator:
        return operator.show("fanout/requests", request)


def everything(home: Home) -> list[dict[str, Any]]:
    with Operator(home.node) as operator:
        return list(operator.web.get("fanout/requests", params={"limit": 1000}).json()["data"])


def decide(home: Home, request: str, verb: str) -> None:
    with Operator(home.node) as operator:
        answer = operator.web.post(f"fanout/requests/{request}/{verb}")
        assert 200 == answer.status_code, answer.text


def counts_are_right(home: Home, found: Sequence[dict[str, Any]]) -> None:
    """What is counted is what the stream says: each delivery in the last state it has come to."""
    by_request: dict[str, dict[str, str]] = {}
    for receipt in found:
        states = by_request.setdefault(receipt["request_id"], {})
        if states.get(receipt["delivery_id"]) not in FINAL:
            states[receipt["delivery_id"]] = receipt["state"]
    expected = {request: dict(Counter(states.values())) for request, states in by_request.items()}
    assert expected == {view["request_id"]: view["states"] for view in everything(home)}


def each_ends_once(home: Home, *, repeated: bool) -> dict[str, str]:
    """The final state of each delivery. Where batches of the store are not atomic a receipt may be there twice."""
    wait_until(lambda: all(view["pending"] == 0 for view in everything(home)), "all is over")
    ends: dict[str, str] = {}
    accepted: Counter[str] = Counter()
    found = receipts(home)
    for receipt in found:
        name, state = receipt["delivery_id"], receipt["state"]
        accepted[name] += state == "accepted"
        if state in FINAL:
            assert name not in ends or (repeated and ends[name] == state), f"{name}: {ends[name]}, then {state}"
            ends[name] = state
    assert {1} == set(accepted.values())
    assert accepted.keys() == ends.keys()
    counts_are_right(home, found)
    return ends


@pytest.mark.parametrize(
    ("home", "end"), [("rocksdb", "SIGKILL"), ("redis", "SIGTERM"), ("cluster", "SIGKILL")], indirect=["home"]
)
def test_a_campaign_goes_on_where_it_was(home: Home, end: str) -> None:
    """What is in flight, waits, was decided, has expired, was refused, was acknowledged, was sent with an id."""
    home.start(PATIENT)
    away, busy, done, prior, refusing = fresh(5)
    with Platform(home) as platform, Watch(home) as watch:
        platform.store("firmware", b"\x00\xff" * 5000)
        client, other, third = vehicle(home, busy), vehicle(home, done), vehicle(home, refusing)
        platform.send([done, busy, refusing], "first", "first")
        in_flight = get(client, ack=False)
        assert [b"first", b"first"] == [in_flight.payload, get(other).payload]
        for _ in range(2):
            acknowledge(third, get(third, ack=False), reason=0x80)
        for number in range(3):
            platform.trigger([away, busy], f"task_{number}", "firmware")
        for request, verb in (("paused", "pause"), ("cancelled", "cancel")):
            platform.send([away], request, request)
            decide(home, request, verb)
        for name, priority in (("low", 0), ("high", 7)):
            platform.send([prior], name, name, priority=priority)
        platform.send([away], "short", "short", expires_in=0.01)
        platform.send([away], "long", "long", expires_in=3600)
        assert taken(2) == platform.send([done, away], "named", "named", mode="append", batch_id="b1")
        assert b"named" == get(other).payload
        watch.gather(lambda: watch.states(done).count("acked") == 2, "what was acknowledged is over")
        watch.gather(lambda: watch.number("cancelled") == 1 and watch.number("retried") >= 2, "and the others")
    home.again(end)
    counts_are_right(home, receipts(home))
    with Platform(home) as platform:
        assert taken(2) | {"repeated": 1} == platform.send([done, away], "named", "named", mode="append", batch_id="b1")
        assert "other data" in platform.refused(INGRESS, batch([done, away], "named", "other", batch_id="b1"))
        back = lasting(home, busy)
        again = get(back)
        assert b"first" == again.payload
        late = vehicle(home, away)
        for number in range(3):
            for vin, car in ((busy, back), (away, late)):
                assert (topic_of(vin, f"task_{number}"), b"\x00\xff" * 5000) == told(car)
        assert [b"long", b"named"] == [get(late).payload, get(late).payload]
        decide(home, "paused", "resume")
        assert b"paused" == get(late).payload
        first = vehicle(home, prior)
        assert [b"high", b"low"] == [get(first).payload, get(first).payload]
        left = 4 - attempts_of(home, refusing)
        third = lasting(home, refusing)
        for _ in range(left):
            acknowledge(third, get(third, ack=False), reason=0x80)
        assert taken(1) == platform.trigger([away], "task_3", "firmware"), "the data is still there"
        assert topic_of(away, "task_3") == get(late).topic
        for vin, car in ((busy, back), (away, late), (done, lasting(home, done)), (refusing, third)):
            nothing_else(platform, car, vin)
    ends = Counter(each_ends_once(home, repeated=home.kind != "rocksdb").values())
    assert {"acked": 19, "cancelled": 1, "expired": 1, "failed": 1} == dict(ends)
    (failed,) = {(r["attempt"], r["reason"]) for r in receipts(home) if r["state"] == "failed"}
    assert (4, "refused_0x80") == failed


def attempts_of(home: Home, vin: str) -> int:
    """How often the node knows to have sent the message of a vehicle; at least the attempts that were told."""
    with Operator(home.node) as operator:
        view = operator.show("vehicles", vin)
    attempts = int((view["in_flight"] or view["waiting"][0])["attempts"])
    assert 2 <= attempts <= 3, view
    return attempts


@on_every_store
def test_killed_while_batches_come(home: Home) -> None:
    """Each batch that was acknowledged is there for all its vehicles; sent again, nothing comes twice.

    Every other batch has an id and appends: of these all are sent again, of the others those without an answer.
    """
    home.start()
    vins, names = fresh(30), [f"task_{number:03d}" for number in range(80)]
    accepted = publish_until_killed(home, vins, names, after=20)
    assert 20 <= len(accepted) < len(names)
    home.start()
    views = {view["request_id"]: view for view in everything(home)}
    for name in accepted:
        assert (30, {"accepted": 30}) == (views[name]["targets"], views[name]["states"]), name
    with Platform(home) as platform:
        for name in names:
            if name not in accepted or options(name):
                found = platform.send(vins, name, name, **options(name))
                assert 30 == found["accepted"]
                assert name not in accepted or found["repeated"]
        for vin in vins[::10]:
            client = vehicle(home, vin)
            assert Counter(names) == Counter(get(client).payload.decode() for _ in names)
            nothing_else(platform, client, vin)
    counts_are_right(home, receipts(home))


def options(name: str) -> dict[str, str]:
    return {"mode": "append", "batch_id": "b1"} if int(name[-3:]) % 2 else {}


def publish_until_killed(home: Home, vins: Sequence[str], names: Sequence[str], after: int) -> set[str]:
    """Batches as fast as they go, ten at a time, until the node dies; those that were acknowledged."""
    with Platform(home) as platform:
        client, accepted, waiting = platform.client, set[str](), dict[int, str]()
        killer = threading.Thread(target=home.node.kill)
        with suppress(Closed):
            for name in names:
                packet_id = client.next_id()
                waiting[packet_id] = name
                body = as_bytes(batch(vins, name, name, **options(name)))
                client.send(publish_packet(INGRESS, body, qos=1, packet_id=packet_id))
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
    """Ten vehicles, ten messages each, the node dies twice: all arrive, in order; what comes again was in flight."""
    home.start(PATIENT)
    vins, names = fresh(10), [f"task_{number}" for number in range(10)]
    chance = random.Random(5)
    seen: dict[str, list[str]] = {vin: [] for vin in vins}
    with Platform(home) as platform:
        for name in names:
            platform.send(vins, name, name)
    for most in (3, 6):
        clients = {vin: vehicle(home, vin) for vin in vins}
        for vin, client in clients.items():
            for _ in range(chance.randint(0, most)):
                seen[vin].append(get(client).payload.decode())
        home.crash()
    with Platform(home) as platform:
        for vin in vins:
            client = vehicle(home, vin)
            while not seen[vin] or seen[vin][-1] != names[-1]:
                seen[vin].append(get(client).payload.decode())
            nothing_else(platform, client, vin)
    for vin in vins:
        assert names == list(dict.fromkeys(seen[vin])), "lost, or out of order"
        again = len(seen[vin]) - len(names)
        assert again <= 2, f"{seen[vin]}: at most what was on its way when the node died"
    assert {"acked": 110} == dict(Counter(each_ends_once(home, repeated=home.kind != "rocksdb").values()))


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


@shared
def test_a_store_that_does_not_answer(home: Home, lone_redis: Any) -> None:
    """`fanout why` says so; batches are not acknowledged before they are stored, and everything goes on by itself.

    Batches that wait are bounded (S9, G14): one more is refused at once, with the option that says how many.
    """
    home.may_complain = True
    home.start("[plugins.fanout]\nmax_queued = 1\n")
    vin, request = one(), request_name()
    with Platform(home) as platform, Operator(home.node) as operator:
        platform.send([vin], request, "before")
        lone_redis.pause()
        try:
            packet_id = platform.client.next_id()
            body = as_bytes(batch([vin], "task_later", "later"))
            platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=packet_id))
            with pytest.raises(TimeoutError):
                platform.client.recv(0.5)
            with Platform(home) as other:
                assert "max_queued" in other.refused(INGRESS, batch([vin], request), QUOTA_EXCEEDED)
            wait_until(
                lambda: operator.web.get(f"vehicles/{vin}/why").json().get("reason") == "store_unavailable",
                "it says so",
            )
        finally:
            lone_redis.resume()
        told_so = settled(platform.client)
        wait_until(lambda: is_let_in(home), "the node lets clients in again")
        client = vehicle(home, vin)
        assert b"before" == get(client).payload
        if told_so is None:  # nobody knows whether it was stored: the platform publishes it again
            with Platform(home) as again:  # there is room when the node knows what has become of the first one
                body = as_bytes(batch([vin], "task_later", "later"))
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
                body = as_bytes(batch(vins, request, data))
                platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=platform.client.next_id()))
            with suppress(TimeoutError):  # if the server has got the first already, it is answered when it is back
                assert settled(platform.client, 10) is None
        finally:
            lone_redis.resume()
    wait_until(lambda: is_let_in(home), "the node lets clients in again")
    with Platform(home) as platform:
        platform.send(vins, request, "fourth")  # as a platform should
    for vin in vins:
        client = vehicle(home, vin)
        while get(client).payload != b"fourth":
            pass
    wait_until(lambda: not status(home, request)["pending"], "everything has ended")
    ends = each_ends_once(home, repeated=False)
    assert ends[f"{vins[0]}.1"] == "acked"
    assert {"acked", "replaced"} == set(ends.values())


def is_let_in(home: Home) -> bool:
    with Client(home) as client:
        return client.connect(unique("probe"), clean=False, properties=prop(SESSION_EXPIRY, 3600)).reason == 0


def settled(client: Client, patience: float = 30) -> Packet | None:
    """The answer to what is under way, or None if the connection was ended instead."""
    try:
        found = client.recv(patience)
    except Closed:
        return None
    return found if found.type == PUBACK else None


TRIES = 12  #: in two of three of them the intent of the batch is on a server that has room


@pytest.mark.parametrize("home", ["cluster"], indirect=True)
def test_a_server_of_a_cluster_is_full(home: Home, cluster_redis: RedisCluster) -> None:
    """A batch that was stored for some of its vehicles only goes to the others when it is sent again."""
    home.may_complain = True
    home.start()
    vins, request, names = fresh(60), request_name(), list[str]()
    with Operator(home.node) as operator, Platform(home) as other:
        while not operator.counters("fanout").get("batches_completed"):
            assert len(names) < TRIES, "no batch was stored in part"
            names.append(f"b{len(names)}")
            body = as_bytes(batch(vins, request, names[-1], mode="append", batch_id=names[-1]))
            publish_in_vain(home, body, cluster_redis.masters()[len(names) % 3])
            with Platform(home) as platform:
                assert len(vins) == figures(platform.publish(INGRESS, body))["accepted"]
                assert taken(len(vins)) | {"repeated": 1} == figures(platform.publish(INGRESS, body))
        assert len(vins) * len(names) == operator.show("fanout/requests", request)["targets"]
        for vin in vins[::9]:
            car = vehicle(home, vin)
            assert names == [get(car).payload.decode() for _ in names]
            nothing_else(other, car, vin)


def publish_in_vain(home: Home, body: bytes, server: RedisServer) -> None:
    """A batch that comes while a server has no room: it is refused, or its publisher is disconnected."""
    with Platform(home) as platform:
        server.command("CONFIG", "SET", "maxmemory", "1")
        try:
            platform.client.send(publish_packet(INGRESS, body, qos=1, packet_id=platform.client.next_id()))
            with suppress(Closed):
                answer = platform.client.recv(PATIENCE)
                assert answer.type == DISCONNECT or QUOTA_EXCEEDED == answer.reason, answer
        finally:
            server.command("CONFIG", "SET", "maxmemory", "0")
