"""The first hour with Motorcade: what README says works as written, wrong input is answered with words, Ctrl-C ends.

Every verb is run as a process, as a user runs it. Tables below are held against the real command tree, so that a verb
that is added without a row fails here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from motorcade.cli import app
from motorcade.pipelines.folder import Folder
from tests.scenarios.witness import wait_until
from tests.support.node import ROOT, START_PATIENCE, STOP_PATIENCE, NodeProcess
from tests.support.redis import RedisServer
from tests.support.wire import Client

PATIENCE = 120.0  # seconds a command may take on a busy machine


def environment() -> dict[str, str]:
    """Ours, without what would configure Motorcade, and wide enough that messages are not broken into lines."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
    return clean | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "COLUMNS": "300", "NO_COLOR": "1"}


def start(cwd: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "motorcade", *args],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cwd: Path, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    process = start(cwd, *args)
    try:
        out, err = process.communicate(stdin, PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{shlex.join(args)} does not end:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def verbs(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb of the command line with its path; groups too."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*path, name))


ALL = dict(verbs())
LEAVES = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with good and bad files of every kind."""
    (tmp_path / "bad.toml").write_text('[session]\nwindow = "x"\n')
    (tmp_path / "unknown.toml").write_text("[session]\nwindw = 5\n")
    (tmp_path / "broken.toml").write_text("[session\n")
    (tmp_path / "good.toml").write_text("[session]\nwindow = 64\n")
    (tmp_path / "good.acl").write_text("{allow, all}.\n")
    (tmp_path / "bad.acl").write_text("{allow, all}.\n{permit, all}.\n")
    (tmp_path / "good.cases").write_text("user=alice publish a/b allow\n")
    (tmp_path / "failing.cases").write_text("user=alice publish a/b deny\n")
    (tmp_path / "bad.cases").write_text("nonsense\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.vins").write_text("# two vehicles\nLMCAAAAA4RA000000\nLMCAAAAA6RA000001\n")
    (tmp_path / "wrong.vins").write_text("LMCAAAAA4RA000000\n\nLMCAAAAA4RA00000O\nlmcaaaaa6ra000001\n")
    (tmp_path / "none.vins").write_text("# nobody\n")
    (tmp_path / "good.csv").write_text("vin,city\nLMCAAAAA4RA000000,x\nLMCAAAAA6RA000001,y\n")
    (tmp_path / "types.toml").write_text('[types.position]\ntopics = ["ecp/+/position"]\nfields = "vin STRING"\n')
    (tmp_path / "empty").mkdir()
    with Folder(tmp_path / "run", "receipts", {"store": "rocksdb://nowhere"}):
        pass  # that was all
    (tmp_path / "bad-profile.toml").write_text("[city]\nanser = [1, 2]\n")
    (tmp_path / "bad.vins").write_text("LMCAAAAA9RA000001\nLMCAAAAA9RA00000O\n")
    (tmp_path / "greeter.py").write_text(
        '"""Says nothing."""\nfrom motorcade.extension.plugin import Plugin\n\n\nclass Greeter(Plugin):\n    pass\n'
    )
    return tmp_path


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "motorcade")
def test_help_is_there(tmp_path: Path, path: tuple[str, ...]) -> None:
    """Each verb says in a sentence what it does, and names its options."""
    done = run(tmp_path, *path, "--help")
    assert (0, "") == (done.returncode, done.stderr)
    assert "Usage: " in done.stdout
    sentence = (ALL[path].help or "").split("\n")[0]
    assert len(sentence) > 10
    assert " ".join(sentence.split()) in " ".join(done.stdout.split())
    for parameter in ALL[path].params:
        if parameter.name != "help" and parameter.opts and parameter.opts[-1].startswith("--"):
            assert parameter.opts[-1] in done.stdout


# --- wrong input --------------------------------------------------------------------------------------------------

NOBODY = "--http 127.0.0.1:1"
INGEST = "pipeline run ingest --schema types.toml --lake lake"
AUDIENCE = "pipeline run audience --request r --payload good.toml"

#: Arguments, exit code, and what the message must contain: what is wrong, where, and what to do. HTTP and MQTT stand
#: for the ports of a running node, DATA for its folder.
WRONG: list[tuple[str, int, tuple[str, ...]]] = [
    ("nonsense", 2, ("nonsense", "--help")),
    ("--nonsense", 2, ("--nonsense", "--help")),
    ("serve --nonsense", 2, ("--nonsense", "serve --help")),
    ("serve extra", 2, ("extra", "serve --help")),
    ("serve --nodes 2", 2, ("--nodes", "leave --nodes out")),
    ("serve --config nowhere.toml", 1, ("nowhere.toml", "No such file")),
    ("serve --config empty", 1, ("empty", "directory")),
    ("serve --config binary", 1, ("binary", "utf-8")),
    ("serve --config bad.toml", 1, ("bad.toml:2", "session.window", "int")),
    ("serve --config unknown.toml", 1, ("unknown.toml:2", "session.windw", "did you mean 'window'")),
    ("serve --config broken.toml", 1, ("broken.toml:1", "TOML")),
    ("serve --mqtt 1883", 1, ("--mqtt", "1883", "HOST:PORT")),
    ("serve --mqtt 127.0.0.1:99999", 1, ("--mqtt", "99999", "HOST:PORT")),
    ("serve --ws nonsense", 1, ("--ws", "nonsense", "HOST:PORT")),
    ("serve --http 0.0.0.0:18083", 1, ("--http", "0.0.0.0:18083", "http.token", "loopback")),
    ("serve --store sqlite://x", 1, ("--store", "sqlite://x", "rocksdb://")),
    ("serve --log-level loud", 1, ("--log-level", "loud", "warning")),
    ("serve --mqtt 127.0.0.1:MQTT --ws off --http off", 1, ("127.0.0.1:MQTT", "in use")),
    ("serve --mqtt 127.0.0.1:0 --ws off --http 127.0.0.1:HTTP", 1, ("127.0.0.1:HTTP", "in use")),
    ("pub", 2, ("-t",)),
    ("pub -t a", 2, ("-m", "-f", "-l")),
    ("pub -t a/# -m x", 2, ("a/#", "wildcard")),
    ("pub -t '' -m x", 2, ("-t",)),
    ("pub -t a -m x -q 3", 2, ("-q", "equal to 2")),
    ("pub -t a -m x -p 99999", 2, ("-p", "65535")),
    ("pub -t a -m x -p 0", 2, ("-p",)),
    ("pub -t a -m x -p 1", 1, ("127.0.0.1:1", "refused")),
    ("pub -t a -m x -h no-such-host.invalid", 1, ("no-such-host.invalid",)),
    ("pub -t a -f nowhere", 2, ("nowhere",)),
    ("pub -t a -m x --cafile nowhere", 1, ("--cafile", "nowhere", "no file")),
    ("pub -t a -m x --cafile binary", 1, ("--cafile", "PEM")),
    ("pub -t a -m x --property colour=red", 2, ("colour", "content-type")),
    ("pub -t a -m x --property message-expiry=soon", 2, ("message-expiry", "soon", "number")),
    ("pub -t a -m x -i bad+id -p MQTT", 1, ("client id", "wildcard")),
    ("pub -t a -m x -p HTTP --ws /mqtt", 1, ("WebSocket", "404")),
    ("sub", 2, ("-t",)),
    ("sub -t a/#/b", 2, ("a/#/b", "last level")),
    ("sub -t ''", 2, ("-t",)),
    ("sub -t $share/g", 2, ("$share/g",)),
    ("sub -t a -F %z", 2, ("%z", "%t")),
    ("sub -t a -C 0", 2, ("-C",)),
    ("sub -t a -W -1", 2, ("-W",)),
    ("sub -t a -c", 2, ("--id",)),
    ("sub -t a -p 1", 1, ("127.0.0.1:1", "refused")),
    ("sub -t a -p 70000", 2, ("-p", "65535")),
    ("demo extra", 2, ("extra",)),
    ("passwd", 2, ("file",)),
    ("passwd passwords", 2, ("user",)),
    ("passwd passwords a:b --password-stdin", 1, ("a:b",)),
    ("passwd passwords alice --password-stdin", 1, ("password", "empty")),
    ("passwd passwords nobody --delete", 1, ("passwords", "nobody")),
    ("passwd binary nobody --delete", 1, ("binary:1", "UTF-8")),
    ("acl check nowhere", 1, ("nowhere", "No such file")),
    ("acl check bad.acl", 1, ("bad.acl:2", "permit")),
    ("acl check binary", 1, ("binary:1", "UTF-8")),
    ("acl check good.acl --format nonsense", 2, ("--format", "nonsense", "mosquitto")),
    ("acl test good.acl", 2, ("CASES",)),
    ("acl test good.acl nowhere", 1, ("nowhere", "No such file")),
    ("acl test good.acl bad.cases", 1, ("bad.cases:1", "ACTION", "for instance")),
    ("acl test bad.acl good.cases", 1, ("bad.acl:2",)),
    ("config check nowhere.toml", 1, ("nowhere.toml", "No such file")),
    ("config check bad.toml", 1, ("bad.toml:2", "session.window")),
    ("config show --config unknown.toml", 1, ("unknown.toml:2", "windw")),
    ("config reference extra", 2, ("extra",)),
    (f"config reload {NOBODY}", 1, ("127.0.0.1:1", "refused", "motorcade serve", "--http")),
    ("config reload --http 127.0.0.1:MQTT", 1, ("127.0.0.1:MQTT", "--http")),
    (f"client list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("client list --limit 0", 2, ("--limit",)),
    ("client show", 2, ("CLIENT_ID",)),
    ("client show nobody --http 127.0.0.1:HTTP", 1, ("no client", "nobody")),
    ("client kick nobody --http 127.0.0.1:HTTP", 1, ("no client", "nobody")),
    (f"queue list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("queue create", 2, ("NAME",)),
    ("queue create x -t a/#/b", 2, ("--topic", "a/#/b", "last level")),
    ("queue create x -t a --retention soon", 2, ("--retention", "soon", "7d")),
    ("queue create x -t a --set kind", 2, ("--set", "KEY=VALUE")),
    ("queue create x -t a --set topics=b", 2, ("--set", "topics", "flag")),
    ("queue create a/b -t a --http 127.0.0.1:HTTP", 1, ("a/b", "letters, digits")),
    ("queue create x -t a --kind quick --http 127.0.0.1:HTTP", 1, ("kind", "quick", "last_value")),
    ("queue create x -t a --set knd=1 --http 127.0.0.1:HTTP", 1, ("knd", "did you mean 'kind'")),
    ("queue create x -t a --set max_messages=many --http 127.0.0.1:HTTP", 1, ("max_messages", "many", "int")),
    ("queue create x -t a --dead-letter nope --http 127.0.0.1:HTTP", 1, ("dead_letter", "nope")),
    (f"queue create x -t a {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("queue change x", 2, ("--set",)),
    ("queue change nope --set max_messages=1 --http 127.0.0.1:HTTP", 1, ("no queue", "nope")),
    ("queue show ''", 2, ("NAME",)),
    ("queue show nope --http 127.0.0.1:HTTP", 1, ("no queue", "nope")),
    ("queue read nope --http 127.0.0.1:HTTP", 1, ("no queue", "nope")),
    ("queue read nope --after -1", 2, ("--after",)),
    ("queue read nope --limit 0", 2, ("--limit",)),
    ("queue tail", 2, ("NAME",)),
    ("queue tail nope --http 127.0.0.1:HTTP", 1, ("no queue", "nope")),
    (f"queue tail nope {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("queue rewind nope", 2, ("--to", "--since")),
    ("queue rewind nope --to 5 --since 2h", 2, ("--to", "--since")),
    ("queue rewind nope --since soon", 2, ("--since", "soon")),
    ("queue rewind nope --to 5 --http 127.0.0.1:HTTP", 1, ("no ", "nope")),
    ("queue delete nope", 2, ("--yes", "terminal")),
    ("queue delete nope --yes --http 127.0.0.1:HTTP", 1, ("no queue", "nope")),
    (f"stream list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("stream create", 2, ("NAME",)),
    ("stream create x -t $queue/jobs --http 127.0.0.1:HTTP", 1, ("topics", "$queue/jobs")),
    ("stream create x -t a --retention 5y", 2, ("--retention", "5y", "7d")),
    (
        "stream create x -t a --set max_mesages=1 --http 127.0.0.1:HTTP",
        1,
        ("max_mesages", "did you mean 'max_messages'"),
    ),
    ("stream create -x -t a", 2, ("-x",)),
    ("stream change nope --retention 1d --http 127.0.0.1:HTTP", 1, ("no stream", "nope")),
    ("stream show nope --http 127.0.0.1:HTTP", 1, ("no stream", "nope")),
    ("stream read nope --http 127.0.0.1:HTTP", 1, ("no stream", "nope")),
    ("stream delete nope --yes --http 127.0.0.1:HTTP", 1, ("no stream", "nope")),
    (f"capture list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("capture create x -t a", 2, ("--to",)),
    ("capture create x --to stream:x --http 127.0.0.1:HTTP", 1, ("topics",)),
    ("capture create x -t a --to nowhere --http 127.0.0.1:HTTP", 1, ("nowhere", "stream:NAME")),
    ("capture create x -t a --to stream:nope --http 127.0.0.1:HTTP", 1, ("stream", "nope")),
    ("capture change nope --to stream:x --http 127.0.0.1:HTTP", 1, ("no capture", "nope")),
    ("capture show nope --http 127.0.0.1:HTTP", 1, ("no capture", "nope")),
    ("capture delete nope --yes --http 127.0.0.1:HTTP", 1, ("no capture", "nope")),
    ("fleet simulate extra", 2, ("extra",)),
    ("fleet simulate -n 0", 2, ("-n",)),
    ("fleet simulate -p 1", 1, ("127.0.0.1:1", "cannot connect", "refused")),
    ("fleet simulate -h no-such-host.invalid", 1, ("no-such-host.invalid",)),
    ("fleet simulate -p HTTP --duration 5s", 1, ("127.0.0.1:HTTP", "cannot get in")),
    ("fleet simulate --profile tunel", 1, ("no profile 'tunel'", "did you mean 'tunnel'")),
    ("fleet simulate --profile nowhere.toml", 1, ("nowhere.toml", "No such file")),
    ("fleet simulate --profile empty", 1, ("empty", "directory")),
    ("fleet simulate --profile binary", 1, ("binary", "UTF-8")),
    ("fleet simulate --profile broken.toml", 1, ("broken.toml", "TOML")),
    ("fleet simulate --profile bad-profile.toml", 1, ("bad-profile.toml: [city] anser", "did you mean 'answer'")),
    ("fleet simulate --vins nowhere", 2, ("--vins", "nowhere", "No such file")),
    ("fleet simulate --vins bad.vins", 1, ("bad.vins:2", "LMCAAAAA9RA00000O")),
    ("fleet simulate --duration soon", 2, ("--duration", "soon", "45s")),
    ("fleet simulate --speed 0", 2, ("--speed",)),
    ("fleet simulate -q 2", 2, ("-q",)),
    ("fleet simulate --topic-prefix agent/VIN", 1, ("agent/VIN", "{VIN}")),
    ("fleet simulate --cafile nowhere", 1, ("--cafile", "nowhere", "no file")),
    ("fleet vins --wmi lmc", 2, ("--wmi", "lmc", "LMC")),
    ("fleet vins -n 0", 2, ("-n",)),
    ("fleet profiles nope", 1, ("no profile 'nope'", "tunnel")),
    ("fanout send", 2, ("--vins",)),
    ("fanout send --vins good.vins --payload good.toml", 2, ("--request",)),
    ("fanout send --vins good.vins --request r", 2, ("--payload",)),
    ("fanout send --vins nowhere --request r --payload good.toml", 2, ("--vins", "nowhere", "No such file")),
    ("fanout send --vins good.vins --request r --payload nowhere", 2, ("--payload", "nowhere", "No such file")),
    ("fanout send --vins - --request r --payload -", 2, ("--payload", "not both")),
    ("fanout send --vins good.vins --request a/b --payload good.toml", 2, ("--request", "a/b", "character 2")),
    ("fanout send --vins good.vins --request '' --payload good.toml", 2, ("--request", "empty")),
    ("fanout send --vins good.vins --request r --payload good.toml --expires soon", 2, ("--expires", "soon", "7d")),
    ("fanout send --vins good.vins --request r --payload good.toml --expires 0", 2, ("--expires", "longer than 0")),
    ("fanout send --vins good.vins --request r --payload good.toml --priority 10", 2, ("--priority", "9")),
    (
        "fanout send --vins wrong.vins --request r --payload good.toml",
        1,
        (
            *("wrong.vins:3", "'LMCAAAAA4RA00000O'", "character 17", "no I, O and Q"),
            *("wrong.vins:4", "character 1", "upper case", "2 lines are wrong", "nothing was sent"),
        ),
    ),
    ("fanout send --vins binary --request r --payload good.toml --dry-run", 1, ("binary:1", "not UTF-8")),
    ("fanout send --vins none.vins --request r --payload good.toml", 1, ("none.vins", "names no vehicle")),
    ("fanout send --vins good.vins --request r --payload good.toml -p 1", 1, ("127.0.0.1:1", "refused")),
    (f"fanout list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("fanout report", 2, ("REQUEST",)),
    ("fanout report a+b", 2, ("REQUEST", "a+b")),
    ("fanout report r --slow-after soon", 2, ("--slow-after", "soon")),
    ("fanout report r --data empty", 1, ("there is no store", "--data")),
    ("pipeline run receipts", 2, ("--out",)),
    ("pipeline run receipts --out hdfs://host/out", 2, ("--out", "hdfs://host/out", "no folder")),
    ("pipeline run receipts --out out --data empty", 1, ("there is no store", "--data")),
    ("pipeline run receipts --out out --request a+b", 2, ("--request", "a+b", "character 2")),
    ("pipeline run receipts --out out --trigger sometimes", 2, ("--trigger", "sometimes", "continuous")),
    ("pipeline run receipts --out out --trigger interval --every 0", 2, ("--every", "longer than 0", "continuous")),
    ("pipeline run receipts --out out --requests 0", 2, ("--requests",)),
    ("pipeline run receipts --out out --master localhost", 2, ("--master", "localhost", "spark://HOST:PORT")),
    ("pipeline run receipts --out good.toml --data DATA", 1, ("good.toml", "folder of a run")),
    ("pipeline run receipts --out empty --set driver.memory=1g", 2, ("--set", "spark.KEY=VALUE")),
    ("pipeline run audit --data empty", 1, ("there is no store", "--data")),
    ("pipeline run audit --store memory://", 1, ("memory://", "--store URL")),
    ("pipeline run audit --list -1", 2, ("--list",)),
    ("pipeline run audit --request a+b", 2, ("--request", "a+b")),
    ("pipeline run audience", 2, ("--request",)),
    (f"{AUDIENCE} --table fleet=good.csv", 2, ("--checkpoint", "--dry-run")),
    (f"{AUDIENCE} --checkpoint new", 2, ("--table",)),
    (f"{AUDIENCE} --checkpoint new --table fleet", 2, ("'fleet'", "NAME=PATH")),
    (f"{AUDIENCE} --checkpoint new --table fleet=nowhere.csv", 2, ("'fleet'", "nowhere.csv")),
    (f"{AUDIENCE} --checkpoint new --table a=good.csv --table b=good.csv", 2, ("--sql", "several tables")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --option flet.sep=;", 2, ("'flet.sep'", "not there")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --sql @nowhere", 2, ("--sql", "nowhere", "No such file")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --trigger interval", 2, ("--trigger", "once")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --broker amqp://x", 2, ("amqp://x", "mqtt://")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --broker mqtt://127.0.0.1:1", 1, ("127.0.0.1:1", "refused")),
    (f"{AUDIENCE} --checkpoint new --table fleet=good.csv --rate 0", 2, ("--rate",)),
    (
        f"{AUDIENCE} --checkpoint run --table fleet=good.csv --broker mqtt://127.0.0.1:MQTT",
        1,
        ("'receipts'", "another"),
    ),
    ("pipeline run ingest", 2, ("--schema",)),
    (f"{INGEST} --checkpoint new", 2, ("--stream", "--redis-stream")),
    (f"{INGEST} --checkpoint new --stream s --redis-stream s", 2, ("--stream", "--redis-stream")),
    (f"{INGEST} --stream s", 2, ("--checkpoint",)),
    (f"{INGEST} --checkpoint hdfs://host/run --stream s", 2, ("--checkpoint", "hdfs://host/run", "no folder")),
    (f"{INGEST} --checkpoint lake/run --stream s", 2, ("--lake", "side by side")),
    (f"{INGEST} --checkpoint new --stream s --trigger interval --compact", 2, ("--compact", "--trigger once")),
    (f"{INGEST} --checkpoint new --stream s --data empty", 1, ("there is no store", "--data")),
    (f"{INGEST} --checkpoint new --stream s --data DATA --from soon", 2, ("--from", "soon", "earliest")),
    (f"{INGEST} --checkpoint new --stream s --data DATA", 1, ("the stream 's' has no record", "--if-missing empty")),
    (f"{INGEST} --checkpoint new --stream s --data DATA --if-missing so", 2, ("--if-missing", "'so'", "fail, empty")),
    (
        f"{INGEST} --checkpoint run --stream s --data DATA --if-missing empty",
        1,
        ("belongs to the pipeline 'receipts'", "another folder"),
    ),
    ("pipeline run ingest --schema nowhere --lake lake --checkpoint new --stream s", 1, ("nowhere", "No such file")),
    ("pipeline run ingest --schema good.toml --lake lake --checkpoint new --stream s", 1, ("good.toml", "session")),
    ("pipeline status", 2, ("DIR",)),
    ("pipeline status nowhere", 1, ("nowhere", "no folder of a pipeline", "pipeline.json")),
    ("pipeline status good.toml", 1, ("good.toml", "is no folder")),
    ("pipeline status empty", 1, ("empty", "no folder of a pipeline")),
    ("pipeline status s3a://bucket/run", 2, ("DIR", "s3a://bucket/run", "no folder")),
    ("dispatch leader --config nowhere", 1, ("nowhere", "No such file")),
    ("dispatch leader --redis nonsense", 1, ("command line", "dispatch.redis", "redis://")),
    ("dispatch worker --listen nowhere", 1, ("dispatch.listen", "nowhere", "HOST:PORT")),
    ("dispatch worker --handler nowhere:at_all", 1, ("nowhere:at_all", "cannot be imported")),
    ("dispatch status --redis nonsense", 1, ("dispatch.redis", "redis://")),
    ("dispatch status --redis redis://127.0.0.1:1", 1, ("127.0.0.1:1",)),
    ("dispatch dead list --redis redis://127.0.0.1:1", 1, ("127.0.0.1:1",)),
    ("dispatch dead retry", 2, ("ENTRY", "--all")),
    ("dispatch dead retry --all --redis redis://127.0.0.1:1", 1, ("127.0.0.1:1",)),
    ("fanout status", 2, ("REQUEST",)),
    ("fanout status a+b", 2, ("REQUEST", "a+b", "character 2")),
    ("fanout status nope --http 127.0.0.1:HTTP", 1, ("no request", "nope", "motorcade fanout list")),
    ("fanout status nope --watch --interval 0", 2, ("--interval", "0.1")),
    ("fanout targets nope --http 127.0.0.1:HTTP", 1, ("no request", "nope")),
    ("fanout targets nope --state lost", 2, ("--state", "lost", "acked", "cancelled")),
    ("fanout targets nope --only-vins --json", 2, ("--only-vins", "JSON")),
    ("fanout cancel nope --http 127.0.0.1:HTTP", 1, ("no request", "nope")),
    ("fanout pause nope --http 127.0.0.1:HTTP", 1, ("no request", "nope")),
    ("fanout resume nope --http 127.0.0.1:HTTP", 1, ("no request", "nope")),
    (f"fanout gc {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("fanout why", 2, ("VIN",)),
    ("fanout why LMCAAAAA6RA00001", 2, ("VIN", "LMCAAAAA6RA00001", "16 characters instead of 17")),
    (f"fanout why LMCAAAAA6RA000001 {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("vehicle show", 2, ("VIN",)),
    ("vehicle show lmcaaaaa6ra000001", 2, ("VIN", "upper case")),
    (f"vehicle show LMCAAAAA6RA000001 {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    (f"plugin list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("plugin load", 2, ("NAME",)),
    ("plugin load nope --http 127.0.0.1:HTTP", 1, ("nope", "retained", "path")),
    ("plugin load x --path nowhere.py --http 127.0.0.1:HTTP", 1, ("nowhere.py", "No such file")),
    ("plugin load x --path binary --http 127.0.0.1:HTTP", 1, ("binary", "cannot be imported")),
    ("plugin load x --set a --http 127.0.0.1:HTTP", 2, ("--set", "KEY=VALUE")),
    ("plugin load retained --http 127.0.0.1:HTTP", 1, ("retained", "already")),
    ("plugin load access --set nonsense=1 --http 127.0.0.1:HTTP", 1, ("access", "nonsense")),
    ("plugin unload nope --http 127.0.0.1:HTTP", 1, ("nope", "not loaded")),
    ("store check --store rocksdb://nowhere", 1, ("no store", "nowhere")),
    ("store check --store rocksdb://empty", 1, ("no store", "empty")),
    ("store check --store sqlite://x", 1, ("--store", "sqlite://x", "rocksdb://")),
    ("store check --config bad.toml", 1, ("bad.toml:2", "session.window")),
    ("store stats --store redis://127.0.0.1:1", 1, ("cannot connect", "127.0.0.1:1")),
    ("store stats --store memory://", 1, ("memory://", "--store URL")),
    ("store export", 2, ("FILE",)),
    ("store export good.toml --store rocksdb://nowhere", 1, ("good.toml", "--force")),
    ("store export nowhere/f --store rocksdb://nowhere", 1, ("nowhere/f", "No such file")),
    ("store import", 2, ("FILE",)),
    ("store import nowhere --store rocksdb://new", 1, ("nowhere", "No such file")),
    ("store import binary --store rocksdb://new", 1, ("no exported store", "motorcade store export")),
    ("store import empty --store rocksdb://new", 1, ("empty", "directory")),
    ("store backup", 2, ("DIR",)),
    ("store backup copy --store rocksdb://nowhere", 1, ("no store", "nowhere")),
    ("store backup copy --store redis://127.0.0.1:1", 1, ("BGSAVE", "store export")),
    ("store salvage", 2, ("DIR",)),
    ("store salvage copy --store rocksdb://nowhere", 1, ("no store", "nowhere")),
    ("store salvage copy --store redis://127.0.0.1:1", 1, ("redis-check-aof",)),
]


@pytest.mark.parametrize(("line", "code", "wanted"), WRONG, ids=[row[0] for row in WRONG])
def test_wrong_input_is_answered_with_words(
    node: NodeProcess, folder: Path, line: str, code: int, wanted: tuple[str, ...]
) -> None:
    """What is wrong, where and what to do, on standard error; 2 for wrong usage, 1 for what failed; no traceback."""
    assert node.http is not None
    http, mqtt = str(node.http.port), str(node.port)

    def ports(text: str) -> str:
        return text.replace("HTTP", http).replace("MQTT", mqtt).replace("DATA", str(node.data))

    done = run(folder, *shlex.split(ports(line)))
    said = " ".join(done.stderr.split())
    assert code == done.returncode, said
    assert "Traceback" not in said
    for part in wanted:
        assert ports(part) in said
    assert "" == done.stdout


def test_every_verb_has_its_wrong_inputs() -> None:
    """The table above misses no verb."""
    covered = {tuple(shlex.split(line)[: len(path)]) for line, _, _ in WRONG for path in LEAVES}
    assert [] == [" ".join(path) for path in LEAVES if path not in covered]


# --- JSON ---------------------------------------------------------------------------------------------------------

#: One good call of each verb that has `--json`, in this order.
JSON = [
    "config check good.toml",
    "config show --config good.toml",
    "config show --config good.toml --origin",
    "config reload --http 127.0.0.1:HTTP",
    "client list --http 127.0.0.1:HTTP",
    "client show guest --http 127.0.0.1:HTTP",
    "client kick guest --http 127.0.0.1:HTTP",
    "queue create jobs -t jobs/# --http 127.0.0.1:HTTP",
    "queue change jobs --retention 1d --http 127.0.0.1:HTTP",
    "queue list --http 127.0.0.1:HTTP",
    "queue show jobs --http 127.0.0.1:HTTP",
    "queue read jobs --http 127.0.0.1:HTTP",
    "stream create log -t log/# --http 127.0.0.1:HTTP",
    "stream change log --retention 1d --http 127.0.0.1:HTTP",
    "stream list --http 127.0.0.1:HTTP",
    "stream show log --http 127.0.0.1:HTTP",
    "stream read log --http 127.0.0.1:HTTP",
    "capture create copy -t copy/# --to stream:log --http 127.0.0.1:HTTP",
    "capture change copy -t other/# --http 127.0.0.1:HTTP",
    "capture list --http 127.0.0.1:HTTP",
    "capture show copy --http 127.0.0.1:HTTP",
    "capture delete copy --yes --http 127.0.0.1:HTTP",
    "stream delete log --yes --http 127.0.0.1:HTTP",
    "queue delete jobs --yes --http 127.0.0.1:HTTP",
    "queue tail guest --http 127.0.0.1:HTTP",
    "queue rewind guest --to 1 --preview --http 127.0.0.1:HTTP",
    "dispatch status --redis REDIS",
    "dispatch dead list --redis REDIS",
    "dispatch dead retry --all --redis REDIS",
    "fleet simulate -n 3 --duration 0.2s -p MQTT",
    "fleet vins -n 3",
    "fleet profiles",
    "fleet profiles mixed",
    "fanout send --vins good.vins --request task_1 --payload good.toml --dry-run",
    "fanout send --vins good.vins --request task_1 --payload good.toml -p MQTT",
    "fanout list --http 127.0.0.1:HTTP",
    "fanout status task_1 --http 127.0.0.1:HTTP",
    "fanout targets task_1 --http 127.0.0.1:HTTP",
    "fanout why LMCAAAAA6RA000001 --http 127.0.0.1:HTTP",
    "vehicle show LMCAAAAA6RA000001 --http 127.0.0.1:HTTP",
    "fanout pause task_1 --http 127.0.0.1:HTTP",
    "fanout resume task_1 --http 127.0.0.1:HTTP",
    "fanout cancel task_1 --http 127.0.0.1:HTTP",
    "fanout status task_1 --watch --http 127.0.0.1:HTTP",
    "fanout gc --http 127.0.0.1:HTTP",
    "pipeline status run",
    "plugin load greeter --path greeter.py --http 127.0.0.1:HTTP",
    "plugin list --http 127.0.0.1:HTTP",
    "plugin unload greeter --http 127.0.0.1:HTTP",
    "passwd passwords alice --password-stdin",
    "passwd passwords alice --delete",
    "acl check good.acl",
    "acl test good.acl good.cases",
    "store check --data DATA --http 127.0.0.1:HTTP",
    "store stats --data DATA --http 127.0.0.1:HTTP",
    "store export all.store --data DATA --http 127.0.0.1:HTTP",
    "store import all.store --store rocksdb://imported",
    "store backup copy --data DATA --http 127.0.0.1:HTTP",
    "store salvage another --store rocksdb://imported",
    "sub -t json -C 1 -p MQTT",
]


def test_json_is_json(node: NodeProcess, folder: Path) -> None:
    """Standard output of every verb with `--json` is one JSON document and nothing else."""
    assert node.http is not None
    with Client(node) as guest, RedisServer() as redis:
        assert 0 == guest.connect("guest", keepalive=0).reason
        guest.publish("json", b'"quoted" \xff', 1, retain=True)
        guest.publish("$ECQ/w/guest/key", b"value", 1)
        guest.subscribe("$ECQ/guest/#", 1)
        guest.receive()  # acknowledges it
        answers = {}
        for line in JSON:
            ports = line.replace("HTTP", str(node.http.port)).replace("MQTT", str(node.port))
            args = shlex.split(ports.replace("DATA", str(node.data)).replace("REDIS", redis.url))
            done = run(folder, *args, "--json", stdin="a password\n")
            assert 0 == done.returncode, f"{line}: {done.stderr}"
            answers[line] = json.loads(done.stdout)
    assert 64 == answers["config show --config good.toml"]["session.window"]
    assert "guest" in {client["client_id"] for client in answers["client list --http 127.0.0.1:HTTP"]}
    assert ["jobs/#"] == answers["queue show jobs --http 127.0.0.1:HTTP"]["topics"]
    assert [] == answers["stream read log --http 127.0.0.1:HTTP"]
    assert "greeter" in {plugin["name"] for plugin in answers["plugin list --http 127.0.0.1:HTTP"]}
    assert "json" == answers["sub -t json -C 1 -p MQTT"]["topic"]
    assert 2 == answers["fanout send --vins good.vins --request task_1 --payload good.toml -p MQTT"]["accepted"]
    assert "offline" == answers["fanout why LMCAAAAA6RA000001 --http 127.0.0.1:HTTP"]["reason"]
    assert ("receipts", "new") == tuple(answers["pipeline status run"][key] for key in ("pipeline", "state"))
    assert {"cancelled": 2} == answers["fanout status task_1 --watch --http 127.0.0.1:HTTP"]["states"]


def test_every_verb_with_json_is_tried() -> None:
    """The list above misses no verb."""
    with_json = {path for path, verb in LEAVES.items() if any("--json" in option.opts for option in verb.params)}
    tried = {tuple(shlex.split(line)[: len(path)]) for line in JSON for path in with_json}
    need_spark = {("fanout", "report")} | {path for path in with_json if path[:2] == ("pipeline", "run")}
    assert need_spark == with_json - tried, "those need Spark: tests/pipelines"


def test_a_failed_case_is_exit_code_1(folder: Path) -> None:
    """`acl test` tells which rule answered what; scripts see it by the exit code."""
    done = run(folder, "acl", "test", "good.acl", "failing.cases")
    assert 1 == done.returncode
    assert "FAIL" in done.stdout
    assert "1 failed" in done.stdout


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


def interrupted(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Exit code and output after a signal; no traceback."""
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {number.name}:\n{out}\n{err}") from None
    for sign in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert sign not in out + err, out + err
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sub_ends_on_a_signal_with_what_it_has_printed(
    node: NodeProcess, tmp_path: Path, number: signal.Signals
) -> None:
    """Stopping a listener is its ordinary end: 0, and it says goodbye to the broker."""
    name = f"listener-{number.name}"
    process = start(tmp_path, "sub", "-t", name, "-i", name, "-p", str(node.port))
    with Client(node) as sender:
        assert 0 == sender.connect(f"sender-{number.name}").reason
        assert process.stdout is not None

        def subscribed() -> bool:
            answer = sender.publish(name, b"hello", 1)
            return answer is not None and answer.reason != 0x10  # no matching subscribers

        wait_until(subscribed, "sub is listening")
        assert "hello\n" == process.stdout.readline()
        code, _, err = interrupted(process, number)
    assert (0, "") == (code, err)


def test_sub_that_did_not_get_its_count_says_so(node: NodeProcess, tmp_path: Path) -> None:
    process = start(tmp_path, "sub", "-t", "never", "-C", "3", "-i", "counting", "-p", str(node.port))
    wait_until(
        lambda: "counting" in run(tmp_path, "client", "list", "--http", str(node.http)).stdout, "it is connected"
    )
    code, _, err = interrupted(process)
    assert (1, "error: 0 of 3 messages came\n") == (code, err)


def test_sub_says_so_when_its_node_stops(tmp_path: Path) -> None:
    with NodeProcess(http=True) as node:
        process = start(tmp_path, "sub", "-t", "a", "-i", "left-behind", "-p", str(node.port))
        listed = ("client", "list", "--http", str(node.http))
        wait_until(lambda: "left-behind" in run(tmp_path, *listed).stdout, "it is connected")
        node.stop()
        out, err = process.communicate(timeout=STOP_PATIENCE)
    assert (1, "") == (process.returncode, out)
    assert err.startswith("error: ")
    assert "shutting down" in err


@pytest.mark.parametrize(
    "line",
    ["sub -t a -p PORT", "pub -t a -m x -p PORT", "client list --http 127.0.0.1:PORT"],
    ids=lambda line: line[:6],
)
def test_ctrl_c_while_nobody_answers(tmp_path: Path, line: str) -> None:
    """A broker that accepts and then says nothing: Ctrl-C gives the prompt back."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        hole.settimeout(START_PATIENCE)
        process = start(tmp_path, *line.replace("PORT", str(hole.getsockname()[1])).split())
        waiting, _ = hole.accept()
        with waiting:
            assert waiting.recv(1)  # it has begun to speak
            code, _, _ = interrupted(process)
    assert 130 == code


def test_ctrl_c_of_pub_that_reads_lines(node: NodeProcess, tmp_path: Path) -> None:
    process = start(tmp_path, "pub", "-t", "a", "-l", "-i", "typing", "-p", str(node.port))
    wait_until(lambda: "typing" in run(tmp_path, "client", "list", "--http", str(node.http)).stdout, "it is connected")
    code, _, _ = interrupted(process)
    assert 130 == code


def test_ctrl_c_of_serve(tmp_path: Path) -> None:
    """The ordinary end of a node."""
    process = start(tmp_path, "serve", "--mqtt", "127.0.0.1:0", "--ws", "off", "--http", "off", "--log-level", "error")
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    assert (0, "", "") == interrupted(process)


def test_ctrl_c_of_the_demonstration_leaves_no_node(tmp_path: Path) -> None:
    process = start(tmp_path, "demo")
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []

    def has_node() -> bool:
        children[:] = parent.children(recursive=True)
        return bool(children)

    wait_until(has_node, "the demonstration has a node")
    code, _, _ = interrupted(process)
    assert code in (1, 130)
    psutil.wait_procs(children, timeout=STOP_PATIENCE)
    assert [] == [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


# --- README -------------------------------------------------------------------------------------------------------


def blocks(page: str) -> list[list[str]]:
    """The lines of the `console` blocks of a page."""
    return [block.splitlines() for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)]


def wrapped_venv(clone: Path) -> None:
    """A `.venv` that scripts/setup takes for finished, and that runs the clone's sources with our interpreter."""
    folder = clone / ".venv" / "bin"
    folder.mkdir(parents=True)
    wanted = b"".join((clone / name).read_bytes() for name in ("requirements.lock", "pyproject.toml", "scripts/setup"))
    (clone / ".venv" / ".place").write_text(f"{clone.resolve()}\n")
    (clone / ".venv" / ".stamp").write_text(f"{hashlib.sha256(wanted).hexdigest()}  -\n")
    # Were the stamp not believed, pip would change the environment that these tests run in.
    python = f'#!/bin/sh\n[ "$2" != pip ] || exit 1\nexport PYTHONPATH="{clone}/src"\nexec "{sys.executable}" "$@"\n'
    motorcade = f'#!/bin/sh\nexec "{folder}/python" -m motorcade "$@"\n'
    for name, text in (("python", python), ("motorcade", motorcade)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


#: Plays README's two terminals in a network of its own, where nobody else has the default ports.
TWO_TERMINALS = """
set -eu
ip link set lo up
cd "$1"
setsid sh -c "$2" >serve.out 2>serve.err &
node=$!
until grep -q ready serve.out; do kill -0 $node; sleep 0.05; done
sh -c "$3" >second.out 2>second.err &
second=$!
until grep -q "$4" second.out; do sleep 0.05; done
kill -- -$node  # setsid has made it the leader of a group: make, and the node
wait $node || true
wait $second || true
"""


#: What a person does between two commands: look whether the first has done its work.
SUBSCRIBED = """until .venv/bin/motorcade client list --json | grep -q '"subscriptions": 1'; do sleep 0.05; done"""


@pytest.mark.slow
def test_the_first_screen_of_the_readme_works_as_written(tmp_path: Path) -> None:
    """Clone, `make serve`, and in another terminal a message that arrives; outputs are those that README shows."""
    namespace = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make a network namespace")
    first, second, *_ = blocks((ROOT / "README.md").read_text())
    assert first[0].startswith("$ git clone ")
    clone = tmp_path / "motorcade"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    wrapped_venv(clone)
    serve = next(line for line in first[1:] if line.startswith("$ ")).removeprefix("$ ")
    shown = first[-1]
    commands = [line.removeprefix("$ ") for line in second if line.startswith("$ ")]
    printed = [line for line in second if not line.startswith("$ ")]
    assert len(printed) == 1, "README shows one delivered message"
    script = [TWO_TERMINALS, "sh", str(clone), serve, "\n".join([*commands[:-1], SUBSCRIBED, commands[-1], "wait"])]
    outside = {name: value for name, value in environment().items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    done = subprocess.run(
        [*namespace, "bash", "-c", *script, printed[0]],
        env=outside | {"PYTHONPATH": ""},  # as in a shell of one's own, not as a make within a make
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    outputs = {path.name: path.read_text() for path in clone.glob("*.out")}
    errors = {path.name: path.read_text() for path in clone.glob("*.err")}
    assert shown == outputs["serve.out"].splitlines()[0], (done, errors)
    assert printed == outputs["second.out"].splitlines(), (done, errors)


def test_every_page_that_the_readme_points_at_is_there() -> None:
    page = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page)
    assert links
    assert [] == [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_the_commands_of_the_readme_are_the_commands() -> None:
    """The table of commands names every noun, and no other."""
    page = (ROOT / "README.md").read_text()
    table = next(block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "motorcade serve" in block)
    named = {name for names in re.findall(r"motorcade ([a-z|]+)", table) for name in names.split("|")}
    assert {path[0] for path in ALL if len(path) == 1} == named
