"""Where a broker is: one URL, files, and no password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motorcade.publisher.address import AddressError, BrokerAddress
from tests.support.node import NodeProcess


def test_a_url_says_where() -> None:
    for url, shown in (
        ("mqtt://h", "mqtt://h:1883"),
        ("mqtts://h", "mqtts://h:8883"),
        ("mqtt://h:99/", "mqtt://h:99"),
        ("ws://h", "ws://h:8083/mqtt"),
        ("wss://h:1/a/b", "wss://h:1/a/b"),
        ("mqtt://[::1]", "mqtt://[::1]:1883"),
    ):
        address = BrokerAddress.parse(url)
        assert shown == str(address)
        assert address == BrokerAddress.parse(str(address))


def test_what_is_wrong_is_said_without_secrets() -> None:
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("", {}, "write one of mqtt://"),
        ("h:1883", {}, "write one of mqtt://"),
        ("http://h", {}, "write one of mqtt://"),
        ("mqtt://", {}, "write one of mqtt://"),
        ("mqtt://h?x=1", {}, "write one of mqtt://"),
        ("mqtt://h:port", {}, "is no address of a broker"),
        ("mqtt://h/path", {}, "only ws:// and wss:// have"),
        ("mqtt://me:secret@h", {}, "do not belong into it"),
        ("mqtt://me:secret@h:port", {}, "is no address of a broker"),
        ("mqtt://h", {"cafile": "ca.pem"}, "is without TLS"),
        ("mqtts://h", {"key": "k.pem"}, "needs a certificate"),
    )
    for url, options, says in cases:
        with pytest.raises(AddressError, match=says) as caught:
            raise AssertionError(BrokerAddress.parse(url, **options))
        assert "secret" not in str(caught.value)


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"password file .*nowhere cannot be read"):
        await BrokerAddress.parse("mqtt://127.0.0.1:1", username="u", password_file=str(tmp_path / "nowhere")).connect()
    with pytest.raises(AddressError, match="cafile: there is no file"):
        await BrokerAddress.parse("mqtts://127.0.0.1:1", cafile=str(tmp_path / "nowhere")).connect()


def test_the_password_is_in_a_file_or_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("right\n")
    address = BrokerAddress.parse("mqtt://h", username="me", password_file=str(secret))
    assert b"right" == address._password()
    assert "right" not in repr(address)
    monkeypatch.delenv("MOTORCADE_PASSWORD", raising=False)
    bare = BrokerAddress.parse("mqtt://h", username="me")
    assert bare._password() is None
    monkeypatch.setenv("MOTORCADE_PASSWORD", "from outside")
    assert b"from outside" == bare._password()
    assert BrokerAddress.parse("mqtt://h")._password() is None, "nobody is named"


async def test_a_connection_is_had_over_tcp_and_websocket() -> None:
    with NodeProcess("--store", "memory://", ws=True) as node:
        for url in (f"mqtt://{node.mqtt}", f"ws://{node.ws}"):
            client = await BrokerAddress.parse(url).connect(name="me")
            assert client.is_connected and client.client_id.startswith("me-")
            await client.disconnect()
