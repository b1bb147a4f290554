"""Read ACL files: ordered rules (Erlang terms), and mosquitto's format.

Both become the same `Rule`s. Whatever cannot be understood is an `AccessFileError` that names file and line:
a rule that is left out may be the one that kept a client out. A file without a single rule denies everything.

Mosquitto's file is not ordered: `deny` goes before everything else, `topic` lines belong to the `user` above them
(before the first `user`: to clients without user name), `pattern` lines to all clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from motorcade.core.client import ClientInfo
from motorcade.core.errors import AccessFileError
from motorcade.plugins.access import terms
from motorcade.plugins.access.expressions import SubjectError
from motorcade.plugins.access.rules import (
    BOTH,
    Action,
    AddressIn,
    AllOf,
    AnyOf,
    ClientIs,
    ClientLike,
    Everybody,
    Nameless,
    Network,
    Rule,
    RuleError,
    RuleIndex,
    TopicPattern,
    UserIs,
    UserLike,
    Who,
    first_match,
    needs_rule,
    network,
    pattern,
    topic_pattern,
)
from motorcade.plugins.access.terms import Term, TermKind

T = TypeVar("T")


class Format(StrEnum):
    """The format of a rule file."""

    AUTO = "auto"  #: look at the first line that says something
    RULES = "rules"
    MOSQUITTO = "mosquitto"


@dataclass(frozen=True, slots=True)
class RuleFile:
    """The rules of one file."""

    name: str
    format: Format
    rules: tuple[Rule, ...]
    index: RuleIndex = field(repr=False, compare=False)

    def match(self, client: ClientInfo, action: Action, asked: str) -> Rule | None:
        """Return the rule that decides, if there is one."""
        return first_match(self.index.concerning(client), client, action, asked)

    def decide(self, client: ClientInfo, action: Action, asked: str, *, no_match: bool) -> tuple[bool, Rule | None]:
        """Return whether the client may, and the rule that says so (None: no rule matched)."""
        try:
            rule = self.match(client, action, asked)
        except SubjectError:
            return False, None  # as the node decides it
        if rule is not None:
            return rule.allow, rule
        return no_match and bool(self.rules) and not needs_rule(client, action, asked), None

    def warnings(self) -> list[str]:
        """Return warnings about rules that are allowed but hardly meant."""
        found: list[str] = []
        if not self.rules:
            found.append(f"{self.name}: there is no rule, so everything is denied")
        for i, rule in enumerate(self.rules[:-1]):
            if rule.catches_all:
                after = self.rules[i + 1]
                found.append(f"{self.name}:{after.line}: never reached, line {rule.line} decides everything before it")
                break
        return found


def load(path: str | Path, format_: Format = Format.AUTO) -> RuleFile:
    """Read a rule file; `AccessFileError` if it is missing or anything in it is wrong."""
    return parse(read_text(path), str(path), format_)


def read_text(path: str | Path) -> str:
    """Return the text of an access file."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise AccessFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise AccessFileError(f"{path}:{line}: not UTF-8 text") from error


def parse(text: str, name: str, format_: Format = Format.AUTO) -> RuleFile:
    """Return the rules in a text; `name` is what error messages call it."""
    if format_ is Format.AUTO:
        format_ = detect(text)
    rules = _mosquitto(text, name) if format_ is Format.MOSQUITTO else _ordered(text, name)
    return RuleFile(name, format_, rules, RuleIndex(rules))


def detect(text: str) -> Format:
    """Detect the format of a text; what looks like neither is read as rules, and refused there."""
    commented = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("#"):
            commented = True
        elif line:
            return Format.MOSQUITTO if line.split(None, 1)[0] in ("user", "topic", "pattern") else Format.RULES
    return Format.MOSQUITTO if commented else Format.RULES


# --- ordered rules ---

_ACTIONS = {
    "publish": frozenset((Action.PUBLISH,)),
    "subscribe": frozenset((Action.SUBSCRIBE,)),
    "pubsub": BOTH,
    "all": BOTH,
}
_WHO = (
    'all, {user, "name"}, {client, "id"}, {ipaddr, "10.0.0.0/8"}, {ipaddrs, […]}, '
    "{'and', […]}, {'or', […]} or a client id in quotes"
)


def _ordered(text: str, name: str) -> tuple[Rule, ...]:
    return tuple(_rule(term, name) for term in terms.parse(text, name))


def _rule(term: Term, name: str) -> Rule:
    form = "a rule {allow|deny, who, action, topics} or {allow|deny, all}"
    if term.kind is not TermKind.TUPLE or not term.items or not term.items[0].is_atom("allow", "deny"):
        raise _expected(form, term, name)
    allow = term.items[0].text == "allow"
    if len(term.items) == 2 and term.items[1].is_atom("all"):
        return Rule(allow, Everybody(), BOTH, None, term.line, term.source)
    if len(term.items) != 4:
        raise _expected(form, term, name)
    _, who, action, topics = term.items
    if action.kind is not TermKind.ATOM or action.text not in _ACTIONS:
        raise _expected("publish, subscribe, pubsub or all", action, name)
    return Rule(allow, _who(who, name), _ACTIONS[action.text], _topics(topics, name), term.line, term.source)


def _who(term: Term, name: str) -> Who:
    if term.is_atom("all"):
        return Everybody()
    if term.kind is TermKind.STRING:
        return ClientIs(term.text)  # the seed's `binary()`
    if term.kind is not TermKind.TUPLE or len(term.items) != 2:
        raise _expected(_WHO, term, name)
    tag, value = term.items
    if tag.is_atom("user", "username"):
        return _named(value, name, UserIs, UserLike)
    if tag.is_atom("client", "clientid"):
        return _named(value, name, ClientIs, ClientLike)
    if tag.is_atom("ipaddr"):
        return AddressIn((_network(value, name),))
    if tag.is_atom("ipaddrs"):
        return AddressIn(tuple(_network(item, name) for item in _list(value, name)))
    if tag.is_atom("and"):
        return AllOf(tuple(_who(part, name) for part in _list(value, name)))
    if tag.is_atom("or"):
        return AnyOf(tuple(_who(part, name) for part in _list(value, name)))
    raise _expected(_WHO, term, name)


def _network(term: Term, name: str) -> Network:
    text = _string(term, name)
    return _checked(term, name, lambda: network(text))


def _named(term: Term, name: str, exact: Callable[[str], Who], like: Callable[..., Who]) -> Who:
    if term.is_atom("all"):
        return Everybody()
    if term.kind is TermKind.TUPLE and len(term.items) == 2 and term.items[0].is_atom("re"):
        text = _string(term.items[1], name)
        return like(_checked(term, name, lambda: pattern(text)))
    return exact(_string(term, name))


def _topics(term: Term, name: str) -> tuple[TopicPattern, ...] | None:
    if term.is_atom("all"):
        return None
    return tuple(_topic(item, name) for item in _list(term, name))


def _topic(term: Term, name: str) -> TopicPattern:
    if term.kind is TermKind.TUPLE and len(term.items) == 2 and term.items[0].is_atom("eq"):
        text, literal = _string(term.items[1], name), True
    elif term.kind is TermKind.STRING:
        text, literal = _without_eq(term.text)
    else:
        raise _expected('a topic filter in quotes, or {eq, "filter"}', term, name)
    return _checked(term, name, lambda: topic_pattern(text, literal=literal))


def _without_eq(text: str) -> tuple[str, bool]:
    return (text.removeprefix("eq ").strip(), True) if text.startswith("eq ") else (text, False)


def claimed_rules(claim: object) -> tuple[Rule, ...]:
    """Read the rules in the claim of a token; `RuleError` if they are not understood.

    Either `{"pub": […], "sub": […], "all": […]}`, which allows, or a list of
    `{"permission": "allow"|"deny", "action": "publish"|"subscribe"|"all", "topic": "…"}`, in order.
    """
    if isinstance(claim, dict):
        keys = {"pub": "publish", "sub": "subscribe", "all": "all"}
        if not set(claim) <= set(keys):
            raise RuleError(f"expected only pub, sub and all, found {', '.join(sorted(map(str, claim)))}")
        return tuple(_claimed("allow", keys[key], topics) for key, topics in claim.items())
    if not isinstance(claim, list):
        raise RuleError("expected a table or a list of rules")
    rules: list[Rule] = []
    for item in claim:
        if not isinstance(item, dict) or not set(item) <= {"permission", "action", "topic", "topics"}:
            raise RuleError("expected rules with permission, action and topic")
        topics = item.get("topics", [item.get("topic")])
        rules.append(_claimed(item.get("permission"), item.get("action"), topics))
    return tuple(rules)


def _claimed(permission: object, action: object, topics: object) -> Rule:
    if permission not in ("allow", "deny"):
        raise RuleError(f"permission must be allow or deny, not {permission!r}")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise RuleError(f"action must be publish, subscribe or all, not {action!r}")
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise RuleError("topics must be a list of text")
    compiled: list[TopicPattern] = []
    for topic in topics:
        text, literal = _without_eq(topic)
        compiled.append(topic_pattern(text, literal=literal))
    return Rule(permission == "allow", Everybody(), _ACTIONS[action], tuple(compiled), 0, "acl claim of the token")


def _string(term: Term, name: str) -> str:
    if term.kind is not TermKind.STRING or not term.text:
        raise _expected("text in double quotes", term, name)
    return term.text


def _list(term: Term, name: str) -> tuple[Term, ...]:
    if term.kind is not TermKind.LIST or not term.items:
        raise _expected("a list […] with something in it", term, name)
    return term.items


def _checked(term: Term, name: str, compile_: Callable[[], T]) -> T:
    try:
        return compile_()
    except RuleError as error:
        raise AccessFileError(f"{name}:{term.line}: {error}") from error


def _expected(what: str, term: Term, name: str) -> AccessFileError:
    return AccessFileError(f"{name}:{term.line}: expected {what}, found {term.source}")


# --- mosquitto ---

_RIGHTS = {
    "read": (True, frozenset((Action.SUBSCRIBE,))),
    "write": (True, frozenset((Action.PUBLISH,))),
    "readwrite": (True, BOTH),
    "deny": (False, BOTH),
}


def _mosquitto(text: str, name: str) -> tuple[Rule, ...]:
    who: Who = Nameless()
    rules: list[Rule] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        keyword, rest = _first_word(line)
        if keyword not in ("user", "topic", "pattern") or not rest:
            what = "user NAME, topic [read|write|readwrite|deny] FILTER or pattern [read|write|readwrite|deny] FILTER"
            raise AccessFileError(f"{name}:{number}: expected {what}, found {line!r}")
        if keyword == "user":
            who = UserIs(rest)
            continue
        allow, actions, filter_ = _right(rest, name, number)
        try:
            topic = topic_pattern(filter_) if keyword == "pattern" else _plain(filter_)
        except RuleError as error:
            raise AccessFileError(f"{name}:{number}: {error}") from error
        concerned = Everybody() if keyword == "pattern" else who
        rules.append(Rule(allow, concerned, actions, (topic,), number, line))
    return tuple(sorted(rules, key=lambda rule: rule.allow))


def _right(rest: str, name: str, number: int) -> tuple[bool, frozenset[Action], str]:
    word, filter_ = _first_word(rest)
    if word in _RIGHTS and filter_:
        return *_RIGHTS[word], filter_
    if filter_:
        raise AccessFileError(
            f"{name}:{number}: expected read, write, readwrite or deny before the filter, found {word!r}"
        )
    return True, BOTH, rest


def _first_word(line: str) -> tuple[str, str]:
    word, *rest = line.split(None, 1)
    return word, rest[0] if rest else ""


def _plain(filter_: str) -> TopicPattern:
    """Return a filter in which nothing is a placeholder."""
    topic_pattern(filter_.replace("$", "x").replace("%", "x"))
    return TopicPattern((filter_,), literal=False)
