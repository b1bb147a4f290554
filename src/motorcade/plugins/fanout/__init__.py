"""Fan-out: one message to a list of vehicles, and the truth about each.

options     what can be set
tables      where everything is in the store, and the names of topics
batch       what the platform asks for, checked as a whole before anything is stored
record      what the fan-out writes down
intake      batches and data on their way into the store
desk        which message a vehicle may get now: the one rule
dispatcher  finds the next message of a vehicle
source      brings it to the vehicle's session
clerk       writes down what becomes of it
receipts    tells it: stream, topics, ledger
ledger      counts per request
queries     answers about requests
recovery    writes receipts that a crash has left out
sweeper     collects what is over for vehicles that are away
service     what operators ask for; views: what they see
plugin      puts it together, and listens
"""

from motorcade.plugins.fanout.batch import BadBatchError, Batch
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.plugin import FanoutPlugin

__all__ = ["BadBatchError", "Batch", "FanoutConfig", "FanoutPlugin"]
