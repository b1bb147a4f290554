"""Interest: the filters that clients of this node want live, as its peers have to know them.

    subscribe, unsubscribe ─▶ counts per filter (`Audience`) ─▶ first one, last one ─┐
    a member of a group comes, goes ─▶ counts per group ─────────────────────────────┴▶ [ changes ] ─▶ flush: items

A filter is told with two flags (`remote_router`): LIVE if a client takes every message live, DURABLE if there is a
durable session whose messages of QoS 1 and 2 are stored by the publisher's node. What comes and goes between two
flushes is not told. A peer that is new is told everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from motorcade.broker.addressing import Addressing
from motorcade.broker.items import InterestItem, encode

if TYPE_CHECKING:
    from motorcade.broker.pubsub import Audience, SharedGroup
    from motorcade.broker.session import Session
    from motorcade.core.subscription import Subscription

PER_ITEM: Final = 1000  #: filters and groups in one item
ITEM_BYTES: Final = 256 * 1024  #: characters of these
OF_ONE_NODE: Final = "$SYS/"  #: topics that begin so concern one node, and go to no other


class Interest:
    """The filters and groups of one node, and what of them was not told yet."""

    __slots__ = ("_addressing", "_changed", "_groups", "_hurry", "filters", "groups")

    def __init__(self, hurry: Callable[[], None], addressing: Addressing) -> None:
        """`hurry`: something has changed; `flush` must follow, in this turn or the next."""
        self._addressing = addressing
        self.filters: dict[str, int] = {}  #: as told
        self.groups: dict[str, tuple[int, int]] = {}  #: as told
        self._changed: dict[str, int] = {}
        self._groups: dict[str, SharedGroup] = {}
        self._hurry = hurry

    def count(self, audience: Audience, filter_: str, session: Session, subscription: Subscription, one: int) -> None:
        """Note that a subscription has come (1) or gone (-1)."""
        if session.durable is not None and self._addressing.covers(session.client_id, filter_):
            return  # who publishes asks the store
        before = audience.flags
        if session.durable is not None and subscription.qos:
            audience.durable += one
        else:
            audience.live += one
        if audience.flags != before and not filter_.startswith(OF_ONE_NODE):
            if not self._changed and not self._groups:
                self._hurry()
            self._changed[filter_] = audience.flags

    def count_group(self, group: SharedGroup) -> None:
        """Note that members of a group have come or gone."""
        if group.filter.startswith(OF_ONE_NODE):
            return
        if not self._changed and not self._groups:
            self._hurry()
        self._groups[group.text] = group

    def flush(self) -> Sequence[bytes]:
        """Return the items that tell what has changed."""
        if not self._changed and not self._groups:
            return ()
        changed, self._changed = self._changed, {}
        groups, self._groups = self._groups, {}
        filters = [(filter_, flags) for filter_, flags in changed.items() if flags != self.filters.get(filter_, 0)]
        for filter_, flags in filters:
            if flags:
                self.filters[filter_] = flags
            else:
                del self.filters[filter_]
        counts = [(text, group.present()) for text, group in groups.items()]
        counts = [(text, count) for text, count in counts if count != self.groups.get(text, (0, 0))]
        for text, count in counts:
            if any(count):
                self.groups[text] = count
            else:
                del self.groups[text]
        return list(_items(filters, [(text, *count) for text, count in counts]))

    def whole(self) -> Iterator[bytes]:
        """Return the items that tell everything that was told so far."""
        return _items(list(self.filters.items()), [(text, *count) for text, count in self.groups.items()])


def _items(filters: list[tuple[str, int]], groups: list[tuple[str, int, int]]) -> Iterator[bytes]:
    """Return items of bounded size."""
    part: list[tuple[str, int]] = []
    size = 0
    for one in filters:
        if size >= ITEM_BYTES or len(part) >= PER_ITEM:
            yield encode(InterestItem(part, []))
            part, size = [], 0
        part.append(one)
        size += len(one[0])
    if part or groups:
        yield encode(InterestItem(part, groups[:PER_ITEM]))
    for at in range(PER_ITEM, len(groups), PER_ITEM):
        yield encode(InterestItem([], groups[at : at + PER_ITEM]))
