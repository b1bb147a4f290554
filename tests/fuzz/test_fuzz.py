"""Every seed of the fuzzer, and a short run of it that is the same each time. `make fuzz` runs it for long."""

from __future__ import annotations

import pytest

from tests.fuzz.conversations import corpus, read, write
from tests.fuzz.fuzz_node import fuzz, replay

SEEDS = corpus()


async def test_a_finding_is_played_again_from_its_file() -> None:
    await replay(next(iter(SEEDS.values())))


@pytest.mark.parametrize("seed", [1, 2])
async def test_seeds_and_damaged_conversations_find_nothing(seed: int) -> None:
    """Honest conversations, every one that once found something, and a few hundred of a fixed damaged sequence.

    A finding has its conversation in its notes.
    """
    assert len(SEEDS) + 300 == await fuzz(0.0, seed, limit=len(SEEDS) + 300)


def test_files_are_read_as_they_are_written() -> None:
    """A finding can be played again from its file."""
    for conversation in SEEDS.values():
        assert conversation == read(write(conversation))
