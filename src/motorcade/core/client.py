"""The connected client, as hooks and plugins see it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class ClientInfo:
    """One client, from its CONNECT on. Plugins may read it; only authentication may change it."""

    client_id: str
    username: str | None = None
    host: str = ""  #: address of the peer, without port
    port: int = 0
    listener: str = "tcp"  #: tcp, tls, ws or wss
    version: int = 4  #: protocol level: 3 (MQTT 3.1), 4 (3.1.1) or 5
    clean_start: bool = True
    keep_alive: int = 0  #: seconds; 0 is none
    connected_at: float = 0.0  #: seconds since the epoch
    certificate: Certificate | None = None
    superuser: bool = False  #: set by authentication; skips access rules
    attributes: dict[str, str] = field(default_factory=dict)  #: set by authentication, e.g. from token claims
    user_properties: tuple[tuple[str, str], ...] = ()  #: of the CONNECT packet

    @property
    def is_loopback(self) -> bool:
        """True if the peer is on this machine."""
        return _is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The contents of the client's verified TLS certificate."""

    common_name: str
    subject: str  #: RFC 4514 text
    dns_names: tuple[str, ...] = ()
    not_after: float = 0.0  #: seconds since the epoch


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a connecting client. Never logged."""

    password: bytes | None = None
    method: str | None = None  #: enhanced authentication (MQTT 5): name of the method
    data: bytes | None = None  #: enhanced authentication: data of the current step


@lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
