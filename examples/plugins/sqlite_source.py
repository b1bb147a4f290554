"""Rows of SQLite tables for subscribers of rows/{table}; docs/sources.md explains the code."""

import asyncio
import sqlite3

import msgspec

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.plugin import Plugin
from motorcade.extension.sources import Ack, Answer, Feed, Given, Source, SourceType, Why


class Reader(Source):
    """One client's way through one table."""

    def __init__(self, feed: Feed, plugin: "Rows") -> None:
        super().__init__(feed)
        self.plugin, self.fetching, self.found, self.last = plugin, False, list[sqlite3.Row](), -1  # -1: not known yet

    def subscribe(self, subscription: Subscription, _why: Why) -> bool:
        self.filter, self.key = subscription.filter, f"{subscription.filter}/{self.feed.client.client_id}"
        self.feed.send("begin")
        return self.filter.removeprefix("rows/") in self.plugin.config.tables

    def info(self, what: object, desired: int) -> Answer:
        if isinstance(what, asyncio.Task):
            what.result()  # raises if the fetch has failed: this reader ends, and after a while there is another one
        rows, self.found = self.found[:desired], []
        self.last = rows[-1][0] if rows else self.last
        if desired > len(rows) and not self.fetching:
            self.fetching = True
            self.plugin.context.spawn(self.fetch(desired - len(rows)), "fetch").add_done_callback(self.feed.send)
        return [Given(Message(self.filter, msgspec.json.encode(dict(row)), qos=1), self.filter, row[0]) for row in rows]

    def delivered(self, given: Given, ack: Ack) -> Answer:
        place = self.feed.kept = next((other.tag - 1 for other in self.feed.inflight), given.tag)
        self.plugin.context.spawn(self.plugin.context.store.records.put("rows", self.key, b"%d" % place), "save")
        return self.info("room", ack.desired)

    async def fetch(self, room: int) -> None:
        if self.last < 0:
            place = self.feed.kept or int(await self.plugin.context.store.records.get("rows", self.key, 0.0) or 0)
            self.last = max((given.tag for given in self.feed.inflight), default=place)
        query = f'SELECT rowid, * FROM "{self.filter[5:]}" WHERE rowid > ? ORDER BY rowid LIMIT ?'  # noqa: S608 - known
        rows = await asyncio.to_thread(lambda: self.plugin.database.execute(query, (self.last, room)).fetchall())
        await asyncio.sleep(0 if rows else 0.2)
        self.found, self.fetching = rows, False


class Rows(Plugin):
    """Lets clients read the tables that the configuration names."""

    Config = msgspec.defstruct("Config", [("database", str), ("tables", list[str])], forbid_unknown_fields=True)

    async def start(self) -> None:
        self.database = sqlite3.connect(f"file:{self.config.database}?mode=ro", uri=True, check_same_thread=False)
        self.database.row_factory = sqlite3.Row
        self.context.add_source(SourceType("rows", lambda feed: Reader(feed, self), prefix="rows/"))
