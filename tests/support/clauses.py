"""Links between tests and the numbered statements of the MQTT specifications.

`@clause(v3="MQTT-3.1.2-24", v5="MQTT-3.1.2-22")` marks a test as covering statements of MQTT 3.1.1 (`v3`) and of
MQTT 5 (`v5`). The catalogue of all statements is `tests/conformance/clauses/*.toml`; `scripts/conformance_table.py`
joins the two into `docs/conformance.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])
Numbers = str | tuple[str, ...]


def clause(*, v3: Numbers = (), v5: Numbers = ()) -> Callable[[Test], Test]:
    """Mark a test with the statements that it covers."""
    if not v3 and not v5:
        raise ValueError("a clause mark names at least one statement")

    def mark(test: Test) -> Test:
        marked: Test = pytest.mark.clause(v3=_numbers(v3), v5=_numbers(v5))(test)
        return marked

    return mark


def _numbers(given: Numbers) -> tuple[str, ...]:
    numbers = (given,) if isinstance(given, str) else given
    for number in numbers:
        if not number.startswith("MQTT-"):
            raise ValueError(f"not the number of a statement: {number!r}")
    return numbers
