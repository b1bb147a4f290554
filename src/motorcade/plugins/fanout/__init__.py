"""Fan-out: one message to a list of vehicles, and the truth about each.

options         configuration
tables          where everything is in the store, and the names of topics
batch           a batch as the platform publishes it, checked as a whole before anything is stored
record          what is stored beside receipts
ingress         batches on their way into the store; pending_batch: one of them
payloads        data that is published once and named by batches
dedup           batches with an id are stored once
triggers        vehicles to look at
dispatcher      finds the next message of a vehicle
inflight        which message a vehicle may get now: one in flight per VIN
source          brings it to the vehicle's session
attempts        acknowledgement time-outs and retries
receipt_writer  stores receipts with what they tell of, and publishes them; receipt_format: their bytes
counters        counts per request; decisions: what operators have decided about requests
queries         answers about requests
recovery        writes receipts that a crash has left out
sweeper         collects what is over for vehicles that are away
members         with several nodes: what they tell and ask each other; told: which batches may be sent
outbox          with several nodes: the ends of deliveries; steward: what members that died have left
counting        with several nodes: the one that counts
service         what operators ask for; views: what they see
parts           the parts that the others are built on
plugin          puts it together, and listens
"""

from motorcade.plugins.fanout.batch import BadBatchError, FanoutBatch
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.plugin import FanoutPlugin

__all__ = ["BadBatchError", "FanoutBatch", "FanoutConfig", "FanoutPlugin"]
