"""TLS for listeners: 1.2 and newer, client certificates asked for or required."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import cast

from motorcade.core.client import Certificate
from motorcade.core.errors import ConfigError


def server_context(
    certificate: str, key: str, ca: str = "", *, require_client_certificate: bool = False
) -> ssl.SSLContext:
    """The context of a TLS listener; `ConfigError` says which file is wrong."""
    for name, path in (("certificate", certificate), ("key", key), ("ca", ca)):
        if not path and name != "ca":
            raise ConfigError(f"a TLS listener needs a {name} file")
        if path and not Path(path).is_file():
            raise ConfigError(f"{name} file {path} does not exist")
    if require_client_certificate and not ca:
        raise ConfigError("require_client_certificate needs a ca file to verify them with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"certificate {certificate} and key {key} cannot be used: {error}") from error
    if ca:
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"ca file {ca} cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED if require_client_certificate else ssl.CERT_OPTIONAL
    return context


def certificate_of(ssl_object: ssl.SSLObject) -> Certificate | None:
    """What the client's verified certificate says; None if it showed none."""
    found = ssl_object.getpeercert()
    if not found:
        return None
    subject_parts = cast("tuple[tuple[tuple[str, str], ...], ...]", found.get("subject", ()))
    alternatives = cast("tuple[tuple[str, str], ...]", found.get("subjectAltName", ()))
    names = [pair for group in subject_parts for pair in group]
    common = next((value for name, value in names if name == "commonName"), "")
    subject = ",".join(f"{_SHORT.get(name, name)}={_escaped(value)}" for name, value in reversed(names))
    dns = tuple(value for kind, value in alternatives if kind == "DNS")
    ends = ssl.cert_time_to_seconds(str(found["notAfter"])) if "notAfter" in found else 0
    return Certificate(common, subject, dns, float(ends))


def _escaped(value: str) -> str:
    """A value as RFC 4514 writes it, so that nothing in it reads as another attribute."""
    text = re.sub(r'([,+"\\<>;=])', r"\\\1", value)
    text = re.sub(r"^([# ])", r"\\\1", text)
    return re.sub(r"(?<!\\) $", r"\\ ", text)


_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
}
