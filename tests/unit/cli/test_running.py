"""The rig itself: commands of this process leave its logs, streams and folder as they were."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import structlog

from motorcade import log
from tests.support.commands import _logging_to, run
from tests.support.local import logging_to_pytest


def test_commands_in_threads_do_not_mix() -> None:
    """Each has its own arguments and streams, though these belong to the process."""
    words = [("queue", "--help"), ("stream", "--help"), ("queue", "nonsense"), ("--version",)] * 4
    alone = [run(*each) for each in words]
    configured = structlog.get_config()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda each: run(*each), words))
    assert [(each.returncode, each.stdout, each.stderr) for each in alone] == [
        (each.returncode, each.stdout, each.stderr) for each in together
    ]
    assert configured == structlog.get_config()


def test_a_logger_of_a_command_serves_a_node_afterwards() -> None:
    """structlog keeps what a logger was made with, and a node has other processors than a command."""
    logger, said = structlog.get_logger(__name__), io.TextIOWrapper(io.BytesIO())
    with logging_to_pytest(), _logging_to(said):
        log.configure("critical")  # as commands do it: must not outlast them
        logger.warning("of_a_command", number=1)
    said.flush()
    assert b"event='of_a_command' number=1\n" == said.buffer.getvalue()
    with logging_to_pytest():
        logger.warning("of_a_node")
    assert said.seek(0, io.SEEK_END) == len("event='of_a_command' number=1\n")
