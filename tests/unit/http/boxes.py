"""A plugin whose boxes stand in for queues: in memory, all that `Declared` promises and nothing more.

What the control port does with such a service is tested against it, apart from what the plugins in the box do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.topic import matches
from motorcade.extension.declared import (
    CONFIGURED,
    CREATED,
    BadOptionsError,
    ConflictError,
    Found,
    Name,
    UnknownError,
    check_name,
)
from motorcade.extension.plugin import Plugin, hook


class BoxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topics: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]  #: what falls into it
    kind: Literal["wooden", "tin"] = "wooden"  #: of what it is
    max_messages: Annotated[int, msgspec.Meta(ge=0)] = 10_000  #: then it is shut
    token: int = 0  #: sounds secret

    def __post_init__(self) -> None:
        if self.kind == "tin" and self.max_messages > 100_000:
            raise ValueError("max_messages: a tin box is small")


class BoxesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    box: dict[Name, BoxOptions] = {}  #: boxes by name

    def __post_init__(self) -> None:
        for name, options in self.box.items():
            if name in options.topics:
                raise BadOptionsError(f"box {name!r}: topics: a box cannot be in itself")
            if options.max_messages == 13 and "lucky" not in self.box:
                raise BadOptionsError(f"box {name!r}: there must be a box 'lucky'")


class BoxView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    origin: str
    options: BoxOptions
    messages: int


class Boxes:
    noun = "queue"
    Options = BoxOptions

    def __init__(self, configured: dict[str, BoxOptions]) -> None:
        self.boxes = dict(configured)
        self.origins = dict.fromkeys(configured, CONFIGURED)
        self.contents: dict[str, list[Found]] = {name: [] for name in configured}

    def __len__(self) -> int:
        return len(self.boxes)

    def options(self, name: str) -> BoxOptions:
        return self.view(name).options

    def view(self, name: str) -> BoxView:
        if name not in self.boxes:
            raise UnknownError(f"there is no box {name!r}")
        return BoxView(
            name=name, origin=self.origins[name], options=self.boxes[name], messages=len(self.contents[name])
        )

    async def list(self) -> Sequence[BoxView]:
        return [self.view(name) for name in sorted(self.boxes)]

    async def show(self, name: str) -> BoxView:
        return self.view(name)

    async def create(self, name: str, options: BoxOptions) -> BoxView:
        check_name("box", name)
        if name in self.boxes:
            raise ConflictError(f"there is a box {name!r} already")
        if "forbidden" in options.topics:
            raise MotorcadeError("topics: not this one")
        self.boxes[name], self.origins[name], self.contents[name] = options, CREATED, []
        return self.view(name)

    async def change(self, name: str, options: BoxOptions) -> BoxView:
        self.free(name)
        self.boxes[name] = options
        return self.view(name)

    async def delete(self, name: str) -> None:
        self.free(name)
        del self.boxes[name], self.origins[name], self.contents[name]

    def free(self, name: str) -> None:
        if self.view(name).origin == CONFIGURED:
            raise ConflictError(f"box {name!r} stands in the configuration; change it there")

    async def read(self, name: str, after: int, limit: int) -> Sequence[Found]:
        self.view(name)
        return [found for found in self.contents[name] if found.position > after][:limit]


class BoxesPlugin(Plugin):
    """Boxes."""

    Config: ClassVar[type[msgspec.Struct]] = BoxesConfig

    async def start(self) -> None:
        self.service = Boxes(self.config.box)
        self.context.offer("queues", self.service)

    @hook("message.publish", topics=["boxes/#"])
    def on_publish(self, client: ClientInfo | None, message: Message) -> Any:
        for name, options in self.service.boxes.items():
            if any(matches(topic, message.topic) for topic in options.topics):
                contents = self.service.contents[name]
                contents.append(
                    Found(
                        position=len(contents) + 1,
                        topic=message.topic,
                        payload=bytes(message.payload),
                        time=self.context.hub.now(),
                        publisher=client.client_id if client is not None else "",
                        guid="00ff",
                        properties={"attempts": "0"},
                    )
                )
