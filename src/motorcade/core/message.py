"""A message as hooks, plugins and sessions see it: never a packet, never bound to one connection."""

from __future__ import annotations

from dataclasses import dataclass, field

UserProperties = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Message:
    """One published message. Treat it as immutable; `dataclasses.replace` makes a changed one."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    publisher: str = ""  #: client id of the sender; "" for the node itself and its plugins
    username: str | None = None
    guid: bytes = b""  #: 16 bytes, see `core.guid`; given by the broker when the message enters
    timestamp: float = 0.0  #: seconds since the epoch at which the broker accepted it
    payload_format: int | None = None  #: 1 says that the payload is UTF-8
    expires_at: float | None = None  #: seconds since the epoch; None never expires
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: UserProperties = ()
    headers: dict[str, object] = field(default_factory=dict)  #: notes between plugins; never leaves the node

    def expired(self, now: float) -> bool:
        """Return True if the message must not be delivered any more. `now` in seconds since the epoch."""
        return self.expires_at is not None and now >= self.expires_at
