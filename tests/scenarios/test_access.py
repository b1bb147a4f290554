"""Access control from outside: a node, its files, and clients that try."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import argon2
import jwt
import pytest
import trustme

from tests.support.compacted import Compacted
from tests.support.consumers import ask, connected, payloads, take
from tests.support.local import LocalNode
from tests.support.node import ROOT, Endpoint
from tests.support.ports import free_port
from tests.support.wire import CONNACK, DISCONNECT, PUBACK, Client, Packet, Will, prop, publish_packet

PATIENCE = 240.0  #: seconds until a condition must hold
HASHER = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)  # quick: the cost is tested elsewhere
SECRET = "a secret of more than thirty-two bytes, shared"
BAD_USER_NAME_OR_PASSWORD, NOT_AUTHORIZED = 0x86, 0x87
TOPIC_ALIAS, SESSION_EXPIRY, ASSIGNED_CLIENT_ID = 0x23, 0x11, 0x12

RULES = """
{allow, {user, "admin"}, all, all}.
{allow, {user, "alice"}, subscribe, ["home/#"]}.
{allow, all, publish, ["cars/${clientid}/#"]}.
{allow, all, subscribe, ["cars/${clientid}/#", "news"]}.
"""

CONFIG = """
[plugins.access]
anonymous = "deny"
acl_file = "{folder}/acl.conf"
failure_delay = 0.0

[[plugins.access.authentication]]
type = "jwt"
secret = "{secret}"
algorithms = ["HS256"]

[[plugins.access.authentication]]
type = "password"
file = "{folder}/passwords"
"""


class Guarded:
    """A node with a password file (every password is the user's name, twice) and a rule file."""

    def __init__(self, folder: Path) -> None:
        self.rules = folder / "acl.conf"
        self.passwords = folder / "passwords"
        self.rules.write_text(RULES)
        users = ("admin", "alice", "bob")
        self.passwords.write_text("".join(f"{user}:{HASHER.hash(user * 2)}\n" for user in users))
        self.node = LocalNode(CONFIG.format(folder=folder, secret=SECRET))
        self.clients: list[Client] = []

    def client(self, version: int = 5) -> Client:
        client = Client(self.node, version=version)
        self.clients.append(client)
        return client

    def connect(self, user: str, client_id: str = "", version: int = 5, **more: object) -> Client:
        """A client of a user that must get in."""
        client = self.client(version)
        client.connack = client.connect(client_id or user, username=user, password=user * 2, **more)
        assert 0 == client.connack.reason
        return client

    def refused(self, version: int = 5, **how: object) -> Packet:
        """The CONNACK of a client that must not get in."""
        client = self.client(version)
        answer = client.connect(**how)  # type: ignore[arg-type]
        assert answer.reason
        client.expect_closed()
        return answer

    def reload(self) -> int:
        """Read the files again; the status of the answer."""
        with self.node.web() as web:
            return web.post("/config/reload").status_code


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    setting = Guarded(tmp_path)
    with setting.node:
        yield setting
        for client in setting.clients:
            client.close()


def test_a_wrong_password_never_touches_the_victims_session(guarded: Guarded) -> None:
    """Neither its connection, nor its subscriptions, nor what waits for it, whether it is there or away."""
    admin = guarded.connect("admin")
    for version in (3, 4, 5):
        victim = guarded.connect("alice", f"phone-{version}", version)
        assert [1] == victim.subscribe("home/#", 1).reasons
        for user, password in (("alice", "wrong"), ("alice", ""), ("nobody", "alicealice")):
            guarded.refused(version, client_id=victim.client_id, username=user, password=password, clean=True)
        victim.expect_nothing()
        admin.publish("home/door", b"open", 1)
        assert b"open" == victim.receive().payload
    victim = guarded.connect("alice", "phone", properties=prop(SESSION_EXPIRY, 600))
    victim.subscribe("home/#", 1)
    victim.disconnect()
    admin.publish("home/door", b"open", 1)
    guarded.refused(client_id="phone", username="alice", password="wrong", clean=True)
    back = guarded.connect("alice", "phone", clean=False, properties=prop(SESSION_EXPIRY, 600))
    assert back.connack is not None
    assert back.connack.session_present
    assert b"open" == back.receive().payload


def test_unknown_user_and_wrong_password_hear_the_same(guarded: Guarded) -> None:
    known = guarded.refused(client_id="c", username="alice", password="wrong")
    unknown = guarded.refused(client_id="c", username="mallory", password="wrong")
    assert BAD_USER_NAME_OR_PASSWORD == known.reason
    assert known.raw == unknown.raw
    assert 4 == guarded.refused(4, client_id="c", username="alice", password="wrong").reason
    assert NOT_AUTHORIZED == guarded.refused(client_id="c").reason


def test_a_will_passes_the_rules(guarded: Guarded) -> None:
    admin = guarded.connect("admin")
    admin.subscribe("cars/#")
    refused = guarded.refused(client_id="car1", username="bob", password="bobbob", will=Will("cars/car2/gone"))
    assert NOT_AUTHORIZED == refused.reason
    car = guarded.connect("bob", "car1", will=Will("cars/car1/gone", b"bye"))
    car.abort()
    message = admin.receive()
    assert ("cars/car1/gone", b"bye") == (message.topic, message.payload)


def test_an_alias_passes_the_rules(guarded: Guarded) -> None:
    """An alias stands for its topic, each time it is used; a refused topic does not become usable by it."""
    admin = guarded.connect("admin")
    admin.subscribe("#")
    car = guarded.connect("bob", "car1")
    alias = prop(TOPIC_ALIAS, 1)
    car.send(publish_packet("home/door", b"1", qos=1, packet_id=1, properties=alias))
    assert NOT_AUTHORIZED == car.expect(PUBACK).reason
    car.send(publish_packet("", b"2", qos=1, packet_id=2, properties=alias))
    assert NOT_AUTHORIZED == car.expect(PUBACK).reason
    car.send(publish_packet("cars/car1/gps", b"3", qos=1, packet_id=3, properties=alias))
    assert 0 == car.expect(PUBACK).reason
    car.send(publish_packet("", b"4", qos=1, packet_id=4, properties=alias))
    assert 0 == car.expect(PUBACK).reason
    assert [("cars/car1/gps", b"3"), ("cars/car1/gps", b"4")] == [
        (m.topic, m.payload) for m in (admin.receive(), admin.receive())
    ]
    admin.expect_nothing()


def test_what_is_refused_is_answered_and_goes_nowhere(guarded: Guarded) -> None:
    admin = guarded.connect("admin")
    admin.subscribe("#")
    car = guarded.connect("bob", "car1")
    for qos in (1, 2):
        answer = car.publish("cars/car2/gps", b"x", qos)
        assert answer is not None
        assert NOT_AUTHORIZED == answer.reason
    car.publish("cars/car2/gps", b"x")
    asked = [("cars/car1/#", 1), ("cars/+/#", 1), ("#", 1), ("news", 0), ("$share/g/home/#", 1), ("$share/g/news", 1)]
    assert [1, NOT_AUTHORIZED, NOT_AUTHORIZED, 0, NOT_AUTHORIZED, 1] == car.subscribe(asked).reasons
    assert [0x80] == guarded.connect("bob", "old", 4).subscribe("home/#").reasons
    guarded.connect("admin", "sender").publish("home/door", b"open", 1)
    assert b"open" == admin.receive().payload  # the first message that got through
    car.expect_nothing()
    admin.expect_nothing()


def test_reload_takes_rights_away(guarded: Guarded) -> None:
    """From those who are there, from sessions that are away when something is published, and when they come back."""
    admin, car, alice = guarded.connect("admin"), guarded.connect("bob", "car1"), guarded.connect("alice")
    away = guarded.connect("alice", "away", properties=prop(SESSION_EXPIRY, 600))
    for client in (alice, away):
        client.subscribe([("home/#", 1), ("news", 1)])
    away.disconnect()
    assert NOT_AUTHORIZED != reason_of(car.publish("cars/car1/gps", b"1", 1))
    rules = RULES.replace('["home/#"]', '["garden/#"]').replace(
        "{allow, all, publish,", '{allow, {user, "x"}, publish,'
    )
    guarded.rules.write_text(rules)
    assert 200 == guarded.reload()
    admin.publish("home/door", b"open", 1)
    admin.publish("news", b"new", 1)
    assert b"new" == alice.receive().payload
    assert [NOT_AUTHORIZED, 1] == alice.subscribe([("home/#", 1), ("garden/#", 1)]).reasons
    assert NOT_AUTHORIZED == reason_of(car.publish("cars/car1/gps", b"2", 1)), "what it was allowed is forgotten"
    back = guarded.connect("alice", "away", clean=False, properties=prop(SESSION_EXPIRY, 600))
    assert b"new" == back.receive().payload
    admin.publish("home/door", b"open", 1)
    admin.publish("news", b"newer", 1)
    assert b"newer" == back.receive().payload


def reason_of(answer: Packet | None) -> int | None:
    assert answer is not None
    return answer.reason


def test_what_waits_for_one_user_is_not_for_another(guarded: Guarded) -> None:
    """Another user who comes with the client id of a session gets a new session, without its subscriptions."""
    alice = guarded.connect("alice", "shared-id", properties=prop(SESSION_EXPIRY, 600))
    alice.subscribe("home/#", 1)
    alice.disconnect()
    admin = guarded.connect("admin")
    admin.publish("home/door", b"for alice only", 1)
    bob = guarded.connect("bob", "shared-id", clean=False, properties=prop(SESSION_EXPIRY, 600))
    assert bob.connack is not None and not bob.connack.session_present
    admin.publish("home/door", b"for alice only", 1)
    bob.expect_nothing()


def test_an_expired_token_ends_the_connection(guarded: Guarded) -> None:
    for seconds in (2, 20, 100):  # on a busy machine a token may be over before it is shown
        client = guarded.client()
        token = jwt.encode({"sub": "bob", "exp": int(time.time()) + seconds}, SECRET, "HS256")
        if client.connect("car1", username="bob", password=token).reason == 0:
            break
    packets = client.expect_closed(PATIENCE)
    assert [DISCONNECT] == [packet.type for packet in packets]
    refused = guarded.refused(client_id="car1", username="bob", password=token)
    assert (CONNACK, NOT_AUTHORIZED) == (refused.type, refused.reason)


def test_a_token_gives_its_own_name_and_rules(guarded: Guarded) -> None:
    client = guarded.client()
    token = jwt.encode({"sub": "alice", "acl": {"sub": ["extra/${clientid}"]}}, SECRET, "HS256")
    assert 0 == client.connect("c9", username="admin", password=token).reason
    assert [0, 0, NOT_AUTHORIZED] == client.subscribe([("extra/c9", 0), ("home/#", 0), ("extra/c8", 0)]).reasons


def test_a_certificate_is_who_the_client_is(tmp_path: Path) -> None:
    """User name and client id come from the certificate, whatever the client says."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    (tmp_path / "acl.conf").write_text('{allow, {user, "car-7"}, publish, ["cars/${clientid}/#"]}.')
    address = Endpoint("127.0.0.1", free_port())
    config = f"""
        [listeners.tls]
        bind = "{address}"
        certificate = "{tmp_path}/server.pem"
        key = "{tmp_path}/server.pem"
        ca = "{tmp_path}/ca.pem"

        [plugins.access]
        anonymous = "deny"
        acl_file = "{tmp_path}/acl.conf"
        authentication = [{{ type = "certificate", client_id = "cn" }}]
    """
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with LocalNode(config):
        with Client(address) as stranger:
            stranger.socket = context.wrap_socket(stranger.socket, server_hostname="127.0.0.1")
            assert BAD_USER_NAME_OR_PASSWORD == stranger.connect("car-7", username="car-7").reason
        authority.issue_cert("car-7.example", common_name="car-7").configure_cert(context)
        with Client(address) as car:
            car.socket = context.wrap_socket(car.socket, server_hostname="127.0.0.1")
            connack = car.connect("another", username="admin")
            assert (0, "car-7") == (connack.reason, connack.prop(ASSIGNED_CLIENT_ID))
            answers = [car.publish(topic, b"x", 1) for topic in ("cars/car-7/gps", "cars/another/gps")]
            assert [True, False] == [answer is not None and answer.reason != NOT_AUTHORIZED for answer in answers]


# --- compacted queues -----------------------------------------------------------------------------------------------

#: The rule of the seed, and nothing else that concerns these topics.
QUEUES = """
{allow, {clientid, {re, "^ecq-.+"}}, subscribe, ["eq $ECQ/${clientid}/#"]}.
{allow, {clientid, "producer"}, publish, ["$ECQ/w/#"]}.
"""

OPEN = """
[plugins.access]
anonymous = "allow"
acl_file = "{file}"
"""


def test_clients_consume_only_the_compacted_queues_that_rules_allow(tmp_path: Path) -> None:
    """The rule of the seed: some clients may consume, each its own queue only. Who may not hears so."""
    (tmp_path / "acl.conf").write_text(QUEUES)
    with (
        LocalNode(OPEN.format(file=tmp_path / "acl.conf")) as node,
        connected(node, "ecq-1") as allowed,
        connected(node, "other") as other,
        connected(node, "producer") as producer,
    ):
        assert [1] == ask(allowed, "$ECQ/ecq-1/#").reasons
        for filter_ in ("$ECQ/other/#", "$ECQ/ecq-1/#"):
            assert [NOT_AUTHORIZED] == ask(other, filter_).reasons
        for client, reason in ((other, NOT_AUTHORIZED), (allowed, NOT_AUTHORIZED), (producer, 0)):
            answer = client.publish("$ECQ/w/ecq-1/k", client.client_id.encode(), 1)
            assert answer is not None and reason == (answer.reason or 0)
        assert [b"producer"] == payloads(take(allowed, 1))


def test_the_rules_that_we_hand_out_hold_for_compacted_queues() -> None:
    """`examples/access/acl.conf`: the back office appends, a vehicle consumes and goes back, each its own; no more."""
    vin, other = "LFV3A28K000000001", "LFV3A28K000000002"
    rules = ROOT / "examples" / "access" / "acl.conf"
    with (
        LocalNode(OPEN.format(file=rules)) as node,
        connected(node, vin) as vehicle,
        connected(node, "office", username="backoffice") as office,
        connected(node, "somebody") as somebody,
    ):
        for queue in (Compacted(node, vin), Compacted(node, "fleet", "shared")):
            assert [1] == ask(vehicle, queue.filter).reasons
            assert [NOT_AUTHORIZED] == ask(somebody, queue.filter).reasons
            for client, reason in ((vehicle, NOT_AUTHORIZED), (somebody, NOT_AUTHORIZED), (office, 0)):
                answer = client.publish(queue.write("k"), client.client_id.encode(), 1)
                assert answer is not None and reason == (answer.reason or 0)
            assert [b"office"] == payloads(take(vehicle, 1))
            for client, reason in ((somebody, NOT_AUTHORIZED), (vehicle, 0)):
                answer = client.publish(queue.rewind, b"1", 1)
                assert answer is not None and reason == (answer.reason or 0)
            assert [b"office"] == payloads(take(vehicle, 1))
        assert [NOT_AUTHORIZED] == ask(vehicle, f"$ECQ/{other}/#").reasons
