"""The client's TLS certificate. The listener has verified it before anything of this is asked."""

from __future__ import annotations

from motorcade.core.client import Certificate, ClientInfo, Credentials
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access.backends import Accepted, Answer
from motorcade.plugins.access.config import ClientCertificate


class CertificateBackend:
    """Allows a client with a certificate under the name in it, passes clients without one on."""

    def __init__(self, config: ClientCertificate) -> None:
        self.name = "client certificate"
        self._config = config

    async def check(self, client: ClientInfo, credentials: Credentials, now: float, flow: str = "") -> Answer:  # noqa: ARG002
        certificate = client.certificate
        if certificate is None or credentials.method is not None:
            return None
        username = _part(certificate, self._config.username)
        client_id = _part(certificate, self._config.client_id) if self._config.client_id else None
        if not username or (client_id is not None and not _usable(client_id)):
            return Deny(ReasonCode.NOT_AUTHORIZED, "the certificate does not have a usable name")
        expires_at = certificate.not_after or None
        if expires_at is not None and expires_at <= now:
            return Deny(ReasonCode.NOT_AUTHORIZED, "the certificate has expired")
        return Accepted(Allow(username=username, client_id=client_id, expires_at=expires_at))

    def remembered(self, client: ClientInfo, credentials: Credentials, now: float) -> Accepted | None:  # noqa: ARG002
        return None

    async def close(self) -> None:
        """Close; there is nothing to give back."""


def _usable(client_id: str) -> bool:
    """Return True if a text can be a client id, as the listener checks it of the id that this one replaces."""
    return bool(client_id) and not any(character in client_id for character in "+#\0")


def _part(certificate: Certificate, part: str) -> str:
    match part:
        case "san":
            return certificate.dns_names[0] if certificate.dns_names else ""
        case "dn":
            return certificate.subject
    return certificate.common_name
