"""Pages: together they are the stream, never overlap, and stay within their bound."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.message import Message
from motorcade.plugins.logs.streams.pages import OVERHEAD, Cache, Pages

STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 5), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(0, 30), st.integers(1, 9)),
    st.tuples(st.just("trim"), st.integers(0, 30), st.just(0)),
)


@given(st.lists(STEP, max_size=40), st.sampled_from([1, 10, 1000]))
def test_pages_are_the_stream(steps: list[tuple[str, int, int]], room: int) -> None:
    """Whatever was appended, with holes or without, and read in whatever order."""
    cache = Cache(room * OVERHEAD, Counter())
    pages = Pages(cache)
    stream: dict[int, Message] = {}
    tail = first = 0
    for what, number, extra in steps:
        if what == "append":
            # Holes: records that are in the store, but that nobody has told the pages of.
            for offset in range(tail + 1, tail + 1 + extra):
                stream[offset] = Message(str(offset), b"")
            offsets = list(range(tail + 1 + extra, tail + 1 + extra + number))
            messages = [Message(str(offset), b"") for offset in offsets]
            stream |= dict(zip(offsets, messages, strict=True))
            tail = offsets[-1]
            if number > 3:  # somebody has read the first of them before the append has returned
                pages.add(offsets[0] - 1, offsets[0], offsets[:1], messages[:1])
            pages.extend(offsets, messages)
        elif what == "read" and number < tail:
            found = [offset for offset in sorted(stream) if offset > max(number, first)][:extra]
            upto = found[-1] if len(found) == extra else tail
            pages.add(number, upto, found, [stream[offset] for offset in found])
        elif what == "trim":
            first = max(first, min(number, tail))
            pages.forget_before(first + 1)
        ends = [(page.after, page.upto) for page in pages._pages]
        assert all(low < high for low, high in ends)
        assert all(before[1] <= after[0] for before, after in pairwise(ends)), "they overlap"
        assert cache.size_bytes == sum(len(page.numbers) * OVERHEAD for page in pages._pages)
        assert cache.size_bytes <= cache.max_bytes or 1 == len(pages._pages)
        for cursor in range(tail + 2):
            page = pages.find(cursor)
            assert page is None or page.after <= cursor < page.upto
        for page in list(pages._pages):
            wanted = [offset for offset in sorted(stream) if max(page.after, first) < offset <= page.upto]
            assert wanted == [offset for offset in page.numbers if offset > first]
            assert page.messages == [stream[offset] for offset in page.numbers]
    pages.clear()
    assert 0 == cache.size_bytes
