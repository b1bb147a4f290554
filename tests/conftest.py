"""Marks that all tests may use."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "clause(v3, v5): statements of MQTT 3.1.1 and MQTT 5 that the test covers (tests/support/clauses.py)"
    )
