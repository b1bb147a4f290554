"""Leaders and workers that have to know a secret, and TLS between them; without both, the seed's protocol as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import structlog
import trustme
from msgspec.structs import replace

from motorcade.core.errors import ConfigError
from motorcade.core.handshake import HandshakeError
from motorcade.dispatch.frames import ack_frames, process_frames
from motorcade.dispatch.handshake import Handshake, refused_frame
from motorcade.dispatch.leader import Leader, run_leader
from motorcade.dispatch.links import CONNECT_TIMEOUT, Fault, LinkState
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.security import leader_security, worker_security
from motorcade.dispatch.worker import HANDSHAKE_TIME, MAX_STRANGERS, run_worker
from tests.support.redis import RedisServer
from tests.support.standing_clock import clock, turn, until
from tests.unit.dispatch.rig import IDS, PROCESSED, acknowledge, is_empty, leading, numbered, peer, publish, working

SECRET, OTHER = b"correct horse battery staple", b"another secret of some length"


def shake(leader: Handshake, worker: Handshake, cut: int = 1 << 16) -> None:
    """Let both talk until neither has anything to say, in pieces of `cut` bytes."""
    to_leader, to_worker = worker.hello(), leader.hello()
    while to_leader or to_worker:
        piece, to_worker = to_worker[:cut], to_worker[cut:]
        to_leader += worker.feed(piece) if piece else b""
        piece, to_leader = to_leader[:cut], to_leader[cut:]
        to_worker += leader.feed(piece) if piece else b""


def test_both_show_that_they_know_it() -> None:
    for cut in (1, 7, 38, 1 << 16):
        leader, worker = Handshake(SECRET, leads=True), Handshake(SECRET, leads=False)
        shake(leader, worker, cut)
        assert leader.done and worker.done
        assert b"" == leader.rest == worker.rest
    assert Handshake(SECRET, leads=True).hello() != Handshake(SECRET, leads=True).hello()


def test_what_follows_is_left_for_the_frames() -> None:
    leader, worker = Handshake(SECRET, leads=True), Handshake(SECRET, leads=False)
    said = leader.hello() + leader.feed(worker.hello())
    proof = worker.feed(said + b"frames")
    assert (True, b"frames") == (worker.done, worker.rest)
    assert b"" == leader.feed(proof + b"more")
    assert (True, b"more") == (leader.done, leader.rest)


def test_another_secret_is_refused_by_the_side_that_sees_it_first() -> None:
    """The worker has proved nothing by then."""
    leader, worker = Handshake(SECRET, leads=True), Handshake(OTHER, leads=False)
    said = leader.hello() + leader.feed(worker.hello())
    with pytest.raises(HandshakeError, match="different secrets"):
        worker.feed(said)
    assert not worker.done


def test_what_is_no_handshake_is_refused() -> None:
    for said, why in (
        (process_frames(IDS[:1], [b"{}"]), "has not shown that it knows the secret"),
        (ack_frames(IDS[:1]), "has not shown that it knows the secret"),
        (b"\x01\x41\x00\x00\x00\x00", "has not shown"),
        (b"\x01\x41\xff\xff\xff\xff", "has not shown"),
        (b"\x01\x42\x00\x00\x00\x20" + bytes(32), "has not shown"),
        (b"GET / HTTP/1.1\r\n", "version 71"),
        (refused_frame("I do not like you"), "refused: I do not like you"),
    ):
        for leads in (True, False):
            with pytest.raises(HandshakeError, match=why):
                Handshake(SECRET, leads=leads).feed(said)


def test_a_reflected_proof_is_refused() -> None:
    """Reflected to the same side, or replayed from an earlier connection."""
    leader = Handshake(SECRET, leads=True)
    with pytest.raises(HandshakeError):
        leader.feed(leader.feed(leader.hello()))
    first, worker = Handshake(SECRET, leads=True), Handshake(SECRET, leads=False)
    recorded = first.hello() + first.feed(worker.hello())
    worker.feed(recorded)
    assert worker.done
    with pytest.raises(HandshakeError):
        Handshake(SECRET, leads=False).feed(recorded)


# -- over sockets


@pytest.fixture
def known(options: DispatchOptions, tmp_path: Path) -> DispatchOptions:
    """Options with the secret."""
    return with_secret(options, tmp_path / "secret", SECRET)


def with_secret(options: DispatchOptions, file: Path, secret: bytes) -> DispatchOptions:
    file.write_bytes(secret + b"\n")
    file.chmod(0o600)
    return replace(options, secret_file=str(file))


async def processed(server: RedisServer, leader: Leader, count: int) -> None:
    publish(server, *numbered(count))
    await until(lambda: leader.pending.acknowledged == count, "acknowledged")
    await until(lambda: is_empty(server), "finished")
    assert count == server.command("XLEN", PROCESSED)


async def test_messages_flow_between_those_who_know_it(known: DispatchOptions, server: RedisServer) -> None:
    async with working(known) as worker, leading(known) as leader:
        await processed(server, leader, 100)
        assert (0, 0) == (worker.strangers, worker.cut_off)


async def test_who_does_not_know_it_gets_nothing(
    known: DispatchOptions, options: DispatchOptions, server: RedisServer, tmp_path: Path
) -> None:
    """Each combination is refused on both sides, with a sentence, counted, and nothing is sent or lost by it."""
    other = with_secret(options, tmp_path / "other", OTHER)
    pairs = [
        (known, options, "asks for a secret, and there is none here"),
        (options, known, "refused: this worker has no secret"),
        (known, other, "refused: leader and worker have different secrets"),
    ]
    publish(server, *numbered(3))
    for workers, leaders, why in pairs:
        with structlog.testing.capture_logs() as logs:
            async with working(workers) as worker, leading(replace(leaders, cut_off=0.01)) as leader:
                faults = lambda: sum(link.faults[Fault.SECRET] for link in leader.links.values())  # noqa: E731
                await until(lambda: faults() >= 2 and worker.strangers >= 2, "tried again, and counted")  # noqa: B023
                assert why in leader.view().workers[0].problem
                assert 0 == leader.dead_lettered == leader.pending.acknowledged
        refused = [event for event in logs if event["event"] == "dispatch_leader_refused"]
        assert 1 == len(refused), "told once in a while, however often it happens"
        assert any(event["event"] == "dispatch_worker_cut_off" and why in event["detail"] for event in logs)
    assert 0 == server.command("XLEN", PROCESSED)
    async with working(known), leading(known) as leader:
        await until(lambda: leader.pending.acknowledged == 3, "nothing is lost")


async def test_a_worker_of_the_seed_gets_nothing_from_a_leader_with_a_secret(
    known: DispatchOptions, server: RedisServer
) -> None:
    """It says nothing, or hangs up; without a secret it works as ever."""
    publish(server, *numbered(3))
    async with peer() as worker, leading(known, worker) as leader:
        await turn(CONNECT_TIMEOUT + 0.1)
        assert 1 == leader.links[worker.name].faults[Fault.SECRET]
        assert LinkState.CONNECTED is not leader.links[worker.name].state
        assert "does not ask for the secret" in leader.links[worker.name].problem
        assert [] == worker.messages
    async with peer(acknowledge) as worker, leading(replace(known, secret_file=""), worker) as leader:
        await until(lambda: leader.pending.acknowledged == 3, "acknowledged")


async def test_strangers_do_not_keep_leaders_out(known: DispatchOptions, server: RedisServer) -> None:
    """Any number of connections: those that say nothing are closed, the oldest first, or in time."""
    async with working(known) as worker:
        host, _, port = worker.name.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_STRANGERS + 20)]
        await clock().quiet()
        assert (20, MAX_STRANGERS, set()) == (worker.strangers, len(worker.waiting), worker.wires)
        async with leading(known) as leader:
            await processed(server, leader, 10)
        await turn(HANDSHAKE_TIME)
        assert not worker.waiting and MAX_STRANGERS + 20 <= worker.strangers
        assert b"has not shown in time that it knows the secret" in await silent[-1][0].read()
        for _, writer in silent:
            writer.close()


# -- TLS


@pytest.fixture
def papers(tmp_path: Path) -> dict[str, str]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    foreign = trustme.CA()
    foreign.cert_pem.write_to_path(tmp_path / "foreign.pem")
    return {name: str(tmp_path / f"{name}.pem") for name in ("ca", "cert", "key", "foreign")}


async def test_messages_flow_over_tls(known: DispatchOptions, server: RedisServer, papers: dict[str, str]) -> None:
    """With certificates on both sides, or on the worker's only; with the secret and without."""
    both = replace(known, tls_cert=papers["cert"], tls_key=papers["key"], tls_ca=papers["ca"])
    mine = replace(both, secret_file="", tls_ca="")
    yours = replace(both, secret_file="", tls_cert="", tls_key="")
    for number, (workers, leaders) in enumerate([(both, both), (mine, yours)]):
        server.empty()
        async with working(workers) as worker, leading(leaders) as leader:
            await processed(server, leader, 50)
            (wire,) = worker.wires
            assert wire._transport is not None
            assert wire._transport.get_extra_info("ssl_object") is not None
            assert bool(wire._transport.get_extra_info("peercert")) == (number == 0)


async def test_a_certificate_that_is_not_trusted_is_refused(
    known: DispatchOptions, server: RedisServer, papers: dict[str, str]
) -> None:
    workers = replace(known, tls_cert=papers["cert"], tls_key=papers["key"])
    leaders = replace(known, tls_ca=papers["foreign"])
    publish(server, *numbered(3))
    async with working(workers), leading(leaders) as leader:
        await until(lambda: leader.links and next(iter(leader.links.values())).problem, "refused")
        assert "CERTIFICATE_VERIFY_FAILED" in leader.view().workers[0].problem
        assert 0 == leader.pending.acknowledged


async def test_what_is_wrong_is_told_before_anything_begins(options: DispatchOptions, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("short")
    for given, says in (
        ({"secret_file": "/nowhere/secret"}, "dispatch.secret_file: cannot read /nowhere/secret"),
        ({"secret_file": str(short)}, r"dispatch.secret_file: .*short has 5 bytes; a secret has 16 or more"),
        ({"tls_ca": "/nowhere"}, "dispatch.tls_c"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "dispatch.tls_c"),
    ):
        wrong = replace(options, **given)
        for load in (leader_security, worker_security):
            with pytest.raises(ConfigError, match=says):
                load(wrong)
        for run in (run_leader, run_worker):
            with pytest.raises(ConfigError, match=says):
                await run(wrong, stop=asyncio.Event())


def test_a_certificate_needs_its_key() -> None:
    for name in ("tls_cert", "tls_key"):
        with pytest.raises(msgspec.ValidationError, match="tls_cert and tls_key: each needs the other"):
            msgspec.convert({name: "x"}, DispatchOptions)


def test_a_secret_that_others_can_read_is_told(options: DispatchOptions, tmp_path: Path) -> None:
    known = with_secret(options, tmp_path / "secret", SECRET)
    for mode, told in ((0o600, 0), (0o640, 1)):
        (tmp_path / "secret").chmod(mode)
        with structlog.testing.capture_logs() as logs:
            leader_security(known)
        assert told == len([event for event in logs if event["event"] == "dispatch_secret_readable"])
