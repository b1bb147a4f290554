"""What an operator does to a running node: commands, requests to the control port, a look at the metrics.

    operator = Operator(node)
    operator.create("queues", "jobs", topics=["jobs/#"])     over HTTP, the quick way
    operator.command("queue", "list", "--json")              `motorcade queue list`, as a person would
    operator.load("rows", TEXT, limit=3)                     a plugin that the test has written

Plugins of tests are written where only the user of the node may write, as the node demands.
"""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.scenarios.witness import metrics
from tests.support.commands import Commands, Done, run
from tests.support.node import RunningNode


class Operator(Commands):
    """The control port of a node. `close` unloads nothing: the node ends with the test, or the test cleans up."""

    def __init__(self, node: RunningNode) -> None:
        self.node = node
        self.web = node.web()
        self._folder = tempfile.TemporaryDirectory(prefix="motorcade-plugins-")
        self.folder = Path(self._folder.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.web.close()
        self._folder.cleanup()

    # What is declared: queues, streams, captures.

    def create(self, nouns: str, name: str, **options: Any) -> dict[str, Any]:
        answer = self.web.post(f"{nouns}/{name}", json=options)
        assert 201 == answer.status_code, answer.text
        return dict(answer.json())

    def change(self, nouns: str, name: str, **options: Any) -> dict[str, Any]:
        answer = self.web.put(f"{nouns}/{name}", json=options)
        assert 200 == answer.status_code, answer.text
        return dict(answer.json())

    def delete(self, nouns: str, name: str) -> None:
        answer = self.web.delete(f"{nouns}/{name}")
        assert 200 <= answer.status_code < 300, answer.text

    def show(self, nouns: str, name: str) -> dict[str, Any]:
        answer = self.web.get(f"{nouns}/{name}")
        assert 200 == answer.status_code, answer.text
        return dict(answer.json())

    def names(self, nouns: str) -> list[str]:
        answer = self.web.get(nouns)
        assert 200 == answer.status_code, answer.text
        return [view["name"] for view in answer.json()["data"]]

    def read(self, nouns: str, name: str, after: int | None = None, limit: int | None = None) -> list[dict[str, Any]]:
        asked = {key: value for key, value in (("after", after), ("limit", limit)) if value is not None}
        answer = self.web.get(f"{nouns}/{name}/messages", params=asked)
        assert 200 == answer.status_code, answer.text
        return list(answer.json()["data"])

    # Plugins.

    def load(self, name: str, text: str, **config: Any) -> None:
        path = self.folder / f"{name}.py"
        path.write_text(text)
        answer = self.web.post(f"plugins/{name}", json={"path": str(path), "config": config})
        assert 201 == answer.status_code, answer.text

    def unload(self, name: str) -> None:
        answer = self.web.delete(f"plugins/{name}")
        assert 200 == answer.status_code, answer.text

    def plugins(self) -> dict[str, dict[str, Any]]:
        return {plugin["name"]: plugin for plugin in self.web.get("plugins").json()["data"]}

    def counters(self, plugin: str) -> dict[str, int]:
        """What a plugin has counted."""
        return dict(self.plugins()[plugin]["counters"])

    # Figures.

    def metrics(self) -> dict[str, float]:
        return metrics(self.node)

    def counted(self, *words: str) -> float:
        """The sum of all series that have all these words in their name or labels."""
        return sum(value for series, value in self.metrics().items() if all(word in series for word in words))

    # The command line.

    def command(self, *words: object) -> Done:
        """`motorcade WORDS` with the control port of this node in the environment."""
        return run(*words, env={"MOTORCADE_HTTP": str(self.node.http)})


def payload_of(message: dict[str, Any]) -> bytes:
    """The payload of a message as the control port and the command line show it: text, or base64 where it is none."""
    text: str = message["payload"]
    return text.encode() if message["encoding"] == "utf8" else base64.b64decode(text, validate=True)
