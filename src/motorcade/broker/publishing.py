"""The rules for what a client publishes: PUBLISH and PUBREL in, the message to its subscribers, and the answer.

Topic aliases, the receive maximum towards the client, and QoS 2 of a publisher are handled here.

    PUBLISH ─▶ access ─▶ hooks ─▶ stored for durable receivers ─▶ routed ─▶ PUBACK or PUBREC
                                    └ with the packet id, if it     └ also to other members, which the answer waits for
                                      is QoS 2 of a durable publisher

QoS 2 is routed at PUBLISH, once per packet id until PUBREL. Where batches are not atomic, a message may be stored for
some of its receivers only (`Doubt`): it is not answered, and when the client repeats it, it keeps its guid, by which
the store recognises it, and its members of shared groups. What may be stored cannot be refused any more.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from typing import Any

from motorcade.broker.client_context import MAX_DETAIL, ClientContext
from motorcade.broker.effects import NEXT_TURN, Await, AwaitReceiver, Effect, RunHook, SendPacket, Steps
from motorcade.broker.pubsub import NOBODY, Copy, Route, chosen_of
from motorcade.broker.session import Doubt, Session
from motorcade.broker.window_state import BEHIND
from motorcade.commit import Commit, is_refusal, joined
from motorcade.core.message import Message
from motorcade.extension.hooks import AFTER, Handled, Pending
from motorcade.mqtt import codec
from motorcade.mqtt.packets import PUBACK, Puback, Pubcomp, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import NONE, Properties
from motorcade.mqtt.reasons import ProtocolError, ReasonCode

log = logging.getLogger(__name__)

ALLOWED_TOPICS = 256  #: topics per connection whose access decision is remembered
ALLOWED_LENGTH = 1024  #: characters of these; what is longer is decided every time
NO_MEMORY = "this node has no memory left for more messages, try again later"

Answer = tuple[ReasonCode, str, tuple[tuple[str, str], ...]]  #: reason, detail, user properties


class Publishing:
    """The rules for messages of one client."""

    __slots__ = ("_aliases", "context", "state")

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.state = context.state
        self._aliases: dict[int, str] | None = None

    # -- PUBLISH

    def publish(self, session: Session, packet: Publish, wall: float) -> Steps:
        properties = packet.properties
        state, context = self.state, self.context
        if properties.subscription_ids:  # [MQTT-3.3.4-6]
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "a client must not send subscription identifiers")
        if packet.retain and context.told_unretained:  # [MQTT-3.2.2-14]
            raise ProtocolError(ReasonCode.RETAIN_NOT_SUPPORTED, "this node keeps no retained messages")
        topic = self._topic(packet)
        doubt = None
        if packet.qos == 2:
            if session.expects_release(packet.packet_id):  # [MQTT-4.3.3-10]: acknowledged again, not routed again
                doubt = session.doubted(packet.packet_id)
                if doubt is None:
                    yield from self.in_turn(session)
                    yield SendPacket(Pubrec(packet.packet_id))
                    return
            else:
                self._check_awaiting(session)
            session.await_release(packet.packet_id, wall)
        session.received += 1
        state.stats.publish_received += 1
        state.stats.publish_bytes_received += len(packet.payload)
        try:
            reason, detail, extra = yield from self._accept(session, topic, packet, wall, doubt)
        except BaseException:  # also if the connection ends while a hook is waited for
            if doubt is not None:
                session.doubt(packet.packet_id, doubt)  # as doubtful as before
            elif packet.qos == 2 and not session.doubts(packet.packet_id):
                self._give_up(session, packet.packet_id)
            raise
        if packet.qos == 0:
            return
        answer = self._answer(reason, detail, extra)
        told = codec.sayable(PUBACK, reason) if context.version == 5 else ReasonCode.SUCCESS
        if packet.qos == 1:
            yield SendPacket(Puback(packet.packet_id, told, answer))
            return
        if told >= 0x80:
            self._give_up(session, packet.packet_id)
        yield SendPacket(Pubrec(packet.packet_id, told, answer))

    def _give_up(self, session: Session, packet_id: int) -> None:
        """Give up a QoS 2 message that is not taken: its id is free again, in the store too."""
        if session.ended:
            return  # whatever it has in the store goes with it
        session.release(packet_id)
        if session.durable is not None and self.state.store is not None:
            self.state.store.release(session, (packet_id,))

    def in_turn(self, session: Session) -> Steps:
        """Wait behind the answers that wait for the store. [MQTT-4.6.0-2]"""
        if session.acks_wait:
            yield Await(Commit.stored(None))

    def _answer(self, reason: ReasonCode, detail: str, extra: tuple[tuple[str, str], ...]) -> Properties:
        """Return the properties of a PUBACK or PUBREC, as the client wants: an error's reason, a plugin's additions."""
        text = detail[:MAX_DETAIL] if reason >= 0x80 and self.context.told_problems else ""
        if self.context.version != 5 or not (text or extra):
            return NONE
        return Properties(reason_string=text or None, user_properties=extra if self.context.told_problems else ())

    def _topic(self, packet: Publish) -> str:
        """Return the topic of a PUBLISH, from its alias if it has one."""
        alias = packet.properties.topic_alias
        if alias is None:
            self.context.check_topic(packet.topic)
            return packet.topic
        limit = self.state.limits.max_topic_alias
        if alias > limit:
            self.state.refuse("max_topic_alias")
            # [MQTT-3.3.2-9]
            raise ProtocolError(ReasonCode.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above {limit}")
        if self._aliases is None:
            self._aliases = {}
        if packet.topic:
            self.context.check_topic(packet.topic)
            self._aliases[alias] = packet.topic
            return packet.topic
        known = self._aliases.get(alias)
        if known is None:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, f"topic alias {alias} was never set")
        return known

    def _check_awaiting(self, session: Session) -> None:
        limit = self.state.session_options.max_awaiting_rel
        if limit and session.awaiting is not None and len(session.awaiting) >= limit:
            self.state.refuse("max_awaiting_rel")
            raise ProtocolError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, f"more than {limit} unreleased QoS 2 messages")

    def _accept(
        self, session: Session, topic: str, packet: Publish, wall: float, doubt: Doubt | None
    ) -> Generator[Effect, Any, Answer]:
        """Check access, run hooks, store and route; return (reason, detail, user properties) for the publisher.

        `doubt`: it has come before, but perhaps not reached all receivers.
        """
        state, context = self.state, self.context
        if state.full and doubt is None:
            state.refuse("max_memory")
            state.stats.dropped["no_memory"] += 1
            if context.version != 5 and packet.qos:
                raise ProtocolError(ReasonCode.QUOTA_EXCEEDED, NO_MEMORY)
            return ReasonCode.QUOTA_EXCEEDED, NO_MEMORY, ()
        route = context.routes.get(topic.encode())
        if route is None or route.stale:
            if not (yield from context.may("publish", topic)):
                state.stats.dropped["not_authorized"] += 1
                return ReasonCode.NOT_AUTHORIZED, f"may not publish to {topic}", ()
            yield from self._match(topic)
            route = self._remember(topic)
        message = context.message(topic, packet.payload, packet.qos, packet.retain, packet.properties, wall)
        if doubt is not None:
            message.guid = doubt.guid
        given = message
        chain = route.retain_hooks if packet.retain else route.publish_hooks
        if chain is not None:
            result: Message | Handled = yield RunHook(chain, (context.client,), message)
            if isinstance(result, Handled):
                refusal = yield from self._stored(session, given, packet, after(given))
                lasting = packet.qos == 2 and session.durable is not None and result.reason < 0x80
                if refusal is None and lasting and state.store is not None:
                    taken = state.store.writer.accept(given, (), wall, session, packet.packet_id)
                    refusal = yield from self._stored(session, given, packet, [taken])
                if refusal is not None:
                    return self._not_kept(refusal, doubt)
                if result.outcome is not None and packet.qos:
                    result = result.outcome()
                if result.reason >= 0x80 and context.version != 5:
                    raise ProtocolError(result.reason, result.reason_string or "")
                return result.reason, result.reason_string or "", result.user_properties
            if result.topic != topic:
                try:
                    context.check_topic(result.topic)
                except ProtocolError as error:  # the plugin's fault, not the client's
                    log.warning("rewritten_topic_invalid topic=%r: %s", result.topic[:MAX_DETAIL], str(error))
                    return ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "a plugin made an invalid topic of it", ()
                if not (yield from context.may("publish", result.topic)):  # a rewritten topic passes the rules too
                    state.stats.dropped["not_authorized"] += 1
                    return ReasonCode.NOT_AUTHORIZED, f"may not publish to {result.topic}", ()
                yield from self._match(result.topic)
            message = result
        only = route.only
        if only is not None and only.lag is BEHIND and packet.qos and only is not session and not session.behind:
            yield AwaitReceiver(only)  # (a client that is behind itself must be read from, or both would wait for ever)
        if packet.qos and state.relay is not None:
            while (effect := state.relay.obstacle(message.topic)) is not None:
                yield effect
        kept = _taken(message) or _taken(given)
        pending = after(message) if message is given else after(message) + after(given)
        if pending and packet.qos == 2 and session.durable is not None:
            # Before the packet id is stored: a repetition after a crash must bring the plugins' part again.
            refusal = yield from self._stored(session, message, packet, pending)
            if refusal is not None:
                return self._not_kept(refusal, doubt)
            pending = []
            while state.relay is not None and not state.relay.cluster.holds:
                yield Await(state.relay.cluster.again())  # other packets have been taken meanwhile: nothing is held
        chosen = doubt.chosen if doubt is not None else NOBODY
        copies = self._keep(session, message, packet, wall, chosen, pending)
        refusal = yield from self._stored(session, message, packet, pending, copies)
        if refusal is not None:
            return self._not_kept(refusal, doubt)
        count = state.pubsub.publish(message, wall, copies)
        if packet.qos and state.relay is not None:
            confirmed = state.relay.confirm()
            if confirmed is not None or session.acks_wait:
                yield Await(confirmed or Commit.stored(None), size=len(packet.payload), routed=True)
        return (ReasonCode.SUCCESS if count or kept else ReasonCode.NO_MATCHING_SUBSCRIBERS), "", ()

    def _not_kept(self, why: str, doubt: Doubt | None) -> Answer:
        """Return the answer to a message that the store refuses."""
        if doubt is not None:
            raise unanswered()  # some may have it: it cannot be refused any more
        return ReasonCode.QUOTA_EXCEEDED, why, ()

    def _keep(
        self,
        session: Session,
        message: Message,
        packet: Publish,
        wall: float,
        chosen: Mapping[str, str],
        pending: list[Commit[Any]],
    ) -> list[Copy] | None:
        """Store what durable receivers get, and the packet id of a durable publisher's QoS 2 message."""
        store = self.state.store
        if store is None or not packet.qos:
            return None
        copies = self.state.pubsub.to_keep(message, chosen)
        lasting = [copy for copy in copies or () if copy.lasting]
        self.state.stats.routed += len(lasting)
        if packet.qos == 2 and session.durable is not None:
            pending.append(store.writer.accept(message, lasting, wall, session, packet.packet_id))
        elif lasting:
            pending.append(store.writer.accept(message, lasting, wall))
        return copies

    def _stored(
        self,
        session: Session,
        message: Message,
        packet: Publish,
        pending: list[Commit[Any]],
        copies: list[Copy] | None = None,
    ) -> Generator[Effect, Any, str | None]:
        """Wait for what the broker and plugins store; why, if the message is refused."""
        if not packet.qos:
            store = self.state.store
            if pending and store is not None and store.attachments is not None:
                for written in pending:
                    store.attachments.under_way(self.context.client.client_id, written)
            return None
        if not pending:
            # What waits for other members only is delivered already, and this message need not wait for that.
            if self.state.relay is None or session.acks is None or session.acks.unrouted:
                yield from self.in_turn(session)
            return None
        commit = pending[0] if len(pending) == 1 else joined(pending)
        yield Await(commit, size=len(packet.payload))
        if commit.error is None:
            return None
        self.state.stats.dropped["not_stored"] += 1
        if is_refusal(commit.error):
            if self.context.version != 5:
                raise ProtocolError(ReasonCode.QUOTA_EXCEEDED, str(commit.error))
            return str(commit.error)
        if packet.qos == 2:
            session.doubt(packet.packet_id, Doubt(message.guid, chosen_of(copies or ())))
        raise unanswered()

    def _match(self, topic: str) -> Steps:
        """Find the receivers of a topic, in several turns if there are very many filters that may match."""
        pubsub = self.state.pubsub
        matching = pubsub.begin(topic)
        if matching is None:
            return
        try:
            yield NEXT_TURN
            while not pubsub.go_on(matching):
                yield NEXT_TURN
        finally:
            pubsub.give_up(matching)

    def _remember(self, topic: str) -> Route:
        """Remember that this client may publish to a topic."""
        route = self.state.pubsub.route(topic)
        routes = self.context.routes
        if routes is not self.state.pubsub.routes and len(topic) <= ALLOWED_LENGTH:
            if len(routes) >= ALLOWED_TOPICS:
                routes.clear()
            routes[topic.encode()] = route
        return route

    def pubrel(self, session: Session, packet: Pubrel, wall: float) -> Steps:
        known = session.release(packet.packet_id)
        store = self.state.store
        if known and session.durable is not None and store is not None:
            # Not before the id is free in the store too: after a crash a new message with this id would pass for known.
            commit = store.release(session, (packet.packet_id,))
            yield Await(commit)
            if commit.error is not None:
                session.await_release(packet.packet_id, wall)
                raise unanswered()
        else:
            yield from self.in_turn(session)
        reason = ReasonCode.SUCCESS if known or self.context.version != 5 else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
        yield SendPacket(Pubcomp(packet.packet_id, reason))


def _taken(message: Message) -> bool:
    """Return True if a plugin keeps the message for a later receiver."""
    pending = message.headers.get(AFTER)
    return isinstance(pending, Pending) and pending.taken


def after(message: Message) -> list[Commit[Any]]:
    """Return the commits that plugins want the publisher's answer to wait for."""
    pending = message.headers.pop(AFTER, None)
    return pending if isinstance(pending, list) else []


def unanswered() -> ProtocolError:
    """Return the error for what may be stored or not. The client finds out by sending it again."""
    return ProtocolError(ReasonCode.SERVER_BUSY, "the store does not answer, send it again")
