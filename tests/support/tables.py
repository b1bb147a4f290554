"""Many cases of one test: a table that is one collected test, which names every case that fails.

    @each_case(("text", "wanted"), [("a", 1), ("b", 2)])
    def test_what_a_text_is(text: str, wanted: int) -> None: …

For cases that say nothing more when they are collected one by one. Fixtures are shared by all cases of the table;
`pytest.mark.parametrize` is for cases that need their own, or that somebody may want to run alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each_case(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a test with each row; `names` as for `pytest.mark.parametrize`."""
    keys = (names,) if isinstance(names, str) else names
    cases = [dict(zip(keys, (row,) if isinstance(names, str) else row, strict=True)) for row in rows]
    assert cases, "a table without cases"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @wraps(test)
            async def run(**fixtures: Any) -> None:
                failures = []
                for case in cases:
                    try:
                        await test(**fixtures, **case)
                    except Exception as error:  # noqa: BLE001 - told with all others
                        failures.append(_named(error, case))
                _tell(failures, len(cases))

        else:

            @wraps(test)
            def run(**fixtures: Any) -> None:
                failures = []
                for case in cases:
                    try:
                        test(**fixtures, **case)
                    except Exception as error:  # noqa: BLE001 - told with all others
                        failures.append(_named(error, case))
                _tell(failures, len(cases))

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined] # what pytest takes for fixtures
            parameters=[each for name, each in signature.parameters.items() if name not in keys]
        )
        return run

    return decorate


def _named(error: Exception, case: dict[str, Any]) -> Exception:
    error.add_note(f"case: {', '.join(f'{name}={value!r}' for name, value in case.items())}")
    return error


def _tell(failures: list[Exception], count: int) -> None:
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {count} cases failed", failures)
