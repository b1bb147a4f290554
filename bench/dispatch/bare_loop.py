"""What one would write without a dispatcher: XREADGROUP, XADD for each entry, XACK, with redis-py.

    python bare_loop.py URL SOURCE TARGET GROUP CONSUMER BATCH FIELD

One process. It says `ready`, waits for a line on standard input, and goes on until a read of half a second finds
nothing; then it prints how many entries it has carried and what processor time that took. One round trip reads a batch,
one pipeline writes it and acknowledges it: nothing cheaper can be said to a server with these commands. It does not
look into the messages, keeps no order among processes, never takes over what another process has left unfinished, and
writes an entry again after a lost answer: the dispatcher does more for each message.
"""

from __future__ import annotations

import json
import sys
import time

import redis

QUIET = 500  # milliseconds


def main() -> None:
    url, source, target, group, consumer, batch, field = sys.argv[1:]
    client = redis.Redis.from_url(url)
    client.ping()
    print("ready", flush=True)
    sys.stdin.readline()
    name, carried, started = field.encode(), 0, time.process_time()
    while True:
        found = client.xreadgroup(group, consumer, {source: ">"}, count=int(batch), block=QUIET)
        if not found:
            break
        entries = found[0][1]
        line = client.pipeline(transaction=False)
        for _, fields in entries:
            line.xadd(target, {name: fields[name]})
        line.xack(source, group, *[entry for entry, _ in entries])
        line.execute()
        carried += len(entries)
    print(json.dumps({"carried": carried, "cpu": time.process_time() - started}), flush=True)


if __name__ == "__main__":
    main()
