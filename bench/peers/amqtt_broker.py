"""The amqtt broker as bench/run starts it: amqtt_broker.py PORT. Runs in its own virtualenv under .build/."""

import asyncio
import logging
import sys

from amqtt.broker import Broker  # type: ignore[import-not-found,unused-ignore]

ANONYMOUS = "amqtt.plugins.authentication.AnonymousAuthPlugin"


async def serve(port: int) -> None:
    """Serve on loopback until killed, with nothing loaded but what lets clients in."""
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
            "plugins": {ANONYMOUS: {"allow_anonymous": True}},
        }
    )
    await broker.start()
    await asyncio.Event().wait()


logging.basicConfig(level=logging.ERROR)
asyncio.run(serve(int(sys.argv[1])))
