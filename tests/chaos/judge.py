"""What clients wrote down, and what has to follow from it. No clients and no broker in here.

    History    publications (sent, acknowledged, completed), deliveries, subscriptions, values that were retained,
               wills, sessions; every client writes to the same one, and its clock is the same for all
    judge()    History -> Verdict: counts, and findings in words

Rule 1: a message counts as acknowledged when its publisher holds PUBACK (QoS 1) or PUBREC (QoS 2): from then on the
        publisher may forget the payload.
Rule 2: it is due to a receiver whose SUBACK was there before the message was first sent and who had not asked to
        unsubscribe when the message was acknowledged. Due, acknowledged and never delivered is lost.
Rule 3: at QoS 1 it may come again on another connection of the receiver, or when the publisher had to repeat it. At
        QoS 2 it never comes again: receivers hand in what is left after the packet identifiers have done their work.
Rule 4: per receiver, publisher and topic, the first deliveries come in the order in which the messages were sent.
Rule 5: members of a shared subscription are one receiver. Order is not judged there: nobody promises it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.chaos.findings import Findings

NEVER = float("inf")


@dataclass
class Publication:
    """One application message of one publisher."""

    name: str  #: unlike any other; the payload begins with it
    publisher: str
    topic: str
    number: int  #: grows with every message of this publisher
    qos: int
    sent: list[float] = field(default_factory=list)  #: every time it went out
    acknowledged: float = NEVER  #: PUBACK, PUBREC
    completed: float = NEVER  #: PUBACK, PUBCOMP
    refused: int = 0  #: reason code of a broker that did not take it
    given_up: bool = False  #: its session was gone, and with it the right to repeat it
    through: list[str] = field(default_factory=list)  #: the nodes that it went out to, every time
    payload: bytes = b""  #: digest of its payload, if a store may keep that apart from the entries of its receivers

    @property
    def is_acknowledged(self) -> bool:
        return self.acknowledged != NEVER

    @property
    def is_open(self) -> bool:
        """Sent, and neither finished nor refused: a publisher that waits."""
        return self.completed == NEVER and not self.refused and not self.given_up


@dataclass
class Delivery:
    """A message handed to the application of a receiver."""

    name: str
    topic: str
    qos: int
    dup: bool
    connection: int  #: which connection of this receiver
    at: float
    member: str = ""  #: of a shared subscription


@dataclass
class Window:
    """The life of one subscription."""

    filter: str
    qos: int
    asked: float  #: SUBSCRIBE went out
    granted: float = NEVER  #: SUBACK
    leaving: float = NEVER  #: UNSUBSCRIBE went out
    left: float = NEVER  #: UNSUBACK


@dataclass
class Receiver:
    """Who gets messages: a client, or a shared subscription."""

    name: str
    shared: bool = False
    windows: list[Window] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)


@dataclass
class Retained:
    """One publication with the retain flag; an empty value removes what is there."""

    value: bytes
    publication: Publication

    @property
    def sent(self) -> float:
        return self.publication.sent[0]

    @property
    def acknowledged(self) -> float:
        return self.publication.acknowledged


@dataclass
class Probe:
    """A look at the retained messages by somebody who has just subscribed."""

    began: float
    ended: float
    seen: dict[str, bytes]
    whole: bool = True  #: False: the node was killed meanwhile; what was not seen may have been there


@dataclass
class Will:
    """A client that is gone, or came back in time."""

    name: str
    due: bool  #: False: it came back before the delay was over, and left in peace
    deaths: str  #: how the client went, for the reader


class History:
    """Everything that was written down in one run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.publications: dict[str, Publication] = {}
        self.receivers: dict[str, Receiver] = {}
        self.retained: dict[str, list[Retained]] = defaultdict(list)
        self.probes: list[Probe] = []
        self.wills: list[Will] = []
        self.willed: Counter[str] = Counter()  #: wills that were delivered, by name
        self.reconnects = 0  #: CONNACKs that had to say "session present"
        self.oddities: list[tuple[str, str]] = []  #: kind and words: what a client saw that must not be
        self.happened: Callable[[str], None] = lambda event: None  #: told "answered" and "delivered" by strict clients

    def receiver(self, name: str, *, shared: bool = False) -> Receiver:
        return self.receivers.setdefault(name, Receiver(name, shared))

    def sent(self) -> list[Publication]:
        """All publications so far; threads may add to them meanwhile."""
        return list(self.publications.values())

    def odd(self, kind: str, words: str) -> None:
        """Something that is wrong whatever else happens."""
        self.oddities.append((kind, words))

    def forgotten(self, client: str, words: str) -> None:
        """Note that a client found no session where it had one."""
        self.odd("session forgotten", words)

    def subscribes_again(self, window: Window) -> Window:
        """Return the subscription that a client asks for in place of one that went with its session."""
        return window


@dataclass
class Tally:
    """Counts of one QoS, or of one receiver."""

    acknowledged: int = 0
    due: int = 0
    delivered: int = 0  #: first deliveries
    marked: int = 0  #: delivered again, with the DUP flag
    repeated: int = 0  #: delivered again without it: the publisher had sent it again
    unmarked: int = 0  #: delivered again without it, though the publisher had sent it once
    lost: int = 0

    @property
    def duplicated(self) -> int:
        return self.marked + self.repeated + self.unmarked


@dataclass
class Verdict(Findings):
    """The outcome of a run."""

    by_qos: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_receiver: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    open: int = 0  #: publications that nobody answered to the end
    refused: int = 0
    probes: int = 0
    wills: int = 0
    wills_repeated: int = 0
    reconnects: int = 0


@functools.cache
def matches(pattern: str, topic: str) -> bool:
    """Whether a topic filter matches; the name of a shared subscription does not matter."""
    if pattern.startswith("$share/"):
        pattern = pattern.split("/", 2)[2]
    for wanted, level in itertools.zip_longest(pattern.split("/"), topic.split("/")):
        if wanted == "#":
            return True
        if wanted is None or level is None or wanted not in ("+", level):
            return False
    return True


def due(receiver: Receiver, publication: Publication) -> Window | None:
    """The subscription by which an acknowledged message is owed to this receiver."""
    for window in receiver.windows:
        if (
            matches(window.filter, publication.topic)
            and window.granted < publication.sent[0]
            and (window.leaving == NEVER or publication.completed < window.leaving)
        ):
            return window
    return None


def possible(receiver: Receiver, publication: Publication) -> bool:
    """Whether some subscription may have caught the message, at any time between its first byte and its end."""
    return any(
        matches(window.filter, publication.topic)
        and window.asked <= publication.completed
        and publication.sent[0] <= window.left
        for window in receiver.windows
    )


class Debts:
    """What is acknowledged, due, and not there yet: asked again and again while a run comes to its end.

    Each question looks only at what the last answer left open: whether a message is due is final once its flow is over.
    Receivers that end with a connection (`NAME#NUMBER`) are left out: what is owed to them is known afterwards.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._seen = 0  #: publications that were looked at
        self._open: dict[str, list[Publication]] = {name: [] for name in history.receivers}
        self._there: dict[str, set[str]] = {name: set() for name in history.receivers}
        self._read: Counter[str] = Counter()  #: deliveries that were looked at

    def owed(self) -> dict[str, list[Publication]]:
        """By receiver, without those who have everything."""
        new = self.history.sent()[self._seen :]
        self._seen += len(new)
        result = {}
        for receiver in list(self.history.receivers.values()):
            if "#" in receiver.name:
                continue
            there = self._there[receiver.name]
            fresh = receiver.deliveries[self._read[receiver.name] :]
            self._read[receiver.name] += len(fresh)
            there.update(delivery.name for delivery in fresh)
            left = [
                publication
                for publication in (*self._open[receiver.name], *new)
                if publication.name not in there and (publication.completed == NEVER or due(receiver, publication))
            ]
            self._open[receiver.name] = left
            owed = [publication for publication in left if publication.is_acknowledged and due(receiver, publication)]
            if owed:
                result[receiver.name] = owed
        return result


def unpublished_wills(history: History) -> list[Will]:
    return [will for will in history.wills if will.due and not history.willed[will.name]]


def judge(history: History) -> Verdict:
    """Compare what was promised with what came."""
    verdict = Verdict(reconnects=history.reconnects, probes=len(history.probes), wills=len(history.wills))
    for kind, words in history.oddities:
        verdict.add(kind, words)
    for publication in history.sent():
        verdict.by_qos[f"QoS {publication.qos}"].acknowledged += publication.is_acknowledged
        verdict.open += publication.is_open
        verdict.refused += bool(publication.refused)
        if publication.is_open:
            verdict.add("unanswered", f"{publication.name}: sent {len(publication.sent)} times, never acknowledged")
    for receiver in history.receivers.values():
        _judge_receiver(history, receiver, verdict)
    _judge_retained(history, verdict)
    _judge_wills(history, verdict)
    return verdict


def _judge_receiver(history: History, receiver: Receiver, verdict: Verdict) -> None:
    first: dict[str, Delivery] = {}
    again: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in receiver.deliveries:
        if delivery.name not in history.publications:
            verdict.add("invented", f"{receiver.name} got {delivery.name!r}, which nobody sent")
        elif delivery.name in first:
            again[delivery.name].append(delivery)
        else:
            first[delivery.name] = delivery
    for publication in history.sent():
        window = due(receiver, publication) if publication.is_acknowledged else None
        for tally in _tallies(receiver, publication, verdict):
            tally.due += window is not None
            tally.delivered += publication.name in first
            tally.lost += window is not None and publication.name not in first
        if window is not None and publication.name not in first:
            verdict.add("lost", f"{receiver.name} never got {publication.name} (QoS {publication.qos})")
    for name, delivery in first.items():
        publication = history.publications[name]
        _judge_copies(receiver, publication, [delivery, *again[name]], verdict)
        if not possible(receiver, publication):
            verdict.add("unwanted", f"{receiver.name} got {name} after its UNSUBACK")
    if not receiver.shared:
        _judge_order(history, receiver, first.values(), verdict)


def _tallies(receiver: Receiver, publication: Publication, verdict: Verdict) -> tuple[Tally, Tally]:
    """Where a message counts for a receiver. What was published at QoS 2 and granted at QoS 1 has a row of its own."""
    granted = max((window.qos for window in receiver.windows), default=2)
    row = f"QoS {publication.qos}" + (f" as {granted}" if granted < publication.qos else "")
    return verdict.by_qos[row], verdict.by_receiver[receiver.name]


def _judge_copies(receiver: Receiver, publication: Publication, copies: list[Delivery], verdict: Verdict) -> None:
    """All deliveries of one message to one receiver, in the order in which they came."""
    granted = {window.qos for window in receiver.windows if matches(window.filter, publication.topic)}
    if any(delivery.qos not in {min(qos, publication.qos) for qos in granted} for delivery in copies):
        verdict.add("wrong QoS", f"{receiver.name} got {publication.name} at QoS {[copy.qos for copy in copies]}")
    if len(copies) == 1:
        return
    if copies[0].qos == 2:
        where = ", ".join(f"{copy.member}#{copy.connection}" for copy in copies)
        verdict.add("QoS 2 twice", f"{receiver.name} got {publication.name} {len(copies)} times ({where})")
    # One copy for each time the publisher sent it may come on a connection; more would be repeated on an open one.
    per_connection = Counter((copy.member, copy.connection) for copy in copies)
    if max(per_connection.values()) > len(publication.sent):
        verdict.add("repeated on one connection", f"{receiver.name} got {publication.name} {len(copies)} times")
    spare = len(publication.sent) - 1
    for copy in copies[1:]:
        if copy.dup:
            kind = "marked"
        elif spare > 0:
            spare -= 1
            kind = "repeated"
        else:
            kind = "unmarked"
        for tally in _tallies(receiver, publication, verdict):
            setattr(tally, kind, getattr(tally, kind) + 1)


def _judge_order(history: History, receiver: Receiver, first: Iterable[Delivery], verdict: Verdict) -> None:
    latest: dict[tuple[str, str], Publication] = {}
    for delivery in first:
        publication = history.publications[delivery.name]
        place = (publication.publisher, publication.topic)
        before = latest.get(place)
        if before is not None and publication.number < before.number:
            verdict.add("order", f"{receiver.name} got {publication.name} after {before.name}")
        else:
            latest[place] = publication


def allowed_values(values: list[Retained], probe: Probe) -> set[bytes]:
    """What may be retained while a probe looks: the last acknowledged value, or one that was under way."""
    certain = max((index for index, value in enumerate(values) if value.acknowledged < probe.began), default=-1)
    allowed = {value.value for value in values[max(certain, 0) :] if value.sent <= probe.ended}
    return allowed | {b""} if certain < 0 else allowed


def _judge_retained(history: History, verdict: Verdict) -> None:
    for probe in history.probes:
        for topic, values in history.retained.items():
            if topic not in probe.seen and not probe.whole:
                continue
            found = probe.seen.get(topic, b"")
            allowed = allowed_values(values, probe)
            if found not in allowed:
                verdict.add("retained", f"{topic} held {found!r} instead of {' or '.join(map(repr, sorted(allowed)))}")


def _judge_wills(history: History, verdict: Verdict) -> None:
    for will in history.wills:
        times = history.willed[will.name]
        if will.due and not times:
            verdict.add("will missing", f"{will.name} ({will.deaths})")
        if not will.due and times:
            verdict.add("will unwanted", f"{will.name} ({will.deaths})")
        verdict.wills_repeated += max(times - 1, 0)
