"""What the command line says: help, wrong input answered with words, JSON for scripts.

The tables below are held against the real command tree, so that a verb that is added without a row fails here.
Commands run in this process; the node that they ask is a process of its own, with a store on disk.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from motorcade.pipelines.rundir import RunDir
from tests.support.commands import COMMAND_TREE, run
from tests.support.node import ROOT, NodeProcess
from tests.support.redis import RedisServer
from tests.support.wire import Client

pytestmark = pytest.mark.timeout(600)  # each of these tests is hundreds of commands


def verbs(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb of the command line with its path; groups too."""
    command = command or COMMAND_TREE
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
def fill_in(node: NodeProcess) -> Callable[[str], str]:
    """HTTP and MQTT stand for the ports of the running node, DATA for its folder."""
    assert node.http is not None
    places = {"HTTP": str(node.http.port), "MQTT": str(node.port), "DATA": str(node.data)}
    return lambda text: re.sub("HTTP|MQTT|DATA", lambda found: places[found[0]], text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with good and bad files of every kind."""
    (tmp_path / "bad.toml").write_text('[session]\nwindow = "x"\n')
    (tmp_path / "unknown.toml").write_text("[session]\nwindw = 5\n")
    (tmp_path / "broken.toml").write_text("[session\n")
    (tmp_path / "good.toml").write_text("[session]\nwindow = 64\n")
    (tmp_path / "plugin.toml").write_text("[plugins.retained]\n\nmax_mesages = 5\n")
    (tmp_path / "typo.toml").write_text("[dispatch]\nleese = 3\n")
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
    with RunDir(tmp_path / "run", "receipts", {"store": "rocksdb://nowhere"}):
        pass  # that was all
    (tmp_path / "bad-profile.toml").write_text("[city]\nanser = [1, 2]\n")
    (tmp_path / "bad.vins").write_text("LMCAAAAA9RA000001\nLMCAAAAA9RA00000O\n")
    (tmp_path / "greeter.py").write_text(
        '"""Says nothing."""\nfrom motorcade.extension.plugin import Plugin\n\n\nclass Greeter(Plugin):\n    pass\n'
    )
    return tmp_path


def test_every_verb_has_help() -> None:
    """Each says in a sentence what it does, and names its options."""
    for path, verb in ALL.items():
        done = run(*path, "--help")
        said = " ".join(done.stdout.split())
        assert (0, "") == (done.returncode, done.stderr), path
        assert "Usage: " in said, path
        sentence = " ".join((verb.help or "").split("\n")[0].split())
        assert len(sentence) > 10 and sentence in said, path
        options = [each.opts[-1] for each in verb.params if each.name != "help" and each.opts]
        assert [] == [name for name in options if name.startswith("--") and name not in said], path


# --- wrong input --------------------------------------------------------------------------------------------------

NOBODY = "--http 127.0.0.1:1"
INGEST = "pipeline run ingest --schema types.toml --lake lake"
AUDIENCE = "pipeline run audience --request r --payload good.toml"

#: Arguments, exit code, and what the message must contain: what is wrong, where, and what to do.
WRONG: list[tuple[str, int, tuple[str, ...]]] = [
    ("nonsense", 2, ("nonsense", "--help")),
    ("--nonsense", 2, ("--nonsense", "--help")),
    ("serve --nonsense", 2, ("--nonsense", "serve --help")),
    ("serve extra", 2, ("extra", "serve --help")),
    ("serve --nodes 0", 2, ("--nodes", "1")),
    ("serve --nodes 65", 2, ("--nodes", "64")),
    ("serve --config nowhere.toml", 1, ("nowhere.toml", "No such file")),
    ("serve --config empty", 1, ("empty", "directory")),
    ("serve --config binary", 1, ("binary", "utf-8")),
    ("serve --config bad.toml", 1, ("bad.toml:2", "session.window", "int")),
    ("serve --config unknown.toml", 1, ("unknown.toml:2", "session.windw", "did you mean 'window'")),
    ("serve --config plugin.toml", 1, ("plugin.toml:3", "unknown key 'plugins.retained.max_mesages'")),
    ("serve --config broken.toml", 1, ("broken.toml:1", "TOML")),
    ("serve --mqtt 1883", 1, ("--mqtt", "1883", "HOST:PORT")),
    ("serve --mqtt 127.0.0.1:99999", 1, ("--mqtt", "99999", "HOST:PORT")),
    ("serve --ws nonsense", 1, ("--ws", "nonsense", "HOST:PORT")),
    ("serve --http 0.0.0.0:18083", 1, ("--http", "0.0.0.0:18083", "http.token", "loopback", "reached from outside")),
    ("serve --store sqlite://x", 1, ("--store", "sqlite://x", "rocksdb://")),
    ("serve --log-level loud", 1, ("--log-level", "loud", "warning")),
    ("pub", 2, ("-t",)),
    ("pub -t a", 2, ("-m", "-f", "-l")),
    ("pub -t a -m x -n", 2, ("give exactly one of",)),
    ("pub -t a -m x --user-property a=b --v311", 2, ("has no properties", "--v311")),
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
    ("pub -t a -m x -p HTTP --ws /mqtt", 1, ("WebSocket", "401")),
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
    ("config check plugin.toml", 1, ("plugin.toml:3", "unknown key 'plugins.retained.max_mesages'")),
    ("config show --config unknown.toml", 1, ("unknown.toml:2", "windw")),
    ("config reference extra", 2, ("extra",)),
    (f"config reload {NOBODY}", 1, ("127.0.0.1:1", "refused", "motorcade serve", "--http")),
    ("config reload --http 127.0.0.1:MQTT", 1, ("127.0.0.1:MQTT", "--http")),
    (f"client list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("client list --limit 0", 2, ("--limit",)),
    ("client show", 2, ("CLIENT_ID",)),
    ("client show nobody --http 127.0.0.1:HTTP", 1, ("no client", "nobody")),
    ("client kick nobody --http 127.0.0.1:HTTP", 1, ("no client", "nobody")),
    (f"node list {NOBODY}", 1, ("127.0.0.1:1", "motorcade serve")),
    ("node drain --rate 0", 2, ("--rate", "0.1")),
    ("node drain --http 127.0.0.1:HTTP", 1, ("is alone", "cluster.bind", "cannot drain", "SIGTERM")),
    ("node drain nope --resume --http 127.0.0.1:HTTP", 1, ("no node 'nope'", "is alone")),
    ("node leave --http 127.0.0.1:HTTP", 1, ("is alone", "cluster.bind", "cannot leave", "SIGTERM")),
    ("node leave nope --http 127.0.0.1:HTTP", 1, ("no node 'nope'", "is alone")),
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
    ("fleet simulate -p HTTP --duration 5s", 1, ("127.0.0.1:HTTP", "cannot connect to")),
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
    (f"{INGEST} --checkpoint lake/run --stream s", 2, ("--lake", "must not contain each other")),
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
    ("dispatch leader --redis http://x", 1, ("dispatch.redis",)),
    ("dispatch leader --worker nowhere", 1, ("'nowhere' is not HOST:PORT",)),
    ("dispatch leader --intake pipe", 1, ("dispatch.intake",)),
    ("dispatch leader --log-level loud", 1, ("--log-level",)),
    (
        "dispatch leader --config typo.toml",
        1,
        ("file typo.toml:2: unknown key 'dispatch.leese'; did you mean 'lease'?",),
    ),
    ("dispatch worker --listen 9701", 1, ("'9701' is not HOST:PORT",)),
    ("dispatch worker --handler x", 1, ("'x' is not module:function",)),
    ("dispatch worker --parallel 0", 2, ("--parallel",)),
    ("dispatch dead retry 1-1 --all", 2, ("name entries, or give --all",)),
    ("dispatch dead list --limit 0", 2, ("--limit",)),
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


def test_wrong_input_is_answered_with_words(folder: Path, fill_in: Callable[[str], str]) -> None:
    """What is wrong, where and what to do, on standard error; 2 for wrong usage, 1 for what failed; no traceback."""
    failures = []
    for line, code, wanted in WRONG:
        done = run(*shlex.split(fill_in(line)), cwd=folder)
        said = " ".join(done.stderr.split())
        missing = [part for part in map(fill_in, wanted) if part not in said]
        if (code, "", [], False) != (done.returncode, done.stdout, missing, "Traceback" in said):
            failures.append(f"{line}: exit code {done.returncode}, without {missing}: {done.stdout}{said}")
    assert not failures, "\n".join(failures)


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
    "node list --http 127.0.0.1:HTTP",
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


def test_standard_output_of_every_verb_with_json_is_one_document(
    node: NodeProcess, folder: Path, fill_in: Callable[[str], str]
) -> None:
    answers: dict[str, Any] = {}
    with Client(node) as guest, RedisServer() as redis:
        assert 0 == guest.connect("guest", keepalive=0).reason
        guest.publish("json", b'"quoted" \xff', 1, retain=True)
        guest.publish("$ECQ/w/guest/key", b"value", 1)
        guest.subscribe("$ECQ/guest/#", 1)
        guest.receive()  # acknowledges it
        for line in JSON:
            done = run(*shlex.split(fill_in(line).replace("REDIS", redis.url)), "--json", stdin="pass\n", cwd=folder)
            assert 0 == done.returncode, f"{line}: {done.stderr}"
            answers[line.removesuffix(" --http 127.0.0.1:HTTP").removesuffix(" -p MQTT")] = json.loads(done.stdout)
    assert 64 == answers["config show --config good.toml"]["session.window"]
    assert "guest" in {client["client_id"] for client in answers["client list"]}
    assert ["jobs/#"] == answers["queue show jobs"]["topics"]
    assert [] == answers["stream read log"]
    assert "greeter" in {plugin["name"] for plugin in answers["plugin list"]}
    assert "json" == answers["sub -t json -C 1"]["topic"]
    assert 2 == answers["fanout send --vins good.vins --request task_1 --payload good.toml"]["accepted"]
    assert "offline" == answers["fanout why LMCAAAAA6RA000001"]["reason"]
    assert ("receipts", "new") == tuple(answers["pipeline status run"][key] for key in ("pipeline", "state"))
    assert {"cancelled": 2} == answers["fanout status task_1 --watch"]["states"]


def test_every_verb_with_json_is_tried() -> None:
    """The list above misses no verb."""
    with_json = {path for path, verb in LEAVES.items() if any("--json" in option.opts for option in verb.params)}
    tried = {tuple(shlex.split(line)[: len(path)]) for line in JSON for path in with_json}
    need_spark = {("fanout", "report")} | {path for path in with_json if path[:2] == ("pipeline", "run")}
    need_nodes = {("node", "drain"), ("node", "leave")}
    assert need_spark | need_nodes == with_json - tried, "tests/pipelines has those, tests/scenarios/test_operating"


def test_a_failed_case_of_acl_test_is_exit_code_1(folder: Path) -> None:
    """It tells which rule answered what; scripts see it by the exit code."""
    done = run("acl", "test", "good.acl", "failing.cases", cwd=folder)
    assert 1 == done.returncode
    assert "FAIL" in done.stdout and "1 failed" in done.stdout


# --- README -------------------------------------------------------------------------------------------------------


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
