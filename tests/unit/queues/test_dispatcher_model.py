"""A dispatcher under random clients, windows, answers and clocks, beside a model that knows only what may happen.

What must hold at every moment:

    - a message that was appended is in the store until it is acknowledged, buried, replaced or too old: nothing is lost
    - nobody is sent a message that another one holds, unless that one has exceeded the time to acknowledge
    - nobody is given more than it was promised (the desk asserts it)
    - a consumer that is alone, and neither refuses nor leaves anything, gets everything in order
    - no message is sent more often than `max_attempts`, nor after it was acknowledged
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motorcade.plugins.queues.dispatcher import Item, State
from motorcade.plugins.queues.strategy import Random
from tests.unit.queues.desk import Client, Desk

TIMEOUT = 10.0
ATTEMPTS = 4


class Machine(RuleBasedStateMachine):
    """Clients come and go, take, acknowledge, refuse and keep silent."""

    desk: Desk

    @initialize(
        strategy=st.sampled_from(["round_robin", "random", "least_inflight"]),
        levels=st.integers(1, 3),
        attempts=st.sampled_from([0, ATTEMPTS]),
    )
    def begin(self, strategy: str, levels: int, attempts: int) -> None:
        self.levels = levels
        self.attempts = attempts
        self.desk = Desk(
            strategy=strategy, priorities=levels, max_attempts=attempts, ack_timeout=TIMEOUT, redispatch_delay=0.5
        )
        if strategy == "random":  # of the same chance each time, or a failure could not be repeated
            self.desk.dispatcher._ready = Random(random.Random(0))
        self.desk.confirm = False
        self.appended: set[tuple[int, int]] = set()
        self.done: set[tuple[int, int]] = set()  # acknowledged by somebody
        self.replaced: set[tuple[int, int]] = set()
        self.sent: dict[tuple[int, int], int] = {}
        self.holding: dict[tuple[int, int], dict[Client, float]] = {}  # since when
        self.names = 0

    # -- the world

    @rule(number=st.integers(1, 40), level=st.integers(0, 2))
    def append(self, number: int, level: int) -> None:
        level = min(level, self.levels - 1)
        before = set(self.desk.entries)
        self.desk.append(number, level)
        self.appended |= set(self.desk.entries) - before

    @precondition(lambda self: len(self.desk.clients) < 5)
    @rule(room=st.integers(0, 20))
    def join(self, room: int) -> None:
        self.names += 1
        self.desk.join(f"c{self.names}", room, blocked=True)

    @precondition(lambda self: self.desk.reads)
    @rule()
    def read(self) -> None:
        self.desk.read()

    @precondition(lambda self: self.desk.reads)
    @rule()
    def fail_to_read(self) -> None:
        level, *_ = self.desk.reads.pop(0)
        self.desk.dispatcher.not_fetched(level)
        self.desk.dispatcher.dispatch(self.desk.now)

    @precondition(lambda self: self.desk.removals)
    @rule()
    def remove(self) -> None:
        self.desk.remove()

    @precondition(lambda self: self.desk.marking)
    @rule()
    def mark(self) -> None:
        self.desk.write_marks()

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.6, 1.1, TIMEOUT + 1]))
    def time_passes(self, seconds: float) -> None:
        end = self.desk.now + seconds
        while self.desk.alarm_at is not None and self.desk.alarm_at <= end:
            self.desk.now, self.desk.alarm_at = max(self.desk.now, self.desk.alarm_at), None
            self.desk.dispatcher.tick(self.desk.now)
        self.desk.now = end

    # -- clients

    def client(self, choice: int) -> Client:
        return self.desk.clients[choice % len(self.desk.clients)]

    @precondition(lambda self: self.desk.clients)
    @rule(choice=st.integers(0, 4), number=st.integers(1, 20))
    def send(self, choice: int, number: int) -> None:
        client = self.client(choice)
        before = len(client.inflight)
        client.send(number)
        for item in client.inflight[before:]:
            self.check_sent(client, item)

    def check_sent(self, client: Client, item: Item) -> None:
        key = item.level, item.position
        assert key in self.appended and key not in self.replaced
        assert key not in self.done, "it was acknowledged"
        others = self.holding.setdefault(key, {})
        now = self.desk.now
        assert client not in others, "it has it already"
        assert all(now >= since + TIMEOUT for since in others.values()), "somebody else has it"
        others[client] = now
        self.sent[key] = self.sent.get(key, 0) + 1
        assert not self.attempts or self.sent[key] <= self.attempts, "once too often"
        assert self.sent[key] == item.attempts

    @precondition(lambda self: any(client.inflight for client in self.desk.clients))
    @rule(choice=st.integers(0, 4), which=st.integers(0, 30), refuse=st.booleans())
    def answer(self, choice: int, which: int, refuse: bool) -> None:
        clients = [client for client in self.desk.clients if client.inflight]
        client = clients[choice % len(clients)]
        item = client.inflight.pop(which % len(client.inflight))
        client.room += 1
        del self.holding[item.level, item.position][client]
        if refuse:
            self.desk.dispatcher.refused(client.consumer, item, "refused", self.desk.now)
        else:
            if item.state is not State.DONE:
                self.done.add((item.level, item.position))
            self.desk.dispatcher.acknowledged(client.consumer, [item], self.desk.now)

    @precondition(lambda self: self.desk.clients)
    @rule(choice=st.integers(0, 4), more=st.integers(1, 20))
    def more_room(self, choice: int, more: int) -> None:
        client = self.client(choice)
        client.room += more
        self.desk.dispatcher.has_room(client.consumer, self.desk.now)

    @precondition(lambda self: self.desk.clients)
    @rule(choice=st.integers(0, 4), which=st.integers(0, 30))
    def leave(self, choice: int, which: int) -> None:
        client = self.client(choice)
        kept = list(client.inflight)
        for item in kept:
            del self.holding[item.level, item.position][client]
        client.given.clear()
        client.inflight.clear()
        self.desk.clients.remove(client)
        self.desk.dispatcher.leave(client.consumer, "disconnected", self.desk.now)
        if kept and which % 3 == 0:  # it has only unsubscribed, and acknowledges what it had
            item = kept[which % len(kept)]
            key = item.level, item.position
            if key in self.desk.entries and key not in self.replaced and item not in self.desk.graves:
                self.done.add(key)
            self.desk.dispatcher.acknowledged(client.consumer, [item], self.desk.now)

    @precondition(lambda self: self.desk.entries)
    @rule(which=st.integers(0, 100))
    def replace(self, which: int) -> None:
        keys = sorted(self.desk.entries)
        key = keys[which % len(keys)]
        del self.desk.entries[key]
        self.replaced.add(key)
        self.desk.dispatcher.gone(*key)

    # -- what holds

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "desk"):
            return
        buried = {(item.level, item.position) for item in self.desk.graves}
        kept = set(self.desk.entries)
        assert self.appended == kept | self.done | buried | self.replaced

    @invariant()
    def attempts_are_noted(self) -> None:
        """Or about to be."""
        if not hasattr(self, "desk"):
            return
        for key, number in self.sent.items():
            entry = self.desk.entries.get(key)
            if entry is not None and entry.mark != number and key not in self.done:
                waiting = {(item.level, item.position): item.attempts for item in self.desk.dispatcher.unmarked}
                assert self.desk.marking and number == waiting[key]

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """While somebody has room, everything that could be given is given, being read, or has its time."""
        if not hasattr(self, "desk"):
            return
        dispatcher = self.desk.dispatcher
        for level in dispatcher._levels.values():
            waiting = [item for item in level.items.values() if item.state is State.WAITING]
            delayed = [item for item in level.items.values() if item.state is State.DELAYED]
            assert not delayed or self.desk.alarm_at is not None
            for client in self.desk.clients:
                if client.room > 0 and not any(at.reading for at in dispatcher._levels.values()):
                    assert not [item for item in waiting if client.consumer.may_get(item)]
                    assert not level.behind

    def teardown(self) -> None:
        """Let one consumer take the rest: it gets everything that is left, in order."""
        if not hasattr(self, "desk"):
            return
        desk = self.desk
        for client in list(desk.clients):
            client.leave()
        desk.confirm = True
        desk.settle()
        buried = len(desk.buried)
        last = desk.join("last", 10)
        desk.settle()
        wanted = sorted(set(desk.entries), key=lambda key: (-key[0], key[1]))
        while last.numbers:
            last.ack(*last.numbers)
        assert wanted == sorted(wanted, key=lambda key: (-key[0], key[1]))
        numbers = [1000 * level + position for level, position in wanted]
        unburied = [number for number in numbers if number not in {b[0] for b in desk.buried[buried:]}]
        assert unburied == last.seen
        assert not desk.entries
        desk.wait(1000)
        assert desk.alarm_at is None


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDispatcher = Machine.TestCase
