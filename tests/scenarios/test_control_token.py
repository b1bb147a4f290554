"""Who may use the control port of a node with defaults: who can read its token file, and no other process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
from functools import partial
from pathlib import Path

import httpx
import pytest

from motorcade.cli._store import StoreFlags, find_store
from motorcade.core.errors import ConfigError
from motorcade.http.token import find_token, own_token, point, read_token, users_listening
from tests.support.commands import run
from tests.support.local import LocalNode
from tests.support.logs import log_put_back
from tests.support.wire import PATIENCE


def client(node: LocalNode, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{node.http}", headers=headers, trust_env=False, timeout=PATIENCE)


def test_a_node_with_defaults_wants_the_token_that_it_has_written(tmp_path: Path) -> None:
    """Health and metrics stay open; everything else says where the token is. Commands of the same user find it."""
    with LocalNode() as node:
        file = node.data / "token"
        assert 0o600 == stat.S_IMODE(file.stat().st_mode)
        with client(node) as stranger:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert 200 == stranger.get(path).status_code
            for answer in (
                stranger.get("/api/v1/clients"),
                stranger.delete("/api/v1/plugins/retained"),
                stranger.post("/api/v1/config/reload"),
                stranger.get("/api/v1/nothing"),
                stranger.get("/api/v1/clients", headers={"Authorization": "Bearer wrong"}),
            ):
                assert (401, True) == (answer.status_code, str(file) in answer.json()["message"])
        with client(node, **node.auth) as operator:
            assert 200 == operator.get("/api/v1/clients").status_code
        listing = partial(run, "plugin", "list", "--json", *node.at, cwd=tmp_path)
        assert "retained" in listing().stdout
        elsewhere = {"XDG_STATE_HOME": str(tmp_path)}
        lost = listing(env=elsewhere)
        assert (1, True, True) == (lost.returncode, str(file) in lost.stderr, "--token" in lost.stderr)
        for more in ({"MOTORCADE_TOKEN": file.read_text()}, {"MOTORCADE_DATA__DIR": str(node.data)}):
            assert "retained" in [plugin["name"] for plugin in json.loads(listing(env=elsewhere | more).stdout)]


def test_loopback_without_a_token_only_if_configured_and_never_to_take_access_away() -> None:
    """And a token that is set may still be shown there."""
    config = '[http]\nrequire_token = false\ntoken = "known"\n[plugins.access]\nanonymous = "allow"\n'
    with LocalNode(config) as node, client(node) as anyone:
        assert 200 == anyone.get("/api/v1/clients").status_code
        refused = anyone.delete("/api/v1/plugins/access")
        assert (403, True) == (refused.status_code, "token" in refused.json()["message"])
        assert "access" in [plugin["name"] for plugin in anyone.get("/api/v1/plugins").json()["data"]]
        assert 200 == anyone.delete("/api/v1/plugins/retained").status_code
        with client(node, Authorization="Bearer known") as operator:
            assert 200 == operator.delete("/api/v1/plugins/access").status_code
        assert not (node.data / "token").exists()


def test_the_token_is_kept_and_one_that_others_could_read_is_replaced(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = own_token(data)
    assert (first, 0o700) == (own_token(data), stat.S_IMODE(data.stat().st_mode))
    if os.geteuid() != 0:  # root is answered by any file
        (data / "token").chmod(0o644)
        assert first != own_token(data)
    (data / "token").unlink()
    (data / "token").symlink_to(tmp_path / "else")
    assert "" == read_token(data / "token")
    assert own_token(data) and not (data / "token").is_symlink() and not (tmp_path / "else").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"http\.token"):
        own_token(tmp_path / "file")


def test_a_token_is_found_by_address_and_never_for_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data = tmp_path / "data"
    token = own_token(data)
    pointer = point("127.0.0.1:18083", data)
    assert pointer is not None and 0o600 == stat.S_IMODE(pointer.stat().st_mode)
    assert token == find_token("127.0.0.1:18083", os.environ) == find_token("localhost:18083", os.environ)
    assert "" == find_token("127.0.0.1:18084", os.environ)
    assert token == find_token("127.0.0.1:18084", os.environ, [tmp_path, data])
    assert "" == find_token("192.0.2.1:18083", os.environ, [data]) == find_token("hub.example:1", os.environ, [data])
    assert "" == find_token("127.0.0.1:18083", {})


def test_a_token_is_not_shown_to_another_user_in_the_place_of_the_node(tmp_path: Path) -> None:
    """Who listens on a port while its node is down would be the administrator when it is up again."""
    token = own_token(tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as own:
        address = f"127.0.0.1:{own.getsockname()[1]}"
        assert token == find_token(address, {}, [tmp_path / "data"])
    python = shutil.which("python3", path="/usr/bin:/bin")  # others cannot reach the environment of the tests
    if os.geteuid() != 0 or python is None:
        pytest.skip("only root can become another user")
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen(
        [python, "-c", listen], user=65534, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = other.stdout.readline().strip()
        assert {65534} == users_listening(port)
        assert "" == find_token(f"127.0.0.1:{port}", {}, [tmp_path / "data"])
        other.communicate("\n")


def test_a_token_of_the_data_folder_goes_to_no_other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    own_token(tmp_path / "motorcade-data")
    with log_put_back():
        assert None is find_store(StoreFlags(), "192.0.2.1:18083", None, ask=False, told=False).token
