"""A compacted queue of a test's own, exclusive (`$ECQ`) or shared (`$SCQ`), for producers, consumers and operators.

queue = Compacted(node, unique("car"))            its consumer is the client of that name
queue.put(("a", b"1"), ("b/c", b"2"))             appended, and acknowledged
with queue.consumer() as client: …                connected and subscribed
queue.stored(operator)                            what an operator reads from it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.consumers import connected, fill, lasting, subscribe, unique, user_property
from tests.support.operator import Operator, payload_of
from tests.support.wire import Address, Client, Packet

#: Kind of queue, as the control port calls it: first level of its topics, and user property of its deliveries.
FORMS = {"exclusive": ("$ECQ", "ecq-seqno"), "shared": ("$SCQ", "scq-seqno")}


class Compacted:
    """One queue. It comes to be with its first message, so nothing is declared."""

    def __init__(self, address: Address, name: str = "", kind: str = "exclusive") -> None:
        self.address = address
        self.kind = kind
        self.name = name or unique("q")
        self.root, self.property = FORMS[kind]
        self.filter = f"{self.root}/{self.name}/#"
        self.rewind = f"{self.root}/rewind/{self.name}"

    def write(self, key: str) -> str:
        """Where a producer publishes."""
        return f"{self.root}/w/{self.name}/{key}"

    def read(self, key: str) -> str:
        """Where its deliveries come from."""
        return f"{self.root}/{self.name}/{key}"

    # Producers.

    def put(self, *messages: tuple[str, bytes], properties: bytes = b"") -> None:
        """Append in order; return when all of them are acknowledged."""
        fill(self.address, [(self.write(key), payload) for key, payload in messages], *filter(None, [properties]))

    def put_numbers(self, count: int, start: int = 0, keys: int = 0) -> None:
        """Payloads that are numbers, each with a key of its own, or in turn with one of so many keys."""
        self.put(*((f"k{number % keys if keys else number}", b"%d" % number) for number in range(start, start + count)))

    # Consumers.

    def consumer(self, version: int = 5, *properties: bytes, client_id: str = "") -> Client:
        """A client that consumes it, with a session that ends with the connection."""
        client = connected(self.address, client_id or self._consumer(), version, *properties)
        subscribe(client, self.filter)
        return client

    def sleeper(self, version: int = 5, *properties: bytes, client_id: str = "") -> Client:
        """A client whose session lasts; it subscribes unless it has done so before."""
        client = lasting(self.address, client_id or self._consumer(), version, *properties)
        assert client.connack is not None
        if not client.connack.session_present:
            subscribe(client, self.filter)
        return client

    def _consumer(self) -> str:
        return self.name if self.kind == "exclusive" else unique("consumer")

    def numbers(self, messages: Iterable[Packet]) -> list[int]:
        """Sequence numbers of deliveries (MQTT 5)."""
        return [int(user_property(message, self.property)) for message in messages]

    def keys(self, messages: Iterable[Packet]) -> list[str]:
        return [str(message.topic).removeprefix(self.read("")) for message in messages]

    # Operators.

    @property
    def path(self) -> str:
        return f"compacted/{self.kind}/{self.name}"

    def shown(self, operator: Operator) -> dict[str, Any]:
        return operator.show(f"compacted/{self.kind}", self.name)

    def messages(self, operator: Operator, **asked: int) -> list[dict[str, Any]]:
        return operator.read(f"compacted/{self.kind}", self.name, **({"limit": 1000} | asked))

    def stored(self, operator: Operator) -> list[bytes]:
        """What an operator sees in it."""
        return [payload_of(message) for message in self.messages(operator)]
