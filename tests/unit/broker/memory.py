"""Moved to `tests.support.virtual`; import from there."""

from tests.support.virtual import START, Clock, MemoryNode, Peer, Timer, Turns, Wire, standing, surviving

__all__ = ["START", "Clock", "MemoryNode", "Peer", "Timer", "Turns", "Wire", "standing", "surviving"]
