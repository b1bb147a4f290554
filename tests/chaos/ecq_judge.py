"""Did every compacted queue keep its promises across all deaths of the node?

The judge knows what producers have published and were answered, what consumers have received and acknowledged, in which
order, and what anybody can read from the control port. Nothing of the node. A value is a number that its producer
counts up; only one producer writes a key, and never publishes a value again whose fate it does not know.

    lost        acknowledged to its producer, and neither stored at the end nor delivered, nor a newer value of its key
    backwards   an older value of a key after a newer one, to the same consumer: never, rewinds or not
    reused      one sequence number that stands for two messages of a queue
    invented    a value that nobody has published
    unordered   smaller numbers after larger ones on one connection, without a reason (a rewind, a refusal)
    repeated    acknowledged before a polite goodbye, and there again though the node was not killed in between
    progress    smaller than once before without a rewind, as a node that has just started tells it;
                or beyond a message that its consumer has and has not acknowledged
    unfinished  at the end: something waits, or stored and last delivered values differ
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from tests.chaos.findings import Findings


@dataclass(frozen=True)
class Place:
    """A queue."""

    kind: str  #: exclusive or shared
    name: str

    def __str__(self) -> str:
        return f"{'$ECQ' if self.kind == 'exclusive' else '$SCQ'}/{self.name}"


@dataclass(eq=False)
class Publication:
    """A value that was published, as its producer remembers it."""

    place: Place
    key: str
    value: int
    reason: int | None = None  #: of the answer; None: none came
    sent: float = 0.0
    answered: float = inf

    @property
    def is_acknowledged(self) -> bool:
        return self.reason is not None and self.reason < 0x80


@dataclass(eq=False)
class Delivery:
    """A message that reached a consumer."""

    connection: int
    number: int  #: 0: MQTT 3 does not tell
    key: str
    value: int
    acked: bool = False
    refused: bool = False


@dataclass(eq=False)
class Visit:
    """One connection of a consumer."""

    process: int  #: which node it was, counted
    deliveries: list[Delivery] = field(default_factory=list)
    rewound: bool = False  #: it went back, or an operator took it back
    polite: bool = False  #: it said goodbye after its last acknowledgement

    @property
    def done(self) -> int:
        """Everything up to this number is acknowledged, of what came here."""
        open_ = [one.number for one in self.deliveries if not one.acked]
        acked = [one.number for one in self.deliveries if one.acked]
        return min(open_) - 1 if open_ else max(acked, default=0)


@dataclass(eq=False)
class Story:
    """All that happened to one consumer."""

    place: Place
    client: str
    visits: list[Visit] = field(default_factory=list)

    @property
    def deliveries(self) -> Iterable[Delivery]:
        return (delivery for visit in self.visits for delivery in visit.deliveries)


@dataclass
class Verdict(Findings):
    """Counts, and what is wrong."""

    published: int = 0
    acknowledged: int = 0
    delivered: int = 0
    again: int = (
        0  #: deliveries of what the consumer had acknowledged before: killed nodes may forget a little progress
    )


Stored = Mapping[Place, Mapping[str, tuple[int, int]]]  #: number and value of each key, at the end


def judge(
    publications: Sequence[Publication],
    stories: Sequence[Story],
    stored: Stored,
    known: set[tuple[Place, str, int]] | None = None,
) -> Verdict:
    """The whole truth about one run. `known`: what was published, if that is more than what is judged."""
    found = Verdict(len(publications), sum(one.is_acknowledged for one in publications))
    _kept(found, publications, stored)
    _numbers(found, stories, stored)
    if known is None:
        known = {(one.place, one.key, one.value) for one in publications}
    for story in stories:
        _delivered(found, story, known, stored.get(story.place, {}))
        _visits(found, story)
    return found


def _kept(found: Verdict, publications: Sequence[Publication], stored: Stored) -> None:
    """The last acknowledged value of each key is there, or a newer one."""
    newest = {(one.place, one.key): one.value for one in publications if one.is_acknowledged}
    for (place, key), value in newest.items():
        _, there = stored.get(place, {}).get(key, (0, -1))
        if there < value:
            found.add("lost", f"{place}: {key}: {value} was acknowledged, {there} is stored")
    for one in publications:
        if one.reason is not None and one.reason >= 0x80:
            found.add("refused", f"{one.place}: {one.key}: {one.value}: 0x{one.reason:02x}")


def _numbers(found: Verdict, stories: Sequence[Story], stored: Stored) -> None:
    meaning: dict[tuple[Place, int], tuple[str, int]] = {}
    seen = [(story.place, one.number, one.key, one.value) for story in stories for one in story.deliveries]
    seen += [(place, number, key, value) for place, keys in stored.items() for key, (number, value) in keys.items()]
    for place, number, key, value in seen:
        if number and (before := meaning.setdefault((place, number), (key, value))) != (key, value):
            found.add("reused", f"{place}: {number} is {before} and {(key, value)}")


def _delivered(
    found: Verdict, story: Story, known: set[tuple[Place, str, int]], stored: Mapping[str, tuple[int, int]]
) -> None:
    newest: dict[str, int] = {}
    acked: set[tuple[str, int]] = set()
    for one in story.deliveries:
        found.delivered += 1
        found.again += (one.key, one.value) in acked
        if (story.place, one.key, one.value) not in known:
            found.add("invented", f"{story.client}: {one.key}: {one.value}")
        if one.value < newest.get(one.key, -1):
            words = f"{story.client}: {one.key}: {one.value} (number {one.number}) after {newest[one.key]}"
            found.add("backwards", words)
        newest[one.key] = max(one.value, newest.get(one.key, -1))
        if one.acked:
            acked.add((one.key, one.value))
    for key, (number, value) in stored.items():
        if newest.get(key) != value:
            words = f"{story.client}: {key}: {value} (number {number}) is stored, {newest.get(key)} was delivered last"
            found.add("unfinished", words)


def _visits(found: Verdict, story: Story) -> None:
    for visit in story.visits:
        numbers = [one.number for one in visit.deliveries if one.number]
        if visit.rewound or any(one.refused for one in visit.deliveries):
            continue
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            found.add("unordered", f"{story.client}: {numbers}")
    for before, after in pairwise(story.visits):
        if not before.polite or before.process != after.process or before.rewound or after.rewound:
            continue
        late = [one.number for one in after.deliveries if 0 < one.number <= before.done]
        if late:
            found.add("repeated", f"{story.client}: {late}, all up to {before.done} was acknowledged")
