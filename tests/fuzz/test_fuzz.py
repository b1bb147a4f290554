"""Every seed of the fuzzer, and a short run of it that is the same each time. `make fuzz` runs it for long."""

from __future__ import annotations

import pytest

from tests.fuzz.conversations import Conversation, corpus, read, write
from tests.fuzz.fuzz_node import fuzz, replay

SEEDS = corpus()


@pytest.mark.parametrize("conversation", SEEDS.values(), ids=SEEDS.keys())
async def test_every_seed_plays_without_a_finding(conversation: Conversation) -> None:
    """Honest conversations, and every one that once found something."""
    await replay(conversation)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_damaged_conversations_find_nothing(seed: int) -> None:
    """The first few hundred of a fixed sequence of damaged conversations."""
    assert len(SEEDS) + 300 == await fuzz(0.0, seed, limit=len(SEEDS) + 300)


def test_files_are_read_as_they_are_written() -> None:
    """A finding can be played again from its file."""
    for conversation in SEEDS.values():
        assert conversation == read(write(conversation))
