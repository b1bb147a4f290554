"""`motorcade acl`: check a rule file, and test what it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from motorcade.core.errors import AccessFileError

if TYPE_CHECKING:
    from motorcade.plugins.access.cases import Result

app = typer.Typer(no_args_is_help=True, help="Check and test access rules.")

File = Annotated[Path, typer.Argument(help="Rule file (ordered rules, or mosquitto's ACL format).")]
Written = Annotated[Literal["auto", "rules", "mosquitto"], typer.Option("--format", help="Format of the file.")]
Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]


@app.command()
def check(file: File, format_: Written = "auto", as_json: Json = False) -> None:
    """Say whether a rule file is right; the first error names its line."""
    from motorcade.plugins.access import aclfile

    try:
        rules = aclfile.load(file, aclfile.Format(format_))
    except AccessFileError as error:
        _fail(error, as_json)
    warnings = rules.warnings()
    if as_json:
        _print({"file": str(file), "format": rules.format, "rules": len(rules.rules), "warnings": warnings})
        return
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    print(f"{file}: {len(rules.rules)} rules, no errors")


@app.command("test")
def run_cases(
    file: File,
    case_file: Annotated[Path, typer.Argument(metavar="CASES", help="Cases as text or TOML.")],
    format_: Written = "auto",
    no_match: Annotated[Literal["deny", "allow"], typer.Option(help="The answer when no rule matches.")] = "deny",
    as_json: Json = False,
) -> None:
    """Ask a rule file every question of a case file, and tell which rule answers."""
    from motorcade.plugins.access import aclfile, cases

    try:
        rules = aclfile.load(file, aclfile.Format(format_))
        results = cases.run(rules, cases.load(case_file), no_match=no_match == "allow")
    except AccessFileError as error:
        _fail(error, as_json)
    failed = sum(not result.passed for result in results)
    if as_json:
        _print(
            {"file": str(file), "passed": len(results) - failed, "failed": failed, "cases": list(map(_view, results))}
        )
    else:
        for result in results:
            print(_line(result))
        print(f"{len(results)} cases, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _line(result: Result) -> str:
    case = result.case
    outcome = "ok  " if result.passed else "FAIL"
    wrong = "" if result.passed else f", expected {case.expect}"
    asked = f"{case.identity()} {case.action} {case.topic}"
    return f"{outcome} {result.number}: {asked} -> {result.answer}{wrong} ({result.why})"


def _view(result: Result) -> dict[str, Any]:
    rule = result.rule
    return {
        "case": result.number,
        "who": result.case.identity(),
        "action": result.case.action,
        "topic": result.case.topic,
        "expected": result.case.expect,
        "answer": result.answer,
        "passed": result.passed,
        "rule": {"line": rule.line, "source": rule.source} if rule is not None else None,
    }


def _fail(error: AccessFileError, as_json: bool) -> NoReturn:
    if as_json:
        _print({"error": str(error)})
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, ensure_ascii=False))
