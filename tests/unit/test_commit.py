"""`Commit` by itself: errors and callbacks."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from motorcade.commit import Commit, commit_of, is_refusal, joined
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


def test_joined_commits_are_done_together_and_fail_with_the_first_error() -> None:
    first, second = Commit[int](), Commit[str]()
    both = joined([first, second])
    done: list[bool] = []
    both.then(lambda: done.append(both.done))
    second.finish(StoreError("second"))
    assert done == []
    first.finish(StoreError("first"))
    assert done == [True]
    assert str(both.error) == "first"
    assert joined([]).done and joined([Commit.stored(1)]).error is None


async def test_a_future_of_a_plugin_becomes_a_commit() -> None:
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(3)]
    commits = [commit_of(future) for future in futures]
    futures[0].set_result("stored")
    futures[1].set_exception(StoreFullError("full"))
    futures[2].cancel()
    await asyncio.sleep(0)
    assert all(commit.done for commit in commits)
    assert commits[0].result == "stored" and commits[0].error is None
    assert is_refusal(commits[1].error) and not is_refusal(commits[2].error) and commits[2].error is not None
