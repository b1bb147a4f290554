"""Writes messages to a stream as fast as redis-py can, in pipelines of 1000.

    python publisher.py URL STREAM FIELD COUNT

It makes its messages first, says `ready` and waits for a line on standard input.
"""

from __future__ import annotations

import sys
import uuid

import redis

PIPELINE = 1000


def main() -> None:
    url, stream, field, count = sys.argv[1:]
    client = redis.Redis.from_url(url)
    texts = [f'{{"message_id": "{uuid.uuid4()}"}}' for _ in range(int(count))]
    print("ready", flush=True)
    sys.stdin.readline()
    for first in range(0, len(texts), PIPELINE):
        line = client.pipeline(transaction=False)
        for text in texts[first : first + PIPELINE]:
            line.xadd(stream, {field: text})
        line.execute()


if __name__ == "__main__":
    main()
