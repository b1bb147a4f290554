"""What a node writes and shows is for its own user: files, secrets in the log and in `config show`, terminals."""

from __future__ import annotations

import os
import pty
import stat
import threading
from pathlib import Path

from motorcade.node import keep_private
from tests.support.commands import run, start_process
from tests.support.local import LocalNode
from tests.support.node import NodeProcess
from tests.support.wire import PATIENCE, Client

EVIL = "car\x1b]0;owned\x07\x9b2J"


def test_the_data_folder_is_closed_and_so_is_every_file_in_it(tmp_path: Path) -> None:
    """Also one that an earlier version has left open, and a copy of the store."""
    data = tmp_path / "data"
    (data / "store").mkdir(parents=True)
    data.chmod(0o755)
    old = os.umask(0o022)
    try:
        with NodeProcess(http=True, data=data) as node, Client(node) as client:
            assert 0 == client.connect("c").reason
            client.subscribe("a", 1)
            with node.web() as web:
                answer = web.post("/store/backup", json={"to": str(tmp_path / "copy")})
            assert answer.status_code < 300, answer.text
    finally:
        os.umask(old)
    files = [path for path in data.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in (data, data / "store", *files):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_a_folder_that_all_share_is_left_as_it_is(tmp_path: Path) -> None:
    """`--data /tmp` by root would keep every other user out of it."""
    tmp_path.chmod(0o1777)
    keep_private(tmp_path)
    assert 0o1777 == stat.S_IMODE(tmp_path.stat().st_mode)
    tmp_path.chmod(0o755)
    keep_private(tmp_path)
    assert 0o700 == stat.S_IMODE(tmp_path.stat().st_mode)


def in_terminal(*words: str, lines: int, then: object = None) -> bytes:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    process = start_process(*words, env={"TERM": "xterm"}, stdout=slave, stderr=slave)
    os.close(slave)
    if callable(then):
        threading.Thread(target=then, daemon=True).start()
    seen = b""
    try:
        while seen.count(b"\n") < lines or process.poll() is None:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            seen += part
    finally:
        process.wait(PATIENCE)
        os.close(master)
    return seen


def test_no_escape_sequence_of_a_client_reaches_a_terminal() -> None:
    """Client ids in lists, topics and payloads that `sub` prints."""
    with LocalNode() as node, Client(node) as client:
        assert 0 == client.connect(EVIL).reason
        client.subscribe("x/#", 0)
        listed = in_terminal("client", "list", *node.at, lines=3)
        shown = in_terminal("client", "show", EVIL, *node.at, lines=3)

        def publish() -> None:
            with Client(node) as other:
                other.connect("other")
                while not over.wait(0.05):
                    other.publish("x/y", b"\x1b]52;c;eA==\x07 \xc2\x9b2J", 1)

        over = threading.Event()
        try:
            printed = in_terminal(
                "sub", "-t", "x/#", "-v", "-C", "1", "-h", node.host, "-p", str(node.port), lines=1, then=publish
            )
        finally:
            over.set()
    for seen in (listed, shown, printed):
        assert rb"\x1b]" in seen, seen
        for bad in (b"\x1b]", b"\x07", b"\x9b"):
            assert bad not in seen, seen


def test_configuration_is_shown_without_secrets(tmp_path: Path) -> None:
    """In URLs of every form, in headers, below tables of passwords; and errors about them tell none either."""
    file = tmp_path / "m.toml"
    text = """
[store]
url = "redis://h:1?password=hush1"
[plugins.mine]
path = "mine.py"
api-key = "hush2"
broker = "mqtt://hush3@h"
[plugins.mine.headers]
X-Whatever = "hush4"
[plugins.mine.passwords]
alice = "hush5"
[plugins.access]
[[plugins.access.authentication]]
type = "http"
url = "https://me:hu/sh6@h/x"
headers = { Cookie = "hush7" }
"""
    file.write_text(text)
    shown = run("config", "show", "--config", file)
    assert "http.require_token = true" in shown.stdout, shown.stderr
    assert "hush" not in shown.stdout + shown.stderr and "sh6" not in shown.stdout
    file.write_text(text.replace("redis://h:1?", "sqlite://u:hush8@h?"))
    refused = run("config", "show", "--config", file)
    assert 1 == refused.returncode and "store.url" in refused.stderr
    assert "hush" not in refused.stdout + refused.stderr
