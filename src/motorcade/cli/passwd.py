"""`motorcade passwd`: change a password file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from motorcade.core.errors import AccessFileError


def passwd(
    file: Annotated[Path, typer.Argument(help="Password file; made if there is none.")],
    user: Annotated[str, typer.Argument(help="User name.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove the user.")] = False,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password from the first line of standard input.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")] = False,
) -> None:
    """Add a user to a password file, change the password (asked for twice), or take the user out."""
    if delete and password_stdin:
        raise typer.BadParameter("--delete takes no password", param_hint="--password-stdin")
    try:
        action = _delete(file, user) if delete else _set(file, user, password_stdin)
    except AccessFileError as error:
        if as_json:
            print(json.dumps({"error": str(error)}, ensure_ascii=False))
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps({"file": str(file), "user": user, "action": action}, ensure_ascii=False))
    else:
        print(f"{file}: user {user!r} {action}")


def _set(file: Path, user: str, password_stdin: bool) -> str:
    # Imported when wanted: what hashes passwords is an extra.
    from motorcade.plugins.access import passwords

    passwords.check_user(user)  # before the password is asked for
    password = _read_line() if password_stdin else _ask()
    return "added" if passwords.set_password(file, user, password) else "changed"


def _delete(file: Path, user: str) -> str:
    from motorcade.plugins.access import passwords

    if not passwords.delete_user(file, user):
        raise AccessFileError(f"{file}: there is no user {user!r}")
    return "deleted"


def _ask() -> bytes:
    try:
        answer: str = typer.prompt("Password", hide_input=True, confirmation_prompt="Again", err=True)
    except typer.Abort:
        raise AccessFileError("no password was given; without a terminal use --password-stdin") from None
    return answer.encode()


def _read_line() -> bytes:
    return sys.stdin.buffer.readline().rstrip(b"\r\n")
