"""The control port of a node: of one as it comes, over a socket, or of a broker alone, in memory.

node, web      a node in a thread, and a client below /api/v1; with the `CONFIG` of the test file
control        a broker without listeners, in the loop of the test
in_memory      a client of its control port without sockets and threads
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from motorcade.broker.broker import Broker
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.state import BrokerOptions, BrokerState
from motorcade.control import Control, NodeState, ReloadView
from motorcade.core.guid import GuidFactory
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins
from motorcade.http.app import make_app
from tests.support.local import LocalNode

PATIENCE = 60.0  #: seconds: machines that run tests are busy


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[LocalNode]:
    with LocalNode(getattr(request.module, "CONFIG", "")) as running:
        yield running


@pytest.fixture(scope="module")
def web(node: LocalNode) -> Iterator[httpx.Client]:
    with node.web() as client:
        yield client


@pytest.fixture
async def control(tmp_path: Path) -> Control:
    """Of a node that is ready, without listeners."""
    state = BrokerState(BrokerOptions("n"), SessionOptions(), Limits(), Hooks(), GuidFactory("n", 1), time.time())
    broker = Broker(state, asyncio.get_running_loop())

    async def reload() -> ReloadView:
        return ReloadView(applied=[], restart=[], changed=[])

    made = Control(broker, Plugins(broker, state.hooks, tmp_path, state.shared.sources), reload)
    made.state = NodeState.READY
    return made


def in_memory(control: Control, *, raise_app_exceptions: bool = True) -> httpx.AsyncClient:
    app = make_app(control, asyncio.get_running_loop())
    transport = httpx.ASGITransport(app, raise_app_exceptions=raise_app_exceptions)
    return httpx.AsyncClient(base_url="http://localhost", transport=transport)
