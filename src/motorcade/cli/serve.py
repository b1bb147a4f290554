"""`motorcade serve`: run a node, or several, in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", envvar="MOTORCADE_CONFIG", metavar="FILE", help="TOML configuration file.")
]

MAX_NODES = 64


def serve(
    config: ConfigFile = None,
    mqtt: Annotated[str | None, typer.Option(metavar="HOST:PORT|off", help="MQTT over TCP. [127.0.0.1:1883]")] = None,
    ws: Annotated[str | None, typer.Option(metavar="HOST:PORT|off", help="WebSocket. [127.0.0.1:8083]")] = None,
    http: Annotated[str | None, typer.Option(metavar="HOST:PORT|off", help="Control port. [127.0.0.1:18083]")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the node keeps files. [./motorcade-data]")
    ] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="URL of the store. \\[rocksdb://]")] = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Name of this node.")] = None,
    nodes: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_NODES, help="Nodes that share the ports, and a store.")
    ] = 1,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. \\[info]")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json. \\[auto]")] = None,
) -> None:
    """Run a node until SIGTERM or SIGINT. Prints a line with `ready` when it accepts clients.

    With --nodes N several run on the same ports, as one broker; without a store they share a private Valkey in
    DIR/valkey. The control port of the first is as configured, those of the others are told in the line with `ready`.

    Flags are stronger than MOTORCADE_SECTION__KEY variables, and these are stronger than the file.
    SIGHUP reads the file again.
    """
    from motorcade import config as configuration
    from motorcade import log

    flags = {
        "listeners.tcp.bind": mqtt,
        "listeners.ws.bind": ws,
        "http.bind": http,
        "data.dir": data,
        "store.url": store,
        "broker.node": node,
        "log.level": log_level,
        "log.format": log_format,
    }
    overrides = {key: value for key, value in flags.items() if value is not None}
    loaded = configuration.load(config, os.environ, overrides)
    configuration.check_plugins(loaded)
    log.configure(loaded.config.log.level, loaded.config.log.format)

    if nodes == 1:
        from motorcade.node import run

        raise SystemExit(run(loaded))
    from motorcade.supervisor.supervisor import run as run_nodes

    raise SystemExit(run_nodes(loaded, nodes))
