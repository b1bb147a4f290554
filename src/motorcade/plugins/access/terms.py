"""Reads the small part of Erlang's term syntax in which rule files are written.

    {allow, {user, "dashboard"}, subscribe, ["$SYS/#", {eq, "#"}]}.   % atoms, strings, tuples, lists

`parse` gives one `Term` per full stop, each with the line it starts on and its text, or raises `AccessFileError`
that names file and line and says what was expected. Nothing is guessed: a rule that is misread may let a client in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum, auto
from typing import NamedTuple

from motorcade.core.errors import AccessFileError

MAX_DEPTH = 32  #: tuples and lists inside each other


class TermKind(StrEnum):
    """The kind of a term."""

    ATOM = auto()
    STRING = auto()
    TUPLE = auto()
    LIST = auto()


class Term(NamedTuple):
    """One term. Atoms and strings have `text`, tuples and lists have `items`; `source` is how it was written."""

    kind: TermKind
    line: int
    file: str  #: all of it; a file may have hundreds of thousands of terms, so nothing is copied
    start: int
    end: int
    text: str = ""
    items: tuple[Term, ...] = ()

    @property
    def source(self) -> str:
        """The term on one line."""
        return " ".join(self.file[self.start : self.end].split())

    def is_atom(self, *names: str) -> bool:
        """Return True if this is one of these atoms."""
        return self.kind is TermKind.ATOM and self.text in names


_TOKEN = re.compile(
    r"""(?P<mark><<|>>|[{}\[\],.])
      | (?P<space>(?:\s+|%[^\n]*)+)
      | (?P<string>"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*")
      | (?P<quoted>'(?:[^'\\\n]|\\[^\n])*')
      | (?P<atom>[a-z][A-Za-z0-9_@]*)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|.)")
_ESCAPES = {"\\": "\\", '"': '"', "'": "'", "n": "\n", "r": "\r", "t": "\t", "s": " "}
_END = "the end of the file"


class _Token(NamedTuple):
    kind: str  #: string, atom, a mark, or `_END`
    text: str
    line: int
    start: int
    end: int


def parse(text: str, name: str) -> Iterator[Term]:
    """Return all terms of a file; `name` is what error messages call it."""
    return _Parser(text, name).terms()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._tokens = self._split()  # one at a time: all of a large file would take hundreds of megabytes
        self._token = next(self._tokens)
        self._end = 0  # of the last token taken

    def terms(self) -> Iterator[Term]:
        while self._peek().kind != _END:
            term = self._term("a rule, such as {allow, all}.", 0)
            self._take(".", "'.' at the end of the rule")
            yield term

    # --- tokens ---

    def _split(self) -> Iterator[_Token]:
        text = self._text
        at, line = 0, 1
        for match in iter(_TOKEN.scanner(text).match, None):  # type: ignore[attr-defined]  # as `re.Scanner` does it
            kind, raw, end = match.lastgroup, match.group(), match.end()
            if kind == "space":
                line += raw.count("\n")
            elif kind == "mark":
                yield _Token(raw, raw, line, at, end)
            elif kind == "atom":
                yield _Token("atom", raw, line, at, end)
            else:
                value = self._unescape(raw[1:-1], line) if "\\" in raw else raw[1:-1]
                yield _Token("string" if kind == "string" else "atom", value, line, at, end)
            at = end
        if at < len(text):
            raise self._fail(line, f"cannot read {text[at : at + 20].splitlines()[0]!r}{_hint(text[at])}")
        yield _Token(_END, "", line, at, at)

    def _unescape(self, raw: str, line: int) -> str:
        def replace(match: re.Match[str]) -> str:
            code = match.group(1)
            if code in _ESCAPES:
                return _ESCAPES[code]
            number = int(code[1:].strip("{}"), 16) if len(code) > 1 else -1
            if 0 <= number < 0xD800 or 0xDFFF < number <= 0x10FFFF:
                return chr(number)
            raise self._fail(
                line, f"unknown escape \\{code}; a backslash in a regular expression is written twice: \\\\{code}"
            )

        return _ESCAPE.sub(replace, raw)

    def _peek(self) -> _Token:
        return self._token

    def _next(self) -> _Token:
        token = self._token
        if token.kind != _END:
            self._end = token.end
            self._token = next(self._tokens)
        return token

    def _take(self, kind: str, expected: str) -> _Token:
        token = self._next()
        if token.kind != kind:
            raise self._expected(expected, token)
        return token

    # --- terms ---

    def _term(self, expected: str, depth: int) -> Term:
        if depth > MAX_DEPTH:
            raise self._fail(self._peek().line, f"more than {MAX_DEPTH} tuples and lists inside each other")
        token = self._next()
        match token.kind:
            case "atom":
                return self._made(TermKind.ATOM, token, token.text)
            case "string":
                return self._made(TermKind.STRING, token, token.text)
            case "<<":
                inner = self._take("string", "a string after '<<'")
                self._take(">>", "'>>'")
                return self._made(TermKind.STRING, token, inner.text)
            case "{":
                items = self._items("}", depth + 1)
                return self._made(TermKind.TUPLE, token, "", items)
            case "[":
                items = self._items("]", depth + 1)
                return self._made(TermKind.LIST, token, "", items)
        raise self._expected(expected, token)

    def _items(self, close: str, depth: int) -> tuple[Term, ...]:
        items: list[Term] = []
        if self._peek().kind == close:
            self._next()
            return ()
        while True:
            items.append(self._term("a value", depth))
            token = self._next()
            if token.kind == close:
                return tuple(items)
            if token.kind != ",":
                raise self._expected(f"',' or '{close}'", token)

    def _made(self, kind: TermKind, start: _Token, text: str, items: tuple[Term, ...] = ()) -> Term:
        """Return a term from a token to the last one taken."""
        return Term(kind, start.line, self._text, start.start, self._end, text, items)

    # --- errors ---

    def _expected(self, expected: str, token: _Token) -> AccessFileError:
        found = _END if token.kind == _END else repr(self._text[token.start : token.end])
        return self._fail(token.line, f"expected {expected}, found {found}")

    def _fail(self, line: int, problem: str) -> AccessFileError:
        return AccessFileError(f"{self._name}:{line}: {problem}")


def _hint(character: str) -> str:
    if character == '"':
        return ": the string does not end on its line"
    if character == "'":
        return ": the quoted atom does not end on its line"
    if character == "#":
        return ": comments begin with %"
    return ""
