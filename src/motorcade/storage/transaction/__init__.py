"""The writer's work on the tables: reads, changes, and one write batch that holds all of it or nothing.

    state         what the writer keeps between transactions: caches, totals, who is attached
    batch         the write batch of a transaction, with an overlay of the rows that it changes
    payloads      messages and blobs that several entries share, with the number of their holders
    mailboxes     heads and entries: append, acknowledge, mark, forget
    transaction   one atomic write, which several small calls may share; records, streams, leases, sweep

Rule 1: only the writer's thread comes here. Reading, deciding and writing is one step because nothing else writes.
Rule 2: a transaction sees its own changes. Single rows are found in the overlay first; heads, messages, blobs and
        streams are objects that change at once and are written by `finish`. Entries added by the transaction itself are
        those above the `base` of their head. Take a head from `MailboxChanges._used` before looking at its entries: it
        sees to all that.
Rule 3: what was changed in the caches belongs to a transaction that may still fail. Then `WriterState.forget` empties
        them, which is always right and never frequent.
Rule 4: `SharedPayloads.row` claims its message or blob for as many entries as it is told; each entry that goes, or
        never comes, gives one claim back with `unclaim`.
Rule 5: `append` chooses between `_append_plain` (a small message for one owner with room), `_append_all` (one message
        for many owners: a campaign, sleeping sessions; the row is made once) and `_append_each` (what has a token, or
        can never fit). Each of them writes the same rows.
"""

from motorcade.storage.transaction.mailboxes import MAX_ENDING, load_head
from motorcade.storage.transaction.state import MAX_HEADS, MAX_SEEN_ROWS, StreamHead, WriterState, feed_end
from motorcade.storage.transaction.transaction import Transaction, records_of_home

__all__ = [
    "MAX_ENDING",
    "MAX_HEADS",
    "MAX_SEEN_ROWS",
    "StreamHead",
    "Transaction",
    "WriterState",
    "feed_end",
    "load_head",
    "records_of_home",
]
