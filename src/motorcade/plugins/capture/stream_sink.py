"""Into a stream of this node, through the service of the plugin `streams`.

Messages of one turn of the event loop are one append, with one answer: that takes half the time of an append for each.
Several appends may be in flight, since the store keeps their order.

Rule: the plugin and the stream are looked up each time. When either is gone, messages fail, with certainty, until it is
      there again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.record import RecordError
from motorcade.extension.declared import UnknownError
from motorcade.plugins.capture.options import RuleOptions
from motorcade.plugins.capture.sink import CapturedMessage, NotCapturedError, RuleCounts, Sink
from motorcade.storage.ports import StoreError

MAX_GROUP: Final = 500  #: messages in one append


class StreamSink(Sink):
    """The way to one stream. `service` returns what the plugin `streams` offers now, or None."""

    def __init__(self, options: RuleOptions, service: Callable[[], Any], counts: RuleCounts) -> None:
        super().__init__(options, counts)
        self._stream = options.target.name
        self._service = service
        self._turn: list[CapturedMessage] = []  #: messages of this turn

    def _begin(self, copy: CapturedMessage) -> None:
        if not self._turn:
            self._loop.call_soon(self._append_turn)
        self._turn.append(copy)

    def _append_turn(self) -> None:
        turn, self._turn = self._turn, []
        for start in range(0, len(turn), MAX_GROUP):
            self._append(turn[start : start + MAX_GROUP])

    def _append(self, copies: list[CapturedMessage]) -> None:
        commit = self._commit([copy.message for copy in copies])
        commit.then(lambda: self._appended(copies, commit.error))

    def _commit(self, messages: list[Message | None]) -> Commit[Any]:
        streams = self._service()
        if streams is None:
            return Commit.failed(UnknownError("the plugin 'streams' is not loaded"))
        try:
            appended: Commit[Any] = streams.append(self._stream, messages)
        except Exception as error:  # noqa: BLE001 - whatever another plugin raises, publishers wait for an answer
            return Commit.failed(error)
        return appended

    def _appended(self, copies: list[CapturedMessage], error: BaseException | None) -> None:
        if len(copies) > 1 and isinstance(error, RecordError):  # one of them cannot be written; the others can
            for copy in copies:
                self._append([copy])
            return
        text = "" if error is None else f"stream {self._stream!r}: {error}"
        # That a stream is not there is seen by looking, and may change without a message.
        self.problem = "" if isinstance(error, UnknownError) else text
        self.finish(copies, None if error is None else _meaning(error, text))


def _meaning(error: BaseException, text: str) -> StoreError:
    """Return what a failed append means to a publisher."""
    if isinstance(error, StoreError):
        return error
    # Refused before anything was written: there is no such stream, or it does not take the message.
    return NotCapturedError(text) if isinstance(error, MotorcadeError) else StoreError(text)
