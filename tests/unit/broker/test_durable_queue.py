"""The way of messages from the store to a client's window, without a store: a dictionary that answers when asked to."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker.durable_queue import AHEAD, IDS_OF_QUEUE, DurableQueue, id_of
from motorcade.broker.frames import Frame, build
from motorcade.broker.limits import SessionOptions
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.session_records import ENTRY
from motorcade.broker.session_store import SessionStore
from motorcade.broker.stats import Stats
from motorcade.broker.window_state import Lag
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.hooks import Hooks
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Publish, Pubrel
from motorcade.storage.ports import SPARE_ALL, Entry

NOW = 1_700_000_000.0
PUBLISHER = ClientInfo("p")


def entry_of(position: int, body: bytes, payload: bytes, mark: int = 0) -> Entry:
    return Entry(position, body, payload, b"", NOW, 0.0, mark)


class Store:
    """What `SessionStore` does for one queue."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.last = 0
        self.reads: deque[tuple[DurableQueue, int, int, int, int]] = deque()
        self.acked: list[int] = []
        self.reader = self.writer = self.acks = self
        self.commits: list[Commit[None]] = []

    def fetch(self, queue: DurableQueue, limit: int) -> None:
        self.reads.append((queue, queue.epoch, queue.cursor, limit, queue.tail))

    def hurry(self, queue: DurableQueue) -> None:
        assert queue.open
        self.acked += queue.acked.difference(self.acked)

    def mark(self, queue: DurableQueue, position: int, mark: int) -> Commit[None]:
        assert queue.owner == "session:c"
        if position in self.entries:
            entry = self.entries[position]
            self.entries[position] = entry_of(position, entry.body, entry.payload, mark)
        self.commits.append(Commit())
        return self.commits[-1]

    # -- what the test does

    def append(self, qos: int = 1, payload: bytes | None = None) -> int:
        """One more entry; its position."""
        self.last += 1
        message = Message("t", b"%d" % self.last if payload is None else payload, qos)
        body, _ = ENTRY.encode(message, qos)
        self.entries[self.last] = entry_of(self.last, body, message.payload)
        return self.last

    def answer(self) -> None:
        """The oldest read is answered, if the connection that asked is still there."""
        queue, epoch, after, limit, tail = self.reads.popleft()
        if queue.serves(epoch):
            found = [entry for position, entry in sorted(self.entries.items()) if position > after]
            queue.fetched(found[:limit], limit, tail)
            queue.session.pump(NOW)

    def settle(self, queue: DurableQueue) -> None:
        """Acknowledgements are stored."""
        acks, self.acked = self.acked, []
        for position in acks:
            self.entries.pop(position, None)
        queue.settled(acks)


class Client:
    """A durable session and its store."""

    def __init__(self, options: SessionOptions | None = None, *, restored: bool = False) -> None:
        self.store = Store()
        shared = SessionContext(options or SessionOptions(), Hooks(), Stats())
        self.session = Session(shared, ClientInfo("c", version=5), NOW)
        self.queue = self.session.durable = DurableQueue(
            self.session, cast("SessionStore", self.store), restored=restored, sent_to=0
        )
        self._decoder = codec.Decoder(5)

    def connect(self, limit: int = 32) -> None:
        self.session.attach(5, limit, 0, 0)
        self.session.resend(NOW)
        self.session.pump(NOW)

    def arrive(self, position: int) -> None:
        """An entry is stored; it is told of with its message, as it came."""
        entry = self.store.entries.get(position)
        payload = entry.payload if entry is not None else b""
        self.queue.arrived(position, frame_of(payload), len(payload))
        self.session.pump(NOW)

    def publish(self, payload: bytes | None = None) -> int:
        """A message on its whole way."""
        position = self.store.append(1, payload)
        self.queue.expect(len(self.store.entries[position].payload))
        self.arrive(position)
        return position

    def take(self) -> list[Publish | Pubrel]:
        data = b"".join(self.session.out)
        self.session.out.clear()
        return [packet for packet in self._decoder.feed(data) if isinstance(packet, Publish | Pubrel)]

    def acknowledge(self, number: int) -> None:
        self.session.acknowledged(number)
        self.session.pump(NOW)


def frame_of(payload: bytes) -> Frame:
    return build(b"t", b"\x00" + payload, 1, PUBLISHER)


def test_ids_follow_from_positions() -> None:
    numbers = [id_of(position) for position in range(123_456, 123_456 + IDS_OF_QUEUE)]
    assert len(set(numbers)) == IDS_OF_QUEUE
    assert min(numbers) == 1 and max(numbers) == IDS_OF_QUEUE


def test_what_comes_next_is_not_read_from_the_store() -> None:
    client = Client()
    client.connect()
    client.store.answer()
    for _ in range(3):
        client.publish()
    assert [packet.packet_id for packet in client.take()] == [2, 3, 4]
    assert not client.store.reads


def test_ids_are_compared_with_older_ones_once_in_a_long_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through all unsettled acknowledgements for each message would take half of the time of a drain."""
    looked: list[int] = []
    number_of = DurableQueue._number_of

    def counted(queue: DurableQueue, position: int) -> int:
        looked.append(position)
        return number_of(queue, position)

    monkeypatch.setattr(DurableQueue, "_number_of", counted)
    client = Client()
    client.connect()
    client.store.answer()
    for _ in range(20):
        client.publish()
    assert len(client.take()) == 20
    assert looked == [1]


def test_what_comes_out_of_turn_is_read() -> None:
    """Somebody else's commit was faster."""
    client = Client()
    client.connect()
    client.store.answer()
    for _ in range(2):
        client.store.append()
        client.queue.expect(1)
    client.arrive(2)
    assert not client.take()
    client.store.answer()
    client.arrive(1)
    assert [packet.packet_id for packet in client.take()] == [2, 3]
    assert not client.store.reads


def test_only_so_much_is_read_ahead() -> None:
    client = Client(SessionOptions(queue=0))
    for _ in range(1000):
        client.store.append()
    client.connect(limit=1)
    for number in range(1, 1001):
        while client.store.reads:
            assert client.store.reads[0][3] <= AHEAD
            client.store.answer()
        (packet,) = client.take()
        assert isinstance(packet, Publish) and packet.payload == b"%d" % number
        assert client.queue.backlog <= 2 * AHEAD
        client.acknowledge(packet.packet_id)
        client.store.settle(client.queue)
    assert client.queue.backlog == 0 and not client.queue.pending


def test_large_entries_are_read_one_by_one() -> None:
    client = Client()
    for _ in range(40):
        client.store.append(1, b"x" * 300_000)
    client.connect(limit=2)
    limits = []
    for _ in range(40):
        while client.store.reads:
            limits.append(client.store.reads[0][3])
            client.store.answer()
        for packet in client.take():
            client.acknowledge(packet.packet_id)
    assert limits[0] > 1 and set(limits[1:]) == {1}


def test_messages_from_elsewhere_need_no_mark_and_have_other_ids() -> None:
    client = Client()
    client.connect()
    client.store.answer()
    client.publish()
    client.session.offer(build(b"r", b"\x00retained", 2, None))
    ids = [packet.packet_id for packet in client.take()]
    assert ids[0] == 2 and ids[1] > IDS_OF_QUEUE
    assert client.queue.release(ids[1]) is None
    assert client.queue.release(ids[0]) is client.store.commits[0]


def test_an_entry_that_cannot_be_read_does_not_stop_the_others() -> None:
    client = Client()
    for _ in range(3):
        client.store.append()
    client.store.entries[2] = entry_of(2, b"\xc1 what is this", b"")
    client.connect()
    client.store.answer()
    assert [packet.packet_id for packet in client.take()] == [2, 4]
    assert client.store.acked == [2]


def test_an_expired_message_is_passed_over() -> None:
    client = Client()
    client.store.append()
    message = Message("t", b"late", 1, expires_at=NOW - 1)
    client.store.entries[1] = entry_of(1, ENTRY.encode(message, 1)[0], b"late")
    client.store.append()
    client.connect()
    client.store.answer()
    assert [packet.packet_id for packet in client.take()] == [3]
    assert client.store.acked == [1] and client.session.shared.stats.dropped["expired"] == 1


def test_what_is_in_the_window_does_not_count_as_queue() -> None:
    for restored in (False, True):
        client = Client(SessionOptions(queue=10, window=4, queue_bytes=1000), restored=restored)
        if restored:
            assert client.queue.bound.entries == 14
        client.connect(limit=4)
        client.store.answer()
        assert client.queue.bound.entries == 14
        for _ in range(3):
            client.publish(b"x" * 500)
        assert client.queue.bound.size_bytes >= 1000 + 3 * 500
        client.session.detach()
        assert client.queue.bound.entries == 13 and client.queue.bound.size_bytes >= 1000 + 3 * 500


def test_positions_that_the_store_passes_over_do_not_count_as_queue() -> None:
    """A server that may have forgotten some goes on far above. The client is no more behind than before."""
    client = Client(SessionOptions(queue=10))
    client.connect()
    client.store.answer()
    client.publish()
    client.store.last += 10**12
    client.store.append()
    client.queue.expect(1)
    client.arrive(client.store.last)
    assert 1 == client.queue.backlog
    client.publish()
    assert Lag.NONE is client.session.lag
    client.store.answer()
    assert 3 == len(client.take()) and 0 == client.queue.backlog
    client.publish()
    assert 1 == len(client.take()) and not client.store.reads


def test_a_client_that_has_got_everything_has_caught_up_whatever_was_pushed_out() -> None:
    """Else publishers would wait for it again and again, or never."""
    client = Client(SessionOptions(queue=10, queue_bytes=10_000, window=2, patience=1))
    client.connect(limit=2)
    client.store.answer()
    for _ in range(300):
        client.publish(b"x" * 1000)
    assert client.session.behind
    for position in range(3, 290):  # the store has pushed them out
        client.store.entries.pop(position, None)
    for _ in range(200):
        while client.store.reads:
            client.store.answer()
        for packet in client.take():
            client.acknowledge(packet.packet_id)
        client.store.settle(client.queue)
    assert not client.store.entries
    assert client.queue.backlog == 0 and client.queue.backlog_size == 0
    assert client.session.lag is Lag.NONE


@given(
    st.lists(
        st.sampled_from(("append", "arrive", "arrive", "answer", "ack", "ack", "settle", "reconnect")), max_size=80
    ),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_every_entry_is_sent_once_per_connection_in_order(steps: list[str], limit: int, random: object) -> None:
    """Whatever comes when: arrivals out of turn, late reads, acknowledgements in any order, new connections."""
    client = Client(SessionOptions(queue=0, window=5))
    flying: list[int] = []  # stored, but nobody was told yet
    open_: dict[int, int] = {}  # packet id, position
    done: set[int] = set()
    sent: list[int] = []  # positions, by this connection

    def read() -> None:
        for packet in client.take():
            assert isinstance(packet, Publish)
            position = int(packet.payload)
            assert packet.packet_id == id_of(position) and packet.packet_id not in open_
            assert position not in done and position > max(sent, default=0)
            sent.append(position)
            open_[packet.packet_id] = position
            assert len(open_) <= limit

    client.connect(limit)
    for step in [*steps, "reconnect"]:
        if step == "append":
            flying.append(client.store.append())
            client.queue.expect(1)
        elif step == "arrive" and flying:
            client.arrive(flying.pop(0 if random.random() < 0.8 else -1))  # type: ignore[attr-defined]
        elif step == "answer" and client.store.reads:
            client.store.answer()
        elif step == "ack" and open_:
            number = random.choice(list(open_))  # type: ignore[attr-defined]
            done.add(open_.pop(number))
            client.acknowledge(number)
        elif step == "settle":
            client.store.settle(client.queue)
        elif step == "reconnect":
            client.session.detach()
            client.take()
            sent.clear()
            open_.clear()
            client.connect(limit)
        read()
    for _ in range(3 * len(client.store.entries) + 10):
        if flying:
            client.arrive(flying.pop(0))
        while client.store.reads:
            client.store.answer()
        read()
        for number in list(open_):
            done.add(open_.pop(number))
            client.acknowledge(number)
        client.store.settle(client.queue)
    assert done == set(range(1, client.store.last + 1))
    assert not client.store.entries and not client.queue.acked and client.queue.coming == 0


def test_nothing_is_read_while_an_append_may_still_push_it_out() -> None:
    """What was appended in the client's absence drops what waited then; on Redis it may come after CONNACK."""
    client = Client(SessionOptions(queue=2))
    client.store.append()
    assert client.queue.expect(1) == 0
    client.connect()
    assert not client.store.reads and not client.take()
    client.arrive(0)
    client.session.pump(NOW)
    client.store.answer()
    assert [b"1"] == [packet.payload for packet in client.take() if isinstance(packet, Publish)]
    assert client.queue.expect(1) == SPARE_ALL
    client.session.detach()
    assert client.queue.expect(1) == 1
