"""Hook points: order, answers, failures, and what may be registered where."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

import pytest

from motorcade.core.errors import HookError, TopicError
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import MAX_LEVELS, POINTS, STOP, Allow, Callback, Chain, Continue, Deny, Hooks, Stop
from tests.support.tables import each_case

FOLDS = [name for name, point in POINTS.items() if point.fold]
OBSERVERS = [name for name, point in POINTS.items() if not point.fold]
ACCESS = ["client.connect", "client.authenticate", "client.authorize"]


def add(hooks: Hooks, point: str, function: Any, priority: int = 0, owner: str = "test", **more: Any) -> Callback:
    callback = Callback(function, priority, owner, **more)
    hooks.add(point, callback)
    return callback


def chain(hooks: Hooks, point: str) -> Chain:
    found: Chain | None = getattr(hooks, point.replace(".", "_"))
    assert found is not None
    return found


async def fold(hooks: Hooks, point: str, *args: object, acc: object) -> Any:
    result = chain(hooks, point).fold(*args, acc=acc)
    return await result if inspect.isawaitable(result) else result


# --- order and answers --------------------------------------------------------------------------------------------


def test_a_point_without_callbacks_is_none() -> None:
    """That is all the broker looks at."""
    hooks = Hooks()
    assert all(getattr(hooks, name.replace(".", "_")) is None for name in POINTS)
    callback = add(hooks, "message.publish", lambda _client, _message: None)
    assert hooks.message_publish is not None
    assert hooks.remove("message.publish", callback.function)
    assert hooks.message_publish is None


def test_higher_priority_first_and_ties_in_order_of_registration() -> None:
    hooks = Hooks()
    seen: list[str] = []
    for name, priority in (("a", 0), ("b", 10), ("c", 0), ("d", -5), ("e", 10)):
        add(hooks, "client.connected", functools.partial(lambda n, _client: seen.append(n), name), priority)
    chain(hooks, "client.connected").notify(None)
    assert ["b", "e", "a", "c", "d"] == seen


@each_case("waiting", [False, True])
@each_case(
    ("answer", "result", "second_called_with"),
    [
        (None, "start2", "start"),
        (Continue("new"), "new2", "new"),
        (Stop("end"), "end", None),
        (STOP, "start", None),
        (Continue(None), "None2", "None"),
    ],
)
async def test_answers_of_a_fold(waiting: bool, answer: object, result: str, second_called_with: str | None) -> None:
    """The four answers mean the same from a plain function and from a coroutine function."""
    hooks = Hooks()
    called: list[str] = []

    def plain(_client: object, _acc: object) -> object:
        return answer

    async def coroutine(_client: object, _acc: object) -> object:
        await asyncio.sleep(0)
        return answer

    def second(_client: object, acc: object) -> Continue:
        called.append(str(acc))
        return Continue(f"{acc}2")

    add(hooks, "message.publish", coroutine if waiting else plain, 1)
    add(hooks, "message.publish", second)
    assert result == await fold(hooks, "message.publish", None, acc="start")
    assert ([] if second_called_with is None else [second_called_with]) == called


async def test_plain_and_waiting_callbacks_in_one_chain_keep_their_order() -> None:
    hooks = Hooks()

    def plain(tag: str) -> Any:
        return lambda _client, acc: Continue(acc + tag)

    def waiting(tag: str) -> Any:
        async def callback(_client: object, acc: str) -> Continue:
            await asyncio.sleep(0)
            return Continue(acc + tag)

        return callback

    for index, make in enumerate((plain, waiting, plain, waiting, waiting, plain)):
        add(hooks, "message.publish", make(str(index)), -index)
    assert "012345" == await fold(hooks, "message.publish", None, acc="")


def test_a_chain_of_plain_functions_is_not_waited_for() -> None:
    """The broker's fast path depends on it."""
    hooks = Hooks()
    add(hooks, "message.publish", lambda _client, _acc: Continue(1))
    assert 1 == chain(hooks, "message.publish").fold(None, acc=0)


def test_an_observer_may_end_the_chain_and_nothing_else() -> None:
    hooks = Hooks()
    seen: list[str] = []

    def noting(word: str, answer: object) -> Any:
        def callback(_client: object) -> object:
            seen.append(word)
            return answer

        return callback

    add(hooks, "client.connected", noting("a", Stop(1)), 3)
    add(hooks, "client.connected", noting("b", STOP), 2)
    add(hooks, "client.connected", noting("c", None), 1)
    chain(hooks, "client.connected").notify(None)
    assert ["a", "b"] == seen


# --- failures -----------------------------------------------------------------------------------------------------


def raises(*_args: object) -> None:
    raise RuntimeError("broken")


async def raises_later(*_args: object) -> None:
    await asyncio.sleep(0)
    raise RuntimeError("broken")


async def hangs(*_args: object) -> None:
    await asyncio.Event().wait()


async def is_cancelled(*_args: object) -> None:
    """Waits for something of its plugin's that is cancelled, as tasks are when the plugin is unloaded."""
    work = asyncio.get_running_loop().create_future()
    work.cancel()
    await work


FAILURES = [raises, raises_later, hangs, is_cancelled]


def test_a_raising_observer_is_counted_and_skipped() -> None:
    hooks = Hooks()
    seen: list[int] = []
    broken = add(hooks, "client.connected", raises, 1)
    add(hooks, "client.connected", lambda _client: seen.append(1))
    for _ in range(3):
        chain(hooks, "client.connected").notify(None)
    assert ([1, 1, 1], 3) == (seen, broken.errors)


@each_case("failure", FAILURES)
@each_case("point", [name for name in FOLDS if name not in (*ACCESS, "message.nack")])
async def test_a_failing_fold_callback_is_counted_and_skipped(point: str, failure: Any) -> None:
    hooks = Hooks()
    broken = add(hooks, point, failure, 1, timeout=0.01)
    add(hooks, point, lambda _client, acc: Continue(acc + 1))
    assert 2 == await fold(hooks, point, None, acc=1)
    assert 1 == broken.errors


@each_case("failure", FAILURES)
@each_case("point", ACCESS)
async def test_a_failing_access_check_denies(point: str, failure: Any) -> None:
    """And nobody behind it is asked: a later callback must not undo the refusal."""
    hooks = Hooks()
    asked: list[object] = []

    def lenient(*args: object) -> Stop:
        asked.append(args)
        return Stop(True)

    broken = add(hooks, point, failure, 1, timeout=0.01)
    add(hooks, point, lenient)
    refusal = await fold(hooks, point, None, acc=None)
    assert [] == asked
    assert 1 == broken.errors
    if point == "client.connect":
        assert refusal >= 0x80
    elif point == "client.authenticate":
        assert isinstance(refusal, Deny) and refusal.reason is ReasonCode.NOT_AUTHORIZED
    else:
        assert refusal is False


@each_case("answer", [True, False, "yes", Allow(), 1])
@each_case("point", ACCESS)
def test_an_answer_of_the_wrong_kind_denies_too(point: str, answer: object) -> None:
    """A check that says True where it should say Stop(True) is broken, and a broken check lets nobody in."""
    hooks = Hooks()
    sloppy = add(hooks, point, lambda *_args: answer, 1)
    add(hooks, point, lambda *_args: Stop(True))
    refusal = chain(hooks, point).fold(None, acc=None)
    assert POINTS[point].refusal == refusal
    assert 1 == sloppy.errors


def test_an_answer_of_the_wrong_kind_elsewhere_is_counted_and_skipped() -> None:
    hooks = Hooks()
    sloppy = add(hooks, "message.publish", lambda _client, _message: "changed", 1)
    add(hooks, "message.publish", lambda _client, acc: Continue(acc + 1))
    assert 2 == chain(hooks, "message.publish").fold(None, acc=1)
    assert 1 == sloppy.errors


async def test_cancelling_the_one_who_waits_is_no_failure_of_the_callback() -> None:
    """The client went away: the chain ends, and nobody is blamed."""
    hooks = Hooks()
    callback = add(hooks, "message.publish", hangs, timeout=60)
    waiting = asyncio.ensure_future(fold(hooks, "message.publish", None, acc=1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert 0 == callback.errors


# --- registration -------------------------------------------------------------------------------------------------


def test_an_unknown_point_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HookError, match=r"message\.publishh.*message\.publish"):
        add(Hooks(), "message.publishh", raises)


@each_case("point", OBSERVERS)
def test_observers_must_be_plain_functions(point: str) -> None:
    hooks = Hooks()
    with pytest.raises(HookError, match="plain function"):
        add(hooks, point, hangs)
    with pytest.raises(HookError, match="plain function"):
        add(hooks, point, functools.partial(hangs, 1))
    assert () == hooks.lookup(point)


def test_nobody_waits_for_a_message_that_is_handed_back() -> None:
    """`message.nack` is decided between two packets, so a coroutine function would never run."""
    with pytest.raises(HookError, match="plain function"):
        add(Hooks(), "message.nack", hangs)


@each_case("more", [{"topics": ("a",)}, {"retained_only": True}])
def test_only_publish_can_be_narrowed(more: dict[str, Any]) -> None:
    for point in POINTS:
        if point != "message.publish":
            with pytest.raises(HookError, match=r"message\.publish"):
                add(Hooks(), point, raises, **more)


def test_a_broken_topic_filter_is_refused() -> None:
    hooks = Hooks()
    with pytest.raises(TopicError):
        add(hooks, "message.publish", raises, topics=("a/#/b",))
    assert hooks.message_publish is None


class Owner:
    def callback(self, *_args: object) -> None:
        """Two accesses give two objects, yet it is one callback."""


def test_the_same_callback_twice_is_refused() -> None:
    hooks, owner = Hooks(), Owner()
    add(hooks, "client.connected", owner.callback)
    with pytest.raises(HookError, match="already"):
        add(hooks, "client.connected", owner.callback, 5)
    add(hooks, "client.disconnected", owner.callback)
    add(hooks, "client.connected", Owner().callback)
    assert 2 == len(hooks.lookup("client.connected"))


def test_removing() -> None:
    """By function, and everything of one owner; others stay."""
    hooks = Hooks()
    one, two = Owner(), Owner()
    for point in ("client.connected", "message.publish"):
        add(hooks, point, one.callback, owner="one")
        add(hooks, point, two.callback, owner="two")
    assert hooks.remove("client.connected", one.callback)
    assert not hooks.remove("client.connected", one.callback)
    hooks.remove_owner("one")
    assert [["two"], ["two"]] == [[c.owner for c in hooks.lookup(p)] for p in ("client.connected", "message.publish")]
    hooks.remove_owner("two")
    assert hooks.client_connected is None
    assert hooks.message_publish is None


def test_changes_are_told() -> None:
    """Once per change, after it has taken effect; what changed nothing need not be told."""
    hooks = Hooks()
    seen: list[bool] = []
    hooks.on_change(lambda: seen.append(hooks.client_connected is not None))
    add(hooks, "client.connected", raises, owner="one")
    assert [True] == seen
    hooks.remove_owner("nobody")
    assert [True] == seen
    hooks.remove_owner("one")
    assert [True, False] == seen


@each_case(
    ("topic", "ordinary", "retained"),
    [
        ("a/b", ["all", "some"], ["all", "some", "kept", "kept some"]),
        ("c", ["all"], ["all", "kept"]),
        ("$SYS/x", ["all"], ["all", "kept"]),
    ],
)
def test_publish_callbacks_are_chosen_by_topic_and_retain_flag(
    topic: str, ordinary: list[str], retained: list[str]
) -> None:
    hooks = Hooks()
    add(hooks, "message.publish", Owner().callback, 4, "all")
    add(hooks, "message.publish", Owner().callback, 3, "some", topics=("a/+", "x"))
    add(hooks, "message.publish", Owner().callback, 2, "kept", retained_only=True)
    add(hooks, "message.publish", Owner().callback, 1, "kept some", topics=("x", "a/#"), retained_only=True)
    chains = hooks.publish_chains(topic)
    assert [ordinary, retained] == [[c.owner for c in found.callbacks] if found else [] for found in chains]


def test_topics_that_concern_nobody_have_no_chain() -> None:
    hooks = Hooks()
    add(hooks, "message.publish", raises, topics=("a",))
    assert (None, None) == hooks.publish_chains("b")


def test_topics_that_concern_the_same_callbacks_share_their_chains() -> None:
    """There are as many topics as clients like; a callback that comes or goes changes what was remembered."""
    hooks = Hooks()
    first, second = Owner(), Owner()
    add(hooks, "message.publish", first.callback, 2, "one", topics=("a/+/x", "$A/#"))
    add(hooks, "message.publish", second.callback, 1, "two", topics=("+/b/#",))
    assert hooks.publish_chains("$A/w/1") is hooks.publish_chains("$A/w/2")
    assert hooks.publish_chains("$A/w/1") is hooks.publish_chains("a/c/x"), "the same callbacks"
    both = hooks.publish_chains("a/b/x")[0]
    assert both is not None and ["one", "two"] == [callback.owner for callback in both.callbacks]
    hooks.remove("message.publish", first.callback)
    left = hooks.publish_chains("a/b/x")[0]
    assert left is not None and ["two"] == [callback.owner for callback in left.callbacks]
    assert (None, None) == hooks.publish_chains("$A/w/1")
    for number in range(MAX_LEVELS + 10):
        assert (None, None) == hooks.publish_chains(f"{number}/c")
    assert hooks.publish_chains("1/b")[0] is left


@each_case(
    ("others", "taken"),
    [
        ([], True),
        ([{"topics": ()}], True),
        ([{"topics": ("$A/#", "b")}], True),
        ([{"topics": ("b/+", "+/x")}], False),
        ([{"topics": ("$A/w/+",)}], False),
    ],
)
def test_topics_below_a_level_are_taken_if_all_have_the_same_callbacks(
    others: list[dict[str, Any]], taken: bool
) -> None:
    hooks = Hooks()
    add(hooks, "message.publish", Owner().callback, 1, "one", topics=("$A/#",), takes=True)
    for number, other in enumerate(others):
        add(hooks, "message.publish", Owner().callback, 2 + number, "other", **other)
    assert taken == hooks.are_taken("$A")
    assert not hooks.are_taken("$B") and not hooks.are_taken("b")
    hooks.remove_owner("one")
    assert not hooks.are_taken("$A")
