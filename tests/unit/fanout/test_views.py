"""What an operator is told about a vehicle: every reason has its sentence, and says what happens next."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from motorcade.core.receipt import State
from motorcade.plugins.fanout import views
from motorcade.plugins.fanout.views import DeliveryView, Hold, TargetView, WhyView

VIN = "LMCAAAAA6RA000001"
NOW = 1_760_000_000.0  # 2025-10-09 08:53:20 UTC
HEAD = DeliveryView(
    delivery_id=f"{VIN}.7",
    request_id="task_ota_1",
    state="waiting",
    accepted_at=NOW - 3600,
    expires_at=NOW + 86400,
    priority=0,
    attempts=0,
    size=4096,
)
SENT = msgspec.structs.replace(HEAD, state="in_flight", attempts=2, sent_at=NOW - 12, until=NOW + 18)
RESTING = msgspec.structs.replace(HEAD, state="backing_off", attempts=3, until=NOW + 90)
LAST = TargetView(
    vin=VIN, request_id="task_ota_9", delivery_id=f"{VIN}.6", state=State.FAILED, time=NOW, attempt=10, reason="no_ack"
)

#: One example of each, and what its sentence and its next step must contain.
EXAMPLES: list[tuple[Hold, WhyView, str, str]] = [
    (Hold.NOT_KNOWN, views.not_known(VIN), "No batch has named", "until a batch names it"),
    (Hold.NOTHING_PENDING, views.nothing_pending(VIN), f"Nothing waits for {VIN}.", "names it again"),
    (
        Hold.NOTHING_PENDING,
        views.nothing_pending(VIN, LAST),
        "the last message, 'task_ota_9', was failed (no_ack) at 2025-10-09 08:53:20 UTC.",
        "names it again",
    ),
    (
        Hold.NOTHING_PENDING,
        views.nothing_pending(VIN, msgspec.structs.replace(LAST, state=State.CANCELLED, reason="cancelled")),
        "was cancelled at",
        "names it again",
    ),
    (
        Hold.OFFLINE,
        views.offline(VIN, HEAD, 1, NOW, 0.0),
        "is not connected: there is no session of it.",
        "as soon as it connects and is subscribed, unless that is after 2025-10-10 08:53:20 UTC, when it expires.",
    ),
    (
        Hold.OFFLINE,
        views.offline(VIN, HEAD, 3, NOW, NOW - 5400),
        "it was last seen at 2025-10-09 07:23:20 UTC, 1.5 h ago.",
        "3 messages wait; the first is sent to it as soon as",
    ),
    (
        Hold.OFFLINE,
        views.offline(VIN, SENT, 1, NOW, NOW - 3),
        "3 s ago",
        "Request 'task_ota_1' was sent before and not acknowledged: it is repeated when it connects and is subscribed.",
    ),
    (
        Hold.OFFLINE,
        views.offline(VIN, msgspec.structs.replace(HEAD, state="paused"), 1, NOW, NOW - 3),
        "3 s ago",
        "Request 'task_ota_1' is paused: it is sent after `motorcade fanout resume task_ota_1`, when it connects",
    ),
    (
        Hold.NOT_SUBSCRIBED,
        views.not_subscribed(VIN, HEAD, 1, f"agent/{VIN}/proxy/request/+"),
        f"is connected, but has not subscribed to 'agent/{VIN}/proxy/request/+'.",
        "as soon as it subscribes",
    ),
    (
        Hold.IN_FLIGHT,
        views.in_flight(VIN, SENT, 1, NOW),
        f"Request 'task_ota_1' was sent to {VIN} at 2025-10-09 08:53:08 UTC, 12 s ago (attempt 2), and it has not",
        "If no acknowledgement comes until 2025-10-09 08:53:38 UTC, its connection is closed: it is sent again",
    ),
    (
        Hold.IN_FLIGHT,
        views.in_flight(VIN, msgspec.structs.replace(SENT, until=0.0), 2, NOW),
        "has not acknowledged it.",
        "when the vehicle comes back with its session. The message that waits is sent to it after that.",
    ),
    (
        Hold.BACKING_OFF,
        views.backing_off(VIN, RESTING, 1, NOW, 10, "refused_0x97"),
        "3 times without success (refused_0x97).",
        "It is sent again at 2025-10-09 08:54:50 UTC, in 1.5 min; after 10 times without success it has failed",
    ),
    (
        Hold.PAUSED,
        views.paused(VIN, HEAD, 1),
        "Request 'task_ota_1' is paused",
        "`motorcade fanout resume task_ota_1`",
    ),
    (
        Hold.WINDOW_FULL,
        views.window_full(VIN, HEAD, 1, 32),
        "has not acknowledged 32 other messages, and takes no more",
        "when it has acknowledged one of them",
    ),
    (Hold.WINDOW_FULL, views.window_full(VIN, HEAD, 1), "has not acknowledged other messages", "one of them"),
    (Hold.DISPATCHING, views.dispatching(VIN, HEAD, 1), "at this moment", "Ask again"),
    (Hold.STORE_UNAVAILABLE, views.store_unavailable(VIN, "timed out"), "(timed out)", "Nothing is lost"),
]


def test_each_reason_has_a_sentence_and_a_next_step() -> None:
    for reason, view, sentence, next_ in EXAMPLES:
        assert (VIN, reason) == (view.vin, view.reason)
        assert sentence in view.sentence, view
        assert next_ in view.next, view
        for text in (view.sentence, view.next):
            assert not text[0].islower() and text.endswith(".") and "\n" not in text and "  " not in text, text
        assert VIN in view.sentence
    assert set(Hold) == {row[0] for row in EXAMPLES}, "there is an example of every reason"


def test_programs_get_the_facts_without_reading_the_sentence() -> None:
    view = views.in_flight(VIN, SENT, 4, NOW)
    assert (4, "task_ota_1", f"{VIN}.7", 2, NOW - 12, NOW + 18) == (
        view.pending,
        view.request_id,
        view.delivery_id,
        view.attempt,
        view.since,
        view.until,
    )


def test_a_length_of_time_is_told_as_people_say_it() -> None:
    words = {-5: "0 s", 0.4: "0 s", 59: "59 s", 60: "1 min", 5400: "1.5 h", 86400: "1 d", 200_000: "2.3 d"}
    assert words == {seconds: views.span(seconds) for seconds in words}


def test_the_guide_tells_of_every_reason_and_state() -> None:
    """Each in a line of a table of its own."""
    page = (Path(__file__).parents[3] / "docs" / "fanout.md").read_text()
    names = [*map(str, Hold), *map(str, State)]
    assert [] == [name for name in names if not re.search(rf"^\| `{name}` \|", page, re.MULTILINE)]
