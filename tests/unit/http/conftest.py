"""The control port of the `node` of the file that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.node import NodeProcess

PATIENCE = 60.0  # seconds: machines that run tests are busy


@pytest.fixture(scope="module")
def web(node: NodeProcess) -> Iterator[httpx.Client]:
    address = f"http://{node.http}/api/v1"
    with httpx.Client(base_url=address, headers=node.auth, trust_env=False, timeout=PATIENCE) as client:
        yield client
