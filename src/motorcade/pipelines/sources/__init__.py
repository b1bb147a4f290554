"""The data source `motorcade` (Python Data Source API of Spark 4.2 and newer).

    datasource.py   what Spark calls
    options.py      what its users may say
    messages.py     a stream of Motorcade: planning and reading
    natives.py      a stream of Redis
    mailboxes.py    what waits in mailboxes
    appends.py      frames into a stream of Redis
    fanouts.py      frames to vehicles
    publishes.py    frames to topics
    brokers.py      what these two have in common
    columns.py      schemas, and pages of a store as Arrow columns
    shelf.py        open stores that a process keeps

    driver:    initialOffset ─▶ latestOffset ─▶ partitions(start, end)      a process of its own, beside the JVM
    executor:  read(partition) ─▶ pages of the store ─▶ Arrow batches       worker processes that live for many tasks

Rule 1: an offset says "up to and with this one". What follows from two offsets is always the same rows: partitions are
        made of (start, end) and of nothing that a process remembers, so a restart reads the last batch again as it was.
Rule 2: rows that should be there and are not are an error, or counted and told, as the option `on_trimmed` says; on the
        driver, and once more where they are read, because a trim may come in between.
Rule 3: rows become columns as early as possible, and Python sees each row as seldom as possible.
"""
