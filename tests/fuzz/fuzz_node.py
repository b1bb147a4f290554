"""Damaged conversations against a node, until the time is over or something is found.

    python -m tests.fuzz.fuzz_node --minutes 5 [--seed N] [FILE ...]

Every conversation is played on three brokers in this process: a plain one, one that is observed by a plugin (which
takes packets off the fast path), one with plugins that make clients wait. What must hold is in `rig.py`; besides, the
first two must have answered every client alike. A finding is written to a file that can be given as FILE to play it
again, or be put into `corpus/`, where it is played by every test run from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from tests.fuzz.conversations import CLIENTS, Conversation, Mutator, corpus, read, write
from tests.fuzz.rig import CLOCK, Finding, Peer, Rig, WebSocketPeer, check_objects, count_objects, laboratory
from tests.support.wire import CONNACK, PUBLISH, PUBREL, Packet

#: Seconds after which a single conversation counts as a hang: the stacks are printed and the process ends.
HANG = 60

#: Findings after which a run ends: more would be the same again.
ENOUGH = 20

#: Conversations between two counts of all objects.
COUNT_EVERY = 2000

Heard = dict[str, tuple[list[list[object]], list[object]]]


async def play(rig: Rig, conversation: Conversation) -> Heard:
    """Play a conversation on one broker and check what must hold; returns what each connection of each client heard."""
    now: dict[str, Peer] = {}
    gone: dict[str, list[Peer]] = {client: [] for client in CLIENTS}
    everybody: list[Peer] = []
    for event in conversation:
        peer = now.get(event.client)
        present = [other for other in everybody if other.connection.transport is not None]
        if event.data:
            if peer is None or peer.transport.closing:
                peer = now[event.client] = _dial(rig, event.client)
                gone[event.client].append(peer)
                everybody.append(peer)
                present.append(peer)
            peer.send(event.data)
        elif peer is not None:
            _do(rig, peer, event.word)
        await rig.settle(present)
    await rig.after_case(everybody)
    return {client: (_answers(peers), _messages(peers)) for client, peers in gone.items()}


def _dial(rig: Rig, client: str) -> Peer:
    return WebSocketPeer(rig.broker) if client == "D" else Peer(rig.broker, polite=client != "C")


def _do(rig: Rig, peer: Peer, word: str) -> None:
    what, _, seconds = word.partition(" ")
    if what == "full":
        peer.fill()
    elif what == "drain":
        peer.drain()
    elif what == "late":
        rig.look(peer, float(seconds))
    elif what == "expire":
        rig.expire(float(seconds))
    elif what == "recheck":
        rig.broker.recheck_access()
    else:
        peer.hang_up(what)


def _answers(peers: list[Peer]) -> list[list[object]]:
    """What each connection was answered, without what differs from run to run.

    Messages stand apart: the fast path may take all acknowledgements of a read before it sends what waited for them.
    """
    return [[_answer(p) for p in peer.packets if p.type not in (PUBLISH, PUBREL)] for peer in peers]


def _answer(packet: Packet) -> object:
    properties = [(k, v) for k, v in packet.properties if not (packet.type == CONNACK and k == 0x12)]
    return (
        packet.name,
        packet.flags,
        packet.packet_id,
        packet.reason,
        packet.reasons,
        packet.session_present,
        properties,
    )


def _messages(peers: list[Peer]) -> list[object]:
    """The messages a client got over all its connections, each once, in order."""
    seen: list[object] = []
    known: set[tuple[int | None, bytes]] = set()
    for peer in peers:
        for packet in peer.packets:
            if packet.type != PUBLISH or (packet.dup and (packet.packet_id, packet.payload) in known):
                continue
            known.add((packet.packet_id, packet.payload))
            properties = [(k, v) for k, v in packet.properties if k != 0x02]  # what is left of its life: seconds
            seen.append((packet.topic, packet.payload, packet.qos, packet.retain, properties))
    return seen


class Bench:
    """The three brokers."""

    @classmethod
    @asynccontextmanager
    async def up(cls) -> AsyncIterator[Bench]:
        with laboratory():
            bench = cls()
            await bench._start()
            yield bench
            await bench._stop()

    async def _start(self) -> None:
        self.plain = Rig()
        self.observed = Rig(observed=True)
        self.hooked = Rig(hooked=True)
        for rig in (self.plain, self.observed, self.hooked):
            await rig.start()
            await rig.settle([])

    async def _stop(self) -> None:
        for rig in (self.plain, self.observed, self.hooked):
            await rig.stop()

    async def play(self, conversation: Conversation) -> None:
        """One conversation on all of them."""
        CLOCK.tick()
        one = await self._on(self.plain, conversation)
        two = await self._on(self.observed, conversation)
        await self._on(self.hooked, conversation)
        for client in CLIENTS:
            if one[client] != two[client]:
                raise Finding(
                    f"{client} heard from the fast path\n  {one[client]}\nand from the channel\n  {two[client]}"
                )

    async def _on(self, rig: Rig, conversation: Conversation) -> Heard:
        rig.use()
        return await play(rig, conversation)


async def fuzz(seconds: float, seed: int, limit: int = sys.maxsize) -> int:
    """Play the corpus, then damaged conversations; returns how many. `Finding` has the conversation in its notes."""
    async with Bench.up() as bench:
        before = count_objects()
        seeds = corpus()
        mutator = Mutator(list(seeds.values()), Random(seed))
        count = 0
        end = time.monotonic() + seconds
        waiting = list(seeds.values())
        while count < limit and (waiting or limit < sys.maxsize or time.monotonic() < end):
            conversation = waiting.pop() if waiting else mutator.make()
            faulthandler.dump_traceback_later(HANG, exit=True)
            try:
                await bench.play(conversation)
            except BaseException as error:
                error.add_note(write(conversation))
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
            count += 1
            if count % COUNT_EVERY == 0:
                await check_objects(before)
        await check_objects(before)
    return count


async def replay(conversation: Conversation) -> None:
    """One conversation on fresh brokers."""
    async with Bench.up() as bench:
        await bench.play(conversation)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; by default a new one each time")
    parser.add_argument("--findings", type=Path, default=Path(".build/fuzz"), help="folder for findings")
    parser.add_argument("files", nargs="*", type=Path, help="conversations to play instead")
    options = parser.parse_args()
    if options.files:
        for path in options.files:
            asyncio.run(replay(read(path.read_text())))
            print(f"{path}: nothing found")
        return 0
    first = options.seed if options.seed is not None else time.time_ns() % 1_000_000_007
    end = time.monotonic() + options.minutes * 60
    played = found = 0
    seed = first
    while (left := end - time.monotonic()) > 0 and found < ENOUGH:
        try:
            played += asyncio.run(fuzz(left, seed))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            found += 1
            options.findings.mkdir(parents=True, exist_ok=True)
            path = options.findings / f"finding-{seed}.txt"
            path.write_text(error.__notes__[-1] if getattr(error, "__notes__", None) else "")
            print(f"seed {seed}: {str(error) or type(error).__name__}\n  {path}", flush=True)
        seed += 1
    print(f"{played} conversations since the last finding, {found} findings, seeds {first} to {seed - 1}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
