"""`motorcade` as it is, but connections to some addresses take the ways of `cluster_network`.

    CHAOS_ROUTES='{"127.0.0.1:7001": "127.0.0.1:41234"}' python -m tests.chaos.cluster_node serve …

Members of a cluster learn addresses from each other and from Redis, so that no option of theirs could lead all of
their connections through proxies.
"""

from __future__ import annotations

import json
import os
from typing import Any

import uvloop

ROUTES = "CHAOS_ROUTES"


class RoutedLoop(uvloop.Loop):
    """An event loop that connects to other addresses than it is told."""

    routes: dict[str, str] = {}  # noqa: RUF012 - set once, before there is a loop

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        """Connect, by the way that belongs to the address."""
        way = self.routes.get(f"{host}:{port}")
        if way is not None:
            host, _, text = way.rpartition(":")
            port = int(text)
        return await super().create_connection(factory, host, port, **more)


def main() -> None:
    """Run the command line of this Python's Motorcade."""
    RoutedLoop.routes = json.loads(os.environ.get(ROUTES, "{}"))
    uvloop.new_event_loop = RoutedLoop
    from motorcade.cli import main as run  # noqa: PLC0415 - after the event loop has been replaced

    run()


if __name__ == "__main__":
    main()
