"""`motorcade store`: look after what a node keeps.

An embedded store admits one process. If a node has it, `stats` and `backup` ask that node over its control port;
`check` and `export` ask it for a copy, made by hard links in the store's own directory, work on that in this process,
so that the node does not wait for them, and remove it. A store on Redis can be opened by any process at any time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeVar, cast

import typer

from motorcade.cli import _control, _output
from motorcade.cli._groups import verb
from motorcade.cli._store import NodeStoreFlags, StoreFlags, StoreLocation, find_store

if TYPE_CHECKING:
    from motorcade.storage.redis import RedisStore
    from motorcade.storage.transfer import ExportSource, ImportTarget

app = typer.Typer(no_args_is_help=True, help="Check, measure, copy and move the store of a node.")

_ASK_EVERY = 0.1  # seconds between two questions whether a backup is done
_SHOW_EVERY = 0.2  # seconds between two lines of progress

T = TypeVar("T")


# -- verbs


@verb(app)
def check(*, given: NodeStoreFlags) -> None:
    """Check the store; list what is wrong, exit code 1 if anything is. Changes nothing."""
    where = given.find()
    findings, version = _check_embedded(where) if where.path is not None else asyncio.run(_check_shared(where))
    if given.as_json:
        _output.print_json({"ok": not findings, "store": where.shown, "format": version, "findings": findings})
    else:
        print("\n".join(findings or [f"{where.shown}: format {version}, nothing is wrong"]))
    if findings:
        raise typer.Exit(1)


@verb(app)
def stats(*, given: NodeStoreFlags) -> None:
    """Show sizes and counts."""
    where = given.find()
    found = _stats_embedded(where) if where.path is not None else asyncio.run(_stats_shared(where))
    if given.as_json:
        _output.print_json(found)
    else:
        _output.print_fields(_lines(found))


@verb(app)
def export(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Compressed if it ends in .gz; - is standard output.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    *,
    given: NodeStoreFlags,
) -> None:
    """Write everything to one file, which `import` reads into a store of any engine."""
    if file == "-" and given.as_json:
        raise typer.BadParameter("standard output is taken by the store itself; leave --json out", param_hint="--json")
    if file == "-" and sys.stdout.isatty():
        raise typer.BadParameter("a terminal cannot show it; write `> FILE`, or name the file", param_hint="FILE")
    where = given.find()
    with _written(file, force=force) as out:
        if where.path is not None:
            from motorcade.storage.transfer_rocks import RocksSource

            with _quiet(where) as place:
                counts = asyncio.run(_export(RocksSource(place), out))
        else:
            counts = asyncio.run(_export_shared(where, out))
    if given.as_json:
        _output.print_json({"file": file, "store": where.shown, **counts})
    elif file != "-":
        print(f"{file}: {_told(counts)}")


@verb(app, "import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Made by `export`; - is standard input.")],
    *,
    given: NodeStoreFlags,
) -> None:
    """Fill an empty store from a file. No node may use the store meanwhile."""
    from motorcade.storage import transfer

    where = given.find(ask=False)
    with _readable(file) as reading:
        header, promised = transfer.verify(reading)
        work = _import_embedded(where, reading) if where.path is not None else _import_shared(where, reading)
        counts = asyncio.run(work)
    if counts != promised:
        raise transfer.TransferError(f"{_told(counts)} were imported, but the file holds {_told(promised)}")
    if given.as_json:
        made = {"engine": header.engine, "made_at": header.made_at, "made_by": header.made_by}
        _output.print_json({"file": file, "store": where.shown, "from": made, **counts})
    else:
        print(f"{where.shown}: {_told(counts)}, from {header.engine} at {_output.when(header.made_at)}")


@verb(app)
def backup(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory; the copy in it can be served.")],
    *,
    given: NodeStoreFlags,
) -> None:
    """Copy an embedded store, while a node goes on with it or not."""
    where = given.find()
    if where.path is None:
        raise _control.ControlError(
            "Redis is backed up by its own means: BGSAVE or BGREWRITEAOF and a copy of the files, or a replica; "
            "`motorcade store export FILE` makes a copy that every engine reads"
        )
    to = directory.absolute()
    size_bytes = _backup(where, where.path, to)
    if given.as_json:
        _output.print_json({"to": str(to), "store": where.shown, "octets": size_bytes})
    else:
        print(f"{to}: {_size(size_bytes)}; try it with `motorcade store check --store rocksdb://{to}`")


@verb(app)
def salvage(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for a copy of the store as it is.")],
    *,
    given: StoreFlags,
    as_json: _control.AsJson = False,
) -> None:
    """Open a store whose log is damaged, and give up what was written after the damage. No node may use it."""
    where = find_store(given, None, None, ask=False, told=not as_json)
    if where.path is None:
        raise _control.ControlError("Redis mends its own files: see `redis-check-aof --fix`")
    to = directory.absolute()
    size_bytes, findings = _salvage(where.path, to)
    if as_json:
        told = {"ok": not findings, "store": where.shown, "copy": str(to), "octets": size_bytes, "findings": findings}
        _output.print_json(told)
    else:
        print(f"{to}: {_size(size_bytes)}, as it was")
        print("\n".join(findings or [f"{where.shown}: opens again, nothing is wrong with what is left"]))
    if findings:
        raise typer.Exit(1)


# -- an embedded store


@contextmanager
def _quiet(where: StoreLocation) -> Iterator[Path]:
    """Yield a directory that no process writes: the store itself, or a copy if a node has it open."""
    from motorcade.storage import embedded

    path = cast("Path", where.path)
    with ExitStack() as stack:
        try:
            stack.enter_context(embedded.claimed(path))
        except embedded.InUseError:
            copy = path / f"copy-{secrets.token_hex(4)}"  # of this name, the store removes what a crash has left
            _let_copy(_node_of(where, path), copy)
            stack.callback(shutil.rmtree, copy, ignore_errors=True)
            path = copy
        yield path


def _node_of(where: StoreLocation, path: Path) -> _control.ControlClient:
    """Return the node that has the store open."""
    control = _control.ControlClient(where.http, where.token)
    try:
        found = control.call("GET", "store")
    except _control.ControlError as error:
        raise _control.ControlError(f"the store at {path} is in use by another process, and {error}") from error
    if not found["place"] or Path(found["place"]).resolve() != path.resolve():
        raise _control.ControlError(
            f"the store at {path} is in use by another process, but not by the node at {where.http}; "
            "name the node that has it with --http HOST:PORT"
        )
    return control


def _let_copy(control: _control.ControlClient, to: Path) -> int:
    """Let a node copy its store; how many bytes."""
    control.call("POST", "store/backup", {"to": str(to)})
    with _progress() as show:
        while (state := control.call("GET", "store/backup"))["state"] == "running":
            show(f"copying for {state['seconds']:.0f} s")
            time.sleep(_ASK_EVERY)
    if state["state"] != "done" or state["to"] != str(to):
        raise _control.ControlError(state["error"] or "another backup has taken its place; try again")
    return int(state["octets"])


def _backup(where: StoreLocation, path: Path, to: Path) -> int:
    from motorcade.storage import embedded

    try:
        with embedded.claimed(path), _progress() as show:
            return embedded.copy(path, to, lambda done, whole: show(f"{_size(done)} of {_size(whole)}"))
    except embedded.InUseError:
        return _let_copy(_node_of(where, path), to)


def _salvage(path: Path, to: Path) -> tuple[int, list[str]]:
    from motorcade.storage import embedded
    from motorcade.storage.rocks import RocksStore

    async def open_once() -> None:
        opened = RocksStore(path, salvage=True)
        await opened.open()
        await opened.close()

    with embedded.claimed(path), _progress() as show:
        size_bytes = embedded.copy(path, to, lambda done, whole: show(f"{_size(done)} of {_size(whole)}"))
    asyncio.run(open_once())
    with embedded.claimed(path):
        return size_bytes, embedded.check(path)


def _check_embedded(where: StoreLocation) -> tuple[list[str], int]:
    from motorcade.storage import embedded, tables

    with _quiet(where) as place, _progress() as show:
        show("looking at every row")
        return embedded.check(place), tables.FORMAT


def _stats_embedded(where: StoreLocation) -> dict[str, Any]:
    from motorcade.storage import embedded, tables

    path = cast("Path", where.path)
    found: dict[str, Any] = {"store": where.shown, "engine": "rocksdb"}
    try:
        with embedded.claimed(path):
            return found | asdict(embedded.contents(path))
    except embedded.InUseError:
        told = _node_of(where, path).call("GET", "store")
    by_collection = embedded.records_beside(path)
    figures = {key: value for key, value in told["figures"].items() if key not in {"engine", "records"}}
    found |= {"format": tables.FORMAT, **figures, "records": by_collection, "streams": told["streams"]}
    return found | {"records_total": told["figures"]["records"], "pid": told["pid"], "sweeps": told["sweeps"]}


async def _import_embedded(where: StoreLocation, reading: BinaryIO) -> dict[str, int]:
    from motorcade.storage import embedded, transfer
    from motorcade.storage.transfer_rocks import RocksSource, RocksTarget

    path = cast("Path", where.path)
    now = time.time()
    with ExitStack() as stack:
        before: list[transfer.Content] = []
        if path.exists() and any(path.iterdir()):
            stack.enter_context(embedded.claimed(path))
            if not await transfer.is_empty(RocksSource(path), now):
                raise transfer.TransferError(f"the store at {path} is not empty; give the import a place of its own")
            # An empty store may have given numbers that must never be given again.
            before = [content async for content in RocksSource(path).contents(now)]
        target = RocksTarget(path)
        stack.callback(target.abandon)  # does nothing once it is finished
        for content in before:
            await target.load(content)
        return await _load(target, reading)


# -- a store on Redis


async def _shared(
    where: StoreLocation, work: Callable[[RedisStore], Coroutine[Any, Any, T]], durability: str = "fast"
) -> T:
    from motorcade.storage import open_store
    from motorcade.storage.ports import Durability

    async with _served(where) as url:
        store = cast("RedisStore", await open_store(url, Durability(durability)))
        try:
            return await work(store)
        finally:
            await store.close()


@asynccontextmanager
async def _served(where: StoreLocation) -> AsyncIterator[str]:
    """Yield the URL of a store on Redis; a private one that does not run is run for as long."""
    if where.private is None:
        yield where.url
        return
    from motorcade.storage.ports import Durability
    from motorcade.supervisor.program import find_program
    from motorcade.supervisor.valkey import served

    async with served(where.private, find_program(), Durability(where.durability)) as url:
        yield url


async def _check_shared(where: StoreLocation) -> tuple[list[str], int]:
    from motorcade.storage.redis_checks import VERSION

    with _progress() as show:
        show("looking at every mailbox")
        return await _shared(where, lambda store: store.check()), VERSION


async def _stats_shared(where: StoreLocation) -> dict[str, Any]:
    from motorcade.storage.redis_checks import VERSION
    from motorcade.storage.transfer_redis import summary

    async def ask(store: RedisStore) -> dict[str, Any]:
        figures = asdict(await store.figures())
        mailboxes, records, streams = await summary(store)
        # Of this process, which has done nothing.
        for own in ("commits", "writes", "queued", "swept"):
            del figures[own]
        total = figures.pop("records")
        found = {"store": where.shown, "engine": figures.pop("engine"), "format": VERSION, "mailboxes": mailboxes}
        return found | figures | {"records": records, "records_total": total, "streams": streams}

    return await _shared(where, ask)


async def _export_shared(where: StoreLocation, out: BinaryIO) -> dict[str, int]:
    from motorcade.storage.ports import Durability
    from motorcade.storage.redis import RedisStore
    from motorcade.storage.transfer_redis import RedisSource

    async with _served(where) as url:
        store = RedisStore(url, Durability.FAST, only_read=True)  # also one of the format before
        await store.open()
        try:
            return await _export(RedisSource(store), out)
        finally:
            await store.close()


async def _import_shared(where: StoreLocation, reading: BinaryIO) -> dict[str, int]:
    from motorcade.storage import transfer
    from motorcade.storage.ports import StoreError
    from motorcade.storage.transfer_redis import RedisSource, RedisTarget

    async def fill(store: RedisStore) -> dict[str, int]:
        now = time.time()
        if not await transfer.is_empty(RedisSource(store), now):
            raise transfer.TransferError(f"the store at {where.shown} is not empty; add ?prefix=NAME for another one")
        try:
            return await _load(RedisTarget(store, now), reading)
        except StoreError as error:
            raise transfer.TransferError(
                f"the import was not finished ({error}); the store holds a part of it and opens no more: remove its "
                "keys, or import into another prefix"
            ) from error

    return await _shared(where, fill, where.durability)


# -- files


async def _export(source: ExportSource, out: BinaryIO) -> dict[str, int]:
    from motorcade.storage import transfer

    with _progress() as show:
        return await transfer.export(source, out, time.time(), lambda counts: show(lambda: _told(counts)))


async def _load(target: ImportTarget, reading: BinaryIO) -> dict[str, int]:
    from motorcade.storage import transfer

    with _progress() as show:
        return await transfer.load(target, reading, lambda counts: show(lambda: _told(counts)))


@contextmanager
def _written(file: str, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets its name when it is complete and on the disk."""
    import gzip

    if file == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(file)
    if path.exists() and not force:
        raise _control.ControlError(f"{path} is there already; --force replaces it")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        # For this user's eyes only: it holds messages.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6) as packed:
                    yield cast("BinaryIO", packed)
            else:
                yield out
            out.flush()
            os.fsync(out.fileno())
        partial.rename(path)
    except OSError as error:
        raise _control.ControlError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _readable(file: str) -> Iterator[BinaryIO]:
    """Open a file that can be read twice: once to verify it, once to import it."""
    if file == "-":
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            kept.seek(0)
            yield cast("BinaryIO", kept)
        return
    try:
        reading = Path(file).open("rb")  # noqa: SIM115 - closed below; opening has an error of its own
    except OSError as error:
        raise _control.ControlError(f"{file} cannot be read: {error.strerror}") from error
    with reading, tempfile.TemporaryFile() as kept:
        if not reading.seekable():
            shutil.copyfileobj(reading, kept)
            kept.seek(0)
        yield cast("BinaryIO", reading if reading.seekable() else kept)


# -- telling


@contextmanager
def _progress() -> Iterator[Callable[[str | Callable[[], str]], None]]:
    """Yield `show(text)`: one line that changes, if a person watches; text that costs something comes as a function."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    shown_at = 0.0

    def show(text: str | Callable[[], str]) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= _SHOW_EVERY:
            shown_at = now
            print(f"\r\x1b[K{text if isinstance(text, str) else text()}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _told(counts: dict[str, int]) -> str:
    names = {"mailboxes": "mailboxes", "entries": "entries", "records": "records", "streams": "streams"}
    return ", ".join(f"{counts[key]} {name}" for key, name in names.items()) + f", {_size(counts['blob_octets'])} apart"


def _lines(found: dict[str, Any]) -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = []
    for name, value in found.items():
        match value:
            case dict():
                lines += [(f"{name}.{key}", inner) for key, inner in value.items()]
            case int() if name.endswith("octets"):
                lines.append((name, f"{value} ({_size(value)})"))
            case _:
                lines.append((name, value))
    return lines


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
