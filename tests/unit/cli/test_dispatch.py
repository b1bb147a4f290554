"""`motorcade dispatch`: what is refused before anything starts, and what is said without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.unit.cli.conftest import Run


@pytest.mark.parametrize(
    ("args", "code", "wanted"),
    [
        (("leader", "--redis", "http://x"), 1, "dispatch.redis"),
        (("leader", "--worker", "nowhere"), 1, "'nowhere' is not HOST:PORT"),
        (("leader", "--intake", "pipe"), 1, "dispatch.intake"),
        (("worker", "--listen", "9701"), 1, "'9701' is not HOST:PORT"),
        (("worker", "--handler", "x"), 1, "'x' is not module:function"),
        (("worker", "--parallel", "0"), 2, "--parallel"),
        (("leader", "--config", "none.toml"), 1, "cannot read the configuration file none.toml"),
        (("leader", "--log-level", "loud"), 1, "--log-level"),
        (("dead", "retry"), 2, "name entries, or say --all"),
        (("dead", "retry", "1-1", "--all"), 2, "name entries, or say --all"),
        (("dead", "list", "--limit", "0"), 2, "--limit"),
    ],
)
def test_what_is_wrong_is_said_at_once(run: Run, args: tuple[str, ...], code: int, wanted: str) -> None:
    done = run("dispatch", *args)
    assert code == done.returncode, done.stderr
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_in_the_file_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text("[dispatch]\nleese = 3\n")
    done = run("dispatch", "leader", "--config", "d.toml")
    assert (1, "error: file d.toml:2: unknown key 'dispatch.leese'; did you mean 'lease'?\n") == (
        done.returncode,
        done.stderr,
    )


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        (None, "absent:handle", "No module named 'absent'"),
        ("", "mine:handle", "has no 'handle'"),
        ("handle = 7", "mine:handle", "is int, which cannot be called"),
        ("import absent_too", "mine:handle", "absent_too"),
        ("1 / 0", "mine:handle", "ZeroDivisionError"),
        ("def handle(:", "mine:handle", "SyntaxError"),
    ],
)
def test_a_handler_that_cannot_be_had(run: Run, tmp_path: Path, text: str | None, name: str, wanted: str) -> None:
    """Said before anything is listened to, with the name of the handler."""
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    done = run("dispatch", "worker", "--handler", name)
    assert 1 == done.returncode
    assert done.stderr.startswith(f"error: handler '{name}': "), done.stderr
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("status",), ("dead", "retry", "--all")], ids=" ".join)
def test_a_server_that_is_not_there(run: Run, words: tuple[str, ...]) -> None:
    """It is named, and nobody waits for long."""
    port = free_port()
    done = run("dispatch", *words, "--redis", f"redis://:hush@127.0.0.1:{port}?patience=1")
    assert 1 == done.returncode
    assert f"127.0.0.1:{port}" in done.stderr
    assert "hush" not in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_counts(run: Run) -> None:
    done = run("dispatch", "status", env={"MOTORCADE_DISPATCH__REDIS": "nothing"})
    assert 1 == done.returncode
    assert "MOTORCADE_DISPATCH__REDIS" in done.stderr
