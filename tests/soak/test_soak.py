"""The soak itself, for seconds: every piece of churn works, the floors are measured, no probe is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motorcade.client import ClientError
from tests.soak import churn
from tests.soak.judge import report
from tests.soak.soak import Options, Soak
from tests.support.node import NodeProcess


@pytest.mark.slow
async def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(churn, "LET_GO", 0.5)  # whether anything grows is for a run of minutes
    soak = Soak(Options(minutes=0.05, cycles=1, rate=0.5), tmp_path)
    (floor,) = await soak.run()
    assert set(churn.PIECES) == set(soak.done), "each kind of churn was tried"
    assert (0, ()) == (floor.lost, tuple(floor.errors)), soak.node.log
    assert min(floor.probes, floor.rss, floor.trimmed, floor.objects, floor.disk, floor.messages) > 0
    assert min(floor.descriptors, floor.threads, floor.units) > 0
    assert floor.tables["Registry.sessions"] == 2, "the probes are alone"
    assert "probes lost" in report([floor])


async def test_vehicles_that_come_when_their_message_has_expired_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine they come later than `data_retention`; what never came for another reason is told with it."""
    monkeypatch.setattr(churn, "COMES", 0.5)
    churn.prepare(tmp_path)
    config = churn.config(tmp_path).replace("data_retention = 12.0", "data_retention = 0.1")
    with NodeProcess(config=config, http=True) as node:
        load = churn.Churn(node, tmp_path)
        late, early = load._vins(1), load._vins(2)
        await load.ask("POST", "fanout/requests/late/send", 202, ids=late, data="x")
        async with asyncio.timeout(churn.PATIENCE):
            while (await load.ask("GET", "fanout/requests/late")).json()["pending"]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        await load._vehicles(late)
        assert 3 == load.expired
        with pytest.raises(ClientError, match=f"0 of 1 messages came; No batch has named {early[0]}"):
            await load._vehicles(early[:1])
        await load.web.aclose()
