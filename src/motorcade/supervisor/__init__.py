"""`motorcade serve --nodes N`: several nodes on one machine as one command.

    supervisor ─┬─ valkey-server          the store of the nodes, unless one is named; in DATA/valkey
                ├─ node NAME-1  DATA/node-1 ─┐
                ├─ node NAME-2  DATA/node-2 ─┼─ listen on the same ports (SO_REUSEPORT): the kernel chooses one
                └─ …                         ┘
                     │ standard error: log lines, one JSON object each ─▶ one log, with the name of the node
                     └ standard output: the line with `ready` ─▶ one such line when all have said it

Rule 1: no process outlives the supervisor, however it ends (`orphan.py`). A Valkey that did all the same is found by
        its lock and stopped before another one opens its files (`valkey.py`).
Rule 2: what cannot start ends the command, with its own message. What has served once and ends is started again, after
        a pause that doubles (`supervised.py`).
Rule 3: a port is chosen once, by the supervisor, and held for as long as it runs (`ports.py`): a node that is started
        again is where it was.
Rule 4: nothing secret stands on a command line or in an environment: nodes read what they are on standard input
        (`child.py`), and the password of the store from a file.
"""
