"""Secrets and certificates of links between processes, from the files that options name; read when a part starts.

Every error is a `ConfigError` that begins with the option. Options are given by their full names: `dispatch.tls_ca`.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import structlog

from motorcade.core.errors import ConfigError

MIN_SECRET: Final = 16  #: bytes


def read_secret(option: str, path: str, log: structlog.stdlib.BoundLogger, event: str) -> bytes:
    """Return the secret in a file; nothing if there is no file. Log `event` if others may read it."""
    if not path:
        return b""
    file = Path(path)
    try:
        secret = file.read_bytes().strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {file}: {error.strerror or error}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"{option}: {file} has {len(secret)} bytes; a secret has {MIN_SECRET} or more, for instance "
            "those of `openssl rand -hex 32`"
        )
    if mode & 0o077:
        log.warning(event, file=str(file), remedy=f"chmod 600 {file}")
    return secret


def tls_context(protocol: int) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer; `protocol` is `ssl.PROTOCOL_TLS_CLIENT` or `ssl.PROTOCOL_TLS_SERVER`."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def trust(context: ssl.SSLContext, option: str, ca: str) -> None:
    """Let a context verify certificates of these authorities."""
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{option}: cannot read {ca}: {error}") from None


def present(context: ssl.SSLContext, options: tuple[str, str], certificate: str, key: str) -> None:
    """Let a context show a certificate; the options are those of the certificate and of its key."""
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{', '.join(options)}: cannot use {certificate} with {key}: {error}") from None
