"""mosquitto_sub and mosquitto_pub (Debian), as processes; TCP only.

mosquitto_sub connects and subscribes in one go, so `connect` only remembers its arguments until there is a filter. A
second `connect` starts it again with the filter it had. Each `publish` is a mosquitto_pub of its own.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tests.scenarios.clients.base import LASTING, PATIENCE, Details, Listeners, RealClient, Received, Will


def to_options(details: Details | None) -> list[str]:
    if details is None:
        return []
    options = ["-D", "publish", "content-type", details.content_type]
    options += ["-D", "publish", "response-topic", details.response_topic]
    options += ["-D", "publish", "correlation-data", details.correlation_data.decode()]
    for key, value in details.user:
        options += ["-D", "publish", "user-property", key, value]
    return options


def to_received(line: str) -> Received:
    """A line of `mosquitto_sub -F %j`. Objects are read as pairs, because names of user properties may repeat."""
    found: dict[str, Any] = dict(json.loads(line, object_pairs_hook=list))
    properties: dict[str, Any] = dict(found.get("properties", ()))
    details = None
    if properties:
        details = Details(
            content_type=properties.get("content-type", ""),
            response_topic=properties.get("response-topic", ""),
            correlation_data=properties.get("correlation-data", "").encode(),
            user=tuple((key, value) for key, value in properties.get("user-properties", ())),
        )
    payload = (found["payload"] or "").encode()  # an empty payload is shown as null
    return Received(found["topic"], payload, found["qos"], bool(found["retain"]), details)


def _wait_for_rest(pid: int) -> None:
    """Until a process waits for something, or has ended.

    mosquitto_sub prints in its signal handler: interrupted while it prints a message, it shows that message twice.
    """
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"S", "Z"}:
        assert time.monotonic() < deadline, "mosquitto_sub never rests"


class MosquittoClient(RealClient):
    name = "mosquitto"
    transports = ("tcp",)

    def __init__(self, listeners: Listeners, transport: str, version: int) -> None:
        super().__init__(listeners, transport, version)
        # mosquitto_sub that is told to end sends DISCONNECT 0x04 when it has a will.
        self.leaves_with_will = version == 5
        self.filters: list[str] = []
        self.options: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def _common(self) -> list[str]:
        version = "mqttv5" if self.version == 5 else "mqttv311"
        return ["-h", self.address.host, "-p", str(self.address.port), "-V", version]

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        self.options = ["-i", client_id]
        if not clean:
            self.options += ["-c"] + (["-x", str(LASTING)] if self.version == 5 else [])
        if will is not None:
            self.options += ["--will-topic", will.topic, "--will-payload", will.payload.decode()]
            self.options += ["--will-qos", str(will.qos)]
        if self.filters:
            self._start()

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.filters = ["-t", topic_filter, "-q", str(qos)]
        self._start()

    def _start(self) -> None:
        self._end(kill=False)  # one that is displaced would connect again and again
        line = ["stdbuf", "-oL", "mosquitto_sub", *self._common(), *self.options, *self.filters, "-d", "-F", "%j"]
        # `-d` tells when the SUBACK is there.
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.subscribed = threading.Event()
        self.reader = threading.Thread(target=self._read, args=(self.process,), name="mosquitto_sub", daemon=True)
        self.reader.start()
        assert self.subscribed.wait(PATIENCE), "mosquitto_sub was not granted its subscription"

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.inbox.put(to_received(line))
            elif line.startswith("Subscribed "):
                assert line.rstrip().endswith(self.filters[-1]), line
                self.subscribed.set()

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        line = ["mosquitto_pub", *self._common(), "-t", topic, "-q", str(qos), *to_options(details)]
        line += ["-m", payload.decode()] if payload else ["-n"]
        line += ["-r"] if retain else []
        subprocess.run(line, check=True, timeout=PATIENCE)

    def disconnect(self) -> None:
        self._end(kill=False)

    def drop(self) -> None:
        self._end(kill=True)

    def _end(self, *, kill: bool) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            _wait_for_rest(process.pid)
            process.terminate()
        process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()

    def close(self) -> None:
        self._end(kill=True)
