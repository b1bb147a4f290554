"""Many cases within one test, for cases that say nothing more when each is collected by itself.

A test that is run with every case; a failure names its values:

@each(version=(4, 5), qos=(0, 1, 2))
def test_…(connect, name, version, qos): ...

A table of what is refused; a failure lists every row that is not as it should be:

assert [] == unlike((says, refusal(OptionError, parse, options)) for options, says in WRONG)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

Test = TypeVar("Test", bound=Callable[..., None])


def each(**values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run the test with every combination of the values, also after one has failed.

    A word that the test takes from the fixture `name` is another one each time, so that cases have their own topics.
    """
    return _looped([dict(zip(values, given, strict=True)) for given in itertools.product(*values.values())])


def each_row(names: str, rows: Iterable[tuple[Any, ...]]) -> Callable[[Test], Test]:
    """The same with rows of values that belong together; `names` are separated by spaces."""
    return _looped([dict(zip(names.split(), row, strict=True)) for row in rows])


def _looped(cases: list[dict[str, Any]]) -> Callable[[Test], Test]:
    assert cases, "no cases"

    def loop(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in cases[0]]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            failures: list[Exception] = []
            word = given.get("name")
            for number, case in enumerate(cases):
                own = given if word is None else given | {"name": f"{word}x{number}"}
                try:
                    test(**own, **case)
                except Exception as error:  # noqa: BLE001 - told below, with those of the other cases
                    error.add_note(f"with {', '.join(f'{key}={repr(value)[:100]}' for key, value in case.items())}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures)

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]  # what pytest reads
        return cast("Test", run)

    return loop


every_version = each(version=(3, 4, 5))
both_versions = each(version=(4, 5))
every_qos = each(qos=(0, 1, 2))
qos_1_and_2 = each(qos=(1, 2))


def refusal(error: type[BaseException], act: Callable[..., object], *args: object) -> str:
    """What `act` is refused with, or that it is not refused."""
    try:
        return f"not refused: {act(*args)!r}"
    except error as refused:
        return str(refused)


def unlike(told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of pattern and text in which the pattern is not found."""
    return [(pattern, text) for pattern, text in told if not re.search(pattern, text)]
