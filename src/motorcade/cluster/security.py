"""Secret and certificates of links, as the options name them, and which addresses need them.

    address              is enough
    loopback             nothing
    private network      a secret, or certificates of both sides
    any other            certificates, and a secret or those of both sides; or a secret and `cluster.plain`

A wildcard such as 0.0.0.0 is any other address: what the machine has may change.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from typing import Final

import structlog

from motorcade.cluster.options import LinkOptions
from motorcade.credentials import present, read_secret, tls_context, trust

log = structlog.stdlib.get_logger("motorcade.cluster")

_PRIVATE: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "fc00::/7",
        "fe80::/10",
    )
)


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """Secret and TLS of all links of a member."""

    secret: bytes = b""  #: empty: none is required
    accepting: ssl.SSLContext | None = None  #: None: no TLS
    connecting: ssl.SSLContext | None = None
    mutual: bool = False  #: both sides show a certificate of an authority that was configured
    plain: bool = False  #: public addresses need no TLS

    def objection(self, host: str) -> str:
        """Return why no link may be made over an address, and what to do; nothing if it may."""
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address.is_loopback:
            return ""
        if not self.secret and not self.mutual:
            return (
                "other machines can reach it, and any program could pass for a member: set cluster.secret_file, or "
                "cluster.certificate, cluster.key and cluster.ca"
            )
        if self.accepting is None and not self.plain and not any(address in network for network in _PRIVATE):
            return (
                "it is not an address of a private network, and links without TLS can be read on their way: set "
                "cluster.certificate and cluster.key, or name a private address, or set cluster.plain if the network "
                "is safe"
            )
        return ""


def link_security(options: LinkOptions) -> LinkSecurity:
    """Read secret and certificates; `ConfigError` says what is wrong."""
    secret = read_secret("cluster.secret_file", options.secret_file, log, "cluster_secret_readable")
    if not options.certificate:
        return LinkSecurity(secret, plain=options.plain)
    accepting, connecting = tls_context(ssl.PROTOCOL_TLS_SERVER), tls_context(ssl.PROTOCOL_TLS_CLIENT)
    for context in (accepting, connecting):
        present(context, ("cluster.certificate", "cluster.key"), options.certificate, options.key)
        if options.ca:
            trust(context, "cluster.ca", options.ca)
    if options.ca:
        accepting.verify_mode = ssl.CERT_REQUIRED
    else:
        connecting.load_default_certs()
    return LinkSecurity(secret, accepting, connecting, bool(options.ca), options.plain)
