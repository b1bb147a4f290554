"""4.10 Request and response: the properties that carry a request through the broker, and a whole exchange."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.clauses import clause
from tests.support.wire import Client, prop

Connect = Callable[..., Client]

RESPONSE_TOPIC, CORRELATION_DATA = 0x08, 0x09
REQUEST_RESPONSE_INFORMATION, RESPONSE_INFORMATION = 0x19, 0x1A


@clause(v5=("MQTT-3.3.2-15", "MQTT-3.3.2-16"))
def test_a_request_is_answered(connect: Connect, name: str) -> None:
    """A responder that knows nothing but the request answers to the right place with the right data
    [MQTT-3.3.2-15] [MQTT-3.3.2-16].
    """
    requester, responder = connect(), connect()
    requester.subscribe(f"{name}/replies/1", 1)
    responder.subscribe(f"{name}/service", 1)
    asked = prop(RESPONSE_TOPIC, f"{name}/replies/1") + prop(CORRELATION_DATA, b"\x00\x01\xff")
    requester.publish(f"{name}/service", b"question", 1, properties=asked)
    request = responder.receive()
    responder.publish(
        request.prop(RESPONSE_TOPIC),
        b"answer to " + request.payload,
        1,
        properties=prop(CORRELATION_DATA, request.prop(CORRELATION_DATA)),
    )
    reply = requester.receive()
    assert (f"{name}/replies/1", b"answer to question") == (reply.topic, reply.payload)
    assert b"\x00\x01\xff" == reply.prop(CORRELATION_DATA)
    assert reply.prop(RESPONSE_TOPIC) is None


@clause(v5="MQTT-3.1.2-28")
def test_response_information_comes_only_on_request(connect: Connect) -> None:
    """Without the wish for it, or with the wish 0, a CONNACK has no response information [MQTT-3.1.2-28]."""
    for properties in (b"", prop(REQUEST_RESPONSE_INFORMATION, 0)):
        client = connect(properties=properties)
        assert client.connack is not None
        assert client.connack.prop(RESPONSE_INFORMATION) is None
