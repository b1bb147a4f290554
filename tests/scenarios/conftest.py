"""Fixtures that several scenarios use."""

from __future__ import annotations

from tests.support.dispatch import dispatch_redis, place, place_of
from tests.support.stores import cluster_redis, home, lone_redis

__all__ = ["cluster_redis", "dispatch_redis", "home", "lone_redis", "place", "place_of"]
