"""Compacted queues: the last value of each key, in order, for one consumer (`$ECQ`) or for many (`$SCQ`).

Such a queue is not declared: its first message creates it. The store does the compaction
(`storage/transaction/mailboxes.py`). From the outside in:

    plugin      where all this meets the node
    topics      what producers publish to, consumers subscribe to, and what is refused
    options     `[plugins.ecq]`
    service     what operators see and do (`extension.compacted`)
    queue       one queue in memory: its end, its consumers; what is appended to all of them
    source      the messages of one consumer, on their way to its window (`delivery.reader`)
    members     what the nodes of a cluster tell each other of queues
    collector   what is too old goes, again and again
    record      a message as the store keeps it
    tables      where everything is in the store
"""

from motorcade.plugins.logs.compacted.plugin import EcqPlugin

__all__ = ["EcqPlugin"]
