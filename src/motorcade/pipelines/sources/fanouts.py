"""Frames into fan-outs: each row a vehicle (`vin`), or a batch that is encoded already (`message`).

    task     data, if there is some ─▶ batches, `window` of them in flight ─▶ all acknowledged ─▶ its figures
    driver   sums them up

Rule 1: every batch has a `batch_id`, by which the broker knows one that it has accepted before and stores nothing. So a
        task may run again, from its beginning, and no vehicle is addressed twice, as long as a batch of one id is the
        same batch.
Rule 2: which is why a task that gets VINs takes all of them before it sends any, and sorts them: Spark may hand out the
        rows of a task in another order when it runs again. The ids are {write}-{task}-{number}.
Rule 3: a streaming query may be started again with other partitions, so it takes encoded batches alone, which have
        their ids inside. `pipelines/audience.py` makes them, once, and keeps them.
Rule 4: the first refusal ends the task, with the broker's words. What was sent by then is stored.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType

from motorcade.core.reasons import ReasonCode
from motorcade.pipelines import PipelineError
from motorcade.pipelines.batching import CountedVins, VinTally, batches, reason_of, right
from motorcade.pipelines.sources.brokers import (
    CONNECTION,
    Line,
    SendCounts,
    flag,
    line_of,
    lowered,
    number,
    rows,
    whole,
)
from motorcade.pipelines.sources.options import OptionError
from motorcade.plugins.fanout.tables import TRIGGER
from motorcade.publisher.batches import BATCH, NO_FANOUT, BatchTotals, Order, OrderError
from motorcade.publisher.publisher import Post, PublishError, ReliablePublisher, pulled

KNOWN: Final = CONNECTION | {
    "fanout",
    "request",
    "payload",
    "payload_file",
    "expires_in",
    "priority",
    "mode",
    "batch",
    "check_digit",
}

VIN: Final = "vin"
MESSAGE: Final = "message"

#: Columns beside `message`: what a batch is called in errors, and how many vehicles the pace counts.
BESIDE: Final[dict[str, tuple[type[DataType], ...]]] = {"batch_id": (StringType,), "vehicles": (IntegerType, LongType)}


@dataclass(frozen=True, slots=True)
class Fanouts:
    """One frame on its way to vehicles."""

    line: Line
    order: Order
    encoded: bool  #: rows are batches, else VINs
    publishes: bool  #: the data is published first; else it is there already
    size: int = BATCH
    check_digit: bool = False
    write: str = ""  #: begins the ids of batches that are made here

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: StructType, *, streaming: bool) -> Fanouts:
        options = lowered(given, KNOWN, "a fan-out")
        encoded = _is_encoded(schema)
        if streaming and not encoded:
            raise OptionError(
                "a streaming query can write encoded batches to a fan-out (column `message`), not VINs: it may be "
                "started again with other partitions, and vehicles would be addressed twice; write VINs with "
                "`frame.write`, in `foreachBatch` if need be, or with the pipeline `audience`"
            )
        line = line_of(options["fanout"], "fanout", options)
        if line.options.rate is not None and encoded and "vehicles" not in schema.fieldNames():
            raise OptionError("option task_rate: it counts vehicles, so a frame of batches needs the column `vehicles`")
        data = _data(options)
        if not encoded and (data is None or not options.get("request")):
            raise OptionError("a fan-out to VINs needs the options `request`, and `payload` or `payload_file`")
        order = Order(options.get("request", ""), data or b"", _fields(options))
        if not encoded:
            _checked(order)
        return cls(
            line,
            order,
            encoded,
            data is not None,
            whole("batch", options.get("batch", str(BATCH)), 1, 65_536),
            flag("check_digit", options.get("check_digit", "false")),
            uuid.uuid4().hex[:16],
        )

    def send(self, batches: Iterator[pa.RecordBatch]) -> SendCounts:
        figures = BatchTotals()

        def accept(post: Post, reason: ReasonCode, answers: Mapping[str, str]) -> None:
            if post.topic != TRIGGER:
                if reason == ReasonCode.NO_MATCHING_SUBSCRIBERS:
                    raise PublishError(f"the payload was not stored: {NO_FANOUT}")
                return
            try:
                figures.add(answers)
            except OrderError as error:
                raise PublishError(f"{post.name}: {error}") from error

        first = [Post(self.order.data_topic, self.order.data, name="the payload")] if self.publishes else []
        publisher = ReliablePublisher(
            self.line.address, accept, self.line.options, first=first, name="motorcade-fanout"
        )
        posts = self._encoded(batches) if self.encoded else self._made(batches)
        sent = self.line.run(publisher, posts, SendCounts())
        return replace(sent, messages=figures.batches, figures=figures)

    async def _encoded(self, batches: Iterator[pa.RecordBatch]) -> AsyncIterator[Post]:
        async for message, name, vehicles in rows(batches, (MESSAGE, "batch_id", "vehicles")):
            if message is None:
                raise PipelineError("a row has no message; the column must hold encoded batches")
            yield _post(message, name or "", vehicles or 0)

    async def _made(self, columns: Iterator[pa.RecordBatch]) -> AsyncIterator[Post]:
        tally = VinTally()
        async for batch in pulled(columns):
            tally.add(batch.column(0))
        found = tally.found()
        self._check(found)
        found = CountedVins(found.texts.take(pc.sort_indices(found.texts)), found.times)
        context = TaskContext.get()
        prefix = f"{self.write}-{context.partitionId() if context is not None else 0}-"
        for some in batches(found, self.order, self.size, prefix):
            for name, message, vehicles in zip(some.ids, some.messages, some.vehicles, strict=True):
                yield _post(message, name, vehicles)

    def _check(self, found: CountedVins) -> None:
        good = right(found.texts, check_digit=self.check_digit)
        if good.all():
            return
        wrong = found.filter(~good).texts
        why = reason_of(wrong[0].as_py(), check_digit=self.check_digit)
        raise PipelineError(
            f"{len(wrong)} of the VINs of a task are none, for instance: {why[1] if why else wrong[0]}; nothing of "
            "this task was sent"
        )


def _is_encoded(schema: StructType) -> bool:
    types = {one.name: one.dataType for one in schema.fields}
    if MESSAGE in types:
        wrong = sorted(types.keys() - {MESSAGE, *BESIDE})
        if wrong or not isinstance(types[MESSAGE], BinaryType):
            raise OptionError(
                f"a frame of encoded batches has a column `message` of type binary and perhaps {', '.join(BESIDE)}; "
                f"this one has {schema.simpleString()}"
            )
        for name, kind in BESIDE.items():
            if name in types and not isinstance(types[name], kind):
                raise OptionError(f"the column {name!r} is {types[name].simpleString()}; see docs/pipelines.md")
        return True
    if set(types) != {VIN} or not isinstance(types[VIN], StringType):
        raise OptionError(
            f"a fan-out takes a frame with one column `vin` of type string, or with encoded batches (`message`); this "
            f"one has {schema.simpleString()}"
        )
    return False


def _data(options: Mapping[str, str]) -> bytes | None:
    if "payload" in options and "payload_file" in options:
        raise OptionError("one of the options `payload` and `payload_file` says what vehicles get, not both")
    if "payload_file" in options:
        try:
            return Path(options["payload_file"]).read_bytes()
        except OSError as error:
            raise OptionError(
                f"option payload_file: cannot read {options['payload_file']}: {error.strerror}"
            ) from error
    return options["payload"].encode() if "payload" in options else None


def _fields(options: Mapping[str, str]) -> dict[str, object]:
    """Return the optional fields of a batch."""
    fields: dict[str, object] = {}
    if "expires_in" in options:
        fields["expires_in"] = number("expires_in", options["expires_in"])
    if "priority" in options:
        fields["priority"] = whole("priority", options["priority"], 0, 9)
    if "mode" in options:
        if options["mode"] not in {"replace", "append"}:
            raise OptionError(f"option mode: {options['mode']!r} is none of replace, append")
        fields["mode"] = options["mode"]
    return fields


def _checked(order: Order) -> None:
    try:
        order.check()
    except OrderError as error:
        raise OptionError(f"option request: {error}") from error


def _post(message: bytes, name: str, vehicles: int) -> Post:
    what = f"batch {name} ({vehicles} vehicles)" if vehicles else f"batch {name}" if name else "a batch"
    return Post(TRIGGER, message, weight=vehicles, name=what)
