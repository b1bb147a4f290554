"""Things with a name that operators declare, such as queues, streams and capture rules: in the configuration or while
the node runs.

A plugin that has such things offers one `Declared` as a service under the plural of their name (`queues`, `streams`,
`captures`); HTTP and the command line serve whatever they find there, in one way for all.

Rule 1: what the configuration declares is changed and removed there; asking for it elsewhere is refused.
Rule 2: what was declared while the node ran is stored, and is there again after a restart.
Rule 3: every answer is a copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from motorcade.core.errors import MotorcadeError

MAX_NAME: Final = 64  #: characters
_NAME: Final = re.compile(r"[0-9A-Za-z][-._0-9A-Za-z]*")

CONFIGURED: Final = "configuration"  #: origin of what stands in the configuration
CREATED: Final = "command"  #: origin of what was made while the node ran


class UnknownError(MotorcadeError):
    """There is nothing of that name."""


class ConflictError(MotorcadeError):
    """It is there already, belongs to the configuration, or something in use stands in the way."""


class BadNameError(MotorcadeError):
    """It cannot be called so."""


def check_name(noun: str, name: str) -> None:
    """`BadNameError` unless a name can be part of a topic filter, a key and a file name."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadNameError(
            f"{noun} name {name[:MAX_NAME]!r}: letters, digits, '-', '.' and '_', not a sign first, "
            f"at most {MAX_NAME} characters"
        )


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A message that an operator looks at. Looking changes nothing."""

    position: int  #: offset or position: what comes after it is asked for with it
    topic: str
    payload: bytes
    time: float
    publisher: str = ""
    guid: str = ""  #: in hexadecimal digits
    properties: dict[str, str] = {}  #: what else there is to say: key, attempts, history, …


class Declared(Protocol):
    """All of one noun. Views are records of the plugin's own, with at least `name` and `origin`."""

    noun: str  #: `queue`, `stream`, `capture`
    Options: type[msgspec.Struct]  #: what can be set; unknown keys are errors

    async def list(self) -> Sequence[msgspec.Struct]:
        """Views of all, by name."""

    async def show(self, name: str) -> msgspec.Struct:
        """The view of one, with all there is to know; `UnknownError`."""

    async def create(self, name: str, options: Any) -> msgspec.Struct:
        """Declare and store it; `ConflictError` if it is there, `MotorcadeError` says what is wrong."""

    async def change(self, name: str, options: Any) -> msgspec.Struct:
        """Give it other options; those that cannot change while it has contents are refused by `ConflictError`."""

    async def delete(self, name: str) -> None:
        """Remove it with its contents."""

    async def read(self, name: str, after: int, limit: int) -> Sequence[Found]:
        """Up to `limit` messages after a position, oldest first; those that have no contents answer `ConflictError`."""
