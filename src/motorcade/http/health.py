"""`/healthz`: the event loop turns. `/readyz` and `/status`: clients are served, and what they send can be stored.

A member of a cluster whose store is away says 200 and `degraded`: the others have the same store, and live messages go
on. A load balancer that took all nodes out would stop those as well.

Open to all, so reasons are told in few words; `/api/v1/node` and the log have the details.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import RETRY_AFTER, answer, refusal
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes of the probes."""

    async def healthz(_request: Request) -> Response:
        """Tell that the node lives: restart it if this fails. It fails (503) when the broker's loop does not answer."""
        await bridge.call(control.health)
        return answer({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        """Tell that the node is ready: send clients elsewhere while this says 503."""
        health = await bridge.call(control.health)
        if not health.ready:
            told = "; ".join([*health.reasons, *health.degraded])
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, told, {"Retry-After": RETRY_AFTER})
        if health.degraded:
            return answer({"status": "degraded", "reasons": health.degraded})
        return answer({"status": "ready"})

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/status", readyz)]
