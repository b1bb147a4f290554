"""Measures MQTT brokers side by side with the load generator mqttload.

    cli        what the user asked for
    million    a million messages for sleeping sessions, a kill, a restart
    sources    queues and streams beside live routing; idle subscribers of them
    report     rows -> Markdown
    verdict    samples -> rows: medians, ratios, what makes a row invalid, the bars
    measure    interleaved rounds -> samples
    phases     a generator that stops between phases
    lag        the node's histogram of its event loop's lateness
    brokers    what to install, start and stop
    workloads  the list of what is measured, with the bars of each
    machine    cores, /proc, limits, paths

Imports point down. Python's standard library only: nothing has to be installed before the first run.
"""
