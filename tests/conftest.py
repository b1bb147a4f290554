"""Marks that all tests may use."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from motorcade.log import HANDLER
from tests.support import clocks
from tests.support.logs import log_put_back


def pytest_configure(config: pytest.Config) -> None:
    # Where nodes leave word of themselves for commands: not in the developer's home.
    state = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="motorcade-state-")
    config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
    # A shell lets what it starts in the background ignore Ctrl-C; commands under test inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "clause(v3, v5): statements of MQTT 3.1.1 and MQTT 5 that the test covers (tests/support/clauses.py)"
    )


# In continuous integration the same examples are tried every time: a change is judged by what it changes. New examples
# are looked for whenever somebody runs the tests by hand. How long an example takes says how busy the machine is.
settings.register_profile("hand", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("hand"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "hand")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hundreds of examples in one test take minutes on a machine that is busy, which is no sign that it hangs."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Put the log back as it was before the test: functions of commands configure it for their process."""
    with log_put_back():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Fail a test that leaves another clock or a handler of the log behind, but none of the tests that follow."""
    try:
        return (yield)
    finally:
        handlers = [handler for handler in logging.getLogger().handlers if handler.get_name() == HANDLER]
        for handler in handlers:
            logging.getLogger().removeHandler(handler)
        assert not handlers, f"{item.nodeid} left the log configured by a fixture: use `log_put_back`"
        left = clocks.left()
        if left:
            clocks.put_back()
            raise AssertionError(f"{item.nodeid} left its clock in {', '.join(left)}")
