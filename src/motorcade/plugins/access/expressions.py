"""Regular expressions whose cost is bounded: all ways to match are followed at once, none is tried again.

`re` tries one way after the other, so that `(a+)+b` takes 2^n steps for a name that a client has chosen. Here an
expression becomes a list of instructions, and each character of the name moves a set of them on; sets that were met
before are remembered. That is linear in the length of the name, and needs no look-around and no back-references,
which are refused.

The syntax is the one of `re`, whose parser is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

MAX_PATTERN: Final = 1000  #: characters of an expression
MAX_PROGRAM: Final = 2000  #: instructions it may become; `{1000}` repeats what it stands behind
MAX_SUBJECT: Final = 1024  #: characters of a name that is looked at
MAX_SETS: Final = 1000  #: sets of instructions that are remembered

_MATCH: Final = "match"
_CHAR: Final = "char"
_SPLIT: Final = "split"  # go on at each of the targets
_START: Final = "start"
_END: Final = "end"
_LAST: Final = "last"  # the end, or before a line break that is the last character


class ExpressionError(ValueError):
    """An expression that cannot be used here."""


class SubjectError(ValueError):
    """A name that is too long to be looked at."""


class _Instruction(NamedTuple):
    kind: str
    test: Callable[[str], bool] | None = None
    targets: tuple[int, ...] = ()


_States = frozenset[int]


class Expression:
    """A compiled expression; `ExpressionError` says what is wrong with it."""

    __slots__ = ("_next", "_program", "_start", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_PATTERN:
            raise ExpressionError(f"it has more than {MAX_PATTERN} characters")
        try:
            tree = parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ExpressionError(str(error)) from error
        self._program = _Compiler(tree).program
        self._next: dict[_States, dict[str, _States]] = {}
        self._start = self._closure([0], start=True)

    def search(self, subject: str) -> bool:
        """Return True if the expression is found anywhere in a name. `SubjectError` if that is too long."""
        if len(subject) > MAX_SUBJECT:
            raise SubjectError(f"a name of more than {MAX_SUBJECT} characters cannot be compared with an expression")
        states, last = self._start, len(subject) - 1
        for index, char in enumerate(subject):
            if index == last and char == "\n":  # `$` matches here, and what stands behind it may match the line break
                states = self._behind(states, (_LAST,), start=not index)
            if -1 in states:
                return True
            known = self._next.get(states)
            following = known.get(char) if known is not None else None
            states = following if following is not None else self._step(states, char)
        return -1 in self._behind(states, (_END, _LAST), start=not subject)

    def _step(self, states: _States, char: str) -> _States:
        program = self._program
        moved = [state + 1 for state in states if (test := program[state].test) is not None and test(char)]
        following = self._closure([*moved, 0])  # 0: the expression may begin here as well
        if len(self._next) >= MAX_SETS:
            self._next.clear()
        table = self._next.setdefault(states, {})
        if len(table) < MAX_SETS:
            table[char] = following
        return following

    def _closure(self, seeds: Iterable[int], *, start: bool = False, through: tuple[str, ...] = ()) -> _States:
        """Return the instructions that can be reached without a character; -1 if the end of the expression can."""
        found: set[int] = set()
        seen: set[int] = set()
        open_ = list(seeds)
        while open_:
            state = open_.pop()
            if state in seen:
                continue
            seen.add(state)
            kind, _, targets = self._program[state]
            if kind == _MATCH:
                found.add(-1)
            elif kind == _SPLIT:
                open_ += targets
            elif kind in through or (kind == _START and start):
                open_.append(state + 1)
            elif kind != _START:
                found.add(state)
        return frozenset(found)

    def _behind(self, states: _States, through: tuple[str, ...], *, start: bool) -> _States:
        """Return the instructions that can be reached at an end of the name."""
        if -1 in states:
            return states
        return self._closure(states, start=start, through=through)


class _Compiler:
    """From the parser's tree to instructions."""

    def __init__(self, tree: Any) -> None:
        self.program: list[_Instruction] = []
        flags = tree.state.flags & ~re.UNICODE
        if flags & ~re.IGNORECASE:
            raise ExpressionError("of the flags only (?i) is known here")
        self._fold = bool(flags & re.IGNORECASE)
        self._sequence(tree)
        self._add(_Instruction(_MATCH))

    def _add(self, instruction: _Instruction) -> int:
        if len(self.program) >= MAX_PROGRAM:
            raise ExpressionError("it repeats too much")
        self.program.append(instruction)
        return len(self.program) - 1

    def _sequence(self, tree: Any) -> None:
        for code, argument in tree:
            self._one(code, argument)

    def _one(self, code: Any, argument: Any) -> None:
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            self._add(_Instruction(_CHAR, _test(code, argument, fold=self._fold)))
        elif code is codes.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise ExpressionError("flags inside of an expression are not known here")
            self._sequence(inner)
        elif code is codes.BRANCH:
            self._branch(argument[1])
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):  # which of them makes no difference to whether it matches
            self._repeat(*argument)
        elif code is codes.AT and argument in _PLACES:
            self._add(_Instruction(_PLACES[argument]))
        else:
            name = str(code).lower().replace("_", " ")
            raise ExpressionError(f"{name}: only letters, sets, groups, |, ^, $ and repetitions are known here")

    def _branch(self, branches: Any) -> None:
        split = self._add(_Instruction(_SPLIT))
        begins: list[int] = []
        ends: list[int] = []
        for branch in branches:
            begins.append(len(self.program))
            self._sequence(branch)
            ends.append(self._add(_Instruction(_SPLIT)))
        self.program[split] = _Instruction(_SPLIT, None, tuple(begins))
        for end in ends:
            self.program[end] = _Instruction(_SPLIT, None, (len(self.program),))

    def _repeat(self, least: int, most: Any, inner: Any) -> None:
        for _ in range(least):
            before = len(self.program)
            self._sequence(inner)
            if len(self.program) == before:
                break  # nothing, however often
        if most is codes.MAXREPEAT:
            split = self._add(_Instruction(_SPLIT))
            self._sequence(inner)
            self._add(_Instruction(_SPLIT, None, (split,)))
            self.program[split] = _Instruction(_SPLIT, None, (split + 1, len(self.program)))
            return
        splits: list[int] = []
        for _ in range(most - least):
            splits.append(self._add(_Instruction(_SPLIT)))
            self._sequence(inner)
        for split in splits:
            self.program[split] = _Instruction(_SPLIT, None, (split + 1, len(self.program)))


_PLACES: Final = {
    codes.AT_BEGINNING: _START,
    codes.AT_BEGINNING_STRING: _START,
    codes.AT_END: _LAST,
    codes.AT_END_STRING: _END,
}
_CATEGORIES: Final[dict[Any, Callable[[str], bool]]] = {
    codes.CATEGORY_DIGIT: str.isdecimal,
    codes.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    codes.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    codes.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}


def _test(code: Any, argument: Any, *, fold: bool) -> Callable[[str], bool]:
    """Return a test for the characters that are meant; with `fold`, in upper or lower case."""
    if code is codes.ANY:
        return lambda char: char != "\n"
    parts = argument if code is codes.IN else [(codes.LITERAL, argument)]
    negated = code is codes.NOT_LITERAL or any(kind is codes.NEGATE for kind, _ in parts)
    tests = [_member(kind, value) for kind, value in parts if kind is not codes.NEGATE]
    if not fold:
        return lambda char: any(test(char) for test in tests) is not negated
    return lambda char: any(test(form) for form in (char, char.lower(), char.upper()) for test in tests) is not negated


def _member(kind: Any, value: Any) -> Callable[[str], bool]:
    """Return a test for the characters in one part of a set."""
    if kind is codes.RANGE:
        low, high = map(chr, value)
        return lambda char: low <= char <= high
    if kind is codes.CATEGORY:
        return _CATEGORIES[value]
    letter = chr(value)
    return lambda char: char == letter
