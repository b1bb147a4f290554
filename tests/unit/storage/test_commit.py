"""`Commit` by itself: errors and callbacks."""

from __future__ import annotations

import traceback

import pytest

from motorcade.storage.commit import Commit
from motorcade.storage.ports import StoreError, StoreFullError, StoreRefusedError


@pytest.mark.parametrize(
    ("error", "refused"),
    [(None, False), (StoreError("lost"), False), (StoreRefusedError("late"), True), (StoreFullError("full"), True)],
)
def test_refused_is_what_certainly_is_not_stored(error: StoreError | None, refused: bool) -> None:
    commit: Commit[None] = Commit()
    commit.finish(error)
    assert refused is commit.refused
    assert error is commit.error and commit.done


async def test_an_error_does_not_gather_the_frames_of_all_who_wait() -> None:
    commit: Commit[None] = Commit.failed(StoreError("lost"))
    sizes = []
    for _ in range(3):
        with pytest.raises(StoreError) as raised:
            await commit
        sizes.append(len(traceback.extract_tb(raised.value.__traceback__)))
    assert 1 == len(set(sizes))
