"""What is wrong after a run, by kind and in words. The verdicts of the judges are findings with counts of their own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

MAX_TOLD = 20  #: findings of one kind that are told one by one; all are counted


@dataclass(kw_only=True)
class Findings:
    """What is wrong; nothing, if the run has passed."""

    by_kind: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, words: str) -> None:
        self.by_kind[kind].append(words)

    def count(self, kind: str) -> int:
        return len(self.by_kind.get(kind, ()))

    @property
    def passed(self) -> bool:
        return not any(self.by_kind.values())

    def told(self) -> list[str]:
        """In words, not too many of each kind."""
        lines = []
        for kind, found in self.by_kind.items():
            lines += [f"{kind}: {words}" for words in found[:MAX_TOLD]]
            if len(found) > MAX_TOLD:
                lines.append(f"{kind}: and {len(found) - MAX_TOLD} more")
        return lines

    def conclusion(self) -> list[str]:
        """The last lines of a report."""
        return [*self.told(), "passed" if self.passed else "FAILED"]
