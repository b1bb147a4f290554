"""An MQTT 3.1.1 and 5 client for asyncio, cheap enough that one process can be thousands of vehicles.

    Client.connect -> publish / send / subscribe -> async for message in client -> disconnect

Rule 1: no task and no future per received message. One read may hold many packets; they are handled in one go, and
        everything that is written in one turn of the event loop leaves in one write.
Rule 2: nothing grows without bound. Received messages wait in a buffer of `buffer` entries; when it is full, reading
        stops and TCP holds the broker back; then acknowledgements are not read either, so a client that publishes
        to itself must take its messages meanwhile. At most the broker's receive maximum is in flight towards it.
Rule 3: a client is one connection. Reconnecting is the caller's decision: give the old client's `state` to the new one,
        and what was not acknowledged is sent again if the broker kept the session.

Messages are acknowledged when they are put into the buffer, or after `on_message` has returned.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl as ssl_
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from motorcade.core.errors import MotorcadeError
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt.codec import DecodeLimits, Decoder, encode
from motorcade.mqtt.packets import (
    V5,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.mqtt.reasons import ProtocolError

__all__ = ["Client", "ClientError", "ClientState", "ConnectionLostError", "RefusedError", "Will"]

_FAILURE = 0x80  # reason codes from here on are refusals
_PINGREQ = encode(Pingreq(), V5)
_TICK = 0.001  # seconds that a timer may be early
_LAST_WRITE = 5.0  # seconds for what is still unwritten when we close


class ClientError(MotorcadeError):
    """The broker could not be reached, said no, or went away."""


class RefusedError(ClientError):
    """The broker said no: to a connection, a message or a subscription."""

    def __init__(self, what: str, reason: ReasonCode, detail: str | None = None) -> None:
        name = reason.name.lower().replace("_", " ")
        super().__init__(f"{what} was refused: {name} (0x{reason:02x}){f': {detail}' if detail else ''}")
        self.reason = reason
        self.detail = detail or ""  #: the broker's own words


class ConnectionLostError(ClientError):
    """The connection ended before the work was done. `reason` is what the broker said, if it said something."""

    def __init__(self, detail: str, reason: ReasonCode | None = None) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class ClientState:
    """The session state of a client from one connection to the next (chapter 4.1 of the specification)."""

    unacknowledged: dict[int, Publish | Pubrel] = field(default_factory=dict)  #: sent, by packet id, in order
    received: set[int] = field(default_factory=set)  #: QoS 2 packet ids that are not yet released
    last_id: int = 0

    def next_id(self, taken: dict[int, asyncio.Future[Packet]]) -> int:
        """Return a packet id that nothing in flight uses."""
        for _ in range(65535):
            self.last_id = self.last_id % 65535 + 1
            if self.last_id not in self.unacknowledged and self.last_id not in taken:
                return self.last_id
        raise ClientError("all 65535 packet ids are in flight")


class Client(asyncio.Protocol):
    """One connection to a broker. Make it with `Client.connect`."""

    def __init__(
        self,
        request: Connect,
        *,
        state: ClientState,
        buffer: int,
        max_inflight: int,
        on_message: Callable[[Publish], ReasonCode | None] | None,
        on_auth: Callable[[bytes | None], bytes] | None,
        web: ClientProtocol | None,
    ) -> None:
        self.request = request
        self.client_id = request.client_id
        self.version = request.version
        self.state = state
        self.connack: Connack | None = None
        self.received = 0  #: messages, duplicates of QoS 2 not counted
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(request.version, limits=DecodeLimits(max_user_properties=0))
        self._on_message = on_message
        self._on_auth = on_auth
        self._pipe = _WebSocket(web) if web is not None else None
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._can_write = True
        self._writers: deque[asyncio.Future[None]] = deque()  # waiting for room in the socket or in the window
        self._max_inflight = max_inflight
        self._answers: dict[int, asyncio.Future[Packet]] = {}  # SUBSCRIBE and UNSUBSCRIBE
        self._published: dict[int, asyncio.Future[ReasonCode]] = {}
        self._told: dict[int, Callable[[Properties], None]] = {}
        self._inflight = 0
        self._messages: deque[Publish] = deque()
        self._limit = buffer
        self._reading = True
        self._consumer: asyncio.Future[None] | None = None
        self._aliases: dict[int, str] = {}
        self._error: ClientError | None = None
        self._leaving = False
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._accepted: asyncio.Future[Connack] = self._loop.create_future()
        self._keep_alive = float(request.keep_alive)
        self._last_sent = 0.0
        self._ping_sent: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- coming and going ---------------------------------------------------------------------------------------------

    @classmethod
    async def connect(
        cls,
        host: str = "127.0.0.1",
        port: int = 1883,
        *,
        client_id: str = "",
        version: int = V5,
        clean_start: bool = True,
        keep_alive: int = 60,
        username: str | None = None,
        password: bytes | None = None,
        will: Will | None = None,
        properties: Properties = NONE,
        tls: ssl_.SSLContext | None = None,
        ws_path: str | None = None,
        local_address: str | None = None,
        state: ClientState | None = None,
        buffer: int = 1000,
        max_inflight: int = 65535,
        on_message: Callable[[Publish], ReasonCode | None] | None = None,
        on_auth: Callable[[bytes | None], bytes] | None = None,
        timeout: float = 10.0,  # noqa: ASYNC109 - callers with thousands of clients should not need a scope for each
    ) -> Client:
        """Connect and wait for CONNACK. Raises `RefusedError` or another `ClientError`.

        `ws_path` speaks MQTT over WebSocket; `local_address` picks the address to come from. `on_message` gets each
        message instead of the buffer; the reason code it returns is the acknowledgement (None is success). `on_auth`
        answers the broker's challenges of enhanced authentication. `max_inflight` lowers the broker's receive maximum.
        """
        request = Connect(client_id, version, clean_start, keep_alive, username, password, will, properties)
        scheme = "wss" if tls is not None else "ws"
        place = f"[{host}]" if ":" in host else host
        web = None
        if ws_path is not None:
            uri = parse_uri(f"{scheme}://{place}:{port}{ws_path}")
            web = ClientProtocol(uri, subprotocols=[Subprotocol("mqtt")], max_size=None)

        def make() -> Client:
            return cls(
                request,
                state=state if state is not None else ClientState(),
                buffer=buffer,
                max_inflight=max_inflight,
                on_message=on_message,
                on_auth=on_auth,
                web=web,
            )

        local = (local_address, 0) if local_address is not None else None
        try:
            async with asyncio.timeout(timeout):
                _, client = await asyncio.get_running_loop().create_connection(
                    make, host, port, ssl=tls, local_addr=local
                )
                await client.accepted()
        except TimeoutError as error:
            raise ClientError(f"no answer from {place}:{port} within {timeout:g} s") from error
        except OSError as error:
            raise ClientError(f"cannot connect to {place}:{port}: {_cause(error)}") from error
        return client

    async def accepted(self) -> Connack:
        """Return the broker's CONNACK. `connect` has waited for it already."""
        try:
            return await asyncio.shield(self._accepted)
        except BaseException:
            self._abort()
            raise

    async def disconnect(self, reason: ReasonCode = ReasonCode.SUCCESS, properties: Properties = NONE) -> None:
        """Say goodbye and close. What was written before still leaves; waiting calls end with `ConnectionLostError`."""
        if not self._closed.done() and not self._leaving:
            self._leaving = True
            self._resume_reading()
            self._write(encode(Disconnect(reason, properties), self.version))
            self._flush()
            if self._pipe is not None:
                self._send_raw(self._pipe.close())
            self._hang_up()
        await asyncio.shield(self._closed)

    def abort(self) -> None:
        """Close without goodbye, as a lost network does: the broker publishes the will."""
        self._lose(ConnectionLostError("aborted"))
        self._abort()

    async def wait_closed(self) -> ReasonCode | None:
        """Wait until the connection has ended; return the broker's reason, if it gave one."""
        await asyncio.shield(self._closed)
        return self._error.reason if isinstance(self._error, ConnectionLostError) else None

    @property
    def is_connected(self) -> bool:
        """Return True while calls can succeed."""
        return self.connack is not None and not self._leaving and not self._closed.done()

    @property
    def session_present(self) -> bool:
        """Return True if the broker has kept the session."""
        return self.connack is not None and self.connack.session_present

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()

    # --- publishing ---------------------------------------------------------------------------------------------------

    async def publish(
        self, topic: str, payload: bytes = b"", qos: int = 0, *, retain: bool = False, properties: Properties = NONE
    ) -> ReasonCode:
        """Send a message and wait until the broker has it (QoS 0: until it is handed to the system)."""
        sent = await self.send(topic, payload, qos, retain=retain, properties=properties)
        return ReasonCode.SUCCESS if sent is None else await sent

    async def send(
        self,
        topic: str,
        payload: bytes = b"",
        qos: int = 0,
        *,
        retain: bool = False,
        properties: Properties = NONE,
        told: Callable[[Properties], None] | None = None,
    ) -> asyncio.Future[ReasonCode] | None:
        """Send a message, waiting only for room. The future ends when the broker has it; None for QoS 0.

        The future raises `RefusedError` if the broker (MQTT 5) says no, and `ConnectionLostError` if it goes away.
        `told` is called before that with what the broker's acknowledgement says besides, user properties for instance.
        """
        while not self._can_write or (qos and self._inflight >= self._max_inflight):
            self._check_open()
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._writers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake_writers(1)  # we were told of room that we do not take
                raise
        self._check_open()
        if not qos:
            self._write(encode(Publish(topic, payload, 0, retain, properties=properties), self.version))
            return None
        packet_id = self.state.next_id(self._answers)
        packet = Publish(topic, payload, qos, retain, False, packet_id, properties)
        self._write(encode(packet, self.version))
        self.state.unacknowledged[packet_id] = packet
        self._inflight += 1
        if told is not None:
            self._told[packet_id] = told
        done = self._published[packet_id] = self._loop.create_future()
        done.add_done_callback(_seen)
        return done

    # --- subscribing --------------------------------------------------------------------------------------------------

    async def subscribe(
        self, *subscriptions: Subscription | tuple[str, int] | str, properties: Properties = NONE
    ) -> tuple[ReasonCode, ...]:
        """Ask for messages: filters, (filter, QoS) or `Subscription`s. One reason code each; they may be refusals."""
        return (await self.ask_for(*subscriptions, properties=properties)).reasons

    async def ask_for(
        self, *subscriptions: Subscription | tuple[str, int] | str, properties: Properties = NONE
    ) -> Suback:
        """Subscribe as `subscribe` does, but return the whole answer: it may have a reason string."""
        wanted = tuple(map(_subscription, subscriptions))
        answer = await self._ask(lambda packet_id: Subscribe(packet_id, wanted, properties))
        return cast("Suback", answer)

    async def unsubscribe(self, *filters: str, properties: Properties = NONE) -> tuple[ReasonCode, ...]:
        """Ask for no more. One reason code per filter in MQTT 5, none before."""
        answer = await self._ask(lambda packet_id: Unsubscribe(packet_id, filters, properties))
        return cast("Unsuback", answer).reasons

    async def _ask(self, make: Callable[[int], Packet]) -> Packet:
        self._check_open()
        packet_id = self.state.next_id(self._answers)
        data = encode(make(packet_id), self.version)
        answer: asyncio.Future[Packet] = self._loop.create_future()
        self._answers[packet_id] = answer
        self._write(data)
        try:
            return await answer
        finally:
            self._answers.pop(packet_id, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Publish:
        """Return the next message. Ends after `disconnect`; raises `ConnectionLostError` when the broker was lost."""
        while not self._messages:
            if self._leaving or (self._closed.done() and self._error is None):
                raise StopAsyncIteration
            self._check_open()
            if self._consumer is None or self._consumer.done():
                self._consumer = self._loop.create_future()
            await asyncio.shield(self._consumer)
        message = self._messages.popleft()
        if not self._reading and len(self._messages) <= self._limit // 2:
            self._resume_reading()
        return message

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._pipe is not None:
            self._send_raw(self._pipe.open())
        else:
            self._introduce()

    def data_received(self, data: bytes) -> None:
        try:
            if self._pipe is not None:
                data = self._unwrap(self._pipe, data)
            for packet in self._decoder.feed(data):
                self._handle(packet)
        except ProtocolError as error:
            self._lose(ConnectionLostError(f"the broker broke the rules: {error}", error.reason))
            if self.connack is not None and self.version == V5:
                self._write(encode(Disconnect(error.reason), self.version))
                self._flush()
            self._hang_up()

    def _unwrap(self, pipe: _WebSocket, data: bytes) -> bytes:
        was_open = pipe.is_open
        payload, reply = pipe.receive(data)
        self._send_raw(reply)
        if pipe.is_open and not was_open:
            self._introduce()
        elif pipe.failure is not None:
            self._lose(ClientError(f"the WebSocket handshake failed: {pipe.failure}"))
            self._abort()
        return payload

    def eof_received(self) -> None:
        if self._pipe is not None:
            self._pipe.end()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._leaving:
            why = f"the connection was lost: {exc}" if exc else "the broker closed the connection"
            self._lose(ConnectionLostError(why))
        self._end_all(self._error or ConnectionLostError("disconnected"))
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        self._wake_writers(len(self._writers))

    def _introduce(self) -> None:
        self._accepted.add_done_callback(_seen)
        self._write(encode(self.request, self.version))
        self._flush()

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        if not self._out or self._transport is None:
            return
        data = b"".join(self._out)
        self._out.clear()
        self._last_sent = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data if self._pipe is None else self._pipe.wrap(data))

    def _send_raw(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _hang_up(self) -> None:
        """Close when everything is written, or soon if the broker does not take it."""
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_LAST_WRITE, self._abort)

    def _abort(self) -> None:
        if self._transport is not None and not self._closed.done():
            self._transport.abort()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._leaving or self._closed.done():
            raise ConnectionLostError("the client is disconnected")

    def _lose(self, error: ClientError) -> None:
        """Keep the first reason; what follows from it is not news."""
        if self._error is None:
            self._error = error
        if not self._accepted.done():
            self._accepted.set_exception(self._error)

    def _end_all(self, error: ClientError) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._published.values(), *self._answers.values(), *self._writers]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.add_done_callback(_seen)
        self._published.clear()
        self._told.clear()
        self._writers.clear()
        self._wake_consumer()

    def _wake_writers(self, count: int) -> None:
        while self._writers and count:
            waiter = self._writers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _wake_consumer(self) -> None:
        if self._consumer is not None and not self._consumer.done():
            self._consumer.set_result(None)

    def _resume_reading(self) -> None:
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            if self._ping_sent is not None:
                self._ping_sent = self._loop.time()  # the answer may lie behind what we did not read
            self._transport.resume_reading()

    # --- packets ------------------------------------------------------------------------------------------------------

    def _handle(self, packet: Packet) -> None:
        match packet:
            case Publish():
                self._on_publish(packet)
            case Puback():
                self._finish(packet.packet_id, packet.reason, packet.properties)
            case Pubrec():
                self._on_pubrec(packet)
            case Pubrel():
                self.state.received.discard(packet.packet_id)
                self._write(encode(Pubcomp(packet.packet_id), self.version))
            case Pubcomp():
                self._finish(packet.packet_id, packet.reason, packet.properties)
            case Suback() | Unsuback():
                answer = self._answers.pop(packet.packet_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(packet)
            case Pingresp():
                self._ping_sent = None
            case Connack():
                self._on_connack(packet)
            case Disconnect():
                self._on_disconnect(packet)
            case Auth():
                self._on_challenge(packet)
            case _:
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, f"a broker does not send {type(packet).__name__}")

    def _on_connack(self, packet: Connack) -> None:
        if self.connack is not None:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "second CONNACK")
        if packet.reason >= _FAILURE:
            self._lose(RefusedError("the connection", packet.reason, packet.properties.reason_string))
            self._hang_up()
            return
        self.connack = packet
        told = packet.properties
        self.client_id = told.assigned_client_id or self.client_id
        self._max_inflight = min(self._max_inflight, told.receive_maximum or 65535)
        if told.server_keep_alive is not None:
            self._keep_alive = float(told.server_keep_alive)
        if self._keep_alive:
            self._timer = self._loop.call_later(self._keep_alive, self._tick)
        self._resume(packet.session_present)
        if not self._accepted.done():
            self._accepted.set_result(packet)

    def _resume(self, session_present: bool) -> None:
        if not session_present:
            self.state.unacknowledged.clear()
            self.state.received.clear()
            return
        for packet_id, packet in self.state.unacknowledged.items():  # in order [MQTT-4.6.0-1]
            again = replace(packet, dup=True) if isinstance(packet, Publish) else packet  # [MQTT-4.4.0-1]
            self._write(encode(again, self.version))
            done = self._published[packet_id] = self._loop.create_future()
            done.add_done_callback(_seen)
            self._inflight += 1

    def _on_publish(self, packet: Publish) -> None:
        if packet.properties.topic_alias is not None:
            packet = self._resolve_alias(packet, packet.properties.topic_alias)
        packet_id = packet.packet_id
        if packet.qos == 2:
            if packet_id in self.state.received:
                self._write(encode(Pubrec(packet_id), self.version))
                return
            self.state.received.add(packet_id)
        self.received += 1
        reason = ReasonCode.SUCCESS
        if self._on_message is not None:
            reason = self._on_message(packet) or ReasonCode.SUCCESS
        else:
            self._messages.append(packet)
            self._wake_consumer()
            if self._reading and len(self._messages) >= self._limit and self._transport is not None:
                self._reading = False
                self._transport.pause_reading()
        if packet.qos == 1:
            self._write(encode(Puback(packet_id, reason), self.version))
        elif packet.qos == 2:
            if reason >= _FAILURE:
                self.state.received.discard(packet_id)
            self._write(encode(Pubrec(packet_id, reason), self.version))

    def _resolve_alias(self, packet: Publish, alias: int) -> Publish:
        if packet.topic:
            self._aliases[alias] = packet.topic
            return packet
        if alias not in self._aliases:
            raise ProtocolError(ReasonCode.TOPIC_ALIAS_INVALID, f"topic alias {alias} was never set")
        return replace(packet, topic=self._aliases[alias])

    def _on_pubrec(self, packet: Pubrec) -> None:
        if packet.reason >= _FAILURE:
            self._finish(packet.packet_id, packet.reason, packet.properties)
            return
        if packet.packet_id in self.state.unacknowledged:
            release = self.state.unacknowledged[packet.packet_id] = Pubrel(packet.packet_id)
        else:
            release = Pubrel(packet.packet_id, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)
        self._write(encode(release, self.version))

    def _finish(self, packet_id: int, reason: ReasonCode, properties: Properties) -> None:
        packet = self.state.unacknowledged.pop(packet_id, None)
        done = self._published.pop(packet_id, None)
        if done is None:
            return
        self._inflight -= 1
        self._wake_writers(1)
        if (told := self._told.pop(packet_id, None)) is not None:
            told(properties)
        if done.done():
            return
        if reason >= _FAILURE:
            what = f"the message to {packet.topic!r}" if isinstance(packet, Publish) else "the message"
            done.set_exception(RefusedError(what, reason, properties.reason_string))
        else:
            done.set_result(reason)

    def _on_disconnect(self, packet: Disconnect) -> None:
        name = packet.reason.name.lower().replace("_", " ")
        detail = packet.properties.reason_string
        text = f"the broker disconnected us: {name} (0x{packet.reason:02x}){f': {detail}' if detail else ''}"
        self._lose(ConnectionLostError(text, packet.reason))
        self._hang_up()

    def _on_challenge(self, packet: Auth) -> None:
        if self._on_auth is None:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "AUTH, but enhanced authentication was not asked for")
        if packet.reason is not ReasonCode.CONTINUE_AUTHENTICATION:
            return  # re-authentication has succeeded
        data = self._on_auth(packet.properties.authentication_data)
        method = self.request.properties.authentication_method
        reply = Properties(authentication_method=method, authentication_data=data)
        self._write(encode(Auth(ReasonCode.CONTINUE_AUTHENTICATION, reply), self.version))

    def _tick(self) -> None:
        """Run once per keep-alive, or when the last packet gets that old: one timer, however much is sent."""
        now = self._loop.time()
        if self._ping_sent is not None and self._reading and now >= self._ping_sent + self._keep_alive - _TICK:
            self._lose(ConnectionLostError(f"the broker did not answer PINGREQ within {self._keep_alive:g} s"))
            self._abort()
            return
        due = self._last_sent + self._keep_alive
        if now >= due - _TICK:
            if self._ping_sent is None:
                self._ping_sent = now
            self._write(_PINGREQ)
            due = now + self._keep_alive
        self._timer = self._loop.call_at(due, self._tick)


def _cause(error: OSError) -> str:
    if isinstance(error, ssl_.SSLError | socket.gaierror) or not error.errno:
        return str(error) or "the TLS handshake failed; does the port speak TLS?"
    return os.strerror(error.errno)  # asyncio's own text repeats the address


def _subscription(wish: Subscription | tuple[str, int] | str) -> Subscription:
    if isinstance(wish, Subscription):
        return wish
    return Subscription(wish) if isinstance(wish, str) else Subscription(*wish)


def _seen(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved: callers need not await a publish, and asyncio must not complain."""
    if not future.cancelled():
        future.exception()


class _WebSocket:
    """MQTT inside binary WebSocket messages: bytes in, bytes out, no socket."""

    def __init__(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self.is_open = False
        self.failure: Exception | None = None

    def open(self) -> bytes:
        self._protocol.send_request(self._protocol.connect())
        return self._drain()

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Return (MQTT bytes, bytes to send back)."""
        self._protocol.receive_data(data)
        payload = b""
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self.failure = self._protocol.handshake_exc
                self.is_open = self.failure is None
                if self.is_open and self._protocol.subprotocol != "mqtt":
                    self.is_open = False
                    self.failure = InvalidHandshake("the server does not speak the sub-protocol mqtt")
            elif isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                payload += bytes(event.data)
        return payload, self._drain()

    def wrap(self, data: bytes) -> bytes:
        self._protocol.send_binary(data)
        return self._drain()

    def close(self) -> bytes:
        if self.is_open:
            self._protocol.send_close(1000)
        return self._drain()

    def end(self) -> None:
        self._protocol.receive_eof()

    def _drain(self) -> bytes:
        return b"".join(self._protocol.data_to_send())
