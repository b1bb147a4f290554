"""Retained messages: the last message of a topic, kept for those who subscribe later.

plugin    when a message is kept, and who gets it later
index     all messages by topic, in memory and within bounds
keeper    brings changes of the index to the node's store, and the store's content into the index
record    a message as the store keeps it
source    brings the messages to a subscriber
"""

from motorcade.plugins.retained.index import Index, Refusal
from motorcade.plugins.retained.plugin import RetainedConfig, RetainedPlugin

__all__ = ["Index", "Refusal", "RetainedConfig", "RetainedPlugin"]
