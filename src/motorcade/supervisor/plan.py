"""The plan of each node: name, folder, ports, links. Everything else is as it is configured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from motorcade.broker.listener import address_text
from motorcade.config import OFF, Config, ListenAddress, LoadedConfig, addresses, parse_address
from motorcade.core.errors import ConfigError
from motorcade.node import made_up_name
from motorcade.supervisor.child import NodeOrders
from motorcade.supervisor.ports import LOOPBACK, HeldPorts

KINDS: Final = ("tcp", "tls", "ws", "wss")
SECRET_FILE: Final = "cluster.secret"  # noqa: S105 - its name; in the data folder


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of several."""

    name: str
    folder: Path
    own: dict[str, Any]  #: keys of the configuration that are its own

    def orders(self, loaded: LoadedConfig, tokens: Path, store: dict[str, Any], parent: int) -> NodeOrders:
        """Return what it is told when it is started."""
        path = str(loaded.path) if loaded.path is not None else None
        return NodeOrders(path, {**loaded.overrides, **self.own, **store}, str(tokens), parent)


def plan(loaded: LoadedConfig, count: int, ports: HeldPorts) -> list[NodePlan]:
    """Return the plans of so many nodes, with ports that are held for them. `ConfigError` if there are not enough."""
    config = loaded.config
    data = Path(config.data.dir)
    shared: dict[str, Any] = {"log.format": "json"}
    listening: dict[str, list[ListenAddress]] = {}
    for kind in KINDS:
        key = f"listeners.{kind}.bind"
        listening[kind] = [ports.share(address, key) for address in addresses(getattr(config.listeners, kind).bind)]
        shared[key] = [address_text(*address) for address in listening[kind]] or OFF
    if not any(listening.values()):
        raise ConfigError("all listeners are off: no client could connect")
    name = config.broker.node or made_up_name(next((address.port for address in listening["tcp"]), 0))
    http = [ports.spread(address, count, "http.bind") for address in addresses(config.http.bind)]
    links = _links(config, count, ports)
    if not config.cluster.secret_file:
        shared["cluster.secret_file"] = str((data / SECRET_FILE).absolute())
    plans = []
    for number in range(1, count + 1):
        own: dict[str, Any] = {
            **shared,
            **links[number - 1],
            "broker.node": f"{name}-{number}",
            "data.dir": str(data / f"node-{number}"),
            "http.bind": [address_text(*of_nodes[number - 1]) for of_nodes in http] or OFF,
        }
        plans.append(NodePlan(f"{name}-{number}", data / f"node-{number}", own))
    return plans


def _links(config: Config, count: int, ports: HeldPorts) -> list[dict[str, Any]]:
    """Return the keys of the links of each node: on loopback, unless they are configured for other machines."""
    cluster = config.cluster
    bind = parse_address(cluster.bind) if cluster.bind else ListenAddress(LOOPBACK, 0)
    found: list[dict[str, Any]] = [
        {"cluster.bind": address_text(*address)} for address in ports.spread(bind, count, "cluster.bind")
    ]
    if cluster.advertise:
        advertised = parse_address(cluster.advertise)
        if advertised.port != bind.port:
            raise ConfigError(
                f"cluster.advertise: {cluster.advertise} has another port than cluster.bind, and each of {count} nodes "
                "has a port of its own: give both the same port, or start the nodes one by one"
            )
        for one in found:
            port = parse_address(one["cluster.bind"]).port
            one["cluster.advertise"] = address_text(advertised.host, port)
    return found
