"""Retained messages: the last message of a topic, kept for those who subscribe later."""

from motorcade.plugins.retained.plugin import RetainedConfig, RetainedPlugin
from motorcade.plugins.retained.store import Refusal, Store

__all__ = ["Refusal", "RetainedConfig", "RetainedPlugin", "Store"]
