"""Things with a name that operators declare: queues, streams, capture rules.

They stand in the configuration, or are declared while the node runs. A plugin that has such things offers one
`Declared` as a service under the plural of their name (`queues`, `streams`, `captures`); HTTP and the command line
serve whatever they find there, in one way for all. In the configuration they are tables by name: a field
`dict[Name, Options]` of the plugin's own record.

Rule 1: what the configuration declares is changed and removed there; asking for it elsewhere is refused.
Rule 2: what was declared while the node ran is stored, and is there again after a restart.
Rule 3: every answer is a copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.words import nearest
from motorcade.extension.plugin import literal_choices
from motorcade.log import HIDDEN, is_secret

MAX_NAME: Final = 64  #: characters
_NAME: Final = re.compile(r"[0-9A-Za-z][-._0-9A-Za-z]*")

#: For records: the key of a table of declared things. `check_name` says the same in words.
Name = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME.pattern}\Z", max_length=MAX_NAME)]

S = TypeVar("S", bound=msgspec.Struct)

CONFIGURED: Final = "configuration"  #: origin of what stands in the configuration
CREATED: Final = "command"  #: origin of what was made while the node ran


class UnknownError(MotorcadeError):
    """There is nothing of that name."""


class ConflictError(MotorcadeError):
    """It is there already, belongs to the configuration, or something in use stands in the way."""


class BadNameError(MotorcadeError):
    """It cannot be called so."""


class BadOptionsError(MotorcadeError):
    """An option is unknown, missing, or has a value that it cannot have."""


def check_name(noun: str, name: str) -> None:
    """Raise `BadNameError` unless a name can be part of a topic filter, a key and a file name."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadNameError(
            f"{noun} name {name[:MAX_NAME]!r}: letters, digits, '-', '.' and '_', not a sign first, "
            f"at most {MAX_NAME} characters"
        )


def read_options(noun: str, record: type[S], given: Mapping[str, Any]) -> S:
    """Convert options from a request; `BadOptionsError` names the first one that is wrong."""
    kinds = {info.encode_name: info.type for info in msgspec.structs.fields(record)}
    for key, value in given.items():
        if key not in kinds:
            raise BadOptionsError(f"{noun}: unknown option {key!r}{nearest(key, kinds)}")
        try:
            msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            choices = literal_choices(kinds[key])
            problem = f"must be one of {choices}" if choices else plain(error)
            raise BadOptionsError(f"{noun}: {key} = {HIDDEN if is_secret(key) else repr(value)}: {problem}") from error
    try:
        return msgspec.convert(dict(given), record)
    except msgspec.ValidationError as error:  # one is missing, or they do not go together
        raise BadOptionsError(f"{noun}: {plain(error)}") from error


def plain(error: Exception) -> str:
    """Return the text of a failed check, without its marks for programmers."""
    said = re.sub(r"^Object missing required field `(\w+)`", r"\1 must be given", str(error))
    return said.replace("`", "").removesuffix(" - at $")


class FoundMessage(msgspec.Struct, frozen=True, kw_only=True):
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

    def __len__(self) -> int:
        """Return how many are declared. Known at once: `/metrics` asks."""

    def options(self, name: str) -> msgspec.Struct:
        """Return the options of one as they are, with secrets: to change some, never to show them; `UnknownError`."""

    async def list(self) -> Sequence[msgspec.Struct]:
        """Return the views of all, by name."""

    async def show(self, name: str) -> msgspec.Struct:
        """Return the view of one, with all there is to know; `UnknownError`."""

    async def create(self, name: str, options: Any) -> msgspec.Struct:
        """Declare and store it; `ConflictError` if it is there, `MotorcadeError` says what is wrong."""

    async def change(self, name: str, options: Any) -> msgspec.Struct:
        """Give it other options; those that cannot change while it has contents are refused by `ConflictError`."""

    async def delete(self, name: str) -> None:
        """Remove it with its contents."""

    async def read(self, name: str, after: int, limit: int) -> Sequence[FoundMessage]:
        """Return up to `limit` messages after a position, oldest first; `ConflictError` if they have no contents."""
