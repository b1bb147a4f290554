"""Declarations of operators while nodes run (`extension.declared`): stored, and the same on all members.

    create, change, delete ─▶ record and note in one batch, if the record is the one known here ─▶ in force here
                                                   └─▶ `tell`: all members are asked to look; they answer when they have
    a note, a question, a cell that is read again ─▶ the record is read ─▶ `changed(name, value)`, if it is another one

The one way for streams, queues and capture rules. A feature says what a record means and makes it so; here is how the
records are written and how members hear of them.

Rule 1: the record is all there is to know. Notes and questions name it, and a member that gets one reads it. So neither
        their order nor their number matters, and a member that has missed all of them reads the collection.
Rule 2: one change at a time: `write` is called, and `changed` is, with `changing` held. Of two members that change the
        same record at once one is refused (`ConflictError`), and knows the other's record after that.
Rule 3: `tell` is called without `changing`: two members that tell each other would wait for each other. A member that
        does not answer in time hears of it by the note.
Rule 4: names that are to be looked at are kept once each. They are names of declarations, which features bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from motorcade.core.errors import StoreConflictError
from motorcade.extension.ask_all import ask_all
from motorcade.extension.cluster import Cluster
from motorcade.extension.declared import ConflictError
from motorcade.extension.plugin import Context
from motorcade.storage.homes import home_of_record
from motorcade.storage.ports import Batch, Expect, Store, StoreError

RETRY: Final = 1.0  #: seconds until a record that could not be read, or put in force, is tried again

Changed = Callable[[str, bytes | None], Awaitable[None]]  #: a name, and its record now; None: there is none


@dataclass(frozen=True, slots=True)
class DeclarationKind:
    """The names of one feature's declarations."""

    noun: str  #: in messages: `stream`, `queue`, …
    collection: str  #: of the records, by name
    code: str  #: one letter: notes about them begin with it (`Cluster.on_note`)

    @property
    def question(self) -> str:
        """Return the question by which a member tells another one to look."""
        return f"declared.{self.collection}"


class Declarations:
    """The stored declarations of one feature."""

    def __init__(self, context: Context, kind: DeclarationKind, changed: Changed) -> None:
        self.changing = asyncio.Lock()
        self.values: dict[str, bytes] = {}  #: records as they are known here
        self._context = context
        self._kind = kind
        self._changed = changed
        self._cluster: Cluster | None = context.cluster
        self._store: Store = context.store
        self._now = context.hub.now
        self._spawn = context.spawn
        self._log: structlog.stdlib.BoundLogger = context.log
        self._noted: dict[str, None] = {}  # to be looked at
        self._looking = False

    async def load(self) -> dict[str, bytes]:
        """Read all records, for a feature that starts; `follow` from there on."""
        kind = self._kind
        self.values = {name: value async for name, value in self._store.records.scan(kind.collection, self._now())}
        return dict(self.values)

    def follow(self) -> None:
        """Put in force what other members change from now on, and what they have changed since `load`."""
        if self._cluster is not None:
            self._context.at_end(self._cluster.on_ask(self._kind.question, self._asked))
            self._context.at_end(self._cluster.on_note(self._kind.code, self._on_note, self._reload))

    # -- changes made here

    async def write(self, name: str, value: bytes | None) -> None:
        """Store a record, or remove it (None); with `changing` held (rule 2)."""
        kind, batch = self._kind, Batch()
        batch.conditions = [Expect(kind.collection, name, self.values.get(name), self._now())]
        if value is None:
            batch.delete(kind.collection, name)
        else:
            batch.put(kind.collection, name, value)
        if self._cluster is not None:
            batch.note(self._home(name), f"{kind.code}{name}".encode())
        try:
            await self._store.write(batch)
        except StoreConflictError as error:
            await self.refresh(name)
            raise ConflictError(
                f"{kind.noun} {name!r} was changed on another node at the same time; look at it, and try again"
            ) from error
        self._know(name, value)

    async def tell(self, name: str) -> dict[str, str]:
        """Have all other members put a record in force; return those that do not answer, and why (rule 3)."""
        if self._cluster is None or not self._cluster.peers:
            return {}
        silent = (await ask_all(self._cluster, self._kind.question, name.encode())).silent
        if silent:
            self._log.warning(
                "declaration_told_late", **{self._kind.noun: name}, silent=silent, consequence="they hear of it later"
            )
        return silent

    # -- changes made elsewhere

    async def look(self, name: str) -> None:
        """Read a record, and put it in force if it is another one than before."""
        async with self.changing:
            await self.refresh(name)

    async def refresh(self, name: str) -> None:
        """Do the same with `changing` held."""
        value = await self._store.records.get(self._kind.collection, name, self._now())
        if value != self.values.get(name):
            await self._changed(name, value)
            self._know(name, value)

    def _know(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    async def _asked(self, _member: str, body: bytes) -> bytes:
        await self.look(body.decode())
        return b""

    def _on_note(self, _feed: int, _number: int, data: bytes) -> None:
        self._noted[data.decode()] = None
        if not self._looking:
            self._looking = True
            self._spawn(self._look_at_noted(), "declared")

    async def _look_at_noted(self) -> None:
        try:
            while self._noted:
                name = next(iter(self._noted))
                del self._noted[name]
                try:
                    await self.look(name)
                except StoreError as error:
                    self._log.info("declaration_not_read", **{self._kind.noun: name}, error=str(error))
                    self._noted[name] = None
                    await asyncio.sleep(RETRY)
        finally:
            self._looking = False

    async def _reload(self, feed: int) -> None:
        """Read the records of a cell again."""
        found = {
            name: value async for name, value in self._store.records.scan(self._kind.collection, self._now(), feed=feed)
        }
        here = [name for name in self.values if self._store.feeds.feed_of(self._home(name)) == feed]
        for name in dict.fromkeys((*here, *found)):
            if self.values.get(name) != found.get(name):
                await self.look(name)

    def _home(self, name: str) -> str:
        return home_of_record(self._kind.collection, name)
