"""Fixtures that several scenarios use. `desk` and `platform` belong to the `node` of the file that asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.dispatch import dispatch_redis, place, place_of
from tests.support.fanout import Platform
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.stores import cluster_redis, home, lone_redis

__all__ = ["cluster_redis", "dispatch_redis", "home", "lone_redis", "place", "place_of"]


@pytest.fixture(scope="module")
def desk(node: NodeProcess) -> Iterator[Operator]:
    """The control port."""
    with Operator(node) as operator:
        yield operator


@pytest.fixture
def platform(node: NodeProcess) -> Iterator[Platform]:
    """A platform that is connected."""
    with Platform(node) as client:
        yield client
