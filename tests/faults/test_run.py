"""tests/faults/run.py: what becomes of faults in a small repository made for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults import run
from tests.faults.fault import load

SOURCE = """
ZERO = 0

def add(a, b):
    return a + b + ZERO

def unseen():
    return 1
"""

TESTS = {
    "test_add.py": "from motorcade.sums import add\n\ndef test_adds():\n    assert 3 == add(1, 2)\n",
    "test_wrong.py": "def test_fails_anyway():\n    assert 1 == 2\n",
}

LIST = """
areas.sums = ["tests/test_add.py"]
areas.wrong = ["tests/test_wrong.py"]
areas.gone = ["tests/test_gone.py"]
fault = [
    {name = "minus", area = "sums", file = "sums.py", old = "a + b", new = "a - b"},
    {name = "unseen", area = "sums", file = "sums.py", old = "return 1", new = "return 2"},
    {name = "gap", area = "sums", file = "sums.py", old = "return 1", new = "return 3", gap = "nobody calls it"},
    {name = "constant", area = "sums", file = "sums.py", old = "ZERO = 0", new = "ZERO = 1"},
    {name = "wrong", area = "wrong", file = "sums.py", old = "return 1", new = "return 2"},
    {name = "text", area = "sums", file = "sums.py", old = "a * b", new = "a + b"},
    {name = "twice", area = "sums", file = "sums.py", old = "def", new = "class"},
    {name = "test", area = "gone", file = "sums.py", old = "return 1", new = "return 2"},
]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one module, its tests, and a list of faults in the folder `faults`."""
    root = tmp_path / "repository"
    for folder in ("src/motorcade", "tests/support", "tests/faults", "faults"):
        (root / folder).mkdir(parents=True)
    for package in ("src/motorcade", "tests", "tests/support", "tests/faults"):
        (root / package / "__init__.py").touch()
    for module in ("support/failures.py", "faults/session.py", "faults/fault.py"):
        shutil.copy(run.ROOT / "tests" / module, root / "tests" / module)
    (root / "src/motorcade/sums.py").write_text(SOURCE)
    for name, text in TESTS.items():
        (root / "tests" / name).write_text(text)
    (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (root / "faults/sums.toml").write_text(LIST)
    return root


def test_each_fault_gets_its_verdict_and_the_sources_stay_as_they_are(repository, tmp_path, capsys) -> None:
    found = tmp_path / "found.json"
    assert 1 == run.main(["--json", str(found), "--jobs", "2"], repository, repository / "faults")
    verdicts = {verdict["name"]: verdict for verdict in json.loads(found.read_text())}
    assert {
        "minus": "found",
        "unseen": "survived",
        "gap": "known gap",
        "constant": "found",
        "wrong": "unsure",
        "text": "stale",
        "twice": "stale",
        "test": "stale",
    } == {name: verdict["outcome"] for name, verdict in verdicts.items()}
    assert "tests/test_add.py::test_adds" == verdicts["minus"]["test"]
    assert "test_gone.py" in verdicts["test"]["reason"]
    assert "all    8" in capsys.readouterr().out
    assert SOURCE == (repository / "src/motorcade/sums.py").read_text()


def test_faults_that_are_all_found_are_no_error(repository) -> None:
    assert 0 == run.main(["--only", "min*"], repository, repository / "faults")


def test_a_check_names_what_is_stale_and_runs_nothing(repository, capsys) -> None:
    assert 1 == run.main(["--check"], repository, repository / "faults")
    assert ["text", "twice", "test"] == [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert 0 == run.main(["--check", "--only", "unseen", "--only", "wrong"], repository, repository / "faults")


def test_a_list_that_is_wrong_is_refused(tmp_path, capsys) -> None:
    entry = '{name = "one", area = "sums", file = "sums.py", old = "a", new = "b"}'
    listed = "areas.sums = []\nfault = [%s]"
    wrong = {
        "there are two faults 'one'": listed % f"{entry}, {entry}",
        "unknown area 'sums'": f"fault = [{entry}]",
        "changes nothing": listed % entry.replace("b", "a"),
        "odd": listed % entry.replace("}", ", odd = 1}"),
        "no fault has such a name": "areas.sums = []",
    }
    for said, text in wrong.items():
        (tmp_path / "list.toml").write_text(text)
        assert 1 == run.main(["--check"], tmp_path, tmp_path)
        assert said in capsys.readouterr().err


def test_the_lists_of_this_repository_can_be_read() -> None:
    assert load(run.ROOT / "tests/faults")
