"""A batch with a `batch_id` is taken once, however often it is sent: the second time it reaches nobody.

Most of these send in mode `append`: there a batch that was taken twice would reach its vehicles twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.fanout import (
    INGRESS,
    PATIENCE,
    TRIGGER,
    Platform,
    Watch,
    batch,
    figures,
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
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.redis import RedisCluster, RedisServer
from tests.support.stores import Home, on_every_store
from tests.support.wire import DISCONNECT, PUBACK, Closed, publish_packet

QUOTA_EXCEEDED = 0x97


def again(accepted: int, duplicates: int = 0, replaced: int = 0) -> dict[str, int]:
    """What a batch is answered that was taken before."""
    return taken(accepted, duplicates, replaced) | {"repeated": 1}


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--store", "memory://", http=True) as running:
        yield running


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_a_repeated_batch_is_answered_as_before_and_reaches_nobody(node: NodeProcess, mode: str) -> None:
    (there, away), request = fresh(2), request_name()
    car = vehicle(node, there)
    with Platform(node) as platform, Watch(node, request) as watch:
        platform.send([away], request, "earlier")
        ids = [there, away, there]
        replaced = 1 if mode == "replace" else 0
        assert taken(2, 1, replaced) == platform.send(ids, request, "once", mode=mode, batch_id="b1")
        assert b"once" == get(car).payload
        watch.gather(lambda: "acked" in watch.states(there), "it is acknowledged")
        for vins in (ids, [away, there, there]):  # delivered to one of them, waiting for the other
            assert again(2, 1, replaced) == platform.send(vins, request, "once", mode=mode, batch_id="b1")
        with Platform(node, 4) as old:
            assert {} == old.send(ids, request, "once", mode=mode, batch_id="b1")
        quiet(car)
        late = vehicle(node, away)
        assert ["earlier", "once"][replaced:] == [get(late).payload.decode() for _ in range(2 - replaced)]
        quiet(late)
        assert ["accepted", "sent", "acked"] == watch.states(there)


def test_an_id_belongs_to_its_request(node: NodeProcess, platform: Platform) -> None:
    vin, names = one(), [request_name(), request_name()]
    for name in names:
        assert taken(1) == platform.send([vin], name, name, batch_id="b1")
    assert taken(1) == platform.send([vin], names[0], "another", batch_id="b2", mode="append")
    car = vehicle(node, vin)
    assert [*names, "another"] == [get(car).payload.decode() for _ in range(3)]


def test_data_that_is_named_need_not_be_there_any_more(node: NodeProcess, platform: Platform) -> None:
    """The second time it is not needed; other data under the same id is not looked at."""
    vin, request = one(), request_name()
    assert "there is no data" in platform.refused(TRIGGER, trigger([vin], request, request, batch_id="b1"))
    platform.store(request, b"data")
    assert taken(1) == platform.trigger([vin], request, request, batch_id="b1"), "a refusal is not remembered"
    platform.store(request, b"other")
    assert again(1) == platform.trigger([vin], request, request, batch_id="b1")
    car = vehicle(node, vin)
    assert (topic_of(vin, request), b"data") == told(car)
    quiet(car)


def trigger(vins: Sequence[str], request: str, data_id: str, **fields: Any) -> dict[str, Any]:
    return {"ids": list(vins), "request_id": request, "data_id": data_id} | fields


def test_other_content_under_the_same_id_is_refused(node: NodeProcess, platform: Platform) -> None:
    """Other vehicles, fewer, more, other data, data in the other form; not another time or urgency."""
    (vin, other), request = fresh(2), request_name()
    platform.store("data", b"data")
    platform.send([vin], request, "data", batch_id="b1", expires_in=1000)
    for wrong in (
        batch([other], request, "data", batch_id="b1"),
        batch([vin, other], request, "data", batch_id="b1"),
        batch([vin], request, "other", batch_id="b1"),
    ):
        assert "'b1' was used in this request for other vehicles or other data" in platform.refused(INGRESS, wrong)
    platform.refused(TRIGGER, trigger([vin], request, "data", batch_id="b1"))
    assert again(1) == platform.send([vin], request, b"data", batch_id="b1", expires_in=900, priority=3)
    quiet(vehicle(node, other))
    assert b"data" == get(vehicle(node, vin)).payload


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "batch_id: the number 7 instead of a text"),
        ("", "batch_id is empty"),
        ("a/b", "batch_id: 'a/b' has '/' at character 2"),
        ("b" * 129, "batch_id: 129 characters are more than 128"),
    ],
)
def test_what_is_no_id_is_refused(platform: Platform, value: object, reason: str) -> None:
    assert platform.refused(INGRESS, batch([one()], request_name(), batch_id=value)).startswith(reason)


def test_twins_that_come_at_once(node: NodeProcess) -> None:
    """From several connections and in one write: one of them is taken, the others are told so."""
    vins, request = fresh(50), request_name()
    body = octets(batch(vins, request, mode="append", batch_id="b1"))
    platforms = [Platform(node) for _ in range(4)]
    answers = Counter[int]()
    for platform in platforms:
        ids = [platform.client.next_id() for _ in range(5)]
        platform.client.send(b"".join(publish_packet(INGRESS, body, qos=1, packet_id=id_) for id_ in ids))
    for platform in platforms:
        with platform:
            for _ in range(5):
                found = figures(platform.client.expect(PUBACK))
                assert 50 == found["accepted"]
                answers[found.get("repeated", 0)] += 1
    assert {0: 1, 1: 19} == answers
    with Operator(node) as desk:
        assert 50 == desk.show("fanout/requests", request)["targets"]
    car = vehicle(node, vins[0])
    get(car)
    quiet(car)


def test_over_http(node: NodeProcess) -> None:
    vin, request = one(), request_name()
    fields = {"ids": [vin], "data": "x", "batch_id": "b1", "mode": "append"}
    first = {"accepted": 1, "duplicates": 0, "replaced": 0, "rejected": 0, "repeated": False}
    with Operator(node) as desk, Platform(node) as platform:
        send = f"fanout/requests/{request}/send"
        assert first == desk.web.post(send, json=fields).json()
        answer = desk.web.post(send, json=fields)
        assert (202, first | {"repeated": True}) == (answer.status_code, answer.json())
        assert again(1) == platform.send([vin], request, "x", batch_id="b1"), "over either way it is the same batch"
        refusal = desk.web.post(send, json=fields | {"data": "y"})
        assert 400 == refusal.status_code and "other data" in refusal.text
        assert "repeated" not in desk.web.post(send, json={"ids": [vin], "data": "x"}).json()


def test_ids_are_bounded() -> None:
    """One more is refused and says why; those that are remembered, and batches without an id, are taken as before."""
    with NodeProcess(config="[plugins.fanout]\nmax_batch_ids = 2\n", http=True) as node, Platform(node) as platform:
        vin = one()
        for name in ("b1", "b2"):
            assert taken(1) == platform.send([vin], "task", name, mode="append", batch_id=name)
        assert "max_batch_ids" in platform.refused(INGRESS, batch([vin], "task", batch_id="b3"), QUOTA_EXCEEDED)
        with Operator(node) as desk:
            full = {"ids": [vin], "data": "x", "batch_id": "b3"}
            assert 503 == desk.web.post("fanout/requests/task/send", json=full).status_code
        assert again(1) == platform.send([vin], "task", "b1", mode="append", batch_id="b1")
        assert taken(1) == platform.send([vin], "task", "b3", mode="append")


RETENTION = "[plugins.fanout]\ndata_retention = 1.0\nmax_batch_ids = 1\ngc_interval = 0.1\n"


@on_every_store
def test_an_id_is_forgotten_with_the_retention(home: Home) -> None:
    """Then the batch is a new one, as soon as a collection has found that there is room for its id."""
    home.start(RETENTION)
    vin, request = one(), request_name()
    body = octets(batch([vin], request, mode="append", batch_id="b1"))
    with Platform(home) as platform:
        assert taken(1) == figures(platform.publish(INGRESS, body))
        assert again(1) == figures(platform.publish(INGRESS, body))

        def is_new() -> bool:
            answer = platform.publish(INGRESS, body)
            return not answer.reason and figures(answer) == taken(1)

        wait_until(is_new, "the id is forgotten")
    with Operator(home.node) as desk:
        assert 2 == desk.show("fanout/requests", request)["targets"]


@on_every_store
def test_known_after_the_node_was_killed(home: Home) -> None:
    home.start()
    (there, away), request = fresh(2), request_name()
    car = vehicle(home, there)
    with Platform(home) as platform, Watch(home, request) as watch:
        assert taken(2) == platform.send([there, away], request, "data", mode="append", batch_id="b1")
        get(car)
        watch.gather(lambda: "acked" in watch.states(there), "it is acknowledged")
    home.crash()
    with Platform(home) as platform:
        assert again(2) == platform.send([there, away], request, "data", mode="append", batch_id="b1")
        assert "other data" in platform.refused(INGRESS, batch([there, away], request, "other", batch_id="b1"))
    quiet(vehicle(home, there))
    late = vehicle(home, away)
    assert b"data" == get(late).payload
    quiet(late)


@on_every_store
def test_killed_while_batches_come_and_all_are_sent_again(home: Home) -> None:
    """Whatever was stored of them when the node died: each vehicle gets each of them once, in order."""
    home.start()
    vins, request = fresh(60), request_name()
    names = [f"b{number:03d}" for number in range(60)]
    answered = publish_until_killed(home, vins, request, names, after=15)
    assert 15 <= len(answered) < len(names)
    home.start()
    with Platform(home) as platform:
        for name in names:
            found = platform.send(vins, request, name, mode="append", batch_id=name)
            assert 60 == found["accepted"]
            assert name not in answered or found["repeated"]
    with Operator(home.node) as desk:
        assert len(vins) * len(names) == desk.show("fanout/requests", request)["targets"]
    for vin in vins[::15]:
        car = vehicle(home, vin)
        assert names == [get(car).payload.decode() for _ in names]
        quiet(car, 0.05)


def publish_until_killed(home: Home, vins: Sequence[str], request: str, names: Sequence[str], after: int) -> set[str]:
    """Batches as fast as they go, ten at a time, until the node dies; those that were acknowledged."""
    with Platform(home) as platform:
        client, accepted, waiting = platform.client, set[str](), dict[int, str]()
        killer = threading.Thread(target=home.node.kill)
        with suppress(Closed):
            for name in names:
                packet_id = client.next_id()
                waiting[packet_id] = name
                body = octets(batch(vins, request, name, mode="append", batch_id=name))
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


TRIES = 12  #: in two of three of them the intent of the batch is on a server that has room


@pytest.mark.parametrize("home", ["cluster"], indirect=True)
def test_a_server_of_a_cluster_is_full(home: Home, cluster_redis: RedisCluster) -> None:
    """A batch that was stored for some of its vehicles only goes to the others when it is sent again."""
    home.may_complain = True
    home.start()
    vins, request, names = fresh(90), request_name(), list[str]()
    with Operator(home.node) as desk:
        while not desk.counters("fanout").get("batches_completed"):
            assert len(names) < TRIES, "no batch was stored in part"
            names.append(f"b{len(names)}")
            body = octets(batch(vins, request, names[-1], mode="append", batch_id=names[-1]))
            publish_in_vain(home, body, cluster_redis.masters()[len(names) % 3])
            with Platform(home) as platform:
                assert len(vins) == figures(platform.publish(INGRESS, body))["accepted"]
                assert again(len(vins)) == figures(platform.publish(INGRESS, body))
        assert len(vins) * len(names) == desk.show("fanout/requests", request)["targets"]
    for vin in vins[::9]:
        car = vehicle(home, vin)
        assert names == [get(car).payload.decode() for _ in names]
        quiet(car, 0.05)


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
