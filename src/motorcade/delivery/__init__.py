"""One delivery machine under every durable feature.

Append to a log, answer the publisher when it is stored, give consumers what lies after their cursor, and remember what
they have acknowledged. Features differ in this:

    feature      log                key          consumers                 after the acknowledgement
    session      mailbox            -            one                       entry removed
    $queue       mailbox per level  last value   competing                 entry removed
    $stream      stream             -            many, a cursor each       cursor stored
    ECQ, SCQ     mailbox            compacted    one, many; cursor each    cursor stored
    fan-out      mailbox per VIN    request      one, one in flight        removed with its receipt

`store.write(batch)` gathers what is written in one turn of the event loop, keeps the order and finds out what became
of it. So nothing above the store gathers writes, but for what may be written later (`writebehind`).
"""
