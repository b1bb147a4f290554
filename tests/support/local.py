"""A node in a thread of this process: real ports, real plugins, in a twentieth of the time that a process takes.

For tests of what a node answers over HTTP, MQTT and to commands. Signals, kills, restarts and what a node does to its
process need `NodeProcess`. What it logs is in pytest's report of a test that fails.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from unittest.mock import patch

import structlog
import uvloop

from motorcade import config as configuration
from motorcade import node as composition
from motorcade.control import NodeState
from tests.support.node import PLUGIN_FOLDERS, START_PATIENCE, STOP_PATIENCE, Endpoint, RunningNode


class LocalNode(RunningNode):
    """`motorcade serve` as a thread. `config` is the text of a file, `flags` are dotted keys that go before it."""

    def __init__(
        self,
        config: str = "",
        *,
        data: Path | None = None,
        store: str = "memory://",
        flags: dict[str, object] | None = None,
    ) -> None:
        super().__init__(data)
        self.file = self.folder / "motorcade.toml"
        self.file.write_text(config)
        self._flags: dict[str, object] = {
            "listeners.tcp.bind": "127.0.0.1:0",
            "listeners.ws.bind": "off",
            "http.bind": "127.0.0.1:0",
            "http.plugin_paths": PLUGIN_FOLDERS,
            "data.dir": str(self.data),
            "store.url": store,
            **(flags or {}),
        }
        self.node: composition.Node
        self._loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="local-node", daemon=True)
        self._failure: BaseException | None = None
        self._logging = logging_to_pytest()

    def start(self) -> Self:
        """Start, and wait until the node is ready."""
        self._logging.__enter__()
        with patch.object(composition, "gc"):  # the collector is the test's
            self._thread.start()
            assert self._started.wait(START_PATIENCE), "the node did not become ready"
        if self._failure is not None:
            self.stop()
        return self

    def stop(self) -> None:
        """Stop as SIGTERM does it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.node.stopping.set)
        self._thread.join(STOP_PATIENCE)
        self._logging.__exit__(None, None, None)
        self.remove()
        assert not self._thread.is_alive(), "the node did not stop"
        if self._failure is not None:
            raise self._failure

    def soon(self, call: Callable[[], object]) -> None:
        """Have something done in the loop of the node."""
        self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.node = composition.Node(configuration.load(self.file, {}, self._flags), self._loop)
        serving = asyncio.create_task(self.node.run())
        while self.node.control.state is not NodeState.READY and not serving.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
        if not serving.done():
            self.mqtt = Endpoint.parse(self.node.control.listeners["tcp"][0])
            self.http = Endpoint.parse(self.node.control.listeners["http"][0])
            self._started.set()
        await serving

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def logging_to_pytest() -> Iterator[None]:
    """Through the standard library, which pytest listens to, and not to standard output, which tests read."""
    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
