"""TLS for listeners: 1.2 and newer, client certificates asked for or required, revocation lists honoured.

Renewed files become a new context, never a change of the one in use: a list that is withdrawn, or an authority, is
gone from it, and no session ticket of the old context lets a revoked certificate in.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from motorcade.broker import pem
from motorcade.core.client import Certificate
from motorcade.core.errors import ConfigError


class TlsFiles(NamedTuple):
    """The files of a TLS listener, and what it demands."""

    certificate: str
    key: str
    ca: str = ""
    crl: str = ""
    require_client_certificate: bool = False


class Served(NamedTuple):
    """A context, and what was read for it."""

    context: ssl.SSLContext
    files: TlsFiles
    digest: bytes  #: of all files: whether a reload finds others
    expiry: Mapping[str, float]  #: option: when the first certificate (list) of its file ends, since the epoch


def server_context(files: TlsFiles) -> Served:
    """Return the context of a TLS listener; `ConfigError` says which file is wrong."""
    contents = {name: _read(name, path) for name, path in _paths(files)}
    if files.require_client_certificate and not files.ca:
        raise ConfigError("require_client_certificate needs a ca file to verify them with")
    if files.crl and not files.ca:
        raise ConfigError("crl needs a ca file: a revocation list is one of the authorities in it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"certificate {files.certificate} and key {files.key} cannot be used: {error}") from error
    if files.ca:
        _trust(context, files, contents)
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return Served(context, files, digest.digest(), _expiry(files, contents))


def _trust(context: ssl.SSLContext, files: TlsFiles, contents: Mapping[str, bytes]) -> None:
    """Verify client certificates, against revocation lists too if there are any."""
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"ca file {files.ca} cannot be used: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED if files.require_client_certificate else ssl.CERT_OPTIONAL
    if files.crl:
        try:
            context.load_verify_locations(files.crl)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"crl file {files.crl} cannot be used: {error}") from error
        if not _lists("crl", files.crl, contents["crl"]):
            raise ConfigError(f"crl file {files.crl} has no revocation list (BEGIN X509 CRL)")
    if files.crl or _lists("ca", files.ca, contents["ca"]):
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _paths(files: TlsFiles) -> Iterator[tuple[str, str]]:
    for name in ("certificate", "key", "ca", "crl"):
        path: str = getattr(files, name)
        if path:
            yield name, path
        elif name in ("certificate", "key"):
            raise ConfigError(f"a TLS listener needs a {name} file")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{name} file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"{name} file {path} cannot be read: {error.strerror}") from error


def _lists(name: str, path: str, content: bytes) -> list[float | None]:
    try:
        return pem.revocation_lists(content)
    except ValueError as error:
        raise ConfigError(f"{name} file {path} cannot be used: {error}") from error


def _expiry(files: TlsFiles, contents: Mapping[str, bytes]) -> dict[str, float]:
    """Return when the contents end: of each file the first. A certificate that only OpenSSL can read is left out."""
    found: dict[str, float] = {}
    for name in ("certificate", "ca"):
        try:
            ends = pem.certificate_ends(contents.get(name, b""))
        except ValueError:
            continue
        if ends:
            found[name] = min(ends)
    both = _lists("ca", files.ca, contents.get("ca", b"")) + _lists("crl", files.crl, contents.get("crl", b""))
    if due := [end for end in both if end is not None]:
        found["crl"] = min(due)
    return found


def certificate_of(ssl_object: ssl.SSLObject) -> Certificate | None:
    """Return the contents of the client's verified certificate; None if it showed none."""
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
    """Return a value as RFC 4514 writes it, so that nothing in it reads as another attribute."""
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
