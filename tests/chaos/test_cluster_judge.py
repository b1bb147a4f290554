"""The judge of clusters is judged: ledgers with one fault each, and the verdict that each must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.chaos.cluster_judge import Arrival, Ledger, judge
from tests.chaos.judge import NEVER, Delivery, Probe, Publication, Retained, Will, Window


@dataclass(frozen=True)
class Gap:
    """A store that has forgotten one home, in one interval."""

    home: str | bytes
    began: float
    ended: float

    def concerns(self, home: str | bytes, began: float, ended: float) -> bool:
        return home == self.home and began <= self.ended and self.began <= ended


def published(ledger: Ledger, number: int, qos: int, *, end: float = 0.5) -> Publication:
    """One message of `p`, sent at its number and acknowledged half a second later."""
    done = number + end
    publication = Publication(f"p:{number}", "p", f"t/q{qos}", number, qos, [float(number)], done, done)
    ledger.publications[publication.name] = publication
    return publication


def delivered(ledger: Ledger, name: str, *, to: str = "r", qos: int = 1, connection: int = 1, at: float = -1.0) -> None:
    into = ledger.receiver(to).deliveries
    publication = ledger.publications[name]
    when = publication.sent[0] + 0.4 if at < 0 else at
    into.append(Delivery(name, publication.topic, qos, False, connection, when, to))


def sound() -> Ledger:
    """Twenty messages at each of QoS 1 and 2; `r` has them all, `s` those of its first and its third connection."""
    ledger = Ledger()
    ledger.slack = 5.0
    ledger.receiver("r").windows.append(Window("t/#", 2, asked=0.0, granted=0.1))
    live = {1: (0.0, 12.0), 2: (20.0, 21.0), 3: (30.0, NEVER)}
    for number, (came, gone) in live.items():
        ledger.receiver(f"s#{number}").windows.append(Window("t/#", 2, came, came + 0.1, gone - 5.0, gone))
    for number in range(1, 41):
        qos = 1 + number % 2
        publication = published(ledger, number, qos)
        delivered(ledger, publication.name, qos=qos)
        for connection, (came, gone) in live.items():
            if came <= number < gone:
                delivered(ledger, publication.name, to=f"s#{connection}", qos=qos)
    toggler = ledger.receiver("toggler")
    for began in (4.0, 8.0, 12.0):
        toggler.windows.append(Window("t/q1", 1, began - 0.2, began - 0.1, began + 1.9, began + 1.95))
        delivered(ledger, f"p:{began:.0f}", to="toggler")
    values = [Publication(f"k:{number}", "k", "kept", number, 1, [at], at + 0.1, at + 0.1) for number, at in
              enumerate((1.0, 2.0, 20.0))]  # fmt: skip
    ledger.retained["kept"] = [Retained(b"%d" % number, value) for number, value in enumerate(values)]
    ledger.probes += [Probe(3.0, 3.2, {"kept": b"0"}), Probe(21.0, 22.0, {"kept": b"1"})]
    ledger.probes += [Probe(23.0, 24.0, {"kept": b"2"}), Probe(NEVER, NEVER, {"kept": b"2"})]
    ledger.wills = [Will("w", due=True, deaths="cut"), Will("v", due=False, deaths="back")]
    ledger.willed["w"] = 1
    ledger.arrivals.append(Arrival("kill", "one", sent=5.0, arrived=6.0))
    return ledger


def without(ledger: Ledger, receiver: str, name: str) -> None:
    into = ledger.receivers[receiver]
    into.deliveries = [each for each in into.deliveries if each.name != name]


def swap(ledger: Ledger) -> None:
    deliveries = ledger.receivers["r"].deliveries
    deliveries[4], deliveries[6] = deliveries[6], deliveries[4]


def unsubscribed(ledger: Ledger) -> None:
    delivered(ledger, "p:10", to="toggler")


def unanswered(ledger: Ledger) -> None:
    publication = published(ledger, 50, 1)
    publication.acknowledged = publication.completed = NEVER


def unwritten(ledger: Ledger) -> None:
    delivered(ledger, "p:5", qos=2)
    ledger.receivers["r"].deliveries[-1].name = "nobody's"


FAULTS: list[tuple[str, Callable[[Ledger], object]]] = [
    ("lost", lambda ledger: without(ledger, "r", "p:7")),
    ("lost", lambda ledger: without(ledger, "s#1", "p:3")),
    ("lost", lambda ledger: without(ledger, "s#3", "p:35")),
    ("lost", lambda ledger: without(ledger, "toggler", "p:8")),
    ("QoS 2 twice", lambda ledger: delivered(ledger, "p:3", qos=2, connection=2, at=9.0)),
    ("repeated on one connection", lambda ledger: delivered(ledger, "p:4", at=9.0)),
    ("order", swap),
    ("unwanted", unsubscribed),
    ("unanswered", unanswered),
    ("invented", unwritten),
    ("wrong QoS", lambda ledger: delivered(ledger, "p:3", qos=1, connection=2)),
    ("retained", lambda ledger: ledger.probes.append(Probe(9.0, 9.5, {"kept": b"0"}))),
    ("retained", lambda ledger: ledger.probes.append(Probe(9.0, 9.5, {}))),
    ("retained", lambda ledger: ledger.probes.append(Probe(NEVER, NEVER, {"kept": b"1"}))),
    ("will missing", lambda ledger: ledger.willed.clear()),
    ("will unwanted", lambda ledger: ledger.willed.update(["v"])),
    ("stuck", lambda ledger: ledger.arrivals.append(Arrival("kill", "one", 7.0, missing="r"))),
    ("fence", lambda ledger: ledger.violations.append("cell 3: after its fence")),
    ("session forgotten", lambda ledger: ledger.forgotten_sessions.append(("r", 5.0, "r, connection 2"))),
    ("accused", lambda ledger: ledger.odd("accused", "r was sent away with 0x82")),
]


def test_all_is_well() -> None:
    verdict = judge(sound())
    assert verdict.passed, verdict.told()
    assert {1: 20, 2: 20} == dict(verdict.acknowledged)
    assert (40 + 6 + 10 + 3, 1.0, 4) == (verdict.due, verdict.slowest, verdict.looks)


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(FAULTS)])
def test_what_is_wrong_is_found(kind: str, fault: Callable[[Ledger], object]) -> None:
    ledger = sound()
    fault(ledger)
    verdict = judge(ledger)
    assert verdict.count(kind) == 1, verdict.told()


def test_what_is_no_fault() -> None:
    """A repetition at QoS 1, what a live receiver was losing when it was lost, and a will that came twice."""
    ledger = sound()
    delivered(ledger, "p:4", connection=2, at=9.0)
    without(ledger, "s#1", "p:7")
    ledger.willed["w"] += 1
    verdict = judge(ledger)
    assert verdict.passed, verdict.told()
    assert (1, 1) == (verdict.duplicated, verdict.wills_repeated)


@pytest.mark.parametrize(
    ("kind", "fault", "home"),
    [
        ("lost", FAULTS[0][1], "client:r"),
        ("QoS 2 twice", FAULTS[4][1], "client:r"),
        ("QoS 2 twice", FAULTS[4][1], "client:p"),
        ("order", swap, "client:r"),
        ("unwanted", unsubscribed, "client:toggler"),
        ("retained", FAULTS[11][1], "kept"),
        ("session forgotten", FAULTS[18][1], "client:r"),
        ("will missing", FAULTS[14][1], "client:w"),
    ],
)
def test_a_store_that_forgets_excuses_what_it_held_and_nothing_else(
    kind: str, fault: Callable[[Ledger], object], home: str
) -> None:
    for gap, excused in ((Gap(home, 0.0, 12.0), True), (Gap("client:other", 0.0, 12.0), False)):
        ledger = sound()
        fault(ledger)
        ledger.lapses = [gap]
        verdict = judge(ledger)
        assert verdict.passed is excused, (gap, verdict.told())
        assert verdict.excused[kind] == excused
    if home.startswith("client:") and kind not in ("will missing", "session forgotten"):
        ledger = sound()
        fault(ledger)
        ledger.lapses = [Gap(home, 45.0, 50.0)]
        assert not judge(ledger).passed, "another time"


def test_a_payload_that_was_forgotten_is_missed_by_all_its_receivers() -> None:
    """It lies in a cell of its own. What was sent at another time, or is another one, is not excused."""
    for lapses, passed in (([Gap(b"digest", 9.0, 12.0)], True), ([Gap(b"digest", 20.0, 21.0)], False), ([], False)):
        ledger = sound()
        ledger.publications["p:10"].payload = b"digest"
        for receiver in ("r", "s#1"):
            without(ledger, receiver, "p:10")
        ledger.lapses = lapses
        verdict = judge(ledger)
        assert passed is verdict.passed and passed == verdict.excused["lost"]


def test_what_began_before_a_subscription_has_no_order() -> None:
    """The second of two messages came when the subscription was just there, the first when it was sent again."""
    for sent, passed in ((9.0, True), (11.0, False)):
        ledger = sound()
        ledger.receiver("new").windows.append(Window("t/q1", 1, 10.0, 10.1))
        for number in (12, 14, 10):
            delivered(ledger, f"p:{number}", to="new", at=20.0)
        ledger.publications["p:10"].sent[:] = [sent, 15.0]
        ledger.publications["p:10"].completed = ledger.publications["p:10"].acknowledged = 16.0
        without(ledger, "r", "p:10")
        without(ledger, "s#1", "p:10")
        without(ledger, "toggler", "p:10")
        delivered(ledger, "p:10", to="r", at=15.5)
        ledger.receivers["r"].deliveries.sort(key=lambda each: ledger.publications[each.name].number)
        for number in range(16, 41, 2):
            delivered(ledger, f"p:{number}", to="new")
        verdict = judge(ledger)
        assert passed is not bool(verdict.count("order")), verdict.told()


def test_what_goes_with_a_member_is_counted_for_live_receivers_only() -> None:
    """It was acknowledged by a member that ended soon after, and by none that lived on."""
    for when, counted in ((8.0, True), (20.0, False)):
        ledger = sound()
        for publication in ledger.publications.values():
            publication.through.append("there:1")
        ledger.deaths = [("there:1", when), ("elsewhere:1", 8.0)]
        without(ledger, "s#1", "p:5")
        verdict = judge(ledger)
        assert (counted, 1 - counted) == (bool(verdict.untold), verdict.count("lost"))
        without(ledger, "r", "p:5")
        assert judge(ledger).count("lost") == 2 - counted


def test_live_receivers_of_a_publisher_that_has_moved_are_not_judged_by_order() -> None:
    for places, judged in ((("a", "b"), False), (("a", "a"), True)):
        ledger = sound()
        for number, publication in enumerate(ledger.publications.values()):
            publication.through.append(places[number % 4 // 2])
        deliveries = ledger.receivers["s#1"].deliveries
        deliveries[1], deliveries[3] = deliveries[3], deliveries[1]
        verdict = judge(ledger)
        assert (judged, not judged) == (bool(verdict.count("order")), bool(verdict.reordered)), verdict.told()


@pytest.mark.parametrize(("qos", "connection", "judged"), [(0, 2, False), (0, 1, True), (1, 2, True)])
def test_order_of_qos_0_is_not_judged_where_a_receiver_has_moved(qos: int, connection: int, *, judged: bool) -> None:
    """What waited for a broken link comes to a receiver that is at its end by then."""
    ledger = sound()
    for number in (50, 51):
        published(ledger, number, qos)
    delivered(ledger, "p:51", qos=qos, at=51.1)
    delivered(ledger, "p:50", qos=qos, connection=connection, at=52.0)
    verdict = judge(ledger)
    assert (judged, not judged) == (bool(verdict.count("order")), bool(verdict.reordered)), verdict.told()


def test_a_forgotten_session_ends_its_subscriptions_when_the_store_forgot_it() -> None:
    """What came between that and the new subscription is not owed; what came before it is."""
    for missing, lost in (("p:25", 0), ("p:15", 1), ("p:35", 1)):
        ledger = sound()
        ledger.clock = lambda: 30.0
        ledger.lapses = [Gap("client:r", 20.0, 21.0)]
        ledger.forgotten("r", "r, connection 2")
        again = ledger.subscribes_again(ledger.receivers["r"].windows[0])
        again.granted = 30.1
        without(ledger, "r", missing)
        verdict = judge(ledger)
        assert lost == verdict.count("lost"), verdict.told()
        assert 1 == verdict.excused["session forgotten"]


@pytest.mark.timeout(120)
def test_no_pair_of_subscriptions_and_messages_is_looked_at_without_need() -> None:
    """Many short subscriptions and many messages; minutes, if the judge compares all with all."""
    ledger, count = Ledger(), 50_000
    receiver = ledger.receiver("toggler")
    for number in range(count):
        delivered(ledger, published(ledger, number, 1).name, to="toggler")
        receiver.windows.append(Window("t/q1", 1, number - 0.2, number - 0.1, number + 0.8, number + 0.9))
    verdict = judge(ledger)
    assert verdict.passed, verdict.told()
    assert verdict.due == count
