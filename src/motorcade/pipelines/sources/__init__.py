"""The data source `motorcade` (Python Data Source API of Spark 4.2 and newer).

    datasource.py     the entry points that Spark calls
    options.py        options of readers and writers
    messages.py       reads a stream of Motorcade: planning and pages
    redis_streams.py  reads a stream of Redis
    mailboxes.py      reads the backlog of mailboxes
    appends.py        appends frames to a stream of Redis
    fanouts.py        sends frames to vehicles
    publishes.py      publishes frames to topics
    brokers.py        the connection that these two share
    columns.py        schemas, and pages of a store as Arrow columns
    json_payloads.py  parses JSON payloads into columns
    unpack.py         decodes MessagePack records into columns
    store_cache.py    open stores that a process reuses

    driver:    initialOffset ─▶ latestOffset ─▶ partitions(start, end)      a process of its own, beside the JVM
    executor:  read(partition) ─▶ pages of the store ─▶ Arrow batches       worker processes that live for many tasks

Rule 1: an offset says "up to and with this one". What follows from two offsets is always the same rows: partitions are
        made of (start, end) and of nothing that a process remembers, so a restart reads the last batch again as it was.
Rule 2: rows that should be there and are not are an error, or counted and told, as the option `on_trimmed` says; on the
        driver, and again where they are read, because a trim may come in between.
Rule 3: rows become columns as early as possible, and Python sees each row as seldom as possible.
"""
