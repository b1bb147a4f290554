"""The rules of MQTT for one connection: packets in, effects out.

CONNECT with its properties (keep alive, session expiry, receive maximum, maximum packet size), bans and the redirect to
another server, AUTH, SUBSCRIBE and UNSUBSCRIBE, acknowledgements, DISCONNECT.

`receive` is a generator. It works on session, pub/sub and registry itself, and yields what it cannot do (`effects.py`).
What concerns messages of the client is in `publishing.py`; here are its connection, its subscriptions, and what it says
about messages it was sent.

A `ProtocolError` out of the generator ends the connection; `connection.py` tells the client. It also owns the
fast path for the frequent packets: what is done there must mean the same as what is done here, and a test compares.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from motorcade.broker.client_context import ClientContext
from motorcade.broker.effects import (
    NEXT_TURN,
    RECEIVE,
    Await,
    BindSession,
    Close,
    Effect,
    PublishWill,
    RenewCredentials,
    RunHook,
    SendPacket,
    Steps,
)
from motorcade.broker.frames import is_released, message_of, qos_of, released
from motorcade.broker.publishing import Publishing, unanswered
from motorcade.broker.session import Session
from motorcade.broker.state import BrokerState
from motorcade.broker.window_state import READY
from motorcade.commit import Commit, is_refusal, joined
from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.errors import TopicError
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import check_filter, split_share
from motorcade.extension.hooks import Allow, Challenge, Decision, Deny, Verdict
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    SUBACK,
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
from motorcade.mqtt.reasons import ProtocolError, ReasonCode

log = logging.getLogger(__name__)


FILTERS_PER_TURN = 4096  #: characters of filters that are subscribed to, or left, before others have their turn


class Refused(ProtocolError):  # noqa: N818 - an answer, not a fault
    """The client is not let in; CONNACK tells why."""


class Channel:
    """One connection's view of the rules."""

    __slots__ = ("_method", "client", "context", "publishing", "session", "state")

    def __init__(self, state: BrokerState, client: ClientInfo) -> None:
        self.state = state
        self.client = client
        self.context = ClientContext(state, client)
        self.publishing = Publishing(self.context)
        self.session: Session | None = None
        self._method: str | None = None  # of enhanced authentication

    def receive(self, packet: Packet, wall: float) -> Steps:
        """Yield the effects of a packet. `wall`: seconds since the epoch."""
        session = self.session
        if session is None:
            if not isinstance(packet, Connect):
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "the first packet must be CONNECT")  # [MQTT-3.1.0-1]
            return self._connect(packet, wall)
        if isinstance(packet, Publish):
            return self.publishing.publish(session, packet, wall)
        if isinstance(packet, Puback):
            return self._puback(session, packet, wall)
        if isinstance(packet, Pubrec):
            return self._pubrec(session, packet, wall)
        if isinstance(packet, Pubrel):
            return self.publishing.pubrel(session, packet, wall)
        if isinstance(packet, Pubcomp):
            return self._pubcomp(session, packet, wall)
        if isinstance(packet, Subscribe):
            return self._subscribe(session, packet)
        if isinstance(packet, Unsubscribe):
            return self._unsubscribe(session, packet)
        if isinstance(packet, Pingreq):
            return self._ping()
        if isinstance(packet, Disconnect):
            return self._disconnect(session, packet)
        if isinstance(packet, Auth):
            return self._reauthenticate(packet)
        name = type(packet).__name__.upper()
        detail = "second CONNECT" if isinstance(packet, Connect) else f"a client must not send {name}"
        raise ProtocolError(ReasonCode.PROTOCOL_ERROR, detail)  # [MQTT-3.1.0-2]

    # -- CONNECT

    def _connect(self, packet: Connect, wall: float) -> Steps:
        client, state = self.client, self.state
        self.context.version = client.version = packet.version
        properties = packet.properties
        self.context.told_problems = properties.request_problem_information != 0
        self.context.max_packet = properties.maximum_packet_size or 0
        client.username = packet.username
        client.clean_start = packet.clean_start
        client.keep_alive = packet.keep_alive
        client.user_properties = properties.user_properties
        client.connected_at = wall
        self._identify(packet)
        self._admit(wall)
        if state.hooks.client_connect is not None:
            reason = yield RunHook(state.hooks.client_connect, (client,), ReasonCode.SUCCESS)
            if reason >= 0x80:
                raise Refused(reason, "refused by a plugin")
        allow = yield from self._authenticate(packet)
        # Counted only now: no client may get another one banned by using its id.
        if not state.flapping.count(f"id:{client.client_id}", wall):
            self._ban()
        will = yield from self._check_will(packet.will, wall)
        self._check_draining()
        keep_alive = self._keep_alive(packet.keep_alive)
        connack = self._connack(packet, keep_alive, allow)
        if self.context.max_packet and len(codec.encode(connack, self.context.version)) > self.context.max_packet:
            raise Refused(ReasonCode.PACKET_TOO_LARGE, "the client takes no packet as long as CONNACK")
        yield from self._claim(packet)
        session, present, wills = state.registry.open(client, clean=packet.clean_start, wall=wall)
        for message in wills:
            yield PublishWill(message)
        client.keep_alive = keep_alive
        self._settle(session, packet, present=present, wall=wall)
        yield BindSession(session, keep_alive, allow.expires_at)
        if present:
            yield from self.recheck(session)  # rules may have changed, or this is another user
        session.will = will
        session.will_delay = (packet.will.properties.will_delay or 0) if packet.will else 0
        yield from self._write_down(session, present=present)
        self.session = session
        yield SendPacket(replace(connack, session_present=present and packet.version >= 4))
        if session.link is None:
            return
        hooks = state.hooks
        event = hooks.session_resumed if present else hooks.session_created
        if event is not None:
            event.notify(client)
        if hooks.client_connected is not None:
            hooks.client_connected.notify(client)
        session.resend(wall)
        if present:
            session.resume_sources()
        if session.pump(wall) and session.link is not None:
            session.link.pump_later()

    def _claim(self, packet: Connect) -> Steps:
        """Attach the client to this member, and bring its session here if it has one (attachments, rule 1)."""
        attachments = self.state.store.attachments if self.state.store is not None else None
        if attachments is None:
            return
        lasting = self._expiry(packet) > 0
        commit = attachments.claim(self.client.client_id, lasting=lasting, clean=packet.clean_start)
        yield Await(commit, hold=True)
        if commit.error is not None:
            raise Refused(ReasonCode.SERVER_UNAVAILABLE, "the store does not answer, try again later")

    def _write_down(self, session: Session, *, present: bool) -> Steps:
        """Store a durable session, or remove what the client had before, before the client hears of it."""
        store = self.state.store
        if store is None:
            return
        recorded = session.durable is not None or (session.will is not None and store.lasting_wills(session.client_id))
        commit = store.save(session) if recorded else store.gone(self.client.client_id)
        if commit is None:
            return
        yield Await(commit, hold=True)
        if commit.error is None or present:
            return  # a session that is there may be emptied, even if nothing new can be stored
        session.will = None
        session.expiry = 0
        if is_refusal(commit.error):
            raise Refused(ReasonCode.QUOTA_EXCEEDED, f"this node can keep no more sessions: {commit.error}")
        raise Refused(ReasonCode.SERVER_UNAVAILABLE, "the store does not answer, try again later")

    def _identify(self, packet: Connect) -> None:
        """Find the client id, or make one up."""
        client_id = packet.client_id
        limit = self.state.limits.max_client_id
        if limit and len(client_id.encode()) > limit:
            self.state.refuse("max_client_id")
            raise Refused(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, f"client id is longer than {limit} bytes")
        if "+" in client_id or "#" in client_id:
            # It would become a wildcard wherever a rule or a topic is made from it.
            raise Refused(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "client id contains a wildcard")
        if client_id:
            self.client.client_id = client_id
            return
        if packet.version == 3 or (packet.version == 4 and not packet.clean_start):  # [MQTT-3.1.3-8] of 3.1.1
            raise Refused(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "an empty client id needs a clean session")
        self.client.client_id = f"auto-{secrets.token_hex(10)}"  # [MQTT-3.1.3-6]

    def _admit(self, wall: float) -> None:
        """Check the limits on connecting, before any credentials are looked at."""
        state, client = self.state, self.client
        self._check_draining()
        limit = state.limits.max_connections
        if limit and state.connections > limit:
            state.refuse("max_connections")
            raise Refused(ReasonCode.QUOTA_EXCEEDED, f"this node has its {limit} connections")
        if state.full:
            state.refuse("max_memory")
            raise Refused(ReasonCode.QUOTA_EXCEEDED, "this node has no memory left for more clients, try again later")
        most = state.limits.max_sessions
        if most and len(state.registry.sessions) >= most and client.client_id not in state.registry.sessions:
            state.refuse("max_sessions")
            raise Refused(ReasonCode.QUOTA_EXCEEDED, f"this node has its {most} sessions")
        if not state.connect_bucket.admits(wall):
            state.refuse("connect_rate")
            raise Refused(ReasonCode.CONNECTION_RATE_EXCEEDED, "too many connects per second, try again later")
        banned = state.flapping.banned(f"id:{client.client_id}", wall)
        if state.limits.flapping_by_address:
            banned = banned or not state.flapping.count(f"address:{client.host}", wall)
            banned = banned or state.flapping.banned(f"address:{client.host}", wall)
        if banned:
            self._ban()

    def _check_draining(self) -> None:
        if self.state.draining:
            others = bool(self.state.options.server_reference) or self.state.relay is not None
            elsewhere = others and self.context.version == 5
            reason = self.state.elsewhere if elsewhere else ReasonCode.SERVER_UNAVAILABLE
            raise Refused(reason, self.state.draining)

    def _ban(self) -> None:
        self.state.refuse("flapping")
        raise Refused(ReasonCode.BANNED, "connects too often, banned for a while")

    def _authenticate(self, packet: Connect) -> Generator[Effect, Any, Allow]:
        """Ask who this is."""
        method, data = packet.properties.authentication_method, packet.properties.authentication_data
        self._method = method
        decision = yield from self._converse(Credentials(packet.password, method, data))
        if isinstance(decision, Deny):
            self.state.stats.auth_denied += 1
            raise Refused(decision.reason, decision.detail)
        self.state.stats.auth_allowed += 1
        client = self.client
        if decision.username is not None:
            client.username = decision.username
        if decision.client_id is not None:
            client.client_id = decision.client_id
        client.superuser = decision.superuser
        client.attributes = decision.attributes
        return decision

    def _converse(self, credentials: Credentials) -> Generator[Effect, Any, Allow | Deny]:
        """Run the chain, in as many steps as the method of enhanced authentication needs."""
        method = credentials.method
        decision = yield from self._decide(credentials)
        while isinstance(decision, Challenge):
            if method is None:
                return Deny(ReasonCode.NOT_AUTHORIZED, "the client did not ask for enhanced authentication")
            yield SendPacket(Auth(ReasonCode.CONTINUE_AUTHENTICATION, _auth_properties(method, decision.data)))
            answer = yield RECEIVE
            if not isinstance(answer, Auth) or answer.reason is not ReasonCode.CONTINUE_AUTHENTICATION:
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "AUTH 0x18 must follow")  # [MQTT-4.12.0-3]
            if answer.properties.authentication_method != method:
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "the method changed")  # [MQTT-4.12.0-5]
            decision = yield from self._decide(Credentials(None, method, answer.properties.authentication_data))
        return decision

    def _decide(self, credentials: Credentials) -> Generator[Effect, Any, Decision]:
        """Return the decision of the chain; if no plugin decides, only clients on this machine are let in."""
        chain = self.state.hooks.client_authenticate
        decision: Decision | None = None
        if chain is not None:
            decision = yield RunHook(chain, (self.client, credentials), None)
        if decision is not None:
            return decision
        if credentials.method is not None:
            return Deny(ReasonCode.BAD_AUTHENTICATION_METHOD, f"unknown method {credentials.method!r}")
        if self.client.is_loopback:
            return Allow()
        return Deny(ReasonCode.NOT_AUTHORIZED, "no access control is configured, so only this machine may connect")

    def _check_will(self, will: Will | None, wall: float) -> Generator[Effect, Any, Message | None]:
        if will is None:
            return None
        try:
            self.context.check_topic(will.topic)
        except ProtocolError as error:
            raise Refused(error.reason, f"will: {error}") from error
        if will.retain and not self.state.retains and self.context.version == 5:
            raise Refused(ReasonCode.RETAIN_NOT_SUPPORTED, "this node keeps no retained messages")  # [MQTT-3.2.2-13]
        if not (yield from self.context.may("publish", will.topic)):
            raise Refused(ReasonCode.NOT_AUTHORIZED, f"may not publish the will to {will.topic}")
        message = self.context.message(will.topic, will.payload, will.qos, will.retain, will.properties, wall)
        message.headers["will_of"] = self.client
        return message

    def _keep_alive(self, wanted: int) -> int:
        if self.context.version == 5 and self.state.options.server_keep_alive:
            return self.state.options.server_keep_alive
        limit = self.state.limits.max_keep_alive
        return limit if limit and (not wanted or wanted > limit) else wanted

    def _settle(self, session: Session, packet: Connect, *, present: bool, wall: float) -> None:
        """Give the session the properties of this connection."""
        options, limits = self.state.session_options, self.state.limits
        properties = packet.properties
        session.expiry = self._expiry(packet)
        if not present and session.expiry and self.state.store is not None:
            self.state.store.make_durable(session)
        was_special, was_version = session.special, session.version
        session.speak(packet.version, wall)
        session.attach(
            packet.version,
            min(options.window or 65535, properties.receive_maximum or 65535),  # [MQTT-3.3.4-9]
            self.context.max_packet,
            min(properties.topic_alias_maximum or 0, limits.max_topic_alias_out),  # [MQTT-3.1.2-26], [MQTT-3.1.2-27]
        )
        if present and (was_special or session.special or was_version != session.version):
            self.state.pubsub.refresh(session)
        self.context.use_routes()

    def _expiry(self, packet: Connect) -> int:
        """Return for how many seconds the session outlives this connection."""
        options = self.state.session_options
        if packet.version == 5:
            wanted = packet.properties.session_expiry or 0
        else:
            wanted = 0 if packet.clean_start else options.expiry_default_v3
        return min(wanted, options.expiry_max) if options.expiry_max else wanted

    def _connack(self, packet: Connect, keep_alive: int, allow: Allow) -> Connack:
        """Return the answer to a client that is let in; `session_present` is not known yet."""
        if packet.version != 5:
            return Connack()
        state = self.state
        self.context.told_unretained = not state.retains
        wanted = packet.properties.session_expiry or 0
        information = None
        if packet.properties.request_response_information == 1 and state.options.response_information:
            information = state.options.response_information.replace("${clientid}", self.client.client_id)
        expiry = self._expiry(packet)
        return Connack(
            properties=Properties(
                session_expiry=expiry if expiry != wanted else None,
                receive_maximum=state.session_options.max_awaiting_rel or None,
                retain_available=None if state.retains else 0,
                maximum_packet_size=state.limits.max_packet_size or None,
                assigned_client_id=self.client.client_id if self.client.client_id != packet.client_id else None,
                topic_alias_maximum=state.limits.max_topic_alias or None,
                server_keep_alive=keep_alive if keep_alive != packet.keep_alive else None,
                response_information=information,
                authentication_method=self._method,
                authentication_data=allow.data,
            ),
        )

    # -- acknowledgements of what we sent

    def _puback(self, session: Session, packet: Puback, wall: float) -> Steps:
        frame = session.inflight.get(packet.packet_id)
        if frame is None:
            if session.scheduler is not None:
                session.scheduler.late(packet.packet_id, packet.reason)
            return  # late or wrong; nothing waits for it
        if is_released(frame) or qos_of(frame) != 1:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "PUBACK for a QoS 2 message")
        session.acknowledged(packet.packet_id, packet.reason)
        hooks = self.state.hooks
        if hooks.message_acked is not None:
            hooks.message_acked.notify(self.client, message_of(frame, session.version), packet.reason)
        if hooks.delivery_completed is not None:
            hooks.delivery_completed.notify(self.client, message_of(frame, session.version), packet.reason)
        self._pump(session, wall)
        yield from ()

    def _pubrec(self, session: Session, packet: Pubrec, wall: float) -> Steps:
        frame = session.inflight.get(packet.packet_id)
        if frame is None:
            reason = ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if self.context.version == 5 else ReasonCode.SUCCESS
            if session.durable is not None and session.durable.may_come_again(packet.packet_id):
                return  # from an earlier connection; the message itself comes again, and PUBREC with it
            if packet.reason < 0x80:
                yield from self.publishing.in_turn(session)
                yield SendPacket(Pubrel(packet.packet_id, reason))
            return
        if is_released(frame):
            yield from self.publishing.in_turn(session)
            yield SendPacket(Pubrel(packet.packet_id))
            return
        if qos_of(frame) != 2:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "PUBREC for a QoS 1 message")
        hooks = self.state.hooks
        if hooks.message_acked is not None:
            hooks.message_acked.notify(self.client, message_of(frame, session.version), packet.reason)
        if packet.reason >= 0x80:  # [MQTT-4.3.3-4]: the client refused it; its id is free
            session.acknowledged(packet.packet_id, packet.reason)
            if hooks.delivery_completed is not None:
                hooks.delivery_completed.notify(self.client, message_of(frame, session.version), packet.reason)
            self._pump(session, wall)
            return
        session.inflight[packet.packet_id] = released(frame)
        commit = session.durable.release(packet.packet_id) if session.durable is not None else None
        if commit is not None:
            yield Await(commit)
            if commit.error is not None:
                raise unanswered()
        else:
            yield from self.publishing.in_turn(session)
        yield SendPacket(Pubrel(packet.packet_id))

    def _pubcomp(self, session: Session, packet: Pubcomp, wall: float) -> Steps:
        frame = session.inflight.get(packet.packet_id)
        if frame is None:
            return
        if not is_released(frame):
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "PUBCOMP before PUBREC")
        session.acknowledged(packet.packet_id)  # it was taken with PUBREC, whatever PUBCOMP says
        hooks = self.state.hooks
        if hooks.delivery_completed is not None and isinstance(frame[2], Message):
            hooks.delivery_completed.notify(self.client, frame[2], packet.reason)
        self._pump(session, wall)
        yield from ()

    def _pump(self, session: Session, wall: float) -> None:
        waits = session.state is not READY or session.durable is not None or session.scheduler is not None
        if waits and session.pump(wall) and session.link is not None:
            session.link.pump_later()

    # -- SUBSCRIBE, UNSUBSCRIBE

    def _subscribe(self, session: Session, packet: Subscribe) -> Steps:
        state = self.state
        if self._too_many(len(packet.subscriptions)):
            yield SendPacket(Suback(packet.packet_id, (ReasonCode.QUOTA_EXCEEDED,) * len(packet.subscriptions)))
            return
        properties = packet.properties.user_properties
        wanted: list[Subscription | ReasonCode | Verdict] = [
            replace(item, user_properties=properties) if properties else item for item in packet.subscriptions
        ]
        if state.hooks.client_subscribe is not None:
            changed = yield RunHook(state.hooks.client_subscribe, (self.client, properties), wanted)
            if len(changed) != len(wanted):
                raise ProtocolError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, "a plugin changed the number of filters")
            wanted = changed
        reasons: list[ReasonCode] = []
        granted: list[tuple[Subscription, bool]] = []
        before: dict[str, Subscription | None] = {}
        problem = ""
        asked = {item.filter for item in packet.subscriptions}  # one that a plugin has made is not the client's fault
        budget = FILTERS_PER_TURN
        try:
            for found in wanted:
                item = found.outcome if isinstance(found, Verdict) else found
                if budget <= 0:
                    yield NEXT_TURN
                    budget = FILTERS_PER_TURN
                problem = problem or (found.detail if isinstance(found, Verdict) else "")
                if isinstance(item, ReasonCode):
                    reasons.append(codec.sayable(SUBACK, item))
                    continue
                budget -= len(item.filter)
                reason, detail = yield from self._judge(session, item, changed=item.filter not in asked)
                problem = problem or detail
                reasons.append(reason)
                if reason < 0x80:
                    before.setdefault(item.filter, session.subscriptions.get(item.filter))
                    granted.append((item, state.pubsub.subscribe(session, item)))
        except (ProtocolError, GeneratorExit):  # or the connection has ended meanwhile
            self._take_back(session, before, granted)
            raise
        commit: Commit[Any] | None = None
        if granted and state.store is not None and session.durable is not None:
            commit = state.store.subscribe(session, [item for item, _ in granted])
        if state.relay is not None and not state.relay.keeps_to_itself(session, [item.filter for item, _ in granted]):
            commit = joined([state.relay.known()] if commit is None else [commit, state.relay.known()])
        if commit is not None:
            yield Await(commit, hold=True)  # two answers about one filter must not wait at once
            if commit.error is not None:
                self._take_back(session, before, granted)
                refused = codec.sayable(SUBACK, ReasonCode.QUOTA_EXCEEDED)
                reasons = [reason if reason >= 0x80 else refused for reason in reasons]
                granted, problem = [], str(commit.error)
        yield SendPacket(Suback(packet.packet_id, tuple(reasons), self.context.problem(problem)))
        chain = state.hooks.session_subscribed
        if chain is not None:
            for subscription, is_new in granted:
                chain.notify(self.client, subscription, is_new)
        for subscription, is_new in granted:
            session.offer_to_sources(subscription, is_new=is_new)
        if session.scheduler is not None:
            session.go_on()

    def _take_back(
        self, session: Session, before: dict[str, Subscription | None], granted: list[tuple[Subscription, bool]]
    ) -> None:
        """Restore subscriptions after a failure to make new ones, unless others have come meanwhile."""
        made = {item.filter: item for item, _ in granted}
        for filter_, old in before.items():
            if session.subscriptions.get(filter_) is not made[filter_]:
                continue
            if old is None:
                self.state.pubsub.unsubscribe(session, filter_)
                session.leave_sources(filter_)  # one that was registered meanwhile may have taken it
            else:
                self.state.pubsub.subscribe(session, old)

    def _give_way_without(self, session: Session, removed: list[str]) -> Steps:
        """Let others have their turn; if the connection ends meanwhile, the store is told what was left till then."""
        try:
            yield NEXT_TURN
        except GeneratorExit:
            known = self.state.registry.sessions.get(self.client.client_id) is session  # not one that came after it
            if self.state.store is not None and session.durable is not None and known:
                gone = [filter_ for filter_ in removed if filter_ not in session.subscriptions]
                self.state.store.subscribe(session, (), gone)
            raise

    def _too_many(self, filters: int) -> bool:
        limit = self.state.limits.max_filters
        if not limit or filters <= limit:
            return False
        self.state.refuse("max_filters")
        return True

    def _judge(
        self, session: Session, subscription: Subscription, *, changed: bool
    ) -> Generator[Effect, Any, tuple[ReasonCode, str]]:
        """Return (reason, detail) for one filter of a SUBSCRIBE."""
        state = self.state
        try:
            group, filter_ = split_share(subscription.filter)
            check_filter(filter_, state.limits.max_topic_levels)
        except TopicError as error:
            if "levels" in str(error):
                state.refuse("max_topic_levels")
            elif not changed:
                raise ProtocolError(ReasonCode.MALFORMED_PACKET, str(error)) from error  # [MQTT-4.13.1-1]
            return ReasonCode.TOPIC_FILTER_INVALID, str(error)
        if group is not None and subscription.no_local:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "no local on a shared subscription")  # [MQTT-3.8.3-4]
        limit = state.session_options.max_subscriptions
        if limit and len(session.subscriptions) >= limit and subscription.filter not in session.subscriptions:
            state.refuse("max_subscriptions")
            return ReasonCode.QUOTA_EXCEEDED, f"a session may have {limit} subscriptions"
        most = state.session_options.max_filter_bytes
        added = len(subscription.filter) if subscription.filter not in session.subscriptions else 0
        if most and added and session.filter_bytes + added > most:
            state.refuse("max_filter_bytes")
            return ReasonCode.QUOTA_EXCEEDED, f"the filters of a session may have {most} characters together"
        if not (yield from self.context.may("subscribe", filter_)):
            return ReasonCode.NOT_AUTHORIZED, f"may not subscribe to {subscription.filter}"
        return ReasonCode(subscription.qos), ""

    def _unsubscribe(self, session: Session, packet: Unsubscribe) -> Steps:
        state = self.state
        filters = list(packet.filters)
        if self._too_many(len(filters)):
            if self.context.version != 5:  # its UNSUBACK cannot say no
                raise ProtocolError(ReasonCode.QUOTA_EXCEEDED, "too many filters in one UNSUBSCRIBE")
            yield SendPacket(Unsuback(packet.packet_id, (ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,) * len(filters)))
            return
        for filter_ in filters:
            if filter_ not in session.subscriptions:
                _check_form(filter_)
        if state.hooks.client_unsubscribe is not None:
            properties = packet.properties.user_properties
            changed = yield RunHook(state.hooks.client_unsubscribe, (self.client, properties), filters)
            if len(changed) == len(filters):
                filters = changed
        reasons: list[ReasonCode] = []
        removed: list[str] = []
        budget = FILTERS_PER_TURN
        for filter_ in filters:
            if budget <= 0:
                yield from self._give_way_without(session, removed)
                budget = FILTERS_PER_TURN
            budget -= len(filter_)
            if state.pubsub.unsubscribe(session, filter_):
                session.leave_sources(filter_)
                removed.append(filter_)
                reasons.append(ReasonCode.SUCCESS)
            else:
                reasons.append(ReasonCode.NO_SUBSCRIPTION_EXISTED)
        commit: Commit[Any] | None = None
        if state.store is not None and session.durable is not None:
            # All that were asked for: one that is gone from memory may be in the store, if that has failed before.
            commit = state.store.subscribe(session, (), filters)
        if state.relay is not None and not state.relay.keeps_to_itself(session, filters):
            commit = joined([state.relay.known()] if commit is None else [commit, state.relay.known()])
        if commit is not None:
            yield Await(commit, hold=True)
            if commit.error is not None:
                raise unanswered()
        yield SendPacket(Unsuback(packet.packet_id, tuple(reasons)))
        chain = state.hooks.session_unsubscribed
        if chain is not None:
            for filter_ in removed:
                chain.notify(self.client, filter_)

    # -- the rest

    def _ping(self) -> Steps:
        yield SendPacket(Pingresp())

    def _disconnect(self, session: Session, packet: Disconnect) -> Steps:
        expiry = packet.properties.session_expiry
        if expiry is not None:
            if expiry and not session.expiry:  # [MQTT-3.14.2-2]
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "session expiry was 0 and cannot be raised")
            limit = self.state.session_options.expiry_max
            session.expiry = min(expiry, limit) if limit else expiry
        with_will = packet.reason is not ReasonCode.SUCCESS
        store = self.state.store
        if store is not None and session.durable is not None and (session.will is not None or expiry is not None):
            if not with_will:
                session.will = None
            yield Await(store.save(session), hold=True)  # who sees the connection closed may rely on it
        yield Close(with_will=with_will)

    def _reauthenticate(self, packet: Auth) -> Steps:
        method = packet.properties.authentication_method
        if packet.reason is not ReasonCode.RE_AUTHENTICATE or self._method is None or method != self._method:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "AUTH out of place")  # [MQTT-4.12.1-1]
        decision = yield from self._converse(Credentials(None, method, packet.properties.authentication_data))
        if isinstance(decision, Deny):
            self.state.stats.auth_denied += 1
            raise ProtocolError(decision.reason, decision.detail)  # [MQTT-4.12.1-2]
        self.state.stats.auth_allowed += 1
        self.client.superuser = decision.superuser
        self.client.attributes = decision.attributes
        yield RenewCredentials(decision.expires_at)
        yield SendPacket(Auth(ReasonCode.SUCCESS, _auth_properties(method, decision.data)))
        if self.session is not None:
            yield from self.recheck(self.session)

    def recheck(self, session: Session) -> Steps:
        """Recheck access after a change of rules: forget decisions, remove subscriptions that are no longer allowed."""
        self.context.use_routes()
        if session.will is not None and not (yield from self.context.may("publish", session.will.topic)):
            session.will = None
        denied: list[str] = []
        for text in list(session.subscriptions):
            if not (yield from self.context.may("subscribe", split_share(text)[1])):
                denied.append(text)  # noqa: PERF401 - it waits
        # All at once: if this ends before, the next connection decides again.
        taken = [text for text in denied if text in session.subscriptions]
        if not taken:
            return
        for text in taken:
            self.state.pubsub.unsubscribe(session, text)
            session.leave_sources(text)
        session.revoke(taken)
        if self.state.store is not None and session.durable is not None:
            # In this order: once a subscription is gone, nothing tells that what came under it must not be delivered.
            self.state.store.save(session)
            self.state.store.subscribe(session, (), taken)
        if self.state.hooks.session_unsubscribed is not None:
            for text in taken:
                self.state.hooks.session_unsubscribed.notify(self.client, text)


def _check_form(filter_: str) -> None:
    """Raise unless it is a filter, whatever else may be said against it. [MQTT-4.13.1-1]"""
    try:
        check_filter(split_share(filter_)[1])
    except TopicError as error:
        raise ProtocolError(ReasonCode.MALFORMED_PACKET, str(error)) from error


def _auth_properties(method: str | None, data: bytes | None) -> Properties:
    return replace(NONE, authentication_method=method, authentication_data=data)
