"""A worker: takes messages from leaders, hands them to a function, writes the results, acknowledges.

    leader ─▶ wire: frames of one read ─▶ batch ─▶ handler ─▶ results ─▶ write.lua, many at once ─▶ ACK
    leader ─▶ wire ─────────────────────────▲           └─ raises ─▶ REJECT      └─ not written in time ─▶ RETURN

Several leaders may be connected: one that leads, one that believes so, one whose term has just ended. They are all
served alike; what two of them send is written once.

Rule 1: a message is acknowledged when its result is written, and as durable as the options say.
Rule 2: an id is written once, as long as its first writing is remembered (`remember`). So nothing is written later than
        half of that after it was received: the server compares with its own clock, whatever this process was doing
        meanwhile. And when this process has stood still, what is in the sockets is too old to be looked at: the
        connections are closed, and the leader sends it again.
Rule 3: a result that cannot be written soon is given back (RETURN) before the leader's timeout, so that a Redis
        that is away does not look like a message that no worker can process.
Rule 4: back-pressure: with `max_waiting` messages inside, nothing more is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec
import structlog

from motorcade.core.errors import ConfigError, StoreError
from motorcade.core.handshake import HandshakeError
from motorcade.dispatch.calls import REGISTER, WRITE, Calls, StaleError
from motorcade.dispatch.frames import (
    FrameError,
    MessageReader,
    SecretWantedError,
    ack_frames,
    reject_frame,
    return_frames,
)
from motorcade.dispatch.handlers import Handler, Threads, decode, is_async, load_handler, reason_of, written
from motorcade.dispatch.handshake import Handshake, refused_frame
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.security import worker_security
from motorcade.dispatch.views import RateReport

log = structlog.get_logger("motorcade.dispatch")

#: Messages and bytes that are written at once: a few milliseconds of the server's time.
MAX_GROUP: Final = 500
MAX_GROUP_BYTES: Final = 1 << 20
#: Groups that are being written at the same time.
WRITING: Final = 2
#: Seconds between two entries in the worker registry, and that one is good for.
REGISTRY_INTERVAL: Final = 1.0
REGISTRY_LEASE: Final = 3.0
#: Seconds that a worker that ends tries to leave the registry.
DEREGISTER_TIMEOUT: Final = 1.0
#: Seconds between two beats by which this process sees that it has stood still.
BEAT: Final = 0.25
#: Seconds that a leader has to show that it knows the secret, and how many may be about to; the oldest go first.
HANDSHAKE_TIME: Final = 5.0
MAX_STRANGERS: Final = 100
#: Seconds between two lines about leaders that were refused.
REFUSED_INTERVAL: Final = 10.0
#: Part of `ack_timeout` after which a result that is not written is given back.
PATIENCE: Final = 0.7
#: Seconds that a thread may be busy with messages that were handed to it together, and how many these are at most.
SLICE: Final = 0.01
MAX_SLICE: Final = 64


class WorkBatch:
    """Messages of one read, or results that are to be written, with the connection to answer."""

    __slots__ = ("bodies", "ids", "received", "wire")

    def __init__(self, wire: Wire, ids: list[bytes], bodies: list[bytes], received: float) -> None:
        self.wire = wire
        self.ids = ids
        self.bodies = bodies
        self.received = received  #: loop time


async def run_worker(
    options: DispatchOptions,
    handler: Handler | None = None,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None = None,
    report: Callable[[RateReport], None] | None = None,
) -> None:
    """Work until `stop` is set; then finish what has begun.

    `ready` is called with `HOST:PORT` when leaders may come.
    """
    if handler is None and options.handler:
        handler = load_handler(options.handler)
    calls = Calls(options)
    await calls.open()
    try:
        await Worker(calls, options, handler).run(stop, ready, report)
    finally:
        await calls.close()


class Worker:
    """One worker process."""

    def __init__(self, calls: Calls, options: DispatchOptions, handler: Handler | None) -> None:
        self.name = options.advertise or options.listen
        self.written = 0
        self.repeated = 0  #: messages whose result had been written before
        self.refused = 0
        self.returned = 0
        self.stale = 0
        self.cut_off = 0  #: leaders that sent what is no frame, or were one too many
        self.strangers = 0  #: connections that were refused, since they did not know the secret or asked for one
        self.security = worker_security(options)
        self.waiting: dict[Wire, None] = {}  #: connections that have not shown yet that they know the secret
        self.inside = 0  #: messages that were received and not answered
        self.wires: set[Wire] = set()
        self.max_leaders = options.max_leaders
        self.stopping = False
        self.beat = 0.0
        self._calls = calls
        self._options = options
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._queue: deque[WorkBatch] = deque()  #: for handlers
        self._results: deque[WorkBatch] = deque()
        self._has_messages = asyncio.Event()
        self._has_results = asyncio.Event()
        self._idle = asyncio.Event()
        self._slots = asyncio.Semaphore(WRITING)
        self._busy = 0  #: messages that handlers are working on
        self._ahead = 0.0  #: the server's clock minus ours, milliseconds
        self._slice = 1
        self._trouble = ""  #: what keeps results from being written
        self._refused_at = -REFUSED_INTERVAL  #: loop time of the last line about strangers
        self._unlogged = 0
        self._keys = [
            options.key("processed"),
            *(options.beside("processed", what) for what in ("seen", "seen:0", "seen:1")),
        ]
        self._threads: Threads | None = None
        self._tasks: asyncio.TaskGroup

    async def run(
        self,
        stop: asyncio.Event,
        ready: Callable[[str], None] | None = None,
        report: Callable[[RateReport], None] | None = None,
    ) -> None:
        await self._set_clock()
        self.beat = self._loop.time()
        server = await self._listen()
        self.name = self._advertised(server.sockets[0].getsockname()[1])
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                running = [tasks.create_task(self._keep_beat()), tasks.create_task(self._write_results())]
                running.append(tasks.create_task(self._tell(report)))
                running += [tasks.create_task(handle) for handle in self._handlers()]
                if self._options.register:
                    await self._register(REGISTRY_LEASE)
                    running.append(tasks.create_task(self._keep_registered()))
                log.info("dispatch_worker_ready", worker=self.name)
                if ready is not None:
                    ready(self.name)
                await stop.wait()
                server.close()
                await self._stop()
                for task in running:
                    task.cancel()
        finally:
            server.close()
            for wire in [*self.wires, *self.waiting]:
                wire.close()
            if self._threads is not None:
                self._threads.close()

    async def _listen(self) -> asyncio.Server:
        host, _, port = self._options.listen.rpartition(":")
        place = None if host == "*" else host.strip("[]")
        try:
            return await self._loop.create_server(
                lambda: Wire(self, self._options), place, int(port), ssl=self.security.context
            )
        except OSError as error:
            raise ConfigError(
                f"dispatch.listen: cannot listen on {self._options.listen}: {error.strerror or error}"
            ) from None

    async def _stop(self) -> None:
        """Stop reading, return what was not begun, finish the rest."""
        self.stopping = True
        if self._options.register:
            # If Redis is away, the entry expires by itself.
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(min(DEREGISTER_TIMEOUT, self._options.stop_patience)):
                    await self._register(0.0)
        for wire in self.wires:
            wire.pause()
        while self._queue:
            batch = self._queue.popleft()
            self._give_back(batch.wire, batch.ids)
        try:
            async with asyncio.timeout(self._options.stop_patience):
                while self.inside:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning("dispatch_worker_left_behind", messages=self.inside, effect="leaders send them to others")
        for wire in list(self.wires):
            wire.close()
        if self.wires:  # acknowledgements have to get out
            await asyncio.wait([wire.ended for wire in self.wires], timeout=1.0)

    # -- from leaders

    def stranger(self, peer: object, why: str) -> None:
        """Count a refused connection. Log at a bounded rate, since any peer can connect."""
        self.strangers += 1
        self._unlogged += 1
        now = self._loop.time()
        if now - self._refused_at >= REFUSED_INTERVAL:
            log.warning("dispatch_leader_refused", leader=str(peer), why=why, refused=self._unlogged)
            self._refused_at, self._unlogged = now, 0

    def receive(self, wire: Wire, ids: list[bytes], bodies: list[bytes]) -> None:
        batch = WorkBatch(wire, ids, bodies, self._loop.time())
        self.inside += len(ids)
        if self._handler is None:
            self._check(batch)
        elif self.stopping:
            self._give_back(wire, ids)
        else:
            self._queue.append(batch)
            self._has_messages.set()
        if self.inside >= self._options.max_waiting:
            for other in self.wires:
                other.pause()

    def _check(self, batch: WorkBatch) -> None:
        """Run the default handler: the message must be JSON, and is written as it came."""
        bodies = batch.bodies
        try:
            for body in bodies:
                decode(body)
        except msgspec.DecodeError:
            self._sort(batch)
        if batch.ids:
            self._results.append(batch)
            self._has_results.set()

    def _sort(self, batch: WorkBatch) -> None:
        """Refuse what is no JSON, keep the rest."""
        ids: list[bytes] = []
        bodies: list[bytes] = []
        for id_, body in zip(batch.ids, batch.bodies, strict=True):
            try:
                decode(body)
            except msgspec.DecodeError as error:
                self._refuse(batch.wire, id_, reason_of(error))
            else:
                ids.append(id_)
                bodies.append(body)
        batch.ids, batch.bodies = ids, bodies

    def _refuse(self, wire: Wire, id_: bytes, reason: str) -> None:
        self.refused += 1
        wire.write(reject_frame(id_, reason))
        self._out(1)

    def _give_back(self, wire: Wire, ids: list[bytes]) -> None:
        self.returned += len(ids)
        wire.write(return_frames(ids))
        self._out(len(ids))

    def _acknowledge(self, wire: Wire, ids: list[bytes]) -> None:
        wire.write(ack_frames(ids))
        self._out(len(ids))

    def _out(self, count: int) -> None:
        self.inside -= count
        if not self.inside:
            self._idle.set()
        if not self.stopping and self.inside <= self._options.max_waiting // 2:
            for wire in self.wires:
                wire.resume()

    # -- handlers

    def _handlers(self) -> list[Any]:
        if self._handler is None:
            return []
        if is_async(self._handler):
            return [self._handle_in_loop() for _ in range(self._options.parallel)]
        self._threads = Threads(self._handler, self._options.parallel)
        return [self._handle_in_thread(self._threads) for _ in range(self._options.parallel)]

    async def _next(self, most: int) -> WorkBatch:
        """Return up to `most` messages of one connection."""
        while not self._queue:
            self._has_messages.clear()
            await self._has_messages.wait()
        batch = self._queue[0]
        if len(batch.ids) <= most:
            return self._queue.popleft()
        first = WorkBatch(batch.wire, batch.ids[:most], batch.bodies[:most], batch.received)
        del batch.ids[:most], batch.bodies[:most]
        return first

    async def _handle_in_loop(self) -> None:
        handler: Any = self._handler
        while True:
            batch = await self._next(1)
            id_, body = batch.ids[0], batch.bodies[0]
            try:
                result = written(await handler(decode(body)))
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the leader is told
                self._refuse(batch.wire, id_, reason_of(error))
                continue
            self._handled(batch, id_, result)

    async def _handle_in_thread(self, threads: Threads) -> None:
        while True:
            # Threads cost more than many a handler, so quick ones get several messages at once.
            share = max(1, sum(len(batch.ids) for batch in self._queue) // self._options.parallel)
            batch = await self._next(min(self._slice, share))
            began = self._loop.time()
            outcomes = await threads.handle(batch.bodies)
            took = self._loop.time() - began
            self._slice = min(self._slice * 2, MAX_SLICE) if took < SLICE / 2 else max(self._slice // 2, 1)
            for id_, (result, error) in zip(batch.ids, outcomes, strict=True):
                if error is not None:
                    self._refuse(batch.wire, id_, error)
                else:
                    self._handled(batch, id_, result)

    def _handled(self, batch: WorkBatch, id_: bytes, result: bytes | None) -> None:
        if result is None:
            self._acknowledge(batch.wire, [id_])
            return
        self._results.append(WorkBatch(batch.wire, [id_], [result], batch.received))
        self._has_results.set()

    # -- results

    async def _write_results(self) -> None:
        while True:
            await self._has_results.wait()
            await self._slots.acquire()
            group = self._group()
            if not group:
                self._slots.release()
                self._has_results.clear()
                continue
            self._tasks.create_task(self._write(group), name="dispatch-write")

    def _group(self) -> list[WorkBatch]:
        """Return results to write together: whole batches, unless one is too large by itself."""
        group: list[WorkBatch] = []
        count = size = 0
        while self._results and count < MAX_GROUP and size < MAX_GROUP_BYTES:
            batch = self._results.popleft()
            fitting = _fitting(batch.bodies, MAX_GROUP - count, MAX_GROUP_BYTES - size)
            if fitting < len(batch.ids):
                rest = WorkBatch(batch.wire, batch.ids[fitting:], batch.bodies[fitting:], batch.received)
                self._results.appendleft(rest)
                batch = WorkBatch(batch.wire, batch.ids[:fitting], batch.bodies[:fitting], batch.received)
            group.append(batch)
            count += len(batch.ids)
            size += sum(map(len, batch.bodies))
        return group

    async def _write(self, group: list[WorkBatch]) -> None:
        try:
            await self._write_all(group)
        finally:
            self._slots.release()

    async def _write_all(self, group: list[WorkBatch]) -> None:
        words: list[bytes] = []
        for batch in group:
            pairs = [b""] * (2 * len(batch.ids))
            pairs[::2], pairs[1::2] = batch.ids, batch.bodies
            words += pairs
        options = self._options
        oldest = min(batch.received for batch in group)
        deadline = int((oldest + options.remember / 2) * 1000 + self._ahead)
        patience = max(oldest + options.ack_timeout * PATIENCE - self._loop.time(), 0.0)
        try:
            async with asyncio.timeout(max(patience, BEAT)):
                fresh, now = await self._calls.run(
                    WRITE,
                    self._keys,
                    self.name,
                    deadline,
                    int(options.remember * 1000),
                    options.max_processed,
                    *words,
                    durable=True,
                    patience=patience,
                )
        except StaleError as error:
            count = sum(len(batch.ids) for batch in group)
            self.stale += count
            log.warning("dispatch_worker_too_late", messages=count, error=str(error), effect="others have got them")
            self._out(count)
            return
        except (StoreError, TimeoutError) as error:
            if not self._trouble:  # until it works again, once is enough
                self._trouble = str(error) or "no answer in time"
                log.warning("dispatch_worker_not_written", error=self._trouble, effect="messages are given back")
            for batch in group:
                self._give_back(batch.wire, batch.ids)
            return
        if self._trouble:
            self._trouble = ""
            log.info("dispatch_worker_writes_again", returned=self.returned)
        self._ahead = now - self._loop.time() * 1000
        self.written += fresh
        self.repeated += len(words) // 2 - fresh
        for batch in group:
            self._acknowledge(batch.wire, batch.ids)

    # -- time and place

    async def _set_clock(self) -> None:
        seconds, microseconds = await self._calls.ask(self._keys[0], "TIME")
        self._ahead = int(seconds) * 1000 + int(microseconds) / 1000 - self._loop.time() * 1000

    async def _keep_beat(self) -> None:
        while True:
            now = self._loop.time()
            if self.stood_still(now):
                for wire in list(self.wires):
                    wire.abort("this process stood still")
            self.beat = now
            await asyncio.sleep(BEAT)

    def stood_still(self, now: float) -> bool:
        return now - self.beat > self._options.remember / 4

    def _advertised(self, port: int) -> str:
        """Return the address of this worker: as configured, with the port that it really has."""
        name = self._options.advertise or self._options.listen
        host, _, given = name.rpartition(":")
        if not self._options.advertise and host in {"0.0.0.0", "[::]", "*"}:  # noqa: S104 - it is compared, not bound
            host = socket.gethostname()
        return f"{host}:{given if int(given) else port}"

    async def _register(self, lease: float) -> None:
        key = self._options.key("registry")
        await self._calls.run(REGISTER, [key], self.name, int(lease * 1000))

    async def _keep_registered(self) -> None:
        while not self.stopping:
            await asyncio.sleep(REGISTRY_INTERVAL)
            try:
                if not self.stopping:
                    await self._register(REGISTRY_LEASE)
            except StoreError as error:
                log.warning("dispatch_worker_not_registered", error=str(error))

    async def _tell(self, report: Callable[[RateReport], None] | None) -> None:
        before, then = self.written, self._loop.time()
        while True:
            await asyncio.sleep(self._options.report)
            done, now = self.written, self._loop.time()
            rate = RateReport(
                messages_per_second=round((done - before) / (now - then), 1),
                messages=done - before,
                total=done,
                in_flight=self.inside,
                refused=self.refused,
                repeated=self.repeated,
                returned=self.returned,
                stale=self.stale,
                strangers=self.strangers,
            )
            if done != before or self.inside:
                log.info("dispatch_worker_rate", worker=self.name, **msgspec.structs.asdict(rate))
            if report is not None:
                report(rate)
            before, then = done, now


def _fitting(bodies: list[bytes], most: int, size: int) -> int:
    """Return how many fit; one always does."""
    if len(bodies) <= most and sum(map(len, bodies)) <= size:
        return len(bodies)
    total = 0
    for count, body in enumerate(bodies[:most]):
        total += len(body)
        if total > size and count:
            return count
    return max(min(len(bodies), most), 1)


def _keep_alive(connection: socket.socket) -> None:
    """Find out within a minute that a leader's machine is gone: a worker that is sent nothing would never know."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Wire(asyncio.Protocol):
    """One connection from a leader."""

    def __init__(self, worker: Worker, options: DispatchOptions) -> None:
        self._worker = worker
        self._reader = MessageReader(options.max_message)
        self._transport: asyncio.Transport | None = None
        self._peer: object = None
        self._paused = False
        secret = worker.security.secret
        self._handshake = Handshake(secret, leads=False) if secret else None
        self._patience: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, not the base class.
        self._transport = cast("asyncio.Transport", transport)
        self._peer = transport.get_extra_info("peername")
        if self._handshake is None:
            self._join()
            return
        waiting = self._worker.waiting
        waiting[self] = None
        if len(waiting) > MAX_STRANGERS:
            next(iter(waiting)).refuse("too many connections have not shown that they know the secret")
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(
            HANDSHAKE_TIME, self.refuse, "the leader has not shown in time that it knows the secret"
        )
        self.write(self._handshake.hello())

    def refuse(self, why: str) -> None:
        """Tell the leader why, and close."""
        self._forget_waiting()
        self._worker.stranger(self._peer, why)
        self.write(refused_frame(why))
        self.close()

    def _forget_waiting(self) -> None:
        self._worker.waiting.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _shake_hands(self, handshake: Handshake, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self.write(handshake.feed(data))
        except HandshakeError as error:
            self.refuse(str(error))
            return
        if handshake.done:
            self._handshake = None
            self._forget_waiting()
            self._join()
            if handshake.rest and not self._transport.is_closing():
                self.data_received(handshake.rest)

    def _join(self) -> None:
        """Let a leader send messages."""
        transport = self._transport
        if transport is None:
            return
        if len(self._worker.wires) >= self._worker.max_leaders:
            self._worker.cut_off += 1
            self.abort("there are max_leaders already")
            return
        _keep_alive(transport.get_extra_info("socket"))
        self._worker.wires.add(self)
        log.info("dispatch_leader_connected", leader=str(self._peer))

    def data_received(self, data: bytes) -> None:
        worker = self._worker
        if self._handshake is not None:
            self._shake_hands(self._handshake, data)
            return
        if worker.stood_still(asyncio.get_running_loop().time()):
            self.abort("this process stood still")
            return
        try:
            ids, bodies = self._reader.feed(data)
        except SecretWantedError:
            worker.wires.discard(self)
            self.refuse("this worker has no secret: give it one (option secret_file of [dispatch]), or the leader none")
            return
        except FrameError as error:
            worker.cut_off += 1
            ids, bodies = cast("tuple[list[bytes], list[bytes]]", error.before or ([], []))
            if ids:  # they are done; the leader hears of it when it sends them again
                worker.receive(self, ids, bodies)
            self.abort(str(error))
            return
        if ids:
            worker.receive(self, ids, bodies)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self in self._worker.waiting and not self._worker.stopping:
            self._worker.stranger(self._peer, "it has hung up before it has shown that it knows the secret")
        self._forget_waiting()
        if not self.ended.done():
            self.ended.set_result(None)
        if self in self._worker.wires:
            self._worker.wires.discard(self)
            log.info("dispatch_leader_gone", leader=str(self._peer), error=str(error or ""))

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        if self._transport is not None:
            log.warning("dispatch_leader_cut_off", leader=str(self._peer), why=why)
            self._transport.abort()
