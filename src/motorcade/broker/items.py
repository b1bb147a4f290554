"""The items of the relay, as bytes: messages, hints and interest, from member to member.

| kind | body | meaning |
|---|---|---|
| `interest` | `InterestItem` | filters and shared groups that are wanted live there now, or no longer |
| `live` | publisher, then PUBLISH packets as they came in | for all live receivers; QoS 0 and 1, without properties |
| `message` | `RelayRecord` | for all live receivers |
| `group` | `RelayRecord` | for one live member of a shared group |
| `returned` | `RelayRecord` | the same, back again: the group has no member there any more |
| `hint` | `HintItem` | it is in the mailboxes of these clients, which are attached there |
| `direct` | `DirectItem` | one message of QoS 0 for one client, which is attached there |
| `look` | nothing | hints could not be sent: look into the mailboxes of all clients that are attached there |
| `attached`, `gone` | `ClientsItem` | durable sessions that are attached there now, or no longer |

Bodies are MessagePack arrays, but for `live`. A field is only ever added at the end, with a default. The name of a kind
is never used again for something else.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.delivery.record import Form, Record

INTEREST: Final = "interest"
LIVE: Final = "live"
MESSAGE: Final = "message"
GROUP: Final = "group"
RETURNED: Final = "returned"
HINT: Final = "hint"
DIRECT: Final = "direct"
LOOK: Final = "look"
ATTACHED: Final = "attached"
GONE: Final = "gone"


class InterestItem(msgspec.Struct, array_like=True, gc=False):
    """Filters whose interest has changed; those that are not named are as they were."""

    filters: list[tuple[str, int]]  #: flags, see `remote_router`; 0: nothing any more
    #: `$share/{group}/{filter}`, members that are there: those that take everything live, and durable ones.
    groups: list[tuple[str, int, int]]


class HintItem(msgspec.Struct, array_like=True, gc=False):
    """One message in several mailboxes."""

    entries: list[tuple[str, int, bool]]  #: client, position, and whether the mailbox is too large now
    body: bytes
    payload: bytes


class DirectItem(msgspec.Struct, array_like=True, gc=False):
    """A message that the store has not kept, since its client is connected."""

    client_id: str
    retained: bool  #: the client gets it with the retain flag
    identifiers: tuple[int, ...]  #: of its subscriptions
    record: bytes  #: `RelayRecord`


class ClientsItem(msgspec.Struct, array_like=True, gc=False):
    """Some clients."""

    clients: list[str]


class RelayRecord(Record, frozen=True, gc=False):
    """A message on its way to another member, with its payload."""

    group: str = ""  #: `$share/{group}/{filter}`
    tries: int = 0  #: members that it has come back from


RELAY: Final = Form(RelayRecord, inline=1 << 62)

encode = msgspec.msgpack.Encoder().encode
decode_interest = msgspec.msgpack.Decoder(InterestItem).decode
decode_hint = msgspec.msgpack.Decoder(HintItem).decode
decode_direct = msgspec.msgpack.Decoder(DirectItem).decode
decode_clients = msgspec.msgpack.Decoder(ClientsItem).decode

_LIVE: Final = struct.Struct("!BHH")  #: flags, bytes of the client id, bytes of the user name
_V5: Final = 1  #: a flag: packets of MQTT 5
_NAMED: Final = 2  #: a flag: there is a user name


def live_head(client: ClientInfo, version: int) -> bytes:
    """Return what stands before the packets of a publisher."""
    client_id = client.client_id.encode()
    username = client.username.encode() if client.username is not None else b""
    flags = (_V5 if version == 5 else 0) | (_NAMED if client.username is not None else 0)
    return _LIVE.pack(flags, len(client_id), len(username)) + client_id + username


def head_size(body: bytes) -> int:
    """Return how many bytes of an item stand before its packets."""
    _, client_id, username = _LIVE.unpack_from(body)
    return int(_LIVE.size + client_id + username)


def publisher_of(head: bytes) -> ClientInfo:
    """Return the publisher of an item, with the version of its packets."""
    flags, size, _ = _LIVE.unpack_from(head)
    name = _LIVE.size + size
    username = head[name:].decode() if flags & _NAMED else None
    return ClientInfo(head[_LIVE.size : name].decode(), username, version=5 if flags & _V5 else 4)
