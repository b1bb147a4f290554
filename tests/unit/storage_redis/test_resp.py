"""One connection: replies in order, nothing left waiting."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
import uvloop

from motorcade.redis.resp import Access, LostError, RedisConnection, ServerAddress, ServerError, connect
from motorcade.storage.ports import StoreError
from tests.support.ports import free_port
from tests.support.redis import RedisServer

PATIENT = Access(connect_timeout=60.0, reply_timeout=60.0)  # machines that run tests are busy


def address(server: RedisServer) -> ServerAddress:
    return ServerAddress(server.host, server.port)


async def test_replies_come_in_the_order_of_commands(server: RedisServer) -> None:
    connection = await connect(address(server), PATIENT)
    replies = [connection.call("ECHO", str(number)) for number in range(2000)]
    assert [b"%d" % number for number in range(2000)] == await asyncio.gather(*replies)
    connection.close()


async def test_commands_of_one_turn_are_one_write(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = await connect(address(server), PATIENT)
    flushes = 0
    flush = RedisConnection._flush

    def counted(self: RedisConnection) -> None:
        nonlocal flushes
        flushes += 1
        flush(self)

    monkeypatch.setattr(RedisConnection, "_flush", counted)
    await asyncio.gather(*(connection.call("PING") for _ in range(100)))
    assert 1 == flushes
    connection.close()


async def test_an_error_concerns_its_command_only(server: RedisServer) -> None:
    connection = await connect(address(server), PATIENT)
    before, wrong, after = connection.call("ECHO", "1"), connection.call("NONSENSE"), connection.call("ECHO", "2")
    assert b"1" == await before
    with pytest.raises(ServerError) as raised:
        await wrong
    assert "ERR" == raised.value.code
    assert b"2" == await after
    connection.close()


async def test_a_cancelled_caller_does_not_shift_the_replies(server: RedisServer) -> None:
    connection = await connect(address(server), PATIENT)
    first, second = connection.call("ECHO", "1"), connection.call("ECHO", "2")
    first.cancel()
    assert b"2" == await second
    connection.close()


async def test_a_killed_server_fails_what_waits(own_server: RedisServer) -> None:
    connection = await connect(address(own_server), PATIENT)
    waiting = connection.call("BLPOP", "nothing", 0)
    own_server.kill()
    with pytest.raises(LostError, match=str(own_server.port)):
        await waiting
    with pytest.raises(LostError):
        await connection.call("PING")


async def test_a_server_that_hangs_is_given_up(own_server: RedisServer) -> None:
    connection = await connect(address(own_server), replace(PATIENT, reply_timeout=0.2))
    own_server.pause()
    with pytest.raises(LostError):
        await connection.call("PING")
    own_server.resume()


async def test_a_silent_connection_without_commands_stays(server: RedisServer) -> None:
    """Silence counts only while a command waits, and from when it was sent."""
    connection = await connect(address(server), PATIENT)
    connection._heard -= 3600
    connection._look()
    assert connection.is_open
    reply = connection.call("PING")
    connection._look()
    assert b"PONG" == await reply
    connection.close()


async def test_whoever_sends_too_much_waits_for_room(own_server: RedisServer) -> None:
    connection = await connect(address(own_server), replace(PATIENT, max_pending=10))
    own_server.pause()
    replies = [connection.call("PING") for _ in range(10)]
    room = asyncio.ensure_future(connection.room())
    await asyncio.sleep(0)
    assert not room.done()
    own_server.resume()
    await room
    await asyncio.gather(*replies)
    connection.close()


async def test_nobody_there_is_a_lost_connection() -> None:
    with pytest.raises(LostError, match="cannot connect"):
        await connect(ServerAddress("127.0.0.1", free_port()), PATIENT)


async def test_password_and_user(own_server: RedisServer) -> None:
    own_server.command("ACL", "SETUSER", "hub", "on", ">hubsecret", "~*", "+@all")
    own_server.command("CONFIG", "SET", "requirepass", "mainsecret")
    for access in (replace(PATIENT, password="mainsecret"), replace(PATIENT, user="hub", password="hubsecret")):
        connection = await connect(address(own_server), access)
        assert b"PONG" == await connection.call("PING")
        connection.close()
    with pytest.raises(StoreError, match="WRONGPASS") as raised:
        await connect(address(own_server), replace(PATIENT, password="guessed"))
    assert "guessed" not in str(raised.value)
    own_server.command("AUTH", "mainsecret")


async def test_databases_are_apart(server: RedisServer) -> None:
    first, second = (
        await connect(address(server), PATIENT),
        await connect(address(server), replace(PATIENT, database=5)),
    )
    await first.call("SET", "key", "0")
    assert await second.call("GET", "key") is None
    first.close()
    second.close()


def test_it_runs_on_uvloop(server: RedisServer) -> None:
    """The node's loop, whose transports are not asyncio's."""

    async def talk() -> object:
        connection = await connect(address(server), PATIENT)
        reply = await connection.call("ECHO", b"\x00\xff")
        connection.close()
        await connection.closed
        return reply

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert b"\x00\xff" == runner.run(talk())


async def test_tls(tmp_path: Path) -> None:
    """The certificate is checked, and so is the name in it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    port = free_port()
    settings = {"tls-port": str(port), "tls-auth-clients": "no"}
    settings |= {f"tls-{kind}-file": str(tmp_path / f"{kind}.pem") for kind in ("key", "cert")}
    settings |= {"tls-ca-cert-file": str(tmp_path / "ca.pem")}
    with RedisServer(settings):
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        connection = await connect(ServerAddress("localhost", port), replace(PATIENT, tls=trusted))
        assert b"PONG" == await connection.call("PING")
        connection.close()
        with pytest.raises(LostError, match="certificate"):
            await connect(ServerAddress("localhost", port), replace(PATIENT, tls=ssl.create_default_context()))
        with pytest.raises(LostError, match="certificate"):
            await connect(ServerAddress("127.0.0.1", port), replace(PATIENT, tls=trusted))
