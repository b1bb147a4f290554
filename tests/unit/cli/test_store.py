"""`motorcade store` on stores that no node has open."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from motorcade.storage import tables, transfer
from motorcade.storage.files import Files, write_meta
from motorcade.storage.ports import Draft
from motorcade.storage.rocks import RocksStore
from tests.support.commands import PATIENCE, environment
from tests.unit.cli.conftest import Run

PAYLOAD = b"payload " * 100
NOW = 2_000_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two mailboxes, two collections and a stream."""
    asyncio.run(_fill(tmp_path / "store"))
    return tmp_path / "store"


async def _fill(path: Path) -> None:
    store = RocksStore(path)
    await store.open()
    await store.mailboxes.append(["session:a", "session:b"], Draft(b"body", PAYLOAD), NOW)
    await store.mailboxes.append(["session:a"], Draft(b"other"), NOW)
    await store.records.put("session", "a", b"value")
    await store.records.put("session", "b", b"value")
    await store.records.put("retained", "topic", b"value")
    await store.streams.append("receipts", [b"1", b"2"], NOW)
    await store.close()


async def bodies(path: Path, owner: str) -> list[tuple[int, bytes, bytes]]:
    store = RocksStore(path)
    await store.open()
    found = await store.mailboxes.read(owner, 0, 100, NOW)
    await store.close()
    return [(entry.position, entry.body, entry.payload) for entry in found]


def snapshot(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_a_good_store_passes_and_stays_as_it_is(run: Run, path: Path) -> None:
    before = snapshot(path)
    done = run("store", "check", "--store", f"rocksdb://{path}")
    assert (0, "") == (done.returncode, done.stderr)
    assert f"rocksdb://{path}: format {tables.FORMAT}, nothing is wrong\n" == done.stdout
    told = json.loads(run("store", "check", "--store", f"rocksdb://{path}", "--json").stdout)
    assert {"ok": True, "store": f"rocksdb://{path}", "format": tables.FORMAT, "findings": []} == told
    assert before == snapshot(path)


def test_the_store_is_found_as_serve_finds_it(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(f'[store]\nurl = "rocksdb://"\n[data]\ndir = "{tmp_path}"\n')
    for arguments in (("--config", "m.toml"), ("--store", "rocksdb://", "--data", tmp_path)):
        assert f"rocksdb://{path}: format" in run("store", "check", *arguments).stdout


def test_a_damaged_file_is_named(run: Run, path: Path) -> None:
    # What was written last is in the log; a copy that was opened once has sorted files.
    asyncio.run(bodies(path, "session:a"))
    largest = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[: len(content) // 2] = os.urandom(len(content) // 2)
    largest.write_bytes(bytes(content))
    done = run("store", "check", "--store", f"rocksdb://{path}")
    assert 1 == done.returncode
    assert str(largest) in done.stdout
    assert not json.loads(run("store", "check", "--store", f"rocksdb://{path}", "--json").stdout)["ok"]


def test_what_does_not_agree_is_found(run: Run, path: Path) -> None:
    files = Files(path)
    opened = files.open()
    opened.keys[b"session:a\0key"] = tables.NUMBER.pack(1)
    del opened
    files.close()
    done = run("store", "check", "--store", f"rocksdb://{path}")
    assert (1, "1 compaction keys, but 0 entries that have one\n") == (done.returncode, done.stdout)


def test_a_later_format_is_refused_by_name(run: Run, path: Path) -> None:
    files = Files(path)
    opened = files.open()
    write_meta(opened, tables.META_FORMAT, tables.FORMAT + 1)
    del opened
    files.close()
    for verb in (("check",), ("stats",), ("export", "f")):
        done = run("store", *verb, "--store", f"rocksdb://{path}")
        assert 1 == done.returncode
        assert f"has format {tables.FORMAT + 1}, this version of Motorcade knows up to {tables.FORMAT}" in done.stderr
    # A backup is made whatever the format: it is what one makes before an upgrade.
    assert 0 == run("store", "backup", "copy", "--store", f"rocksdb://{path}").returncode


def test_stats_count_everything(run: Run, path: Path) -> None:
    told = json.loads(run("store", "stats", "--store", f"rocksdb://{path}", "--json").stdout)
    assert told.pop("disk_octets") > 0
    assert {
        "store": f"rocksdb://{path}",
        "engine": "rocksdb",
        "format": tables.FORMAT,
        "mailboxes": 2,
        "entries": 3,
        "blobs": 1,
        "blob_octets": len(PAYLOAD),
        "records": {"session": 2, "retained": 1},
        "streams": {"receipts": 2},
    } == told
    lines = run("store", "stats", "--store", f"rocksdb://{path}").stdout.splitlines()
    assert ["records.session", "2"] in [line.split() for line in lines]


@pytest.mark.parametrize("name", ["out.store", "out.store.gz"])
def test_export_and_import_make_the_same_store(run: Run, path: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    told = json.loads(run("store", "export", file, "--store", f"rocksdb://{path}", "--json").stdout)
    assert (2, 3, 1, 3, 1) == tuple(told[key] for key in ("mailboxes", "entries", "blobs", "records", "streams"))
    assert name.endswith(".gz") == (file.read_bytes()[:2] == transfer.GZIP)
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    assert [name, "store"] == sorted(each.name for each in tmp_path.iterdir())
    done = run("store", "import", file, "--store", f"rocksdb://{tmp_path / 'new'}")
    assert (0, "") == (done.returncode, done.stderr)
    assert "2 mailboxes, 3 entries, 3 records, 1 streams" in done.stdout
    for owner in ("session:a", "session:b"):
        assert asyncio.run(bodies(path, owner)) == asyncio.run(bodies(tmp_path / "new", owner))


def test_a_file_is_not_replaced_unasked(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("precious")
    done = run("store", "export", "f", "--store", f"rocksdb://{path}")
    assert (1, "error: f is there already; --force replaces it\n") == (done.returncode, done.stderr)
    assert "precious" == (tmp_path / "f").read_text()
    assert 0 == run("store", "export", "f", "--force", "--store", f"rocksdb://{path}").returncode


def test_an_export_passes_through_pipes(path: Path, tmp_path: Path) -> None:
    def pipe(*args: str, data: bytes = b"") -> bytes:
        line = [sys.executable, "-m", "motorcade", "store", *args]
        done = subprocess.run(
            line, input=data, env=environment(), cwd=tmp_path, capture_output=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    made = pipe("export", "-", "--store", f"rocksdb://{path}")
    pipe("import", "-", "--store", "rocksdb://new", data=gzip.compress(made))
    assert asyncio.run(bodies(path, "session:a")) == asyncio.run(bodies(tmp_path / "new", "session:a"))


def test_json_and_the_store_do_not_share_standard_output(run: Run, path: Path) -> None:
    done = run("store", "export", "-", "--json", "--store", f"rocksdb://{path}")
    assert (2, "") == (done.returncode, done.stdout)


def test_nothing_is_imported_from_a_file_that_is_cut_off(run: Run, path: Path, tmp_path: Path) -> None:
    run("store", "export", "f", "--store", f"rocksdb://{path}")
    (tmp_path / "cut").write_bytes((tmp_path / "f").read_bytes()[:-10])
    done = run("store", "import", "cut", "--store", "rocksdb://new")
    assert (1, "error: the file is cut off: its end is missing\n") == (done.returncode, done.stderr)
    assert not (tmp_path / "new").exists()


def test_only_an_empty_store_is_imported_into(run: Run, path: Path, tmp_path: Path) -> None:
    run("store", "export", "f", "--store", f"rocksdb://{path}")
    before = asyncio.run(bodies(path, "session:a"))
    done = run("store", "import", "f", "--store", f"rocksdb://{path}")
    assert 1 == done.returncode
    assert "is not empty" in done.stderr
    assert before == asyncio.run(bodies(path, "session:a"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter").write_text("dear")
    done = run("store", "import", "f", "--store", f"rocksdb://{tmp_path / 'folder'}")
    assert (1, "dear") == (done.returncode, (tmp_path / "folder" / "letter").read_text())


async def _token(path: Path) -> int:
    store = RocksStore(path)
    await store.open()
    lease = await store.coordination.acquire("leader", "node", 0.0, NOW)
    await store.close()
    assert lease is not None
    return lease.token


def test_fencing_tokens_of_a_replaced_empty_store_go_on(run: Run, path: Path, tmp_path: Path) -> None:
    run("store", "export", "f", "--store", f"rocksdb://{path}")
    given = [asyncio.run(_token(tmp_path / "new")) for _ in range(5)]
    assert 0 == run("store", "import", "f", "--store", "rocksdb://new").returncode
    assert asyncio.run(_token(tmp_path / "new")) > max(given)
    assert 2 == len(asyncio.run(bodies(tmp_path / "new", "session:a")))


def test_a_backup_is_a_store_of_its_own(run: Run, path: Path, tmp_path: Path) -> None:
    before = snapshot(path)
    told = json.loads(run("store", "backup", "copies/one", "--store", f"rocksdb://{path}", "--json").stdout)
    copy = tmp_path / "copies" / "one"
    assert (str(copy), sum(len(file) for file in snapshot(copy).values())) == (told["to"], told["octets"])
    assert before == snapshot(path)
    assert 0o700 == stat.S_IMODE(copy.stat().st_mode)
    assert 0 == run("store", "check", "--store", f"rocksdb://{copy}").returncode
    assert asyncio.run(bodies(path, "session:a")) == asyncio.run(bodies(copy, "session:a"))
    again = run("store", "backup", "copies/one", "--store", f"rocksdb://{path}")
    assert 1 == again.returncode
    assert "exists already" in again.stderr
    assert ["one"] == [each.name for each in (tmp_path / "copies").iterdir()]


async def _crashed(path: Path, copy: Path) -> None:
    """A store as a crash leaves it, with most of it in the log."""
    store = RocksStore(path)
    await store.open()
    for number in range(100):
        await store.mailboxes.append(["session:c"], Draft(b"%d" % number, os.urandom(200)), NOW)
    shutil.copytree(path, copy)
    await store.close()


def test_a_damaged_log_is_salvaged_after_a_copy_was_made(run: Run, path: Path, tmp_path: Path) -> None:
    asyncio.run(_crashed(path, tmp_path / "crashed"))
    largest = max((tmp_path / "crashed").glob("*.log"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(bytes(content))
    before = snapshot(tmp_path / "crashed")
    checked = run("store", "check", "--store", "rocksdb://crashed")
    assert 1 == checked.returncode
    assert f"{largest.parent}" in checked.stdout
    assert "salvage" in checked.stdout
    done = run("store", "salvage", "as-it-was", "--store", "rocksdb://crashed")
    assert (0, "") == (done.returncode, done.stderr)
    assert "opens again" in done.stdout
    kept = snapshot(tmp_path / "as-it-was")
    assert kept == {name: before[name] for name in kept}
    assert largest.name in kept
    found = asyncio.run(bodies(tmp_path / "crashed", "session:c"))
    assert 0 < len(found) < 100
    assert [b"%d" % number for number in range(len(found))] == [body for _, body, _ in found]


def test_a_store_that_forgets_has_nothing_to_look_after(run: Run) -> None:
    for verb in (("check",), ("stats",), ("export", "f"), ("backup", "d"), ("import", "f")):
        done = run("store", *verb, "--store", "memory://")
        assert 1 == done.returncode
        assert "memory:// keeps nothing that outlives its node" in done.stderr


def test_a_directory_without_a_store_is_refused_and_left_alone(run: Run, tmp_path: Path) -> None:
    for verb in (("check",), ("stats",), ("export", "f"), ("backup", "d")):
        done = run("store", *verb, "--store", "rocksdb://nowhere")
        assert (1, f"error: there is no store at {tmp_path / 'nowhere'}\n") == (done.returncode, done.stderr)
        assert [] == list(tmp_path.iterdir())


def test_a_store_that_another_process_has_is_told_from_one_that_a_node_has(run: Run, path: Path) -> None:
    # Locks are a matter of processes.
    holds = "import sys, pathlib; from motorcade.storage import embedded\n"
    holds += "with embedded.claimed(pathlib.Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", holds, str(path)]
    with subprocess.Popen(line, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "ready\n" == other.stdout.readline()
        done = run("store", "check", "--store", f"rocksdb://{path}", "--http", "127.0.0.1:1")
        other.communicate()
    assert 1 == done.returncode
    assert "is in use by another process, and no node answers at http://127.0.0.1:1" in done.stderr


def test_redis_is_backed_up_by_its_own_means(run: Run) -> None:
    done = run("store", "backup", "d", "--store", "redis://user:hush@127.0.0.1:1")
    assert 1 == done.returncode
    assert "BGSAVE" in done.stderr
    assert "hush" not in done.stderr
