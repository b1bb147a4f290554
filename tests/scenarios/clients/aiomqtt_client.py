"""aiomqtt (PyPI): asyncio over paho's protocol code."""

from __future__ import annotations

import asyncio

import aiomqtt
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY

from tests.scenarios.clients.base import PATIENCE, Details, Listeners, Loop, RealClient, Received, Will, cut
from tests.scenarios.clients.paho_client import lasting_properties, to_details, to_properties


class AiomqttClient(RealClient):
    name = "aiomqtt"
    client: aiomqtt.Client | None = None

    def __init__(self, listeners: Listeners, transport: str, version: int) -> None:
        super().__init__(listeners, transport, version)
        self.loop = Loop()

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        self.loop.run(self._connect(client_id, clean, will))

    async def _connect(self, client_id: str, clean: bool, will: Will | None) -> None:
        v5 = self.version == 5
        self.client = aiomqtt.Client(
            self.address.host,
            self.address.port,
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion.V5 if v5 else aiomqtt.ProtocolVersion.V311,
            clean_session=None if v5 else clean,
            clean_start=clean if v5 else MQTT_CLEAN_START_FIRST_ONLY,
            properties=lasting_properties() if v5 and not clean else None,
            transport="websockets" if self.transport == "ws" else "tcp",
            websocket_path="/mqtt",
            will=None if will is None else aiomqtt.Will(will.topic, will.payload, will.qos),
            timeout=PATIENCE,
        )
        await self.client.__aenter__()
        self.reader = asyncio.create_task(self._read(self.client), name="aiomqtt-reader")

    async def _read(self, client: aiomqtt.Client) -> None:
        try:
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                details = to_details(message.properties)
                self.inbox.put(Received(message.topic.value, message.payload, message.qos, message.retain, details))
        except aiomqtt.MqttError:
            pass  # the connection is gone, as `drop` wants it

    def subscribe(self, topic_filter: str, qos: int) -> None:
        assert self.client is not None
        (code,) = self.loop.run(self.client.subscribe(topic_filter, qos))
        assert qos == (code if isinstance(code, int) else code.value)

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        assert self.client is not None
        self.loop.run(self.client.publish(topic, payload, qos, retain, to_properties(details)))

    def disconnect(self) -> None:
        self.loop.run(self._leave())

    def drop(self) -> None:
        assert self.client is not None
        held = self.client._client.socket()
        assert held is not None
        cut(held.fileno())
        self.loop.run(self._leave())

    async def _leave(self) -> None:
        client, self.client = self.client, None
        assert client is not None
        try:
            await client.__aexit__(None, None, None)
        except aiomqtt.MqttError:
            pass  # nothing to take leave from
        self.reader.cancel()

    def close(self) -> None:
        if self.client is not None:
            self.disconnect()
        self.loop.close()
