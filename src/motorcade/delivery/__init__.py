"""One delivery machine under every durable feature.

Append to a log, answer the publisher when it is stored, give consumers what lies after their cursor, and remember what
they have acknowledged. Features differ in this:

    feature      log                key          consumers                 after the acknowledgement
    session      mailbox            -            one                       entry removed
    $queue       mailbox per level  last value   competing                 entry removed
    $stream      stream             -            many, a cursor each       cursor stored
    ECQ, SCQ     mailbox            compacted    one, many; cursor each    cursor stored
    fan-out      mailbox per VIN    request      one, one in flight        removed with its receipt

    record       the stored form of a message
    group        what is appended together, as one write
    cursor       what one consumer was given, and has acknowledged
    progress     how far each consumer is, committed by client
    writebehind  records that change often and are written later
    reader       a source with a cursor, on any log

`store.write(batch)` keeps the order and finds out what became of a write. So no feature handles unknown outcomes.
"""
