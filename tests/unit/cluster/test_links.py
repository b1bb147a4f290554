"""Members over real sockets of this process, with a clock that stands until it is turned."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from motorcade.cluster.frames import MIN_FRAME, FrameReader, read_sentence
from motorcade.cluster.greeting import Greeting, Identity
from motorcade.cluster.link import LinkLostError, LinkStatus
from motorcade.cluster.links import GREETING_TIMEOUT, MAX_STRANGERS, WRITE_HIGH
from motorcade.core.errors import ConfigError, MotorcadeError
from motorcade.extension.cluster import AskError
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.standing_clock import clock, turn, until
from tests.unit.cluster.members import OPTIONS, Member, Papers, member

SECRET, OTHER = b"correct horse battery staple", b"another secret of some length"


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path)


async def test_items_go_both_ways_and_are_confirmed() -> None:
    async with member("a", 1) as a, member("b", 2) as b:
        of_a, of_b = await a.meets(b)
        assert (["linked b~2"], ["linked a~1"]) == (a.events, b.events)
        for number in range(100):
            of_a.send("item", b"%d" % number)
            of_b.send("item", b"%d" % -number)
        confirmed = [of_a.confirm(), of_b.confirm()]
        await clock().quiet()
        assert all(commit.done for commit in confirmed)
        assert [("a~1", b"%d" % number) for number in range(100)] == b.items
        assert [("b~2", b"%d" % -number) for number in range(100)] == a.items
        assert 0 == of_a.impatient == of_a.unacknowledged


async def test_members_ping_each_other() -> None:
    async with member("a", 1) as a, member("b", 2) as b:
        b.pong_body = b"of b"
        of_a, _ = await a.meets(b)
        began = clock().time()
        await turn(3.0)
        assert {("b~2", b"of b")} == {(id_, body) for id_, _, body in a.pongs}
        assert [began + seconds for seconds in (0.5, 1.0, 1.5)] == [sent_at for _, sent_at, _ in a.pongs[1:4]]
        assert (["linked b~2"], 0.0) == (a.events, of_a.round_trip)


async def test_three_members_have_a_link_for_each_pair() -> None:
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(member(name, number)) for number, name in enumerate("abc", 1)]
        listed = [(one.id, one.me.number, one.address) for one in members]
        for one in members:
            one.links.expect(listed)
        await until(lambda: all(len(one.events) == 2 for one in members), "linked")
        for one in members:
            for peer in one.links.peers:
                peer.send("item", one.id.encode())
        await clock().quiet()
        for one in members:
            others = sorted(other.id for other in members if other is not one)
            assert (
                others == sorted(peer.id for peer in one.links.peers) == sorted(body.decode() for _, body in one.items)
            )


# -- breaks


async def test_nothing_is_lost_or_repeated_by_breaks() -> None:
    """Cut at any byte, in any state, often before the greeting is over."""
    chance = random.Random(5)
    async with member("a", 1) as a, member("b", 2) as b, Proxy(a.address) as way:
        of_a, of_b = await a.meets(b, way.address)
        way.piece = 100
        sent = 0
        for _ in range(60):
            for _ in range(chance.randrange(30)):
                of_a.send("item", b"%d" % sent)
                of_b.send("item", b"%d" % sent)
                sent += 1
            for _ in range(chance.randrange(25)):
                await asyncio.sleep(0)
            way.cut()
            await turn(chance.choice([0.0, 0.1, 0.3]))
        way.piece = 0
        await until(lambda: not of_a.unacknowledged and not of_b.unacknowledged, "acknowledged")
        assert (
            [b"%d" % number for number in range(sent)] == [body for _, body in a.items] == [body for _, body in b.items]
        )
        assert of_a.connections > 20 and of_a.resent + of_b.resent > 0
        assert 0 == a.links.totals()["errors"] == of_a.unknown.total()


async def test_a_member_that_is_away_is_dialled_again_and_items_wait() -> None:
    port = free_port()
    at = replace(OPTIONS, bind=f"127.0.0.1:{port}")
    async with member("b", 2) as b:
        b.links.expect([("a~1", 1, f"127.0.0.1:{port}")])
        peer = b.links.peer("a~1")
        assert peer is not None
        peer.send("item", b"early")
        confirmed = peer.confirm()
        await turn(0.6)
        assert (True, 1) == (confirmed.done, peer.impatient), "the link has no connection: patience ends"
        assert f"b~2 cannot connect to a~1 at 127.0.0.1:{port}" in peer.problem
        async with member("a", 1, at) as a:
            await until(lambda: a.items, "has come", within=3.0)
            assert [("b~2", b"early")] == a.items
        assert "unlinked a~1: the other side has closed the connection" == b.events[-1]
        assert LinkStatus.CLOSED is peer.status


@pytest.mark.parametrize(("to_target", "to_client"), [(True, True), (True, False), (False, True)])
async def test_a_silent_link_is_given_up_after_a_lease_and_made_again(to_target: bool, to_client: bool) -> None:
    async with member("a", 1) as a, member("b", 2) as b, Proxy(a.address) as way:
        of_a, of_b = await a.meets(b, way.address)
        way.stop(to_target=to_target, to_client=to_client)
        of_a.send("item", b"1")
        of_b.send("item", b"1")
        await turn(2.4)
        assert (1, 1) == (len(a.events), len(b.events))
        await turn(1.2)
        silent = [one.events[1] for one in (a, b) if len(one.events) > 1]
        assert any("nothing was heard of" in event for event in silent)
        way.go()
        await until(lambda: a.linked_to(b) and b.linked_to(a) and a.items and b.items, "linked again", within=10.0)
        await turn(5.0)
        assert ([("b~2", b"1")], [("a~1", b"1")]) == (a.items, b.items)


async def test_a_process_that_stood_still_gives_up_no_link() -> None:
    """What the others have said meanwhile lies in its sockets."""
    async with member("a", 1) as a, member("b", 2) as b:
        await a.meets(b)
        await turn(1.0)
        for _ in range(3):
            clock().move_to(clock().time() + 20.0)
            await clock().quiet()
            await turn(2.0)
        assert (["linked b~2"], ["linked a~1"]) == (a.events, b.events)


async def test_a_new_connection_takes_the_place_of_the_old_one() -> None:
    """The member that dials has noticed that it is broken; the other one has not."""
    async with member("a", 1) as a, member("b", 2) as b, Proxy(a.address) as way:
        of_a, _ = await a.meets(b, way.address)
        of_a.send("item", b"1")
        (carried,) = way.open
        way.open.clear()
        other, carried.other.transport = carried.other.transport, None
        assert carried.transport is not None and other is not None
        carried.transport.abort()
        await until(lambda: len(a.events) == 3, "again")
        assert "unlinked b~2: another connection has taken its place" == a.events[1]
        assert [("a~1", b"1")] == b.items
        other.abort()


# -- incarnations


async def test_another_incarnation_begins_with_nothing() -> None:
    async with member("a", 1) as a:
        async with member("b", 2) as b:
            old, of_b = await a.meets(b)
            of_b.send("item", b"of the first")
            await clock().quiet()
        old.send("item", b"void")
        waiting = old.confirm()
        async with member("b", 2, token=b"another") as b:
            new, of_b = await a.meets(b)
            assert new is not old and LinkStatus.DEAD is old.status and waiting.done
            assert 1 == new.connections, "at the first attempt"
            new.send("item", b"1")
            of_b.send("item", b"of the second")
            await clock().quiet()
            assert [("a~1", b"1")] == b.items
            assert [("b~2", b"of the first"), ("b~2", b"of the second")] == a.items
            assert 2 + 2 == a.links.totals()["sent"], "each item has its declaration"


async def test_the_same_on_the_side_that_dials() -> None:
    at = replace(OPTIONS, bind=f"127.0.0.1:{free_port()}")
    async with member("b", 2) as b:
        async with member("a", 1, at) as a:
            await b.meets(a)
        old = b.link(a)
        old.send("item", b"void")
        async with member("a", 1, at, token=b"another") as a:
            await until(lambda: a.linked_to(b), "linked", within=5.0)
            b.link(a).send("item", b"1")
            await clock().quiet()
            assert [("b~2", b"1")] == a.items
            assert LinkStatus.DEAD is old.status
            b.expects(a)
            assert 1 == len(b.links.peers)


async def test_a_dead_member_hears_so_and_is_let_in_only_as_another_incarnation() -> None:
    async with member("a", 1) as a:
        async with member("b", 2) as b:
            of_a, of_b = await a.meets(b)
            of_a.send("item", b"1")
            confirmed = of_a.confirm()
            a.links.close_dead("b~2", "it was fenced")
            assert confirmed.done and [] == a.links.peers
            assert "unlinked b~2: it was fenced" == a.events[-1]
            await clock().quiet()
            assert "unlinked a~1: a~1 has closed the link to b~2: it was fenced" == b.events[-1]
            await turn(1.0)
            assert "a~1 refuses b~2: a~1 has found b~2 dead, or it has left" in b.refusals[-1]
            assert b.refusals[-1] == of_b.problem
            assert a.links.strangers > 0 and [] == a.links.peers
            a.links.close_dead("b~2", "twice")
        async with member("b", 3) as b:
            await a.meets(b)


async def test_who_is_not_expected_any_more_is_not_dialled() -> None:
    async with member("a", 1) as a, member("b", 2) as b, Proxy(a.address) as way:
        await a.meets(b, way.address)
        b.links.expect([])
        await turn(5.0)
        assert a.linked_to(b), "the link stays as long as it holds"
        b.expects(a, way.address)
        await turn(5.0)
        assert 1 == way.connections
        b.links.expect([])
        way.cut()
        await turn(5.0)
        assert not a.linked_to(b) and 1 == way.connections


# -- refusals


@asynccontextmanager
async def misfit(a, b):
    async with a as one, b as other:
        other.expects(one)
        await until(lambda: other.refusals, "refused")
        assert not one.links.peers and not other.linked_to(one)
        yield one, other


async def test_what_does_not_fit_is_refused_with_a_sentence_on_both_sides(papers: Papers) -> None:
    known = papers.secret(SECRET)
    cases = [
        (member("a", 1, known), member("b", 2, papers.secret(OTHER)), "a~1 and b~2 have different secrets"),
        (member("a", 1, known), member("b", 2), "a~1 has a secret and b~2 has none"),
        (member("a", 1), member("b", 2, known), "b~2 has a secret and a~1 has none"),
        (member("a", 1), member("b", 2, cluster="lorries"), "a~1 is a member of the cluster 'fleet', b~2 of 'lorries'"),
        (member("a", 1), member("b", 2, store="other"), "a~1 and b~2 have different stores (store-1 and other)"),
    ]
    for a, b, why in cases:
        with structlog.testing.capture_logs() as logs:
            async with misfit(a, b) as (one, other):
                assert why in other.refusals[0]
                await turn(8.0)
                assert 2 < one.links.strangers < 10 and len(other.refusals) == one.links.strangers
        refused = [log for log in logs if log["event"] == "cluster_link_refused"]
        assert 1 == len(refused) and why in refused[0]["why"], "told once in a while, however often it happens"
        failed = [log for log in logs if log["event"] == "cluster_link_failed"]
        assert 1 == len(failed) and why in failed[0]["why"], "and once, as long as it is the same"


async def test_the_member_has_the_last_word() -> None:
    async with member("a", 1) as a, member("b", 2) as b:
        a.refuses = "a~1 waits until b~2 is fenced"
        b.expects(a)
        await until(lambda: b.refusals, "refused")
        assert "a~1 refuses b~2: a~1 waits until b~2 is fenced" == b.refusals[0]
        assert ({1: b.refusals[0]}, []) == (b.links.refusals(), b.links.linked())
        a.refuses = ""
        await until(lambda: a.linked_to(b), "linked", within=6.0)
        assert ({}, [1], [2]) == (b.links.refusals(), b.links.linked(), a.links.linked())


async def test_an_address_that_belongs_to_another_member_is_told() -> None:
    async with member("a", 1) as a, member("b", 2) as b:
        b.links.expect([("c~0", 0, a.address)])
        await turn(1.0)
        assert "b~2 has connected to c~0, but a~1 is there now" == b.links.peers[0].problem
        assert ([], {}) == (b.refusals, b.links.refusals()), "it passes"
        b.links.expect([("c~0", 0, "nonsense")])
        await turn(6.0)
        assert "b~2 cannot connect to c~0: 'nonsense' is not HOST:PORT" in b.links.peers[0].problem


async def test_strangers_keep_no_member_out() -> None:
    """Sockets that say nothing are closed, the oldest first, or in time; so are those that say what is no greeting."""
    async with member("a", 1) as a, member("b", 2) as b:
        host, _, port = a.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_STRANGERS + 20)]
        await clock().quiet()
        assert 20 == a.links.strangers
        await a.meets(b)
        await turn(GREETING_TIMEOUT)
        assert MAX_STRANGERS + 20 == a.links.strangers
        said = await silent[-1][0].read()
        ((_, data, start, stop),) = FrameReader(MIN_FRAME).feed(said)
        assert "the other side has not proved to a~1 within 5 s who it is" in read_sentence(data, start, stop)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"a~1 cannot read what the other side says" in await reader.read()
        for _, one in silent:
            one.close()
        writer.close()
        assert a.linked_to(b)


class Played:
    """A member that the test plays, by the bytes of the description."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def connects(cls, to: Member, number: int = 9):
        reader, writer = await asyncio.open_connection(*to.address.rpartition(":")[::2], limit=1 << 16)
        me = Identity("fleet", "store-1", "played", number, b"token", "0.1")
        greeting = Greeting(me, b"", MIN_FRAME, lambda _hello: 0, to.id)
        writer.write(greeting.begin())
        while not greeting.done:
            writer.write(greeting.feed(await reader.read(1 << 16)))
        await clock().quiet()
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def told(self) -> str:
        """Return the sentence with which it was refused."""
        data = await self.reader.read()
        (*_, (_, frame, start, stop)) = FrameReader(1 << 30).feed(data)
        return read_sentence(frame, start, stop)


async def test_a_peer_that_says_what_it_must_not_is_refused() -> None:
    async with member("a", 1, replace(OPTIONS, max_frame=2_000_000)) as a:
        for said, why in (
            (
                struct.pack("<IB", 2_000_001, 4),
                "it announces a frame of 2000001 bytes (kind 4), and 2000000 are allowed",
            ),
            (struct.pack("<IB", 0, 77), "frames of kind 77 are unknown"),
            (struct.pack("<IBQ", 8, 5, 1), "it acknowledges item 1, and the last one is 0"),
        ):
            async with Played.connects(a) as peer:
                peer.writer.write(said)
                assert f"a~1 has closed the link to played~9: {why}" == await peer.told()
                assert why in a.events[-1]


async def test_a_peer_that_does_not_read_holds_up_nothing_but_its_items() -> None:
    """Only so much is handed to the socket; the rest waits, and is bounded by `full`."""
    async with member("a", 1, replace(OPTIONS, max_bytes=4_000_000)) as a, Played.connects(a) as peer:
        (link,) = a.links.peers
        sent = 0
        while not link.full:
            link.send("item", bytes(10_000), droppable=True)
            sent += 1
            await asyncio.sleep(0)
        link.send("item", b"", droppable=True)
        assert (1, sent + 1) == (link.dropped, link.sent)
        wire = link.wire
        assert wire is not None
        assert wire._transport.get_write_buffer_size() < WRITE_HIGH + 300_000  # type: ignore[attr-defined]
        confirmed, room = link.confirm(), link.room()
        peer.writer.write(struct.pack("<IBQ", 8, 8, 1))
        await turn(0.6)
        assert confirmed.done and not room.done, "patience is over; the items are not"
        peer.writer.write(struct.pack("<IBQ", 8, 5, link.sent))
        await clock().quiet()
        assert (True, False) == (room.done, link.full)


# -- questions


async def test_questions_are_answered() -> None:
    async with member("a", 1) as a, member("b", 2) as b:
        of_a, _ = await a.meets(b)

        async def answer(asking: str, question: bytes) -> bytes:
            if question == b"refuse":
                raise MotorcadeError("I will not")
            if question == b"fail":
                raise ValueError(question)
            if question == b"wait":
                await asyncio.sleep(60.0)
            return asking.encode() + b" asks " + question

        b.links.on_ask("noun", answer)
        assert b"a~1 asks x" == await a.links.ask("b~2", "noun", b"x")
        for question, why in (
            (b"refuse", "b~2 refuses: I will not"),
            (b"fail", "the question 'noun' failed at b~2: ValueError"),
        ):
            with pytest.raises(AskError, match=why):
                await a.links.ask("b~2", "noun", question)
        with pytest.raises(AskError, match=r"b~2 \(Motorcade 1.0\) does not know the question 'other'"):
            await a.links.ask("b~2", "other")
        with pytest.raises(AskError, match="c~3 is no member that is alive"):
            await a.links.ask("c~3", "noun")
        asking = asyncio.ensure_future(a.links.ask("b~2", "noun", b"wait", patience=2.0))
        await turn(1.9)
        assert not asking.done()
        await turn(0.2)
        with pytest.raises(AskError, match="b~2 has not answered in time"):
            await asking
        assert ({"other": 1}, 0) == (dict(b.links.unknown_asks), b.links.busy_asks)
        asking = asyncio.ensure_future(a.links.ask("b~2", "noun", b"wait"))
        await turn(0.1)
        of_a.wire.abort()  # type: ignore[union-attr]
        with pytest.raises(LinkLostError, match="the connection to b~2 has ended"):
            await asking


# -- addresses and TLS


async def test_members_listen_only_where_it_is_safe(papers: Papers) -> None:
    port = free_port()
    secret, mutual = papers.secret(SECRET), papers.options()
    for options, bind, why in (
        (OPTIONS, f"127.0.0.1:{port}", ""),
        (OPTIONS, f"localhost:{port}", ""),
        (OPTIONS, f"0.0.0.0:{port}", "any program could pass for a member: set cluster.secret_file"),
        (OPTIONS, f"*:{port}", "any program could pass for a member"),
        (replace(OPTIONS, plain=True), f"0.0.0.0:{port}", "any program could pass for a member"),
        (secret, f"0.0.0.0:{port}", "links without TLS can be read on their way: set cluster.certificate"),
        (replace(secret, plain=True), f"0.0.0.0:{port}", ""),
        (mutual, f"0.0.0.0:{port}", ""),
        (papers.options(ca=""), f"0.0.0.0:{port}", "any program could pass for a member"),
        (papers.options(ca="", secret=SECRET), f"0.0.0.0:{port}", ""),
        (OPTIONS, "127.0.0.1", "'127.0.0.1' is not HOST:PORT"),
        (OPTIONS, "no.such.host.invalid:1", "is no address of this machine"),
    ):
        if why:
            with pytest.raises(ConfigError, match=r"cluster\.bind: ") as found:
                async with member("a", 1, replace(options, bind=bind)):
                    pass
            assert why in str(found.value)
        else:
            async with member("a", 1, replace(options, bind=bind)) as a:
                assert a.address.endswith(f":{port}")


async def test_an_address_in_use_is_told() -> None:
    async with member("a", 1) as a:
        with pytest.raises(ConfigError, match=f"cluster.bind: cannot listen on {a.address}: .*in use"):
            async with member("b", 2, replace(OPTIONS, bind=a.address)):
                pass


async def test_items_flow_over_tls(papers: Papers) -> None:
    """With certificates of both sides, or of one and a secret; from one authority."""
    one_sided = replace(papers.options(secret=SECRET), ca="")
    trusting = papers.options(secret=SECRET)
    for low, high in ((papers.options(), papers.options()), (one_sided, trusting)):
        async with member("a", 1, low) as a, member("b", 2, high) as b:
            of_a, of_b = await a.meets(b)
            of_a.send("item", bytes(1_000_000))
            of_b.send("item", b"1")
            await until(lambda: not of_a.unacknowledged and not of_b.unacknowledged, "acknowledged")  # noqa: B023
            assert (1, 1_000_000) == (len(a.items), len(b.items[0][1]))
            wire = of_a.wire
            assert wire is not None and wire._transport.get_extra_info("ssl_object") is not None  # type: ignore[attr-defined]


async def test_tls_that_does_not_fit_is_told_with_both_names(papers: Papers) -> None:
    good = papers.options()
    known = papers.secret(SECRET)
    cases = [
        (good, papers.options(foreign=True), "does it trust the certificate of b~2? (option cluster.certificate"),
        (papers.options(foreign=True), good, "b~2 does not trust the certificate of a~1 at 127.0.0.1:PORT"),
        (papers.options("10.1.2.3"), good, "b~2 does not trust the certificate of a~1 at 127.0.0.1:PORT"),
        (good, known, "is TLS configured on one side only"),
        (known, papers.options(secret=SECRET), "cannot agree on TLS"),
    ]
    for low, high, why in cases:
        async with member("a", 1, low) as a, member("b", 2, high) as b:
            b.expects(a)
            await until(lambda: b.links.peers[0].problem, "failed")
            await turn(1.0)
            assert why.replace("PORT", a.address.rpartition(":")[2]) in b.links.peers[0].problem
            assert not a.links.peers and not b.linked_to(a)


async def test_what_is_wrong_with_files_is_told(papers: Papers) -> None:
    for wrong, why in (
        (replace(OPTIONS, secret_file="/nowhere"), "cluster.secret_file: cannot read /nowhere"),
        (replace(papers.options(), ca="/nowhere"), "cluster.ca: cannot read /nowhere"),
        (replace(papers.options(), key="/nowhere"), "cluster.certificate, cluster.key: cannot use"),
    ):
        with pytest.raises(ConfigError, match=why):
            async with member("a", 1, wrong):
                pass


async def test_closing_brings_what_was_sent_and_leaves_nothing_to_wait_for() -> None:
    async with member("b", 2) as b:
        async with member("a", 1) as a:
            of_a, _ = await a.meets(b)
            of_a.send("item", b"last words")
            confirmed = of_a.confirm()
        assert confirmed.done
        await until(lambda: b.items, "has come", standing=True)
        assert [("a~1", b"last words")] == b.items
