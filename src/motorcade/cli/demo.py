"""`motorcade demo`: a node and real clients, narrated; with Spark the whole loop, in about a minute.

The node is a process of its own on free loopback ports with a temporary folder; everything is removed afterwards,
except a report that was asked for. Each scene checks what it shows: a message that does not arrive, or an audit that is
not clean, ends the demonstration with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motorcade.core.errors import MotorcadeError

if TYPE_CHECKING:
    from motorcade.client import Client
    from motorcade.mqtt.packets import Publish

_PATIENCE = 20.0  # seconds for anything that should happen at once
_PORTS = (20_000, 30_000)
_LOOP = "The whole loop on Spark"

_RULES = """\
%% Only the workshop may publish its decisions; a vehicle may write below its own name; the rest is open.
{deny, all, publish, ["workshop/#"]}.
{allow, {user, "vehicle"}, publish, ["vehicles/${clientid}/#"]}.
{allow, all}.
"""


class SceneError(MotorcadeError):
    """A scene did not go as told."""


@dataclass
class DemoRun:
    """Addresses of the demonstration, and what has happened so far."""

    port: int
    ws_port: int
    http_port: int
    folder: Path
    output: list[str] = field(default_factory=list)  #: of the node
    messages: int = 0
    scenes: list[tuple[str, str]] = field(default_factory=list)  #: title, outcome
    node: DemoNode | None = None
    report: Path | None = None  #: folder for the page and the picture of the last scene; None: they go with the rest

    @contextlib.asynccontextmanager
    async def client(self, name: str, **options: object) -> AsyncIterator[Client]:
        """Connect a client; disconnect it at the end of the scene."""
        from motorcade.client import Client

        client = await Client.connect(port=self.port, client_id=name, **options)  # type: ignore[arg-type]  # passed on
        try:
            yield client
        finally:
            await client.disconnect()

    def say(self, text: str) -> None:
        typer.echo(f"     {text}")

    def sends(self, who: str, topic: str, payload: str, note: str) -> None:
        self.say(f"{who:>12} ──▶ {topic}  {payload!r}  {typer.style(note, dim=True)}")

    async def takes(self, who: str, client: Client, payload: str) -> Publish:
        """Take the next message of `client`; it must be this one."""
        try:
            async with asyncio.timeout(_PATIENCE):
                message = await anext(client)
        except TimeoutError:
            raise SceneError(f"{who} did not get {payload!r} within {_PATIENCE:g} s") from None
        self.say(
            f"{who:>12} ◀── {message.topic}  {message.payload.decode()!r}  {typer.style(_note(message), dim=True)}"
        )
        if message.payload.decode() != payload:
            raise SceneError(f"{who} got {message.payload!r} instead of {payload!r}")
        self.messages += 1
        return message


def _note(message: Publish) -> str:
    return f"QoS {message.qos}{', retained' if message.retain else ''}"


def demo(
    keep_log: Annotated[bool, typer.Option("--show-log", help="Print the node's log at the end.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the report of the last scene here: page and picture.")
    ] = None,
    spark: Annotated[bool, typer.Option(help="Play the scene on Spark, which takes most of the time.")] = True,
) -> None:
    """Start a node, let real clients exchange messages, show what happens, clean up."""
    with tempfile.TemporaryDirectory(prefix="motorcade-demo-") as folder:
        run = DemoRun(_free_port(), _free_port(), _free_port(), Path(folder), report=report)
        try:
            asyncio.run(_play(run, _scenes(spark=spark)))
        except BrokenPipeError:
            raise  # the reader of the output has left
        except (MotorcadeError, OSError) as error:
            typer.echo("\n".join(run.output[-20:]), err=True)
            where = f"scene {len(run.scenes) + 1}" if run.output else "start"
            raise SceneError(f"the demonstration stopped ({where}): {error}") from error
        if keep_log:
            typer.echo("\n".join(run.output))
    _report(run)


def _report(run: DemoRun) -> None:
    typer.echo()
    for title, outcome in run.scenes:
        typer.echo(f"  {typer.style('✓', fg='green')} {title:<46} {outcome}")
    typer.echo(
        f"\n{len(run.scenes)} scenes, {run.messages} messages delivered and checked; the node has stopped cleanly."
    )
    if run.report is not None and run.report.is_dir():
        typer.echo(f"The report of the last scene: {run.report / 'report.html'}")
    if not any(title == _LOOP for title, _ in run.scenes):
        typer.echo("Left out: the whole loop on Spark (`pip install 'motorcade[spark]'` brings what it needs).")
    typer.echo(
        "Next: `motorcade serve` in one terminal, `motorcade sub -t '#' -v` in another, `motorcade pub -t a -m b`."
    )


Scene = Callable[[DemoRun], Awaitable[str]]


async def _play(run: DemoRun, scenes: list[tuple[str, Scene]]) -> None:
    typer.echo("Starting a node …")
    node = run.node = DemoNode(run)
    try:
        await node.start()
        for number, (title, scene) in enumerate(scenes, 1):
            typer.echo(f"\n  {number}. {typer.style(title, bold=True)}")
            run.scenes.append((title, await scene(run)))
        typer.echo("\nStopping the node …")
        await node.stop()
    finally:
        await node.kill()


def _scenes(*, spark: bool) -> list[tuple[str, Scene]]:
    scenes: list[tuple[str, Scene]] = [
        ("Telemetry with QoS 0, 1 and 2", _telemetry),
        ("A retained message waits for latecomers", _retained),
        ("A vehicle vanishes: its will is published", _will),
        ("A shared subscription divides the work", _shared),
        ("An offline vehicle finds its messages", _offline),
        ("kill -9: nothing acknowledged is lost", _killed),
        ("A queue shares work, a stream is read again", _sources),
        ("The last value of each key, and back again", _compacted),
        ("One message to a list of vehicles", _fanout),
        ("MQTT over WebSocket, and MQTT 3.1.1", _web),
        ("Access rules: what is not allowed is refused", _denied),
    ]
    if importlib.util.find_spec("paho") is not None:
        scenes.append(("Another implementation: paho-mqtt", _paho))
    if spark and importlib.util.find_spec("pyspark") is not None:
        scenes.append((_LOOP, _loop))
    return scenes


# --- scenes -----------------------------------------------------------------------------------------------------------


async def _telemetry(run: DemoRun) -> str:
    async with run.client("dashboard") as dashboard, run.client("car-1") as car:
        await dashboard.subscribe(("vehicles/+/speed", 2))
        for qos, speed in enumerate(("48", "50", "53")):
            run.sends("car-1", "vehicles/car-1/speed", speed, f"QoS {qos}")
            await car.publish("vehicles/car-1/speed", speed.encode(), qos)
            await run.takes("dashboard", dashboard, speed)
    return "3 messages, each once and in order"


async def _retained(run: DemoRun) -> str:
    topic = "vehicles/car-1/position"
    async with run.client("car-1") as car:
        run.sends("car-1", topic, "52.52,13.40", "QoS 1, retain")
        await car.publish(topic, b"52.52,13.40", 1, retain=True)
        async with run.client("latecomer") as latecomer:
            run.say("   latecomer connects only now and subscribes")
            await latecomer.subscribe((topic, 1))
            await run.takes("latecomer", latecomer, "52.52,13.40")
        await car.publish(topic, b"", 1, retain=True)
    return "the last value was there"


async def _will(run: DemoRun) -> str:
    from motorcade.client import Client, Will

    async with run.client("dashboard") as dashboard:
        await dashboard.subscribe(("vehicles/+/state", 1))
        will = Will("vehicles/car-2/state", b"lost", 1)
        car = await Client.connect(port=run.port, client_id="car-2", will=will)
        run.say("       car-2 drives into a tunnel (connection cut, no goodbye)")
        car.abort()
        await run.takes("dashboard", dashboard, "lost")
    return "the node spoke for the vehicle"


async def _shared(run: DemoRun) -> str:
    taken: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def worker(name: str) -> contextlib.AbstractAsyncContextManager[Client]:
        return run.client(name, on_message=lambda message: taken.put_nowait((name, message.payload.decode())))

    async with worker("worker-a") as a, worker("worker-b") as b, run.client("car-3") as car:
        for member in (a, b):
            await member.subscribe(("$share/workers/jobs/#", 1))
        wanted = [f"trip {number}" for number in range(4)]
        done: list[str] = []
        for trip in wanted:
            run.sends("car-3", "jobs/trip", trip, "QoS 1")
            await car.publish("jobs/trip", trip.encode(), 1)
            try:
                async with asyncio.timeout(_PATIENCE):
                    name, payload = await taken.get()
            except TimeoutError:
                raise SceneError(f"no worker got {trip!r} within {_PATIENCE:g} s") from None
            run.say(f"{name:>12} ◀── jobs/trip  {payload!r}")
            run.messages += 1
            done.append(payload)
        if done != wanted or not taken.empty() or not (a.received and b.received):
            raise SceneError(f"the group got {done}: {a.received} and {b.received}")
    return f"{a.received} to one worker, {b.received} to the other, none twice"


async def _offline(run: DemoRun) -> str:
    from motorcade.mqtt.properties import Properties

    keep = Properties(session_expiry=60)
    topic = "vehicles/car-4/command"
    async with run.client("car-4", clean_start=True, properties=keep) as car:
        await car.subscribe((topic, 1))
    run.say("       car-4 subscribed and went offline")
    async with run.client("fleet-backend") as backend:
        for command in ("unlock", "update maps"):
            run.sends("fleet-backend", topic, command, "QoS 1")
            await backend.publish(topic, command.encode(), 1)
    async with run.client("car-4", clean_start=False, properties=Properties(session_expiry=0)) as car:
        run.say(f"       car-4 is back (session present: {'yes' if car.session_present else 'no'})")
        await run.takes("car-4", car, "unlock")
        await run.takes("car-4", car, "update maps")
    return "2 messages kept and delivered in order"


async def _killed(run: DemoRun) -> str:
    from motorcade.mqtt.properties import Properties

    keep = Properties(session_expiry=60)
    topic = "vehicles/car-6/command"
    async with run.client("car-6", clean_start=True, properties=keep) as car:
        await car.subscribe((topic, 2))
    commands = ("lock", "route 7", "report")
    async with run.client("fleet-backend") as backend:
        for qos, command in zip((1, 2, 1), commands, strict=True):
            run.sends("fleet-backend", topic, command, f"QoS {qos}, acknowledged")
            await backend.publish(topic, command.encode(), qos)
    assert run.node is not None  # noqa: S101 - it has served the scenes before
    await run.node.kill()
    run.say("       kill -9, and a new start:")
    await run.node.start()
    async with run.client("car-6", clean_start=False, properties=Properties(session_expiry=0)) as car:
        run.say(f"       car-6 is back (session present: {'yes' if car.session_present else 'no'})")
        for command in commands:
            await run.takes("car-6", car, command)
    return f"{len(commands)} acknowledged messages survived"


async def _sources(run: DemoRun) -> str:
    async with run.client("car-7") as car:
        for number in range(1, 4):
            run.sends("car-7", "trips/7", f"trip {number}", "QoS 1, no subscriber")
            await car.publish("trips/7", b"trip %d" % number, 1)
    async with run.client("worker-c") as worker:
        await worker.subscribe(("$queue/trips", 1))
        for number in range(1, 4):
            await run.takes("worker-c", worker, f"trip {number}")
    async with run.client("analyst") as analyst:
        await analyst.subscribe(("$stream/trips/2", 1))
        run.say("     analyst reads from the second on:")
        for number in range(2, 4):
            await run.takes("analyst", analyst, f"trip {number}")
    return "each trip worked on once, and still there to be read"


async def _compacted(run: DemoRun) -> str:
    async def append(backend: Client, *values: tuple[str, str]) -> None:
        for key, value in values:
            run.sends("fleet-backend", f"$ECQ/w/car-8/{key}", value, "QoS 1")
            await backend.publish(f"$ECQ/w/car-8/{key}", value.encode(), 1)

    async with run.client("fleet-backend") as backend:
        await append(backend, ("door", "open"), ("fuel", "31 %"), ("door", "shut"))
        async with run.client("car-8") as car:
            run.say("       car-8 wakes up: of each key the last value")
            await car.subscribe(("$ECQ/car-8/#", 1))
            await run.takes("car-8", car, "31 %")
            await run.takes("car-8", car, "shut")
        await append(backend, ("lights", "on"))
        async with run.client("car-8") as car:
            run.say("       car-8 comes again, and gets what it has not had")
            await car.subscribe(("$ECQ/car-8/#", 1))
            await run.takes("car-8", car, "on")
            run.sends("car-8", "$ECQ/rewind/car-8", "1", "everything again")
            await car.publish("$ECQ/rewind/car-8", b"1", 1)
            for value in ("31 %", "shut", "on"):
                await run.takes("car-8", car, value)
    return "4 messages, 3 values, each once until asked for again"


async def _fanout(run: DemoRun) -> str:
    from motorcade.core.receipt import State, decode
    from motorcade.core.vin import make_vin
    from motorcade.mqtt.properties import Properties

    vins = [make_vin(number) for number in range(1, 4)]
    told: list[Properties] = []
    ended: list[State] = []
    async with contextlib.AsyncExitStack() as scene:
        backend = await scene.enter_async_context(run.client("fleet-backend"))
        await backend.subscribe(("$SDV-FANOUT/receipt/#", 1))
        awake = [await scene.enter_async_context(run.client(vin)) for vin in vins[:2]]
        for vin, car in zip(vins, awake, strict=False):
            await car.subscribe((f"agent/{vin}/proxy/request/+", 1))
        batch = json.dumps({"ids": vins, "request_id": "task_ota_1", "data": "update 4.2"})
        run.sends("fleet-backend", "$SDV-FANOUT", "update 4.2", f"for {len(vins)} vehicles, one of them away")
        sent = await backend.send("$SDV-FANOUT", batch.encode(), 1, told=told.append)
        if sent is not None:
            await sent
        accepted = dict(told[0].user_properties).get("accepted") if told else None
        run.say(f"  fleet-backend is told: {accepted} accepted")
        for vin, car in zip(vins, awake, strict=False):
            await run.takes(vin[-6:], car, "update 4.2")
        late = await scene.enter_async_context(run.client(vins[2]))
        run.say(f"      {vins[2][-6:]} wakes up")
        await late.subscribe((f"agent/{vins[2]}/proxy/request/+", 1))
        await run.takes(vins[2][-6:], late, "update 4.2")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while ended.count(State.ACKED) < len(vins):
                    ended.append(decode((await anext(backend)).payload).state)
    for state in (State.ACCEPTED, State.SENT, State.ACKED):
        if ended.count(state) != len(vins):
            raise SceneError(f"there are {ended.count(state)} receipts `{state}` for {len(vins)} vehicles")
    return f"{len(vins)} vehicles have it, {len(ended)} receipts say so"


async def _web(run: DemoRun) -> str:
    from motorcade.client import Client

    browser = await Client.connect(port=run.ws_port, client_id="browser", ws_path="/mqtt")
    try:
        await browser.subscribe(("vehicles/#", 1))
        async with run.client("old-car", version=4) as car:
            run.sends("old-car", "vehicles/old-car/fuel", "31 %", "QoS 1, MQTT 3.1.1")
            await car.publish("vehicles/old-car/fuel", b"31 %", 1)
            await run.takes("browser", browser, "31 %")
    finally:
        await browser.disconnect()
    return "two protocols, one message"


async def _denied(run: DemoRun) -> str:
    from motorcade.client import Client, RefusedError

    async with run.client("car-5", username="vehicle", password=b"demo") as car:
        await car.publish("vehicles/car-5/state", b"parked", 1)
        run.sends("car-5", "vehicles/car-5/state", "parked", "accepted")
        try:
            await car.publish("workshop/recall", b"everybody!", 1)
        except RefusedError as error:
            run.sends("car-5", "workshop/recall", "everybody!", "refused")
            run.say(f"              {error}")
        else:
            raise SceneError("a forbidden message was accepted")
    try:
        await Client.connect(port=run.port, client_id="stranger", username="vehicle", password=b"guess")
    except RefusedError as error:
        run.say(f"    stranger with a wrong password: {error}")
    else:
        raise SceneError("a wrong password was accepted")
    return "1 message and 1 log-in refused"


async def _paho(run: DemoRun) -> str:
    import threading

    from paho.mqtt import client as paho
    from paho.mqtt.enums import CallbackAPIVersion

    loop = asyncio.get_running_loop()
    subscribed = asyncio.Event()
    got: asyncio.Queue[str] = asyncio.Queue()

    def connected(*_: object) -> None:
        other.subscribe("vehicles/paho/ask", qos=2)

    def heard(*_: object) -> None:
        loop.call_soon_threadsafe(subscribed.set)

    def received(_client: object, _data: object, message: paho.MQTTMessage) -> None:
        loop.call_soon_threadsafe(got.put_nowait, message.payload.decode())

    other = paho.Client(CallbackAPIVersion.VERSION2, client_id="paho", protocol=paho.MQTTv5)
    other.on_connect, other.on_subscribe, other.on_message = connected, heard, received
    other.connect("127.0.0.1", run.port)
    thread = threading.Thread(target=other.loop_forever, name="paho", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(_PATIENCE), run.client("fleet-backend") as backend:
            await subscribed.wait()
            await backend.subscribe(("vehicles/paho/answer", 2))
            run.sends("fleet-backend", "vehicles/paho/ask", "ready?", "QoS 2")
            await backend.publish("vehicles/paho/ask", b"ready?", 2)
            question = await got.get()
            run.say(f"{'paho':>12} ◀── vehicles/paho/ask  {question!r}")
            run.messages += 1
            run.sends("paho", "vehicles/paho/answer", "yes", "QoS 2")
            other.publish("vehicles/paho/answer", b"yes", qos=2)
            await run.takes("fleet-backend", backend, "yes")
    except TimeoutError:
        raise SceneError("paho-mqtt and the node did not understand each other") from None
    finally:
        other.disconnect()
        await asyncio.to_thread(thread.join, _PATIENCE)
    return f"question and answer, version {importlib.import_module('paho.mqtt').__version__}"


async def _loop(run: DemoRun) -> str:
    from motorcade.cli import _demo_loop

    settings = _demo_loop.LoopSettings(run.port, run.folder / "data", run.folder, run.report or run.folder)
    outcome = await _demo_loop.play(settings, run.say)
    run.messages += _demo_loop.AUDIENCE - _demo_loop.AWAY
    return outcome


# --- the node ---------------------------------------------------------------------------------------------------------


class DemoNode:
    """A node as a process; it must become ready, and exit with 0 when it is asked to stop."""

    def __init__(self, run: DemoRun) -> None:
        self._run = run
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._configuration = _write_configuration(run.folder)

    async def start(self) -> None:
        run = self._run
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motorcade", "serve", "--config", str(self._configuration)),
            *("--mqtt", f"127.0.0.1:{run.port}", "--ws", f"127.0.0.1:{run.ws_port}"),
            *("--http", f"127.0.0.1:{run.http_port}", "--data", str(run.folder / "data")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        ready = asyncio.Event()
        before = len(run.output)
        self._reading = asyncio.create_task(_collect(process, run.output, ready), name="node-output")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await ready.wait()
        told = [line for line in run.output[before:] if "ready" in line]
        if process.returncode is not None or not told:
            raise SceneError("the node did not become ready; its last lines are above")
        typer.echo(f"  {told[-1]}")

    async def stop(self) -> None:
        """Ask it to stop."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_PATIENCE):
                code = await process.wait()
        except TimeoutError:
            raise SceneError(f"the node did not stop within {_PATIENCE:g} s") from None
        if code != 0:
            raise SceneError(f"the node exited with {code}")

    async def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading


async def _collect(process: asyncio.subprocess.Process, output: list[str], ready: asyncio.Event) -> None:
    if process.stdout is not None:
        async for line in process.stdout:
            output.append(line.decode(errors="replace").rstrip())
            if b"ready" in line:
                ready.set()
    ready.set()  # the end of the output is an answer too


def _write_configuration(folder: Path) -> Path:
    from motorcade.config import toml
    from motorcade.plugins.access import passwords

    rules, users, file = folder / "demo.acl", folder / "demo.passwd", folder / "demo.toml"
    rules.write_text(_RULES)
    passwords.set_password(users, "vehicle", b"demo")
    password = {"type": "password", "file": str(users)}
    file.write_text(
        f"[plugins.access]\nacl_file = {toml(str(rules))}\nauthentication = [{toml(password)}]\n"
        'anonymous = "loopback"\n'  # most scenes are about other things than log-ins
        '[plugins.queues.queue.trips]\ntopics = ["trips/#"]\n'
        '[plugins.streams.stream.trips]\ntopics = ["trips/#"]\n'
    )
    return file


def _free_port() -> int:
    """Find a free port below those of outgoing connections, so that none of them takes it meanwhile."""
    while True:
        port = random.randrange(*_PORTS)  # noqa: S311 - a settings, not a secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
