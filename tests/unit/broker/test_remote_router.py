"""What others want: which filters match, who is gone, what an entry costs, and cached routes in a storm of changes."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.broker.pubsub import Route
from motorcade.broker.remote_router import DURABLE, LIVE, REMOTE_BYTES, FilterTable, RemoteRouter
from motorcade.broker.router import STORM, Routes
from motorcade.broker.subscribers import SUBSCRIBER_BYTES, Options, Subscriber, Subscribers
from motorcade.commit import Commit
from motorcade.core.subscription import Subscription
from motorcade.core.trie import Matching
from motorcade.core.vin import make_vin
from motorcade.extension.cluster import Peer
from tests.support.members import MemberNode, Members
from tests.unit.broker.test_router import Answer
from tests.unit.core.matching import filters, slow_match, topics

MANY = 20_000

some_filters = st.lists(filters() | topics, max_size=12)


class There:
    """A peer to which nothing is sent."""

    full = False

    def __init__(self, name: str) -> None:
        self.id = name

    def __repr__(self) -> str:
        return self.id

    def send(self, kind: str, body: bytes, *, droppable: bool = False) -> None: ...

    def confirm(self) -> Commit[None]:
        return Commit.stored(None)

    room = confirm


# --- filters and topics -------------------------------------------------------------------------------------------


@given(some_filters, some_filters, st.lists(topics, max_size=5))
def test_the_table_finds_what_matches(put: list[str], removed: list[str], asked: list[str]) -> None:
    table: FilterTable[int] = FilterTable()
    wanted = {filter_: number for number, filter_ in enumerate(put)}
    for filter_, number in wanted.items():
        table.set(filter_, -1)
        table.set(filter_, number)
    for filter_ in removed:
        table.remove(filter_)
        wanted.pop(filter_, None)
    assert wanted == {filter_: table.get(filter_) for filter_ in table.filters()}
    for topic in asked:
        expected = {filter_: number for filter_, number in wanted.items() if slow_match(filter_, topic)}
        found = list(table.found(topic))
        assert expected == dict(found) and len(found) == len(expected)
        assert table.heard(topic) == bool(expected)
        if topic[0] == "$":
            level = topic.split("/")[0]
            assert table.heard_below(level) == any(filter_.split("/")[0] == level for filter_ in wanted)
    for filter_ in wanted:
        table.remove(filter_)
    assert (0, 0, {}) == (len(table), table.nodes, dict(table._special))
    assert 0 == table._pluses == table._hashes


@given(some_filters, some_filters, some_filters, topics)
def test_what_comes_and_goes_while_a_topic_is_compared(
    before: list[str], come: list[str], gone: list[str], topic: str
) -> None:
    """What was there all the time is found once, what is gone is not, what has come is."""
    table: FilterTable[int] = FilterTable()
    for filter_ in before:
        table.set(filter_, 1)
    search: Matching[str] = table.begin(topic)
    done = search.step(1)
    table.searches.append(search)
    for filter_ in come:
        table.set(filter_, 2)
    for filter_ in gone:
        table.remove(filter_)
    while not done:
        done = search.step(1)
    table.searches.remove(search)
    left = (dict.fromkeys(before, 1) | dict.fromkeys(come, 2)).items()
    expected = {filter_: value for filter_, value in left if filter_ not in gone and slow_match(filter_, topic)}
    found = list(table.found(topic, search))
    assert expected == dict(found) and len(found) == len(expected)


# --- peers --------------------------------------------------------------------------------------------------------


def router(*peers: Peer, changed: Callable[[str], None] = lambda _: None) -> RemoteRouter:
    made = RemoteRouter(changed, lambda: changed("*"))
    for peer in peers:
        made.join(peer)
    return made


def test_flags_of_all_filters_that_match_count() -> None:
    peers: list[Peer] = [There("a"), There("b")]
    a, b = peers
    remote = router(a, b)
    remote.tell(a, "t/+", DURABLE)
    remote.tell(a, "t/#", DURABLE)
    remote.tell(b, "t/1", DURABLE)
    every, live = remote.resolve("t/1")
    assert every is not None and live is None
    assert ({a, b}, True) == (set(every.peers), every.droppable)
    remote.tell(a, "+/1", LIVE)
    every, live = remote.resolve("t/1")
    assert every is not None and live is not None
    assert ({a, b}, (a,), False) == (set(every.peers), live.peers, live.droppable)
    assert (None, None) == remote.resolve("u")
    remote.tell(a, "+/1", 0)
    assert remote.resolve("t/1")[1] is None


def test_the_same_peers_are_one_object() -> None:
    """The fast path sends neighbours with the same receivers together."""
    peer = There("a")
    remote = router(peer)
    for topic in ("x", "y"):
        remote.tell(peer, topic, LIVE)
    assert remote.resolve("x")[0] is remote.resolve("y")[0]
    assert remote.resolve("x")[1] is remote.resolve("y")[1]


def test_a_peer_that_is_gone_wants_nothing_from_that_moment_on() -> None:
    told: list[str] = []
    gone, stays = There("gone"), There("stays")
    remote = router(gone, stays, changed=told.append)
    for number in range(10):
        remote.tell(gone, f"t/{number}", LIVE)
        remote.tell(stays, f"t/{number % 5}", DURABLE)
    told.clear()
    remote.leave(gone)
    remote.tell(gone, "t/7", LIVE)
    assert ["*"] == told
    assert remote.resolve("t/7") == (None, None)
    every, live = remote.resolve("t/1")
    assert every is not None and every.peers == (stays,) and live is None
    assert 10 == len(remote.table), "the rest is taken away in steps"
    steps = 1
    while remote.sweep(3):
        steps += 1
    assert (5, 4) == (len(remote.table), steps)
    assert [((stays, DURABLE),)] == list(remote._shared)
    remote.leave(gone)
    assert not remote.sweep()


def test_a_filter_that_comes_while_entries_of_another_peer_are_taken_away() -> None:
    gone, stays = There("gone"), There("stays")
    remote = router(gone, stays)
    for number in range(4):
        remote.tell(gone, f"t/{number}", LIVE)
    remote.leave(gone)
    remote.sweep(1)
    remote.tell(stays, "t/0", LIVE)
    remote.tell(stays, "new", LIVE)
    while remote.sweep(1):
        pass
    assert {"t/0", "new"} == set(remote.table.filters())


# --- what it costs ------------------------------------------------------------------------------------------------


def grown(work: Callable[[], object]) -> int:
    """Bytes that are there afterwards and were not before."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + 0 * id(kept)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["agent/{}/state", "agent/{}/#", "agent/{}/proxy/request/+"])
def test_a_filter_of_a_peer_is_small(form: str) -> None:
    peer = There("n2~2")

    def tell() -> RemoteRouter:
        remote = router(peer)
        for number in range(MANY):
            remote.tell(peer, form.format(make_vin(number)), LIVE)
        return remote

    assert grown(tell) / MANY <= REMOTE_BYTES


class NoGroups:
    def join_group(self, text: str, subscriber: Subscriber, options: Options) -> None: ...

    def leave_group(self, text: str, subscriber: Subscriber) -> None: ...


#: Tables are as full as they become just before they grow, and as empty as they are then, and in between.
SIZES = (11_000, 13_000, 16_000, 21_000)


@pytest.mark.parametrize("form", ["agent/{}/#", "agent/{}/proxy/request/+"])
def test_a_sleeping_session_is_small(form: str) -> None:
    """On average, each with a mailbox of another generation."""

    def put(count: int) -> Subscribers:
        subscribers = Subscribers(lambda _: None, NoGroups(), lambda client_id: hash(client_id) % 64)
        for number in range(count):
            vin = make_vin(number)
            subscribers.put(vin, 1000 + number, Subscription(form.format(vin), 1))
        return subscribers

    assert sum(grown(partial(put, count)) / count for count in SIZES) / len(SIZES) <= SUBSCRIBER_BYTES


# --- cached routes ------------------------------------------------------------------------------------------------

few_topics = ("a", "a/b", "b", "$s/a")
few_filters = st.sampled_from(("a", "a/b", "b", "a/+", "+", "#", "+/b", "$s/a", "$s/#", "+/+"))
numbers = st.integers(0, 2)
changes = st.one_of(
    st.tuples(st.just("tell"), numbers, few_filters, st.integers(0, 3)),
    st.tuples(st.just("put"), numbers, few_filters, numbers),
    st.tuples(st.just("drop"), numbers, few_filters, numbers),
    st.tuples(st.just("forget"), numbers, few_filters, numbers),
    st.tuples(st.just("count"), numbers, few_filters, numbers),
    st.tuples(st.just("share"), numbers, few_filters, numbers),
    st.tuples(st.just("leave"), numbers, few_filters, numbers),
    st.tuples(st.just("sweep"), numbers, few_filters, numbers),
)


def told(route: Route) -> object:
    """What a route says of receivers elsewhere."""
    if route.elsewhere is None:
        return None
    elsewhere = route.elsewhere
    return (
        elsewhere.all and {peer.id for peer in elsewhere.all.peers},
        elsewhere.live and {peer.id for peer in elsewhere.live.peers},
        sorted((target.session.client_id, target.qos) for target in elsewhere.subscribers),
        sorted(group.text for group in elsewhere.groups),
        (route.kept, route.beyond, bool(route.lasting)),
    )


def change(node: MemberNode, peers: list[Peer], what: tuple[str, int, str, int]) -> None:
    kind, number, filter_, value = what
    relay, peer, client = node.relay, peers[number], f"c{number}"
    shared = f"$share/g/{filter_}"
    if kind == "tell":
        relay.router.tell(peer, filter_, value)
    elif kind in ("put", "share"):
        relay.subscribers.put(client, 1 + value // 2, Subscription(filter_ if kind == "put" else shared, value))
    elif kind == "drop":
        relay.subscribers.drop(client, filter_ if value else shared)
    elif kind == "forget":
        relay.subscribers.forget(client, value)
    elif kind == "count":
        node.state.pubsub.count_group(shared, peer, value, 0)
    elif kind == "leave":
        relay.router.leave(peer)
        node.state.pubsub.leave_groups(peer)
        if value:
            peers[number] = There(peer.id)  # the next incarnation
            relay.router.join(peers[number])
    else:
        relay.router.sweep(value)


@given(st.lists(changes, min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_a_cached_route_is_right_or_marked_stale(steps: list[tuple[str, int, str, int]]) -> None:
    members = Members(1, lasting=False)
    (node,) = members.nodes
    pubsub = node.state.pubsub
    peers: list[Peer] = [There(f"p{number}") for number in range(3)]
    for peer in peers:
        node.relay.router.join(peer)
    held = [pubsub.route(topic) for topic in few_topics]
    for step in steps:
        change(node, peers, step)
        for route in held:
            assert route.stale or told(route) == told(pubsub._resolve(route.topic)), step
        held = [route for route in held if not route.stale] + [pubsub.route(topic) for topic in few_topics]
    for number, peer in enumerate(peers):
        node.relay.router.leave(peer)
        pubsub.leave_groups(peer)
        node.relay.subscribers.forget(f"c{number}")
    while node.relay.router.sweep():
        pass
    assert (0, 0, 0) == (len(node.relay.router.table), len(node.relay.subscribers.table), pubsub.filter_nodes)
    assert 0 == node.relay.subscribers.subscriptions == len(node.relay.subscribers)
    assert not pubsub._router._exact and not pubsub._far_groups


def test_a_storm_of_filters_empties_the_cache_instead_of_walking_through_it_again_and_again() -> None:
    routes: Routes[Answer] = Routes(10_000, 1 << 30)
    for number in range(1000):
        routes.put(f"t/{number}", Answer(f"t/{number}"))
    looked, storm = 0, 0
    while routes.table:
        storm += 1
        routes.invalidate(f"+/none{storm}")
        looked += routes._tree.looked_at
    assert looked <= STORM + 1000
    for number in range(10_000):  # on an empty cache they cost nothing
        routes.invalidate(f"+/none{number}")
    kept = Answer("t/1")
    routes.put("t/1", kept)
    routes.invalidate("+/2")
    assert not kept.stale


def test_filters_that_come_now_and_then_leave_the_others_routes_alone() -> None:
    """Each topic that is cached lets filters look at some more levels."""
    routes: Routes[Answer] = Routes(500, 1 << 30)
    for number in range(500):
        routes.put(f"t/{number}", Answer(f"t/{number}"))
    for number in range(2000):
        for other in range(10):
            routes.put(f"u/{number}/{other}", Answer("u"))
        routes.invalidate(f"+/none{number}")
        assert len(routes.table) >= 490
