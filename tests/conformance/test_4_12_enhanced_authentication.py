"""Sections 3.15 and 4.12: AUTH and authentication in several steps, by a plugin that asks as often as it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.support import wire
from tests.support.cases import each
from tests.support.clauses import clause
from tests.support.refusals import BROKEN, MALFORMED, PROTOCOL_ERROR, connect_refused, refused

METHOD, DATA = 0x15, 0x16
CONTINUE, AGAIN = 0x18, 0x19

Begin = Callable[..., wire.Client]


def steps(data: bytes, method: str = "steps") -> bytes:
    """Properties of the method with data."""
    return wire.prop(METHOD, method) + wire.prop(DATA, data)


@pytest.fixture
def begin(open_client: Callable[..., wire.Client], talkative: wire.Address, name: str) -> Begin:
    """`begin(data, more=b"")`: a client that has sent CONNECT with the method, each with an id of its own."""
    numbers = itertools.count(1)

    def begun(data: bytes, more: bytes = b"") -> wire.Client:
        client = open_client(5, talkative)
        client.send(wire.connect_packet(f"{name}-{next(numbers)}", properties=steps(data) + more))
        return client

    return begun


def challenged(client: wire.Client, number: int) -> wire.Packet:
    """Expect challenge `number`."""
    question = client.expect(wire.AUTH)
    assert (CONTINUE, "steps") == (question.reason, question.prop(METHOD))
    assert b"challenge %d" % number == question.prop(DATA)
    assert 0 == question.flags
    return question


def answer(client: wire.Client, number: int, reason: int = CONTINUE) -> None:
    """Answer a challenge as it wants to be answered."""
    client.send(wire.auth_packet(reason, steps(b"answer %d" % number)))


@clause(v5=("MQTT-4.12.0-2", "MQTT-4.12.0-5", "MQTT-3.15.2-1", "MQTT-3.2.0-1"))
@each(questions=(0, 1, 2, 5))
def test_a_client_is_accepted_after_all_questions(begin: Begin, questions: int) -> None:
    """The broker asks with AUTH 0x18 and accepts with CONNACK; both name the method [MQTT-4.12.0-2]."""
    client = begin(b"%d" % questions)
    for number in range(1, questions + 1):
        challenged(client, number)
        answer(client, number)
    accepted = client.expect(wire.CONNACK)
    assert (0, "steps", b"welcome") == (accepted.reason, accepted.prop(METHOD), accepted.prop(DATA))
    client.expect_nothing()


@clause(v5=("MQTT-4.12.0-4", "MQTT-3.14.0-1"))
@each(wrong_at=(0, 1, 2))
def test_a_client_is_refused_at_any_step(begin: Begin, wrong_at: int) -> None:
    """A wrong answer at any point is refused with a CONNACK, and the connection ends [MQTT-4.12.0-4]."""
    client = begin(b"no" if wrong_at == 0 else b"3")
    for number in range(1, wrong_at + 1):
        challenged(client, number)
        if number < wrong_at:
            answer(client, number)
        else:
            client.send(wire.auth_packet(CONTINUE, steps(b"no idea")))
    connect_refused(client, 0x87)


@clause(v5=("MQTT-4.12.0-1", "MQTT-3.1.4-2"))
def test_an_unknown_method_is_refused(
    open_client: Callable[..., wire.Client], talkative: wire.Address, name: str
) -> None:
    """A method that no plugin knows gets 0x8C or 0x87 and a closed connection [MQTT-4.12.0-1]."""
    client = open_client(5, talkative)
    client.send(wire.connect_packet(name, properties=steps(b"1", "other")))
    connect_refused(client, 0x8C, 0x87)


@clause(v5="MQTT-4.12.0-1")
def test_a_broker_without_methods_refuses_all(open_client: Callable[..., wire.Client], name: str) -> None:
    """A broker without any method refuses each with 0x8C or 0x87 [MQTT-4.12.0-1]."""
    client = open_client()
    client.send(wire.connect_packet(name, properties=steps(b"1")))
    connect_refused(client, 0x8C, 0x87)


@clause(v5="MQTT-4.12.0-6")
def test_without_a_method_there_is_no_auth(connect: wire.Connect, talkative: wire.Address) -> None:
    """A client without a method gets no AUTH and no method in its CONNACK [MQTT-4.12.0-6]."""
    client = connect(to=talkative)
    assert client.connack is not None
    assert client.connack.prop(METHOD) is None and client.connack.prop(DATA) is None
    client.expect_nothing()


@clause(v5=("MQTT-4.12.0-5", "MQTT-4.12.0-4"))
@each(properties=(wire.prop(METHOD, "other") + wire.prop(DATA, b"answer 1"), wire.prop(DATA, b"answer 1"), b""))
def test_the_method_may_not_change_between_steps(begin: Begin, properties: bytes) -> None:
    """Every AUTH must name the method of the CONNECT [MQTT-4.12.0-5]."""
    client = begin(b"2")
    challenged(client, 1)
    client.send(wire.auth_packet(CONTINUE, properties))
    connect_refused(client, *BROKEN, 0x8C, 0x87)


@clause(v5="MQTT-3.15.2-1")
@each(reason=(0x00, AGAIN, 0x01, 0x80))
def test_only_continue_answers_a_question(begin: Begin, reason: int) -> None:
    """During the first authentication an AUTH of another reason is an error [MQTT-3.15.2-1]."""
    client = begin(b"2")
    challenged(client, 1)
    answer(client, 1, reason)
    connect_refused(client, *BROKEN)


@clause(v5=("MQTT-3.1.2-30", "MQTT-3.1.4-6"))
def test_other_packets_during_authentication_have_no_effect(
    begin: Begin, connect: wire.Connect, talkative: wire.Address, name: str
) -> None:
    """A client that publishes before its CONNACK is refused, and the message goes nowhere [MQTT-3.1.2-30]."""
    observer = connect(to=talkative)
    observer.subscribe(f"{name}/t")
    client = begin(b"1")
    challenged(client, 1)
    client.send(wire.publish_packet(f"{name}/t", b"x"))
    connect_refused(client, PROTOCOL_ERROR)
    observer.expect_nothing()


@clause(v5="MQTT-3.15.1-1")
@each(flags=(1, 2, 4, 8, 15))
def test_reserved_flags_of_auth_are_checked(begin: Begin, name: str, flags: int) -> None:
    """An AUTH with flags is malformed, before and after CONNACK [MQTT-3.15.1-1]."""
    raw = wire.auth_packet(CONTINUE, steps(b"answer 1"))
    flagged = bytes([0xF0 | flags]) + raw[1:]
    early = begin(b"1")
    challenged(early, 1)
    early.send(flagged)
    connect_refused(early, MALFORMED)
    late = begin(b"0")
    late.expect(wire.CONNACK)
    late.send(flagged)
    refused(late, MALFORMED)


@clause(v5=("MQTT-3.15.2-2", "MQTT-3.15.2-3", "MQTT-3.1.2-24"))
def test_auth_fits_the_client(begin: Begin) -> None:
    """AUTH packets of the broker stay within the client's maximum packet size [MQTT-3.15.2-2]."""
    client = begin(b"2", wire.prop(0x27, 64))
    for number in (1, 2):
        assert len(challenged(client, number).raw) <= 64
        answer(client, number)
    assert len(client.expect(wire.CONNACK).raw) <= 64


@clause(v5="MQTT-3.15.2-2")
def test_a_refusal_during_authentication_fits_the_client(begin: Begin) -> None:
    """The wordy refusal of the plugin loses its reason string where it would be too large [MQTT-3.15.2-2]."""
    client = begin(b"1", wire.prop(0x27, 64))
    challenged(client, 1)
    client.send(wire.auth_packet(CONTINUE, steps(b"no")))
    refusal = connect_refused(client, 0x87)
    assert refusal is not None
    assert len(refusal.raw) <= 64


# --- re-authentication --------------------------------------------------------------------------------------------


@clause(v5=("MQTT-4.12.1-1", "MQTT-4.12.0-5", "MQTT-3.15.2-1"))
@each(questions=(0, 1, 3))
def test_a_client_may_authenticate_again(begin: Begin, name: str, questions: int) -> None:
    """AUTH 0x19 starts over: questions with 0x18, the end with 0x00, other packets meanwhile [MQTT-4.12.1-1]."""
    client = begin(b"0")
    client.expect(wire.CONNACK)
    client.subscribe(f"{name}/t")
    client.send(wire.auth_packet(AGAIN, steps(b"%d" % questions)))
    for number in range(1, questions + 1):
        challenged(client, number)
        client.publish(f"{name}/t", b"meanwhile")
        assert b"meanwhile" == client.expect(wire.PUBLISH).payload
        answer(client, number)
    done = client.expect(wire.AUTH)
    assert (0x00, "steps") == (done.reason, done.prop(METHOD))
    client.expect_nothing()


@clause(v5="MQTT-4.12.1-2")
@each(questions=(0, 1))
def test_a_failed_re_authentication_ends_the_connection(begin: Begin, questions: int) -> None:
    """A client that cannot authenticate again gets DISCONNECT with the reason [MQTT-4.12.1-2]."""
    client = begin(b"0")
    client.expect(wire.CONNACK)
    client.send(wire.auth_packet(AGAIN, steps(b"%d" % questions if questions else b"no")))
    if questions:
        challenged(client, 1)
        client.send(wire.auth_packet(CONTINUE, steps(b"no idea")))
    refused(client, 0x87)


@clause(v5=("MQTT-4.12.1-2", "MQTT-3.14.2-3"))
def test_the_words_of_a_failed_re_authentication_fit_the_client(begin: Begin) -> None:
    """The reason string of the DISCONNECT is left out when it would be too large [MQTT-3.14.2-3]."""
    curious = begin(b"0")
    curious.expect(wire.CONNACK)
    curious.send(wire.auth_packet(AGAIN, steps(b"no")))
    told = refused(curious, 0x87)
    small = begin(b"0", wire.prop(0x27, 64))
    small.expect(wire.CONNACK)
    small.send(wire.auth_packet(AGAIN, steps(b"no")))
    short = refused(small, 0x87)
    assert told is not None and short is not None
    assert "wordy" in (told.prop(0x1F) or "")
    assert len(short.raw) <= 64


@clause(v5=("MQTT-4.12.1-1", "MQTT-4.12.0-5"))
@each(properties=(steps(b"0", "other"), b""))
def test_the_method_may_not_change_in_re_authentication(begin: Begin, properties: bytes) -> None:
    """Re-authentication is by the method of the CONNECT [MQTT-4.12.1-1]."""
    client = begin(b"0")
    client.expect(wire.CONNACK)
    client.send(wire.auth_packet(AGAIN, properties))
    refused(client, *BROKEN, 0x8C, 0x87)


@clause(v5="MQTT-3.15.2-1")
@each(reason=(0x00, CONTINUE, 0x01))
def test_re_authentication_starts_with_its_own_reason(begin: Begin, reason: int) -> None:
    """A connected client that was not asked anything may only send AUTH 0x19 [MQTT-3.15.2-1]."""
    client = begin(b"0")
    client.expect(wire.CONNACK)
    client.send(wire.auth_packet(reason, steps(b"0")))
    refused(client, *BROKEN)


def test_the_short_form_of_auth_is_not_an_authentication(begin: Begin) -> None:
    """AUTH of no bytes means success, which a client cannot declare."""
    client = begin(b"1")
    challenged(client, 1)
    client.send(wire.packet(0xF0))
    connect_refused(client, *BROKEN)
