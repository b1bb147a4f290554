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


class StoreError(MotorcadeError):
    """The store could not do what was asked, or cannot tell whether it did.

    Unless a subclass says more, some or all of a failed write may have been applied, or may be within seconds. A caller
    that repeats it gives its appends the same `token`, so that nothing is appended twice.
    """

    certain = False  #: nothing was written, and nothing will be
    away = False  #: the store does not answer: the caller should try it again, a client should send it again


class StoreAwayError(StoreError):
    """The servers of the store do not answer, or not all of them; they may later."""

    away = True


class StoreRefusedError(StoreError):
    """The store could not take a write in time, since its servers do not answer: nothing was applied nor will be."""

    certain = True
    away = True


class StoreFullError(StoreRefusedError):
    """No room, or the files cannot be written; the store takes no writes until that is mended.

    Nothing of the failed write was applied nor will be, but for what only removes (acknowledgements, deletions).
    """

    away = False


class StoreConflictError(StoreError):
    """A condition of the write does not hold: another write came first. Nothing of this one was applied."""

    certain = True


class StoreFencedError(StoreError):
    """The caller is no longer in charge: of a home, which another has attached, or its store was fenced.

    Nothing of the write was applied, unless an engine that stores it in parts says otherwise (`certain`).
    """

    certain = True


class StoreDamagedError(StoreError):
    """The files of the store are damaged; the message names the file and what to do."""
