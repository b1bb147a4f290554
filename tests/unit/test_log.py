"""What the log looks like, and what never stands in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from motorcade import log
from tests.support.logs import log_put_back
from tests.support.tables import each_case


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    with log_put_back():
        yield


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_pipe_gets_json_lines() -> None:
    """One object per event, with time, level and fields; values that JSON lacks are shown as text."""
    stream = io.StringIO()
    log.configure("info", "auto", stream)
    structlog.stdlib.get_logger("a.b").info("connected", client_id="car-1", payload=b"x", odd=object)
    (event,) = lines(stream)
    assert ("connected", "info", "a.b", "car-1") == tuple(
        event[key] for key in ("event", "level", "logger", "client_id")
    )
    assert "timestamp" in event


def test_the_standard_library_speaks_the_same_way() -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream)
    logging.getLogger("library").warning("careful: %s", "hot")
    (event,) = lines(stream)
    assert ("careful: hot", "warning", "library") == tuple(event[key] for key in ("event", "level", "logger"))


def test_secrets_are_hidden_wherever_they_stand() -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream)
    structlog.stdlib.get_logger("x").info(
        "e", password="p1", config={"jwt_secret": "p2", "deep": {"api_token": "p3"}}, user="u"
    )
    assert not {"p1", "p2", "p3"} & set(stream.getvalue().replace('"', " ").split())
    assert "u" == lines(stream)[0]["user"]


@each_case("format_", ["console", "json"])
def test_urls_headers_and_tracebacks_hide_secrets_too(format_: str) -> None:
    """No local variables are shown with a traceback: they hold what clients have sent."""
    stream = io.StringIO()
    log.configure("info", format_, stream)
    logger = structlog.stdlib.get_logger("x")
    logger.info(
        "at redis://:hush1@h", url=["redis://hush2@h"], headers={"X-Y": "hush3"}, cookie="hush4", require_token=True
    )
    try:
        local = "hush" + "5"
        raise ValueError("cannot connect to redis://h?password=hush6")
    except ValueError:
        logger.exception("failed", found=len(local))
    assert "hush" not in stream.getvalue()
    assert "ValueError" in stream.getvalue() and "require_token" in stream.getvalue()


@each_case("format_", ["console", "json"])
def test_clients_do_not_speak_to_the_terminal(format_: str) -> None:
    stream = io.StringIO()
    log.configure("info", format_, stream)
    structlog.stdlib.get_logger("x").info("e", client_id="car\x1b]0;owned\x07\x9b2J\u202e", deep={"id": "\x9b"})
    logging.getLogger("library").warning("careful: %s", "\x1b[2J")
    assert "car" in stream.getvalue()
    assert all(char.isprintable() or char == "\n" for char in stream.getvalue())


def test_the_level_holds_things_back_and_the_last_configuration_counts() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.configure("error", "json", first)
    logger = structlog.stdlib.get_logger("x")
    logger.info("quiet")
    log.configure("debug", "json", second)
    logger.debug("loud")
    assert [] == lines(first)
    assert ["loud"] == [event["event"] for event in lines(second)]


def test_people_get_a_line_without_json() -> None:
    stream = io.StringIO()
    log.configure("info", "console", stream)
    structlog.stdlib.get_logger("x").info("connected", client_id="car-1")
    assert "connected" in stream.getvalue()
    assert "client_id=car-1" in stream.getvalue()
    assert "{" not in stream.getvalue()


def test_an_exception_is_one_json_line_with_its_traceback() -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.stdlib.get_logger("x").exception("failed")
    (event,) = lines(stream)
    assert "ValueError: broken" in str(event["exception"])
