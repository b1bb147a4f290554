"""Fixtures that several scenarios use."""

from __future__ import annotations

from tests.support.stores import cluster_redis, home, lone_redis

__all__ = ["cluster_redis", "home", "lone_redis"]
