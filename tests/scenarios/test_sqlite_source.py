"""Does the source of the tutorial deliver rows as docs/sources.md says, to a real client of a real node?"""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.node import ROOT, NodeProcess
from tests.support.wire import PUBACK, PUBLISH, Client, Packet, ack_packet, prop

EXAMPLE = ROOT / "examples" / "plugins" / "sqlite_source.py"
SESSION_EXPIRY = 0x11
COUNT = 500
TABLES = ("day", "fails", "marks")  #: that can be read; each test has one of its own
WINDOW = 32  #: the node's default; the client does not ask for less
PATIENCE = 60.0

CONFIG = """
[plugins.rows]
path = "{path}"
database = "{database}"
tables = ["day", "fails", "marks"]
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return created(tmp_path_factory.mktemp("shop") / "shop.db")


@pytest.fixture(scope="module")
def node(database: Path) -> Iterator[NodeProcess]:
    with serving(database, database.parent / "data") as running:
        yield running


def created(path: Path) -> Path:
    """A database with tables that may be read, one that may not, and the one of the page."""
    with closing(sqlite3.connect(path)) as shop, shop:
        for table in (*TABLES, "secrets", "orders"):
            shop.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT, label BLOB)")
        shop.execute("INSERT INTO secrets (item) VALUES ('salary')")
    return path


def serving(database: Path, data: Path) -> NodeProcess:
    return NodeProcess(config=CONFIG.format(path=EXAMPLE, database=database), data=data)


def insert(database: Path, count: int, table: str) -> list[int]:
    """Insert rows in one transaction; their ids."""
    with closing(sqlite3.connect(database, timeout=PATIENCE)) as shop, shop:
        sql = f"INSERT INTO {table} (item) VALUES (?)"
        return [shop.execute(sql, (f"{table}-{n}",)).lastrowid or 0 for n in range(count)]


def reader(node: NodeProcess, client_id: str = "reader") -> Client:
    """A client whose session lasts, new or resumed."""
    client = Client(node)
    assert 0 == client.connect(client_id, clean=False, properties=prop(SESSION_EXPIRY, 600)).reason
    return client


def take(client: Client, count: int, *, ack: bool = True) -> list[Packet]:
    messages = []
    for _ in range(count):
        message = client.expect(PUBLISH, PATIENCE)
        if ack:
            acknowledge(client, [message])
        messages.append(message)
    return messages


def acknowledge(client: Client, messages: Iterable[Packet]) -> None:
    client.send(b"".join(ack_packet(PUBACK, message.packet_id or 0) for message in messages))


def rows(messages: Iterable[Packet]) -> list[int]:
    return [json.loads(message.payload)["id"] for message in messages]


def test_all_rows_arrive_once_and_in_order(node: NodeProcess, database: Path) -> None:
    """In step with the window, over a take-over, over an UNSUBSCRIBE, and for each client from the beginning."""
    ids = insert(database, COUNT, "day")
    with reader(node) as first:
        first.subscribe("rows/day", 1)
        held = take(first, WINDOW, ack=False)
        assert {"id": 1, "item": "day-0", "label": None} == json.loads(held[0].payload)
        assert {("rows/day", 1, False)} == {(message.topic, message.qos, message.dup) for message in held}
        ids += insert(database, 10, "day")
        with reader(node) as second:
            again = take(second, WINDOW)
            assert (rows(held), {True}) == (rows(again), {message.dup for message in again})
            rest = take(second, len(ids) - WINDOW)
            assert (ids[WINDOW:], {False}) == (rows(rest), {message.dup for message in rest})
            second.unsubscribe("rows/day")
            missed = insert(database, 5, "day")
            assert_nothing_is_read(second, database)
            second.subscribe("rows/day", 1)
            assert missed == rows(take(second, 5))
            with reader(node, "other") as other:
                other.subscribe("rows/day", 0)
                messages = take(other, len(ids) + 5, ack=False)
                assert (ids + missed, {0}) == (rows(messages), {message.qos for message in messages})


def assert_nothing_is_read(client: Client, database: Path) -> None:
    """Two rows of another table come: the second is found by a later look, so whoever reads has looked in between."""
    client.subscribe("rows/marks", 1)
    for _ in range(2):
        [mark] = insert(database, 1, "marks")
        [message] = take(client, 1)
        while rows([message]) != [mark]:  # marks of other tests
            assert "rows/marks" == message.topic
            [message] = take(client, 1)
        assert "rows/marks" == message.topic
    client.unsubscribe("rows/marks")


def test_only_tables_of_the_configuration_can_be_read(node: NodeProcess, database: Path) -> None:
    """Other filters below rows/ are ordinary subscriptions: nothing is read for them."""
    with reader(node, "curious") as client:
        for filter_ in ("rows/secrets", "rows/+", "rows/#", 'rows/x" UNION SELECT 1, * FROM "secrets'):
            client.subscribe(filter_, 1)
        assert_nothing_is_read(client, database)


def test_a_table_that_cannot_be_read_for_a_while_hurts_nobody_for_long(node: NodeProcess, database: Path) -> None:
    """The reader that fails is made anew, and goes on where it was, with what was acknowledged meanwhile."""
    ids = insert(database, 400, "fails")
    with reader(node, "unlucky") as client, reader(node, "neighbour") as other:
        client.subscribe("rows/fails", 1)
        messages = take(client, WINDOW, ack=False)
        rename(database, "fails", "hidden")
        acknowledge(client, messages)
        messages += take(client, WINDOW)  # these were read before; the next ones cannot be
        assert_nothing_is_read(other, database)
        rename(database, "hidden", "fails")
        messages += take(client, 400 - len(messages))
        assert ids == rows(messages)


def test_after_a_crash_of_the_node_no_row_is_missing(tmp_path: Path) -> None:
    """Killed in the middle; the client gets some rows again at most, and all others."""
    database = created(tmp_path / "shop.db")
    ids = insert(database, COUNT, "day")
    with serving(database, tmp_path / "data") as node:
        with reader(node) as client:
            client.subscribe("rows/day", 1)
            before = rows(take(client, COUNT // 2))
        node.kill()
    with serving(database, tmp_path / "data") as node, reader(node) as client:
        after = [*rows(take(client, 1))]
        assert ids[0] < after[0] <= before[-1] + 1  # it did not begin anew, and skipped nothing
        after += rows(take(client, ids[-1] - after[0]))
        assert list(range(after[0], ids[-1] + 1)) == after


def test_the_command_of_the_page_loads_it_for_clients_that_are_there_already(tmp_path: Path) -> None:
    """What the page tells the reader to type works as it stands, from the root of the repository."""
    database = created(tmp_path / "shop.db")
    page = (ROOT / "docs" / "sources.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if line.strip().startswith("motorcade plugin load rows")]
    with NodeProcess(http=True) as node, reader(node) as client:
        client.subscribe("rows/orders", 1)
        ids = insert(database, 5, "orders")
        words = [word.replace("$PWD", str(tmp_path)) for word in shlex.split(line)]
        command = [sys.executable, "-m", *words, "--http", str(node.http)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert 0 == done.returncode, done.stderr
        assert ids == rows(take(client, 5))


def rename(database: Path, old: str, new: str) -> None:
    with closing(sqlite3.connect(database, timeout=PATIENCE)) as shop, shop:
        shop.execute(f"ALTER TABLE {old} RENAME TO {new}")
