"""The source of one vehicle: it gives the session what the dispatcher has found, one message at a time.

It keeps no messages. Whether a vehicle may have one is the desk's to say (`desk.claim`); what became of it goes to the
clerk, who writes receipts. A vehicle that comes back finds what its session has in flight on the desk, where the
acknowledgement is awaited as before: nothing is sent a second time because of it.
"""

from __future__ import annotations

from typing import Final

from motorcade.core.message import Message
from motorcade.core.receipt import State
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches
from motorcade.core.vin import VinError, check_vin
from motorcade.extension.sources import ROOM, Ack, Answer, Feed, Given, Source, Why
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import ENDS, Delivery, Desk, Phase, Verdict
from motorcade.plugins.fanout.options import FanoutConfig

CHECK: Final = "check"  #: `info`: there may be something for this vehicle


def is_for(vin: str, filter_: str, config: FanoutConfig) -> bool:
    """Whether a client of this name gets its messages by a filter."""
    try:
        check_vin(vin, check_digit=config.check_digit)
    except VinError:
        return False
    return matches(filter_, config.topic_of(vin, "x"))


class FanoutSource(Source):
    """One vehicle, while it is connected and subscribed."""

    def __init__(self, feed: Feed, desk: Desk, clerk: Clerk) -> None:
        super().__init__(feed)
        self.vin = feed.client.client_id
        self._desk = desk
        self._clerk = clerk
        self._seated = False

    # -- Seat

    def offer(self, delivery: Delivery, *, judged: bool = False) -> None:
        if (
            judged
            and self._seated
            and self.feed.subscriptions  # it may have unsubscribed, and linger because of what is in flight
            and self._desk.claim(delivery)
            and self.feed.hand(Given(delivery.message, self._filter(), delivery))
        ):
            self._clerk.sent(delivery)
        else:
            self.feed.send(delivery)

    def disconnect(self, detail: str) -> None:
        self.feed.disconnect(detail)

    def look_again(self) -> None:
        if self._seated and not self._fitting():
            self._seated = False
            self._desk.stand_up(self.vin, self)

    # -- Source

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        if not is_for(self.vin, subscription.filter, self._desk.config):
            return False
        if not self._seated:
            self._seated = True
            self._desk.sit(self.vin, self)
            held = self._desk.hold.get(self.vin)
            if held is not None and held.in_window and why is not Why.RESUMED:
                if held.phase is Phase.RESTING:
                    held.phase = Phase.SENT
                self._clerk.watch(held)  # if resumed, that begins when it is repeated (`Clerk.repeats`)
        self._clerk.triggered(self.vin, why.value)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - whatever it was
        for given in self.feed.unsent:
            if given.filter == filter_:
                self._desk.release(given.tag)

    def terminate(self) -> None:
        if self._seated:
            self._desk.stand_up(self.vin, self)

    def info(self, what: object, desired: int) -> Answer:
        if not isinstance(what, Delivery):
            if what is CHECK or what is ROOM:
                self._clerk.triggered(self.vin, CHECK if what is CHECK else "room")
            return None
        if not desired or not self._seated:
            self._desk.release(what)  # `ROOM` is a trigger
            return None
        if not self._desk.claim(what):
            return None  # it has something else, or this is over
        return [Given(what.message, self._filter(), what)]

    def _filter(self) -> str:
        """Of several filters that match, the one with the highest QoS."""
        if len(self.feed.subscriptions) == 1:
            return next(iter(self.feed.subscriptions))
        return max(self._fitting(), key=lambda s: s.qos).filter

    def _fitting(self) -> list[Subscription]:
        return [s for s in self.feed.subscriptions.values() if is_for(self.vin, s.filter, self._desk.config)]

    def sending(self, given: Given) -> Message | None:
        delivery: Delivery = given.tag
        if delivery.phase is not Phase.CLAIMED or self._desk.hold.get(self.vin) is not delivery:
            return None
        verdict = self._desk.judge(delivery.entry, self._clerk.now())
        if verdict is Verdict.LATER:
            self._desk.release(delivery)
            return None
        if verdict is not Verdict.SEND:
            self._clerk.end(delivery, *ENDS[verdict])
            return None
        self._clerk.sent(delivery)
        return given.message

    def delivered(self, given: Given, ack: Ack) -> Answer:
        delivery: Delivery = given.tag
        if ack.dropped != "withdrawn":
            if delivery.phase is Phase.OVER and not (ack.dropped or ack.refused):
                self._clerk.late(delivery)
            self._desk.left(delivery)
        if delivery.ending:
            return None
        if ack.dropped in ("too_large", "unusable"):
            self._clerk.end(delivery, State.FAILED, ack.dropped)
        elif ack.dropped == "expired":
            self._clerk.end(delivery, *ENDS[Verdict.EXPIRED])
        elif ack.dropped:
            if ack.dropped != "withdrawn":  # `sending` has taken care of that
                self._desk.release(delivery)  # the vehicle may not read it any more: it waits until it may
            self._clerk.triggered(self.vin, CHECK)
        elif ack.refused:
            self._clerk.refused(delivery, f"refused_0x{ack.reason:02x}")
        else:
            subscription = self.feed.subscriptions.get(given.filter)
            unconfirmed = subscription is not None and not subscription.qos
            self._clerk.end(delivery, State.ACKED, "qos0" if unconfirmed else "")
        return None
