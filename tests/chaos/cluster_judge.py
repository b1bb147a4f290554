"""What clients of a cluster wrote down, and what has to follow from it. No clients and no members in here.

    Ledger     the history that all clients write to, with what the store has forgotten and what became of probes
    judge()    Ledger -> Verdict; the time it takes grows with the deliveries that are owed

Rules 1 to 5 of `judge` hold, and these:

Rule 6: a receiver without a session is another receiver on each connection. What was acknowledged so long before its
        end that the members must have known of each other's deaths is owed to it.
Rule 7: a store that forgets takes what was under way about the homes of the cells that were forgotten, at that time
        (`Lapse`), and payloads that lie in such a cell, for all their receivers. All of it is counted as excused, by
        kind.
Rule 8: a look at retained messages sees the last value that was acknowledged a while before; the last looks, at the
        end, see the last one.
Rule 9: what a publisher says at two members comes to live receivers by two links, of which one may be slow: a publisher
        that moves is answered when a member has not confirmed in time (`cluster.patience`). There order is counted, not
        judged. Durable receivers get it in the order of their mailbox. QoS 0 is in no mailbox: what waits for a broken
        link comes to a receiver that has moved to its end meanwhile, behind what it got where it was before.
        Nor is it judged for what was sent before the SUBACK: the subscription may have come between two messages, and
        then the first of them comes only when its publisher repeats it.
Rule 10: a session that was forgotten ends its subscriptions: when the store forgot it, or, if no store did, when its
        client found out, which is a finding.
Rule 11: a member that another one has not answered in time acknowledges all the same, and delivers when it is heard of
        again (`cluster.patience`). One that ends before that takes it along. For live receivers this is counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.chaos.findings import Findings
from tests.chaos.judge import (
    NEVER,
    Delivery,
    History,
    Probe,
    Publication,
    Receiver,
    Window,
    allowed_values,
    matches,
)

CLIENT = "client:"  #: what the home of a client begins with


class Forgotten(Protocol):
    """What a store has forgotten."""

    @property
    def began(self) -> float:
        """When that time began."""

    def concerns(self, home: str | bytes, began: float, ended: float) -> bool:
        """Whether something about this home, which began and ended then, may be gone."""


@dataclass
class Arrival:
    """A message from one member to all receivers after a fault, and when the last of them had it."""

    after: str  #: the faults
    member: str
    sent: float
    arrived: float = NEVER
    missing: str = ""  #: those who did not get it


class Ledger(History):
    """Everything that was written down in one run."""

    def __init__(self) -> None:
        super().__init__()
        self.lapses: Sequence[Forgotten] = []
        self.members_of: dict[str, list[str]] = {}  #: clients of a shared subscription, by receiver
        self.homes: dict[str, list[str]] = {}  #: by receiver, of one whose loss is not that of its clients' homes
        self.arrivals: list[Arrival] = []
        self.violations: list[str] = []  #: of fences, from the traces of the store
        self.slack = 0.0  #: seconds after which a look sees what was acknowledged
        self.forgotten_sessions: list[tuple[str, float, str]] = []  #: client, when, words
        self.deaths: list[tuple[str, float]] = []  #: addresses of members that have ended, and when
        self.broken: list[tuple[Receiver, Window, float]] = []  #: subscriptions that went with their sessions, and when

    def forgotten(self, client: str, words: str) -> None:
        self.forgotten_sessions.append((client, self.clock(), f"{words} at {self.clock():.3f}"))

    def subscribes_again(self, window: Window) -> Window:
        again, now = Window(window.filter, window.qos, asked=self.clock()), self.clock()
        for receiver in self.receivers.values():
            if any(each is window for each in receiver.windows):
                receiver.windows.append(again)
                self.broken.append((receiver, window, now))
        return again

    def died_after(self, publication: Publication) -> bool:
        """Whether the member that has acknowledged a message ended soon after that."""
        told = publication.acknowledged
        return any(
            place == publication.through[-1] and told <= when <= told + self.slack for place, when in self.deaths
        )

    def lacks_payload(self, publication: Publication) -> bool:
        """Whether a store may have forgotten its payload, which lies in a cell of its own for all receivers."""
        return bool(publication.payload) and any(
            lapse.concerns(publication.payload, publication.sent[0], publication.completed) for lapse in self.lapses
        )

    def excuses(self, home: str, began: float, ended: float) -> bool:
        return any(lapse.concerns(home, began, ended) for lapse in self.lapses)


@dataclass
class Verdict(Findings):
    """The outcome of a run."""

    acknowledged: Counter[int] = field(default_factory=Counter)  #: by QoS
    due: int = 0
    delivered: int = 0
    duplicated: int = 0  #: at QoS 1, on another connection or because the publisher had to repeat it
    unanswered: int = 0
    refused: Counter[int] = field(default_factory=Counter)  #: reason code -> publications
    excused: Counter[str] = field(default_factory=Counter)  #: what a store that forgets has cost, by kind
    wills: int = 0
    wills_repeated: int = 0
    reordered: int = 0  #: of a publisher that has moved, for live receivers, or QoS 0 of one that has (rule 9)
    untold: int = 0  #: acknowledged, not confirmed in time, and gone with its member, for live receivers (rule 11)
    looks: int = 0
    reconnects: int = 0
    slowest: float = 0.0  #: seconds until the slowest probe was everywhere

    def blame(self, kind: str, words: str, *, excused: bool) -> None:
        if excused:
            self.excused[kind] += 1
        else:
            self.add(kind, words)


class Timeline:
    """Publications by topic and by the time of their first byte: those of a subscription are found among few."""

    def __init__(self, publications: Iterable[Publication]) -> None:
        self._all = sorted((each for each in publications if each.sent), key=lambda each: each.sent[0])
        self._times = [each.sent[0] for each in self._all]
        self._by_topic: dict[str, tuple[list[Publication], list[float]]] = defaultdict(lambda: ([], []))
        for each in self._all:
            publications, times = self._by_topic[each.topic]
            publications.append(each)
            times.append(each.sent[0])

    def owed(self, window: Window) -> Iterable[Publication]:
        """What was sent after SUBACK, and acknowledged before the subscription began to end."""
        publications, times = self._all, self._times
        if "+" not in window.filter and "#" not in window.filter and not window.filter.startswith("$"):
            publications, times = self._by_topic[window.filter]
        for each in publications[bisect_right(times, window.granted) : bisect_left(times, window.leaving)]:
            if (
                each.is_acknowledged
                and (window.leaving == NEVER or each.completed < window.leaving)
                and matches(window.filter, each.topic)
            ):
                yield each


def judge(ledger: Ledger) -> Verdict:
    """Compare what was promised with what came."""
    verdict = Verdict(reconnects=ledger.reconnects, looks=len(ledger.probes), wills=len(ledger.wills))
    for receiver, window, when in ledger.broken:
        homes = homes_of(ledger, receiver)
        lapses = [each for each in ledger.lapses if any(each.concerns(home, 0.0, when) for home in homes)]
        window.left = min(window.left, when)
        window.leaving = min(window.leaving, max((each.began for each in lapses), default=when))
    for kind, words in ledger.oddities:
        verdict.add(kind, words)
    for client, when, words in ledger.forgotten_sessions:
        verdict.blame("session forgotten", words, excused=ledger.excuses(CLIENT + client, 0.0, when))
    for words in ledger.violations:
        verdict.add("fence", words)
    for publication in ledger.sent():
        verdict.acknowledged[publication.qos] += publication.is_acknowledged
        if publication.refused:
            verdict.refused[publication.refused] += 1
        if publication.is_open:
            verdict.unanswered += 1
            verdict.add("unanswered", f"{publication.name}: sent {len(publication.sent)} times, never acknowledged")
    timeline = Timeline(ledger.sent())
    for receiver in ledger.receivers.values():
        _judge_receiver(ledger, timeline, receiver, verdict)
    _judge_retained(ledger, verdict)
    _judge_wills(ledger, verdict)
    _judge_progress(ledger, verdict)
    return verdict


def homes_of(ledger: Ledger, receiver: Receiver) -> list[str]:
    """The homes whose loss is a loss of this receiver."""
    if receiver.name in ledger.homes:
        return ledger.homes[receiver.name]
    return [CLIENT + name for name in ledger.members_of.get(receiver.name, [receiver.name.partition("#")[0]])]


def _judge_receiver(ledger: Ledger, timeline: Timeline, receiver: Receiver, verdict: Verdict) -> None:
    homes = homes_of(ledger, receiver)
    copies: dict[str, list[Delivery]] = {}
    for delivery in receiver.deliveries:
        if delivery.name in ledger.publications:
            copies.setdefault(delivery.name, []).append(delivery)
        else:
            verdict.add("invented", f"{receiver.name} got {delivery.name!r}, which nobody sent")
    owed: dict[str, tuple[Publication, Window]] = {}
    for window in receiver.windows:
        for publication in timeline.owed(window):
            owed.setdefault(publication.name, (publication, window))
    verdict.due += len(owed)
    for name, (publication, window) in owed.items():
        if name in copies:
            continue
        excused = any(
            ledger.excuses(home, publication.sent[0], publication.completed)
            or ledger.excuses(home, window.asked, window.granted)
            for home in homes
        ) or ledger.lacks_payload(publication)
        if "#" in receiver.name and publication.through and ledger.died_after(publication):
            verdict.untold += 1
            continue
        words = f"{receiver.name} never got {name} (QoS {publication.qos}, sent {publication.sent[0]:.3f})"
        verdict.blame("lost", words, excused=excused)
    windows = _by_filter(receiver)
    qos_of = {pattern: {window.qos for window in each} for pattern, each in windows.items()}
    for name, found in copies.items():
        publication = ledger.publications[name]
        verdict.delivered += 1
        granted = {qos for pattern, each in qos_of.items() if matches(pattern, publication.topic) for qos in each}
        if any(copy.qos not in {min(qos, publication.qos) for qos in granted} for copy in found):
            verdict.add("wrong QoS", f"{receiver.name} got {name} at QoS {[copy.qos for copy in found]}")
        _judge_copies(ledger, receiver, publication, found, homes, verdict)
        late = _unwanted(windows, publication, ledger.slack if "#" in receiver.name else 0.0)
        if late is not None:
            excused = any(ledger.excuses(home, late.leaving, late.left) for home in homes)
            words = f"{receiver.name} got {name} after its UNSUBACK"
            verdict.blame("unwanted", words, excused=excused)
    if not receiver.shared:
        first = (found[0] for found in copies.values())
        _judge_order(ledger, receiver, windows, first, homes, verdict)


def _by_filter(receiver: Receiver) -> dict[str, list[Window]]:
    """The subscriptions by their filter, in the order in which they were asked for."""
    found: dict[str, list[Window]] = defaultdict(list)
    for window in receiver.windows:
        found[window.filter].append(window)
    return found


def _unwanted(windows: dict[str, list[Window]], publication: Publication, slack: float) -> Window | None:
    """The subscription that was over before the message was sent, if there was none that may have caught it.

    `slack`: seconds that it may have been under way to another member after its publisher was answered.
    """
    over = None
    done = publication.completed + slack if publication.qos else NEVER  # nobody tells when one of QoS 0 was taken
    for pattern, found in windows.items():
        if not matches(pattern, publication.topic):
            continue
        # The last one that was asked for before the message was done, and the ones before, which may overlap with it.
        last = bisect_right(found, done, key=lambda window: window.asked)
        for window in reversed(found[max(last - 2, 0) : last]):
            if publication.sent[0] <= window.left:
                return None
            over = over or window
        if last == 0:
            over = over or found[0]
    return over


def _judge_copies(
    ledger: Ledger,
    receiver: Receiver,
    publication: Publication,
    copies: list[Delivery],
    homes: list[str],
    verdict: Verdict,
) -> None:
    """All deliveries of one message to one receiver, in the order in which they came."""
    name = publication.name
    if len(copies) == 1:
        return
    verdict.duplicated += len(copies) - 1
    if copies[0].qos == 2:
        where = ", ".join(f"{copy.member}#{copy.connection} at {copy.at:.3f}" for copy in copies)
        excused = any(ledger.excuses(home, copies[0].at, copies[-1].at) for home in homes) or ledger.excuses(
            CLIENT + publication.publisher, publication.sent[0], publication.completed
        )
        verdict.blame("QoS 2 twice", f"{receiver.name} got {name} {len(copies)} times ({where})", excused=excused)
    # One copy for each time the publisher sent it may come on a connection; more would be repeated on an open one.
    most = max(Counter((copy.member, copy.connection) for copy in copies).values())
    if copies[0].qos == 1 and most > len(publication.sent):
        excused = any(ledger.excuses(home, copies[0].at, copies[-1].at) for home in homes)
        words = f"{receiver.name} got {name} {len(copies)} times"
        verdict.blame("repeated on one connection", words, excused=excused)


def _began_within(windows: dict[str, list[Window]], publication: Publication) -> bool:
    """Whether the message was sent for the first time when a subscription was granted, or later."""
    sent = publication.sent[0]
    for pattern, found in windows.items():
        if matches(pattern, publication.topic):
            last = bisect_right(found, sent, key=lambda window: window.asked)
            if any(window.granted < sent <= window.left for window in found[max(last - 2, 0) : last]):
                return True
    return False


def _judge_order(
    ledger: Ledger,
    receiver: Receiver,
    windows: dict[str, list[Window]],
    first: Iterable[Delivery],
    homes: list[str],
    verdict: Verdict,
) -> None:
    latest: dict[tuple[str, str], tuple[Publication, int]] = {}  # and the connection on which it came
    for delivery in first:
        publication = ledger.publications[delivery.name]
        if not _began_within(windows, publication):
            continue
        place = (publication.publisher, publication.topic)
        before, connection = latest.get(place, (publication, delivery.connection))
        if publication.number < before.number:
            has_moved = "#" in receiver.name and len({*publication.through, *before.through}) > 1
            if has_moved or (not publication.qos and delivery.connection != connection):
                verdict.reordered += 1
                continue
            everybody = [*homes, CLIENT + publication.publisher]
            excused = any(ledger.excuses(home, publication.sent[0], delivery.at) for home in everybody)
            words = f"{receiver.name} got {publication.name} after {before.name}"
            verdict.blame("order", words, excused=excused)
        else:
            latest[place] = publication, delivery.connection


def _judge_retained(ledger: Ledger, verdict: Verdict) -> None:
    for number, probe in enumerate(ledger.probes):
        final = probe.began == NEVER
        seen_from = Probe(probe.began - ledger.slack, probe.ended, probe.seen) if not final else probe
        for topic, values in ledger.retained.items():
            if topic not in probe.seen and not probe.whole:
                continue
            found = probe.seen.get(topic, b"")
            allowed = allowed_values(values, seen_from)
            if found not in allowed:
                last = max(value.sent for value in values if value.sent <= probe.ended)
                wanted = " or ".join(map(repr, sorted(allowed)))
                words = f"look {number}: {topic} held {found!r} instead of {wanted}"
                verdict.blame("retained", words, excused=ledger.excuses(topic, 0.0, last))


def _judge_wills(ledger: Ledger, verdict: Verdict) -> None:
    for will in ledger.wills:
        times = ledger.willed[will.name]
        excused = ledger.excuses(CLIENT + will.name, 0.0, NEVER)
        if will.due and not times:
            verdict.blame("will missing", f"{will.name} ({will.deaths})", excused=excused)
        if not will.due and times:
            verdict.blame("will unwanted", f"{will.name} ({will.deaths})", excused=excused)
        verdict.wills_repeated += max(times - 1, 0)


def _judge_progress(ledger: Ledger, verdict: Verdict) -> None:
    for arrival in ledger.arrivals:
        if arrival.arrived == NEVER:
            words = f"after {arrival.after}: what {arrival.member} got did not reach {arrival.missing}"
            verdict.add("stuck", words)
        else:
            verdict.slowest = max(verdict.slowest, arrival.arrived - arrival.sent)
