"""Capture: rules that copy published messages into a stream, a Redis stream or a Redis channel.

plugin       what the broker sees: configuration, the hook, the service `captures`
rules        all rules: from the configuration and from commands, changed while messages flow
options      what a rule may say, and how it is shown
sink         what waits for a target, within bounds; what publishers hear of it
stream_sink  into a stream of this node, through the plugin `streams`
redis_sink   into a Redis server or cluster, each message once
forms        a message as Redis holds it
"""

from motorcade.plugins.capture.options import CaptureConfig, RuleOptions, RuleView
from motorcade.plugins.capture.plugin import CapturePlugin

__all__ = ["CaptureConfig", "CapturePlugin", "RuleOptions", "RuleView"]
