"""What models of Hypothesis are made of that watch a whole node from outside.

    Guest        a client that a model lets connect, speak and leave
    World        a node whose clock stands, and is put back however the run ends
    PluginWorld  a node with one plugin, its guests, one publisher, and a store that does things when it is told to
    often        settings of such models: many short runs, each of which is fast or shall be looked at

A model is a `PluginWorld` with rules. It begins with `begin`, and in the end, when nothing has failed, it comes to rest
and is judged. Time stands still but for what rules let pass, and for `STEP` with everything that is done.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from asyncio import events
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.core.errors import MotorcadeError
from motorcade.extension.plugin import Loaded, Plugins
from motorcade.mqtt.packets import Disconnect, Packet, Puback, Pubrec
from motorcade.storage.ports import StoreError, StoreFullError
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, Turns, standing

STEP = 0.001  #: seconds that pass with everything that is done
ALL = 1_000_000  #: calls that a store may hold back
OUTCOMES = ("refused", "lost", "written", "late")  #: of a write that fails, see `fail_write`


def often(examples: int, steps: int) -> settings:
    """So many runs of so many steps. What a failure was found by is explained by the model, not by Hypothesis."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
    )


class Guest(ABC):
    """A client. It keeps to the rules of MQTT."""

    def __init__(self) -> None:
        self.peer: Peer | None = None
        self.on = False  #: CONNACK has come

    @property
    def may_speak(self) -> bool:
        return self.peer is not None and self.on and self.peer.open and self.peer.wire.reading

    def read(self) -> None:
        """What has come, and then whether the connection is still there."""
        if self.peer is None:
            return
        for packet in self.peer.take():
            self.heard(packet)
        if not self.peer.open:
            self.lost()

    @abstractmethod
    def heard(self, packet: Packet) -> None: ...

    def leaves_unread(self, packets: list[Packet]) -> None:  # noqa: B027 - most need not know
        """It leaves with these on their way; the broker has sent them."""

    def lost(self) -> None:
        """The connection is gone."""
        self.peer = None
        self.on = False


AnyGuest = TypeVar("AnyGuest", bound=Guest)


class World(RuleBasedStateMachine):
    """A model over a node whose clock stands: `node`, once it has begun. However it ends, the clock is put back."""

    node: MemoryNode

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()  #: what is replaced for the time of a run, the clock for one

    # -- what a model does differently (Hypothesis' machines have a metaclass of their own, so this cannot be abstract)

    def come_to_rest(self) -> None:
        raise NotImplementedError

    def judge(self) -> None:
        """What is true in the end."""
        raise NotImplementedError

    def leave_nothing(self) -> None:
        """What is true when everything has been taken away after that."""

    # -- the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "node") and sys.exc_info()[0] is None:  # else the run has ended early
                self.come_to_rest()
                self.judge()
                self.leave_nothing()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End without being judged."""
        with self.stack:
            if hasattr(self, "node"):
                self.node.loop.die()  # type: ignore[union-attr]


class PluginWorld(World, Generic[AnyGuest]):
    """The world of a model of a plugin."""

    cars: Sequence[AnyGuest]
    store: HeldStore

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.chores: list[asyncio.Task[None]] = []

    # -- what a model does differently

    def begin(self) -> None:
        """A process has started: load the plugin."""
        raise NotImplementedError

    def answered(self, packet: Puback | Pubrec) -> None:
        """The publisher hears what has become of a message."""
        raise NotImplementedError

    def cut_off(self) -> None:
        """The publisher will never hear it."""
        raise NotImplementedError

    def check(self) -> None:
        """What is true whenever nothing is left to do now."""

    def judge(self) -> None:
        assert not self.chores
        assert not self.loaded.context.counters["task_failed"]
        assert not [kind for kind in self.node.state.shared.sources.kinds if kind.counters["failed"]]

    # -- the beginning

    def set_up(self, options: SessionOptions) -> None:
        # Sessions are stored, too, but at once: how they bear a slow store has tests of its own.
        self.node = MemoryNode(options, Limits(flapping_count=0), store=self.store.inner)
        self.stack.enter_context(standing(self.node.clock))

    def load(self, plugin: str, options: Mapping[str, Any]) -> None:
        """The plugin in this process, and a publisher."""
        assert isinstance(self.node.loop, Turns)
        self.loop = self.node.loop
        self.plugins = Plugins(self.node.broker, self.node.hooks, Path("unused"), self.node.state.shared.sources)
        self.plugins.store = self.store
        self.loaded: Loaded = self.run(self.plugins.load(plugin, options))
        self.publisher = self.node.client("publisher")

    # -- time

    @property
    def now(self) -> float:
        return self.node.clock.now

    def say(self, peer: Peer, *packets: Packet) -> None:
        """A client sends; the broker reads it as a callback of its loop."""
        events._set_running_loop(cast("asyncio.AbstractEventLoop", self.loop))
        try:
            peer.send(*packets)
        finally:
            events._set_running_loop(None)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Something that is done at once."""
        task = self.loop.create_task(work)
        self.node.turn()
        assert task.done(), task
        return task.result()

    def chore(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that takes the time that the store takes. Operators live with a refusal."""

        async def done() -> None:
            with suppress(MotorcadeError):
                await work

        self.chores.append(self.loop.create_task(done()))

    def go_on(self, turn: bool = True) -> None:
        """Time passes, and unless it is not their turn, everybody does and hears what there is."""
        self.node.clock.now += STEP
        if not turn:
            return
        for _ in range(3):
            self.node.turn()
            for car in self.cars:
                car.read()
            for packet in self.publisher.take():
                if isinstance(packet, Puback | Pubrec):
                    self.answered(packet)
            if not self.publisher.open:
                self.cut_off()
                self.publisher = self.node.client("publisher")
        self.chores = [chore for chore in self.chores if not chore.done()]
        self.check()

    # -- guests, the store, and the process

    def see_off(self, car: Guest, *, goodbye: bool) -> None:
        """It leaves, with DISCONNECT if it can."""
        if car.peer is None:
            return
        if goodbye and car.may_speak:
            self.say(car.peer, Disconnect())
        else:
            car.peer.close()
        self.node.turn()
        car.leaves_unread(car.peer.take())
        car.lost()

    def release(self, count: int) -> None:
        """So many writes and reads that the store holds back are done soon."""
        self.loop.call_soon(self.store.let_go, count)
        self.loop.call_soon(self.store.let_read, count)

    def hold_nothing(self) -> None:
        """The store does at once what it is asked for, and all that it was asked for."""
        self.store.held = self.store.held_reads = False
        self.release(ALL)

    def fail_write(self, outcome: str) -> None:
        """The next write is refused; or it was written, or was lost, or will be late, and nobody is told."""
        error = StoreFullError("no room") if outcome == "refused" else StoreError("no answer")
        with self.loop.running():  # it calls back, as in a turn of the loop
            self.store.fail(error, written=outcome == "written", late=outcome == "late")

    def fail_next(self, outcome: str, work: Callable[[], None]) -> None:
        """What is done makes a write, which fails; from then on the store holds writes back."""
        self.hold_nothing()
        self.go_on()
        self.store.held = True
        work()
        if self.store.waiting:
            self.fail_write(outcome)
        self.go_on()

    def die(self, written: int) -> None:
        """The process is gone; so many of its writes are done."""
        self.loop.die()
        self.store.die(written)
        self.store.held = self.store.held_reads = False
        self.cut_off()
        self.chores.clear()
        for car in self.cars:
            car.lost()

    def start_again(self) -> None:
        """The next process, with what is stored."""
        self.node = self.node.restart()
        self.begin()
        self.go_on()
