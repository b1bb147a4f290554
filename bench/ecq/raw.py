"""Compacted queues on RocksDB driven directly: what the hardware and the binding can do at best.

    {"queues": 1000, "producers": 100, "keys": 1, "messages": 400000, "size": 256, "group": 2000}   on stdin
    {"append": …, "append_cpu_us": …, "drain": …, "drain_cpu_us": …}                                on stdout

Same files and options as the store, one thread, no event loop, no network. It writes what any layout needs: a row for
each message under queue and number, a row that leads from queue and key to the number, and removes the row of the value
before, all in one batch; a sync after each `group` messages, which is what the producers can have in flight. The drain
reads every row of every queue in order. It keeps no counts, sizes, times or progress, and sends nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rocksdict import WriteBatch

from motorcade.storage.files import Files, RocksTables

NUMBER = struct.Struct(">Q")
HEAD = bytes(40)  # time, publisher, key: what any record says beside the payload


def append(opened: RocksTables, told: dict[str, Any], payloads: list[bytes]) -> None:
    """Producer by producer and queue by queue, as the generator does it."""
    db, entries, keys = opened.db, opened.handles["entries"], opened.handles["keys"]
    queues, producers, group = told["queues"], told["producers"], told["group"]
    last = [0] * queues
    batch = WriteBatch(raw_mode=True)
    for number in range(told["messages"]):
        turn, producer = divmod(number, producers)
        queue = (producer + turn) % queues
        last[queue] += 1
        name, place = b"ecq:bench-q%d\0" % queue, NUMBER.pack(last[queue])
        where = name + b"%d/%d" % (producer, turn // queues % told["keys"])
        old = opened.keys.get(where)
        if old is not None:
            batch.delete(name + old, entries)
        batch.put(where, place, keys)
        batch.put(name + place, HEAD + payloads[number % len(payloads)], entries)
        if number % group == group - 1:
            db.write(batch)
            db.flush_wal(True)
            batch = WriteBatch(raw_mode=True)
    db.write(batch)
    db.flush_wal(True)


def drain(opened: RocksTables, queues: int, size: int) -> int:
    """Every row of every queue; how many there were."""
    count = 0
    for queue in range(queues):
        name = b"ecq:bench-q%d\0" % queue
        rows = opened.entries.iter()
        rows.seek(name)
        while rows.valid() and rows.key().startswith(name):
            assert len(rows.value()) == len(HEAD) + size
            count += 1
            rows.next()
    return count


def measure(told: dict[str, Any]) -> dict[str, float]:
    """Both, on files of their own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-ecq-"))
    payloads = [os.urandom(told["size"]) for _ in range(1009)]
    files = Files(folder / "store")
    files.open()
    try:
        with files.reading() as opened:
            wall, cpu = time.perf_counter(), time.process_time()
            append(opened, told, payloads)
            appended = time.perf_counter() - wall, time.process_time() - cpu
            wall, cpu = time.perf_counter(), time.process_time()
            count = drain(opened, told["queues"], told["size"])
            drained = time.perf_counter() - wall, time.process_time() - cpu
            del opened
    finally:
        files.close()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "append": told["messages"] / appended[0],
        "append_cpu_us": appended[1] / told["messages"] * 1e6,
        "drain": count / drained[0],
        "drain_cpu_us": drained[1] / count * 1e6,
        "kept": count,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.load(sys.stdin))))
