"""What is kept, for how long, within which bounds; what MQTT says of it is in tests/conformance/test_retained.py."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.client import ClientInfo
from motorcade.core.errors import PluginError
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches
from motorcade.extension.hooks import STOP, Callback, Continue, Handled, Stop
from motorcade.extension.plugin import Loaded
from motorcade.plugins.retained import Index, RetainedConfig, RetainedPlugin, RetainedRefusal
from tests.unit.plugins.hub import MemoryHub

Load = Callable[..., Awaitable[Loaded]]


def kept(topic: str, payload: bytes = b"kept", **fields: Any) -> Message:
    return Message(topic, payload, retain=True, **fields)


async def retained(load: Load, **config: Any) -> RetainedPlugin:
    plugin = (await load("retained", **config)).plugin
    assert isinstance(plugin, RetainedPlugin)
    return plugin


def given_to(hub: MemoryHub, filter_: str, **options: Any) -> list[tuple[str, bytes]]:
    """Topics and payloads that a new subscription of this filter gets, sorted."""
    is_new = options.pop("is_new", True)
    before = len(hub.delivered)
    hub.subscribe(Subscription(filter_, **options), is_new=is_new)
    found = hub.delivered[before:]
    return sorted((message.topic, message.payload) for _, _, messages in found for message in messages)


# -- what is kept


async def test_the_message_is_kept_as_other_plugins_leave_it(hub: MemoryHub, load: Load) -> None:
    """A plugin loaded later that rewrites the topic still comes first."""
    await retained(load)

    def rewrite(_client: ClientInfo | None, message: Message) -> Continue:
        return Continue(Message(f"renamed/{message.topic}", message.payload, retain=True, headers={"note": 1}))

    hub.hooks.add("message.publish", Callback(rewrite, -999, "rewriter"))
    await hub.publish(kept("a"))
    assert [("renamed/a", b"kept")] == given_to(hub, "#")
    hub.subscribe(Subscription("renamed/a"))
    assert [{}] == [message.headers for message in hub.delivered[-1][2]]  # notes are about one publish only


async def test_a_message_that_another_plugin_took_is_not_kept(hub: MemoryHub, load: Load) -> None:
    """Ending the chain, handling the message, or taking its retain flag away all mean: do not keep it."""
    await retained(load)
    for answer in (STOP, Stop(Handled()), Continue(Handled()), Continue(Message("a", b"kept"))):
        hub.hooks.add("message.publish", Callback(lambda _client, _message, answer=answer: answer, 0, "taker"))
        await hub.publish(kept("a"))
        assert [] == given_to(hub, "a"), answer
        hub.hooks.remove_owner("taker")


# -- who gets it


async def test_no_local_holds_for_retained_messages(hub: MemoryHub, load: Load) -> None:
    """With no-local a client does not get back what it has sent itself, and gets what others have sent."""
    await retained(load)
    await hub.publish(kept("mine", publisher="car"))
    await hub.publish(kept("theirs", publisher="bus"))
    assert [("theirs", b"kept")] == given_to(hub, "#", no_local=True)
    assert [] == given_to(hub, "mine", no_local=True)
    assert 2 == len(given_to(hub, "#"))


LEVELS = st.lists(st.sampled_from(["a", "b", "", "$SYS", "+"]), min_size=1, max_size=4)


@given(
    st.sets(LEVELS.map(lambda levels: "/".join(levels).replace("+", "c")).filter(bool), max_size=20),
    LEVELS.map("/".join).filter(bool),
    st.booleans(),
)
def test_walking_finds_what_matching_one_by_one_finds(topics: set[str], filter_: str, rest: bool) -> None:
    """The tree is only faster: it finds exactly the topics that the rules of matching say."""
    filter_ += "/#" if rest else ""
    index = Index(0, 0, 0)
    for topic in topics:
        index.put(kept(topic), 0.0)
    assert {t for t in topics if matches(filter_, t)} == {m.topic for m in index.walk(filter_, lambda: 0.0)}


async def test_delivery_sees_what_changes_meanwhile(hub: MemoryHub, load: Load) -> None:
    """While a client reads slowly, deleted messages are skipped and replaced ones come as they are then."""
    await retained(load)
    for number in range(100):
        await hub.publish(kept(f"t/{number}", b"old"))
    hub.subscribe(Subscription("t/#"))
    messages = hub.delivered[0][2]
    first = next(messages).topic
    others = [f"t/{number}" for number in range(100) if f"t/{number}" != first]
    for topic in others[:50]:
        await hub.publish(kept(topic, b""))
    await hub.publish(kept(others[-1], b"new"))
    rest = {message.topic: message.payload for message in messages}
    assert set(others[50:]) == rest.keys()
    assert b"new" == rest[others[-1]]


# -- expiry


async def test_what_expires_while_a_client_reads_is_skipped(hub: MemoryHub, load: Load) -> None:
    """The clock is asked for each message, not once per subscription."""
    await retained(load, sweep_interval=3600)
    for number in range(3):
        await hub.publish(kept(f"t/{number}", expires_at=1010.0))
    hub.subscribe(Subscription("t/+"))
    messages = hub.delivered[0][2]
    next(messages)
    hub.time = 1010.0
    assert [] == list(messages)


def test_a_sweep_has_a_budget_and_goes_on_where_it_stopped() -> None:
    """Each call looks at no more than its budget; together they find everything."""
    index = Index(0, 0, 0)
    for number in range(10):
        index.put(kept(f"t/{number}", expires_at=5.0 if number % 2 else 500.0), 0.0)
    index.put(kept("stays"), 0.0)
    assert [2, 1, 2] == [index.sweep(10.0, 4), index.sweep(10.0, 3), index.sweep(10.0, 3)]
    assert 6 == len(index)
    assert 0 == index.sweep(10.0, 1000)
    assert 5 == index.sweep(500.0, 1000)
    assert ["stays"] == [message.topic for message in index.walk("#", lambda: 500.0)]
    assert len("stays" + "kept") == index.bytes


def test_a_replaced_message_does_not_expire_in_the_old_ones_time() -> None:
    """A later message without expiry, or with a later one, takes the old time with it."""
    index = Index(0, 0, 0)
    index.put(kept("a", expires_at=5.0), 0.0)
    index.put(kept("a"), 0.0)
    assert 0 == index.sweep(10.0, 1000)
    index.put(kept("a", expires_at=5.0), 0.0)
    index.put(kept("a", expires_at=50.0), 0.0)
    assert 0 == index.sweep(10.0, 1000)
    assert 1 == index.sweep(50.0, 1000)


# -- bounds


async def test_a_payload_at_the_bound_is_kept_and_one_above_is_only_routed(hub: MemoryHub, load: Load) -> None:
    """`max_payload` counts what is allowed; the refusal is counted by its name."""
    plugin = await retained(load, max_payload=4)
    await hub.publish(kept("fits", b"1234"))
    await hub.publish(kept("large", b"12345"))
    assert [("fits", b"1234")] == given_to(hub, "#")
    assert 2 == len(hub.routed)
    assert 1 == plugin.context.counters["refused_max_payload"]


async def test_what_cannot_be_kept_still_ends_the_old_message(hub: MemoryHub, load: Load) -> None:
    """Nobody gets an outdated message as if it were the current one."""
    await retained(load, max_payload=4)
    await hub.publish(kept("a", b"old"))
    await hub.publish(kept("a", b"too large"))
    assert [] == given_to(hub, "a")


async def test_a_full_table_takes_updates_but_no_new_topics(hub: MemoryHub, load: Load) -> None:
    """At `max_messages` existing topics go on as before."""
    plugin = await retained(load, max_messages=2)
    for topic in ("a", "b", "c"):
        await hub.publish(kept(topic))
    await hub.publish(kept("a", b"new"))
    assert [("a", b"new"), ("b", b"kept")] == given_to(hub, "#")
    assert 1 == plugin.context.counters["refused_max_messages"]
    assert 4 == len(hub.routed)


async def test_a_full_table_makes_room_of_what_has_expired(hub: MemoryHub, load: Load) -> None:
    """Nobody is refused because of messages that are gone."""
    plugin = await retained(load, max_messages=2, sweep_interval=3600)
    await hub.publish(kept("a", expires_at=1001.0))
    await hub.publish(kept("b"))
    hub.time = 1001.0
    await hub.publish(kept("c"))
    assert [("b", b"kept"), ("c", b"kept")] == given_to(hub, "#")
    assert 0 == plugin.context.counters["refused_max_messages"]


async def test_all_bytes_together_are_bounded(hub: MemoryHub, load: Load) -> None:
    """`max_bytes` counts topics and properties too, and what is deleted makes room again."""
    plugin = await retained(load, max_bytes=20)
    await hub.publish(kept("a", b"x" * 9))
    await hub.publish(kept("b", b"x" * 9))
    await hub.publish(kept("c", b""))
    await hub.publish(kept("c", b"x" * 9))
    assert ["a", "b"] == [topic for topic, _ in given_to(hub, "#")]
    assert 1 == plugin.context.counters["refused_max_bytes"]
    await hub.publish(kept("a", b""))
    await hub.publish(kept("c", b"x", user_properties=(("k", "1234567"),)))
    assert {"retained_messages": 2, "retained_bytes": 20} == plugin.gauges()
    assert 1 == plugin.context.counters["deleted"]


def test_bytes_are_counted_right_whatever_happens() -> None:
    """After thousands of random puts, deletes and sweeps the sum is that of what is there."""
    chance = random.Random(5)
    index = Index(50, 40, 1000)
    for step in range(5000):
        topic = f"t/{chance.randrange(80)}"
        if chance.random() < 0.2:
            index.delete(topic)
        else:
            expires = step + 50.0 if chance.random() < 0.5 else None
            _, refusal = index.put(kept(topic, b"x" * chance.randrange(1, 50), expires_at=expires), float(step), 10)
            assert refusal is None or refusal in set(RetainedRefusal)
        present = list(index.walk("#", lambda: 0.0))
        assert len(present) == len(index) <= 50
        assert sum(len(m.topic) + len(m.payload) for m in present) == index.bytes <= 1000


async def test_zero_lifts_the_bounds(hub: MemoryHub, load: Load) -> None:
    """0 means unlimited, as everywhere in the configuration."""
    await retained(load, max_messages=0, max_payload=0, max_bytes=0)
    await hub.publish(kept("a", b"x" * (2 * 1024 * 1024)))
    assert 1 == len(given_to(hub, "a"))


async def test_wrong_configuration_is_refused(load: Load) -> None:
    """Unknown keys and impossible values keep the plugin from being loaded."""
    for config in ({"max_messages": -1}, {"sweep_budget": 0}, {"max_mesages": 5}):
        with pytest.raises(PluginError, match="retained"):
            await load("retained", **config)


# -- for operators


async def test_topics_and_clear(hub: MemoryHub, load: Load) -> None:
    """An operator lists and clears by filter; `#` leaves `$SYS` alone."""
    plugin = await retained(load)
    for topic in ("a/1", "a/2", "b", "$SYS/x"):
        await hub.publish(kept(topic))
    assert ["a/1", "a/2"] == sorted(plugin.topics("a/+"))
    assert 2 == plugin.clear("a/#")
    assert ["b"] == list(plugin.topics())
    assert 1 == plugin.clear("#")
    assert b"kept" == getattr(plugin.get("$SYS/x"), "payload", None)
    assert plugin.get("b") is None


async def test_reloading_changes_the_bounds_and_keeps_the_messages(hub: MemoryHub, load: Load) -> None:
    """New bounds are for new messages."""
    plugin = await retained(load)
    await hub.publish(kept("a"))
    await plugin.reload(RetainedConfig(max_messages=1))
    await hub.publish(kept("b"))
    assert ["a"] == list(plugin.topics())
