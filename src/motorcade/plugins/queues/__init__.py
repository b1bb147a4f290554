"""Queues: messages that are kept until one of several consumers has acknowledged them.

plugin         what is published to queues, who subscribes, start and end
declarations   what operators do with queues
options        what can be said about a queue
queues         all queues of a node: which ones a message belongs to, who consumes them
queue          one queue: its dispatcher, and what this one asks of the store
dispatcher     who gets which message; pure
strategy       which consumer gets the next one; pure
source         a client's place at its queues
writer         what goes into the store, many at a time
record         a message as the store keeps it
tables         where all that is in the store
"""

from motorcade.plugins.queues.options import QueueOptions, QueuesConfig
from motorcade.plugins.queues.plugin import QueuesPlugin

__all__ = ["QueueOptions", "QueuesConfig", "QueuesPlugin"]
