"""`motorcade acl` and `motorcade passwd`, as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from motorcade.cli.acl import app as acl_app
from motorcade.cli.passwd import passwd
from motorcade.plugins.access.passwords import PasswordFile
from tests.support.tables import each_case

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "access"

program = typer.Typer()
program.add_typer(acl_app, name="acl")
program.command()(passwd)


def run(*args: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(program, [str(arg) for arg in args], input=stdin)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "acl.conf"
    path.write_text('{allow, {user, "alice"}, publish, ["a/#"]}.\n{deny, all}.\n')
    return path


def test_check_counts_the_rules(rules: Path) -> None:
    result = run("acl", "check", rules)
    assert (0, f"{rules}: 2 rules, no errors\n") == (result.exit_code, result.stdout)
    answer = json.loads(run("acl", "check", rules, "--json").stdout)
    assert {"file": str(rules), "format": "rules", "rules": 2, "warnings": []} == answer


def test_check_names_the_line_of_an_error(tmp_path: Path) -> None:
    path = tmp_path / "acl.conf"
    path.write_text("{allow, all}.\n{allow, all")
    result = run("acl", "check", path)
    assert 1 == result.exit_code
    assert f"{path}:2: expected ',' or '}}'" in result.stderr
    assert f"{path}:2:" in json.loads(run("acl", "check", path, "--json").stdout)["error"]
    assert 1 == run("acl", "check", tmp_path / "missing").exit_code
    assert 2 == run("acl", "check").exit_code


def test_test_tells_the_rule_behind_each_answer(rules: Path, tmp_path: Path) -> None:
    cases = tmp_path / "cases.txt"
    cases.write_text('# who asks\nuser=alice publish "a/b c" allow\n- subscribe # deny\nuser=bob publish a allow\n')
    result = run("acl", "test", rules, cases)
    assert 1 == result.exit_code
    assert [
        'ok   2: user=alice publish a/b c -> allow (line 1: {allow, {user, "alice"}, publish, ["a/#"]})',
        "ok   3: - subscribe # -> deny (line 2: {deny, all})",
        "FAIL 4: user=bob publish a -> deny, expected allow (line 2: {deny, all})",
        "3 cases, 1 failed",
    ] == result.stdout.splitlines()
    answer = json.loads(run("acl", "test", rules, cases, "--json").stdout)
    assert (2, 1) == (answer["passed"], answer["failed"])
    assert {"line": 2, "source": "{deny, all}"} == answer["cases"][2]["rule"]


def test_cases_may_be_toml(rules: Path, tmp_path: Path) -> None:
    cases = tmp_path / "cases.toml"
    cases.write_text('[[case]]\nuser = "alice"\naction = "publish"\ntopic = "a/b"\nexpect = "allow"\n')
    assert 0 == run("acl", "test", rules, cases).exit_code
    cases.write_text(cases.read_text().replace('"allow"', '"deny"'))
    assert 1 == run("acl", "test", rules, cases).exit_code


@each_case(
    "text",
    ["", "publish a allow", "- read a allow", "- publish a maybe", "usr=a publish a allow", '- publish "a allow'],
)
def test_cases_that_are_not_understood_are_an_error(rules: Path, tmp_path: Path, text: str) -> None:
    cases = tmp_path / "cases.txt"
    cases.write_text(text)
    result = run("acl", "test", rules, cases)
    assert 1 == result.exit_code
    assert str(cases) in result.stderr


def test_the_answer_without_a_match_can_be_switched(tmp_path: Path) -> None:
    rules, cases = tmp_path / "acl.conf", tmp_path / "cases.txt"
    rules.write_text('{allow, {user, "alice"}, all, all}.')
    cases.write_text("- publish a allow")
    assert [1, 0] == [run("acl", "test", rules, cases, "--no-match", word).exit_code for word in ("deny", "allow")]
    assert 2 == run("acl", "test", rules, cases, "--no-match", "maybe").exit_code


def test_the_examples_are_right() -> None:
    result = run("acl", "test", EXAMPLES / "acl.conf", EXAMPLES / "cases.txt")
    assert 0 == result.exit_code, result.stdout
    assert "" == run("acl", "check", EXAMPLES / "acl.conf").stderr


def works(file: Path, user: str, password: bytes) -> bool:
    stored, own = PasswordFile.load(file).stored(user)
    return own and stored.verify(password)


def test_passwd_asks_twice(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    result = run("passwd", file, "alice", stdin="secret\nsecret\n")
    assert (0, f"{file}: user 'alice' added") == (result.exit_code, result.stdout.splitlines()[-1])
    assert works(file, "alice", b"secret")
    assert "secret" not in result.output
    assert 0 != run("passwd", file, "alice", stdin="one\ntwo\n").exit_code  # not the same twice, then no more input
    assert works(file, "alice", b"secret")


def test_passwd_reads_standard_input_and_changes(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    first = run("passwd", file, "alice", "--password-stdin", "--json", stdin="one\n")
    assert {"file": str(file), "user": "alice", "action": "added"} == json.loads(first.stdout)
    assert "changed" in run("passwd", file, "alice", "--password-stdin", stdin="two").stdout
    assert [False, True] == [works(file, "alice", word) for word in (b"one", b"two")]


def test_passwd_deletes(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    run("passwd", file, "alice", "--password-stdin", stdin="one\n")
    assert 0 == run("passwd", file, "alice", "--delete").exit_code
    assert "" == file.read_text()
    again = run("passwd", file, "alice", "--delete")
    assert 1 == again.exit_code
    assert "there is no user 'alice'" in again.stderr


@each_case(
    ("args", "stdin", "code"),
    [
        (("alice", "--password-stdin"), "\n", 1),
        (("a:b", "--password-stdin"), "x\n", 1),
        (("alice", "--password-stdin", "--delete"), "x\n", 2),
        (("alice", "--wrong"), "x\n", 2),
    ],
)
def test_passwd_refuses(tmp_path: Path, args: tuple[str, ...], stdin: str, code: int) -> None:
    file = tmp_path / "passwords"
    assert code == run("passwd", file, *args, stdin=stdin).exit_code
    assert not file.exists()
