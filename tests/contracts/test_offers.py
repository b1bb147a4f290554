"""Messages that are offered to a client: the store looks which of its subscriptions match, and appends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.broker import session_records as records
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.storage.offers import offered
from motorcade.storage.ports import Appended, Batch, Bound, Draft, Offer, Offered, Store
from tests.contracts.engines import HOUR, NOW, PAYLOAD, append, entries, sweep

VIN = "WVW-1"
MAILBOX = f"session:{VIN}"
HOME = f"client:{VIN}"


async def make(store: Store, client_id: str = VIN) -> int:
    return await store.mailboxes.make(f"session:{client_id}")


def subscribe(batch: Batch, filter_: str, qos: int = 1, *, generation: int = 0, **options: Any) -> None:
    record = records.subscription_record(Subscription(filter_, qos, **options), generation)
    batch.put("subscription", records.pair(VIN, filter_), record)


async def subscribed(store: Store, *filters: str, qos: int = 1, generation: int = 0, **options: Any) -> None:
    batch = Batch()
    for filter_ in filters:
        subscribe(batch, filter_, qos, generation=generation, **options)
    await store.write(batch)


def offer(
    batch: Batch,
    topic: str,
    payload: bytes = b"x",
    *,
    qos: int = 1,
    retain: bool = False,
    own: bool = False,
    keep_qos0: bool = True,
    bound: Bound | None = None,
    now: float = NOW,
    expires_at: float = 0.0,
    token: bytes = b"",
) -> None:
    body, _ = records.offered_body(Message(topic, payload, qos, retain, "p", expires_at=expires_at or None))
    draft = Draft(body, payload, expires_at=expires_at, token=token)
    batch.offer(VIN, topic, draft, now, bound or Bound(), qos=qos, retain=retain, own=own, keep_qos0=keep_qos0)


async def offered_to(store: Store, topic: str, payload: bytes = b"x", **how: Any) -> Appended:
    batch = Batch()
    offer(batch, topic, payload, **how)
    [answer] = (await store.write(batch)).appended
    assert MAILBOX == answer.owner
    return answer


async def found_of(store: Store) -> list[tuple[str, int, bool, tuple[int, ...], bytes]]:
    """What lies in the mailbox, as the broker reads it."""
    read = [(records.ENTRY.decode(entry.body), entry.payload) for entry in await entries(store, MAILBOX)]
    return [(one.topic, one.granted, one.retained, one.identifiers, payload) for one, payload in read]


async def test_who_has_a_filter_that_matches_gets_it(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, f"agent/{VIN}/#", generation=generation)
    assert None is (await offered_to(store, "agent/other/cmd")).offered
    first = await offered_to(store, f"agent/{VIN}/cmd", b"first")
    second = await offered_to(store, f"agent/{VIN}/cmd", PAYLOAD)
    assert Offered(1, False, ()) == first.offered == second.offered
    assert (first.position + 1, "") == (second.position, second.attached)
    assert [(f"agent/{VIN}/cmd", 1, False, (), b"first"), (f"agent/{VIN}/cmd", 1, False, (), PAYLOAD)] == (
        await found_of(store)
    )
    assert [] == await store.check()


async def test_there_is_nothing_for_who_has_no_filter(store: Store) -> None:
    """Nor a mailbox, nor a payload, after a while."""
    answer = await offered_to(store, f"agent/{VIN}/cmd", PAYLOAD)
    assert (None, 0, "") == (answer.offered, answer.position, answer.attached)
    assert 0 == (await store.mailboxes.info(MAILBOX)).generation
    await sweep(store, NOW + 3 * HOUR)
    assert (0, 0) == await store.blobs.count()


async def test_all_that_match_are_one_copy(store: Store) -> None:
    generation = await make(store)
    batch = Batch()
    subscribe(batch, "agent/+/cmd", 0, generation=generation, identifier=7)
    subscribe(batch, f"agent/{VIN}/#", 2, generation=generation, identifier=268_435_455)
    subscribe(batch, f"agent/{VIN}/cmd", 1, generation=generation, retain_as_published=True)
    subscribe(batch, "agent/+/other", 2, generation=generation, identifier=9)
    subscribe(batch, f"$share/g/agent/{VIN}/#", 2, generation=generation, identifier=10)
    for number in range(20):
        subscribe(batch, f"+/{VIN}/cmd" + "/#" * (number == 0) + "/x" * number, 0, generation=generation, identifier=99)
    await store.write(batch)
    answer = await offered_to(store, f"agent/{VIN}/cmd", qos=2, retain=True)
    assert Offered(2, True, (99, 7, 268_435_455)) == answer.offered
    assert [(f"agent/{VIN}/cmd", 2, True, (99, 7, 268_435_455), b"x")] == await found_of(store)
    assert Offered(1, False, (99, 7, 268_435_455)) == (await offered_to(store, f"agent/{VIN}/cmd", qos=1)).offered


async def test_many_identifiers_are_told(store: Store) -> None:
    """More than fit into the short form of an array, of all sizes."""
    generation = await make(store)
    batch = Batch()
    levels = [f"l{number}" for number in range(20)]
    topic = "/".join(levels)
    filters = ["/".join([*levels[:number], "+", *levels[number + 1 :]]) for number in range(20)]
    for number, filter_ in enumerate(filters):
        subscribe(batch, filter_, generation=generation, identifier=3**number % 268_435_456 + 1)
    await store.write(batch)
    identifiers = tuple(3 ** filters.index(filter_) % 268_435_456 + 1 for filter_ in sorted(filters))
    assert Offered(1, False, identifiers) == (await offered_to(store, topic)).offered
    assert [(topic, 1, False, identifiers, b"x")] == await found_of(store)


async def test_what_a_client_has_published_itself(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, "a/#", qos=2, generation=generation, no_local=True, identifier=1)
    assert None is (await offered_to(store, "a/b", own=True)).offered
    await subscribed(store, "a/+", qos=1, generation=generation, identifier=2)
    assert Offered(1, False, (2,)) == (await offered_to(store, "a/b", qos=2, own=True)).offered
    assert Offered(2, False, (1, 2)) == (await offered_to(store, "a/b", qos=2)).offered


async def test_filters_of_an_earlier_session_do_not_count(store: Store) -> None:
    """A session ends in steps: its mailbox goes first, then its records."""
    old = await make(store)
    await subscribed(store, "a/#", generation=old)
    await offered_to(store, "a/b", b"for the old one")
    await store.mailboxes.forget(MAILBOX)
    assert None is (await offered_to(store, "a/b")).offered, "there is no mailbox"
    new = await make(store)
    assert new > old
    assert None is (await offered_to(store, "a/b")).offered, "nobody has asked the new session"
    await subscribed(store, "a/+", qos=0, generation=new)
    answer = await offered_to(store, "a/b")
    assert Offered(0, False, ()) == answer.offered
    assert [("a/b", 0, False, (), b"x")] == await found_of(store)


async def test_a_record_without_a_generation_is_of_any(store: Store) -> None:
    """A node by itself writes none; and a mailbox is made if there is none."""
    await subscribed(store, "a/#")
    assert Offered(1, False, ()) == (await offered_to(store, "a/b")).offered
    assert 1 == len(await found_of(store))


async def test_qos_0_is_for_those_who_are_away(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, "a/#", generation=generation)
    stored = await offered_to(store, "a/b", qos=0)
    assert (Offered(0, False, ()), True) == (stored.offered, stored.position > 0)
    left = await offered_to(store, "a/b", qos=0, keep_qos0=False)
    assert (Offered(0, False, ()), 0, "") == (left.offered, left.position, left.attached)
    await store.coordination.attach(MAILBOX, "node-b")
    live = await offered_to(store, "a/b", qos=0)
    assert (Offered(0, False, ()), 0, "node-b") == (live.offered, live.position, live.attached)
    durable = await offered_to(store, "a/b", qos=1)
    assert ("node-b", True) == (durable.attached, durable.position > 0)
    assert [0, 1] == [granted for _, granted, *_ in await found_of(store)]


async def test_qos_0_goes_first_when_there_is_no_room(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, "a/#", generation=generation)
    bound = Bound(2)
    await offered_to(store, "a/b", b"1", bound=bound)
    droppable = await offered_to(store, "a/b", b"2", qos=0, bound=bound)
    third = await offered_to(store, "a/b", b"3", bound=bound)
    assert (droppable.position,) == third.dropped
    fourth = await offered_to(store, "a/b", b"4", bound=bound)
    assert (third.position - 2,) == fourth.dropped
    assert [b"3", b"4"] == [payload for *_, payload in await found_of(store)]
    spared = Batch()
    spared.spare(MAILBOX, -1)
    await store.write(spared)
    assert (await offered_to(store, "a/b", b"5", bound=bound)).over
    assert 0 == (await offered_to(store, "a/b", PAYLOAD, bound=Bound(0, 100))).position
    assert [] == await store.check()


async def test_a_repetition_is_known_by_its_token(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, "a/#", qos=2, generation=generation)
    first = await offered_to(store, "a/b", qos=2, token=b"guid")
    again = await offered_to(store, "a/b", qos=2, token=b"guid")
    assert (first.position, False, True) == (again.position, first.repeated, again.repeated)
    by_name = await append(store, MAILBOX, Draft(b"", token=b"guid"))
    assert (first.position, True) == (by_name.position, by_name.repeated), "it is one memory with that of `append`"
    assert 1 == len(await entries(store, MAILBOX))


async def test_a_message_expires(store: Store) -> None:
    generation = await make(store)
    await subscribed(store, "a/#", generation=generation)
    await offered_to(store, "a/b", PAYLOAD, expires_at=NOW + 10)
    assert [NOW + 10] == [entry.expires_at for entry in await entries(store, MAILBOX)]
    assert [] == await entries(store, MAILBOX, NOW + 10)
    steps = await sweep(store, NOW + 11)
    assert [(MAILBOX, 1)] == [(owner, 1) for step in steps for owner, _ in step.expired]
    assert [] == await store.check()


async def test_what_was_written_before_in_the_same_turn_counts(store: Store) -> None:
    generation = await make(store)
    commits = []
    for number in range(3):
        batch = Batch()
        subscribe(batch, f"a/{number}", generation=generation)
        commits.append(store.write(batch))
        asking = Batch()
        offer(asking, f"a/{number}")
        offer(asking, "a/none")
        commits.append(store.write(asking))
    removing = Batch()
    removing.delete("subscription", records.pair(VIN, "a/1"))
    offer(removing, "a/1")
    offer(removing, "a/2")
    answers = [one for commit in [*commits, store.write(removing)] for one in (await commit).appended]
    assert [True, False, True, False, True, False, False, True] == [one.offered is not None for one in answers]


async def test_answers_stand_in_the_order_of_the_calls(store: Store) -> None:
    """Beside those of appends, in one batch."""
    generation = await make(store)
    await subscribed(store, "a/#", generation=generation)
    batch = Batch()
    batch.append(["x", "y"], Draft(b"1", PAYLOAD), NOW)
    offer(batch, "a/b", PAYLOAD)
    batch.append([MAILBOX], Draft(b"2"), NOW)
    offer(batch, "b")
    answers = (await store.write(batch)).appended
    assert ["x", "y", MAILBOX, MAILBOX, MAILBOX] == [answer.owner for answer in answers]
    assert (answers[2].position + 1, None, 0) == (answers[3].position, answers[4].offered, answers[4].position)
    assert [] == await store.check()


LEVELS = ["", "a", "b", "ä", "车", "%", "a+"]


def made(random_: random.Random) -> Iterator[tuple[list[str], str]]:
    """Filters and a topic."""
    for _ in range(60):
        topic = "/".join(random_.choice(LEVELS[:6]) for _ in range(random_.randint(1, 4))) or "/"
        filters = set()
        for _ in range(random_.randint(1, 6)):
            levels = [random_.choice([*topic.split("/"), *LEVELS[:6], "+", "+"]) for _ in range(random_.randint(1, 4))]
            filters.add("/".join(levels + ["#"] * (random_.random() < 0.4)) or "+")
        yield sorted(filters), topic


@pytest.mark.parametrize("seed", range(3))
async def test_every_engine_decides_alike(store: Store, seed: int) -> None:
    random_ = random.Random(seed)
    generation = await make(store)
    for filters, topic in made(random_):
        batch = Batch()
        for filter_ in filters:
            options = {"no_local": random_.random() < 0.3, "retain_as_published": random_.random() < 0.5}
            of = random_.choice([generation, generation, generation, 0, generation + 1])
            subscribe(batch, filter_, random_.randint(0, 2), generation=of, identifier=random_.randint(0, 3), **options)
        how: dict[str, Any] = {
            "qos": random_.randint(0, 2),
            "retain": random_.random() < 0.5,
            "own": random_.random() < 0.3,
        }
        await store.write(batch)
        stored = await store.records.of_home("subscription", HOME, NOW)
        asked = Offer(VIN, topic, how["qos"], bool(how["retain"]), bool(how["own"]), True, Draft(b""), NOW, Bound())
        assert offered(asked, HOME, stored, generation) == (await offered_to(store, topic, **how)).offered, filters
        for key in stored:
            await store.records.delete("subscription", key)
