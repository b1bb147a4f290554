"""`motorcade fleet`: vehicles from the command line."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path

import pytest

from motorcade.core.vin import check_vin, make_vin
from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.commands import PATIENCE, start_process
from tests.support.local import LocalNode
from tests.unit.cli.conftest import Run

SIMULATE = ("fleet", "simulate")


def publish(node: LocalNode, *requests: tuple[str, str]) -> None:
    """Each to a vehicle that has subscribed, which is waited for."""
    with wire.Client(node) as client:
        client.connect()
        for vin, request in requests:
            topic = f"agent/{vin}/proxy/request/{request}"

            def taken(topic: str = topic) -> bool:
                answer = client.publish(topic, b"payload", 1)
                return answer is not None and answer.reason != 0x10  # no matching subscribers

            wait_until(taken, f"{vin} is subscribed")


def test_it_ends_when_so_many_are_acknowledged(node: LocalNode) -> None:
    process = start_process(*SIMULATE, "-n", 3, "--first", 10, "-C", 3, "--json", "--both-versions", "-p", node.port)
    publish(node, *((make_vin(number), "ota") for number in (10, 11, 12)))
    out, err = process.communicate(timeout=PATIENCE)
    assert (0, "") == (process.returncode, err)
    told = json.loads(out)
    assert ("steady", 3, 3, 3) == (
        told["profile"],
        told["total"]["vehicles"],
        told["total"]["acked"],
        told["kinds"]["steady"]["received"],
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_report(node: LocalNode, number: signal.Signals) -> None:
    process = start_process(*SIMULATE, "-n", 2, "--first", 20 + number, "--profile", "refusing", "-p", node.port)
    publish(node, (make_vin(20 + number), "ota"))
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert 0 == process.returncode, err
    assert "Traceback" not in err
    lines = [line.split() for line in out.splitlines() if line.startswith("refusing")]
    assert "2" == lines[0][1]
    assert "heartbeats" in out


def test_it_ends_after_its_time_and_says_what_is_missing(run: Run, node: LocalNode) -> None:
    done = run("fleet", "simulate", "-n", 1, "--first", 60, "--duration", "0.2s", "-C", 5, "-p", node.port)
    assert 1 == done.returncode
    assert "0 of 5 messages were acknowledged" in done.stderr


def test_vehicles_of_a_list(run: Run, node: LocalNode, tmp_path: Path) -> None:
    vins = run("fleet", "vins", "-n", 3, "--first", 70).stdout.split()
    assert [make_vin(number) for number in (70, 71, 72)] == vins
    for vin in vins:
        check_vin(vin, check_digit=True)
    (tmp_path / "vins").write_text("\n".join(vins))
    done = run("fleet", "simulate", "--vins", "vins", "-n", 2, "--duration", "0.2", "--json", "-p", node.port)
    assert 2 == json.loads(done.stdout)["total"]["vehicles"]


def test_a_profile_is_shown_as_a_file_that_works(run: Run, node: LocalNode, tmp_path: Path) -> None:
    assert "tunnel" in run("fleet", "profiles").stdout
    shown = run("fleet", "profiles", "mixed").stdout
    assert 100 == sum(kind["share"] for kind in tomllib.loads(shown).values())
    (tmp_path / "own.toml").write_text(shown)
    done = run(
        *("fleet", "simulate", "--profile", "own.toml", "-n", 20, "--first", 80),
        *("--duration", "0.3s", "--speed", "100", "--json", "-p", node.port),
    )
    told = json.loads(done.stdout)
    assert ("own", 10) == (told["profile"], told["kinds"]["steady"]["vehicles"])
