"""The secret and the certificates of leaders and workers, as the options name them; read when a part starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from motorcade.core.errors import ConfigError
from motorcade.dispatch.options import DispatchOptions

log = structlog.get_logger("motorcade.dispatch")

MIN_SECRET: Final = 16  #: bytes


@dataclass(frozen=True, slots=True)
class Security:
    """Secret and TLS of a connection between a leader and a worker."""

    secret: bytes = b""  #: empty: none is required
    context: ssl.SSLContext | None = None  #: None: no TLS


def leader_security(options: DispatchOptions) -> Security:
    """Return what a leader connects with; `ConfigError` says what is wrong."""
    if options.tls_cert and not options.tls_ca:
        raise ConfigError("dispatch.tls_ca: a leader with a certificate needs the CA that has signed those of workers")
    if not options.tls_ca:
        return Security(_secret(options))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, options)
    return Security(_secret(options), context)


def worker_security(options: DispatchOptions) -> Security:
    """Return what a worker accepts connections with; `ConfigError` says what is wrong."""
    if options.tls_ca and not options.tls_cert:
        raise ConfigError("dispatch.tls_cert: a worker needs a certificate of its own for TLS, with tls_key")
    if not options.tls_cert:
        return Security(_secret(options))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, options)
    if options.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return Security(_secret(options), context)


def _load(context: ssl.SSLContext, options: DispatchOptions) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if options.tls_ca:
        try:
            context.load_verify_locations(options.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"dispatch.tls_ca: cannot read {options.tls_ca}: {error}") from None
    if options.tls_cert:
        try:
            context.load_cert_chain(options.tls_cert, options.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"dispatch.tls_cert, dispatch.tls_key: cannot use {options.tls_cert} with {options.tls_key}: {error}"
            ) from None


def _secret(options: DispatchOptions) -> bytes:
    if not options.secret_file:
        return b""
    file = Path(options.secret_file)
    try:
        secret = file.read_bytes().strip()
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigError(f"dispatch.secret_file: cannot read {file}: {error.strerror or error}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"dispatch.secret_file: {file} has {len(secret)} bytes; a secret has {MIN_SECRET} or more, for instance "
            "those of `openssl rand -hex 32`"
        )
    if mode & 0o077:
        log.warning("dispatch_secret_readable", file=str(file), remedy=f"chmod 600 {file}")
    return secret
