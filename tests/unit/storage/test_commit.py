"""`Commit` by itself: parts, errors, completions of others."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from motorcade.storage.commit import Commit
from motorcade.storage.ports import StoreError, StoreFullError, StoreRefusedError


def test_a_commit_of_parts_is_done_with_the_last() -> None:
    told: list[str] = []
    commit: Commit[None] = Commit(2)
    commit.part()
    commit.then(lambda: told.append("done"))
    commit.finish()
    commit.finish(StoreError("first"))
    assert [] == told
    commit.finish(StoreError("second"))
    assert ["done"] == told
    assert commit.done
    assert "first" == str(commit.error)


@pytest.mark.parametrize(
    ("error", "refused"),
    [(None, False), (StoreError("lost"), False), (StoreRefusedError("late"), True), (StoreFullError("full"), True)],
)
def test_refused_is_what_certainly_is_not_stored(error: StoreError | None, refused: bool) -> None:
    commit: Commit[None] = Commit()
    commit.finish(error)
    assert refused is commit.refused
    assert error is commit.exception()


async def test_a_commit_waits_for_completions_of_others() -> None:
    """Futures and other commits; one that was cancelled is an error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    other: Commit[int] = Commit()
    given_up: asyncio.Future[None] = loop.create_future()
    commit: Commit[None] = Commit(0)
    commit.after([future, other])
    future.set_result(None)
    other.settle(1)
    await commit
    assert commit.done and commit.error is None
    commit = Commit(0)
    commit.after([given_up])
    given_up.cancel()
    with pytest.raises(RuntimeError, match="given up"):
        await commit


async def test_an_error_does_not_gather_the_frames_of_all_who_wait() -> None:
    commit: Commit[None] = Commit.failed(StoreError("lost"))
    sizes = []
    for _ in range(3):
        with pytest.raises(StoreError) as raised:
            await commit
        sizes.append(len(traceback.extract_tb(raised.value.__traceback__)))
    assert 1 == len(set(sizes))
