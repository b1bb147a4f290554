"""The validity of certificates and revocation lists in PEM files.

The standard library tells that only of certificates of authorities and of peers. All that is wanted here are two dates
at a fixed place, so the few rules of DER that lead there are followed by hand.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

CERTIFICATE: Final = "CERTIFICATE"
REVOCATION_LIST: Final = "X509 CRL"

_SEQUENCE: Final = 0x30
_INTEGER: Final = 0x02
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)


class Element(NamedTuple):
    """One value: its tag and its contents."""

    tag: int
    content: bytes


def certificate_ends(pem: bytes) -> list[float]:
    """Return when each certificate of a file ends, in seconds since the epoch. `ValueError` if one cannot be read."""
    return [_certificate_end(der) for der in _blocks(pem, CERTIFICATE)]


def revocation_lists(pem: bytes) -> list[float | None]:
    """Return when the successor of each revocation list of a file is due; None: the list does not say."""
    return [_next_update(der) for der in _blocks(pem, REVOCATION_LIST)]


def _blocks(pem: bytes, wanted: str) -> Iterator[bytes]:
    for name, body in _BLOCK.findall(pem):
        if name.decode() == wanted or (wanted == CERTIFICATE and name in (b"TRUSTED CERTIFICATE", b"X509 CERTIFICATE")):
            try:
                yield base64.b64decode(b"".join(body.split()), validate=True)
            except binascii.Error as error:
                raise ValueError(f"a block {wanted!r} is not base64") from error


def _certificate_end(der: bytes) -> float:
    """Read `Certificate ::= { { [version], serial, algorithm, issuer, { notBefore, notAfter }, … }, … }`."""
    fields = [field for field in _elements(_inner(der)) if field.tag != _VERSION]
    validity = list(_elements(fields[3].content)) if len(fields) > 3 and fields[3].tag == _SEQUENCE else []
    if len(validity) != 2:
        raise ValueError("a certificate has no dates")
    return _seconds(validity[1])


def _next_update(der: bytes) -> float | None:
    """Read `CertificateList ::= { { version?, algorithm, issuer, thisUpdate, nextUpdate?, … }, … }`."""
    fields = [field for field in _elements(_inner(der)) if field.tag != _INTEGER]
    if len(fields) < 3:
        raise ValueError("a revocation list has no dates")
    _seconds(fields[2])
    due = fields[3] if len(fields) > 3 else None
    return _seconds(due) if due is not None and due.tag in (_UTC_TIME, _GENERALIZED_TIME) else None


def _inner(der: bytes) -> bytes:
    """Return the signed part: the first sequence in the outer one."""
    outer = next(_elements(der), None)
    inner = next(_elements(outer.content), None) if outer is not None and outer.tag == _SEQUENCE else None
    if inner is None or inner.tag != _SEQUENCE:
        raise ValueError("not DER")
    return inner.content


def _elements(data: bytes) -> Iterator[Element]:
    at = 0
    while at < len(data):
        if at + 2 > len(data):
            raise ValueError("not DER")
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            if not 1 <= size <= 4 or at + size > len(data):
                raise ValueError("not DER")
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("not DER")
        yield Element(tag, data[at : at + length])
        at += length


def _seconds(element: Element) -> float:
    """Read `UTCTime`, which has two digits for the year, of 1950 to 2049, or `GeneralizedTime`, which has four."""
    text = element.content.decode("ascii", "replace")
    if element.tag == _UTC_TIME and text[:2].isdigit():
        text = ("19" if text[:2] >= "50" else "20") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError("not a date")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
