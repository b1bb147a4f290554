"""The observer finds containers by the name of their owner, wherever they lie."""

from __future__ import annotations

import functools
from collections import deque

from tests.soak.observer import tables


class Slotted:
    __slots__ = ("inner", "unset")
    __module__ = "motorcade.made.up"

    def __init__(self) -> None:
        self.inner = {"a": [1, 2], "b": [3]}


class Plain:
    __module__ = "motorcade.made.up"

    def __init__(self) -> None:
        self.slotted = [Slotted(), Slotted()]
        self.waiting = deque([1, 2, 3])
        self.call = functools.partial(self.method, Slotted())
        local = {1, 2}
        self.closure = lambda: local
        self.itself = self

    def method(self, _other: object) -> None:
        """Carried by a partial."""


def test_containers_are_counted_by_owner() -> None:
    found = tables([Plain()])
    assert 2 == found["Plain.slotted"]
    assert 3 == found["Plain.waiting"]
    assert 6 == found["Slotted.inner"], "all of one name are added up"
    assert 9 == found["Slotted.inner[]"]
    assert 2 == found["Plain.__init__.<locals>.<lambda>.local"]
    assert found["sys.modules"] > 10
