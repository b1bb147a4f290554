"""`motorcade dispatch`: what is said without a server and without a handler; wrong words are in test_words.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import run_process
from tests.support.ports import free_port
from tests.unit.cli.conftest import Run


def test_a_handler_that_cannot_be_had(run: Run, tmp_path: Path) -> None:
    """Said before anything is listened to, with the name of the handler."""
    for name, text, wanted in (
        ("absent", None, "No module named 'absent'"),
        ("empty", "", "has no 'handle'"),
        ("number", "handle = 7", "is int, which cannot be called"),
        ("needy", "import absent_too", "absent_too"),
        ("broken", "1 / 0", "ZeroDivisionError"),
        ("cut", "def handle(:", "SyntaxError"),
    ):
        if text is not None:
            (tmp_path / f"{name}.py").write_text(text)
        done = run("dispatch", "worker", "--handler", f"{name}:handle")
        assert 1 == done.returncode, name
        assert done.stderr.startswith(f"error: handler '{name}:handle': "), done.stderr
        assert wanted in done.stderr and "Traceback" not in done.stderr, name


def test_a_handler_is_looked_for_in_the_folder_of_the_command(tmp_path: Path) -> None:
    """Also by the process, whose path is not that of a test."""
    (tmp_path / "mine.py").write_text("1 / 0")
    done = run_process("dispatch", "worker", "--handler", "mine:handle", cwd=tmp_path)
    assert (1, True) == (done.returncode, "ZeroDivisionError" in done.stderr)


def test_a_server_that_is_not_there(run: Run) -> None:
    """It is named, without its password, and nobody waits for long."""
    port = free_port()
    for words in (("status",), ("dead", "retry", "--all")):
        done = run("dispatch", *words, "--redis", f"redis://:hush@127.0.0.1:{port}?patience=1")
        assert 1 == done.returncode
        assert f"127.0.0.1:{port}" in done.stderr
        assert "hush" not in done.stderr and "Traceback" not in done.stderr


def test_the_environment_counts(run: Run) -> None:
    done = run("dispatch", "status", env={"MOTORCADE_DISPATCH__REDIS": "nothing"})
    assert 1 == done.returncode
    assert "MOTORCADE_DISPATCH__REDIS" in done.stderr
