"""Queues: messages that are kept until one of several consumers has acknowledged them.

plugin         hooks: publish and subscribe; start and end
service        all queues of a node: create, change, delete; routing of messages, clients that wait for a queue
options        the options of a queue
queue          one queue: its size, appends, reads, dead letters
dispatcher     which consumer gets which message; pure
strategy       which consumer gets the next one; pure
source         a client that consumes queues
store          writes of all queues: appends, removals, counts of attempts
members        what the nodes of a cluster tell each other of queues
record         the stored form of a message
tables         names in the store
"""

from motorcade.plugins.logs.queues.options import QueueOptions, QueuesConfig
from motorcade.plugins.logs.queues.plugin import QueuesPlugin

__all__ = ["QueueOptions", "QueuesConfig", "QueuesPlugin"]
