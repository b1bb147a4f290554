"""A dispatcher under random clients, windows, answers and clocks, beside a model that knows only what may happen.

What must hold at every moment:

    - a message that was appended is in the store until it is acknowledged, dead, replaced or too old: nothing is lost
    - nobody is sent a message that another one holds, unless that one has exceeded the time to acknowledge
    - nobody is given more than it was promised (the rig asserts it)
    - a consumer that is alone, and neither refuses nor leaves anything, gets everything in order
    - no message is sent more often than `max_attempts`, nor after it was acknowledged
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motorcade.plugins.logs.queues.dispatcher import EntryState, QueueEntry
from motorcade.plugins.logs.queues.strategy import Random
from tests.unit.queues.rig import Client, Rig

TIMEOUT = 10.0
ATTEMPTS = 4


class Machine(RuleBasedStateMachine):
    """Clients come and go, take, acknowledge, refuse and keep silent."""

    rig: Rig

    @initialize(
        strategy=st.sampled_from(["round_robin", "random", "least_inflight"]),
        levels=st.integers(1, 3),
        attempts=st.sampled_from([0, ATTEMPTS]),
    )
    def begin(self, strategy: str, levels: int, attempts: int) -> None:
        self.levels = levels
        self.attempts = attempts
        self.rig = Rig(
            strategy=strategy, priorities=levels, max_attempts=attempts, ack_timeout=TIMEOUT, redispatch_delay=0.5
        )
        if strategy == "random":  # of the same chance each time, or a failure could not be repeated
            self.rig.dispatcher._ready = Random(random.Random(0))
        self.rig.confirm = False
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
        before = set(self.rig.entries)
        self.rig.append(number, level)
        self.appended |= set(self.rig.entries) - before

    @rule(number=st.integers(1, 5), level=st.integers(0, 2), answers=st.sampled_from(["late", "unknown"]))
    def append_untold(self, number: int, level: int, answers: str) -> None:
        """The answers to appends come in any order, here the last one first; or say that the outcome is unknown."""
        at = self.rig.dispatcher.levels[min(level, self.levels - 1)]
        before = set(self.rig.entries)
        self.rig.append(number, at.number, told=False)
        new = sorted(set(self.rig.entries) - before, reverse=True)
        self.appended |= set(new)
        for key in new:
            if answers == "unknown":
                self.rig.dispatcher.read_again(at)
            elif self.rig.dispatcher.takes(at, key[1]):
                at.add([self.rig.entry(self.rig.entries[key])])
        self.rig.dispatcher.dispatch(self.rig.now)

    @precondition(lambda self: len(self.rig.clients) < 5)
    @rule(room=st.integers(0, 20))
    def join(self, room: int) -> None:
        self.names += 1
        self.rig.join(f"c{self.names}", room, blocked=True)

    @precondition(lambda self: self.rig.reads)
    @rule()
    def read(self) -> None:
        self.rig.read()

    @precondition(lambda self: self.rig.reads)
    @rule()
    def fail_to_read(self) -> None:
        level, *_ = self.rig.reads.pop(0)
        self.rig.dispatcher.fetched(level, [], 0, self.rig.now, more=True)

    @precondition(lambda self: self.rig.removals)
    @rule()
    def remove(self) -> None:
        self.rig.remove_now()

    @precondition(lambda self: self.rig.marks)
    @rule()
    def mark(self) -> None:
        self.rig.write_marks()

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.6, 1.1, TIMEOUT + 1]))
    def time_passes(self, seconds: float) -> None:
        end = self.rig.now + seconds
        while self.rig.timer_at is not None and self.rig.timer_at <= end:
            self.rig.now, self.rig.timer_at = max(self.rig.now, self.rig.timer_at), None
            self.rig.dispatcher.tick(self.rig.now)
        self.rig.now = end

    # -- clients

    def client(self, choice: int) -> Client:
        return self.rig.clients[choice % len(self.rig.clients)]

    @precondition(lambda self: self.rig.clients)
    @rule(choice=st.integers(0, 4), number=st.integers(1, 20))
    def send(self, choice: int, number: int) -> None:
        client = self.client(choice)
        before = len(client.inflight)
        client.send(number)
        for entry in client.inflight[before:]:
            self.check_sent(client, entry)

    def check_sent(self, client: Client, entry: QueueEntry) -> None:
        key = entry.level.number, entry.position
        assert key in self.appended and key not in self.replaced
        assert key not in self.done, "it was acknowledged"
        others = self.holding.setdefault(key, {})
        now = self.rig.now
        assert client not in others, "it has it already"
        assert all(now >= since + TIMEOUT for since in others.values()), "somebody else has it"
        others[client] = now
        self.sent[key] = self.sent.get(key, 0) + 1
        assert not self.attempts or self.sent[key] <= self.attempts, "once too often"
        assert self.sent[key] == entry.attempts

    @precondition(lambda self: any(client.inflight for client in self.rig.clients))
    @rule(choice=st.integers(0, 4), which=st.integers(0, 30), refuse=st.booleans())
    def answer(self, choice: int, which: int, refuse: bool) -> None:
        clients = [client for client in self.rig.clients if client.inflight]
        client = clients[choice % len(clients)]
        entry = client.inflight.pop(which % len(client.inflight))
        client.room += 1
        del self.holding[entry.level.number, entry.position][client]
        if refuse:
            self.rig.dispatcher.not_taken(client.consumer, entry, "refused", self.rig.now)
        else:
            if entry.state is not EntryState.DONE:
                self.done.add((entry.level.number, entry.position))
            self.rig.dispatcher.acknowledged(client.consumer, [entry], self.rig.now)

    @precondition(lambda self: self.rig.clients)
    @rule(choice=st.integers(0, 4), more=st.integers(1, 20))
    def more_room(self, choice: int, more: int) -> None:
        client = self.client(choice)
        client.room += more
        self.rig.dispatcher.has_room(client.consumer, self.rig.now)

    @precondition(lambda self: self.rig.clients)
    @rule(choice=st.integers(0, 4), which=st.integers(0, 30))
    def leave(self, choice: int, which: int) -> None:
        client = self.client(choice)
        kept = list(client.inflight)
        for entry in kept:
            del self.holding[entry.level.number, entry.position][client]
        client.given.clear()
        client.inflight.clear()
        self.rig.clients.remove(client)
        self.rig.dispatcher.leave(client.consumer, "disconnected", self.rig.now)
        if kept and which % 3 == 0:  # it has only unsubscribed, and acknowledges what it had
            entry = kept[which % len(kept)]
            key = entry.level.number, entry.position
            if key in self.rig.entries and key not in self.replaced and entry not in self.rig.dead_entries:
                self.done.add(key)
            self.rig.dispatcher.acknowledged(client.consumer, [entry], self.rig.now)

    @precondition(lambda self: self.rig.entries)
    @rule(which=st.integers(0, 100))
    def replace(self, which: int) -> None:
        keys = sorted(self.rig.entries)
        key = keys[which % len(keys)]
        del self.rig.entries[key]
        self.replaced.add(key)
        self.rig.dispatcher.gone(self.rig.dispatcher.levels[key[0]], key[1])

    # -- what holds

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "rig"):
            return
        dead = {(entry.level.number, entry.position) for entry in self.rig.dead_entries}
        kept = set(self.rig.entries)
        assert self.appended == kept | self.done | dead | self.replaced

    @invariant()
    def attempts_are_noted(self) -> None:
        """Or about to be."""
        if not hasattr(self, "rig"):
            return
        for key, number in self.sent.items():
            entry = self.rig.entries.get(key)
            if entry is not None and entry.mark != number and key not in self.done:
                waiting = {(entry.level.number, entry.position): entry.attempts for entry in self.rig.marks}
                assert number == waiting[key]

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """While somebody has room, everything that could be given is given, being read, or has its time."""
        if not hasattr(self, "rig"):
            return
        dispatcher = self.rig.dispatcher
        for level in dispatcher.levels.values():
            waiting = [entry for entry in level.entries.values() if entry.state is EntryState.WAITING]
            delayed = [entry for entry in level.entries.values() if entry.state is EntryState.DELAYED]
            assert not delayed or self.rig.timer_at is not None
            for client in self.rig.clients:
                if client.room > 0 and not any(at.reading for at in dispatcher.levels.values()):
                    assert not [entry for entry in waiting if client.consumer.may_get(entry)]
                    assert not level.behind
                    stored = {position for number, position in self.rig.entries if number == level.number}
                    assert stored <= level.entries.keys() | level.leaving

    def teardown(self) -> None:
        """Let one consumer take the rest: it gets everything that is left, in order."""
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for client in list(rig.clients):
            client.leave()
        rig.confirm = True
        rig.settle()
        dead = len(rig.dead)
        last = rig.join("last", 10)
        rig.settle()
        wanted = sorted(set(rig.entries), key=lambda key: (-key[0], key[1]))
        while last.numbers:
            last.ack(*last.numbers)
        assert wanted == sorted(wanted, key=lambda key: (-key[0], key[1]))
        numbers = [1000 * level + position for level, position in wanted]
        undead = [number for number in numbers if number not in {b[0] for b in rig.dead[dead:]}]
        assert undead == last.seen
        assert not rig.entries
        rig.wait(1000)
        assert rig.timer_at is None


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDispatcher = Machine.TestCase
