"""The source of one vehicle: it gives the session what the dispatcher has found, one message at a time.

It keeps no messages. The inflight table says whether a vehicle may have one (`InflightTable.claim`), and `Attempts`
hears what became of it. What a session has in flight is in the table when its vehicle comes back, where the
acknowledgement is awaited as before: nothing is sent a second time because of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from motorcade.core.message import Message
from motorcade.core.receipt import State
from motorcade.core.subscription import Subscription
from motorcade.core.topic import matches
from motorcade.core.vin import VinError, check_vin
from motorcade.extension.sources import ROOM, Ack, Answer, FastFeed, FastSource, Given, Why
from motorcade.plugins.fanout.attempts import Attempts
from motorcade.plugins.fanout.inflight import ENDS, Delivery, EntryVerdict, InflightTable, Phase
from motorcade.plugins.fanout.options import FanoutConfig

CHECK: Final = "check"  #: `info`: there may be something for this vehicle


def is_for(vin: str, filter_: str, config: FanoutConfig) -> bool:
    """Return True if a client of this name gets its messages by a filter."""
    try:
        check_vin(vin, check_digit=config.check_digit)
    except VinError:
        return False
    return matches(filter_, config.topic_of(vin, "x"))


class VehicleSource(FastSource):
    """One vehicle, while it is connected and subscribed."""

    def __init__(self, feed: FastFeed, table: InflightTable, attempts: Attempts) -> None:
        super().__init__(feed)
        self.vin = feed.client.client_id
        self._table = table
        self._attempts = attempts
        self._attached = False

    # -- for the fan-out

    def give(self, delivery: Delivery, now: float) -> None:
        """Send what was claimed and judged just now; at once, if there is room."""
        subscriptions = self.feed.subscriptions  # none: it has unsubscribed, and lingers because of what is in flight
        if self._attached and subscriptions:
            filter_ = next(iter(subscriptions)) if len(subscriptions) == 1 else self._filter(subscriptions)
            if self.feed.hand(Given(delivery.message, filter_, delivery)):
                self._attempts.sent(delivery, now)
                return
        self.feed.send(delivery)

    def offer(self, delivery: Delivery) -> None:
        """Send this, if the vehicle may have it when its turn comes."""
        self.feed.send(delivery)

    def disconnect(self, detail: str) -> None:
        """Close its connection, so that its session can repeat or withdraw what it is silent about."""
        self.feed.disconnect(detail)

    def look_again(self) -> None:
        """Detach the vehicle if its messages come on other topics now, and it is not subscribed to these."""
        if self._attached and not self._fitting(self.feed.subscriptions):
            self._attached = False
            self._table.detach(self.vin, self)

    # -- Source

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        if not is_for(self.vin, subscription.filter, self._table.config):
            return False
        if not self._attached:
            self._attached = True
            held = self._table.attach(self.vin, self)
            if held is not None and held.in_window and why is not Why.RESUMED:
                if held.phase is Phase.BACKING_OFF:
                    held.phase = Phase.SENT
                # If resumed, that begins when it is repeated (`Attempts.repeats`).
                self._attempts.watch(held, self._attempts.now())
        self._attempts.trigger(self.vin, why.value)
        return True

    def unsubscribe(self, filter_: str, why: Why) -> None:  # noqa: ARG002 - whatever it was
        for given in self.feed.unsent:
            if given.filter == filter_:
                self._table.release(given.tag)
                self._attempts.trigger(self.vin, CHECK)  # another filter may match it too

    def terminate(self) -> None:
        if self._attached:
            self._table.detach(self.vin, self)

    def info(self, what: object, desired: int) -> Answer:
        if not isinstance(what, Delivery):
            if what is CHECK or what is ROOM:
                self._attempts.trigger(self.vin, CHECK if what is CHECK else "room")
            return None
        if not desired or not self._attached:
            self._table.release(what)  # `ROOM` is a trigger
            return None
        if not self._table.claim(what):
            return None  # it has something else, or this is over
        return [Given(what.message, self._filter(self.feed.subscriptions), what)]

    def _filter(self, subscriptions: Mapping[str, Subscription]) -> str:
        """Return the filter with the highest QoS of those that match."""
        return max(self._fitting(subscriptions), key=lambda s: s.qos).filter

    def _fitting(self, subscriptions: Mapping[str, Subscription]) -> list[Subscription]:
        return [s for s in subscriptions.values() if is_for(self.vin, s.filter, self._table.config)]

    def sending(self, given: Given) -> Message | None:
        delivery: Delivery = given.tag
        if delivery.phase is not Phase.CLAIMED or self._table.inflight.get(self.vin) is not delivery:
            return None
        now = self._attempts.now()
        verdict = self._table.judge(delivery.entry, now)
        if verdict is EntryVerdict.LATER:
            self._table.release(delivery)
            return None
        if verdict is not EntryVerdict.SEND:
            self._attempts.end(delivery, *ENDS[verdict])
            return None
        self._attempts.sent(delivery, now)
        return given.message

    def delivered(self, given: Given, ack: Ack) -> Answer:
        delivery: Delivery = given.tag
        if ack.dropped != "withdrawn":
            if delivery.phase is Phase.OVER and not (ack.dropped or ack.refused):
                self._attempts.late(delivery)
            self._table.left(delivery)
        if delivery.ending:
            return None
        if ack.dropped in ("too_large", "unusable"):
            self._attempts.end(delivery, State.FAILED, ack.dropped)
        elif ack.dropped == "expired":
            self._attempts.end(delivery, *ENDS[EntryVerdict.EXPIRED])
        elif ack.dropped:
            if ack.dropped != "withdrawn":  # `sending` has taken care of that
                self._table.release(delivery)  # the vehicle may not read it any more: it waits until it may
            self._attempts.trigger(self.vin, CHECK)
        elif ack.refused:
            self._attempts.refused(delivery, f"refused_0x{ack.reason:02x}")
        else:
            subscription = self.feed.subscriptions.get(given.filter)
            unconfirmed = subscription is not None and not subscription.qos
            self._attempts.end(delivery, State.ACKED, "qos0" if unconfirmed else "")
        return None
