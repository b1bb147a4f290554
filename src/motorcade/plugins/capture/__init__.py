"""Capture: rules that copy published messages into a stream, a Redis stream or a Redis channel.

plugin       configuration, hook, the service `captures`
rules        all rules: from the configuration and from commands, changed while messages flow
options      the options of a rule, checked, and its view
sink         messages pending for a target, within bounds; answers to publishers
stream_sink  into a stream of this node, through the plugin `streams`
redis_sink   into a Redis server or cluster, each message once
forms        a message as Redis holds it
"""

from motorcade.plugins.capture.options import CaptureConfig, RuleOptions, RuleView
from motorcade.plugins.capture.plugin import CapturePlugin

__all__ = ["CaptureConfig", "CapturePlugin", "RuleOptions", "RuleView"]
