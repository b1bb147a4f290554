"""The secret and the certificates of leaders and workers, as the options name them; read when a part starts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import structlog

from motorcade.core.errors import ConfigError
from motorcade.credentials import present, read_secret, tls_context, trust
from motorcade.dispatch.options import DispatchOptions

log = structlog.get_logger("motorcade.dispatch")


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
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, options)
    return Security(_secret(options), context)


def worker_security(options: DispatchOptions) -> Security:
    """Return what a worker accepts connections with; `ConfigError` says what is wrong."""
    if options.tls_ca and not options.tls_cert:
        raise ConfigError("dispatch.tls_cert: a worker needs a certificate of its own for TLS, with tls_key")
    if not options.tls_cert:
        return Security(_secret(options))
    context = tls_context(ssl.PROTOCOL_TLS_SERVER)
    _load(context, options)
    if options.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return Security(_secret(options), context)


def _load(context: ssl.SSLContext, options: DispatchOptions) -> None:
    if options.tls_ca:
        trust(context, "dispatch.tls_ca", options.tls_ca)
    if options.tls_cert:
        present(context, ("dispatch.tls_cert", "dispatch.tls_key"), options.tls_cert, options.tls_key)


def _secret(options: DispatchOptions) -> bytes:
    return read_secret("dispatch.secret_file", options.secret_file, log, "dispatch_secret_readable")
