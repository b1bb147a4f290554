"""A reliable publisher: sends to a broker until everything is acknowledged, over as many connections as it takes.

    address.py     where a broker is, and who we are there
    batches.py     one message to many vehicles, as the bytes of fan-out batches
    publisher.py   messages over one connection after the other, each acknowledged; the pace

The command line and the pipelines send through here. Nothing in it knows of Spark.
"""
