"""Does a killed master of a Redis cluster take acknowledged entries along? With confirmation no, without it yes."""

from __future__ import annotations

import pytest

from motorcade.storage.ports import Durability
from tests.chaos.masters import Outcome, measure, measure_alone
from tests.support.redis import RedisCluster

pytestmark = pytest.mark.timeout(600)


async def test_a_killed_master_loses_nothing_that_was_confirmed() -> None:
    """Its replica is promoted; one that was cut off has confirmed nothing, so nothing of that was acknowledged.

    Without confirmation (`fast`) the same events, seen by the same eyes, do lose acknowledged entries.
    """
    with RedisCluster() as cluster:
        for cut_off in (False, True):
            outcome = await measure(cluster, Durability.SAFE, 1, cut_off=cut_off, between=20)
            assert Outcome(outcome.acknowledged, failed=0, lost=0, twice=0) == outcome, f"cut off: {cut_off}"
        assert (await measure(cluster, Durability.FAST, 1, cut_off=True, between=20)).lost > 0


async def test_a_lone_server_that_syncs_every_write_loses_nothing() -> None:
    outcome = await measure_alone("always", 2, between=20)
    assert Outcome(outcome.acknowledged, failed=0, lost=0, twice=0) == outcome
