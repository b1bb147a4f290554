"""A table of cases fails with every case that fails, and pytest gives it the fixtures that are left."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support.tables import each_case


def test_every_case_that_fails_is_named() -> None:
    seen = []

    @each_case("factor", [1, 3])
    @each_case(("number", "wanted"), [(1, 2), (2, 4)])
    def doubles(offset: int, number: int, wanted: int, factor: int) -> None:
        seen.append((number, factor))
        assert wanted == offset + 2 * number * factor

    assert ["offset"] == list(inspect.signature(doubles).parameters)
    with pytest.raises(ExceptionGroup, match="1 of 2 cases failed") as caught:
        doubles(offset=0)
    assert [(1, 1), (2, 1), (1, 3), (2, 3)] == seen, "all others are tried"
    (outer,) = caught.value.exceptions
    assert ["case: factor=3"] == outer.__notes__
    assert isinstance(outer, ExceptionGroup)
    assert ["case: number=1, wanted=2", "case: number=2, wanted=4"] == [each.__notes__[0] for each in outer.exceptions]


def test_coroutine_functions_are_awaited() -> None:
    @each_case("number", [1, 2, 3])
    async def odd(number: int) -> None:
        await asyncio.sleep(0)
        assert number % 2

    with pytest.raises(ExceptionGroup, match="1 of 3 cases failed"):
        asyncio.run(odd())
