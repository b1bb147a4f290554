"""Both trees against a plain dict and the slow matcher."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.trie import FilterTrie, TopicTree, _Node, _Tree
from tests.unit.core.matching import filters, slow_match, topics


def nodes(tree: _Tree[Any]) -> int:
    """How many nodes there are below the root."""
    waiting: list[_Node[Any]] = [tree._root]
    count = -1
    while waiting:
        node = waiting.pop()
        count += 1
        waiting.extend(node.children.values())
    return count


def prefixes(paths: Any) -> int:
    """How many nodes there have to be."""
    return len({tuple(path.split("/")[: i + 1]) for path in paths for i in range(path.count("/") + 1)})


#: (path, value): None removes
changes = st.lists(st.tuples(filters() | topics, st.none() | st.integers(0, 99)), max_size=30)


def apply(tree: _Tree[int], work: list[tuple[str, int | None]]) -> dict[str, int]:
    held: dict[str, int] = {}
    for path, value in work:
        if value is None:
            assert held.pop(path, None) == tree.remove(path)
        else:
            held[path] = value
            tree.set(path, value)
    return held


@given(changes, st.lists(topics, max_size=5))
def test_filters_that_match_a_topic(work: list[tuple[str, int | None]], asked: list[str]) -> None:
    trie: FilterTrie[int] = FilterTrie()
    held = apply(trie, work)
    for topic in asked:
        assert sorted(value for path, value in held.items() if slow_match(path, topic)) == sorted(trie.match(topic))
    assert len(held) == len(trie)
    assert prefixes(held) == nodes(trie)
    assert {path: trie.get(path) for path, _ in work} == {path: held.get(path) for path, _ in work}


@given(
    st.lists(st.tuples(topics, st.none() | st.integers(0, 99)), max_size=30), st.lists(filters() | topics, max_size=5)
)
def test_topics_that_a_filter_matches(work: list[tuple[str, int | None]], asked: list[str]) -> None:
    tree: TopicTree[int] = TopicTree()
    held = apply(tree, work)
    for filter_ in asked:
        expected = {topic: value for topic, value in held.items() if slow_match(filter_, topic)}
        found = list(tree.match(filter_))
        assert expected == dict(found) and len(expected) == len(found)
    assert len(held) == len(tree)
    assert prefixes(held) == nodes(tree)


@given(st.lists(filters() | topics, unique=True), st.randoms(use_true_random=False))
def test_removal_leaves_no_nodes(paths: list[str], random: Any) -> None:
    trie: FilterTrie[str] = FilterTrie()
    for path in paths:
        trie.set(path, path)
    random.shuffle(paths)
    for path in paths:
        assert path == trie.remove(path)
        assert trie.remove(path) is None
    assert (0, 0) == (len(trie), nodes(trie))
