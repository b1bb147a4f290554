"""Read a stream again from an offset or a time: after a bug in a consumer, for a new report, for an audit.

motorcade stream create trips --topic 'fleet/+/trip'
python examples/streams/rewind.py trips --start earliest
python examples/streams/rewind.py trips --start 2026-07-01T08:00:00Z --count 100

Each line is offset, time, topic and payload. The offset of the last line is the next `--start` minus one.
"""

import argparse
import asyncio

from motorcade.client import Client, ClientError


async def rewind(client: Client, stream: str, start: str, count: int, quiet: float) -> None:
    """Print up to `count` records from `start` on. Stop when none comes for `quiet` seconds."""
    (granted,) = await client.subscribe((f"$stream/{stream}/{start}", 1))
    if granted >= 0x80:
        raise ClientError(f"stream {stream!r}, start {start!r}: refused with {granted.name}")
    for _ in range(count):
        try:
            message = await asyncio.wait_for(anext(client), quiet)
        except TimeoutError:
            return
        properties = dict(message.properties.user_properties)
        print(properties["stream-offset"], properties["stream-time"], message.topic, message.payload.decode())


async def run(given: argparse.Namespace) -> None:
    # A new session: its cursor does not move that of any consumer that reads the stream continuously.
    async with await Client.connect(given.host, given.port, client_id=given.client_id) as client:
        await rewind(client, given.stream, given.start, given.count, given.quiet)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream")
    parser.add_argument("--start", default="earliest", help="earliest, an offset, or a time")
    parser.add_argument("--count", type=int, default=1000, help="records, at most")
    parser.add_argument("--quiet", type=float, default=1.0, help="seconds without a record after which to stop")
    parser.add_argument("--client-id", default="rewind")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1883)
    asyncio.run(run(parser.parse_args()))
