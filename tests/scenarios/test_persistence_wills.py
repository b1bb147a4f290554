"""Wills when a node ends: they go out when their time has come, once, and not if the client is back.

The observer is a session that lasts, so a will that is published while nobody looks waits for it. A will that must not
come is looked for behind everything that was published before (`drained`).
"""

from __future__ import annotations

from tests.scenarios.witness import metrics, wait_until
from tests.support.flows import CONTENT_TYPE, MESSAGE_EXPIRY, SESSION_EXPIRY, USER_PROPERTY, let_pass, payloads
from tests.support.stores import Home, both_ends, drained, on_every_store, session_present, subscribe
from tests.support.wire import Client, Will, prop

VERSIONS = (4, 5)
WILL_DELAY = 0x18
DISCONNECT_WITH_WILL = 0x04

#: Seconds: longer than any test takes, and longer than a slow machine needs for what has to be seen.
LONG = 3000
PATIENCE = 60.0


def start_observed(home: Home) -> None:
    """A node with an absent observer of all wills."""
    home.start()
    home.absent("observer", 5, ("will/#", 2))


def observer(home: Home) -> Client:
    return home.back("observer")


def will(name: str, delay: int | None = None, **kw: object) -> Will:
    """A will of QoS 1 that tells whose it is."""
    properties = prop(WILL_DELAY, delay) if delay is not None else b""
    return Will(f"will/{name}", name.encode(), qos=1, properties=properties, **kw)  # type: ignore[arg-type]


def connected(home: Home) -> int:
    return int(metrics(home.node)["motorcade_clients_connected"])


def vanish(home: Home, *clients: Client) -> None:
    """The connections break, and the node has noticed."""
    before = connected(home)
    for client in clients:
        client.close()
    wait_until(lambda: connected(home) == before - len(clients), "the node has noticed")


@on_every_store
def test_the_will_of_a_client_that_was_connected_when_the_node_was_killed(home: Home) -> None:
    """It goes out after the restart, with all that belongs to it, and once."""
    start_observed(home)
    home.lasting("three", 4, will=will("three"))
    home.lasting(
        "five",
        5,
        will=Will(
            "will/five",
            b"five",
            qos=2,
            properties=prop(CONTENT_TYPE, "text/plain")
            + prop(MESSAGE_EXPIRY, LONG)
            + prop(USER_PROPERTY, ("b", "1"))
            + prop(USER_PROPERTY, ("a", "2")),
        ),
    )
    home.crash()
    watching = observer(home)
    found = {message.payload: message for message in (watching.receive(PATIENCE), watching.receive(PATIENCE))}
    assert {b"three": 1, b"five": 2} == {payload: message.qos for payload, message in found.items()}
    five = found[b"five"]
    assert "text/plain" == five.prop(CONTENT_TYPE)
    assert [("b", "1"), ("a", "2")] == five.prop_all(USER_PROPERTY)
    assert 0 < five.prop(MESSAGE_EXPIRY) <= LONG
    assert [] == drained(watching)
    home.settle()
    home.crash()
    assert [] == payloads(drained(observer(home))), "published in one life, published again in the next"
    for name, version in (("three", 4), ("five", 5)):
        home.back(name, version).disconnect()
    assert [] == payloads(drained(observer(home)))


def test_the_will_of_a_client_that_was_connected_when_the_node_was_stopped(home: Home) -> None:
    """The client has not said goodbye, the node has; the will goes out, before the end or after the restart, once."""
    start_observed(home)
    for version in VERSIONS:
        home.lasting(f"c{version}", version, will=will(f"c{version}"))
    home.restart()
    watching = observer(home)
    assert {b"c4", b"c5"} == {watching.receive(PATIENCE).payload for _ in range(2)}
    assert [] == drained(watching)


@both_ends
def test_a_delay_goes_on_over_the_end_of_a_node(home: Home, end: str) -> None:
    """The client is gone, the node ends during the delay: the will comes when the delay is over, once."""
    start_observed(home)
    vanish(home, home.lasting("short", will=will("short", 2)), home.lasting("long", will=will("long", LONG)))
    home.settle()
    home.again(end)
    watching = observer(home)
    assert b"short" == watching.receive(PATIENCE).payload
    assert [] == drained(watching)


def test_a_delay_that_ends_while_no_node_runs(home: Home) -> None:
    """The will goes out as soon as there is a node again."""
    start_observed(home)
    vanish(home, home.lasting("c", will=will("c", 1)))
    home.kill()
    let_pass(1.2)
    home.start()
    watching = observer(home)
    assert b"c" == watching.receive(PATIENCE).payload
    assert [] == drained(watching)


def test_a_client_that_is_back_in_time_has_no_will(home: Home) -> None:
    """Whether the client or the node went first: the session goes on within the delay. [MQTT-3.1.3-9]

    A will that still waited would go out with the end of its session, which need not be waited for.
    """
    start_observed(home)
    vanish(home, home.lasting("client first", will=will("client first", LONG)))
    home.lasting("node first", will=will("node first", LONG))
    home.settle()
    home.crash()
    for name in ("client first", "node first"):
        home.back(name).disconnect()
    home.crash()
    for name in ("client first", "node first"):
        home.back(name)
        home.connect(name, clean=True)
    assert [] == payloads(drained(observer(home)))


def test_a_session_that_ends_while_no_node_runs_has_its_will_published(home: Home) -> None:
    """The end of the session ends the delay. [MQTT-3.1.3-9]"""
    start_observed(home)
    brief = prop(SESSION_EXPIRY, 1)
    vanish(home, home.connect("c", clean=False, properties=brief, will=will("c", LONG)))
    home.settle()
    home.kill()
    let_pass(1.2)
    home.start()
    watching = observer(home)
    assert b"c" == watching.receive(PATIENCE).payload
    assert not session_present(home.connect("c", clean=False, properties=brief))
    assert [] == drained(watching)


def test_a_clean_start_ends_a_delay_that_began_in_another_life(home: Home) -> None:
    """The old session is over, so its will goes out at once; and not again after the next crash."""
    start_observed(home)
    vanish(home, home.lasting("c", will=will("c", LONG)))
    home.settle()
    home.crash()
    home.connect("c", clean=True)
    watching = observer(home)
    assert b"c" == watching.receive().payload
    home.settle()
    home.crash()
    assert [] == payloads(drained(observer(home)))


def test_no_will_after_disconnect(home: Home) -> None:
    """DISCONNECT takes the will away, also if the node is killed as soon as it has closed the connection."""
    start_observed(home)
    clients = [
        home.lasting(f"c{number}", VERSIONS[number % 2], will=will(f"c{number}", 1 if number % 2 else None))
        for number in range(10)
    ]
    for client in clients:
        client.disconnect()
    home.crash()
    vanish(home, home.lasting("clock", will=will("clock", 2)))
    watching = observer(home)
    assert b"clock" == watching.receive(PATIENCE).payload
    assert [] == drained(watching)
    for number in range(10):
        assert session_present(home.lasting(f"c{number}", VERSIONS[number % 2]))


def test_disconnect_may_ask_for_the_will(home: Home) -> None:
    """DISCONNECT 0x04 starts the delay, which goes on after a crash."""
    start_observed(home)
    home.lasting("c", will=will("c", 1)).disconnect(DISCONNECT_WITH_WILL)
    home.crash()
    watching = observer(home)
    assert b"c" == watching.receive(PATIENCE).payload
    assert [] == drained(watching)


def test_the_will_of_the_last_connect_counts(home: Home) -> None:
    """A client that came back with another will, or with none, before the node was killed."""
    start_observed(home)
    for name in ("other", "none"):
        home.lasting(name, will=will(f"{name}/old", LONG))
    home.back("other", will=will("other/new"))
    home.back("none")
    home.crash()
    watching = observer(home)
    assert b"other/new" == watching.receive(PATIENCE).payload
    assert [] == drained(watching)


def test_a_retained_will_is_retained_after_the_crash(home: Home) -> None:
    """A will of a client that was connected when the node was killed is kept for later subscribers."""
    start_observed(home)
    home.lasting("c", 4, will=will("c", retain=True))
    home.crash()
    assert b"c" == observer(home).receive(PATIENCE).payload
    home.crash()
    late = home.connect("late")
    subscribe(late, "will/#", 1)
    assert [(b"c", True)] == [(message.payload, message.retain) for message in drained(late)]
