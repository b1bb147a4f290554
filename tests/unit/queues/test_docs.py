"""What docs/queues.md tells is what holds."""

from __future__ import annotations

import re
import tomllib

import msgspec

from motorcade.plugins.logs.queues import dispatcher, queue, record, store
from motorcade.plugins.logs.queues.options import MAX_TOPICS, QueueOptions, QueuesConfig
from motorcade.plugins.logs.queues.plugin import EVENTS
from tests.support.node import ROOT

PAGE = (ROOT / "docs" / "queues.md").read_text(encoding="utf-8")


def test_the_page_tells_the_defaults_that_hold() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \|", PAGE, re.MULTILINE))
    fields = {info.name: info.default for info in msgspec.structs.fields(QueueOptions)}
    assert fields.keys() <= told.keys()
    for name, default in fields.items():
        number = isinstance(default, int | float)
        assert (float(told[name]) if number else told[name]) == (default if default not in ((), "") else "none")
    for name, value in (("max_queues", 1000), ("max_pending", 10_000), ("sweep_interval", 60), ("sweep_budget", 1000)):
        assert value == getattr(QueuesConfig(), name)
        assert f"`{name}` ({value}" in PAGE


def test_the_page_tells_the_bounds_that_hold() -> None:
    assert f"up to {MAX_TOPICS} topic filters" in PAGE
    assert 2 * store.DELAY <= 1 / 20 == dispatcher.BLOCKED
    assert 1 / 50 == store.DELAY and "in the last fiftieth of a second" in PAGE.replace("\n", " ")
    assert 1.0 == dispatcher.PATIENCE
    assert 5.0 == queue.DEAD_LETTER_RETRY
    assert f"the newest {record.MAX_HISTORY}" in PAGE
    assert f"more than {dispatcher.MAX_REMEMBERED} of" in PAGE
    assert f"At most {dispatcher.MAX_WAITING} messages" in PAGE
    assert 1024 * 1024 == dispatcher.READ_BYTES
    for reason in ("DISCONNECTED", "UNSUBSCRIBED", "TIMED_OUT", "TOO_LARGE", "RESTARTED"):
        assert f"`{getattr(dispatcher, reason)}`" in PAGE


def test_every_counter_stands_on_the_page() -> None:
    assert all(f"`{event}`" in PAGE for event in EVENTS)


def test_the_example_is_a_configuration() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    config = msgspec.convert(tomllib.loads(example)["plugins"]["queues"], QueuesConfig)
    assert {"jobs", "jobs-dead"} == config.queue.keys()
