"""Homes: what a name of the store belongs to.

    owner of a mailbox                       record: collection, key                          home
    session:X  fanout:X  fanout-done:X       session X   ecq-progress X                       client:X
    ecq:X                                    subscription, awaiting  {length of X}:X…
                                             stream-progress, scq-progress  NAME/X
                                             fanout-untold  POSITION/X
    queue:N  queue:N:LEVEL                   queue N                                          queue:N
    the mailbox it names                     compacted MAILBOX                                that of the mailbox
                                             member, cluster: all keys                        members
    any other                                                                                 its own name
                                             any other                                        its key

A vehicle's client id is its VIN, so X is both. Streams and leases are their own home: their names.

Everything of one home lies in one cell of Redis: it is written together or not at all, and one fence guards it
(`ports.Fence`). Names are part of the stored format, and so is this table: a changed line moves stored data.
"""

from __future__ import annotations

from typing import Final

CLIENT: Final = "client:"

_OWNERS: Final = ("session:", "fanout:", "fanout-done:", "ecq:")  #: followed by a client id
_QUEUE: Final = "queue:"

_WHOLE: Final = frozenset({"session", "ecq-progress"})  #: collections whose key is a client id
PAIRS: Final = frozenset({"subscription", "awaiting"})  #: whose key begins with a client id and its length
#: Collections whose key ends with a client id, after a slash.
_LAST: Final = frozenset({"stream-progress", "scq-progress", "fanout-untold"})

#: What the members of a cluster know of each other: read together, and each write may expect what another has put.
MEMBERS: Final = "members"
_OF_MEMBERS: Final = frozenset({"member", "cluster"})

INDEXED: Final = PAIRS | _OF_MEMBERS  #: collections of which `is_indexed` may be true


def home_of_owner(owner: str) -> str:
    """Return the home of a mailbox."""
    for prefix in _OWNERS:
        if owner.startswith(prefix):
            return CLIENT + owner[len(prefix) :]
    if owner.startswith(_QUEUE):
        return _QUEUE + owner[len(_QUEUE) :].partition(":")[0]
    return owner


def home_of_record(collection: str, key: str) -> str:
    """Return the home of a record."""
    if collection in _WHOLE:
        return CLIENT + key
    if collection in PAIRS:
        length, found, both = key.partition(":")
        if found and length.isdecimal() and int(length) <= len(both):
            return CLIENT + both[: int(length)]
    elif collection in _LAST:
        _, found, client_id = key.partition("/")
        if found:
            return CLIENT + client_id
    elif collection == "queue":
        return _QUEUE + key
    elif collection == "compacted":
        return home_of_owner(key)
    elif collection in _OF_MEMBERS:
        return MEMBERS
    return key


def is_indexed(collection: str, key: str, home: str) -> bool:
    """Return True if an engine that cannot look for keys needs an index to find a record by its home."""
    return collection in INDEXED and (home != key or collection in _OF_MEMBERS)


def records_of(home: str, collection: str) -> tuple[str, bool]:
    """Return how the keys of a home's records in a collection begin, and whether there is but one, of that very key.

    `ValueError` for a collection in which the records of a home do not lie together.
    """
    if collection in _LAST or collection in ("queue", "compacted"):
        raise ValueError(f"the records of a home do not lie together in the collection {collection!r}")
    if collection in _OF_MEMBERS:
        if home != MEMBERS:
            raise ValueError(f"the home of all records of the collection {collection!r} is {MEMBERS!r}, not {home!r}")
        return "", False
    client_id = home[len(CLIENT) :] if home.startswith(CLIENT) else None
    if collection in PAIRS and client_id is not None:
        return f"{len(client_id)}:{client_id}", False
    if collection in _WHOLE and client_id is not None:
        return client_id, True
    return home, True
