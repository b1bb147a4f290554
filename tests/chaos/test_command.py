"""What lies around every crash test: options, folders, the exit code, and SIGTERM."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import command, crash, dispatch, ecq, fanout, spark


def test_the_options_of_a_test_come_from_its_command_line(tmp_path: Path) -> None:
    words = ["--pipeline", "audience,ingest", "--rounds", "3", "--seed", "7", "--minutes", "1.5", "--engine", "redis"]
    first, second = spark._options([*words, "--cluster", "--quiet", "--data", str(tmp_path)])
    assert spark.Options("audience", 3, 1.5, "redis", cluster=True, seed=7, data=tmp_path, quiet=True) == first
    assert dataclasses.replace(first, pipeline="ingest") == second


def test_the_options_of_a_test_of_nodes_come_from_its_command_line(tmp_path: Path) -> None:
    words = ["--engine", "redis,redis+cluster", "--rounds", "3", "--seed", "7", "--durability", "strict", "--rate", "9"]
    words += ["--quiet", "--data", str(tmp_path)]
    redis: dict[str, Any] = {
        "engine": "redis",
        "rounds": 3,
        "seed": 7,
        "durability": "strict",
        "rate": 9.0,
        "quiet": True,
    }
    redis["data"] = tmp_path
    cluster = redis | {"engine": "redis+cluster"}
    assert [ecq.Options(**redis), ecq.Options(**cluster)] == ecq._options(words)
    assert fanout.Options(**cluster, vehicles=4) == fanout._options([*words, "--vehicles", "4"])[1]
    assert (
        crash.Options(**cluster, qos=(2,), kill="both") == crash._options([*words, "--qos", "2", "--kill", "both"])[1]
    )


def test_there_must_be_a_redis_to_kill(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        crash._options(["--engine", "redis,rocksdb", "--kill", "both"])
    assert "there is no Redis to kill with rocksdb" in capsys.readouterr().err


def test_the_options_of_the_test_of_dispatchers_come_from_its_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", "redis", "--rounds", "3", "--workers", "5", "--rate", "9", "--only", "leader,pause"]
    ways = {"leader": dispatch.WAYS["leader"], "pause": dispatch.WAYS["pause"]}
    assert [dispatch.Options(3, "redis", 5, 9.0, ways=ways)] == dispatch._options(words)
    with pytest.raises(SystemExit):
        dispatch._options(["--only", "leader,follower"])
    assert "no blow 'follower'" in capsys.readouterr().err


def test_who_names_no_seed_gets_one_for_all_runs() -> None:
    first, second = spark._options([])
    assert first.seed == second.seed
    assert len({spark._options([])[0].seed for _ in range(20)}) > 1


def test_what_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        spark._options(["--pipeline", "ingest,egest"])
    assert 2 == ended.value.code
    assert "no pipeline 'egest'; there are ingest, audience" in capsys.readouterr().err


# -- runs


def test_one_run_that_has_not_passed_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The others take place all the same, and each is told."""
    for outcomes, code in (([True, True], 0), ([False, True], 1), ([True, False], 1)):
        assert code == command.run_all(outcomes, lambda outcome: outcome, str, lambda outcome: outcome)
        assert f"{outcomes[0]}\n\n{outcomes[1]}\n\n" == capsys.readouterr().out


def test_sigterm_ends_a_run_and_leaves_nothing_behind() -> None:
    before, places = signal.getsignal(signal.SIGTERM), []

    def crash(options: None) -> None:
        with command.folder(None, "run") as place:
            places.append(place)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        command.run_all([None], crash, str, bool)
    assert 128 + signal.SIGTERM == ended.value.code
    assert [False] == [place.exists() for place in places]
    assert before == signal.getsignal(signal.SIGTERM)


# -- folders


def test_data_that_shall_be_kept_is_kept_and_never_mixed_with_those_of_another_run(tmp_path: Path) -> None:
    with command.folder(tmp_path / "data", "rocksdb") as place:
        (place / "node.log").write_text("words")
    assert "words" == (tmp_path / "data" / "rocksdb" / "node.log").read_text()
    with pytest.raises(SystemExit, match="rocksdb is there already"), command.folder(tmp_path / "data", "rocksdb"):
        pass
