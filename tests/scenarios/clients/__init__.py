"""MQTT clients that others have written, behind one blocking interface, so that one scenario runs with all of them.

`KINDS` lists every client with the transports it can use. A driver hides how its library is called and nothing else:
what a scenario sees has gone through the library's own codec, session and flow control.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.scenarios.clients.aiomqtt_client import AiomqttClient
from tests.scenarios.clients.base import Details, Listeners, RealClient, Received, Will
from tests.scenarios.clients.gmqtt_client import GmqttClient
from tests.scenarios.clients.mosquitto_client import MosquittoClient
from tests.scenarios.clients.npm_client import NpmClient
from tests.scenarios.clients.paho_client import PahoClient


@dataclass(frozen=True)
class Kind:
    """A client over a transport in a version of MQTT."""

    driver: type[RealClient]
    transport: str
    version: int

    def __str__(self) -> str:
        return f"{self.driver.name}-{self.transport}-{'5' if self.version == 5 else '3.1.1'}"


KINDS = [
    Kind(driver, transport, version)
    for driver in (PahoClient, AiomqttClient, GmqttClient, MosquittoClient, NpmClient)
    for transport in driver.transports
    for version in (4, 5)
]

__all__ = ["KINDS", "Details", "Kind", "Listeners", "RealClient", "Received", "Will"]
