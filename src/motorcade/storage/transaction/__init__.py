"""What the writer does to the tables: reads, changes, and one write batch that holds all of it or nothing.

    state         what the writer keeps between transactions: caches, totals, who is attached
    rows          rows as a transaction sees them
    shares        what several entries have in common: messages and blobs, with the number of those who hold them
    mailboxes     heads and entries: looked at, marked, removed
    appends       entries: added
    transaction   the whole: records, streams, leases and what ends by itself besides

Each of the last five is a class that adds to the one before; `Transaction` is one atomic write, which several small
calls may share.

Rule 1: only the writer's thread comes here. Reading, deciding and writing is one step because nobody else writes.
Rule 2: a transaction sees its own changes. Single rows are found in the overlay first; heads, messages, blobs and
        streams are objects that change at once and are written by `finish`. Entries added by the transaction itself are
        those above the `base` of their head. Whoever looks at entries takes their head from `_used`, which sees to all
        that.
Rule 3: whatever was changed in the caches belongs to a transaction that may still fail. Then `WriterState.forget`
        empties them, which is always right and never frequent.
Rule 4: whoever makes a row with `_row` has claimed its message or blob for as many entries as it said; each entry that
        goes, or never comes, gives one claim back with `_unclaim`.
"""

from motorcade.storage.transaction.appends import MAX_ENDING
from motorcade.storage.transaction.mailboxes import load_head
from motorcade.storage.transaction.state import MAX_HEADS, MAX_SEEN_ROWS, StreamHead, WriterState, feed_end
from motorcade.storage.transaction.transaction import Transaction

__all__ = [
    "MAX_ENDING",
    "MAX_HEADS",
    "MAX_SEEN_ROWS",
    "StreamHead",
    "Transaction",
    "WriterState",
    "feed_end",
    "load_head",
]
