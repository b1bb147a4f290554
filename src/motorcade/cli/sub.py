"""`motorcade sub`: subscribe and print what comes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motorcade.cli import _mqtt, _options, _output
from motorcade.core.words import printable

if TYPE_CHECKING:
    from motorcade.client import Client
    from motorcade.core.subscription import Subscription
    from motorcade.mqtt.packets import Publish
    from motorcade.mqtt.properties import Properties

_FORMAT_HELP = (
    "How to print a message: %t topic, %p payload, %x payload in hex, %l its length, %q QoS, %r retained, "
    "%m packet id, %I time, %U seconds, %C content type, %R response topic, %D correlation data, "
    "%E expiry, %P user properties, %j and %J JSON, %% percent; \\n and \\t."
)


def sub(
    topics: Annotated[list[str], typer.Option("-t", "--topic", help="Filter; may be given several times.")],
    qos: _mqtt.Qos = 0,
    count: Annotated[
        int | None, typer.Option("-C", "--count", min=1, help="Exit after this number of messages.")
    ] = None,
    wait: Annotated[
        float | None, typer.Option("-W", "--wait", min=0, help="Exit after this number of seconds.")
    ] = None,
    format_: Annotated[str | None, typer.Option("-F", "--format", help=_FORMAT_HELP)] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Topic and payload, as -F '%t %p'.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per message, as -F %j.")] = False,
    no_retained: Annotated[bool, typer.Option("-R", "--no-retained", help="Leave out retained messages.")] = False,
    retained_only: Annotated[bool, typer.Option("--retained-only", help="Only retained messages.")] = False,
    no_local: Annotated[
        bool, typer.Option("--no-local", help="Leave out what this client id publishes (MQTT 5).")
    ] = False,
    user_properties: Annotated[
        list[str] | None,
        typer.Option(
            "--user-property", metavar="KEY=VALUE", help="User property of the SUBSCRIBE, e.g. stream-offset=earliest."
        ),
    ] = None,
    keep_session: Annotated[
        bool, typer.Option("-c", "--keep-session", help="Resume the session of this --id, and keep it afterwards.")
    ] = False,
    session_expiry: Annotated[
        int, typer.Option("-x", "--session-expiry", min=0, help="Seconds to keep it (MQTT 5).")
    ] = 3600,
    five: _mqtt.Five = True,
    *,
    broker: _mqtt.ConnectFlags,
) -> None:
    """Print messages until stopped, until -C messages came, or for -W seconds.

    Exits with 1 if the broker refuses a filter or goes away, and if -W passes before -C messages came.
    """
    if keep_session and broker.client_id is None:
        raise typer.BadParameter("a session is kept under a client id; give --id", param_hint="-c")
    from motorcade.core.subscription import Subscription
    from motorcade.core.topic import check_filter, split_share

    for topic in topics:
        with _options.wrong_usage("-t", f"{topic!r}: "):
            check_filter(split_share(topic)[1])
    render = _renderer("%j" if as_json else format_ or ("%t %p" if verbose else "%p"))

    def wanted(message: Publish) -> bool:
        return not (message.retain if no_retained else retained_only and not message.retain)

    options = [Subscription(topic, qos, no_local=no_local and five) for topic in topics]
    expiry = session_expiry if keep_session and five else None
    properties = _mqtt.message_properties([], user_properties or [], five=five)
    printed = asyncio.run(
        _run(broker, 5 if five else 4, keep_session, expiry, options, properties, count, wait, wanted, render)
    )
    if count is not None and printed < count:
        print(f"error: {printed} of {count} messages came", file=sys.stderr)
        raise typer.Exit(1)


async def _run(
    broker: _mqtt.ConnectFlags,
    version: int,
    keep_session: bool,
    expiry: int | None,
    options: list[Subscription],
    properties: Properties,
    count: int | None,
    wait: float | None,
    wanted: Callable[[Publish], bool],
    render: Callable[[Publish], bytes],
) -> int:
    from motorcade.mqtt.properties import Properties

    client = await broker.connect(version, clean_start=not keep_session, properties=Properties(session_expiry=expiry))
    printed = 0

    async def listen() -> None:
        nonlocal printed
        await _subscribe(client, options, properties)
        async for message in client:
            if not wanted(message):
                continue
            _output.write_bytes(render(message))
            sys.stdout.buffer.flush()
            printed += 1
            if printed == count:
                return

    listening = asyncio.create_task(listen(), name="listen")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, listening.cancel)
    try:
        await asyncio.wait([listening], timeout=wait)
        if listening.done() and not listening.cancelled():
            listening.result()
    finally:
        listening.cancel()
        await client.disconnect()
    return printed


async def _subscribe(client: Client, options: list[Subscription], properties: Properties) -> None:
    from motorcade.client import RefusedError

    answer = await client.ask_for(*options, properties=properties)
    detail = answer.properties.reason_string
    for option, reason in zip(options, answer.reasons, strict=True):
        if reason >= 0x80:
            raise RefusedError(f"the subscription to {option.filter!r}", reason, detail)
    if detail:
        print(f"note: {printable(detail)}", file=sys.stderr)


# --- printing ---------------------------------------------------------------------------------------------------------

_ESCAPES = {"\\n": b"\n", "\\t": b"\t", "\\r": b"\r", "\\0": b"\0", "\\\\": b"\\"}

_FIELDS: dict[str, Callable[[Publish], object]] = {
    "t": lambda m: m.topic,
    "p": lambda m: m.payload,
    "x": lambda m: m.payload.hex(),
    "l": lambda m: len(m.payload),
    "q": lambda m: m.qos,
    "r": lambda m: int(m.retain),
    "m": lambda m: m.packet_id,
    "I": lambda m: datetime.now(UTC).isoformat(timespec="milliseconds"),  # noqa: ARG005 - one shape for the table
    "U": lambda m: f"{datetime.now(UTC).timestamp():.6f}",  # noqa: ARG005
    "C": lambda m: m.properties.content_type or "",
    "R": lambda m: m.properties.response_topic or "",
    "D": lambda m: m.properties.correlation_data or b"",
    "E": lambda m: m.properties.message_expiry if m.properties.message_expiry is not None else "",
    "P": lambda m: " ".join(f"{key}:{value}" for key, value in m.properties.user_properties),
    "j": lambda m: json.dumps(as_record(m, parse=False), ensure_ascii=False),
    "J": lambda m: json.dumps(as_record(m, parse=True), ensure_ascii=False),
    "%": lambda m: "%",  # noqa: ARG005
}


def _renderer(format_: str) -> Callable[[Publish], bytes]:
    """Return a function that formats a message; the payload is written as the bytes it is."""
    parts: list[bytes | Callable[[Publish], object]] = []
    for token in re.findall(r"%.|\\.|[^%\\]+|[%\\]$", format_, re.DOTALL):
        if token[0] == "%":
            field = _FIELDS.get(token[1:])
            if field is None:
                raise typer.BadParameter(
                    f"{token!r} is no field; use one of {' '.join('%' + name for name in _FIELDS)}", param_hint="-F"
                )
            parts.append(field)
        else:
            parts.append(_ESCAPES.get(token, token.encode()))

    def render(message: Publish) -> bytes:
        out = b""
        for part in parts:
            value = part if isinstance(part, bytes) else part(message)
            out += value if isinstance(value, bytes) else str(value).encode()
        return out + b"\n"

    return render


def as_record(message: Publish, *, parse: bool) -> dict[str, Any]:
    """Return a message as `--json` shows it. Bytes that are not UTF-8 are given in hex, under `payload_hex`."""
    told = message.properties
    record: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "topic": message.topic,
        "qos": message.qos,
        "retain": message.retain,
        "length": len(message.payload),
    }
    try:
        text = message.payload.decode()
        record["payload"] = _parsed(text) if parse else text
    except UnicodeDecodeError:
        record["payload_hex"] = message.payload.hex()
    for name in ("payload_format", "message_expiry", "content_type", "response_topic"):
        if (value := getattr(told, name)) is not None:
            record[name] = value
    if told.correlation_data is not None:
        record["correlation_data_hex"] = told.correlation_data.hex()
    if told.user_properties:
        record["user_properties"] = [list(pair) for pair in told.user_properties]
    if told.subscription_ids:
        record["subscription_ids"] = list(told.subscription_ids)
    return record


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
