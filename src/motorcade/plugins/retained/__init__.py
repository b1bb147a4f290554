"""Retained messages: the last message of a topic, kept for later subscribers.

plugin    hook, configuration, operators
index     all messages by topic, in memory and within bounds
feed      with several nodes: all members follow the changes that each of them makes
store     on a lone node: writes changes of the index to the node's store, and reads it at the start
record    the stored form of a message
source    gives the messages to a subscriber
"""

from motorcade.plugins.retained.index import Index, RetainedRefusal
from motorcade.plugins.retained.plugin import RetainedConfig, RetainedPlugin

__all__ = ["Index", "RetainedConfig", "RetainedPlugin", "RetainedRefusal"]
