"""Small promises of messages and clients."""

from __future__ import annotations

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from tests.support.cases import each_row


@each_row(
    "expires_at now expired",
    ((None, 1e12, False), (100.0, 99.9, False), (100.0, 100.0, True), (100.0, 100.1, True), (0.0, 0.0, True)),
)
def test_a_message_expires_at_its_very_second(expires_at: float | None, now: float, expired: bool) -> None:
    assert expired is Message("t", b"", expires_at=expires_at).expired(now)


@each_row(
    "host local",
    (
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::", False),
        ("0.0.0.0", False),
        ("128.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("not an address", False),
    ),
)
def test_who_is_on_this_machine(host: str, local: bool) -> None:
    """Only addresses count: a name proves nothing, and an IPv4 address inside IPv6 is what it is inside."""
    assert local is ClientInfo("c", host=host).is_loopback
