"""`/nodes`: the members of the cluster, and sending the clients of one elsewhere."""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer, body, listing
from motorcade.http.bridge import Bridge
from motorcade.node_control import MAX_RATE, DrainAction, NodeOrder

Rate = Annotated[float, msgspec.Meta(ge=0, le=MAX_RATE)]


class Draining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST …/drain`."""

    rate: Rate = 0.0  #: clients per second; 0: as configured


class Leaving(Draining, frozen=True, forbid_unknown_fields=True):
    """The body of `POST …/leave`."""

    permanent: bool = False  #: the node will not come back: MQTT 5 clients are told 0x9D


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A node is named by its name, or by the id of the member that it is."""

    async def index(_request: Request) -> Response:
        """Answer all of them. Those that did not answer are in `meta.unanswered`; their figures are missing."""
        found = await bridge.call_slow(control.list_nodes)
        return listing(found.nodes, unanswered=found.unanswered)

    async def show(request: Request) -> Response:
        return answer(await bridge.call_slow(control.show_node, request.path_params["name"]))

    async def order(request: Request, told: NodeOrder) -> Response:
        return answer(await bridge.call_slow(control.order_node, request.path_params["name"], told), 202)

    async def drain(request: Request) -> Response:
        """Begin to send its clients away; ask for the node to see how far it is."""
        given = await body(request, Draining)
        return await order(request, NodeOrder(DrainAction.DRAIN, given.rate))

    async def leave(request: Request) -> Response:
        """Do the same, and end the node when it is done."""
        given = await body(request, Leaving)
        return await order(request, NodeOrder(DrainAction.LEAVE, given.rate, given.permanent))

    async def resume(request: Request) -> Response:
        """Let it take clients again."""
        told = NodeOrder(DrainAction.RESUME)
        return answer(await bridge.call_slow(control.order_node, request.path_params["name"], told))

    return [
        Route("/nodes", index, methods=["GET"]),
        Route("/nodes/{name:name}", show, methods=["GET"]),
        Route("/nodes/{name:name}/drain", drain, methods=["POST"]),
        Route("/nodes/{name:name}/drain", resume, methods=["DELETE"]),
        Route("/nodes/{name:name}/leave", leave, methods=["POST"]),
    ]
