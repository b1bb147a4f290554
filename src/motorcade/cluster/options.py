"""Options of the links; `node.py` fills them from the section `[cluster]`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

#: The longest MQTT packet, and what a member says about it.
MAX_FRAME: Final = 268_435_455 + 1_048_576


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses, secrets, bounds and times of the links of a member."""

    bind: str  #: address for other members, `HOST:PORT` or `[IPV6]:PORT`
    secret_file: str = ""  #: file with a secret that all members have; beyond this machine it or `ca` is required
    certificate: str = ""  #: file with the certificate chain of this member, PEM: links speak TLS
    key: str = ""  #: file with its private key, PEM
    #: file with the authorities that certificates of members must come from, PEM, and of nothing else: every holder
    #: of one may be a member; empty: those of the system, and only the side that accepts shows a certificate
    ca: str = ""
    plain: bool = False  #: links need no TLS over public addresses
    patience: Seconds = 0.5  #: seconds that a publisher waits for a member
    lease: Seconds = 3.0  #: seconds of silence after which a connection is given up and made again
    #: items that a peer has not acknowledged, from which on QoS 0 is dropped and publishers to it pause
    max_items: Count = 100_000
    max_bytes: Count = 67_108_864  #: bytes of these items
    #: bytes of a frame; who announces more is refused, an item that does not fit is not sent
    max_frame: Annotated[int, msgspec.Meta(ge=1_048_576, le=4_294_967_295)] = MAX_FRAME
