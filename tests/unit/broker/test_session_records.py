"""What versions before the common form of messages have stored: entries of sessions, and wills in their records."""

from __future__ import annotations

from motorcade.broker.session_records import ENTRY, SESSIONS, decode_session
from motorcade.core.message import Message
from motorcade.mqtt.packets import Publish
from motorcade.storage.ports import Batch, Draft
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Turns, standing

#: A QoS 1 message without properties, as the fast path took it.
PLAIN = (
    b"\xdc\x00\x10\x01\xa9car/1/cmd\xa7backend\xa4anna\xc4\x00\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xc0\x01\xc0\xc0\xc0"
    b"\xc0\x90\x90\xa0\xc2"
)
#: A QoS 2 message with all that a message can have, for a receiver that gets it at QoS 1 with the retain flag.
FULL = (
    b"\xdc\x00\x10\x05\xa9car/1/cmd\xa7backend\xa4anna\xc4\x10\x00\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f"
    b"\xcbA\xd9T\xfc@ \x00\x00\xcbA\xda\xd2t\x80\x00\x00\x00\x02\x01\xaatext/plain\xa7answers\xc4\x02id\x92\x92\xa1a"
    b"\xa1b\x92\xa1a\xa1c\x92\x07\t\xb2$share/g/car/+/cmd\xc3"
)
#: The session of a client that is connected and has a will with a delay of 30 s.
SESSION = (
    b"\x9f\xc0\x05\xcd\x0e\x10\xcbA\xd9T\xfc@\x00\x00\x00\xc3\xc0\xc0\x94\xdc\x00\x10\x01\xa7wills/1\xa3car\xc0\xc4\x10\x00"
    b"\x01\x02\x03\x04\x05\x06\x07\x08\t\n\x0b\x0c\r\x0e\x0f\xcbA\xd9T\xfc@\x00\x00\x00\xc0\x01\xc0\xc0\xc0\xc0\x90\x90\xa0"
    b"\xc2\xc4\x04gone\x1e\xc0\xc2\x80\xa0\xa3tcp\xff\x00\x90"
)


def test_a_client_gets_what_an_earlier_version_has_stored_for_it() -> None:
    store = HeldStore()
    node = MemoryNode(store=store)
    with standing(node.clock):
        node.client("reader", clean=False, session_expiry=10_000).subscribe("wills/#")
        batch = Batch()
        batch.put(SESSIONS, "car", SESSION)
        batch.append(["session:reader"], Draft(PLAIN, b"plain"), node.clock.now)
        batch.append(["session:reader"], Draft(FULL, b"full"), node.clock.now)
        store.inner.apply(batch)
        node = node.restart()
        reader = node.admit("reader", clean=False, session_expiry=10_000)
        plain, full = reader.messages()
        assert ("car/1/cmd", b"plain", 1, False) == (plain.topic, plain.payload, plain.qos, plain.retain)
        assert ("car/1/cmd", b"full", 1, True) == (full.topic, full.payload, full.qos, full.retain)
        told = full.properties
        assert (1, "text/plain", "answers", b"id") == (
            told.payload_format,
            told.content_type,
            told.response_topic,
            told.correlation_data,
        )
        assert ((7, 9), (("a", "b"), ("a", "c"))) == (told.subscription_ids, told.user_properties)
        assert told.message_expiry == int(1_800_000_000 - node.clock.now)
        reader.ack(plain, full)
        node.wait(31.0)
        assert isinstance(node.loop, Turns)
        with node.loop.running():
            for will in node.state.registry.due(node.clock.now):
                node.broker.publish_will(will)
        (message,) = reader.messages()
        assert isinstance(message, Publish)
        assert ("wills/1", b"gone") == (message.topic, message.payload)
        record = decode_session(store.records_of(SESSIONS)["car"])
        assert record.will is None and record.expiry == 3600


def test_an_entry_of_an_earlier_version_says_what_it_said() -> None:
    """Also what a receiver does not see: the QoS at which it was published, its group, its guid."""
    entry = ENTRY.decode(FULL)
    assert (2, True, 1, True) == (entry.qos, entry.retain, entry.granted, entry.retained)
    assert ("$share/g/car/+/cmd", bytes(range(16)), 1_700_000_000.5) == (entry.group, entry.guid, entry.time)
    assert ENTRY.decode(PLAIN).plain and not entry.plain
    body, payload = ENTRY.encode(Message("t", b"x", 1), 1)
    assert (b"x", "t", True) == (payload, ENTRY.decode(body).topic, ENTRY.decode(body).plain)
