"""Two members that meet: who they are, that they know the secret, and the sentence when they do not fit."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from motorcade.cluster import greeting as module
from motorcade.cluster.frames import HELLO, MIN_FRAME, ack_frame, hello_frame, proof_frame, refused_sentence
from motorcade.cluster.greeting import Greeting, Hello, Identity, OtherMemberError, PeerRefusesError
from motorcade.core.handshake import HandshakeError

SECRET, OTHER = b"correct horse battery staple", b"another secret of some length"
LOW = Identity("fleet", "store-1", "a", 3, b"token-a", "1.0")
HIGH = Identity("fleet", "store-1", "b", 7, b"token-b", "1.1")


def side(me: Identity, secret: bytes = SECRET, *, received: int = 0, wanted: str = "") -> Greeting:
    return Greeting(me, secret, MIN_FRAME, lambda _hello: received, wanted)


def pair(
    high: Identity = HIGH,
    low: Identity = LOW,
    *,
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    received: tuple[int, int] = (0, 0),
    wanted: str = "",
) -> tuple[Greeting, Greeting]:
    """The side that connects, and the one that accepts."""
    return (
        side(high, secrets[0], received=received[0], wanted=wanted or low.id),
        side(low, secrets[1], received=received[1]),
    )


def meet(connects: Greeting, accepts: Greeting, cut: int = 1 << 16) -> None:
    """Let both talk until neither has anything to say, in pieces of `cut` bytes."""
    to_accepts, to_connects = connects.begin(), accepts.begin()
    while to_accepts or to_connects:
        piece, to_accepts = to_accepts[:cut], to_accepts[cut:]
        to_connects += accepts.feed(piece) if piece else b""
        piece, to_connects = to_connects[:cut], to_connects[cut:]
        to_accepts += connects.feed(piece) if piece else b""


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_learn_who_the_other_is_and_what_it_has(secret: bytes) -> None:
    for cut in (1, 7, 50, 1 << 16):
        connects, accepts = pair(secrets=(secret, secret), received=(70, 30))
        meet(connects, accepts, cut)
        assert connects.done and accepts.done
        assert (30, 70) == (connects.received, accepts.received)
        assert connects.peer is not None and accepts.peer is not None
        assert (LOW.id, LOW.token, "1.0") == (connects.peer.id, connects.peer.token, connects.peer.software)
        assert (HIGH.id, HIGH.token, MIN_FRAME) == (accepts.peer.id, accepts.peer.token, accepts.peer.max_frame)
        assert b"" == connects.rest == accepts.rest
        assert connects.peer.nonce != accepts.peer.nonce


def test_what_follows_is_left_for_the_link() -> None:
    connects, accepts = pair()
    proof = connects.feed(accepts.feed(connects.begin()))
    answer = accepts.feed(proof + b"\1\2")
    assert (True, b"\1\2") == (accepts.done, accepts.rest)
    assert b"" == connects.feed(answer + b"\3")
    assert (True, b"\3") == (connects.done, connects.rest)


def test_the_side_that_accepts_proves_last() -> None:
    """Who merely connects gets nothing to guess the secret by."""
    connects, accepts = pair()
    assert b"" == accepts.begin()
    hello = accepts.feed(connects.begin())
    assert hello[4] == HELLO and 5 + int.from_bytes(hello[:4], "little") == len(hello)


def refusal(connects: Greeting, accepts: Greeting) -> str:
    with pytest.raises(HandshakeError) as found:
        meet(connects, accepts)
    assert not connects.done or not accepts.done
    return str(found.value)


def test_what_does_not_fit_is_told_with_both_names() -> None:
    cases = [
        (pair(secrets=(SECRET, OTHER)), "a~3 and b~7 have different secrets (option cluster.secret_file)"),
        (pair(secrets=(SECRET, b"")), "b~7 has a secret and a~3 has none"),
        (pair(secrets=(b"", SECRET)), "a~3 has a secret and b~7 has none"),
        (
            pair(replace(HIGH, cluster="lorries")),
            "a~3 is a member of the cluster 'fleet', b~7 of 'lorries' (option cluster.name)",
        ),
        (pair(replace(HIGH, store="store-2")), "a~3 and b~7 have different stores (store-1 and store-2)"),
        (pair(replace(HIGH, number=2)), "b~2 has connected to a~3, which has to connect to b~2"),
        (pair(replace(HIGH, name="b\n2")), "a name that cannot be shown"),
    ]
    for (connects, accepts), why in cases:
        assert why in refusal(connects, accepts)


def test_another_member_at_the_address_is_no_refusal() -> None:
    """The one that was dialled is gone; its record may be there for a lease."""
    for there in (LOW, HIGH):
        connects, accepts = pair(low=there, wanted="c~4")
        with pytest.raises(OtherMemberError, match=f"b~7 has connected to c~4, but {there.id} is there now"):
            meet(connects, accepts)
        assert not accepts.done
    accepts = side(LOW)
    liar = side(HIGH, wanted="c~4")
    liar._wanted = LOW.id  # says one thing and does another
    with pytest.raises(HandshakeError, match="b~7 has connected to c~4, but a~3 is here"):
        meet(liar, accepts)


def test_another_protocol_is_told_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    connects, accepts = pair()
    theirs = connects.begin()
    monkeypatch.setattr(module, "PROTOCOL", 5)
    monkeypatch.setattr(module, "OLDEST", 4)
    with pytest.raises(HandshakeError) as found:
        accepts.feed(theirs)
    for part in ("a~3 (Motorcade 1.0) speaks protocols 4 to 5", "b~7 (Motorcade 1.1) protocol 1", "update the older"):
        assert part in str(found.value)


def test_a_later_version_may_say_more() -> None:
    _, accepts = pair(secrets=(b"", b""))
    body = msgspec.msgpack.encode(
        {"protocol": 9, "oldest": 1, "name": "b", "number": 7, "cluster": "fleet", "store": "store-1", "colour": "red"}
    )
    assert accepts.feed(hello_frame(body))


def test_the_other_side_may_refuse_by_itself() -> None:
    """A member that was found dead, for instance; it hears so after it has proved who it is, and not before."""

    def refuse(hello: Hello) -> int:
        raise HandshakeError(f"a~3 has found {hello.id} dead")

    connects = side(HIGH, wanted=LOW.id)
    accepts = Greeting(LOW, SECRET, MIN_FRAME, refuse)
    proof = connects.feed(accepts.feed(connects.begin()))
    with pytest.raises(HandshakeError, match="a~3 has found b~7 dead"):
        accepts.feed(proof)
    with pytest.raises(PeerRefusesError, match="a~3 refuses b~7: as you say"):
        connects.feed(refused_sentence("as you say"))


def test_a_replayed_proof_is_refused() -> None:
    """All that one side has said on an earlier connection, said again."""
    connects, accepts = pair()
    hello = connects.begin()
    recorded = hello, connects.feed(accepts.feed(hello))
    accepts.feed(recorded[1])
    assert accepts.done
    later = side(LOW)
    later.feed(recorded[0])
    with pytest.raises(HandshakeError, match="different secrets"):
        later.feed(recorded[1])


def test_a_reflected_proof_is_refused() -> None:
    """A side that knows no secret sends back what it is sent, as it is or under the name it was expected to have."""
    connects = side(HIGH, wanted=LOW.id)
    with pytest.raises(OtherMemberError, match="b~7 has connected to a~3, but b~7 is there now"):
        connects.feed(connects.begin())
    connects = side(HIGH, wanted=LOW.id)
    liar = side(LOW, OTHER)
    proof = connects.feed(liar.feed(connects.begin()))
    with pytest.raises(HandshakeError, match="different secrets"):
        connects.feed(proof)


def test_a_proof_holds_for_what_was_said_only() -> None:
    """Neither number nor HELLO can be changed on the way."""
    connects, accepts = pair(received=(5, 0))
    proof = connects.feed(accepts.feed(connects.begin()))
    forged = proof_frame(6, proof[-32:])
    with pytest.raises(HandshakeError, match="different secrets"):
        accepts.feed(forged)
    connects, accepts = pair()
    hello = connects.begin()
    assert b"1.1" in hello
    proof = connects.feed(accepts.feed(hello.replace(b"1.1", b"1.2")))
    with pytest.raises(HandshakeError, match="different secrets"):
        accepts.feed(proof)


def test_what_is_no_greeting_is_refused() -> None:
    for said, why in (
        (b"GET / HTTP/1.1\r\n", "a~3 cannot read what the other side says"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "Is TLS configured on one side only"),
        (ack_frame(1), "before it said who it is"),
        (proof_frame(0, b""), "before it said who it is"),
        (hello_frame(b"\xc1"), "a HELLO that cannot be read"),
        (hello_frame(msgspec.msgpack.encode({"protocol": 1, "oldest": 1, "name": "n" * 300})), "cannot be read"),
    ):
        with pytest.raises(HandshakeError, match=why):
            side(LOW).feed(said)
