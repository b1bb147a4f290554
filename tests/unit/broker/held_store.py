"""Moved to `tests.support.held_store`; import from there."""

from tests.support.held_store import HeldStore

__all__ = ["HeldStore"]
