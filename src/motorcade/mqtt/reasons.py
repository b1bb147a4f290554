"""Reason codes as clients of each version get them, and the error that carries one.

MQTT 3 has five CONNACK return codes and one SUBACK failure code; everything else it hears as a closed connection.
"""

from __future__ import annotations

from motorcade.core.errors import MotorcadeError
from motorcade.core.reasons import ReasonCode

__all__ = ["ProtocolError", "ReasonCode", "connack_code_v3"]


class ProtocolError(MotorcadeError):
    """The peer broke the rules of MQTT. We answer with `reason` and close."""

    def __init__(self, reason: ReasonCode, detail: str = "") -> None:
        super().__init__(detail or reason.name.lower().replace("_", " "))
        self.reason = reason


_CONNACK_V3 = {
    ReasonCode.SUCCESS: 0,
    ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1,
    ReasonCode.CLIENT_IDENTIFIER_NOT_VALID: 2,
    ReasonCode.SERVER_UNAVAILABLE: 3,
    ReasonCode.SERVER_BUSY: 3,
    ReasonCode.QUOTA_EXCEEDED: 3,
    ReasonCode.CONNECTION_RATE_EXCEEDED: 3,
    ReasonCode.SERVER_SHUTTING_DOWN: 3,
    ReasonCode.USE_ANOTHER_SERVER: 3,
    ReasonCode.SERVER_MOVED: 3,
    ReasonCode.BAD_USER_NAME_OR_PASSWORD: 4,
    ReasonCode.NOT_AUTHORIZED: 5,
    ReasonCode.BANNED: 5,
}


def connack_code_v3(reason: ReasonCode) -> int | None:
    """Return the code of an MQTT 3 CONNACK, or None if the connection is just closed."""
    return _CONNACK_V3.get(reason)
