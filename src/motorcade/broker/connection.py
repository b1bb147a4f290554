"""One network connection: bytes in, what must wait, and the way out.

Two speeds, one meaning. `fastpath.py` takes the frequent packets of a read in one go; everything else goes packet by
packet through `channel.py`, as does every packet while a plugin observes deliveries. A test runs the same
conversations both ways and compares.

    read -> fast path or channel -> window of each receiver: bytes appended to `out`, window marked dirty
    end of the loop turn -> Flusher.flush: one write per dirty connection

Back-pressure: every reason not to read from a client is a `Pause`: a hook chain, a slow receiver, the store, another
member, its rate.
They add up, and the client is read from again when none is left (`hold`, `resume`). So its packets stay in order, TCP
slows the sender down, and others are not held up.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from motorcade.broker import fastpath
from motorcade.broker.ack_queue import AckQueue
from motorcade.broker.channel import Channel, Refused
from motorcade.broker.effects import (
    NEXT_TURN,
    Await,
    AwaitMembers,
    AwaitReceiver,
    BindSession,
    Close,
    PublishWill,
    RenewCredentials,
    RunHook,
    SendPacket,
    Steps,
)
from motorcade.broker.frames import read_varint
from motorcade.broker.limits import LeakyBucket
from motorcade.broker.publishing import unanswered
from motorcade.broker.session import Session
from motorcade.broker.stats import Stats
from motorcade.broker.tls import certificate_of
from motorcade.clock import time
from motorcade.commit import Commit, is_refusal
from motorcade.core.client import Certificate, ClientInfo
from motorcade.core.errors import MotorcadeError
from motorcade.mqtt import codec, packets
from motorcade.mqtt.packets import Auth, Connack, Disconnect, Packet, Pingreq, Pingresp, Puback
from motorcade.mqtt.properties import Properties
from motorcade.mqtt.reasons import ProtocolError, ReasonCode, connack_code_v3

if TYPE_CHECKING:
    from motorcade.broker.broker import Broker
    from motorcade.broker.session import Session

log = structlog.stdlib.get_logger("motorcade.connection")

MAX_PIECES = 1024  #: pieces of an unfinished packet before they are joined; many small ones cost more than their bytes
CHANNEL_COST = 32  #: packets of the fast path that one through the channel counts as
FULL_READ = 64 * 1024  #: bytes of a read after which the others have their turn; the event loop would read on
READS_PER_FLUSH = 16  #: reads after which output is written even though the loop turn is not over
RECHECK_AGAIN = 0.1  #: seconds until access is rechecked for a client that waits for a hook
MAX_UNCOMMITTED = 1000  #: answers to one client that wait for the store, before no more of its packets are taken
MAX_UNCOMMITTED_BYTES = 4 * 1024 * 1024  #: bytes of the messages they are for
CLOSE_GRACE = 5.0  #: seconds a closing connection may take to write what is left

#: With these a client is told where to go instead, if that is configured.
_WITH_REFERENCE: Final = frozenset(
    {ReasonCode.SERVER_SHUTTING_DOWN, ReasonCode.USE_ANOTHER_SERVER, ReasonCode.SERVER_MOVED}
)


class Pause(enum.IntFlag):
    """The reason for which a connection does not read."""

    HOOK = enum.auto()  #: a hook chain has not answered yet
    RECEIVER = enum.auto()  #: the receiver of its last message is behind (session, rule 4)
    STORE = enum.auto()  #: its last packet must be stored before the next one is taken
    ANSWERS = enum.auto()  #: too many of its answers wait for the store
    VIEW = enum.auto()  #: another member may know of subscribers that are not known here
    PEER = enum.auto()  #: a member that its last message goes to has no room for more
    LONG_PACKET = enum.auto()  #: its last packet is so much work that it goes on in the next turn of the loop
    RATE = enum.auto()  #: it is over its rate limit, of messages or bytes
    TURN = enum.auto()  #: its budget of this turn of the loop is spent
    MOVE = enum.auto()  #: its next packet is a PUBLISH, and the member it comes from has not answered all before it
    FULL_SOCKET = enum.auto()  #: it does not read what it is sent; its packets would only make more answers
    CLOSING = enum.auto()  #: the end; no other reason counts any more


# Plain integers, as is the set of a connection's reasons: an operator of an enum costs a microsecond.
#: A packet was taken and is not done with: nothing else may be decided for the client meanwhile.
SUSPENDED = (
    Pause.HOOK | Pause.RECEIVER | Pause.STORE | Pause.ANSWERS | Pause.VIEW | Pause.PEER | Pause.LONG_PACKET
).value
#: What has been read already is not taken either. A full socket only ends the reading.
HELD = SUSPENDED | Pause.RATE.value | Pause.TURN.value | Pause.MOVE.value
CLOSING = Pause.CLOSING.value
ANSWERS = Pause.ANSWERS.value
TURN = Pause.TURN.value


class Flusher:
    """Writes what the turn of the loop has produced: one write per connection."""

    __slots__ = ("_dirty", "_loop", "_scheduled", "_stats", "reads")

    def __init__(self, dirty: list[Session], stats: Stats, loop: asyncio.AbstractEventLoop) -> None:
        self._dirty = dirty
        self._stats = stats
        self._loop = loop
        self._scheduled = False
        self.reads = 0

    def later(self) -> None:
        """Write at the end of this turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write now."""
        self.reads = 0
        dirty = self._dirty
        sent = 0
        for window in dirty:
            out = window.out
            link = window.link
            if not out or link is None:
                continue
            try:
                data = out[0] if len(out) == 1 else b"".join(out)
                out.clear()
                direct = link.direct
                if direct is None:
                    link.write(data)
                    continue
                try:
                    written = direct(data)
                except OSError:  # full, or reset by the peer
                    written = 0
                sent += written
                if written != len(data):
                    link.write_rest(data[written:])
            except Exception as error:  # noqa: BLE001 - memory, mostly; half a packet must not be followed by others
                log.error("write_failed", error=repr(error))  # noqa: TRY400 - what there is to say
                out.clear()
                link.abort("cannot be written to")
        self._stats.bytes_sent += sent
        dirty.clear()


class Connection(asyncio.Protocol):
    """A client's connection, from the first byte to the last."""

    __slots__ = (
        "_answering",
        "_chunks",
        "_have",
        "_lost",
        "_moves",
        "_need",
        "_paused",
        "_pumping",
        "_socket",
        "_steps",
        "_steps_behind",
        "_task",
        "_throttled",
        "asked",
        "broker",
        "bytes_bucket",
        "channel",
        "deadline",
        "direct",
        "expires_at",
        "listener",
        "messages_bucket",
        "opened",
        "seen",
        "session",
        "stalled_bytes",
        "stalled_since",
        "transport",
        "why",
        "with_will",
    )

    def __init__(self, broker: Broker, listener: str) -> None:
        self.broker = broker
        self.listener = listener
        self.transport: asyncio.Transport | None = None
        self.channel: Channel | None = None
        self.session: Session | None = None
        self.opened = 0.0  # monotonic seconds; so are the others
        self.asked: float | None = None  # when CONNECT was there
        self.seen = 0.0
        self.deadline = 0.0  # silence allowed, in seconds; 0 is any
        self.expires_at: float | None = None  # end of the credentials, seconds since the epoch
        self.stalled_since: float | None = None  # the socket is full, and has taken nothing since
        self.stalled_bytes = 0
        self._socket: socket.socket | None = None  # plain TCP; TLS and WebSocket have more to do than to send bytes
        self.direct: Callable[[bytes], int] | None = None  # its `send`, while nothing waits in the transport's buffer
        self._moves = False  # the member that its client comes from has not answered all it has published there
        self._paused = 0  # the reasons why nothing is read, a set of `Pause` as a number
        self.with_will = True
        self.why = "connection lost"
        self.messages_bucket: LeakyBucket | None = None
        self.bytes_bucket: LeakyBucket | None = None
        self._chunks: list[bytes] | None = None  # an unfinished packet
        self._have = 0
        self._need = 0
        self._pumping = False  # a pump is due in the next turn
        self._steps: Steps | None = None  # a conversation that waits for the client's next packet
        self._steps_behind: Steps | None = None  # one that waits for another client to catch up
        self._lost = False  # by the network, before everything that had been read was taken
        self._answering = False  # a conversation that waited for the store goes on
        self._throttled: asyncio.TimerHandle | None = None  # the end of a pause because of its rate
        self._task: asyncio.Task[None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.opened = self.seen = monotonic()
        state = self.broker.state
        # Without an address (the peer has reset the connection before we looked) the peer is unknown.
        host, port = (peer[0], peer[1]) if isinstance(peer, tuple) else ("", 0)
        if not host or not self.broker.add(self, host):
            self.hold(Pause.CLOSING)
            transport.abort()
            return
        transport.set_write_buffer_limits(state.limits.write_high, state.limits.write_low)
        if self.listener == "tcp":
            number = transport.get_extra_info("socket").fileno()
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, number)  # the transport's, not ours
            self.direct = self._socket.send
        client = ClientInfo("", host=host, port=port, listener=self.listener, certificate=_certificate(transport))
        self.channel = Channel(state, client)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio says so
        self.transport = None
        if self._socket is not None:
            self._socket.detach()
            self._socket = self.direct = None
        if self._paused & TURN and self._chunks is not None:
            self._lost = True  # what has come before the end counts, a DISCONNECT among it: go on as if it were there
            return
        self._end()

    def _end(self) -> None:
        """Give back everything that belongs to the connection."""
        self.hold(Pause.CLOSING)
        if self._throttled is not None:
            self._throttled.cancel()
        if self._task is not None:
            self._task.cancel()
        for steps in (self._steps, self._steps_behind):
            if steps is not None:
                steps.close()
        self._steps = self._steps_behind = None
        self._leave()
        self.broker.remove(self)

    def pause_writing(self) -> None:
        self.stalled_since = monotonic()
        if self.session is not None:
            self.session.set_writable(False)
        self.hold(Pause.FULL_SOCKET)

    def resume_writing(self) -> None:
        self.stalled_since = None
        self.seen = monotonic()
        if self.session is not None:
            self.session.set_writable(True)
            self.pump()
        self.resume(Pause.FULL_SOCKET)

    def stalled(self, now: float) -> float:
        """Return for how many seconds the full socket has taken nothing at all."""
        left = self.transport.get_write_buffer_size() if self.transport is not None else 0
        if left != self.stalled_bytes:
            self.stalled_bytes = left
            self.stalled_since = self.seen = now
        return now - self.stalled_since if self.stalled_since is not None else 0.0

    def eof_received(self) -> bool | None:
        return None  # close

    def data_received(self, data: bytes) -> None:
        self.seen = monotonic()
        broker = self.broker
        arrived = len(data)
        broker.state.stats.bytes_received += arrived
        if self._chunks is not None:
            # An unfinished packet: collect without copying until it is complete, however small the pieces are.
            self._chunks.append(data)
            self._have += len(data)
            if len(self._chunks) > MAX_PIECES:
                self._chunks = [b"".join(self._chunks)]
            if self._have < self._need or self.held:
                return
            data = b"".join(self._chunks)
            self._chunks = None
        if self._paused:
            if self._paused & CLOSING:
                return
            if self._paused & HELD:
                self._keep(data, len(data))
                return
        session = self.session
        before = session.received if session is not None else 0
        if arrived >= FULL_READ:
            self._give_way()
        try:
            self._take(data)
        except ProtocolError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - one client's trouble, whatever it is, must stay its own
            self._crash(error)
        if session is not None and (self.messages_bucket is not None or self.bytes_bucket is not None):
            self._throttle(session.received - before, arrived)
        flusher = broker.flusher
        if broker.state.shared.dirty:
            flusher.reads += 1
            if flusher.reads >= READS_PER_FLUSH:
                flusher.flush()
            else:
                flusher.later()

    # -- back-pressure

    def hold(self, why: Pause) -> None:
        """Stop reading, for one more reason."""
        if self._paused & CLOSING:
            return
        if why is Pause.CLOSING:  # the transport does not read any more by itself
            self._paused = CLOSING
            return
        self._paused |= why.value
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self, why: Pause) -> None:
        """Drop a reason. If nothing holds the client any more, take what was kept meanwhile and read again."""
        self._paused &= ~why.value
        if self._paused & (HELD | CLOSING):
            return
        self.seen = monotonic()
        if not self._paused and self.transport is not None:
            self.transport.resume_reading()
        if self._chunks is not None:
            self.data_received(b"")

    @property
    def pauses(self) -> Pause:
        """Return why nothing is read."""
        return Pause(self._paused)

    @property
    def held(self) -> bool:
        """Return True if nothing is taken from it now: something is waited for, or it is over its rate or budget."""
        return self._paused & HELD != 0

    @property
    def closing(self) -> bool:
        """Return True from the moment at which it is closed, even if something is still to be written."""
        return self._paused & CLOSING != 0

    @property
    def spent(self) -> bool:
        """Return True if nothing but the budget of this turn keeps it from taking more."""
        return self._paused & HELD == TURN

    # -- packets

    def _take(self, data: bytes) -> None:
        """Take every whole packet of `data`, the frequent ones in the fast path, as far as the budget of a turn goes.

        Keep the rest.
        """
        state = self.broker.state
        n = len(data)
        i = 0
        left = fastpath.PACKETS_PER_TURN
        while not self._paused & CLOSING:
            session, channel = self.session, self.channel
            if self._moves:
                pass  # packet by packet, as far as the next PUBLISH
            elif session is not None and channel is not None and channel.session is not None and not state.observed:
                i, left = fastpath.run(channel, session, data, i, self._max_size(), left)
                if self.session is not session:  # a write was refused at once, and the client sent away
                    return
                if session.acks is not None and _crowd(session.acks):
                    self.hold(Pause.ANSWERS)
                    self._keep(data[i:], 0)
                    return
                if state.store is not None and session.acks_wait and state.store.writer.full:
                    self.hold(Pause.ANSWERS)  # until one of its answers is there
                    self._keep(data[i:], 0)
                    return
            elif i < n and session is None and self._steps is None and data[i] >> 4 != 1:
                # A stranger: do not wait for more.
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "the first packet must be CONNECT")  # [MQTT-3.1.0-1]
            if i >= n:
                return
            if left <= 0:
                self._keep(data[i:], 0)
                self._give_way()
                return
            found = codec.split(data, i, self._max_size())
            if found is None:
                self._keep_packet(data[i:] if i else data)
                return
            body, end = found
            if self._moves and data[i] >> 4 == packets.PUBLISH:
                self.hold(Pause.MOVE)
                self._keep(data[i:], 0)
                return
            if not self._packet(data[i], data[body:end], time()):
                self._keep(data[end:], 0)
                return
            # Filters cost by their levels; other packets hardly by their bytes.
            left -= CHANNEL_COST + (
                end - i if data[i] >> 4 in (packets.SUBSCRIBE, packets.UNSUBSCRIBE) else end - i >> 6
            )
            i = end

    def _give_way(self) -> None:
        """Let the others have their turn of the loop before this client's next packets."""
        if not self._paused & (TURN | CLOSING):
            self.hold(Pause.TURN)
            self.broker.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Go on reading after the turns of other connections."""
        self.resume(Pause.TURN)
        if self._lost and not self._paused & TURN:
            self._end()

    def _max_size(self) -> int:
        """Return how many bytes a packet of this client may have; few until it is let in."""
        limits = self.broker.state.limits
        limit = limits.max_packet_size or codec.MAX_PACKET
        return limit if self.session is not None else min(limits.max_connect_size or limit, limit)

    def _packet(self, first: int, body: bytes, wall: float) -> bool:
        """Take one packet through the channel; False if the connection is suspended now."""
        channel = self.channel
        assert channel is not None  # noqa: S101 - made with the connection
        state = self.broker.state
        state.stats.packets_received += 1
        try:
            packet = codec.decode(first, body, channel.context.version, state.codec_limits)
        except ProtocolError as error:
            if error.reason is ReasonCode.QUOTA_EXCEEDED:
                state.refuse("max_user_properties")
            if channel.session is None and _is_v5_connect(body):
                channel.context.version = 5
            raise
        if self.asked is None:
            self.asked = self.seen
        steps = self._steps
        if steps is not None and (channel.session is None or isinstance(packet, Auth)):
            self._steps = None
            return self._drive(steps, packet)
        return self._drive(channel.receive(packet, wall), None)

    def _drive(self, steps: Steps, answer: Any) -> bool:
        """Carry out what the channel yields; False if it must wait for a hook."""
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration:
                return True
            answer = None
            if isinstance(effect, SendPacket):
                self.send(effect)
            elif isinstance(effect, RunHook):
                answer = effect.chain.fold(*effect.args, acc=effect.acc)
                if inspect.isawaitable(answer):
                    self._suspend(steps, answer)
                    return False
            elif isinstance(effect, BindSession):
                self._open(effect)
            elif isinstance(effect, RenewCredentials):
                self.expires_at = effect.expires_at
            elif isinstance(effect, AwaitReceiver):
                self._wait_for(effect.session, steps)
                return False
            elif isinstance(effect, AwaitMembers):
                self.hold(Pause.VIEW if effect.view else Pause.PEER)
                self._steps_behind = steps
                effect.commit.then(self.caught_up)
                return False
            elif effect is NEXT_TURN:
                self.hold(Pause.LONG_PACKET)
                self._steps_behind = steps
                self.caught_up()
                return False
            elif isinstance(effect, Await):
                session = self.session or (self.channel.session if self.channel is not None else None)
                if session is not None and (session.acks_wait or not effect.commit.done):
                    return self._await(session, effect, steps)
                if not effect.commit.done:  # it is not let in yet
                    self.hold(Pause.STORE)
                    self._steps_behind = steps
                    effect.commit.then(self._after_wait)
                    return False
            elif isinstance(effect, PublishWill):
                self.broker.publish_will(effect.message)
            elif isinstance(effect, Close):
                self.with_will = effect.with_will
                self.close("client disconnected")
            else:  # RECEIVE
                self._steps = steps
                return True

    def _open(self, effect: BindSession) -> None:
        """Open the connection for a client that the channel has let in."""
        session = self.session = effect.session
        session.link = self
        state = self.broker.state
        state.registry.connect(session)
        self.deadline = effect.keep_alive * state.limits.keep_alive_factor
        self.expires_at = effect.expires_at
        limits = state.limits
        now = monotonic()
        if limits.message_rate:
            self.messages_bucket = LeakyBucket(limits.message_rate, limits.message_burst, now)
        if limits.byte_rate:
            self.bytes_bucket = LeakyBucket(limits.byte_rate, limits.byte_burst, now)
        attachments = state.store.attachments if state.store is not None else None
        drained = attachments.drained(session.client.client_id) if attachments is not None else None
        if drained is not None:
            self._moves = True
            drained.then(self._moved)

    def _moved(self) -> None:
        """Take what the client publishes: the member that it comes from has answered everything, or is fenced."""
        self._moves = False
        self.resume(Pause.MOVE)

    # -- waiting

    def _suspend(self, steps: Steps, waiting: Any) -> None:
        """Read nothing more until a hook chain has answered."""
        self.hold(Pause.HOOK)
        self._task = asyncio.create_task(self._wait(steps, waiting), name="hook")
        self._task.add_done_callback(lambda _: _close_unstarted(waiting))

    def _wait_for(self, session: Session, steps: Steps) -> None:
        """Read nothing more until a client that is behind has caught up (session, rule 4)."""
        self.hold(Pause.RECEIVER)
        self._steps_behind = steps
        if session.waiting is None:
            session.waiting = []
            self.broker.loop.call_later(session.shared.options.patience, session.lose_patience, session.waiting)
        session.waiting.append(self)

    def _await(self, session: Session, effect: Await, steps: Steps) -> bool:
        """Go on with a conversation when its commit is done; False if the client's next packets have to wait too."""
        acks = session.ack_queue()
        if effect.hold:
            if self.closing:
                steps.close()
                return False
            self.hold(Pause.STORE)
            self._steps_behind = steps
            acks.join(effect.commit, self._after_wait, first=self._answering)
            return False
        go_on = partial(self._answer, session, steps)
        acks.join(effect.commit, go_on, 1, effect.size, first=self._answering, routed=effect.routed)
        if not _crowd(acks):
            return True
        self.hold(Pause.ANSWERS)
        return False

    def less_crowded(self) -> None:
        """Take packets again in the next turn, if it was held off and few answers wait now."""
        session = self.session
        if self._paused & ANSWERS and (session is None or session.acks is None or not _crowd(session.acks, 2)):
            self._give_way()
            self.resume(Pause.ANSWERS)

    def acknowledge(self, numbers: list[bytes], commit: Commit[Any]) -> None:
        """Acknowledge QoS 1 messages that the fast path took, as they are stored, or could not be."""
        session, channel = self.session, self.channel
        if self.closing or session is None or channel is None:
            if channel is not None and channel.session is not None:
                _less_crowded(channel.session)
            return
        stats = self.broker.state.stats
        if commit.error is None:
            stats.packets_sent += len(numbers)
            if not session.out:
                session.shared.dirty.append(session)
            session.out.append(b"\x40\x02" + b"\x40\x02".join(numbers))
            self.broker.flusher.later()
            _less_crowded(session)
            return
        stats.dropped["not_stored"] += len(numbers)
        if not is_refusal(commit.error):
            self._fail(unanswered())
        elif channel.context.version != 5:
            self._fail(ProtocolError(ReasonCode.QUOTA_EXCEEDED, str(commit.error)))
        else:
            answer = channel.context.problem(str(commit.error))
            for number in numbers:
                self.send(SendPacket(Puback(int.from_bytes(number, "big"), ReasonCode.QUOTA_EXCEEDED, answer)))
            self.broker.flusher.later()
            _less_crowded(session)

    def _answer(self, session: Session, steps: Steps) -> None:
        """End a conversation now that what it waited for is stored, even if the client is gone."""
        self._answering = True
        try:
            self._drive(steps, None)
        except ProtocolError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - as in data_received
            self._crash(error)
        finally:
            self._answering = False
        self.broker.flusher.later()
        _less_crowded(session)

    def caught_up(self) -> None:
        """Go on in the next turn."""
        self.broker.loop.call_soon(self._after_wait)

    def _after_wait(self) -> None:
        steps, self._steps_behind = self._steps_behind, None
        if steps is None:
            return
        if self.closing:
            steps.close()
            return
        self._go_on(steps, None, Pause.RECEIVER | Pause.STORE | Pause.VIEW | Pause.PEER | Pause.LONG_PACKET)

    async def _wait(self, steps: Steps, waiting: Any) -> None:
        answer = await waiting
        self._task = None
        if self.closing:
            steps.close()
            return
        self._go_on(steps, answer, Pause.HOOK)

    def _go_on(self, steps: Steps, answer: Any, why: Pause) -> None:
        """Continue a conversation that had to wait, then with what has been read meanwhile."""
        self._paused &= ~why.value  # it may have to wait for the same again, or for something else
        try:
            done = self._drive(steps, answer)
        except ProtocolError as error:
            self._fail(error)
            return
        except Exception as error:  # noqa: BLE001 - as in data_received
            self._crash(error)
            return
        finally:
            self.broker.flusher.later()
        if done:
            self.resume(why)

    def _keep(self, data: bytes, need: int) -> None:
        """Keep bytes for later; they are looked at again when `need` bytes are there."""
        if data:
            self._chunks = [data]
            self._have = len(data)
            self._need = need

    def _keep_packet(self, data: bytes) -> None:
        """Keep the beginning of a packet until the rest has come; its length field, if complete, tells how much."""
        need = len(data) + 1
        for width in range(1, min(len(data), 5)):
            if data[width] < 128:
                need = 1 + width + read_varint(data, 1)[0]
                break
        self._keep(data, need)

    def _throttle(self, messages: int, size_bytes: int) -> None:
        """Pause reading while the client is over its rate (leaky buckets)."""
        now = self.seen
        wait = 0.0
        if self.messages_bucket is not None:
            wait = self.messages_bucket.pour(messages, now)
            if wait:
                self.broker.state.refuse("message_rate")
        if self.bytes_bucket is not None:
            byte_wait = self.bytes_bucket.pour(size_bytes, now)
            if byte_wait:
                self.broker.state.refuse("byte_rate")
                wait = max(wait, byte_wait)
        if wait:
            self.hold(Pause.RATE)
            if self._throttled is not None:
                self._throttled.cancel()
            self._throttled = self.broker.loop.call_later(wait, self._unthrottle)

    def _unthrottle(self) -> None:
        self._throttled = None
        self.resume(Pause.RATE)

    # -- out

    def send(self, effect: SendPacket) -> None:
        """Write a packet, in order with everything else; nothing if the connection is closed already."""
        if self._paused & CLOSING:
            return
        channel = self.channel
        assert channel is not None  # noqa: S101 - made with the connection
        session = self.session
        self.broker.state.stats.packets_sent += 1
        data = _fitting(effect.packet, channel.context.version, channel.context.max_packet)
        if session is None or session.link is not self:
            self.write(data)
            return
        if not session.out:
            session.shared.dirty.append(session)
        session.out.append(data)

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket: straight to the kernel while it takes them, else to the transport's buffer."""
        transport = self.transport
        if transport is None:
            return
        if self.direct is None and self._socket is not None and not transport.get_write_buffer_size():
            self.direct = self._socket.send
        if self.direct is not None:
            try:
                written = self.direct(data)
            except OSError:  # full, or reset by the peer
                written = 0
            self.broker.state.stats.bytes_sent += written
            data = data[written:]
        if data:
            self.write_rest(data)

    def write_later(self) -> None:
        """Write what is in `out` at the end of this turn."""
        self.broker.flusher.later()

    def write_rest(self, data: bytes) -> None:
        """Hand over what the kernel did not take: the transport writes it when it can, or finds the connection lost."""
        self.direct = None
        if self.transport is not None:
            self.broker.state.stats.bytes_sent += len(data)
            self.transport.write(data)

    def pump(self) -> None:
        """Send what waits in the session."""
        self._pumping = False
        session = self.session
        if session is not None:
            if session.pump(time()):
                self.pump_later()
            if session.out:
                self.broker.flusher.later()

    def pump_later(self) -> None:
        """Call `pump` again in the next turn; once, however often it is asked for."""
        if not self._pumping:
            self._pumping = True
            self.broker.loop.call_soon(self.pump)

    # -- the end

    def end(self, reason: ReasonCode, detail: str = "") -> None:
        """Say goodbye with a reason (MQTT 5) and close. The session stays with the registry."""
        channel = self.channel
        if self.closing or channel is None:
            return
        self.why = detail or reason.name.lower()
        if channel.context.version == 5 and channel.session is not None:
            properties = channel.context.problem(detail)
            reference = self.broker.state.options.server_reference
            if reference and reason in _WITH_REFERENCE:
                reason = self.broker.state.elsewhere
                properties = replace(properties, server_reference=reference)
            self.flush()
            reason = codec.sayable(packets.DISCONNECT, reason)
            self.write(_fitting(Disconnect(reason, properties), 5, channel.context.max_packet))
        else:
            self.flush()
        self.close(self.why)

    def flush(self) -> None:
        """Write what is in `out` now."""
        session = self.session
        if session is not None and session.link is self and session.out:
            data = b"".join(session.out)
            session.out.clear()
            self.write(data)

    def _fail(self, error: ProtocolError) -> None:
        """Tell a client that broke the rules, or is not let in, and close."""
        if self.closing:
            return
        state, channel = self.broker.state, self.channel
        assert channel is not None  # noqa: S101 - made with the connection
        if not isinstance(error, Refused):
            name = error.reason.name.lower()
            state.stats.protocol_errors[name] = state.stats.protocol_errors.get(name, 0) + 1
            if error.reason is ReasonCode.PACKET_TOO_LARGE:
                state.refuse("max_packet_size" if channel.session else "max_connect_size")
        if self.broker.refusals.admits(monotonic()):
            log.info(
                "client_refused" if channel.session is None else "client_failed",
                client_id=channel.client.client_id,
                peer=channel.client.host,
                reason=error.reason.name.lower(),
                detail=str(error),
            )
        if channel.session is not None:
            self.end(error.reason, str(error))
            return
        self.why = str(error)
        if error.reason is ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
            self.write(b"\x20\x02\x00\x01")  # [MQTT-3.1.2-2]
        elif channel.context.version == 5:
            reason = codec.sayable(packets.CONNACK, error.reason)
            self.write(_fitting(Connack(reason, properties=self._refusal(error)), 5, channel.context.max_packet))
        elif isinstance(error, Refused):
            code = connack_code_v3(error.reason)
            if code is not None:
                self.write(bytes((0x20, 2, 0, code)))
        self.close(self.why)

    def _refusal(self, error: ProtocolError) -> Properties:
        assert self.channel is not None  # noqa: S101 - made with the connection
        properties = self.channel.context.problem(str(error))
        reference = self.broker.state.options.server_reference
        if reference and error.reason in _WITH_REFERENCE:
            properties = replace(properties, server_reference=reference)
        return properties

    def lose_patience(self) -> None:
        """Close: authentication has taken too long."""
        self._fail(Refused(ReasonCode.SERVER_UNAVAILABLE, "authentication takes too long, try again later"))

    def _crash(self, error: Exception) -> None:
        """Disconnect this client after a defect of ours; all others are served on."""
        channel = self.channel
        log.error(
            "connection_failed",
            client_id=channel.client.client_id if channel else "",
            error=repr(error),
            exc_info=not isinstance(error, MotorcadeError),
        )
        self.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")
        self.close("the server failed")

    def close(self, why: str) -> None:
        """Close after what is left has been written."""
        if self.closing:
            return
        self.hold(Pause.CLOSING)
        self.why = why
        self.flush()
        self._leave()
        transport = self.transport
        if transport is not None:
            transport.close()
            self.broker.loop.call_later(CLOSE_GRACE, self._abort)

    def abort(self, why: str) -> None:
        """Close at once, whatever is still to be written."""
        self.close(why)
        self._abort()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def recheck(self) -> None:
        """Recheck access after a change of rules; what is being decided now is decided first."""
        if self.channel is None or self.session is None or self.closing:
            return
        if self._paused & SUSPENDED:
            self.broker.loop.call_later(RECHECK_AGAIN, self.recheck)
        else:
            self._drive(self.channel.recheck(self.session), None)

    def _leave(self) -> None:
        """Give the session back to the registry, if it is still ours."""
        session, self.session = self.session, None
        if session is None or self.channel is None:
            return
        client = self.channel.client
        if session.link is self:
            for will in self.broker.state.registry.disconnect(session, time(), with_will=self.with_will):
                self.broker.publish_will(will)
        self.broker.flusher.later()  # its end may have set off messages to others
        hooks = self.broker.state.hooks
        if hooks.client_disconnected is not None:
            hooks.client_disconnected.notify(client, self.why)


def _crowd(acks: AckQueue, times: int = 1) -> bool:
    """Return True if so many answers wait for the store that no more packets should be taken."""
    return acks.answers * times >= MAX_UNCOMMITTED or acks.size * times >= MAX_UNCOMMITTED_BYTES


def _less_crowded(session: Session) -> None:
    """Note that an answer is gone: the connection that is held off because of it may be a later one."""
    if session.link is not None:
        session.link.less_crowded()


def _close_unstarted(waiting: Any) -> None:
    """Close the coroutine that a task leaves behind if it is cancelled before its first step."""
    if inspect.iscoroutine(waiting) and inspect.getcoroutinestate(waiting) == inspect.CORO_CREATED:
        waiting.close()


def _fitting(packet: Packet, version: int, limit: int) -> bytes:
    """Encode a packet for a client that takes `limit` bytes (0: any): if too long, without extras or not at all."""
    data = codec.encode(packet, version)
    if not limit or len(data) <= limit or isinstance(packet, Pingreq | Pingresp):
        return data
    slim = replace(packet.properties, reason_string=None, user_properties=())  # [MQTT-3.2.2-19] and its kin
    data = codec.encode(replace(packet, properties=slim), version)
    return data if len(data) <= limit else b""


def _is_v5_connect(body: bytes) -> bool:
    return body[:7] == b"\x00\x04MQTT\x05"


def _certificate(transport: asyncio.BaseTransport) -> Certificate | None:
    """Return the client's verified certificate, if it showed one."""
    ssl_object = transport.get_extra_info("ssl_object")
    return None if ssl_object is None else certificate_of(ssl_object)
