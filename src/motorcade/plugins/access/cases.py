"""Test cases for rule files: who asks for what, and what the answer must be.

As text, one case per line; `-` is a client about which nothing is known:

    # who                                action     topic            answer
    user=alice client=car-7 addr=10.0.0.1  publish    cars/car-7/gps   allow
    -                                      subscribe  "#"              deny

As TOML:

    [[case]]
    user = "alice"
    action = "publish"
    topic = "cars/car-7/gps"
    expect = "allow"
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from motorcade.core.client import Certificate, ClientInfo
from motorcade.core.errors import AccessFileError
from motorcade.plugins.access.aclfile import RuleFile, read_text
from motorcade.plugins.access.rules import Action, Rule


class Case(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One question and the expected answer."""

    action: Action
    topic: str
    expect: Literal["allow", "deny"]
    user: str | None = None
    client: str = ""
    addr: str = ""
    cn: str | None = None  #: common name of the client's certificate
    superuser: bool = False
    attrs: dict[str, str] = {}

    def asker(self) -> ClientInfo:
        """Return the client that asks."""
        return ClientInfo(
            client_id=self.client,
            username=self.user,
            host=self.addr,
            certificate=Certificate(self.cn, f"CN={self.cn}") if self.cn is not None else None,
            superuser=self.superuser,
            attributes=dict(self.attrs),
        )

    def identity(self) -> str:
        """Return the client in the words of a case file."""
        given = {"user": self.user, "client": self.client, "addr": self.addr, "cn": self.cn}
        words = [f"{key}={shlex.quote(value)}" for key, value in given.items() if value]
        words += [f"attr.{key}={shlex.quote(value)}" for key, value in self.attrs.items()]
        return " ".join([*words, *(["superuser"] if self.superuser else [])]) or "-"


@dataclass(frozen=True, slots=True)
class Result:
    """The answer of the rules to a case."""

    number: int  #: line of the text file, or number of the TOML table
    case: Case
    allowed: bool
    rule: Rule | None  #: the rule that decided; None for superusers and when none matched

    @property
    def answer(self) -> str:
        return "allow" if self.allowed else "deny"

    @property
    def passed(self) -> bool:
        return self.answer == self.case.expect

    @property
    def why(self) -> str:
        """The reason of the decision, in words."""
        if self.case.superuser:
            return "a superuser may do everything"
        if self.rule is None:
            return "no rule matched"
        return f"line {self.rule.line}: {self.rule.source}" if self.rule.line else self.rule.source


def run(rules: RuleFile, cases: list[tuple[int, Case]], *, no_match: bool) -> list[Result]:
    """Ask the rules every question."""
    results: list[Result] = []
    for number, case in cases:
        if case.superuser:
            results.append(Result(number, case, True, None))
            continue
        allowed, rule = rules.decide(case.asker(), case.action, case.topic, no_match=no_match)
        results.append(Result(number, case, allowed, rule))
    return results


def load(path: str | Path) -> list[tuple[int, Case]]:
    """Read a case file with the numbers of its lines (TOML: of its tables). One without cases is an error."""
    text = read_text(path)
    cases = _from_toml(text, str(path)) if Path(path).suffix == ".toml" else _from_text(text, str(path))
    if not cases:
        raise AccessFileError(f"{path}: there is no case in it")
    return cases


class _Cases(msgspec.Struct, forbid_unknown_fields=True):
    case: list[Case] = []


def _from_toml(text: str, name: str) -> list[tuple[int, Case]]:
    try:
        return list(enumerate(msgspec.toml.decode(text, type=_Cases).case, start=1))
    except msgspec.DecodeError as error:
        raise AccessFileError(f"{name}: {error}") from error


def _from_text(text: str, name: str) -> list[tuple[int, Case]]:
    cases: list[tuple[int, Case]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            cases.append((number, _case(shlex.split(line))))
        except ValueError as error:  # msgspec.ValidationError is one too
            raise AccessFileError(f"{name}:{number}: {error}") from error
    return cases


_KEYS = {"user": "user", "username": "user", "client": "client", "clientid": "client", "addr": "addr", "cn": "cn"}


def _case(words: list[str]) -> Case:
    if len(words) < 4:
        raise ValueError("expected WHO… ACTION TOPIC allow|deny, for instance: user=alice publish a/b allow")
    *who, action, topic, expect = words
    fields: dict[str, object] = {"action": action, "topic": topic, "expect": expect}
    attributes: dict[str, str] = {}
    for word in who:
        key, equals, value = word.partition("=")
        if word == "superuser":
            fields["superuser"] = True
        elif key in _KEYS and equals:
            fields[_KEYS[key]] = value
        elif key.startswith("attr.") and equals:
            attributes[key.removeprefix("attr.")] = value
        elif word != "-":
            raise ValueError(f"expected user=, client=, addr=, cn=, attr.NAME=, superuser or -, found {word!r}")
    return msgspec.convert(fields | {"attrs": attributes}, Case)
