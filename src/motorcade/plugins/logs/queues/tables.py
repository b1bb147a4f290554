"""The tables of queues in the store.

    records   queue / {name}            options of a queue that was declared while the node ran (`options.encode`)
    mailbox   queue:{name}              messages of level 0
    mailbox   queue:{name}:{level}      messages of levels 1 to 9, in queues with priorities

An entry of a mailbox:

    body      `record.QueueRecord`
    payload   as published
    key       queues that keep the last value: `k` and the key; else none
    token     QoS 2 and dead letters: an append that is repeated after an error is done once
    mark      how often the message was sent (255: that often or more)
    expiry    the message's own, until it is marked; the retention is counted from the time of storing

Names have no colon, so the mailboxes of two queues never have the same name.
"""

from __future__ import annotations

from typing import Final

COLLECTION: Final = "queue"
PREFIX_OF_MAILBOXES: Final = "queue:"  #: and of the homes of queues
PREFIX: Final = "$queue/"  #: of filters that consumers subscribe to
MAX_LEVELS: Final = 10
MAX_MARK: Final = 255


def mailbox_of(name: str, level: int = 0) -> str:
    """Return the mailbox of a level."""
    return f"{PREFIX_OF_MAILBOXES}{name}:{level}" if level else PREFIX_OF_MAILBOXES + name
