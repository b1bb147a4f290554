"""Dispatcher and workers: messages from a Redis stream to processes that work on them, each written once.

    messages:published ─▶ leader ─ frames, round robin, within each worker's credit ─▶ worker ─▶ messages:processed
          ▲                 │  ▲                                                           │
          └── acknowledged ─┘  └───────────────────── ACK, when it is written ─────────────┘

options    what may be set, and the names of all keys
frames     the bytes between leader and workers; pure
ids        ids of messages, and which part of an entry is the message; pure
election   leader election: a lease, an epoch, and fences that refuse former leaders
intake     where messages come from: a stream, or a channel whose messages are put into a stream first
links      the leader's connections to workers: credit, acknowledgements, disconnects and back-off
pending    the table of messages that were read and are not done; pure
leader     reads, dispatches round robin, retries what is not acknowledged, keeps the dead letters
handlers   loads and runs the function that a worker applies to each message
worker     receives messages, runs the handler, writes the results, acknowledges
calls      runs scripts on the right server and retries until the outcome is known
lua/       the scripts; each begins with its keys and arguments
views      what leaders and workers report about themselves
status     operator queries: leader, workers, lag, dead letters

docs/dispatch.md is the guide. This package needs the library hiredis (extra `redis`) for everything but `options`
and what is pure, so nothing is imported here.
"""
