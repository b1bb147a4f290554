"""Whole members under everything that can happen to them, in virtual time, against what a cluster promises.

Real members, links and brokers on a store of cells (`tests/support/cluster_world.py`): clients come, move, leave
connections behind, publish and are slow to answer; processes stand still between any two of their callbacks, are
killed, leave, start again; ways are cut, in one direction too, or slow; the store is away, and its cells fail over and
forget; clocks are set. When all is well again, what `model_checker` has must hold.

That the checker notices a broken cluster is shown by switching off one protection at a time: in runs that lead to
the point, and, in the long form, in runs that nobody leads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from motorcade.broker.attachments import Attachments
from motorcade.broker.relay import Relay
from motorcade.cluster.member import ClusterMember
from motorcade.cluster.membership import steward
from motorcade.storage.homes import MEMBERS
from motorcade.storage.memory import MemoryMailboxes
from tests.support.cell_store import Cell
from tests.support.cluster_world import CELLS, LEASE, STORE, VIEW_LEASE
from tests.unit.cluster.model_clients import BrokenPromiseError, ModelClient
from tests.unit.cluster.model_machine import CLIENTS, ClusterMachine

#: A run is long, and what it has found is found again by repeating its steps: nothing is made shorter.
FEW = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
)
MANY = settings(FEW, max_examples=2000, stateful_step_count=30, derandomize=False)

TestCluster = ClusterMachine.TestCase
TestCluster.settings = FEW

SWITCHES = ("home-fence", "member-fence", "drain", "view-lease", "look-again")


@contextmanager
def without(what: str) -> Iterator[None]:
    """Do without one protection, as `tests/chaos/cluster_node.py` does."""
    switches = {
        "home-fence": (MemoryMailboxes, "check", lambda *_: None),
        "member-fence": (Cell, "member_fences", False),
        "drain": (Attachments, "drained", lambda *_: None),
        "view-lease": (ClusterMember, "holds", property(lambda _: True)),
        "look-again": (Relay, "look_again", lambda _: None),
    }
    if not what:
        yield
        return
    owner, name, part = switches[what]
    assert name in vars(owner), f"{owner.__name__} has no {name} any more"
    with patch.object(owner, name, part):
        yield


@pytest.mark.long
def test_thousands_of_runs_break_no_promise() -> None:
    """The same as the short form, thousands of times."""
    run_state_machine_as_test(ClusterMachine, settings=MANY)


@pytest.mark.long
@pytest.mark.parametrize("what", SWITCHES)
def test_a_cluster_without_a_protection_is_found_by_itself(what: str) -> None:
    """Runs that nobody leads break a promise when a protection is switched off."""
    with without(what), pytest.raises(BrokenPromiseError):
        run_state_machine_as_test(ClusterMachine, settings=MANY)


# -- runs that lead to a point; each of them is well with the protection, and breaks a promise without


@contextmanager
def led(count: int, what: str) -> Iterator[ClusterMachine]:
    """Yield a run; in the end it comes to rest, and every promise is checked."""
    machine = ClusterMachine()
    with without(what):
        machine.set_up(count, CELLS)
        try:
            yield machine
            machine.come_to_rest()
        finally:
            assert machine.world is not None
            machine.world.__exit__()


Lead = Callable[[ClusterMachine], None]


def come(run: ClusterMachine, client: int, host: int, *, durable: bool = True, seconds: float = 0.02) -> ModelClient:
    one = run.clients[client]
    one.walk_away()
    one.connect(run.host(host), durable=durable)
    run.go_on(seconds)
    return one


def late_decision(run: ClusterMachine) -> None:
    """A member stands still with a SUBSCRIBE in its socket, while its client comes to another one."""
    client = come(run, 0, 0)
    run.host(0).stop()
    client.subscribe("t/a", 1)
    come(run, 0, 1, seconds=1.5)
    assert client.ready
    run.host(0).go_on()
    run.go_on(0.5)


def late_write(run: ClusterMachine) -> None:
    """A member that was killed has left a retained message on its way to the store, which arrives after its fence."""
    client = come(run, 0, 0)
    run.world.cut("n1", STORE)
    client.publish("r/c0", 1, retain=True)
    run.go_on(0.1)
    run.host(0).kill()
    run.go_on(LEASE + 2.0)
    come(run, 0, 1, seconds=0.5)
    client.publish("r/c0", 1, retain=True)
    run.go_on(0.5)
    run.world.heal("n1", STORE)
    run.go_on(0.5)


def late_publish(run: ClusterMachine) -> None:
    """A client moves, and what it has published at the member before takes its time."""
    client = come(run, 0, 0)
    run.world.delays["n1", STORE] = 1.2
    client.publish("r/c0", 1, retain=True)
    run.go_on(0.01)
    come(run, 0, 1, seconds=0.0)
    run.world.until(lambda: client.ready, 2.0)
    client.publish("r/c0", 1, retain=True)
    run.go_on(3.0)


def unknown_subscriber(run: ClusterMachine) -> None:
    """A member that hears of no other one publishes after a SUBACK that could not wait for it."""
    publisher, car = come(run, 0, 0, durable=False), come(run, 1, 1, durable=False)
    for cell in run.world.cells.cells:
        cell.away = True
    run.cut(0, 1, "both", 0.1)
    window = car.subscribe("t/a", 1)
    run.go_on(VIEW_LEASE * 1.1)
    assert window is not None and window.granted < run.world.now
    publisher.publish("t/a", 1)
    run.go_on(0.5)


def lost_hint(run: ClusterMachine) -> None:
    """A member dies when a message is stored, and before it could tell of it."""
    publisher, car = come(run, 0, 0, durable=False), come(run, 1, 1)
    car.subscribe("t/a", 1)
    run.go_on(0.1)
    run.world.cut("n1", "n2")
    sent = publisher.publish("t/a", 1)
    run.go_on(0.1)
    assert sent is not None and sent.acknowledged < run.world.now
    run.host(0).kill()
    run.go_on(0.1)


LEADS: dict[str, Lead] = {
    "home-fence": late_decision,
    "member-fence": late_write,
    "drain": late_publish,
    "view-lease": unknown_subscriber,
    "look-again": lost_hint,
}


@pytest.mark.parametrize("what", SWITCHES)
def test_a_protection_keeps_its_promise(what: str) -> None:
    """The run that leads to the point ends well."""
    with led(2, "") as run:
        LEADS[what](run)


@pytest.mark.parametrize("what", SWITCHES)
def test_a_cluster_without_a_protection_is_found(what: str) -> None:
    """The same run breaks a promise without it."""
    with pytest.raises(BrokenPromiseError), led(2, what) as run:
        LEADS[what](run)


# -- what the model has found


def test_a_member_hears_of_subscriptions_whose_numbers_were_given_before() -> None:
    """A fail-over has forgotten notes; those that come in their place are new to a member that had the client then."""
    with led(2, "") as run:
        car, publisher = come(run, 0, 1), come(run, 1, 1, durable=False)
        for filter_ in ("a", "b", "c"):
            car.subscribe(filter_, 1)
        run.go_on(0.1)
        run.world.cells.forget(run.world.cells.of("client:c0").number, 2, run.world.now)
        run.go_on(0.6)
        car.break_off()
        come(run, 0, 0, seconds=0.5)
        window = car.subscribe("t/a", 1)
        run.go_on(0.5)
        sent = publisher.publish("t/a", 1)
        run.go_on(0.5)
        assert window is not None and sent is not None
        assert window.granted < sent.sent[0] <= sent.acknowledged < run.world.now
        assert car.life is not None
        assert [sent.name] == [arrival.name for arrival in car.life.arrivals]


def test_a_member_whose_record_is_gone_may_still_rely_on_its_view() -> None:
    """A member misses that another one was found dead, and finds no record of it: that one has not left by itself.

    It is only cut off from the store, and answers publishers as long as its view holds.
    """
    with led(3, "") as run:
        run.host(0).kill()
        run.host(0).start()
        assert run.world.until(run.world.whole, 2 * LEASE)
        feeds = [run.world.cells.of(f"client:c{number}").number for number in range(CLIENTS)]
        number = next(number for number in range(CLIENTS) if steward(["n1~4", "n2~2"], feeds[number]) == "n2~2")
        publisher, car = come(run, number, 2, durable=False), come(run, (number + 1) % CLIENTS, 0, durable=False)
        run.cut_from_store(2, "both", LEASE - 0.6)
        run.host(0).stop()
        records = run.world.cells.of(MEMBERS).engine.records
        assert run.world.until(lambda: "n3~3" not in records.collections["member"], LEASE)
        run.host(0).go_on()
        run.go_on(0.6)
        window = car.subscribe("t/a", 1)
        run.go_on(0.1)
        publisher.publish("t/a", 1)
        run.go_on(0.1)
        assert window is not None and window.granted > run.world.now, "it is waited for"


def test_a_client_whose_mailbox_is_forgotten_comes_again() -> None:
    """A fail-over has forgotten the mailbox of a client, and still knows where it is attached."""
    with led(2, "") as run:
        car, publisher = come(run, 0, 0), come(run, 1, 1, durable=False)
        cell = run.world.cells.of("client:c0")
        attached = max(place for place, call in enumerate(cell.log) if call.works[0].what.startswith("attach"))
        run.world.cells.forget(cell.number, len(cell.log) - 1 - attached, run.world.now)
        run.go_on(2.0)
        assert not car.ready
        come(run, 0, 0)
        car.subscribe("t/a", 1)
        run.go_on(0.2)
        sent = publisher.publish("t/a", 1)
        run.go_on(0.5)
        assert sent is not None and car.life is not None
        assert [sent.name] == [arrival.name for arrival in car.life.arrivals]
