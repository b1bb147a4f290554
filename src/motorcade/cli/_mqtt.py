"""Options of `pub` and `sub` for the connection to a broker. Letters as in mosquitto_pub and mosquitto_sub."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import ssl

    from motorcade.client import Client, Will
    from motorcade.mqtt.properties import Properties

Host = Annotated[str, typer.Option("-h", "--host", help="Host of the broker.")]
Port = Annotated[
    int | None,
    typer.Option("-p", "--port", min=1, max=65535, help="[1883; with TLS 8883, --ws 8083, both 8084]"),
]
Username = Annotated[str | None, typer.Option("-u", "--username")]
Password = Annotated[
    str | None,
    typer.Option(
        "-P",
        "--pw",
        "--password",
        envvar="MOTORCADE_PASSWORD",
        help="Better set as an environment variable.",
        show_envvar=True,
    ),
]
ClientId = Annotated[str | None, typer.Option("-i", "--id", help="Client id. \\[generated]")]
Five = Annotated[bool, typer.Option("--v5/--v311", help="Protocol version.")]
Qos = Annotated[int, typer.Option("-q", "--qos", min=0, max=2)]
KeepAlive = Annotated[int, typer.Option("-k", "--keepalive", min=0, max=65535, help="Seconds.")]
WebSocket = Annotated[str | None, typer.Option("--ws", metavar="PATH", help="Over WebSocket, at this path (/mqtt).")]
CaFile = Annotated[Path | None, typer.Option("--cafile", help="Over TLS; authorities to trust (PEM).")]
Cert = Annotated[Path | None, typer.Option("--cert", help="Our certificate (PEM).")]
Key = Annotated[Path | None, typer.Option("--key", help="Our private key (PEM).")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Over TLS without checking the broker's certificate.")]


@dataclass(frozen=True)
class ConnectFlags:
    """Address of a broker and credentials."""

    host: Host = "127.0.0.1"
    port: Port = None
    username: Username = None
    password: Password = None
    client_id: ClientId = None
    keep_alive: KeepAlive = 60
    ws: WebSocket = None
    cafile: CaFile = None
    cert: Cert = None
    key: Key = None
    insecure: Insecure = False

    async def connect(
        self,
        version: int = 5,
        *,
        clean_start: bool = True,
        will: Will | None = None,
        properties: Properties | None = None,
        buffer: int = 1000,
    ) -> Client:
        from motorcade.client import Client
        from motorcade.mqtt.properties import NONE
        from motorcade.publisher.address import PORTS

        tls = self.tls()
        return await Client.connect(
            self.host,
            self.port or PORTS[tls is not None, self.ws is not None],
            client_id=self.client_id
            if self.client_id is not None
            else f"motorcade-{os.getpid()}-{uuid.uuid4().hex[:6]}",
            version=version,
            clean_start=clean_start,
            keep_alive=self.keep_alive,
            username=self.username,
            password=self.password.encode() if self.password is not None else None,
            will=will,
            properties=properties if properties is not None else NONE,
            tls=tls,
            ws_path=self.ws,
            buffer=buffer,
        )

    def tls(self) -> ssl.SSLContext | None:
        if not (self.cafile or self.cert or self.insecure):
            return None
        from motorcade.publisher.address import tls_context

        files = {"cafile": self.cafile, "cert": self.cert, "key": self.key}
        return tls_context(
            {name: file for name, file in files.items() if file is not None}, insecure=self.insecure, prefix="--"
        )


#: Properties that may be given on the command line, and how their text is read.
_PROPERTIES: dict[str, tuple[str, Callable[[str], object]]] = {
    "content-type": ("content_type", str),
    "response-topic": ("response_topic", str),
    "correlation-data": ("correlation_data", str.encode),
    "message-expiry": ("message_expiry", int),
    "payload-format": ("payload_format", int),
    "topic-alias": ("topic_alias", int),
}


def message_properties(named: list[str], user: list[str], *, five: bool) -> Properties:
    """Parse `--property NAME=VALUE` and `--user-property KEY=VALUE`."""
    from motorcade.mqtt.properties import Properties

    if (named or user) and not five:
        raise typer.BadParameter("MQTT 3.1.1 has no properties; leave --v311 out", param_hint="--property")
    values: dict[str, object] = {}
    for text in named:
        name, found, value = text.partition("=")
        if not found or name not in _PROPERTIES:
            raise typer.BadParameter(
                f"{text!r}; write NAME=VALUE with NAME one of {', '.join(_PROPERTIES)}", param_hint="--property"
            )
        attribute, read = _PROPERTIES[name]
        try:
            values[attribute] = read(value)
        except ValueError:
            raise typer.BadParameter(f"{name} takes a number, not {value!r}", param_hint="--property") from None
    pairs = []
    for text in user:
        name, found, value = text.partition("=")
        if not found:
            raise typer.BadParameter(f"{text!r}; write KEY=VALUE", param_hint="--user-property")
        pairs.append((name, value))
    return Properties(user_properties=tuple(pairs), **values)  # type: ignore[arg-type]  # checked by the table above
