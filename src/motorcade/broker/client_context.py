"""The context of one connected client: its identity, protocol version, rights, and what it was told."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from motorcade.broker.effects import Effect, RunHook
from motorcade.broker.pubsub import Route
from motorcade.broker.state import BrokerState
from motorcade.core.client import ClientInfo
from motorcade.core.errors import TopicError
from motorcade.core.message import Message
from motorcade.core.topic import check_topic
from motorcade.mqtt.properties import NONE, Properties
from motorcade.mqtt.reasons import ProtocolError, ReasonCode

MAX_DETAIL = 200  #: characters of a reason string; it may quote what the client sent


class ClientContext:
    """One connection's client. `Channel` and `Publishing` share it, and the fast path reads it."""

    __slots__ = ("client", "max_packet", "routes", "state", "told_problems", "told_unretained", "version")

    def __init__(self, state: BrokerState, client: ClientInfo) -> None:
        self.state = state
        self.client = client
        self.version = 4  # until CONNECT tells
        self.max_packet = 0  #: bytes of a packet the client takes; 0 is any
        self.routes: dict[bytes, Route] = {}  #: topics this client may publish to
        self.told_problems = True  #: the client wants reason strings
        self.told_unretained = False  #: its CONNACK said that nothing is retained

    def may(self, action: str, topic: str) -> Generator[Effect, Any, bool]:
        """Ask whether the client may publish or subscribe."""
        chain = self.state.hooks.client_authorize
        if chain is None or self.client.superuser:
            return True
        answer = yield RunHook(chain, (self.client, action, topic), None)
        allowed: bool = answer is True or answer is None  # None: no plugin decided, no rule forbids it
        if allowed:
            self.state.stats.acl_allowed += 1
        else:
            self.state.stats.acl_denied += 1
        return allowed

    def check_topic(self, topic: str) -> None:
        """Raise unless a topic is valid."""
        try:
            check_topic(topic, self.state.limits.max_topic_levels)
        except TopicError as error:
            if "levels" in str(error):
                self.state.refuse("max_topic_levels")
            raise ProtocolError(ReasonCode.TOPIC_NAME_INVALID, str(error)) from error  # [MQTT-3.3.2-2]

    def message(
        self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties, wall: float
    ) -> Message:
        """Return the message of a PUBLISH or of a will."""
        expiry = properties.message_expiry
        return Message(
            topic,
            payload,
            qos,
            retain,
            self.client.client_id,
            self.client.username,
            self.state.guids.next(int(wall * 1_000_000)),
            wall,
            properties.payload_format,
            wall + expiry if expiry is not None else None,
            properties.content_type,
            properties.response_topic,
            properties.correlation_data,
            properties.user_properties,
        )

    def problem(self, detail: str) -> Properties:
        """Return a reason string, if the client wants one. [MQTT-3.1.2-29]"""
        if not detail or not self.told_problems or self.version != 5:
            return NONE
        return Properties(reason_string=detail[:MAX_DETAIL])

    def use_routes(self) -> None:
        """Begin with no remembered access decisions; without access control all channels share the node's routes."""
        unguarded = self.state.hooks.client_authorize is None or self.client.superuser
        self.routes = self.state.pubsub.routes if unguarded else {}
