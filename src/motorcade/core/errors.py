"""Every error Motorcade raises on purpose, one sentence each."""

from __future__ import annotations


class MotorcadeError(Exception):
    """Base of all errors that Motorcade raises on purpose."""


class ConfigError(MotorcadeError):
    """The configuration is wrong; the message names file, line, key and what to do."""


class TopicError(MotorcadeError):
    """A topic name or topic filter breaks the rules of MQTT."""


class PluginError(MotorcadeError):
    """A plugin could not be found, loaded, configured or unloaded."""


class HookError(MotorcadeError):
    """A callback was registered for a hook point that does not exist, twice, or of the wrong kind."""


class AccessFileError(MotorcadeError):
    """A password or rule file is broken; the message names file and line. The old contents stay in force."""
