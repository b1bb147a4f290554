"""Address of a broker and credentials: one URL, and the names of files.

    mqtt://HOST[:1883]    mqtts://HOST[:8883]    ws://HOST[:8083][/mqtt]    wss://HOST[:8084][/mqtt]

Rule 1: an address may be shown and sent around, so it holds no password: that is in a file, or in the environment
        (`MOTORCADE_PASSWORD`) of the process that connects.
"""

from __future__ import annotations

import os
import ssl
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from motorcade.client import Client
from motorcade.core.errors import MotorcadeError

FORMS: Final = "mqtt://HOST[:PORT], mqtts://HOST[:PORT], ws://HOST[:PORT][/PATH], wss://HOST[:PORT][/PATH]"
PASSWORD_VARIABLE: Final = "MOTORCADE_PASSWORD"  # noqa: S105 - the name of it
WEB_PATH: Final = "/mqtt"

#: Ports of brokers: (TLS, WebSocket).
PORTS: Final = {(False, False): 1883, (True, False): 8883, (False, True): 8083, (True, True): 8084}

_SCHEMES: Final = {"mqtt": (False, False), "mqtts": (True, False), "ws": (False, True), "wss": (True, True)}


class AddressError(MotorcadeError):
    """An address names no broker that could be reached."""


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Everything needed to connect, except a password."""

    host: str
    port: int
    tls: bool = False
    web_path: str | None = None  #: over WebSocket
    username: str | None = None
    password_file: str | None = None
    cafile: str | None = None  #: authorities to trust; else those of the system
    cert: str | None = None  #: our certificate
    key: str | None = None
    insecure: bool = False  #: the broker's certificate is not checked

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        username: str | None = None,
        password_file: str | None = None,
        cafile: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        insecure: bool = False,
    ) -> BrokerAddress:
        """Parse a URL and options; `AddressError` says what is wrong."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressError(f"{_without_user(url)!r} is no address of a broker: {error}") from None
        if parts.username is not None or parts.password is not None:
            raise AddressError(
                "a URL is shown in plans and logs, so user and password do not belong into it; give a username, and a "
                f"password file or the variable {PASSWORD_VARIABLE}"
            )
        if parts.scheme not in _SCHEMES or not host or parts.query or parts.fragment:
            raise AddressError(f"{url!r} is no address of a broker; write one of {FORMS}")
        tls, web = _SCHEMES[parts.scheme]
        if not web and parts.path not in {"", "/"}:
            raise AddressError(f"{url!r} has a path, which only ws:// and wss:// have")
        if not tls and (cafile or cert or key or insecure):
            raise AddressError(
                f"{url!r} is without TLS, so certificates mean nothing there; mqtts:// and wss:// have it"
            )
        if key and not cert:
            raise AddressError("a private key needs a certificate beside it")
        return cls(
            host=host,
            port=port or PORTS[tls, web],
            tls=tls,
            web_path=(parts.path if parts.path not in {"", "/"} else WEB_PATH) if web else None,
            username=username or None,
            password_file=password_file or None,
            cafile=cafile or None,
            cert=cert or None,
            key=key or None,
            insecure=insecure,
        )

    def __str__(self) -> str:
        scheme = next(name for name, kind in _SCHEMES.items() if kind == (self.tls, self.web_path is not None))
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.web_path or ''}"

    async def connect(self, *, name: str = "motorcade", keep_alive: int = 60) -> Client:
        """Connect with a session of its own, MQTT 5; `name` begins its client id."""
        return await Client.connect(
            self.host,
            self.port,
            client_id=f"{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            keep_alive=keep_alive,
            username=self.username,
            password=self._password(),
            tls=self._context(),
            ws_path=self.web_path,
        )

    def _password(self) -> bytes | None:
        if self.password_file is None:
            found = os.environ.get(PASSWORD_VARIABLE)
            return found.encode() if found and self.username is not None else None
        try:
            return Path(self.password_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise AddressError(
                f"the password file {self.password_file} cannot be read: {error.strerror}; every machine that sends "
                "needs it"
            ) from error

    def _context(self) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        files = {"cafile": self.cafile, "cert": self.cert, "key": self.key}
        return tls_context({name: Path(file) for name, file in files.items() if file}, insecure=self.insecure)


def tls_context(files: dict[str, Path], *, insecure: bool, prefix: str = "") -> ssl.SSLContext:
    """Make a TLS context of a client: `cafile`, `cert` and `key` of `files`; `prefix` begins their names in errors."""
    for name, file in files.items():
        if not file.is_file():
            raise AddressError(f"{prefix}{name}: there is no file {file}")
    try:
        context = ssl.create_default_context(cafile=files.get("cafile"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except (OSError, ssl.SSLError) as error:
        names = " and ".join((", ".join(f"{prefix}{name}" for name in ("cafile", "cert")), f"{prefix}key"))
        raise AddressError(f"TLS: {error} ({names} name PEM files)") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _without_user(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
