"""Data, text, pictures and pages of a report, and the commands about receipts, from receipts made by hand."""

from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from motorcade.cli import _files, _report, app
from motorcade.pipelines import report, status
from motorcade.pipelines.receipts import receipts
from motorcade.pipelines.rundir import RunDir
from motorcade.storage.ports import StoreError
from tests.pipelines import receipts_made
from tests.pipelines.conftest import Command
from tests.pipelines.lake import Lake
from tests.pipelines.receipts_made import START, stream, told

pytestmark = pytest.mark.timeout(240)

#: A name that is markup, mathematics, and in letters that the font of pictures may lack.
EVIL = '<script>alert("1")</script> $\\frac{x$ 升级'


def life(delivery: str, request: str = "r1", start: float = 0) -> list[dict[str, Any] | bytes]:
    return [
        told(delivery, "accepted", start, request),
        told(delivery, "sent", start + 2, request, attempt=1),
        told(delivery, "acked", start + 2.5, request, attempt=1),
    ]


STORY: list[dict[str, Any] | bytes] = [
    *life("A.1"),
    *life("B.1"),
    told("C.1", "accepted", 0),
    told("D.1", "accepted", 4000),
    told("D.1", "failed", 4001, reason="too_large", node="n2"),
    told("A.2", "accepted", 10, EVIL, node="<n>"),
    *life("A.3", "old", -86_400),
]


@pytest.fixture(scope="module")
def data(spark_session: SparkSession) -> report.Data:
    tables = receipts(stream(spark_session, STORY))
    made = report.collect(tables, now=START, max_requests=2, max_stragglers=1)
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]  # as a dashboard gets it


def test_the_data(data: report.Data) -> None:
    assert (1, START, 3) == (data["v"], data["made_at"], data["requests_total"])
    first, second = data["requests"]
    assert ("r1", EVIL) == (first["request_id"], second["request_id"])
    assert {
        "vehicles": 4, "accepted": 4, "sent": 2, "retried": 0, "acked": 2, "replaced": 0, "failed": 1, "expired": 0,
        "cancelled": 0, "pending": 1, "first_at": START, "last_at": START + 4001,
    } == first["funnel"]  # fmt: skip
    shape = {"count": 2, "request_id": "r1"}
    assert [
        {**shape, "stage": stage} | dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), seconds)
        for stage, seconds in (("wait", 2.0), ("answer", 0.5), ("total", 2.5))
    ] == first["latency"]
    assert [("failed", "too_large", 1), ("accepted", "never_sent", 1)] == sorted(
        ((item["state"], item["why"], item["count"]) for item in first["reasons"]), reverse=True
    )
    assert [{"node": "n1", "accepted": 4, "sent": 2, "acked": 2}, {"node": "n2", "failed": 1}] == first["nodes"]
    assert [
        {"hour": START, "accepted": 3, "sent": 2, "acked": 2},
        {"hour": START + 3600, "accepted": 1, "failed": 1},
    ] == first["hours"]
    assert 2 == first["stragglers_total"]
    (late,) = first["stragglers"]
    assert ("C.1", "never_sent", 4001.0) == (late["delivery_id"], late["why"], late["age"])
    assert [] == second["latency"]


def test_the_text(data: report.Data) -> None:
    text = report.text(data)
    lines = [re.sub(r" {2,}", " | ", line.strip()) for line in text.splitlines()]
    assert "request r1" == lines[0]
    assert "acked | 2 | 50.0 %" in lines
    assert "total | accepted → acked | 2 | 2.50 s | 2.50 s | 2.50 s | 2.50 s | 2.50 s | 2.50 s" in lines
    assert "failed | too_large | 1" in lines
    assert "n2 | 0 | 0 | 0 | 1" in lines
    assert "stragglers: the oldest 1 of 2" in lines
    assert "C | accepted | never_sent | 0 | 66.7 min | 2026-09-21 15:00:00Z" in lines
    assert "1 older requests are not shown" == lines[-1]


class Page(HTMLParser):
    """What is in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_needs_nothing_else_and_takes_names_as_text(data: report.Data) -> None:
    page = Page(report.html(data))
    assert "script" not in page.tags
    assert f"Request {EVIL}" in page.words
    assert "<n>" in page.words
    assert 2 == page.tags.count("img") == len(page.links)
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert not re.search(r"https?://|url\(", report.html(data))


def test_pictures_are_pictures_and_spans_are_told_in_the_unit_that_suits(data: report.Data) -> None:
    for request in data["requests"]:
        made = report.png(request)
        assert made.startswith(b"\x89PNG\r\n\x1a\n")
        assert (1200, 800) == struct.unpack(">II", made[16:24])
    spans = {
        None: "", 0: "0 ms", 0.0124: "12 ms", 3.25: "3.25 s", 240: "4.0 min", 27_000: "7.5 h", 200_000: "2.3 d",
        -0.5: "-500 ms",
    }  # fmt: skip
    assert spans == {seconds: report.span(seconds) for seconds in spans}


# -- commands


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The store of a node that does not run, with these receipts and nothing in any mailbox."""
    url = f"rocksdb://{tmp_path / 'data' / 'store'}"
    with Lake(url) as lake:
        receipts_made.store(lake, STORY)
    return url


def test_a_report_of_one_request(
    command: Command, spark: SparkSession, store: str, tmp_path: Path, data: report.Data
) -> None:
    """And what is said of a request that nobody knows."""
    done = command("fanout", "report", "r1", "--data", "data", "--html", "r1.html", "--png", "r1.png", "--json")
    assert 0 == done.exit_code, done.stderr
    (request,) = json.loads(done.stdout)["requests"]
    # All of its stragglers.
    assert data["requests"][0] | {"stragglers": request["stragglers"]} == request
    assert ["C.1", "D.1"] == [late["delivery_id"] for late in request["stragglers"]]
    assert "<h1>Request r1</h1>" in (tmp_path / "r1.html").read_text()
    assert (tmp_path / "r1.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(_report.ReportError, match="no receipts of request 'nobody'"):
        _report.data(spark, store, "rocksdb://here", "nobody", 3600.0)


def left_by_others(out: Path, store: str) -> None:
    """What runs before have left in the folder of a run: an old edition, the newest, and one that is not finished."""
    with RunDir(out, "receipts", {"store": store}):
        for left in ("00000006/old", "00000007/newest", "00000008/deliveries/unfinished"):
            (out / "editions" / left).mkdir(parents=True)
    (out / "current").symlink_to("editions/00000007")
    (out / ".current.1a2b3c4d").symlink_to("editions/00000008")


def test_an_edition_of_receipts_is_seen_when_it_is_complete(command: Command, store: str, tmp_path: Path) -> None:
    """The newest stays beside it, what is older or was not finished goes. Pictures are bounded."""
    out = tmp_path / "out"
    left_by_others(out, store)
    done = command("pipeline", "run", "receipts", "--out", "out", "--data", "data", "--requests", "2", "--json")
    assert 0 == done.exit_code, done.stderr
    assert {"requests": 3, "deliveries": 6, "edition": 8} == json.loads(done.stdout)["counts"]
    assert re.fullmatch(r"batch 0: 13 rows in .*\n", done.stderr)
    assert Path("editions/00000008") == (out / "current").readlink()
    assert ["00000007", "00000008"] == sorted(edition.name for edition in (out / "editions").iterdir())
    assert ["current"] == [entry.name for entry in out.iterdir() if entry.is_symlink()]
    current = out / "current"
    tables = {"deliveries", "funnel", "latency", "stragglers", "reasons", "nodes", "hours"}
    assert {*tables, "report.json", "report.html", "pictures"} == {entry.name for entry in current.iterdir()}
    assert not (current / "deliveries" / "unfinished").exists()
    assert 6 == pq.read_table(current / "deliveries").num_rows
    written = json.loads((current / "report.json").read_text())
    assert (3, "r1") == (written["requests_total"], written["requests"][0]["request_id"])
    assert "<h1>Request r1</h1>" in (current / "report.html").read_text()
    first, second = sorted((current / "pictures").iterdir())
    assert "001-r1.png" == first.name
    assert re.fullmatch(r"002-\w[\w.-]*\.png", second.name), "a name of somebody else's is no path"
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in (first, second))
    found = status.look(out)
    assert ("receipts", "done", 13) == (found["pipeline"], found["state"], found["rows"])


@pytest.mark.usefixtures("store")
def test_the_audit_names_what_is_lost(command: Command, tmp_path: Path) -> None:
    """Also where it would look again every second: what is wrong ends it. Its folder has what it has found."""
    again = ("--trigger", "interval", "--every", "1s", "--checkpoint", "seen")
    done = command("pipeline", "run", "audit", "--data", "data", "--list", "1", "--json", *again)
    assert (1, "") == (done.exit_code, done.stderr)
    verdict = json.loads(done.stdout)
    assert {"acked": 3, "failed": 1, "lost": 2} == verdict["outcomes"]
    assert (1, 1) == (len(verdict["findings"]), verdict["not_listed"])
    found = status.look(tmp_path / "seen")
    assert ("audit", 1, 2) == (found["pipeline"], found["batches"], found["counts"]["wrong"])


def refused(tmp_path: Path, *words: str) -> str:
    """What is said of options, before there is a store to read: there is none at all."""
    result = CliRunner().invoke(app, ["fanout", "report", "r1", *words, "--data", str(tmp_path)])
    assert 2 == result.exit_code, (result.output, result.exception)
    return "".join(result.output.replace("│", " ").split())


def test_files_that_cannot_be_written_are_told_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = {
        tmp_path: "it is a folder; name a file in it",
        tmp_path / "nowhere" / "file": f"there is no folder {tmp_path / 'nowhere'}",
        tmp_path / "file" / "file": f"{tmp_path / 'file'} is no folder",
        Path("/proc/report"): "nothing can be written in /proc: ",  # also by root
        tmp_path / ("x" * 300): "File name too long",
    }
    for option, (place, why) in product(("--html", "--png"), places.items()):
        said = refused(tmp_path, option, str(place))
        assert "".join(f"Invalid value for {option}: {place} cannot be written: {why}".split()) in said
    assert ["file"] == [file.name for file in tmp_path.iterdir()]
    said = refused(tmp_path, "--html", str(tmp_path / "x"), "--png", str(tmp_path / "." / "x"))
    assert "thepageandthepicturearetwofiles" in said


def test_files_of_a_report_are_written_both_or_none(
    data: report.Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = tmp_path / "page", tmp_path / "gone" / "picture"
    page.write_text("of yesterday")
    page.chmod(0o640)
    with pytest.raises(_files.FileError, match=f"cannot write {picture}: No such file or directory"):
        _report.write(data, page, picture)
    assert ("of yesterday", ["page"]) == (page.read_text(), [file.name for file in tmp_path.iterdir()])
    picture.parent.mkdir()
    _report.write(data, page, picture)
    assert f"written: {page}\nwritten: {picture}\n" == capsys.readouterr().err
    assert ("<!doctype", b"\x89PNG", 0o640) == (
        page.read_text()[:9],
        picture.read_bytes()[:4],
        page.stat().st_mode & 0o777,
    )
    assert [["picture"], ["gone", "page"]] == [
        sorted(file.name for file in place.iterdir()) for place in (picture.parent, tmp_path)
    ]


def test_a_store_that_is_not_there_is_told_before_spark_is_started(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"there is no store at {tmp_path}"):
        _report.made(f"rocksdb://{tmp_path}", "", "r1", 3600.0, "no such master")
