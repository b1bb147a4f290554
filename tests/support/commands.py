"""Commands of Motorcade as a person gives them, and what they must say."""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from typing import Any


class Commands(ABC):
    """Somebody who gives commands."""

    @abstractmethod
    def command(self, *words: object) -> subprocess.CompletedProcess[str]:
        """The command, done or not."""

    def done(self, *words: object) -> str:
        """The output of a command that must succeed."""
        result = self.command(*words)
        assert 0 == result.returncode, f"{' '.join(map(str, words))}: {result.stdout}{result.stderr}"
        return result.stdout

    def asked(self, *words: object) -> Any:
        """The JSON that a command prints."""
        return json.loads(self.done(*words, "--json"))

    def refused(self, *words: object, code: int = 1) -> str:
        """What a command says that must fail."""
        result = self.command(*words)
        assert code == result.returncode, f"exit code {result.returncode}: {result.stdout}{result.stderr}"
        assert "Traceback" not in result.stderr, result.stderr
        return result.stderr
