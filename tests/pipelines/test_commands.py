"""What commands of pipelines refuse before there is a session: wrong usage, and streams that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from motorcade.cli import app
from motorcade.cli.store import _where
from motorcade.pipelines import PipelineError
from tests.pipelines.lake import Lake
from tests.support.redis import RedisServer

SCHEMA = """
[types.position]
topics = ["v/#"]
fields = "n INT"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store, a table, a payload and a schema in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "fleet.csv").write_text("vin\n")
    (tmp_path / "payload").write_text("do it")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with Lake(f"rocksdb://{tmp_path / 'data' / 'store'}") as lake:
        lake.fill("log", 3)
    return tmp_path


def motorcade(*words: str) -> Result:
    return CliRunner().invoke(app, words)


AUDIENCE = ("pipeline", "run", "audience", "--request", "r1", "--payload", "payload", "--checkpoint", "run")
SEND = ("fanout", "send", "--request", "r1", "--payload", "payload", "--vins", "fleet.csv")
SOURCE = ("--schema", "schema.toml", "--data", "data")
INGEST = ("pipeline", "run", "ingest", "--lake", "lake", "--checkpoint", "run", *SOURCE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*AUDIENCE, "--table", "fleet"), "write NAME=PATH"),
        ((*AUDIENCE, "--table", "fleet=nowhere.csv"), "there is no file or folder nowhere.csv"),
        ((*AUDIENCE, "--table", "fleet=fleet.csv", "--option", "sep=;"), "write NAME.OPTION=VALUE"),
        ((*AUDIENCE, "--table", "fleet=fleet.csv", "--broker", "http://here"), "is no address of a broker"),
        ((*INGEST, "--stream", "log", "--from", "yesterday"), "--from: 'yesterday' is none of earliest, latest"),
        ((*INGEST, "--stream", "log", "--on-trimmed", "x"), "--on-trimmed: 'x' is none of fail, skip"),
        ((*INGEST, "--stream", "log", "--if-missing", "x"), "--if-missing: 'x' is none of fail, empty"),
        ((*INGEST, "--redis-stream", "log"), "--redis-stream: the store must be redis://"),
        (
            (*INGEST, "--stream", "log", "--lake", "/proc/lake"),
            "/proc/lake cannot be written: nothing can be",
        ),
        ((*INGEST, "--stream", "log", "--lake", "payload/x"), "payload is no folder"),
        ((*SEND, "--rest", "nowhere/rest"), "nowhere/rest cannot be written: there is no folder"),
        (("fanout", "report", "r1", "--data", "data", "--master", "here"), "none of local, local[N]"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_leaves_nothing(here: Path, words: tuple[str, ...], says: str) -> None:
    ended = motorcade(*words)
    assert (2, True) == (ended.exit_code, says in ended.stderr), ended.stderr
    assert not (here / "run").exists()


def test_a_stream_that_is_not_there_is_told_before_a_folder_belongs_to_it(here: Path) -> None:
    ended = motorcade(*INGEST, "--stream", "lag")
    assert isinstance(ended.exception, PipelineError)
    assert "there is no stream 'lag'" in str(ended.exception)
    assert "(there are: log); a stream begins with its first record, and `--if-missing empty`" in str(ended.exception)
    assert not (here / "run").exists()


def test_so_is_a_stream_of_redis(here: Path, redis_server: RedisServer) -> None:
    redis_server.empty()
    ended = motorcade(*INGEST, "--redis-stream", "messages:processed", "--store", redis_server.url)
    assert isinstance(ended.exception, PipelineError)
    assert str(ended.exception).startswith("there is no stream 'messages:processed' in redis://")
    assert not (here / "run").exists()


def test_the_store_of_a_command_is_the_same_in_whatever_folder_its_workers_are(here: Path) -> None:
    assert f"rocksdb://{here / 'data' / 'store'}" == _where(None, None, "data", None, None).url
