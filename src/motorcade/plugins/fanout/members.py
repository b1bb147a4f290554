"""Items and questions by which members of a cluster tell and ask each other of the fan-out.

| item | body | meaning |
|---|---|---|
| `fanout.hint` | `Hint` | a batch has its receipts: its vehicles may be attached there |

| question | body | answer |
|---|---|---|
| `fanout.over` | guid | empty, when the batch of that guid is not under way there |
| `fanout.accepted` | request id | empty, when the batches of the request that are under way there have their `accepted` receipts; `doubt` if one may be stored in part |
| `fanout.vehicle` | VIN | `VehicleView` of a vehicle that is connected there; else empty |
| `fanout.ends` | `[(VIN, position), …]` | those of these vehicles that are attached there: it looks after them itself |
| `fanout.counted` | `Query` | the answer of the member that counts (`counting`); others refuse |
| `fanout.uncount` | | empty, when the asked member counts no more |
| `fanout.collect` | | `GcView` of one collection there |
| `fanout.swept` | | what was called off, up to which it has ended everything in its cells |

Rule 1: a hint is sent when everything is stored that it tells of, to the member that the store has named. Items come
        unless their sender dies. So when a member has gone, each of the others looks once at all vehicles that it has.
Rule 2: nothing is decided by what members say: who ends a delivery is decided by the store (`outbox`), the order by the
        positions in the mailbox of a vehicle.
"""  # noqa: E501 - a table

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from motorcade.core.recent import RecentSet
from motorcade.extension.ask_all import MemberAnswers, ask_all
from motorcade.extension.cluster import AskError, Cluster, MemberState, Peer
from motorcade.extension.plugin import Context

HINT: Final = "fanout.hint"
OVER: Final = "fanout.over"
ACCEPTED: Final = "fanout.accepted"
IN_DOUBT: Final = b"doubt"
PATIENCE: Final = 30.0  #: seconds that an answer may take that waits for something
RETRY: Final = 0.5  #: seconds until something that did not go is tried again
MAX_TOLD: Final = 20_000  #: batches that are known to have their receipts


class Hint(msgspec.Struct, array_like=True, gc=False):
    """A batch that has its receipts."""

    batch: bytes
    vins: list[str]
    replaced: list[tuple[str, int]] = []  #: deliveries of these vehicles that it has replaced


encode = msgspec.msgpack.Encoder().encode
_decode_hint = msgspec.msgpack.Decoder(Hint).decode


class FanoutMembers:
    """The other members, as the fan-out of this one knows them."""

    def __init__(self, context: Context, cluster: Cluster) -> None:
        self.cluster = cluster
        self.told: RecentSet[bytes] = RecentSet(MAX_TOLD)  #: guids of batches that may be sent
        self._context = context
        self._peers: set[str] = set()

    def start(self, hinted: Callable[[Hint], None], changed: Callable[[bool], None]) -> None:
        """Begin; `changed` hears that members have come or gone, and whether one has gone (rule 1)."""

        def on_hint(_peer: Peer, body: bytes) -> None:
            hint = _decode_hint(body)
            self.told.add(hint.batch)
            hinted(hint)

        def on_change() -> None:
            before, self._peers = self._peers, {peer.id for peer in self.cluster.peers}
            changed(bool(before - self._peers))

        context = self._context
        context.at_end(self.cluster.on_item(HINT, on_hint))
        context.at_end(self.cluster.on_change(on_change))
        on_change()

    @property
    def me(self) -> str:
        """The id of this member."""
        return self.cluster.me

    def is_alive(self, member: str) -> bool:
        """Return True unless a member is fenced, or has left."""
        cluster = self.cluster
        if member == cluster.me or cluster.peer(member) is not None:
            return True
        return any(view.id == member and view.state is not MemberState.FENCED for view in cluster.members())

    def hint(self, member: str, hint: Hint) -> None:
        """Tell a member of a batch; all others, if none is named."""
        body = encode(hint)
        peer = self.cluster.peer(member) if member else None
        for one in (peer,) if member else self.cluster.peers:
            if one is not None:
                one.send(HINT, body)

    async def until_over(self, member: str, batch: bytes) -> None:
        """Wait until a batch is not under way at a member, or that member is gone."""
        while member != self.me and self.is_alive(member):
            try:
                await self.cluster.ask(member, OVER, batch, patience=PATIENCE)
            except AskError:
                await asyncio.sleep(RETRY)
            else:
                return

    async def until_accepted(self, request_id: str) -> bool:
        """Wait until batches of a request that are under way elsewhere have their `accepted` receipts.

        False if some of these receipts may be missing for good: then the stream has to be looked at.
        """
        waiting, known = [peer.id for peer in self.cluster.peers], True
        while waiting:
            answers = await asyncio.gather(*(self._accepted(member, request_id) for member in waiting))
            known = known and IN_DOUBT not in answers
            silent = [member for member, answer in zip(waiting, answers, strict=True) if answer is None]
            waiting = [member for member in silent if self.is_alive(member)]
            known = known and len(waiting) == len(silent)
            if waiting:
                await asyncio.sleep(RETRY)
        return known

    async def _accepted(self, member: str, request_id: str) -> bytes | None:
        try:
            return await self.cluster.ask(member, ACCEPTED, request_id.encode(), patience=PATIENCE)
        except AskError as error:
            # One that does not serve the fan-out has no batches.
            return b"" if f"not know the question {ACCEPTED!r}" in str(error) else None

    async def ask_all(self, noun: str, body: bytes = b"", *, patience: float = PATIENCE) -> MemberAnswers:
        """Ask all others."""
        return await ask_all(self.cluster, noun, body, patience=patience)
