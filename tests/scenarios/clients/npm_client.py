"""MQTT.js (npm `mqtt`), as a Node.js process that runs `tests/scenarios/npm/client.js`; TCP and WebSocket.

`make test` installs the packages of `tests/npm` into `.build/npm`.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import threading
from base64 import b64decode, b64encode
from typing import Any

from tests.scenarios.clients.base import LASTING, PATIENCE, Details, Listeners, RealClient, Received, Will
from tests.support.node import ROOT

MODULES = ROOT / ".build" / "npm" / "node_modules"
SCRIPT = ROOT / "tests" / "scenarios" / "npm" / "client.js"


def text(data: bytes) -> str:
    return b64encode(data).decode()


def to_properties(details: Details | None) -> dict[str, Any] | None:
    """MQTT.js takes user properties as an object; a list in it makes a name repeat."""
    if details is None:
        return None
    user: dict[str, list[str]] = {}
    for key, value in details.user:
        user.setdefault(key, []).append(value)
    return {
        "contentType": details.content_type,
        "responseTopic": details.response_topic,
        "correlationData": text(details.correlation_data),
        "userProperties": user,
    }


def to_details(properties: dict[str, Any]) -> Details | None:
    if not any(properties.values()):
        return None
    user = []
    for key, values in properties.get("userProperties", {}).items():
        user += [(key, value) for value in (values if isinstance(values, list) else [values])]
    return Details(
        content_type=properties.get("contentType", ""),
        response_topic=properties.get("responseTopic", ""),
        correlation_data=b64decode(properties.get("correlationData") or ""),
        user=tuple(user),
    )


class NpmClient(RealClient):
    name = "npm"

    def __init__(self, listeners: Listeners, transport: str, version: int) -> None:
        super().__init__(listeners, transport, version)
        assert MODULES.is_dir(), "make test installs the npm packages; scripts/npm-packages does it by hand"
        self.numbers = itertools.count(1)
        self.done: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            ["node", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"NODE_PATH": str(MODULES)},
        )
        self.reader = threading.Thread(target=self._read, name="npm-client", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if "done" in event:
                self.done.put(event)
                continue
            found = event["message"]
            self.inbox.put(
                Received(
                    found["topic"],
                    b64decode(found["payload"]),
                    found["qos"],
                    found["retain"],
                    to_details(found["properties"]),
                )
            )
        self.done.put({"error": "the process has ended"})  # so that a command does not wait for nothing

    def _do(self, verb: str, **arguments: Any) -> None:
        number = next(self.numbers)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb, "n": number} | arguments) + "\n")
        self.process.stdin.flush()
        answer = self.done.get(timeout=PATIENCE)
        assert {"done": number} == answer

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        scheme, path = ("ws", "/mqtt") if self.transport == "ws" else ("mqtt", "")
        testament = None if will is None else {"topic": will.topic, "payload": text(will.payload), "qos": will.qos}
        self._do(
            "connect",
            url=f"{scheme}://{self.address}{path}",
            clientId=client_id,
            clean=clean,
            version=self.version,
            sessionExpiry=LASTING if self.version == 5 and not clean else 0,
            will=testament,
        )

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self._do("subscribe", filter=topic_filter, qos=qos)

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        properties = to_properties(details)
        self._do("publish", topic=topic, payload=text(payload), qos=qos, retain=retain, properties=properties)

    def disconnect(self) -> None:
        self._do("disconnect")

    def drop(self) -> None:
        self._do("drop")

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # the script ends with its input
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        self.process.stdout.close()
