"""A wish to get messages, as SUBSCRIBE packets, hooks and the router all speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from motorcade.core.message import UserProperties


@dataclass(frozen=True, slots=True)
class Subscription:
    """One filter with its options; MQTT 3 has only the QoS."""

    filter: str  #: as the client wrote it, `$share/{group}/` included
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0  #: 0 send retained, 1 only if the subscription is new, 2 never
    identifier: int = 0  #: subscription identifier of the SUBSCRIBE packet; 0 is none
    user_properties: UserProperties = ()  #: of the SUBSCRIBE packet; sources read their options there
