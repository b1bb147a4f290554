"""Where queues are in the store.

    records   queue / {name}            options of a queue that was declared while the node ran (`options.encode`)
    mailbox   queue:{name}              messages of level 0
    mailbox   queue:{name}:{level}      messages of levels 1 to 9, in queues with priorities

An entry of a mailbox:

    body      `record.py`; the message but for its payload
    payload   as published
    key       queues that keep the last value: `k` and the key; else none
    token     QoS 2 and dead letters: an append that is repeated after an error is done once
    mark      how often the message was sent (255: that often or more)
    expiry    the message's own, until it is marked; the retention is counted from the time of storing

Names have no colon, so no queue can get at another one's mailbox.
"""

from __future__ import annotations

from typing import Final

COLLECTION: Final = "queue"
PREFIX: Final = "$queue/"  #: of filters that consumers subscribe to
MOST_LEVELS: Final = 10
MOST_MARK: Final = 255


def owner_of(name: str, level: int = 0) -> str:
    """The mailbox of a level."""
    return f"queue:{name}:{level}" if level else f"queue:{name}"


def owners_of(name: str) -> list[str]:
    """All mailboxes that a queue of this name can have, whatever its options are or were."""
    return [owner_of(name, level) for level in range(MOST_LEVELS)]


def mark_of(attempts: int) -> int:
    """The number noted with an entry."""
    return min(attempts, MOST_MARK)
