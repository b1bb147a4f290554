"""Two trees over topic levels, one for each direction of matching.

`FilterTrie` holds filters and is asked with a topic: which filters match it?
`TopicTree` holds topics and is asked with a filter: which topics does it match?

Both keep a node per level; a node without children and values is removed with its last value,
so the trees never grow beyond what they hold. Matching visits only branches that can match.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class _Node(Generic[V]):
    __slots__ = ("children", "value")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] = {}
        self.value: V | None = None


class _Tree(Generic[V]):
    """A value per path of levels; `None` is no value."""

    __slots__ = ("_root", "_size", "nodes")

    def __init__(self) -> None:
        self._root: _Node[V] = _Node()
        self._size = 0
        self.nodes = 0  #: levels that are held, each once however many paths share it

    def __len__(self) -> int:
        return self._size

    def begins(self, level: str) -> bool:
        """Return True if a path begins with this very level."""
        return level in self._root.children

    def get(self, path: str) -> V | None:
        """Return the value at this very path, without any matching."""
        node = self._root
        for level in path.split("/"):
            found = node.children.get(level)
            if found is None:
                return None
            node = found
        return node.value

    def set(self, path: str, value: V) -> V | None:
        """Put a value at a path; return the one that was there."""
        node = self._root
        for level in path.split("/"):
            found = node.children.get(level)
            if found is None:
                found = node.children[level] = _Node()
                self.nodes += 1
            node = found
        old, node.value = node.value, value
        if old is None:
            self._size += 1
        return old

    def remove(self, path: str) -> V | None:
        """Take the value at a path away, and every node that was there only for it."""
        trail: list[tuple[_Node[V], str]] = []
        node = self._root
        for level in path.split("/"):
            found = node.children.get(level)
            if found is None:
                return None
            trail.append((node, level))
            node = found
        value = node.value
        if value is None:
            return None
        node.value = None
        self._size -= 1
        for parent, level in reversed(trail):
            if node.children or node.value is not None:
                break
            del parent.children[level]
            self.nodes -= 1
            node = parent
        return value

    def retire(self) -> Retired[V]:
        """Empty the tree at once; what was in it can be taken apart in steps."""
        retired = Retired(self._root)
        self._root = _Node()
        self._size = self.nodes = 0
        return retired


class Retired(Generic[V]):
    """The nodes of a tree that is not used any more: many, and to free them all at once takes long."""

    __slots__ = ("_nodes",)

    def __init__(self, root: _Node[V]) -> None:
        self._nodes = [root]

    def free(self, steps: int) -> bool:
        """Free so many nodes; False if none is left."""
        nodes = self._nodes
        for _ in range(steps):
            if not nodes:
                return False
            node = nodes.pop()
            nodes.extend(node.children.values())
            node.children = {}
        return True


class FilterTrie(_Tree[V]):
    """Filters with wildcards; asked with a topic."""

    __slots__ = ()

    def begin(self, topic: str) -> Matching[V]:
        """Begin to match a topic; `Matching.step` does it."""
        return Matching(self._root, topic)

    def match(self, topic: str) -> list[V]:
        """Return the values of all filters that match a topic."""
        matching = Matching(self._root, topic)
        matching.step(sys.maxsize)
        return matching.found


class Matching(Generic[V]):
    """The filters that match one topic, found in steps: filters made for it can be as many levels as all filters have.

    A filter that comes or goes between two steps may be found or not; the caller looks after that.
    """

    __slots__ = ("_levels", "_stack", "_wildcards_at", "found", "topic")

    def __init__(self, root: _Node[V], topic: str) -> None:
        self.topic = topic
        self.found: list[V] = []
        self._levels = topic.split("/")
        self._wildcards_at = 1 if topic.startswith("$") else 0  # [MQTT-4.7.2-1]
        self._stack: list[tuple[_Node[V], int]] = [(root, 0)]

    def step(self, most: int) -> bool:
        """Look at up to so many levels of filters; True when all have been looked at."""
        found, stack, levels, wildcards_at = self.found, self._stack, self._levels, self._wildcards_at
        last = len(levels)
        for _ in range(most):
            if not stack:
                return True
            node, depth = stack.pop()
            children = node.children
            if depth >= wildcards_at:
                rest = children.get("#")
                if rest is not None and rest.value is not None:
                    found.append(rest.value)
            if depth == last:
                if node.value is not None:
                    found.append(node.value)
                continue
            child = children.get(levels[depth])
            if child is not None:
                stack.append((child, depth + 1))
            if depth >= wildcards_at:
                child = children.get("+")
                if child is not None:
                    stack.append((child, depth + 1))
        return not stack


class TopicTree(_Tree[V]):
    """Topics without wildcards; asked with a filter."""

    __slots__ = ("looked_at",)

    def __init__(self) -> None:
        super().__init__()
        self.looked_at = 0  #: levels of topics that the last `matches` has looked at

    def matches(self, filter_: str, most: int) -> list[str] | None:
        """Return all topics that a filter matches; None if more than `most` levels of topics have to be looked at."""
        wanted = filter_.split("/")
        found: list[str] = []
        stack: list[tuple[_Node[V], int, str | None]] = [(self._root, 0, None)]
        seen = 0
        while stack:
            seen += 1
            self.looked_at = seen
            if seen + len(stack) > most:
                return None
            node, depth, path = stack.pop()
            level = wanted[depth] if depth < len(wanted) else None
            if path is not None and node.value is not None and level in (None, "#"):
                found.append(path)
            if level is None:
                continue
            if level not in ("+", "#"):
                child = node.children.get(level)
                if child is not None:
                    stack.append((child, depth + 1, _join(path, level)))
                continue
            if seen + len(node.children) > most:
                return None
            deeper = depth if level == "#" else depth + 1  # '#' stays in force all the way down
            for name, child in node.children.items():
                if path is None and name.startswith("$"):
                    continue  # [MQTT-4.7.2-1]
                stack.append((child, deeper, _join(path, name)))
        return found

    def match(self, filter_: str) -> Iterator[tuple[str, V]]:
        """Yield (topic, value) of all topics that a filter matches, in no particular order.

        The tree may not be changed while the iterator is in use.
        """
        wanted = filter_.split("/")
        stack: list[tuple[_Node[V], int, str | None]] = [(self._root, 0, None)]
        while stack:
            node, depth, path = stack.pop()
            level = wanted[depth] if depth < len(wanted) else None
            if path is not None and node.value is not None and level in (None, "#"):
                yield path, node.value
            if level is None:
                continue
            if level not in ("+", "#"):
                child = node.children.get(level)
                if child is not None:
                    stack.append((child, depth + 1, _join(path, level)))
                continue
            deeper = depth if level == "#" else depth + 1  # '#' stays in force all the way down
            for name, child in node.children.items():
                if path is None and name.startswith("$"):
                    continue  # [MQTT-4.7.2-1]
                stack.append((child, deeper, _join(path, name)))


def _join(path: str | None, level: str) -> str:
    return level if path is None else f"{path}/{level}"
