"""`/api/v1`: one module per noun. Lists are `{"data": […], "meta": {"count", "cursor"}}`, single things objects."""

from __future__ import annotations

from starlette.routing import BaseRoute, Mount

from motorcade.control import Control
from motorcade.http.api import clients, compacted, config, declared, fanout, node, nodes, plugins, store
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[BaseRoute]:
    """Return the routes of all nouns below their common prefix."""
    nouns = (clients, compacted, config, declared, fanout, node, nodes, plugins, store)
    return [Mount("/api/v1", routes=[route for noun in nouns for route in noun.routes(control, bridge)])]
