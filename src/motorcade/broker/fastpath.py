"""The fast path: PUBLISH without properties, acknowledgements and PINGREQ, many per read.

`run` takes packets straight from the bytes of a read, with local variables and no object per packet, and stops at the
first one that is not for it: unfinished, rare, unusual or wrong. That one goes through the channel, which knows all
rules; here are only the cases in which the rules have nothing to say. Whatever is done here must mean the same as
what `channel.py` does; a test compares.

A packet goes to the channel if one of these holds for it. Each place that leaves a packet names its row, and
`tests/unit/broker/test_fast_path.py` shows each of them:

    unfinished    any           not all of it has come, or it is too long                 wait for the rest, or refuse
    kind          any           of another kind, or with flags                            rare, or wrong
    route         PUBLISH       no route, or a stale one                                  a topic to be matched
    hooks         PUBLISH       route.slow, and no plugin takes it plain (QoS 1)          hooks see the message
    properties    PUBLISH       it has some (MQTT 5)                                      they decide, or are sent on
    order         QoS 0         route.kept while answers of this read wait for the store  it may be stored after them
    remote        PUBLISH       QoS 0 for sessions that sleep elsewhere; QoS 2 for peers; it may be stored, or have to
                                a peer has no room, or its node chooses of a group        wait for its peers
    id            QoS 1, 2      no packet id, or 0                                        wrong
    kept          QoS 1, 2      route.kept without route.lasting, or at QoS 2             stored by other rules
    durable       QoS 2         its session is durable; PUBREC, PUBREL, PUBCOMP as well   packet ids are stored
    view          QoS 1, 2      members may know of subscribers that are not known here   the publisher waits
    answers       QoS 1, 2      answers wait for the store, and route.lasting is empty;   its answer must not pass them
                                for peers, and it is QoS 2, or has no receiver
    behind        QoS 1, 2      route.only is BEHIND                                      the publisher waits
    store         QoS 1         the store has as much to do as it may, or MAX_ROWS        the publisher waits
    awaiting      QoS 2         packet id known, or max_awaiting_rel reached              a repetition, or refused
    in-flight     PUBACK …      packet id not in flight in this step of its QoS           a reason code is due, or wrong

What makes it quick, in this order (measured, see bench/):

    one call per read, not per packet; one write per connection and loop turn
    routes by topic bytes, checked and authorised when they entered the table
    one encoding per message: receivers of the publisher's own protocol family get slices of what came in
    a run of QoS 0 packets with the same header is one slice
    counters are locals, added up once per read
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from motorcade.broker.channel import Channel
from motorcade.broker.frames import IDS, RELEASED, Frame, build
from motorcade.broker.outgoing import Outgoing
from motorcade.broker.pubsub import Receivers, Route
from motorcade.broker.session import Session
from motorcade.broker.session_writer import MAX_ROWS, MessageBatch, PlainMessage, SessionWriter
from motorcade.broker.window_state import BEHIND, READY
from motorcade.clock import time
from motorcade.commit import Commit, commit_of
from motorcade.core.client import ClientInfo
from motorcade.mqtt import codec

if TYPE_CHECKING:
    from motorcade.broker.relay import Relay

PACKETS_PER_TURN = 2048  #: packets of one client before the others have their turn
WHOLE_TURN = range(PACKETS_PER_TURN - 1, -1, -1)  #: made once: a read has one packet, mostly
MAX_DELIVERIES = 32_768  #: copies sent in one run before other connections have their turn
OTHER_COST = 32  #: copies that one counts as which is not sent at once: queued, encoded on its own, for a shared group
MAX_RUN = 2048  #: QoS 0 packets taken as one

# Why the next answer of a client waits, as flags.
ROUTED = 1  #: peers have not taken over a message of it; others may be delivered meanwhile
UNROUTED = 2  #: a message of it must be stored before it, and others after it, are delivered
UNKNOWN = 4  #: routes may lack a receiver, so nothing of QoS 1 and 2 is delivered


def run(channel: Channel, session: Session, data: bytes, i: int, max_size: int, budget: int) -> tuple[int, int]:
    """Take at most `budget` packets from `data[i:]`.

    Return the offset of the first byte that was not taken, and the budget that is left. 0: others have their turn now,
    whatever comes next.
    """
    context = channel.context
    state = context.state
    routes = context.routes
    pubsub = state.pubsub
    dirty = state.shared.dirty
    client = context.client
    version = context.version
    v5 = version == 5
    inflight = session.inflight
    out = session.out
    short = min(127, max_size - 2)  # longer packets have a longer length field, or are too long
    max_awaiting = state.session_options.max_awaiting_rel or 65536
    n = len(data)
    enough = n - 1  # a packet that begins here or later is unfinished; -2: the budget for deliveries is spent
    left = budget
    most = MAX_DELIVERIES
    received = sent = payload_bytes = others = answers = stored = stored_bytes = copies = 0
    wall = 0.0  # read when needed
    freed = False  # acknowledgements have made room in the window
    durable = session.durable is not None  # what it acknowledges or releases must be stored
    told = durable or session.scheduler is not None  # the store or a source hears of what it acknowledges
    writer = state.store.writer if state.store is not None else None
    taken = pubsub.taken if routes is pubsub.routes else None  # without access control, also topics never seen
    batch: MessageBatch | None  # messages to be stored
    done: object  # or what a plugin has said that it waits for, or the peers
    outgoing: Outgoing | None  # packets for these
    batch = done = outgoing = None
    numbers: list[bytes] = []  # packet ids of these messages
    told_bytes = 0  # of those whose answers wait already
    acks = session.acks
    acks_wait = 0
    if acks is not None and acks.answers:
        acks_wait = UNROUTED if acks.unrouted else ROUTED
    if state.relay is not None and not state.relay.cluster.holds:
        acks_wait = UNKNOWN
    try:
        for left in WHOLE_TURN if budget == PACKETS_PER_TURN else range(budget - 1, -1, -1):  # noqa: B007 - afterwards
            if i >= enough:
                break  # leave: unfinished
            first = data[i]
            length = data[i + 1]
            body = i + 2
            if length > short:
                found = codec.split(data, i, max_size)
                if found is None:
                    break  # leave: unfinished
                body, end = found
                length = end - body
            else:
                end = body + length
                if end > n:
                    break  # leave: unfinished
            if 0x30 <= first <= 0x34 and not first & 1 and length > 2:
                # PUBLISH, not retained, not a duplicate
                stop = body + 2 + (data[body] << 8 | data[body + 1])  # behind the topic
                route = routes.get(data[body + 2 : stop]) if stop < end else None
                if route is None and taken and stop < end:
                    route = taken.get(data[body + 2 : data.find(b"/", body + 2, stop)])
                if route is None or route.stale:
                    break  # leave: route
                if route.slow:
                    # A plugin may take it as it is: QoS 1, no properties.
                    if route.plain is None or first != 0x32 or stop + 2 > end - v5 or (v5 and data[stop + 2]):
                        break  # leave: hooks
                    number = data[stop : stop + 2]
                    topic = _topic(data[body + 2 : stop], state.limits.max_topic_levels)
                    if number == b"\0\0" or not topic:
                        break  # leave: hooks
                    wall = wall or time()
                    guid = state.guids.next(int(wall * 1_000_000))
                    taken_by = route.plain.take_plain(client, topic, data[stop + 2 + v5 : end], guid)
                    if taken_by is None:
                        break  # leave: hooks
                    if taken_by is not done and numbers:  # they may fare differently
                        _answer_later(session, numbers, writer, batch, done, stored_bytes - told_bytes)
                        numbers = []
                        told_bytes = stored_bytes
                        batch = None
                    done = taken_by
                    numbers.append(number)
                    acks_wait |= UNROUTED
                    stored += 1
                    stored_bytes += end - stop - 2 - v5
                    i = end
                    continue
                if freed:
                    freed = False  # before anything new: what waits goes first
                    if told or session.state is not READY:
                        _pump(session)
                if first == 0x30:
                    if v5 and data[stop]:
                        break  # leave: properties
                    if route.beyond:
                        if route.kept and numbers:
                            break  # leave: order
                        if route.elsewhere is not None and route.elsewhere.sleepers:
                            break  # leave: remote
                    size = end - i
                    last = end
                    head = data[i:stop]
                    # Copies of `rest` and `groups` keep their place between the others.
                    if data.startswith(head, last) and not route.single:
                        until = min(n, i + size * MAX_RUN)
                        while last + size <= until and not (v5 and data[last + stop - i]):
                            last += size
                            if not data.startswith(head, last):
                                break
                    count = (last - i) // size
                    received += count
                    payload_bytes += count * (end - stop - v5)
                    if not route.count:
                        if route.elsewhere is None:
                            state.stats.dropped["no_subscribers"] += count
                    else:
                        went = deliver_qos0(route, data, i, stop, end, last, client, dirty, v5=v5)
                        sent += went
                        if route.single:
                            wall = wall or time()
                            pubsub.deliver_rest(route, (head, data[stop:end], client), version, client, wall)
                        if went != count * route.count:
                            most -= OTHER_COST * (count * route.count - went)
                        if sent > most:
                            enough = -2
                    if route.beyond and route.elsewhere is not None and route.elsewhere.all is not None:
                        outgoing = outgoing or _outgoing(state.relay, client, version, data)
                        outgoing.add(route.elsewhere.all, i, last, count)
                    i = last
                    continue
                if route.beyond:
                    if route.kept and (not route.lasting or first != 0x32):
                        break  # leave: kept
                    if route.elsewhere is not None and route.elsewhere.chooses:
                        break  # leave: remote
                    if route.live is not None:
                        if first != 0x32 or route.live.full is not None:
                            break  # leave: remote
                        acks_wait = acks_wait or ROUTED
                if durable and first == 0x34:
                    break  # leave: durable
                if acks_wait:
                    if acks_wait >= UNKNOWN:
                        break  # leave: view
                    later = acks_wait == ROUTED and first == 0x32 and (route.count or route.live is not None)
                    if not route.lasting and not later:
                        break  # leave: answers
                if stop + 2 > end - v5:
                    break  # leave: id
                if v5 and data[stop + 2]:
                    break  # leave: properties
                if route.only is not None and route.only.lag is BEHIND:
                    break  # leave: behind
                number = data[stop : stop + 2]
                if number == b"\0\0":
                    break  # leave: id
                if route.lasting:
                    lasting = route.lasting
                    if writer is None or writer.full or len(lasting) > MAX_ROWS:
                        break  # leave: store
                    if batch is None or batch.rows + len(lasting) > MAX_ROWS:
                        if numbers:
                            _answer_later(session, numbers, writer, batch, done, stored_bytes - told_bytes)
                            numbers = []
                            told_bytes = stored_bytes
                            done = None
                        batch = writer.message_batch()
                    wall = wall or time()
                    frame = (data[i:stop], data[stop + 2 : end], client)
                    batch.add(PlainMessage(route, frame, data[stop + 2 + v5 : end], client, version), lasting, wall)
                    numbers.append(number)
                    acks_wait |= UNROUTED
                    stored += 1
                    copies += len(lasting)
                    stored_bytes += end - stop - 2 - v5
                    i = end
                    continue
                if first == 0x32:
                    acknowledgement = 0x40
                else:
                    key = data[stop] << 8 | data[stop + 1]
                    awaiting = session.awaiting
                    if awaiting is None:
                        awaiting = session.awaiting = {}
                    if key in awaiting or len(awaiting) >= max_awaiting:
                        break  # leave: awaiting
                    wall = wall or time()
                    awaiting[key] = wall
                    acknowledgement = 0x50
                received += 1
                payload_bytes += end - stop - 2 - v5
                if route.count:
                    frame = (data[i:stop], data[stop + 2 : end], client)
                    went = deliver_qos1(route, frame, v5, dirty) if first == 0x32 else _qos2(route, frame, v5, dirty)
                    sent += went
                    if route.single:
                        wall = wall or time()
                        pubsub.deliver_rest(route, frame, version, client, wall)
                    if went != route.count:
                        most -= OTHER_COST * (route.count - went)
                    if sent > most:
                        enough = -2
                    if not acks_wait:
                        answers += 1
                        if not out:
                            dirty.append(session)
                        out += (_ACKNOWLEDGED[acknowledgement], number)  # both or none, if memory ends
                elif not acks_wait:
                    answers += 1
                    state.stats.dropped["no_subscribers"] += 1
                    if not out:
                        dirty.append(session)
                    if v5:
                        out.append(_UNHEARD[acknowledgement] + number + b"\x10")
                    else:
                        out.append(_ACKNOWLEDGED[acknowledgement] + number)
                if acks_wait:  # for peers that get it, or because answers before it wait for them
                    outgoing = outgoing or _outgoing(state.relay, client, version, data)
                    if route.live is not None:
                        outgoing.add(route.live, i, end, 1)
                    outgoing.size += end - stop - 2 - v5
                    done = outgoing
                    numbers.append(number)
            elif length == 2:
                key = data[body] << 8 | data[body + 1]
                if first == 0x40:  # PUBACK
                    waiting = inflight.get(key)
                    if waiting is None or waiting[0][0] & 6 != 2:
                        break  # leave: in-flight
                    if told:
                        session.acknowledged(key)
                    else:
                        del inflight[key]
                    freed = True
                elif durable:
                    break  # leave: durable
                elif acks_wait and first != 0x70:
                    break  # leave: answers
                elif first == 0x50:  # PUBREC
                    waiting = inflight.get(key)
                    if waiting is None or waiting[0][0] & 6 != 4:
                        break  # leave: in-flight
                    inflight[key] = RELEASED
                    answers += 1
                    if not out:
                        dirty.append(session)
                    out += (b"\x62\x02", data[body:end])
                elif first == 0x62:  # PUBREL
                    if not session.awaiting or session.awaiting.pop(key, None) is None:
                        break  # leave: in-flight
                    answers += 1
                    if not out:
                        dirty.append(session)
                    out += (b"\x70\x02", data[body:end])
                elif first == 0x70:  # PUBCOMP
                    if inflight.get(key) is not RELEASED:
                        break  # leave: in-flight
                    session.acknowledged(key)
                    freed = True
                else:
                    break  # leave: kind
                others += 1
            elif first == 0xC0 and not length:  # PINGREQ
                others += 1
                answers += 1
                if not out:
                    dirty.append(session)
                out.append(b"\xd0\x00")
            else:
                break  # leave: kind
            i = end
        return i, left if enough > -2 else 0
    finally:
        if outgoing is not None:
            outgoing.close()
        if numbers:
            _answer_later(session, numbers, writer, batch, done, stored_bytes - told_bytes)
        if freed and (told or session.state is not READY):
            _pump(session)
        stats = state.stats
        stats.packets_received += received + stored + others
        if stored:
            session.received += stored
            stats.publish_received += stored
            stats.publish_bytes_received += stored_bytes
            stats.routed += copies
        stats.packets_sent += sent + answers
        if received:
            session.received += received
            stats.publish_received += received
            stats.publish_bytes_received += payload_bytes
            stats.publish_sent += sent
            stats.publish_bytes_sent += payload_bytes * sent // received
            # All that the routes count: what was sent, and what was taken off the budget because it was not.
            stats.routed += sent + (MAX_DELIVERIES - most) // OTHER_COST


_ACKNOWLEDGED = {0x40: b"\x40\x02", 0x50: b"\x50\x02"}  # PUBACK, PUBREC
_UNHEARD = {0x40: b"\x40\x03", 0x50: b"\x50\x03"}  # the same with a reason code


def _topic(data: bytes, max_levels: int) -> str:
    """Return a valid topic as text, else an empty text: the channel says what is wrong."""
    try:
        topic = data.decode()
    except UnicodeDecodeError:
        return ""
    if "+" in topic or "#" in topic or not topic.isprintable() or (max_levels and topic.count("/") >= max_levels):
        return ""
    return topic


def _outgoing(relay: Relay | None, client: ClientInfo, version: int, data: bytes) -> Outgoing:
    assert relay is not None  # noqa: S101 - without it no route has peers, and no answer waits for them
    return relay.outgoing(client, version, data)


def _commit(writer: SessionWriter | None, batch: MessageBatch | None, done: object) -> Commit[Any]:
    """Write messages, or take the commit of a plugin that does, or of peers that have them."""
    if batch is not None and writer is not None:
        return writer.write_messages(batch)
    if isinstance(done, Outgoing):
        return done.confirm()
    return done if isinstance(done, Commit) else commit_of(cast("asyncio.Future[Any]", done))


def _answer_later(
    session: Session,
    numbers: list[bytes],
    writer: SessionWriter | None,
    batch: MessageBatch | None,
    done: object,
    size: int,
) -> None:
    """Send PUBACK for all of them when they are stored, or peers have them."""
    commit = _commit(writer, batch, done)
    routed = False
    if batch is None and isinstance(done, Outgoing):
        routed, size, done.size = True, done.size, 0
    link = session.link
    if link is not None:
        session.ack_queue().join(commit, partial(link.acknowledge, numbers, commit), len(numbers), size, routed=routed)


def _pump(session: Session) -> None:
    if session.pump(time()) and session.link is not None:
        session.link.pump_later()


def deliver_qos0(
    route: Route,
    data: bytes,
    i: int,
    stop: int,
    end: int,
    last: int,
    client: ClientInfo,
    dirty: list[Session],
    *,
    v5: bool,
) -> int:
    """Deliver QoS 0 packets data[i:last], each as long as the first, to the plain receivers; how many were sent."""
    same, other = (route.v5_all, route.v3_all) if v5 else (route.v3_all, route.v5_all)
    size = end - i
    held = 0
    if same:
        packets = data[i:last]
        for session in same:
            if session.state is READY:
                out = session.out
                if not out:
                    dirty.append(session)
                out.append(packets)
            else:
                for at in range(i, last, size):
                    session.hold((data[i:stop], data[at + stop - i : at + size], client))
                    held += 1
    if other:
        for at in range(i, last, size):
            frame = _for_other(route, (b"", data[at + stop - i : at + size], client), 0, v5)
            held += _unwindowed(other, frame, dirty)
    return (len(same) + len(other)) * ((last - i) // size) - held


def deliver_qos1(route: Route, frame: Frame, v5: bool, dirty: list[Session]) -> int:
    """Deliver a QoS 1 message to the plain receivers, QoS 0 ones among them; how many were sent."""
    if v5:
        same, other, low, low_other = route.v5_from_1, route.v3_from_1, route.v5_qos0, route.v3_qos0
    else:
        same, other, low, low_other = route.v3_from_1, route.v5_from_1, route.v3_qos0, route.v5_qos0
    sent = len(same) + len(other) + len(low) + len(low_other)
    if same:
        sent -= _windowed(same, frame, dirty)
    if other:
        sent -= _windowed(other, _for_other(route, frame, 1, v5), dirty)
    if low:
        sent -= _unwindowed(low, _with_qos0(route, frame), dirty)
    if low_other:
        sent -= _unwindowed(low_other, _for_other(route, frame, 0, v5), dirty)
    return sent


def _qos2(route: Route, frame: Frame, v5: bool, dirty: list[Session]) -> int:
    """Deliver a QoS 2 message to the plain receivers, each at its granted QoS; how many were sent."""
    v3_by_qos = (route.v3_qos0, route.v3_qos1, route.v3_qos2)
    v5_by_qos = (route.v5_qos0, route.v5_qos1, route.v5_qos2)
    same, other = (v5_by_qos, v3_by_qos) if v5 else (v3_by_qos, v5_by_qos)
    sent = 0
    if same[2]:
        sent += len(same[2]) - _windowed(same[2], frame, dirty)
    if same[1]:
        sent += len(same[1]) - _windowed(same[1], (b"\x32" + frame[0][1:], frame[1], frame[2]), dirty)
    if same[0]:
        sent += len(same[0]) - _unwindowed(same[0], _with_qos0(route, frame), dirty)
    for granted in (1, 2):
        if other[granted]:
            copy = _for_other(route, frame, granted, v5)
            sent += len(other[granted]) - _windowed(other[granted], copy, dirty)
    if other[0]:
        sent += len(other[0]) - _unwindowed(other[0], _for_other(route, frame, 0, v5), dirty)
    return sent


def _windowed(receivers: Receivers, frame: Frame, dirty: list[Session]) -> int:
    """Send QoS 1 and 2 to many as `Session.send` does, without its calls; return how many could not be sent now."""
    head, tail, _ = frame
    ids = IDS
    held = 0
    for session in receivers:
        inflight = session.inflight
        if session.state is READY and len(inflight) < session.limit:
            number = session.next_id
            if number in inflight:
                number = session.take_id()
            else:
                session.next_id = number + 1 if number < 65535 else 1
            inflight[number] = frame
            out = session.out
            if not out:
                dirty.append(session)
            out += (head, ids[number], tail)
        else:
            session.hold(frame)
            held += 1
    return held


def _unwindowed(receivers: Receivers, frame: Frame, dirty: list[Session]) -> int:
    """Send QoS 0 to many; return how many could not be sent now."""
    packet = frame[0] + frame[1]
    held = 0
    for session in receivers:
        if session.state is READY:
            out = session.out
            if not out:
                dirty.append(session)
            out.append(packet)
        else:
            session.hold(frame)
            held += 1
    return held


def _with_qos0(route: Route, frame: Frame) -> Frame:
    return build(route.topic.encode(), frame[1], 0, frame[2])


def _for_other(route: Route, frame: Frame, qos: int, v5: bool) -> Frame:
    """Return a message without properties, for receivers of the other protocol family."""
    tail = frame[1]
    return build(route.topic.encode(), tail[1:] if v5 else b"\x00" + tail, qos, frame[2])
