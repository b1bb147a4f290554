"""Dispatcher and workers: messages from a Redis stream to processes that work on them, each written once.

    messages:published ─▶ leader ─ frames, round robin, within each worker's credit ─▶ worker ─▶ messages:processed
          ▲                 │  ▲                                                           │
          └── acknowledged ─┘  └───────────────────── ACK, when it is written ─────────────┘

options    what may be set, and the names of all keys
frames     the bytes between leader and workers; pure
ids        ids of messages, and which part of an entry is the message; pure
election   who leads: a lease, an epoch, and fences that refuse those who led before
intake     where messages come from: a stream, or a channel whose messages are put into a stream first
links      the leader's connections to workers: credit, acknowledgements, who is cut off and for how long
book       what has become of each message; pure
leader     reads, hands out in turn, sees to what is not acknowledged
handlers   what a worker does with a message
worker     takes messages, hands them to a function, writes the results, acknowledges
calls      scripts on the right server, repeated until it is known what became of them
lua/       the scripts; each begins with its keys and arguments
views      what leaders and workers tell about themselves
status     what an operator asks: who leads, who works, what waits, what was given up

docs/dispatch.md is the guide. This package needs the library hiredis (extra `redis`) for everything but `options`
and what is pure, so nothing is imported here.
"""
