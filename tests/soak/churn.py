"""Everything that clients, platforms and operators do to a node, with names that were never used before.

Each method of `Churn` marked with `@piece` is one piece of churn: it makes something, uses it, and lets it go. Pieces
run at their own pace, several at a time, until they are told to stop. What a piece leaves behind (a durable session, a
will that waits, a message that is never fetched) ends by a time-out that `config` makes short.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

import httpx

from motorcade.client import Client, ClientError, Will
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.core.vin import make_vin
from motorcade.mqtt.packets import V5, V311, Publish
from motorcade.mqtt.properties import Properties
from motorcade.plugins.access.passwords import set_password
from tests.support import wire
from tests.support.node import NodeProcess

TOKEN = "soak-token"
PLATFORM = ("platform", b"soak")
PATIENCE = 30.0  #: seconds for an answer; machines that run this are busy
COMES = 10.0  #: seconds for a message
AT_ONCE = 4  #: pieces of one kind at the same time

#: Bytes of the store's cache, which keeps blocks of files that are gone until it is full: it is full after one cycle.
CACHE = 4 << 20

#: Seconds by which everything that was let go is gone, sweeps and collections included.
LET_GO = 25.0

Piece = TypeVar("Piece", bound=Callable[..., Awaitable[None]])
PIECES: dict[str, float] = {}  #: name of the method -> per second


def piece(per_second: float) -> Callable[[Piece], Piece]:
    """Mark a method of `Churn` that is run so often."""

    def mark(method: Piece) -> Piece:
        PIECES[method.__name__] = per_second
        return method

    return mark


def config(folder: Path) -> str:
    """The configuration of a node that forgets within seconds."""
    return f"""
[broker]
node = "soak"

[http]
token = "{TOKEN}"
plugin_paths = "{folder}"

[log]
level = "warning"

[session]
expiry_default_v3 = 2
expiry_max = 30
await_rel_timeout = 2.0
queue = 100

[limits]
connect_timeout = 2.0
stall_timeout = 5.0
flapping_count = 6
flapping_window = 2.0
flapping_ban = 2.0
message_rate = 500.0
message_burst = 500.0

[store]
sweep_interval = 1.0
cache_bytes = {CACHE}

[plugins.observer]
path = "{folder / "observer.py"}"

[plugins.access]
anonymous = "allow"
acl_file = "{folder / "acl.conf"}"
failure_delay = 0.02
max_failure_entries = 100

[[plugins.access.authentication]]
type = "password"
file = "{folder / "passwords"}"
cache_seconds = 2.0

[plugins.retained]
sweep_interval = 0.5

[plugins.queues]
sweep_interval = 1.0

[plugins.streams]
trim_interval = 1.0
progress_interval = 0.2

[plugins.fanout]
data_retention = 12.0
gc_interval = 1.0
receipts_retention = 12.0
ack_timeout = 0.5
retry_delay = 0.2
max_attempts = 2

[plugins.ecq]
retention = 15.0
idle = 1.0
gc_interval = 0.5
heartbeat = 2.0

[plugins.systopics]
interval = 1.0
"""


def prepare(folder: Path) -> None:
    """The files that the configuration names."""
    folder.chmod(0o700)
    shutil.copy(Path(__file__).with_name("observer.py"), folder / "observer.py")
    write_rules(folder, "user-0")
    set_password(folder / "passwords", PLATFORM[0], PLATFORM[1])


def write_rules(folder: Path, user: str) -> None:
    """Rules with the name of a user that was never there before."""
    (folder / "acl.conf").write_text(
        '{allow, {user, "platform"}, all, ["$SDV-FANOUT/#"]}.\n'
        f'{{deny, {{user, "{user}"}}, publish, ["refused/{user}/#"]}}.\n'
        '{deny, all, publish, ["$SDV-FANOUT/#"]}.\n'
        '{deny, all, all, ["refused/#"]}.\n'
        "{allow, all}.\n"
    )


async def until(condition: Callable[[], bool], patience: float) -> None:
    """Wait for something that another process does; `TimeoutError`."""
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110 - nothing here hears of it
            await asyncio.sleep(0.02)


class Churn:
    """The load of one node."""

    def __init__(self, node: NodeProcess, folder: Path, rate: float = 1.0) -> None:
        self.node = node
        self.folder = folder
        self.rate = rate
        self.done: Counter[str] = Counter()  #: pieces by name
        self.refused: Counter[str] = Counter()  #: pieces that ended early, by name and reason
        self.web = httpx.AsyncClient(
            base_url=f"http://{node.http}/api/v1/",
            headers={"Authorization": f"Bearer {TOKEN}"},
            trust_env=False,
            timeout=PATIENCE,
        )
        self.expired = 0  #: messages whose vehicles came later than `data_retention`
        self.paused: list[str] = []  #: requests that wait for an operator, perhaps longer than their messages live
        self._number = 0
        self._clients: WeakSet[Client] = WeakSet()

    async def run(self, seconds: float) -> None:
        """All pieces, for so long; returns when the last one is over."""
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as tasks:
            for name, per_second in PIECES.items():
                tasks.create_task(self._repeat(name, per_second * self.rate, end), name=name)
        for client in list(self._clients):  # of pieces that ended early
            client.abort()
        while self.paused:
            await self.ask("POST", f"{self.paused.pop()}/resume")

    async def _repeat(self, name: str, per_second: float, end: float) -> None:
        loop = asyncio.get_running_loop()
        method = getattr(self, name)
        room = asyncio.Semaphore(AT_ONCE)

        async def once(number: int) -> None:
            try:
                await method(number)
            except (ClientError, httpx.TransportError, TimeoutError, OSError) as error:
                self.refused[f"{name} {number % 12}: {error!r}"[:160]] += 1
            finally:
                room.release()
                self.done[name] += 1

        async with asyncio.TaskGroup() as tasks:
            while loop.time() < end:
                await room.acquire()
                self._number += 1
                tasks.create_task(once(self._number), name=f"{name}-{self._number}")
                await asyncio.sleep(max(0.0, min(1 / per_second, end - loop.time())))

    # -- helpers

    async def client(
        self, name: str, version: int = V5, *, web: bool = False, expiry: int = 0, **more: object
    ) -> Client:
        """A client by that id, over TCP or WebSocket; `expiry` makes its session outlive it."""
        at = self.node.ws if web else self.node.mqtt
        assert at is not None
        properties = Properties(session_expiry=expiry or None, topic_alias_maximum=8) if version == V5 else Properties()
        made = await Client.connect(
            at.host,
            at.port,
            client_id=name,
            version=version,
            clean_start=not expiry,
            properties=properties,
            ws_path="/mqtt" if web else None,
            timeout=PATIENCE,
            **more,  # type: ignore[arg-type]
        )
        self._clients.add(made)
        return made

    async def ask(self, method: str, path: str, status: int = 200, /, **json: object) -> httpx.Response:
        """A request to the control port that must be answered with this status."""
        answer = await self.web.request(method, path, json=json or None)
        if answer.status_code != status:
            raise ClientError(f"{method} {path.partition('/')[0]}: {answer.status_code} {answer.text}")
        return answer

    async def got(self, client: Client, count: int) -> None:
        """Wait until a client has received so many messages."""
        try:
            await until(lambda: client.received >= count, COMES)
        except TimeoutError:
            raise ClientError(f"{client.received} of {count} messages came") from None

    # -- clients

    @piece(12)
    async def subscriber(self, n: int) -> None:
        """A client with filters of all kinds, which gets messages, unsubscribes from half of them, and goes."""
        version, web, expiry = (V5 if n % 2 else V311), n % 3 == 0, (2 if n % 5 < 2 else 0)
        will = Will(f"wills/{n}", b"gone", n % 3, properties=Properties(will_delay=1 if version == V5 else None))
        client = await self.client(f"subscriber-{n}", version, web=web, expiry=expiry, will=will)
        filters = (
            *(f"churn/{n}/exact", f"churn/{n}/+/one", f"churn-{n}/#", f"+/{n}/any", f"$churn-{n}/exact"),
            *(f"$churn-{n}/+/deep-{n}", f"$share/group-{n}/shared/{n}/+", f"$share/group-{n}/$private-{n}/#"),
        )
        await client.subscribe(*((name, n % 3) for name in filters))
        for qos, topic in enumerate((f"churn/{n}/exact", f"$churn-{n}/exact", f"shared/{n}/{n}")):
            await client.publish(topic, b"x" * (n % 400), qos)
        if version == V5:
            for alias in (1, 2):
                await client.publish(f"churn/{n}/exact", b"alias", 1, properties=Properties(topic_alias=alias))
        await self.got(client, 3)
        await client.unsubscribe(*filters[::2])
        if n % 4 == 0:
            client.abort()  # the will comes
        else:
            await client.disconnect()
        if expiry:
            await self._away(n, version, web)

    async def _away(self, n: int, version: int, web: bool) -> None:
        """Messages wait for a durable session; half of them are fetched, the others end with the session."""
        helper = await self.client(f"helper-{n}", V5)
        for count in range(3):
            await helper.publish(f"churn/{n}/{count}/one", b"waits" * 200, 1)
        await helper.disconnect()
        if n % 2:
            client = await self.client(f"subscriber-{n}", version, web=web, expiry=1)
            client.abort()

    @piece(4)
    async def silent(self, n: int) -> None:
        """A durable client that acknowledges nothing and releases nothing; it vanishes in the middle."""
        version = 5 if n % 2 else 4
        reader, writer = await asyncio.open_connection(self.node.host, self.node.port)
        try:
            expiry = wire.prop(0x11, 2) if version == 5 else b""
            writer.write(wire.connect_packet(f"silent-{n}", version=version, clean=False, properties=expiry))
            writer.write(wire.subscribe_packet(1, [(f"silent/{n}/#", 2)], version=version))
            for number in range(1, 20):
                writer.write(
                    wire.publish_packet(f"silent/{n}/{number}", b"y" * 50, version=version, qos=2, packet_id=number)
                )
            async with asyncio.timeout(PATIENCE):
                await reader.readexactly(4)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.transport.abort()

    @piece(4)
    async def stranger(self, n: int) -> None:
        """Bytes that are no MQTT, half a CONNECT, a packet that is too large, a WebSocket that never speaks."""
        at = self.node.ws if n % 5 == 4 else self.node.mqtt
        assert at is not None
        _, writer = await asyncio.open_connection(at.host, at.port)
        connect = wire.connect_packet(f"stranger-{n}")
        writer.write(
            (
                b"GET /nothing HTTP/1.1\r\n\r\n",
                connect[: len(connect) // 2],
                connect + b"\x30\xff\xff\xff\x7f",
                connect + wire.publish_packet(f"stranger/{n}/#", b""),
                b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\n",
            )[n % 5]
        )
        await asyncio.sleep(0.1)
        writer.transport.abort()

    @piece(1)
    async def flapping(self, n: int) -> None:
        """A client that connects again and again until it is banned."""
        for _ in range(8):
            try:
                client = await self.client(f"flapping-{n}")
            except ClientError:
                return
            client.abort()

    @piece(0.5)
    async def flood(self, n: int) -> None:
        """A client that publishes faster than it may, to ever-new topics."""
        client = await self.client(f"flood-{n}", V311)
        for number in range(600):
            await client.send(f"flood/{n}/{number}", b"z" * 20)
        await client.publish(f"flood/{n}/end", b"", 1)
        await client.disconnect()

    @piece(3)
    async def login(self, n: int) -> None:
        """Log-ins that are refused, with names and passwords of all sorts; topics that rules deny."""
        address = f"127.{1 + n // 200 % 200}.{n % 200}.2"  # else a flood from one address would be seen, and kept out
        for password in (b"wrong", b""):
            try:
                client = await self.client(
                    f"login-{n}", username=f"user-{n % 50}-{n}", password=password, local_address=address
                )
            except ClientError:
                continue
            await client.disconnect()
        client = await self.client(f"anonymous-{n}")
        await client.subscribe((f"refused/{n}/#", 1))
        try:
            await client.publish(f"refused/{n}/topic", b"no", 1)
        except ClientError:
            pass
        await client.disconnect()

    # -- what is kept

    @piece(6)
    async def retained(self, n: int) -> None:
        """A retained message is set, replaced, fetched, and cleared, or expires."""
        client = await self.client(f"retained-{n}", V5)
        expiry = Properties(message_expiry=4) if n % 3 == 0 else Properties()
        for payload in (b"old", b"new"):
            await client.publish(f"retained/{n}/value", payload, 1, retain=True, properties=expiry)
        await client.subscribe((f"retained/{n}/#", 1))
        await self.got(client, 1)
        if n % 3:
            await client.publish(f"retained/{n}/value", b"", 1, retain=True)
        await client.disconnect()

    @piece(1.5)
    async def queue(self, n: int) -> None:
        """A queue is declared, filled, consumed by two clients, changed, and deleted."""
        name = f"queue-{n}"
        kind = "last_value" if n % 2 else "regular"
        await self.ask("POST", f"queues/{name}", 201, topics=[f"jobs/{n}/#"], kind=kind, max_attempts=2)
        try:
            consumers = [await self.client(f"consumer-{n}-{i}", V5 if i else V311, expiry=2 * i) for i in range(2)]
            for consumer in consumers:
                await consumer.subscribe((f"$queue/{name}", 1))
            for number in range(6):
                await consumers[0].publish(f"jobs/{n}/{number}", b"job", 1)
            await until(lambda: sum(consumer.received for consumer in consumers) >= 6, COMES)
            await consumers[0].disconnect()
            consumers[1].abort()
            await self.ask("PATCH", f"queues/{name}", max_messages=10 + n % 5)
            await self.ask("GET", f"queues/{name}/messages")
        finally:
            await self.ask("DELETE", f"queues/{name}")

    @piece(1.5)
    async def stream(self, n: int) -> None:
        """A stream and a capture rule into it are declared, read, and deleted."""
        name = f"stream-{n}"
        await self.ask("POST", f"streams/{name}", 201, topics=[f"trips/{n}/#"], retention=2.0)
        try:
            await self.ask("POST", f"captures/{name}", 201, topics=[f"copied/{n}/+"], to=f"stream:{name}")
            reader = await self.client(f"reader-{n}", V5 if n % 2 else V311, expiry=2)
            await reader.subscribe((f"$stream/{name}/earliest", 1))
            for number in range(3):
                await reader.publish(f"trips/{n}/{number}", b"km", 1)
                await reader.publish(f"copied/{n}/{number}", b"km", 1)
            await self.got(reader, 6)
            reader.abort()
            await self.ask("DELETE", f"captures/{name}")
        finally:
            await self.ask("DELETE", f"streams/{name}")

    @piece(4)
    async def compacted(self, n: int) -> None:
        """An exclusive and a shared compacted queue; some are deleted, others forgotten when they are idle."""
        name = f"car-{n}"
        client = await self.client(name, V5 if n % 2 else V311)
        for number in range(4):
            await client.publish(f"$ECQ/w/{name}/key-{number % 3}", b"value", 1)
            await client.publish(f"$SCQ/w/shared-{n}/key-{number}", b"value", 1)
        if n % 4:
            await client.subscribe((f"$ECQ/{name}/#", 1), (f"$SCQ/shared-{n}/#", 1))
            await self.got(client, 7)
        if n % 4 and n % 3 == 0:
            await client.publish(f"$SCQ/rewind/shared-{n}", b"1", 1)
        await client.disconnect()
        if n % 3 == 1:
            await self.ask("DELETE", f"compacted/exclusive/{name}")

    # -- fan-out

    def _vins(self, n: int) -> list[str]:
        return [make_vin(n * 4 + number) for number in range(3)]

    async def _vehicles(self, vins: list[str], answer: ReasonCode = ReasonCode.SUCCESS) -> None:
        """Vehicles come, all at the same time, get their message, and go."""
        versions = [V311 if number == 1 else V5 for number in range(len(vins))]
        await asyncio.gather(
            *(self._vehicle(vin, version, answer) for vin, version in zip(vins, versions, strict=True))
        )

    async def _vehicle(self, vin: str, version: int, answer: ReasonCode) -> None:
        """One of them. It may come when its message has expired (`data_retention`): machines that run this are busy."""

        def take(_message: Publish) -> ReasonCode:
            return answer

        vehicle = await self.client(vin, version, expiry=2, on_message=take)
        await vehicle.subscribe((f"agent/{vin}/proxy/request/+", 1))
        try:
            await self.got(vehicle, 1)
        except ClientError as error:
            view = (await self.ask("GET", f"vehicles/{vin}")).json()
            if [(end["state"], end["reason"]) for end in view["history"]] != [("expired", "retention")]:
                raise ClientError(f"{error}; {view['why']['sentence']}") from None
            self.expired += 1
        await vehicle.disconnect()

    @piece(1.5)
    async def fanout(self, n: int) -> None:
        """Requests that are finished, cancelled, left paused, resumed, expired, or replaced and refused."""
        request, vins, kind = f"request-{n}", self._vins(n), n % 6
        path = f"fanout/requests/{request}"
        more: dict[str, object] = {"expires_in": 0.3} if kind == 4 else {"batch_id": f"batch-{n}"} if kind == 5 else {}
        await self.ask("POST", f"{path}/send", 202, ids=vins, data=f"do {n}", **more)
        if kind == 0:
            await self._vehicles(vins)
        elif kind == 1:
            await self.ask("POST", f"{path}/cancel")
        elif kind == 2:
            await self.ask("POST", f"{path}/pause")
            self.paused.append(path)
        elif kind == 3:
            await self.ask("POST", f"{path}/pause")
            await self.ask("POST", f"{path}/resume")
            await self._vehicles(vins[:2])
        elif kind == 5:
            await self.ask("POST", f"{path}/send", 202, ids=vins, data=f"do {n}", **more)
            await self.ask("POST", f"{path}/send", 202, ids=vins, data="again", batch_id=f"other-{n}")
            await self._vehicles(vins[:1], ReasonCode.UNSPECIFIED_ERROR)
        await self.web.get(f"vehicles/{vins[0]}/why")
        await self.web.get(path)

    @piece(1)
    async def platform(self, n: int) -> None:
        """The two-step form over MQTT, by a platform that logs in and listens to its receipts."""
        vins = [make_vin(10**9 + n * 4 + number) for number in range(3)]
        platform = await self.client(f"platform-{n}", username=PLATFORM[0], password=PLATFORM[1])
        await platform.subscribe((f"$SDV-FANOUT/receipt/task-{n}/+", 1))
        await platform.publish(f"$SDV-FANOUT/data/data-{n}", f"data {n}".encode(), 1)
        batch = f'{{"ids": ["{vins[0]}", "{vins[1]}"], "request_id": "task-{n}", "data_id": "data-{n}"}}'
        await platform.publish("$SDV-FANOUT/trigger", batch.encode(), 1)
        await self._vehicles(vins[:1])
        await self.got(platform, 3)
        await platform.disconnect()

    # -- operators

    @piece(1)
    async def plugin(self, n: int) -> None:
        """A plugin is loaded by its path and unloaded: a file, a package, one that cannot start, one that is broken."""
        name, kind = f"extra_{n}", n % 4
        path = self.folder / (name if kind == 1 else f"{name}.py")
        text = PLUGIN.format(n=n, fails="raise ValueError" if kind == 2 else "pass")
        if kind == 1:
            path.mkdir(mode=0o700)
            (path / "__init__.py").write_text(f"from .part import *\n{text}")
            (path / "part.py").write_text(f"PART = {n}\n")
        else:
            path.write_text(text if kind != 3 else "this is no Python")
        try:
            await self.ask("POST", f"plugins/{name}", 409 if kind > 1 else 201, path=str(path), config={})
            if kind > 1:
                return
            try:
                client = await self.client(f"plugged-{n}")
                await client.publish(f"plugged/{n}", b"seen", 1)
                await client.subscribe((f"$rows-{n}/all", 0))
                await client.disconnect()
            finally:
                await self.ask("DELETE", f"plugins/{name}")
        finally:
            shutil.rmtree(path) if kind == 1 else path.unlink()

    @piece(0.2)
    async def reload(self, n: int) -> None:
        """New users and rules, and a reload."""
        write_rules(self.folder, f"user-{n}")
        set_password(self.folder / "passwords", f"user-{n % 3}", b"right")
        await self.ask("POST", "config/reload")

    @piece(4)
    async def request(self, n: int) -> None:
        """Requests to the control port: good ones, and paths and bodies that are not."""
        client = await self.client(f"kicked-{n}", expiry=2)
        await client.subscribe((f"kicked/{n}", 1))
        for path in (f"clients?search=kicked-{n}", f"clients/kicked-{n}", "node", "plugins", f"queues/none-{n}"):
            await self.web.get(path)
        await self.web.post(f"queues/bad-{n}", content=b"{" * (1 + n % 100))
        await self.web.get(f"nothing-{n}")
        await self.web.get("clients", headers={"Authorization": f"Bearer {n}"})
        await self.web.delete(f"clients/kicked-{n}")
        client.abort()

    @piece(0.1)
    async def backup(self, n: int) -> None:
        """The store is copied."""
        folder = self.folder / f"backup-{n}"
        await self.ask("POST", "store/backup", 202, to=str(folder))
        async with asyncio.timeout(PATIENCE):
            while (await self.web.get("store/backup")).json()["state"] == "running":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)

    @piece(2)
    async def options(self, n: int) -> None:
        """Subscriptions with identifiers and no local, renewed; the session is taken over by another connection."""
        first = await self.client(f"twice-{n}", V5, expiry=2)
        wanted = [Subscription(f"twice/{n}/{i}", qos=i, no_local=bool(i)) for i in range(3)]
        for number in (1, 2):
            await first.subscribe(*wanted, properties=Properties(subscription_ids=(n % 1000 * number + 1,)))
        second = await self.client(f"twice-{n}", V5, expiry=2)
        await second.publish(f"twice/{n}/0", b"self", 0, properties=Properties(user_properties=((f"key-{n}", "v"),)))
        await second.disconnect(ReasonCode.DISCONNECT_WITH_WILL)


PLUGIN = """
from motorcade.extension.plugin import Plugin, hook

TABLE = {{str(number): "x" * 50 for number in range(200)}}

class Extra{n}(Plugin):
    description = "for {n}"

    async def start(self):
        {fails}

    @hook("message.publish", topics=["plugged/{n}"])
    def on_publish(self, client, message):
        self.context.counters["seen-{n}"] += 1

    @hook("session.subscribed")
    def on_subscribed(self, client, subscription, is_new):
        self.context.counters["subscribed"] += 1

    def gauges(self):
        return {{"extra_{n}": 1}}
"""
