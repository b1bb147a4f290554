"""`motorcade pub`: publish messages, one or many."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motorcade.cli import _files, _mqtt, _options

if TYPE_CHECKING:
    from motorcade.client import Will
    from motorcade.core.reasons import ReasonCode
    from motorcade.mqtt.properties import Properties


def pub(
    topic: Annotated[str, typer.Option("-t", "--topic", help="Topic to publish to.")],
    message: Annotated[str | None, typer.Option("-m", "--message", help="The payload.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Send the contents of a file.")] = None,
    lines: Annotated[bool, typer.Option("-l", "--stdin-line", help="Send each line of standard input.")] = False,
    whole: Annotated[
        bool, typer.Option("-s", "--stdin-file", help="Send all of standard input as one message.")
    ] = False,
    null: Annotated[bool, typer.Option("-n", "--null-message", help="Send an empty message.")] = False,
    qos: _mqtt.Qos = 0,
    retain: Annotated[bool, typer.Option("-r", "--retain", help="Keep as the topic's last value.")] = False,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of times to send it.")] = 1,
    rate: Annotated[float, typer.Option("--rate", min=0, help="Messages per second; 0: no limit.")] = 0,
    properties: Annotated[
        list[str] | None, typer.Option("--property", metavar="NAME=VALUE", help="E.g. content-type=application/json.")
    ] = None,
    user_properties: Annotated[list[str] | None, typer.Option("--user-property", metavar="KEY=VALUE")] = None,
    will_topic: Annotated[str | None, typer.Option(help="Topic of the will.")] = None,
    will_payload: Annotated[str, typer.Option(help="Payload of the will.")] = "",
    will_qos: Annotated[int, typer.Option(min=0, max=2)] = 0,
    will_retain: Annotated[bool, typer.Option("--will-retain")] = False,
    five: _mqtt.Five = True,
    *,
    broker: _mqtt.ConnectFlags,
) -> None:
    """Publish. QoS 1 and 2: exits with 0 only after the broker has acknowledged everything."""
    if sum((message is not None, file is not None, lines, whole, null)) != 1:
        raise typer.BadParameter("give exactly one of -m, -f, -l, -s and -n")
    from motorcade.client import Will
    from motorcade.core.topic import check_topic

    with _options.wrong_usage("-t", f"{topic!r}: "):
        check_topic(topic)
    payload = b"" if lines or null else _payload(message, file)
    will = Will(will_topic, will_payload.encode(), will_qos, will_retain) if will_topic is not None else None
    told = _mqtt.message_properties(properties or [], user_properties or [], five=five)

    async def payloads() -> AsyncIterator[bytes]:
        if not lines:
            for _ in range(repeat):
                yield payload
            return
        loop = asyncio.get_running_loop()
        # In a thread: a slow pipe must not keep the client from its keep-alive.
        while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            for _ in range(repeat):
                yield line.rstrip(b"\r\n")

    asyncio.run(_publish(broker, 5 if five else 4, will, payloads(), topic, qos, retain, rate, told))


def _payload(message: str | None, file: Path | None) -> bytes:
    if message is not None:
        return message.encode()
    return _files.read("-f", "-" if file is None else file)


async def _publish(
    broker: _mqtt.ConnectFlags,
    version: int,
    will: Will | None,
    payloads: AsyncIterator[bytes],
    topic: str,
    qos: int,
    retain: bool,
    rate: float,
    properties: Properties,
) -> None:
    client = await broker.connect(version, will=will)
    loop = asyncio.get_running_loop()
    start = loop.time()
    count = 0
    failures: list[BaseException] = []

    def acknowledged(done: asyncio.Future[ReasonCode]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            failures.append(error)

    pending: set[asyncio.Future[ReasonCode]] = set()
    try:
        async for payload in payloads:
            if rate and (pause := start + count / rate - loop.time()) > 0:
                await asyncio.sleep(pause)
            sent = await client.send(topic, payload, qos, retain=retain, properties=properties)
            count += 1
            if sent is not None:
                pending.add(sent)
                sent.add_done_callback(pending.discard)
                sent.add_done_callback(acknowledged)
            if failures:
                break
        if pending:
            await asyncio.wait(pending)
        if failures:
            raise failures[0]
    finally:
        await client.disconnect()
