"""A plain Python consumer of a stream: what somebody would write who has no Spark, and knows how to write it well.

    plain.py URL AFTER LAST MODE     waits for a line on stdin, reads, prints CPU seconds and sums as JSON

It reads pages of a thousand and more, decodes each record into a struct with msgspec, and goes over the rows once (to
decode a whole page in one call takes longer). From Redis it reads with redis-py and hiredis, as everybody does; from an
embedded store with Motorcade's own reader, since nothing else can. In the modes that parse, it parses the payload too,
into a struct, which is quicker than into a dictionary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import msgspec

from motorcade.core.record import Record
from motorcade.storage.readers import open_reader

PAGE = 1000


class Telemetry(msgspec.Struct, gc=False):
    speed: int


def values_of(url: str, after: int, last: int) -> Iterator[tuple[int, list[bytes]]]:
    """Pages: the offset of the last, and the values."""
    if url.startswith("rocksdb"):
        reader = open_reader(url)
        for page in reader.pages("telemetry", after, last):
            yield page.offsets[-1], list(page.values)
        reader.close()
        return
    import redis  # noqa: PLC0415

    reader = open_reader(url)
    key = reader._cells.key(reader._cells.of("telemetry"), "S:telemetry")  # type: ignore[attr-defined]
    reader.close()
    client = redis.Redis.from_url(url)
    while after < last:
        rows = client.xrange(key, f"{after + 1}-0", f"{min(after + PAGE, last)}-0")
        after += PAGE
        yield int(rows[-1][0].partition(b"-")[0]), [fields[b"v"] for _, fields in rows]


def main() -> None:
    url, after, last, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    decode = msgspec.msgpack.Decoder(Record).decode
    parse = msgspec.json.Decoder(Telemetry).decode
    print("ready", flush=True)
    sys.stdin.readline()
    parsing = mode in ("parse", "from_json")
    cpu = time.process_time()
    rows = size_bytes = speeds = reached = 0
    for offset, values in values_of(url, after, last):
        reached = offset
        rows += len(values)
        for value in values:
            record = decode(value)
            if parsing:
                speeds += parse(record.payload).speed
            else:
                size_bytes += len(record.payload)
    print(
        json.dumps(
            {
                "cpu": time.process_time() - cpu,
                "sums": [rows, size_bytes, reached, speeds],
            }
        )
    )


if __name__ == "__main__":
    main()
