"""Fixtures that several scenarios use. Most belong to the `node` of the file that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.witness import Witness, guarded, rss
from tests.support.dispatch import dispatch_redis, place_of
from tests.support.fanout import Platform
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.stores import cluster_redis, home, lone_redis

__all__ = ["cluster_redis", "dispatch_redis", "home", "lone_redis", "place_of"]


@pytest.fixture(scope="module")
def operator(node: NodeProcess) -> Iterator[Operator]:
    """The control port."""
    with Operator(node) as running:
        yield running


@pytest.fixture
def platform(node: NodeProcess) -> Iterator[Platform]:
    """A platform that is connected."""
    with Platform(node) as client:
        yield client


@pytest.fixture(scope="module")
def baseline(node: NodeProcess) -> int:
    """Bytes of memory of the node before anybody misbehaved."""
    with Witness(node) as witness:
        witness.check()
        return rss(node)


@pytest.fixture
def witness(node: NodeProcess, baseline: int) -> Iterator[Witness]:
    """Whatever the test does to the node, others are served before and after."""
    with guarded(node, baseline) as honest:
        yield honest
