"""What is appended in one turn of the event loop, as one write."""

from __future__ import annotations

import pytest

from motorcade.delivery.group import Group, GroupWriter
from motorcade.storage.ports import Batch, StoreError
from tests.support.held_store import HeldStore


def fill(batch: Batch, group: Group[bytes]) -> None:
    batch.stream("s", group.items, group.time)


async def test_a_defect_of_the_feature_does_not_leave_publishers_without_an_answer() -> None:
    def defect(_group: Group[bytes]) -> None:
        raise ZeroDivisionError

    groups = GroupWriter(HeldStore(), lambda: 1.0, fill, defect)
    group = groups.add([b"a", b"b"], 2)
    written = await group
    assert [2] == [len(offsets) for offsets in written.offsets]


async def test_a_group_that_cannot_be_made_fails_alone() -> None:
    """Its publishers hear of it, and the next group is written."""

    def breaks_once(batch: Batch, group: Group[bytes]) -> None:
        if group.items == [b"a"]:
            raise ZeroDivisionError
        fill(batch, group)

    groups = GroupWriter(HeldStore(), lambda: 1.0, breaks_once, lambda _group: None)
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await groups.add([b"a"], 1)
    assert [1] == [len(offsets) for offsets in (await groups.add([b"b"], 1)).offsets]
