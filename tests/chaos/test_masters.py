"""Does a killed master of a Redis cluster take acknowledged entries along? With confirmation no, without it yes."""

from __future__ import annotations

import pytest

from motorcade.storage.ports import Durability
from tests.chaos.masters import Outcome, measure, measure_alone

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("cut_off", [False, True], ids=["replica follows", "replica cut off"])
async def test_a_killed_master_loses_nothing_that_was_confirmed(cut_off: bool) -> None:
    """Its replica is promoted; one that was cut off has confirmed nothing, so nothing of that was acknowledged."""
    outcome = await measure(Durability.SAFE, 1, cut_off=cut_off, between=20)
    assert Outcome(outcome.acknowledged, failed=0, lost=0, twice=0) == outcome


async def test_without_confirmation_a_replica_that_is_cut_off_loses_data() -> None:
    """What `fast` says: the same events, seen by the same eyes, do lose acknowledged entries."""
    assert (await measure(Durability.FAST, 1, cut_off=True, between=20)).lost > 0


async def test_a_lone_server_that_syncs_every_write_loses_nothing() -> None:
    outcome = await measure_alone("always", 2, between=20)
    assert Outcome(outcome.acknowledged, failed=0, lost=0, twice=0) == outcome
