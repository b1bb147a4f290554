"""The supervisor with any number of nodes: `python -m tests.support.stub_supervisor stub|real FOLDER N KEY=VALUE…`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

STUB = (sys.executable, "-P", str(Path(__file__).with_name("stub_node.py")))


def main() -> None:
    # While all is imported, Ctrl-C ends it as it ends a command (`motorcade/__main__.py`).
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(130))
    from motorcade import config as configuration  # noqa: PLC0415
    from motorcade import log  # noqa: PLC0415
    from motorcade.core.errors import MotorcadeError  # noqa: PLC0415
    from motorcade.supervisor.supervisor import NODE, run  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, data, count, *rest = sys.argv[1:]
    overrides = {"data.dir": data, "broker.node": "stub"} | dict(word.split("=", 1) for word in rest)
    try:
        loaded = configuration.load(None, os.environ, overrides)
    except MotorcadeError as error:
        sys.exit(f"error: {error}")
    log.configure(loaded.config.log.level, loaded.config.log.format)
    raise SystemExit(run(loaded, int(count), STUB if kind == "stub" else NODE))


if __name__ == "__main__":
    main()
