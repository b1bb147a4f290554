"""Does every table of a broker that is keyed by what clients choose empty with its last user?

A node in memory meets names that it has never heard of: client ids, topics, filters, groups, users, addresses. When all
of them are gone and their times are over, every container that can be reached from the broker has the size it had.
Tables of plugins and of the store are looked at by the soak.
"""

from __future__ import annotations

import gc

import pytest

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.router import Router
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import Properties
from tests.soak.observer import tables
from tests.support.virtual import MemoryNode, Peer, standing

#: Bounded caches of topics, which keep the latest: they may be full of names that are gone.
CACHES = {
    "Broker._listeners": 1000,
    "Hooks._by_level": 1000,
    "Hooks._taken": 1000,
    "motorcade.core.client._is_loopback()": 1024,
}
LIMITS = Limits(connect_rate=0.0, flapping_count=5, flapping_by_address=True)


def sizes(node: MemoryNode) -> dict[str, int]:
    """Entries of every container, by its owner."""
    gc.collect()
    node.state.pubsub.forget_routes()
    node.turn()
    return tables((node.broker, node.state))


def connect(node: MemoryNode, name: str, n: int, *, expiry: int = 0) -> Peer:
    peer = node.peer(5 if n % 2 else 4, host=f"127.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}")
    properties = Properties(session_expiry=expiry, topic_alias_maximum=4) if n % 2 else Properties()
    will = Will(f"will/{name}", b"gone", n % 3, properties=Properties(will_delay=2 if n % 2 else None))
    peer.send(Connect(name, peer.version, not expiry, username=f"user-{name}", will=will, properties=properties))
    node.turn()
    (connack,) = peer.take()[:1]
    assert isinstance(connack, Connack) and not connack.reason, connack
    return peer


def churn(node: MemoryNode, n: int) -> None:
    """One client with names of its own, from its CONNECT to its end."""
    name = f"client-{n}"
    peer = connect(node, name, n, expiry=5 if n % 3 == 0 else 0)
    filters = (
        *(f"exact/{n}", f"plus/+/{n}", f"hash-{n}/#", f"${n}/exact", f"${n}/+/x", "x" * 1000 + f"{n}/{n}"),
        *(f"$share/{n}/shared/{n}", f"$share/{n}/${n}/#", f"$share/group/{n}/+"),
    )
    peer.send(Subscribe(1, tuple(Subscription(text, n % 3) for text in filters)))
    for qos, topic in enumerate((f"exact/{n}", f"${n}/exact", f"shared/{n}")):
        peer.send(Publish(topic, b"x", qos, packet_id=qos and n % 60000 + qos))
    if n % 2:
        peer.send(Publish(f"exact/{n}", b"alias", properties=Properties(topic_alias=1)))
    peer.send(Publish(f"unheard/{n}", b"x"), Publish(f"plus/a/{n}", b"x", 2, packet_id=7), Pubrec(n % 60000 + 1))
    node.turn()
    peer.take()
    if n % 4 == 1:
        peer.send(Pubrel(7), Unsubscribe(2, filters[::2]))
    if n % 5 == 2:
        peer.send(Publish("never/+", b""))  # an error of protocol
    elif n % 5 == 3:
        peer.send(Disconnect())
    elif n % 5 == 4:
        connect(node, name, n).close()  # takes over, and ends what there was
    else:
        peer.close()
    node.turn()
    node.broker._listening(f"${n}", "")


@pytest.mark.parametrize("observed", [False, True], ids=["fast path", "observed"])
def test_tables_empty_with_their_last_user(observed: bool) -> None:
    """After thousands of ever-new names nothing is left of them."""
    node = MemoryNode(SessionOptions(await_rel_timeout=5.0, expiry_default_v3=5), LIMITS)
    node.state.observed = observed
    with standing(node.clock):
        for n in range(60):
            churn(node, n)
        _let_go(node)
        before = sizes(node)
        for n in range(60, 460):
            churn(node, n)
        assert len(node.state.registry.sessions) > 50, "durable ones wait for their time"
        _let_go(node)
        after = sizes(node)
    assert {} == dict(node.state.registry.sessions)
    grown = {name: (before.get(name, 0), size) for name, size in after.items() if size > before.get(name, 0)}
    assert {} == {name: grew for name, grew in grown.items() if grew[1] > 2 * CACHES.get(name.rstrip("[]"), 0)}


def _let_go(node: MemoryNode) -> None:
    """Let every time that a session, a will or a ban may have pass."""
    for _ in range(200):
        node.clock.now += 2.0
        node.broker._tick()
        node.turn()


def test_the_router_forgets_first_levels_that_begin_with_a_dollar() -> None:
    """Filters of 60 kB for topics that begin with `$` leave nothing behind."""
    router: Router[str] = Router()
    empty = tables((router,))
    for number in range(100):
        for filter_ in (f"${number}" + "x" * 1000, f"${number}" + "x" * 1000 + "/more"):
            router.set(filter_, "entry")
            router.set(filter_, "again")
            assert router.heard_below(filter_.split("/")[0])
    for number in range(100):
        for filter_ in (f"${number}" + "x" * 1000, f"${number}" + "x" * 1000 + "/more"):
            router.remove(filter_)
            router.remove(filter_)
        assert not router.heard_below(f"${number}" + "x" * 1000)
    assert empty == tables((router,))
