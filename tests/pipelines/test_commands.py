"""What commands of pipelines refuse before there is a session: wrong usage, and streams that are not there."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from motorcade.cli import _pipeline_ingest, app
from motorcade.cli._store import NodeStoreFlags
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


def test_wrong_usage_is_exit_code_2_and_leaves_nothing(here: Path) -> None:
    cases: list[tuple[tuple[str, ...], str]] = [
        ((*AUDIENCE, "--table", "fleet"), "write NAME=PATH"),
        ((*AUDIENCE, "--table", "fleet=nowhere.csv"), "there is no file or folder nowhere.csv"),
        ((*AUDIENCE, "--table", "fleet=fleet.csv", "--option", "sep=;"), "write NAME.OPTION=VALUE"),
        ((*AUDIENCE, "--table", "fleet=fleet.csv", "--broker", "http://here"), "is no address of a broker"),
        ((*INGEST, "--stream", "log", "--from", "yesterday"), "--from: 'yesterday' is none of earliest, latest"),
        ((*INGEST, "--stream", "log", "--on-trimmed", "x"), "--on-trimmed: 'x' is none of fail, skip"),
        ((*INGEST, "--stream", "log", "--if-missing", "x"), "--if-missing: 'x' is none of fail, empty"),
        ((*INGEST, "--redis-stream", "log"), "--redis-stream: the store must be redis://"),
        ((*INGEST, "--stream", "log", "--lake", "/proc/lake"), "/proc/lake cannot be written: nothing can be"),
        ((*INGEST, "--stream", "log", "--lake", "payload/x"), "payload is no folder"),
        ((*SEND, "--rest", "nowhere/rest"), "nowhere/rest cannot be written: there is no folder"),
        (("fanout", "report", "r1", "--data", "data", "--master", "here"), "none of local, local[N]"),
    ]
    for words, says in cases:
        ended = motorcade(*words)
        assert (2, True) == (ended.exit_code, says in ended.stderr), (says, ended.stderr)
        assert not (here / "run").exists()


def test_a_stream_that_is_not_there_is_told_before_a_folder_belongs_to_it(
    here: Path, redis_server: RedisServer
) -> None:
    ended = motorcade(*INGEST, "--stream", "lag")
    assert isinstance(ended.exception, PipelineError)
    said = str(ended.exception)
    assert said.startswith("the stream 'lag' has no record in rocksdb://")
    assert ": there is no such stream (with records there are: log), or nothing has come to it yet; `motorcade" in said
    assert "`--if-missing empty` waits for the first record; with `--config FILE`, streams" in said
    redis_server.empty()
    ended = motorcade(*INGEST, "--redis-stream", "messages:processed", "--store", redis_server.url)
    assert isinstance(ended.exception, PipelineError)
    assert str(ended.exception).startswith("the stream 'messages:processed' has no record in redis://")
    assert not (here / "run").exists()


CONFIG = """
[plugins.streams.stream.quiet]
topics = ["q/#"]

[plugins.capture.rule.copy]
topics = ["c/#"]
to = "redis-stream:copied"
"""


def test_a_stream_that_the_configuration_declares_is_there_without_a_record(here: Path) -> None:
    file = here / "motorcade.toml"
    file.write_text(CONFIG)
    where = NodeStoreFlags(None, file, "data").find()
    declared = {("stream", "quiet"), ("redis_stream", "copied")}
    for kind, name in product(("stream", "redis_stream"), ("quiet", "copied")):
        assert ((kind, name) in declared) == _pipeline_ingest._is_declared(file, where, kind, name), (kind, name)
        assert not _pipeline_ingest._is_declared(None, where, kind, name), "who does not name it does not know it"
    # A rule of another Redis says nothing of this one.
    file.write_text(f'{CONFIG}redis = "redis://127.0.0.1:1"\n')
    places = {url: NodeStoreFlags(url, file).find() for url in ("redis://127.0.0.1:1", "redis://127.0.0.1:2")}
    assert [True, False] == [
        _pipeline_ingest._is_declared(file, where, "redis_stream", "copied") for where in places.values()
    ]


def test_so_is_one_that_is_declared_in_the_store(here: Path) -> None:
    where = NodeStoreFlags(None, None, "data").find()
    assert _pipeline_ingest._is_there(where, "stream", "receipts"), "every node has it"
    assert not _pipeline_ingest._is_there(where, "stream", "quiet")
    with Lake(where.url) as lake:
        lake.do(lambda store: store.records.put("stream", "quiet", msgspec.msgpack.encode((1, {}))))
        assert _pipeline_ingest._is_there(where, "stream", "quiet")
        lake.do(lambda store: store.records.put("stream", "quiet", msgspec.msgpack.encode((1, None))))
        assert not _pipeline_ingest._is_there(where, "stream", "quiet"), "it is being deleted"
        lake.do(lambda store: store.records.put("stream", "quiet", b"damaged"))
        assert not _pipeline_ingest._is_there(where, "stream", "quiet")


def test_the_store_of_a_command_is_the_same_in_whatever_folder_its_workers_are(here: Path) -> None:
    assert f"rocksdb://{here / 'data' / 'store'}" == NodeStoreFlags(None, None, "data").find().url
