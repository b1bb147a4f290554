"""Access control from outside: a node as a process, its files, and clients that try."""

from __future__ import annotations

import signal
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import argon2
import jwt
import pytest
import trustme

from tests.support.node import Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.wire import CONNACK, DISCONNECT, PUBACK, Client, Packet, Will, prop, publish_packet

PATIENCE = 30.0  #: seconds until a condition must hold
HASHER = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)  # quick: the cost is tested elsewhere
SECRET = "a secret of more than thirty-two bytes, shared"
BAD_USER_NAME_OR_PASSWORD, NOT_AUTHORIZED, CLIENT_IDENTIFIER_NOT_VALID = 0x86, 0x87, 0x85
CONNECTION_RATE_EXCEEDED = 0x9F
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
{more}

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

    def __init__(self, folder: Path, more: str = "") -> None:
        self.rules = folder / "acl.conf"
        self.passwords = folder / "passwords"
        self.rules.write_text(RULES)
        users = ("admin", "alice", "bob")
        self.passwords.write_text("".join(f"{user}:{HASHER.hash(user * 2)}\n" for user in users))
        self.node = NodeProcess(config=CONFIG.format(folder=folder, secret=SECRET, more=more))
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

    def reload(self, outcome: str) -> None:
        """SIGHUP, and wait until the node has told this outcome."""
        before = len(self.node.output)
        assert self.node.process is not None
        self.node.process.send_signal(signal.SIGHUP)
        until(lambda: any(outcome in line for line in self.node.output[before:]), f"{outcome} in the log")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.01)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    setting = Guarded(tmp_path)
    with setting.node:
        yield setting
        for client in setting.clients:
            client.close()


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_wrong_password_never_touches_the_victims_session(guarded: Guarded, version: int) -> None:
    """Neither its connection, nor its subscriptions, nor what waits for it."""
    victim = guarded.connect("alice", "phone", version)
    assert [1] == victim.subscribe("home/#", 1).reasons
    for password in ("wrong", ""):
        guarded.refused(version, client_id="phone", username="alice", password=password, clean=True)
    guarded.refused(version, client_id="phone", username="nobody", password="alicealice", clean=True)
    victim.expect_nothing()
    admin = guarded.connect("admin")
    admin.publish("home/door", b"open", 1)
    assert b"open" == victim.receive().payload


def test_a_wrong_password_never_touches_a_session_that_is_away(guarded: Guarded) -> None:
    victim = guarded.connect("alice", "phone", properties=prop(SESSION_EXPIRY, 600))
    victim.subscribe("home/#", 1)
    victim.disconnect()
    admin = guarded.connect("admin")
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


@pytest.mark.parametrize("version", [4, 5])
def test_the_will_of_a_rejected_connect_is_never_published(guarded: Guarded, version: int) -> None:
    admin = guarded.connect("admin")
    admin.subscribe("#")
    will = Will("cars/car1/gone", b"boo", retain=True)
    guarded.refused(version, client_id="car1", username="bob", password="wrong", will=will)
    guarded.refused(version, client_id="car1", username="bob", password="bobbob", will=Will("home/door", b"boo"))
    admin.expect_nothing()
    late = guarded.connect("admin", "late")
    late.subscribe("cars/#")
    late.expect_nothing()


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


def test_reload_takes_subscriptions_away(guarded: Guarded) -> None:
    admin = guarded.connect("admin")
    alice = guarded.connect("alice")
    alice.subscribe([("home/#", 1), ("news", 1)])
    guarded.rules.write_text(RULES.replace('["home/#"]', '["garden/#"]'))
    guarded.reload('"reloaded"')
    admin.publish("home/door", b"open", 1)
    admin.publish("news", b"new", 1)
    assert b"new" == alice.receive().payload
    assert [NOT_AUTHORIZED, 1] == alice.subscribe([("home/#", 1), ("garden/#", 1)]).reasons


def test_reload_forgets_what_a_client_was_allowed_to_publish(guarded: Guarded) -> None:
    car = guarded.connect("bob", "car1")
    first = car.publish("cars/car1/gps", b"1", 1)
    guarded.rules.write_text('{allow, {user, "admin"}, all, all}.')
    guarded.reload('"reloaded"')
    second = car.publish("cars/car1/gps", b"2", 1)
    assert first is not None
    assert second is not None
    assert (True, NOT_AUTHORIZED) == ((first.reason or 0) < 0x80, second.reason)


@pytest.mark.parametrize("broken", ["rules", "passwords"])
def test_reload_of_a_broken_file_keeps_the_old(guarded: Guarded, broken: str) -> None:
    alice = guarded.connect("alice")
    alice.subscribe("home/#", 1)
    guarded.rules.write_text("{deny, all}.")
    guarded.passwords.write_text("")
    getattr(guarded, broken).write_text("{allow, all}. {oops\n")
    guarded.reload('"reload_refused"')
    admin = guarded.connect("admin")  # the passwords are the old ones
    admin.publish("home/door", b"open", 1)
    assert b"open" == alice.receive().payload
    assert [NOT_AUTHORIZED] == alice.subscribe("garden/#").reasons


def test_a_session_that_comes_back_after_a_reload_has_only_what_is_still_allowed(guarded: Guarded) -> None:
    alice = guarded.connect("alice", properties=prop(SESSION_EXPIRY, 600))
    alice.subscribe([("home/#", 1), ("news", 1)])
    alice.disconnect()
    guarded.rules.write_text(RULES.replace('["home/#"]', '["garden/#"]'))
    guarded.reload('"reloaded"')
    back = guarded.connect("alice", clean=False, properties=prop(SESSION_EXPIRY, 600))
    admin = guarded.connect("admin")
    admin.publish("home/door", b"open", 1)
    admin.publish("news", b"new", 1)
    assert b"new" == back.receive().payload


def test_a_session_does_not_lend_its_subscriptions_to_another_user(guarded: Guarded) -> None:
    alice = guarded.connect("alice", "phone", properties=prop(SESSION_EXPIRY, 600))
    alice.subscribe("home/#", 1)
    alice.disconnect()
    bob = guarded.connect("bob", "phone", clean=False, properties=prop(SESSION_EXPIRY, 600))
    admin = guarded.connect("admin")
    admin.publish("home/door", b"open", 1)
    bob.expect_nothing()


def test_a_reload_holds_for_sessions_that_are_away(guarded: Guarded) -> None:
    """What is published after the reload does not wait for them any more."""
    alice = guarded.connect("alice", properties=prop(SESSION_EXPIRY, 600))
    alice.subscribe([("home/#", 1), ("news", 1)])
    alice.disconnect()
    guarded.rules.write_text(RULES.replace('["home/#"]', '["garden/#"]'))
    guarded.reload('"reloaded"')
    admin = guarded.connect("admin")
    admin.publish("home/door", b"open", 1)
    admin.publish("news", b"new", 1)
    back = guarded.connect("alice", clean=False, properties=prop(SESSION_EXPIRY, 600))
    assert b"new" == back.receive().payload


def test_what_waits_for_one_user_is_not_for_another(guarded: Guarded) -> None:
    """Another user who comes with the client id of a session gets a new session."""
    alice = guarded.connect("alice", "shared-id", properties=prop(SESSION_EXPIRY, 600))
    alice.subscribe("home/#", 1)
    alice.disconnect()
    guarded.connect("admin").publish("home/door", b"for alice only", 1)
    bob = guarded.connect("bob", "shared-id", clean=False, properties=prop(SESSION_EXPIRY, 600))
    assert bob.connack is not None and not bob.connack.session_present
    bob.expect_nothing()


def test_an_expired_token_ends_the_connection(guarded: Guarded) -> None:
    client = guarded.client()
    token = jwt.encode({"sub": "bob", "exp": int(time.time()) + 2}, SECRET, "HS256")
    assert 0 == client.connect("car1", username="bob", password=token).reason
    packets = client.expect_closed(PATIENCE)
    assert [DISCONNECT] == [packet.type for packet in packets]
    refused = guarded.refused(client_id="car1", username="bob", password=token)
    assert (CONNACK, NOT_AUTHORIZED) == (refused.type, refused.reason)


def test_a_token_gives_its_own_name_and_rules(guarded: Guarded) -> None:
    client = guarded.client()
    token = jwt.encode({"sub": "alice", "acl": {"sub": ["extra/${clientid}"]}}, SECRET, "HS256")
    assert 0 == client.connect("c9", username="admin", password=token).reason
    assert [0, 0, NOT_AUTHORIZED] == client.subscribe([("extra/c9", 0), ("home/#", 0), ("extra/c8", 0)]).reasons


def test_failed_log_ins_are_limited(tmp_path: Path) -> None:
    setting = Guarded(tmp_path, "max_failures = 3")
    with setting.node:
        for i in range(3):
            setting.refused(client_id=f"guess{i}", username="alice", password=f"guess{i}")
        limited = setting.refused(client_id="guess", username="alice", password="alicealice")
        assert CONNECTION_RATE_EXCEEDED == limited.reason
        setting.connect("bob").close()


def test_a_client_id_can_be_bound_to_the_user(tmp_path: Path) -> None:
    setting = Guarded(tmp_path, 'bind_client_id = "username"')
    with setting.node:
        alice = setting.connect("alice")
        refused = setting.refused(client_id="alice", username="bob", password="bobbob")
        assert CLIENT_IDENTIFIER_NOT_VALID == refused.reason
        alice.expect_nothing()
        alice.close()


@pytest.mark.parametrize("broken", ["rules", "passwords"])
def test_a_node_with_a_broken_file_does_not_start(tmp_path: Path, broken: str) -> None:
    setting = Guarded(tmp_path)
    file: Path = getattr(setting, broken)
    file.write_text("{allow, all")
    with pytest.raises(AssertionError, match="did not become ready") as caught:
        setting.node.start()
    assert f"{file}:1:" in str(caught.value)


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
    with NodeProcess(config=config):
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
