"""Options of the links between members."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

#: The longest MQTT packet, and what a member says about it.
MAX_FRAME: Final = 268_435_455 + 1_048_576


class LinkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How members speak to each other."""

    bind: str = "127.0.0.1:1885"  #: address for other members, `HOST:PORT` or `[IPV6]:PORT`
    secret_file: str = ""  #: file with a secret that all members have; beyond this machine it or `ca` is required
    certificate: str = ""  #: file with the certificate chain of this member, PEM; with it links speak TLS
    key: str = ""  #: file with the private key, PEM
    #: file with the authorities that certificates of members must come from, PEM, and of nothing else: whoever has such
    #: a certificate is a member; empty: those of the system, and no member has to show one when it connects
    ca: str = ""
    plain: bool = False  #: allow links without TLS over public addresses
    patience: Seconds = 0.5  #: seconds that a publisher waits for other members
    lease: Seconds = 3.0  #: seconds of silence after which a link is given up and made again
    #: items that one peer has not acknowledged, above which QoS 0 is dropped and publishers to it pause
    max_items: Count = 100_000
    max_bytes: Count = 67_108_864  #: bytes of these items
    #: bytes of a frame; a message that does not fit is not sent
    max_frame: Annotated[int, msgspec.Meta(ge=1_048_576, le=4_294_967_295)] = MAX_FRAME

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key: each needs the other")
        if self.ca and not self.certificate:
            raise ValueError("ca: needs certificate and key: a link with TLS has a certificate on its accepting side")
