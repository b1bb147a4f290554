"""One question to many members, with the answers of those that answer in time, and the names of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

from motorcade.core.errors import MotorcadeError
from motorcade.extension.cluster import AskError, Cluster

PATIENCE: Final = 3.0  #: seconds that a member may take to answer an operator


class MemberAnswers(NamedTuple):
    """The answers of the members, and those that gave none."""

    found: dict[str, bytes]  #: by the name of the node
    silent: dict[str, str]  #: nodes that gave no answer, and why


class UnansweredError(MotorcadeError):
    """Something cannot be told or done, since members did not answer."""

    def __init__(self, problem: str, silent: dict[str, str]) -> None:
        self.silent = silent
        names = ", ".join(f"{name} ({why})" for name, why in sorted(silent.items()))
        super().__init__(f"{problem}; no answer from: {names}")


def name_of(member: str) -> str:
    """Return the name of a node by the id of the member that it is."""
    return member.rpartition("~")[0] or member


async def ask_all(
    cluster: Cluster, noun: str, body: bytes = b"", members: Iterable[str] | None = None, *, patience: float = PATIENCE
) -> MemberAnswers:
    """Ask members, the peers if none are named, all at once."""
    asked = [peer.id for peer in cluster.peers] if members is None else list(members)

    async def ask(member: str) -> bytes | str:
        try:
            return await cluster.ask(member, noun, body, patience=patience)
        except AskError as error:
            return str(error)

    answers = dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))
    return MemberAnswers(
        {name_of(member): answer for member, answer in answers.items() if isinstance(answer, bytes)},
        {name_of(member): answer for member, answer in answers.items() if isinstance(answer, str)},
    )
