"""Sending one message to a list of vehicles over MQTT: data once, then batches that name it.

What is sent is an order (`motorcade.publisher.batches`), WINDOW batches of it in flight.

Rule 1: what the broker has acknowledged is stored; what it has refused is not stored, not in part. What was in flight
        when the connection ended may be either, and is told as that.
Rule 2: each batch has an id that is made from what it says (`Job.batch_id`), so a command that is repeated, after
        whatever has happened to the first, addresses no vehicle twice.
Rule 3: after the first batch that fails no further one is sent: whatever is wrong with it is likely to be wrong with
        the next. Those in flight are waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from motorcade.core.errors import MotorcadeError
from motorcade.plugins.fanout.tables import TRIGGER
from motorcade.publisher.batches import BATCH, NO_FANOUT, Order, broker_words
from motorcade.publisher.publisher import WINDOW

if TYPE_CHECKING:
    from motorcade.client import Client
    from motorcade.core.reasons import ReasonCode
    from motorcade.mqtt.properties import Properties

__all__ = ["WINDOW", "Job", "Outcome", "SendError", "send"]

_NO_MATCHING_SUBSCRIBERS = 0x10


@dataclass(frozen=True)
class Job:
    """A payload and the vehicles that get it."""

    vins: Sequence[str]  #: each once
    request_id: str
    data: bytes
    options: dict[str, object]  #: expires_in, priority, mode; only those that were given
    size: int = BATCH
    name: str = ""  #: of this sending, if it was given: part of the ids of its batches

    @cached_property
    def order(self) -> Order:
        """All of it but the vehicles."""
        return Order(self.request_id, self.data, self.options)

    @property
    def data_id(self) -> str:
        return self.order.data_id

    def batches(self) -> list[Sequence[str]]:
        """Return the vehicles in batches."""
        return [self.vins[start : start + self.size] for start in range(0, len(self.vins), self.size)]

    def batch_id(self, vins: Sequence[str]) -> str:
        """Return the id of a batch: the same for the same request, payload, options, name and vehicles."""
        parts = [self.request_id, self.data_id, json.dumps(self.options, sort_keys=True), self.name, *sorted(vins)]
        return f"send-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"

    def trigger(self, vins: Sequence[str]) -> bytes:
        """Return the message for one batch."""
        return self.order.trigger(vins, self.batch_id(vins))

    def size_bytes(self) -> int:
        """Return how many bytes the messages to the broker have together, without their headers."""
        return len(self.data) + sum(len(self.trigger(vins)) for vins in self.batches())


@dataclass
class Outcome:
    """Progress of a sending. Filled as it goes, so that it is right whenever the sending is interrupted."""

    batches: int  #: in all
    accepted: int = 0  #: vehicles
    duplicates: int = 0  #: that the broker has found; none, since each vehicle is named once
    replaced: int = 0
    rejected: int = 0  #: vehicles that have too many messages waiting
    repeated: int = 0  #: batches that an earlier command has brought: their vehicles are not addressed again
    acknowledged: int = 0  #: batches
    problems: list[str] = field(default_factory=list)  #: one sentence for each batch that failed
    rest: list[str] = field(default_factory=list)  #: VINs that the broker has not accepted, as far as is known


class SendError(MotorcadeError):
    """Nothing, or not everything, was accepted."""


async def send(client: Client, job: Job, outcome: Outcome, progress: Callable[[int], None]) -> None:
    """Send everything, or stop at what fails. `progress` hears of vehicles accepted, as they are."""
    await _send_data(client, job.order)
    batches = job.batches()
    missed: set[str] = set()
    room = asyncio.Semaphore(WINDOW)
    sent: list[asyncio.Task[bool]] = []
    for number, vins in enumerate(batches, start=1):
        await room.acquire()
        if outcome.problems:
            missed.update(vin for later in batches[number - 1 :] for vin in later)
            break
        work = _send_batch(client, job.trigger(vins), number, vins, outcome, progress)
        task = asyncio.create_task(work, name=f"batch {number}")
        task.add_done_callback(lambda _done: room.release())
        sent.append(task)
    for vins, accepted in zip(batches, await asyncio.gather(*sent), strict=False):
        if not accepted:
            missed.update(vins)
    outcome.rest = [vin for vin in job.vins if vin in missed]


async def _send_data(client: Client, order: Order) -> None:
    from motorcade.client import ClientError

    try:
        reason = await client.publish(order.data_topic, order.data, 1)
    except ClientError as error:
        raise SendError(
            f"the payload was not stored, and no vehicle was sent anything: {broker_words(error)}"
        ) from error
    if reason == _NO_MATCHING_SUBSCRIBERS:
        raise SendError(f"the payload was not stored, and no vehicle was sent anything: {NO_FANOUT}")


async def _send_batch(
    client: Client, message: bytes, number: int, vins: Sequence[str], outcome: Outcome, progress: Callable[[int], None]
) -> bool:
    """Return True if the broker has accepted the batch."""
    from motorcade.client import ClientError, RefusedError

    answers: dict[str, str] = {}
    which = f"batch {number} of {outcome.batches} ({_range(vins)})"
    try:
        sent = await client.send(TRIGGER, message, 1, told=partial(_note, answers))
        await _acknowledged(sent)
        accepted, duplicates, replaced = (int(answers[key]) for key in ("accepted", "duplicates", "replaced"))
    except RefusedError as error:
        outcome.problems.append(f"{which} was refused: {broker_words(error)}; nothing of it was stored")
    except ClientError as error:
        outcome.problems.append(f"{which} was not acknowledged: {error}; it may be stored or not")
    except (KeyError, ValueError):
        outcome.problems.append(f"{which}: {NO_FANOUT}")
    else:
        outcome.accepted += accepted
        outcome.duplicates += duplicates
        outcome.replaced += replaced
        outcome.rejected += int(answers.get("rejected", "0"))
        outcome.repeated += int(answers.get("repeated", "0"))
        outcome.acknowledged += 1
        progress(accepted)
        return True
    return False


async def _acknowledged(sent: asyncio.Future[ReasonCode] | None) -> None:
    if sent is not None:
        await sent


def _note(answers: dict[str, str], told: Properties) -> None:
    answers.update(told.user_properties)


def _range(vins: Sequence[str]) -> str:
    return vins[0] if len(vins) == 1 else f"{len(vins)} vehicles, {vins[0]} to {vins[-1]}"
