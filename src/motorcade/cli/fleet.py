"""`motorcade fleet`: simulated vehicles that connect, sleep, lose signal, answer late or refuse."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from motorcade.cli import _mqtt
from motorcade.cli._options import duration as seconds
from motorcade.cli._output import print_json, print_table

if TYPE_CHECKING:
    from motorcade.fleet import Fleet, FleetFigures, FleetOptions, Profile, VehicleCounts

app = typer.Typer(no_args_is_help=True, help="Simulated vehicles, for tests and demonstrations.")

_SCREEN, _PIPE = 1.0, 10.0  # seconds between two lines of figures
_COLUMNS = ("vehicles", "connects", "lost", "received", "acked", "refused", "dup", "repeated")  # as a screen has room
_IF_ANY = ("ignored", "overlapped", "denied", "failed", "strays", "broken", "forgotten")

Count = Annotated[int, typer.Option("-n", "--vehicles", min=1, help="Number.")]
First = Annotated[int, typer.Option("--first", min=0, help="Number of the first vehicle; VINs follow from numbers.")]


def _wmi(text: str) -> str:
    from motorcade.core.vin import VinError, make_vin

    try:
        make_vin(0, text)
    except VinError as error:
        raise typer.BadParameter(f"{text!r}: three characters that a VIN may begin with, such as LMC") from error
    return text


Wmi = Annotated[str, typer.Option("--wmi", parser=_wmi, metavar="WMI", help="First three characters of the VINs.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]


@dataclass(frozen=True)
class _Watch:
    """The end of a run, and the display of its figures."""

    duration: float | None  #: seconds; None: until stopped
    count: int | None
    interval: float | None  #: seconds between two lines; None: no lines
    screen: bool  #: one line that is written over


@app.command()
def simulate(
    vehicles: Annotated[
        int | None, typer.Option("-n", "--vehicles", min=1, help="Number. [100; with --vins all of the file]")
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            "--profile", metavar="NAME|FILE", help="Behaviour of the vehicles: see `motorcade fleet profiles`."
        ),
    ] = "steady",
    vins: Annotated[
        str | None,
        typer.Option("--vins", metavar="FILE", help="These vehicles, one VIN per line; - is standard input."),
    ] = None,
    first: First = 1,
    wmi: Wmi = "LMC",
    duration: Annotated[
        float | None, typer.Option("--duration", parser=seconds, metavar="45s|30m", help="Duration. \\[until stopped]")
    ] = None,
    count: Annotated[
        int | None, typer.Option("-C", "--count", min=1, help="End when so many messages are acknowledged.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the random numbers; the same seed gives the same run.")
    ] = 0,
    speed: Annotated[float, typer.Option("--speed", min=0.001, help="How many times faster days pass.")] = 1.0,
    rate: Annotated[float, typer.Option("--rate", min=0, help="Connections per second; 0: no limit.")] = 500.0,
    both_versions: Annotated[
        bool, typer.Option("--both-versions", help="Every other vehicle speaks MQTT 3.1.1.")
    ] = False,
    qos: Annotated[int, typer.Option("-q", "--qos", min=0, max=1, help="QoS of the subscription.")] = 1,
    topic_prefix: Annotated[
        str,
        typer.Option("--topic-prefix", help="Topic prefix of requests, as plugins.fanout.topic_prefix of the node."),
    ] = "agent/{VIN}/proxy/request",
    host: _mqtt.Host = "127.0.0.1",
    port: _mqtt.Port = None,
    username: Annotated[str | None, typer.Option("-u", "--username", help="May contain {VIN}.")] = None,
    password: _mqtt.Password = None,
    five: _mqtt.Five = True,
    cafile: _mqtt.CaFile = None,
    cert: _mqtt.Cert = None,
    key: _mqtt.Key = None,
    insecure: _mqtt.Insecure = False,
    as_json: Json = False,
) -> None:
    """Connect simulated vehicles, let them live, and report what they received and acknowledged.

    Each vehicle has its VIN as client id and a session that is kept, subscribes to its requests, and publishes to
    ecp/VIN/online and ecp/VIN/heartbeat. Ends with Ctrl-C, after --duration, or when -C messages are acknowledged;
    exits with 1 if it ends before those.
    """
    from motorcade.fleet import FleetOptions

    tls = _mqtt.ConnectFlags(cafile=cafile, cert=cert, key=key, insecure=insecure).tls()
    listed = _listed(vins, vehicles)
    options = FleetOptions(
        host=host,
        port=port or (1883 if tls is None else 8883),
        vehicles=len(listed) or vehicles or 100,
        first=first,
        wmi=wmi,
        vins=listed,
        profile=_profile(profile),
        version=5 if five else 4,
        both_versions=both_versions,
        qos=qos,
        topic_prefix=topic_prefix,
        seed=seed,
        speed=speed,
        rate=rate,
        max_received=1000,
        username=username,
        password=password,
        tls=tls,
    )
    screen = sys.stderr.isatty()
    watch = _Watch(duration or None, count, _SCREEN if screen else None if as_json else _PIPE, screen)
    figures = _play(options, watch)
    if as_json:
        print_json(_as_json(options, figures))
    else:
        _report(figures)
    if count is not None and figures.total.acked < count:
        print(f"error: {figures.total.acked} of {count} messages were acknowledged", file=sys.stderr)
        raise typer.Exit(1)


@app.command("vins")
def list_vins(vehicles: Count = 100, first: First = 1, wmi: Wmi = "LMC", as_json: Json = False) -> None:
    """Print the VINs of simulated vehicles, one per line, as `fanout send --vins` takes them."""
    from motorcade.fleet import FleetOptions

    made = list(FleetOptions(vehicles=vehicles, first=first, wmi=wmi).all_vins())
    if as_json:
        print_json(made)
    else:
        print("\n".join(made))


@app.command("profiles")
def profiles(
    name: Annotated[str | None, typer.Argument(help="Show this one as a file to copy and change.")] = None,
    as_json: Json = False,
) -> None:
    """List the ways in which simulated vehicles behave, or show one of them in full."""
    from motorcade.fleet import PROFILES

    if name is None:
        rows = [(profile.name, profile.about) for profile in PROFILES.values()]
        if as_json:
            print_json([{"name": row[0], "about": row[1]} for row in rows])
        else:
            print_table(("profile", "a vehicle that"), rows)
        return
    profile = _profile(name)
    if as_json:
        print_json(_tables(profile))
    else:
        print(_as_toml(profile))


# --- reading ----------------------------------------------------------------------------------------------------------


def _listed(place: str | None, vehicles: int | None) -> tuple[str, ...]:
    if place is None:
        return ()
    from motorcade.cli import _vins

    return tuple(_vins.read(place, check_digit=False).vins[:vehicles])


def _profile(text: str) -> Profile:
    from motorcade.fleet import find_profile

    return find_profile(text)


# --- running ----------------------------------------------------------------------------------------------------------


def _play(options: FleetOptions, watch: _Watch) -> FleetFigures:
    if sys.platform == "win32":
        return asyncio.run(_run(options, watch))
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options, watch))


async def _run(options: FleetOptions, watch: _Watch) -> FleetFigures:
    from motorcade.fleet import Fleet

    fleet = Fleet(options)
    living = asyncio.create_task(_live(fleet, watch), name="fleet")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, living.cancel)
    try:
        await asyncio.wait([living])
        if not living.cancelled():
            living.result()
        return fleet.figures()
    finally:
        await fleet.stop()


async def _live(fleet: Fleet, watch: _Watch) -> None:
    await fleet.start(wait=False)
    vins = fleet.vins
    if watch.interval is not None:
        print(f"{len(vins)} vehicles, {vins[0]} to {vins[-1]}; Ctrl-C ends.", file=sys.stderr)
    showing = asyncio.create_task(_show(fleet, watch), name="figures")
    try:
        await asyncio.wait_for(_enough(fleet, watch.count), watch.duration)
    except TimeoutError:
        pass  # --duration
    finally:
        showing.cancel()
        if watch.screen:
            print(file=sys.stderr)


async def _enough(fleet: Fleet, count: int | None) -> None:
    if count is None:
        await asyncio.Event().wait()
    else:
        await fleet.wait_until(lambda: fleet.figures().total.acked >= count, "so many are acknowledged", None)


async def _show(fleet: Fleet, watch: _Watch) -> None:
    if watch.interval is None:
        return
    before = fleet.figures()
    while True:
        await asyncio.sleep(watch.interval)
        now = fleet.figures()
        line = _line(now, before)
        print(f"\r{line:<100}" if watch.screen else line, end="" if watch.screen else "\n", file=sys.stderr, flush=True)
        before = now


def _line(now: FleetFigures, before: FleetFigures) -> str:
    total = now.total
    rate = (total.received - before.total.received) / max(now.seconds - before.seconds, 0.001)
    return (
        f"{now.seconds:6.0f} s  {total.online} of {total.vehicles} online, {total.received} received ({rate:.0f}/s), "
        f"{total.acked} acked, {total.repeated} repeated, {total.lost} lost"
    )


# --- printing ---------------------------------------------------------------------------------------------------------


def _row(name: str, tally: VehicleCounts) -> list[str]:
    return [name, *(str(getattr(tally, column)) for column in _COLUMNS)]


def _report(figures: FleetFigures) -> None:
    total = figures.total
    rows = [["kind", *_COLUMNS], *(_row(name, tally) for name, tally in figures.kinds.items())]
    if len(figures.kinds) > 1:
        rows.append(_row("all", total))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        print(
            f"{name:<{widths[0]}}",
            *(f"{text:>{width}}" for text, width in zip(numbers, widths[1:], strict=True)),
            sep="  ",
        )
    rest = [f"{getattr(total, name)} {name}" for name in _IF_ANY if getattr(total, name)]
    parts = [f"{figures.seconds:.1f} s", f"{total.heartbeats} heartbeats", f"{total.bytes} bytes received", *rest]
    print(", ".join(parts) + ".")
    for text, times in sorted(figures.troubles.items(), key=lambda item: -item[1]):
        print(f"{times} times: {text}")


def _as_json(options: FleetOptions, figures: FleetFigures) -> dict[str, object]:
    return {
        "profile": options.profile.name,
        "seed": options.seed,
        "seconds": round(figures.seconds, 3),
        "total": figures.total.as_dict(),
        "kinds": {name: tally.as_dict() for name, tally in figures.kinds.items()},
        "troubles": figures.troubles,
    }


def _tables(profile: Profile) -> dict[str, dict[str, object]]:
    import msgspec

    return {kind.name: {"share": kind.share, **msgspec.to_builtins(kind.behaviour)} for kind in profile.kinds}


def _as_toml(profile: Profile) -> str:
    from motorcade.config import toml

    parts = []
    for name, table in _tables(profile).items():
        lines = [f"{key} = {toml(value)}" for key, value in table.items()]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts)
