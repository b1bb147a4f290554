"""scripts/run_tests.py: what failed is run once more, alone, before it counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "scripts" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


def run(runner: ModuleType, folder: Path, source: str, *, parallel: bool = False, shown: bool = True):
    """Run the tests in `source` as one part. Return the outcome."""
    (folder / "test_made.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    environment = {"PYTHONPATH": str(ROOT)}  # `tests.support.failures` is there
    part = runner.Part(["-n", "2"] if parallel else [], ["-q"], environment)
    outcome = runner.Outcome()
    runner.Run(part, folder / "build", shown=shown).retry(outcome)
    return outcome


FLAKY = """
from pathlib import Path

def test_passes_the_second_time():
    mark = Path(__file__).with_suffix(".mark")
    before = mark.exists()
    mark.touch()
    assert before, "the machine was busy"

def test_passes():
    pass
"""


@pytest.mark.parametrize("parallel", [False, True])
def test_what_passes_alone_is_unsteady_and_does_not_fail_the_run(runner, tmp_path, monkeypatch, parallel) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(runner, tmp_path, FLAKY, parallel=parallel)
    assert {} == outcome.failed
    [(test, reason)] = outcome.unsteady.items()
    assert "test_made.py::test_passes_the_second_time" == test
    assert "the machine was busy" in reason
    assert 0 == outcome.status


def test_what_fails_again_fails_the_run(runner, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(runner, tmp_path, "def test_wrong():\n    assert 1 == 2\n")
    assert ["test_made.py::test_wrong"] == list(outcome.failed)
    assert {} == outcome.unsteady
    assert 1 == outcome.status


def test_output_that_is_kept_back_is_shown_when_the_part_is_over(runner, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert 1 == run(runner, tmp_path, "def test_wrong():\n    assert 'a' == 'kept back'\n", shown=False).status
    assert "kept back" in capsys.readouterr().out


def test_a_file_that_cannot_be_imported_fails_the_run(runner, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 1 == run(runner, tmp_path, "import a_module_that_is_not_there\n").status


def test_many_unsteady_tests_fail_the_run(runner, capsys) -> None:
    few = runner.Outcome(unsteady={f"t{n}": "busy" for n in range(runner.MAX_UNSTEADY)})
    many = runner.Outcome(unsteady={f"t{n}": "busy" for n in range(runner.MAX_UNSTEADY + 1)})
    assert (0, 1) == (few.status, many.status)
    runner.report(many)
    assert "t0\n      busy" in capsys.readouterr().out
