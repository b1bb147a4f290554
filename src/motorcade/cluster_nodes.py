"""The nodes of a cluster, from any one of them: what each tells of its clients, and what it is told to do.

Rule 1: a member that does not answer is in the list all the same, without its figures.
Rule 2: of two nodes that have the same name (one of them is dead) the one that is alive is meant; the id of the member
        names either.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from motorcade.client_control import NotFoundError
from motorcade.extension.ask_all import PATIENCE, UnansweredError
from motorcade.extension.cluster import AskError, Cluster, MemberState, MemberView
from motorcade.extension.declared import ConflictError
from motorcade.node_control import NodeDrain, NodeEntry, NodeFigures, NodeList, NodeOrder

FIGURES_QUESTION: Final = "node"
ORDER_QUESTION: Final = "node_order"
DEAD: Final = frozenset({MemberState.CONDEMNED, MemberState.FENCED})  #: they are not asked

_encode = msgspec.msgpack.Encoder().encode
_decode_figures = msgspec.msgpack.Decoder(NodeFigures).decode
_decode_order = msgspec.msgpack.Decoder(NodeOrder).decode


class ClusterNodes:
    """All members."""

    def __init__(self, cluster: Cluster, drain: NodeDrain) -> None:
        self._cluster = cluster
        self._drain = drain
        cluster.on_ask(FIGURES_QUESTION, self._answer_figures)
        cluster.on_ask(ORDER_QUESTION, self._answer_order)

    async def list(self) -> NodeList:
        members = list(self._cluster.members())
        answers = await asyncio.gather(*map(self._figures, members))
        nodes: list[NodeEntry] = []
        unanswered: dict[str, str] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, str):
                unanswered[member.name] = answer
            nodes.append(self._entry(member, answer if isinstance(answer, NodeFigures) else None))
        return NodeList(nodes=nodes, unanswered=unanswered)

    async def show(self, name: str) -> NodeEntry:
        member = self._find(name)
        answer = await self._figures(member)
        return self._entry(member, answer if isinstance(answer, NodeFigures) else None)

    async def order(self, name: str, order: NodeOrder) -> NodeEntry:
        member = self._find(name)
        if member.id == self._cluster.me:
            figures = await self._drain.order(order)
        else:
            if member.state in DEAD:
                raise ConflictError(f"{member.id} is {member.state}: it was found dead")
            try:
                body = _encode(order)
                figures = _decode_figures(await self._cluster.ask(member.id, ORDER_QUESTION, body, patience=PATIENCE))
            except AskError as error:
                if not member.linked:
                    raise UnansweredError(f"{member.name} cannot be told", {member.name: str(error)}) from error
                raise ConflictError(str(error)) from error
        return self._entry(self._find(member.id), figures)

    def _find(self, name: str) -> MemberView:
        members = [member for member in self._cluster.members() if name in (member.id, member.name)]
        if not members:
            names = ", ".join(sorted(member.name for member in self._cluster.members()))
            raise NotFoundError(f"there is no node {name!r} in this cluster; there are {names}")
        return min(members, key=lambda member: (member.state in DEAD, -member.number))

    async def _figures(self, member: MemberView) -> NodeFigures | str | None:
        """Return what a member tells; why it does not; None if it is dead and not asked."""
        if member.id == self._cluster.me:
            return self._drain.figures()
        if member.state in DEAD:
            return None
        try:
            return _decode_figures(await self._cluster.ask(member.id, FIGURES_QUESTION, patience=PATIENCE))
        except AskError as error:
            return str(error)

    def _entry(self, member: MemberView, figures: NodeFigures | None) -> NodeEntry:
        here = member.id == self._cluster.me
        return NodeEntry(
            name=member.name,
            id=member.id,
            state=figures.state if figures is not None else str(member.state),
            address=member.address,
            since=member.since,
            software=member.software,
            here=here,
            linked=member.linked,
            round_trip=member.round_trip if member.linked and not here else None,
            clients=figures.clients if figures is not None else None,
            sessions=figures.sessions if figures is not None else None,
            attached=figures.attached if figures is not None else None,
            drain=figures.drain if figures is not None else None,
        )

    # -- other members ask

    async def _answer_figures(self, _member: str, _body: bytes) -> bytes:
        return _encode(self._drain.figures())

    async def _answer_order(self, _member: str, body: bytes) -> bytes:
        return _encode(await self._drain.order(_decode_order(body)))
