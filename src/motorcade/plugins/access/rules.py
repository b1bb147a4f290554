"""Access rules: who may do what with which topics. Pure; files are read in `aclfile.py`.

Rules are asked in order; the first one that applies decides. A rule applies if its *who* matches the client,
its action is the one asked for, and one of its topics applies:

    asked          rule     a topic of the rule applies if
    publish  t     either   its filter matches t
    subscribe f    allow    its filter covers f: it matches every topic that f matches
    subscribe f    deny     its filter overlaps f: some topic is matched by both
    either         either   {eq, x}: x is, character by character, what was asked for

So no wide subscription slips past a narrow deny, and no narrow allow opens a wide subscription.

Placeholders are filled in from the client. A value that is missing or empty, holds `+`, `#` or `/`, or would put
a `$` in front of the topic makes the topic not apply: a client must not choose rules by choosing its name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import merge
from operator import itemgetter
from typing import Protocol

from motorcade.core import topic as topics_
from motorcade.core.client import ClientInfo
from motorcade.core.errors import TopicError
from motorcade.plugins.access.expressions import Expression, ExpressionError
from motorcade.plugins.access.filters import covers, overlaps


class Action(StrEnum):
    """The action that a client asks for, by the names of the hook `client.authorize`."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


BOTH = frozenset(Action)

#: Topics of which a message acts on other clients: commands to the fleet, and where others are in their queues.
_FANOUT = "$SDV-FANOUT"
_REWIND = "$ECQ/rewind/"


def needs_rule(client: ClientInfo, action: Action, asked: str) -> bool:
    """Return True if a client that had to log in may do this only by a rule that allows it, never by default."""
    if action is not Action.PUBLISH or not asked.startswith("$"):
        return False
    if asked == _FANOUT or asked.startswith(f"{_FANOUT}/"):
        return True
    return asked.startswith(_REWIND) and asked != f"{_REWIND}{client.client_id}"


class RuleError(ValueError):
    """A part of a rule makes no sense; the reader of the file adds name and line."""


# --- who ---


class Who(Protocol):
    """A condition on the client."""

    def matches(self, client: ClientInfo) -> bool: ...


@dataclass(frozen=True, slots=True)
class Everybody:
    """`all`."""

    def matches(self, client: ClientInfo) -> bool:  # noqa: ARG002 - holds for each client
        return True


@dataclass(frozen=True, slots=True)
class Nameless:
    """A client without user name (the part of a mosquitto file before the first `user`)."""

    def matches(self, client: ClientInfo) -> bool:
        return not client.username


@dataclass(frozen=True, slots=True)
class UserIs:
    """`{user, "name"}`."""

    name: str

    def matches(self, client: ClientInfo) -> bool:
        return client.username == self.name


@dataclass(frozen=True, slots=True)
class UserLike:
    """`{user, {re, "pattern"}}`; the pattern is searched for, so anchor it."""

    pattern: Expression

    def matches(self, client: ClientInfo) -> bool:
        return bool(client.username) and self.pattern.search(client.username or "")


@dataclass(frozen=True, slots=True)
class ClientIs:
    """`{client, "id"}`."""

    client_id: str

    def matches(self, client: ClientInfo) -> bool:
        return client.client_id == self.client_id


@dataclass(frozen=True, slots=True)
class ClientLike:
    """`{client, {re, "pattern"}}`; the pattern is searched for, so anchor it."""

    pattern: Expression

    def matches(self, client: ClientInfo) -> bool:
        return self.pattern.search(client.client_id)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AddressIn:
    """`{ipaddr, "10.0.0.0/8"}`, `{ipaddrs, […]}`."""

    networks: tuple[Network, ...]

    def matches(self, client: ClientInfo) -> bool:
        address = address_of(client.host)
        return address is not None and any(address in network for network in self.networks)


@dataclass(frozen=True, slots=True)
class AllOf:
    """`{'and', […]}`."""

    parts: tuple[Who, ...]

    def matches(self, client: ClientInfo) -> bool:
        return all(part.matches(client) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """`{'or', […]}`."""

    parts: tuple[Who, ...]

    def matches(self, client: ClientInfo) -> bool:
        return any(part.matches(client) for part in self.parts)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in a peer's text; an IPv4 address mapped into IPv6 counts as what it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def network(text: str) -> Network:
    """Return an address or CIDR range; `RuleError` if it is none."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise RuleError(f"expected an IP address or a range such as 10.0.0.0/8, found {text!r}") from error


def pattern(text: str) -> Expression:
    """Return a compiled regular expression; `RuleError` if it is none, or could cost more than its length is worth."""
    # `$` would also let a line break at the end of a client's name pass.
    if text.endswith("$") and not text.endswith("\\$"):
        text = text[:-1] + r"\Z"
    try:
        return Expression(text)
    except ExpressionError as error:
        raise RuleError(f"bad regular expression {text!r}: {error}") from error


# --- topics ---

_PLACEHOLDER = re.compile(r"\$\{([^}]*)\}")
_OLD = {"%c": "clientid", "%u": "username"}
_OLD_INSIDE = re.compile(r"%[cu]")
_NAMES = ("clientid", "username", "cert_common_name")


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """One topic of a rule. `parts` alternate: text, placeholder, text, …, text."""

    parts: tuple[str, ...]
    literal: bool

    def filled(self, client: ClientInfo) -> str | None:
        """Return the filter for a client, or None if it has no safe one."""
        if len(self.parts) == 1:
            return self.parts[0]
        out: list[str] = []
        for i, part in enumerate(self.parts):
            if i % 2 == 0:
                out.append(part)
                continue
            value = _value(client, part)
            if not value or "+" in value or "#" in value or "/" in value or "\0" in value:
                return None
            out.append(value)
        text = "".join(out)
        if text[0] == "$" and not self.parts[0].startswith("$"):
            return None
        return text

    def applies(self, client: ClientInfo, action: Action, asked: str, *, allow: bool) -> bool:
        """Return True if a rule with this topic has a say about what is asked for."""
        own = self.filled(client)
        if own is None:
            return False
        if self.literal:
            return own == asked
        if action is Action.PUBLISH:
            return topics_.matches(own, asked)
        return covers(own, asked) if allow else overlaps(own, asked)


def topic_pattern(text: str, *, literal: bool = False) -> TopicPattern:
    """Compile `${clientid}`, `${username}`, … and, as whole levels, `%c` and `%u`; `RuleError` if it is no filter."""
    levels = text.split("/")
    for i, level in enumerate(levels):
        if level in _OLD:
            levels[i] = f"${{{_OLD[level]}}}"
        elif _OLD_INSIDE.search(level):
            raise RuleError(f"%c and %u must be whole levels, not {level!r}; write ${{clientid}} or ${{username}}")
    text = "/".join(levels)
    parts = tuple(_PLACEHOLDER.split(text))
    for name in parts[1::2]:
        if name not in _NAMES and not name.startswith("client_attrs."):
            known = ", ".join(f"${{{known}}}" for known in (*_NAMES, "client_attrs.NAME"))
            raise RuleError(f"unknown placeholder ${{{name}}}; known are {known}")
    try:
        topics_.check_filter(_PLACEHOLDER.sub("x", text))
    except TopicError as error:
        raise RuleError(f"bad topic filter {text!r}: {error}") from error
    return TopicPattern(parts, literal)


def _value(client: ClientInfo, name: str) -> str | None:
    match name:
        case "clientid":
            return client.client_id
        case "username":
            return client.username
        case "cert_common_name":
            return client.certificate.common_name if client.certificate else None
    return client.attributes.get(name.removeprefix("client_attrs."))


# --- rules ---


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a rule file."""

    allow: bool
    who: Who
    actions: frozenset[Action]
    topics: tuple[TopicPattern, ...] | None  #: None is every topic, those with `$` in front too
    line: int = 0
    source: str = ""  #: as it was written

    def applies(self, client: ClientInfo, action: Action, asked: str) -> bool:
        """Return True if this rule decides."""
        if action not in self.actions or not self.who.matches(client):
            return False
        if self.topics is None:
            return True
        return any(topic.applies(client, action, asked, allow=self.allow) for topic in self.topics)

    @property
    def catches_all(self) -> bool:
        """True if no rule behind this one can ever decide."""
        return self.topics is None and self.actions == BOTH and isinstance(self.who, Everybody)


class RuleIndex:
    """Ordered rules, found by the client they name: of 200 000 rules a client meets its own, and those about groups."""

    __slots__ = ("_clients", "_others", "_users")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._users: dict[str, list[tuple[int, Rule]]] = {}
        self._clients: dict[str, list[tuple[int, Rule]]] = {}
        self._others: list[tuple[int, Rule]] = []
        for entry in enumerate(rules):
            match entry[1].who:
                case UserIs(name):
                    self._users.setdefault(name, []).append(entry)
                case ClientIs(client_id):
                    self._clients.setdefault(client_id, []).append(entry)
                case _:
                    self._others.append(entry)

    def concerning(self, client: ClientInfo) -> Iterator[Rule]:
        """Yield the rules that could decide about a client, in their order."""
        by_user = self._users.get(client.username or "", [])
        by_client = self._clients.get(client.client_id, [])
        for _, rule in merge(by_user, by_client, self._others, key=itemgetter(0)):
            yield rule


def first_match(rules: Iterable[Rule], client: ClientInfo, action: Action, asked: str) -> Rule | None:
    """Return the rule that decides about a topic name or a filter, if there is one."""
    if action is Action.SUBSCRIBE:
        try:
            asked = topics_.split_share(asked)[1]
        except TopicError:
            return REFUSE_MALFORMED
    if not asked:
        return REFUSE_MALFORMED
    for rule in rules:
        if rule.applies(client, action, asked):
            return rule
    return None


REFUSE_MALFORMED = Rule(False, Everybody(), BOTH, None, 0, "not a topic")
