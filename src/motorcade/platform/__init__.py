"""What a platform does: it sends to a broker, and goes on until everything is acknowledged.

    address.py   where a broker is, and who we are there
    orders.py    one message to many vehicles, as the bytes of fan-out batches
    courier.py   messages over one connection after the other, each acknowledged; the pace

The command line and the pipelines send through here. Nothing in it knows of Spark.
"""
