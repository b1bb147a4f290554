"""Into a stream of this node, through what the plugin `streams` offers.

What is published in one turn of the event loop goes together; several such groups may be under way, since the store
keeps the order of appends.

Rule: the plugin and the stream are looked up each time. When either is gone, messages fail, with certainty, until it is
      there again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from motorcade.core.errors import MotorcadeError
from motorcade.core.record import RecordError
from motorcade.extension.declared import UnknownError
from motorcade.plugins.capture.sink import Entry, NotCapturedError, Sink, Tally
from motorcade.storage.ports import StoreError

MAX_GROUP: Final = 500  #: messages in one append


class StreamSink(Sink):
    """The way to one stream. `service` answers what the plugin `streams` offers now, or None."""

    def __init__(self, stream: str, service: Callable[[], Any], tally: Tally, max_pending: int, max_bytes: int) -> None:
        super().__init__(tally, max_pending, max_bytes)
        self._stream = stream
        self._service = service
        self._waiting: list[Entry] = []

    def _begin(self, entry: Entry) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(entry)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_GROUP):
            self._append(waiting[start : start + MAX_GROUP])

    def _append(self, entries: list[Entry]) -> None:
        streams = self._service()
        if streams is None:
            self._ended(entries, UnknownError("the plugin 'streams' is not loaded"))
            return
        try:
            appending = streams.append(self._stream, [entry.message for entry in entries])
        except Exception as error:  # noqa: BLE001 - whatever another plugin raises, somebody waits for an answer
            self._ended(entries, error)
            return
        if appending.done and len(entries) > 1 and isinstance(appending.error, RecordError):
            for entry in entries:  # one of them cannot be written; the others can
                self._append([entry])
            return
        appending.then(lambda: self._ended(entries, appending.error))

    def _ended(self, entries: list[Entry], error: BaseException | None) -> None:
        text = "" if error is None else f"stream {self._stream!r}: {error}"
        # That a stream is not there is seen by looking, and may change without a message.
        self.problem = "" if isinstance(error, UnknownError) else text
        self.finish(entries, None if error is None else _meaning(error, text))

    async def _end(self) -> None:
        """Appends that are under way cannot be taken back; who waits hears of them when they end."""


def _meaning(error: BaseException, text: str) -> StoreError:
    """What a failed append means to a publisher."""
    if isinstance(error, StoreError):
        return error
    # Refused before anything was written: there is no such stream, or it does not take the message.
    return NotCapturedError(text) if isinstance(error, MotorcadeError) else StoreError(text)
