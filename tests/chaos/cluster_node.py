"""`motorcade` as it is, but connections to some addresses take the ways of `cluster_network`.

    CHAOS_ROUTES='{"127.0.0.1:7001": "127.0.0.1:41234"}' python -m tests.chaos.cluster_node serve …

Members of a cluster learn addresses from each other and from Redis, so that no option of theirs could lead all of
their connections through proxies.

CHAOS_WITHOUT names one thing that this node shall do without, to see that a chaos run finds it:

    home-fence     the store takes decisions about a home from everybody who ever had it
    member-fence   the store takes writes of members that were found dead
    drain          what a client publishes after a move is read at once
    view-lease     publishers are answered, whatever this member has not heard of
    look-again     a member that lost a link or another member does not look what it was not told
"""

from __future__ import annotations

import json
import os
from typing import Any

import uvloop

from motorcade.redis.scripts import Script, named

ROUTES = "CHAOS_ROUTES"
WITHOUT = "CHAOS_WITHOUT"
SWITCHES = ("home-fence", "member-fence", "drain", "view-lease", "look-again")


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


def switch_off(what: str) -> None:
    """Replace the part of this Python's Motorcade that does it."""
    from motorcade.broker.attachments import Attachments  # noqa: PLC0415 - after the event loop has been replaced
    from motorcade.broker.relay import Relay  # noqa: PLC0415
    from motorcade.cluster.member import ClusterMember  # noqa: PLC0415
    from motorcade.storage import redis  # noqa: PLC0415

    classes: dict[str, tuple[type, str, Any]] = {
        "drain": (Attachments, "drained", lambda self, client_id: None),
        "view-lease": (ClusterMember, "holds", property(lambda self: True)),
        "look-again": (Relay, "look_again", lambda self: None),
    }
    scripts = {
        "home-fence": (b"        return 'FENCED'\n", b"        return 0\n"),
        "member-fence": (b"        call('SET', key, 'closed', 'PX', 86400000)\n", b""),
    }
    if what in classes:
        owner, name, part = classes[what]
        assert name in vars(owner), f"{owner.__name__} has no {name} any more"
        setattr(owner, name, part)
    else:
        old, new = scripts[what]
        script: Script = vars(redis)["TRACED"]
        assert script.source.count(old) == 1, f"the script has no {old!r} any more"
        vars(redis)["TRACED"] = named(script.source.replace(old, new))


def main() -> None:
    """Run the command line of this Python's Motorcade."""
    RoutedLoop.routes = json.loads(os.environ.get(ROUTES, "{}"))
    uvloop.new_event_loop = RoutedLoop
    if os.environ.get(WITHOUT):
        switch_off(os.environ[WITHOUT])
    from motorcade.cli import main as run  # noqa: PLC0415 - after the event loop has been replaced

    run()


if __name__ == "__main__":
    main()
