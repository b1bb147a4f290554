"""A plugin whose trays stand in for compacted queues: in memory, all that `Compacted` promises and nothing more.

What the control port does with such a service is tested against it, apart from what the plugin in the box does. A
message to `trays/{exclusive|shared}/{name}/{key}` is put into a tray; a consumer is there once it has been named in a
message to `trays/consumer/{form}/{name}/{client}`, whose payload is its progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.compacted import SERVICE, CompactedView, ConsumerView, Form, RewindView
from motorcade.extension.declared import BadOptionsError, Found, UnknownError
from motorcade.extension.plugin import Plugin, hook


@dataclass
class Tray:
    """Messages by key, newest last."""

    values: dict[str, Found] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)
    last: int = 0

    def after(self, position: int) -> list[Found]:
        return [found for found in self.values.values() if found.position > position]


class Trays:
    def __init__(self) -> None:
        self.trays: dict[tuple[Form, str], Tray] = {}

    def tray(self, kind: Form, name: str) -> Tray:
        if (kind, name) not in self.trays:
            raise UnknownError(f"there is no {kind} tray {name!r}")
        return self.trays[kind, name]

    def view(self, kind: Form, name: str, *, full: bool) -> CompactedView:
        tray = self.tray(kind, name)
        found = tray.after(0)
        consuming = tuple(
            ConsumerView(client=client, connected=False, progress=progress, waiting=len(tray.after(progress)))
            for client, progress in sorted(tray.progress.items())
        )
        return CompactedView(
            kind=kind,
            name=name,
            messages=len(found),
            bytes=sum(len(message.payload) for message in found),
            first=found[0].position if found else 0,
            last=tray.last,
            oldest=found[0].time if found and full else None,
            consumers=len(consuming),
            consuming=consuming if full else (),
        )

    async def list(self, kind: Form, after: str = "", limit: int = 100) -> Sequence[CompactedView]:
        names = sorted(name for form, name in self.trays if form is kind and name > after)
        return [self.view(kind, name, full=False) for name in names[:limit]]

    async def show(self, kind: Form, name: str) -> CompactedView:
        return self.view(kind, name, full=True)

    async def rewind(
        self,
        kind: Form,
        name: str,
        consumer: str = "",
        *,
        to: int | None = None,
        since: float | None = None,
        preview: bool = False,
    ) -> RewindView:
        tray = self.tray(kind, name)
        who = consumer or (name if kind is Form.EXCLUSIVE else "")
        if not who:
            raise BadOptionsError("consumer: a shared tray has several")
        if who not in tray.progress:
            raise UnknownError(f"{who!r} is no consumer of tray {name!r}")
        if to is not None and to > tray.last + 1:
            raise BadOptionsError(f"to = {to}: the last number is {tray.last}")
        before = tray.progress[who]
        if to is not None:
            progress = max(0, to - 1)
        else:
            young = [found.position for found in tray.after(0) if since is not None and found.time >= since]
            progress = min([before, *(position - 1 for position in young)])
        found = tray.after(progress)
        if not preview:
            tray.progress[who] = progress
        return RewindView(
            kind=kind,
            name=name,
            consumer=who,
            preview=preview,
            before=before,
            progress=progress,
            messages=len(found),
            bytes=sum(len(message.payload) for message in found),
            first=found[0].position if found else 0,
            last=found[-1].position if found else 0,
            skipped=len([message for message in tray.after(before) if message.position <= progress]),
        )

    async def read(self, kind: Form, name: str, after: int = 0, limit: int = 100) -> Sequence[Found]:
        return self.tray(kind, name).after(after)[:limit]

    async def delete(self, kind: Form, name: str) -> None:
        self.tray(kind, name)
        del self.trays[kind, name]


class TraysPlugin(Plugin):
    """Trays."""

    async def start(self) -> None:
        self.service = Trays()
        self.context.offer(SERVICE, self.service)

    @hook("message.publish", topics=["trays/#"])
    def on_publish(self, client: ClientInfo | None, message: Message) -> Any:
        _, first, *rest = message.topic.split("/")
        if first == "consumer":
            form, name, who = rest
            self.service.trays[Form(form), name].progress[who] = int(message.payload)
            return
        name, key = rest[0], "/".join(rest[1:])
        tray = self.service.trays.setdefault((Form(first), name), Tray())
        tray.last += 1
        tray.values.pop(key, None)
        tray.values[key] = Found(
            position=tray.last,
            topic=f"trays/{name}/{key}",
            payload=bytes(message.payload),
            time=self.context.hub.now(),
            publisher=client.client_id if client is not None else "",
            guid="00ff",
            properties={"key": key},
        )
