"""What happens to members, links and the store; each fault ends by itself, and mends what it broke.

    kill       a member dies (SIGKILL), and comes back up to twice a lease later
    stand      a member stands still (SIGSTOP), from 0.1 s to twice a lease
    restart    a member is stopped in peace and started again;  rolling  all members, one after the other
    cut        nothing gets through between two members;        one-way  in one direction
    apart      nothing gets through between a member and the store;  apart one-way
    slow       a link takes 200 ms and 50 kB/s                  reset    connections break, of a link or to the store
    store      a master of the store dies (`ClusterStore.kill`)
    forget     a fail-over of the store forgets confirmed writes (`ClusterStore.forget`)

Two may happen at once, unless both would be about the same process, or both about the servers of the store.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.chaos.cluster_members import Trio
from tests.chaos.cluster_network import STORE, Trouble, partition

#: How often each comes, beside the others.
WEIGHTS = {
    "kill": 5, "stand": 5, "restart": 2, "rolling": 0.5, "cut": 3, "one-way": 3, "apart": 2, "apart one-way": 2,
    "slow": 2, "reset": 2, "store": 3, "forget": 4,
}  # fmt: skip

SLOW = {"delay": 0.2, "rate": 50_000}
SERVERS = "servers"  #: what faults of the store are about


@dataclass(frozen=True)
class Fault:
    """One fault, about to happen."""

    kind: str
    words: str
    about: frozenset[str]  #: processes
    happen: Callable[[], Coroutine[Any, Any, None]]


class Faults:
    """Chooses faults, and lets them happen."""

    def __init__(self, trio: Trio, random: Random, kinds: tuple[str, ...], told: Callable[[str], None]) -> None:
        self.trio = trio
        self.random = random
        self.kinds = kinds
        self.told = told
        self.ended: Callable[[str], None] = lambda name: None  #: told which member ends
        self.happened: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()  #: kinds that happened at the same time

    @property
    def lease(self) -> float:
        return self.trio.lease

    def choose(self, count: int) -> list[Fault]:
        """So many faults that may happen at once."""
        chosen: list[Fault] = []
        while len(chosen) < count:
            fault = self._one()
            if not any(fault.about & other.about for other in chosen):
                chosen.append(fault)
        return chosen

    async def happen(self, faults: list[Fault]) -> str:
        """Let them begin one after the other, soon; returns when all are over and mended."""

        async def one(fault: Fault, pause: float) -> None:
            await asyncio.sleep(pause)
            self.told(f"begins: {fault.words}")
            await fault.happen()
            self.told(f"is over: {fault.words}")

        for fault in faults:
            self.happened[fault.kind] += 1
        if len(faults) > 1:
            self.pairs[" + ".join(sorted(fault.kind for fault in faults))] += 1
        pauses = [0.0, *(self.random.uniform(0.0, self.lease) for _ in faults[1:])]
        async with asyncio.TaskGroup() as tasks:
            for fault, pause in zip(faults, pauses, strict=True):
                tasks.create_task(one(fault, pause))
        return " and ".join(fault.words for fault in faults)

    def _one(self) -> Fault:
        kind = self.random.choices(self.kinds, [WEIGHTS[kind] for kind in self.kinds])[0]
        names = list(self.trio.members)
        name = self.random.choice(names)
        one, other = self.random.choice(list(itertools.permutations(names, 2)))
        seconds = self.random.choice((self.random.uniform(0.1, self.lease), self.random.uniform(0.1, 2 * self.lease)))
        lasting = f"for {seconds:.1f} s"
        source, target = (name, STORE) if self.random.random() < 0.5 else (STORE, name)
        match kind:
            case "kill":
                return Fault(kind, f"{name} is killed {lasting}", frozenset({name}), lambda: self._kill(name, seconds))
            case "stand":
                words = f"{name} stands still {lasting}"
                return Fault(kind, words, frozenset({name}), lambda: self._stand(name, seconds))
            case "restart":
                return Fault(kind, f"{name} is restarted", frozenset({name}), lambda: self._restart([name]))
            case "rolling":
                return Fault(kind, "all are restarted", frozenset(names), lambda: self._restart(names))
            case "cut":
                troubles, words = partition(one, other), f"{one} and {other} are cut off {lasting}"
            case "one-way":
                troubles, words = [Trouble(one, other, lost=True)], f"{other} hears nothing of {one} {lasting}"
            case "apart":
                troubles, words = partition(name, STORE), f"{name} is cut off from the store {lasting}"
            case "apart one-way":
                troubles = [Trouble(source, target, lost=True)]
                words = f"{target} hears nothing of {source} {lasting}"
            case "slow":
                troubles = [Trouble(one, other, **SLOW)]  # type: ignore[arg-type]
                words = f"the link of {one} and {other} is slow {lasting}"
            case "reset":
                end = self.random.choice((other, STORE))
                words = f"connections of {one} and {end} break"
                return Fault(kind, words, frozenset(), lambda: self._reset(one, end))
            case "store":
                return Fault(kind, "a server of the store is killed", frozenset({SERVERS}), self._kill_store)
            case _:
                return Fault(kind, "the store forgets", frozenset({SERVERS}), self._forget)
        return Fault(kind, words, frozenset(), lambda: self._trouble(troubles, seconds))

    # -- members

    async def _kill(self, name: str, seconds: float) -> None:
        member = self.trio.members[name]
        await member.kill()
        self.ended(name)
        await asyncio.sleep(seconds)
        await member.start()

    async def _stand(self, name: str, seconds: float) -> None:
        member = self.trio.members[name]
        member.stand()
        try:
            await asyncio.sleep(seconds)
        finally:
            member.go()

    async def _restart(self, names: list[str]) -> None:
        for name in names:
            member = self.trio.members[name]
            self.ended(name)
            await member.stop()
            self.ended(name)
            await member.start()

    # -- the network

    async def _trouble(self, troubles: list[Trouble], seconds: float) -> None:
        self.trio.network.begin(troubles)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.trio.network.end(troubles)

    async def _reset(self, one: str, other: str) -> None:
        self.trio.network.reset(one, other)

    # -- the store

    async def _kill_store(self) -> None:
        await self.trio.store.kill(self.random)
        await self.trio.store.wait_healthy()

    async def _forget(self) -> None:
        await self.trio.store.forget(self.random)
        await self.trio.store.wait_healthy()
