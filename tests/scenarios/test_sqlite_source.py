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
COUNT = 2000
WINDOW = 32  #: the node's default; the client does not ask for less
PATIENCE = 60.0

CONFIG = """
[plugins.rows]
path = "{path}"
database = "{database}"
tables = ["orders", "marks"]
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as shop, shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT, label BLOB)")
        shop.execute("CREATE TABLE marks (id INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT)")
        shop.execute("CREATE TABLE secrets (id INTEGER PRIMARY KEY AUTOINCREMENT, item TEXT)")
        shop.execute("INSERT INTO secrets (item) VALUES ('salary')")
    return path


@pytest.fixture
def node(database: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    with serving(database, tmp_path / "data") as running:
        yield running


def serving(database: Path, data: Path) -> NodeProcess:
    return NodeProcess(config=CONFIG.format(path=EXAMPLE, database=database), data=data)


def insert(database: Path, count: int, table: str = "orders") -> list[int]:
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


def test_all_rows_arrive_once_and_in_order_in_step_with_the_window(node: NodeProcess, database: Path) -> None:
    """A reader that does not acknowledge gets a window full; then the rest, and what is inserted meanwhile."""
    ids = insert(database, COUNT)
    with reader(node) as client:
        client.subscribe("rows/orders", 1)
        held = take(client, WINDOW, ack=False)
        client.expect_nothing()
        later = insert(database, 10)
        acknowledge(client, held)
        rest = take(client, COUNT + len(later) - WINDOW)
        assert ids + later == rows(held + rest)
        latest = insert(database, 3)
        assert latest == rows(take(client, 3))
    assert not any(message.dup for message in held + rest)
    assert {"id": 1, "item": "orders-0", "label": None} == json.loads(held[0].payload)
    assert {("rows/orders", 1)} == {(message.topic, message.qos) for message in held}


def test_a_take_over_in_the_middle_loses_and_doubles_nothing(node: NodeProcess, database: Path) -> None:
    """What was in flight is sent again by the session, with DUP; everything else comes once, behind it."""
    ids = insert(database, COUNT)
    with reader(node) as first:
        first.subscribe("rows/orders", 1)
        done = take(first, COUNT // 2)
        held = take(first, WINDOW, ack=False)
        with reader(node) as second:
            assert (held_rows := rows(held)) == rows(again := take(second, WINDOW))
            assert all(message.dup for message in again)
            rest = take(second, COUNT - len(done) - len(held))
            assert not any(message.dup for message in rest)
            assert ids == rows(done) + held_rows + rows(rest)
            later = insert(database, 3)
            assert later == rows(take(second, 3))  # not one of the old rows in between


def test_unsubscribing_stops_it_and_subscribing_again_goes_on(node: NodeProcess, database: Path) -> None:
    """Nothing comes after UNSUBACK; the place is kept."""
    ids = insert(database, 100)
    with reader(node) as client:
        client.subscribe("rows/orders", 1)
        assert ids == rows(take(client, 100))
        client.unsubscribe("rows/orders")
        client.subscribe("rows/marks", 1)
        missed = insert(database, 5)
        for _ in range(2):  # the second mark is found by a later look than the first: whoever reads orders has looked
            insert(database, 1, "marks")
            (mark,) = take(client, 1)
            assert "rows/marks" == mark.topic
        client.unsubscribe("rows/marks")
        client.subscribe("rows/orders", 1)
        assert missed == rows(take(client, 5))


def test_after_a_crash_of_the_node_no_row_is_missing(database: Path, tmp_path: Path) -> None:
    """Killed in the middle; the client gets some rows again at most, and all others."""
    ids = insert(database, COUNT)
    with serving(database, tmp_path / "data") as node:
        with reader(node) as client:
            client.subscribe("rows/orders", 1)
            before = rows(take(client, COUNT // 2))
        node.kill()
    with serving(database, tmp_path / "data") as node, reader(node) as client:
        after = [*rows(take(client, 1))]
        assert ids[0] < after[0] <= before[-1] + 1  # it did not begin anew, and skipped nothing
        after += rows(take(client, ids[-1] - after[0]))
        assert list(range(after[0], ids[-1] + 1)) == after


def test_each_client_has_its_own_place(node: NodeProcess, database: Path) -> None:
    """One that comes later gets everything too; QoS 0 works as well."""
    ids = insert(database, 200)
    with reader(node, "one") as one, reader(node, "two") as two:
        one.subscribe("rows/orders", 1)
        assert ids == rows(take(one, 200))
        two.subscribe("rows/orders", 0)
        messages = take(two, 200, ack=False)
        assert (ids, {0}) == (rows(messages), {message.qos for message in messages})


@pytest.mark.parametrize("filter_", ["rows/secrets", "rows/+", "rows/#", 'rows/x" UNION SELECT 1, * FROM "secrets'])
def test_only_tables_of_the_configuration_can_be_read(node: NodeProcess, database: Path, filter_: str) -> None:
    """Other filters below rows/ are ordinary subscriptions: nothing is read for them."""
    with reader(node) as client:
        client.subscribe(filter_, 1)
        client.subscribe("rows/marks", 1)
        for _ in range(2):
            insert(database, 1, "marks")
            assert ["rows/marks"] == [message.topic for message in take(client, 1)]


def test_a_table_that_cannot_be_read_for_a_while_hurts_nobody_for_long(node: NodeProcess, database: Path) -> None:
    """The reader that fails is made anew, and goes on where it was; others do not notice."""
    ids = insert(database, 50)
    with reader(node) as client, reader(node, "other") as other:
        client.subscribe("rows/orders", 1)
        assert ids == rows(take(client, 50))
        rename(database, "orders", "hidden")
        other.subscribe("rows/marks", 1)
        for _ in range(3):  # between two of them every reader has looked once, the one that cannot find its table too
            insert(database, 1, "marks")
            take(other, 1)
        rename(database, "hidden", "orders")
        later = insert(database, 5)
        assert later == rows(take(client, 5))


def test_a_reader_that_fails_in_the_middle_goes_on_without_loss_or_doubles(node: NodeProcess, database: Path) -> None:
    """What is acknowledged while there is no reader counts for the next one."""
    ids = insert(database, 400)
    with reader(node) as client:
        client.subscribe("rows/orders", 1)
        messages = take(client, WINDOW, ack=False)
        rename(database, "orders", "hidden")
        acknowledge(client, messages)
        messages += take(client, WINDOW)  # these were read before; the next ones cannot be
        rename(database, "hidden", "orders")
        messages += take(client, 400 - len(messages))
        assert ids == rows(messages)


def test_the_command_of_the_page_loads_it_for_clients_that_are_there_already(database: Path, tmp_path: Path) -> None:
    """What the page tells the reader to type works as it stands, from the root of the repository."""
    page = (ROOT / "docs" / "sources.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if line.strip().startswith("motorcade plugin load rows")]
    with NodeProcess(http=True) as node, reader(node) as client:
        client.subscribe("rows/orders", 1)
        ids = insert(database, 5)
        words = [word.replace("$PWD", str(tmp_path)) for word in shlex.split(line)]
        command = [sys.executable, "-m", *words, "--http", str(node.http)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert 0 == done.returncode, done.stderr
        assert ids == rows(take(client, 5))


def rename(database: Path, old: str, new: str) -> None:
    with closing(sqlite3.connect(database, timeout=PATIENCE)) as shop, shop:
        shop.execute(f"ALTER TABLE {old} RENAME TO {new}")
