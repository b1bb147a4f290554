"""What a compose file of `deploy/` says, started as plain processes on loopback: there is no container engine here.

    with Composed(plain_yaml(text), folder, "172.30.98.") as services:      all, in the order of `depends_on`
        services["hub-1"].process.kill()
        services.start("hub-1")                          again, with the same files

Each service gets the commands, the environment and the files that the compose file gives it. An address of its network
becomes one of 127.0.0.0/8, a path of its container one in a folder of its own; volumes are folders that services share.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Self

from tests.support.node import ROOT

#: Seconds that a service which is to end may take, and one that is stopped.
PATIENCE: Final = 120.0
#: What images start if the file names no entry point, by the beginning of their names.
ENTRYPOINTS: Final = {"motorcade": [sys.executable, "-m", "motorcade"]}


def plain_yaml(text: str) -> Any:
    """What the compose file uses of YAML: mappings by indentation, anchors and merges, scalars, and lists in brackets.

    Anything else fails, so that the file stays as plain as this.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    anchors: dict[str, Any] = {}

    def mapping(indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while lines and len(lines[0]) - len(lines[0].lstrip()) == indent:
            if lines[0].lstrip().startswith("- "):
                raise AssertionError(f"a list among keys: {lines[0]}")
            match = re.fullmatch(r" *([\w<.-]+):(?: (.+))?", lines.pop(0))
            assert match is not None
            key, value = match[1], (match[2] or "").strip()
            assert key not in found, key
            if key == "<<":
                found = anchors[value.removeprefix("*")] | found
                continue
            anchor = value.removeprefix("&") if value.startswith("&") else None
            found[key] = scalar(value) if value and anchor is None else below(indent)
            if anchor is not None:
                anchors[anchor] = found[key]
        return found

    def below(indent: int) -> Any:
        deeper = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        if deeper <= indent:
            return None
        if lines[0].lstrip().startswith("- "):
            items = []
            while lines and lines[0].startswith(" " * deeper + "- "):
                key, _, value = lines.pop(0).strip().removeprefix("- ").partition(": ")
                items.append({key: scalar(value)})
            return items
        return mapping(deeper)

    def scalar(value: str) -> Any:
        if value.startswith("[") and '"' in value:
            return json.loads(value)
        if value.startswith("["):
            return [word.strip() for word in value.strip("[]").split(",")]
        return int(value) if value.isdigit() else value

    result = mapping(0)
    assert not lines, f"not understood: {lines[0]}"
    return result


@dataclass
class Service:
    """One service, which is a process."""

    name: str
    said: dict[str, Any]  #: in the compose file
    address: str
    folder: Path
    paths: dict[str, Path] = field(default_factory=dict)  #: by path in the container
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def signal(self, number: int) -> None:
        assert self.process is not None, f"{self.name} was not started"
        self.process.send_signal(number)

    def ends(self, patience: float | None = None) -> int:
        """Wait for its end. Return the exit code."""
        assert self.process is not None, f"{self.name} was not started"
        try:
            return self.process.wait(patience or PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.log}") from None


class Composed:
    """All services of a compose file."""

    def __init__(self, said: dict[str, Any], beside: Path, network: str) -> None:
        """`said`: the file, which lies in the folder `beside`; `network`: how its addresses begin."""
        self.said = said
        self._beside = beside
        self._own = tempfile.TemporaryDirectory(prefix="motorcade-compose-")
        self.folder = Path(self._own.name)
        self._network = network
        self._here = _free_network()
        self._services = {
            name: Service(name, said, self._address(said), self.folder / name)
            for name, said in self.said["services"].items()
        }

    def __getitem__(self, name: str) -> Service:
        return self._services[name]

    def __enter__(self) -> Self:
        try:
            for name in self._services:
                self.start(name)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _address(self, said: Mapping[str, Any]) -> str:
        networks = said["networks"]
        if not isinstance(networks, dict):
            return ""
        (of_service,) = networks.values()
        address: str = of_service["ipv4_address"]
        return self.translated(address)

    def translated(self, text: str, service: Service | None = None) -> str:
        """Replace the addresses of the network, and the paths of a container."""
        text = text.replace(self._network, self._here)
        if service is None:
            return text
        for inside in sorted(service.paths, key=len, reverse=True):
            text = re.sub(rf"(?<![\w/.]){re.escape(inside)}(?![\w.])", str(service.paths[inside]), text)
            text = text.replace(f"file://{inside}", f"file://{service.paths[inside]}")
        return text

    def start(self, name: str) -> Service:
        """Start a service, unless it runs, after those that it depends on."""
        service = self._services[name]
        if service.process is not None and service.process.poll() is None:
            return service
        depends = service.said.get("depends_on", [])
        for other in depends:
            started = self._services[other]
            if started.process is None:
                self.start(other)
            if isinstance(depends, dict) and depends[other]["condition"] == "service_completed_successfully":
                assert started.ends() == 0, f"{other} has failed:\n{started.log}"
        service.folder.mkdir(exist_ok=True)
        self._place_files(service)
        command, cwd = self._command(service)
        with (service.folder / "log").open("ab") as log:
            service.process = subprocess.Popen(
                command, env=self.environment(service), cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return service

    def _place_files(self, service: Service) -> None:
        """Put its volumes and files where they can be found, with addresses and paths of this machine in them."""
        volumes = [volume.split(":") for volume in service.said.get("volumes", [])]
        for source, target, *_ in volumes:
            if source in self.said["volumes"]:
                service.paths[target] = self.folder / f"volume-{source}"
                service.paths[target].mkdir(exist_ok=True)
            else:
                service.paths[target] = service.folder / Path(target).name
        for source, target, *_ in volumes:
            if source not in self.said["volumes"]:
                given, path = self._beside / source, service.paths[target]
                text = self.translated(given.read_text(), service)
                # In a container "every address" is its own one.
                text = text.replace("0.0.0.0:", f"{service.address}:").replace("bind :", f"bind {service.address}:")
                path.write_text(text)
                path.chmod(given.stat().st_mode)

    def _command(self, service: Service) -> tuple[list[str], Path]:
        image = service.said["image"]
        words = [self.translated(word, service) for word in service.said["command"]]
        entry = [self.translated(word, service) for word in service.said.get("entrypoint", [])]
        entry = entry or next((start for name, start in ENTRYPOINTS.items() if image.startswith(name)), [])
        if words[0] == "redis-server":
            # Here a connection to another address of loopback would come from 127.0.0.1.
            words += ["--bind", service.address, "--bind-source-addr", service.address]
        (cwd,) = [path for target, path in service.paths.items() if target == "/data"] or [service.folder]
        return entry + words, cwd

    def environment(self, service: Service) -> dict[str, str]:
        """Return the variables of a service: what the file says, and what this Python needs."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
        said = {key: self.translated(str(value), service) for key, value in service.said.get("environment", {}).items()}
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        return clean | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "HOME": str(service.folder)} | said

    def exec(self, name: str, *words: str, stdin: str = "") -> str:
        """Run a command in the place of a service. Return what it prints; it must succeed."""
        service = self._services[name]
        words = tuple(self.translated(word, service) for word in words)
        program = ENTRYPOINTS["motorcade"] if words[0] == "motorcade" else [words[0]]
        done = subprocess.run(
            [*program, *words[1:]],
            env=self.environment(service),
            cwd=service.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def remove(self) -> None:
        """Kill all that still runs, and remove its files."""
        for service in self._services.values():
            if service.process is not None and service.process.poll() is None:
                service.process.kill()
                service.process.wait(PATIENCE)
        self._own.cleanup()


def _free_network() -> str:
    """Return the beginning of addresses of loopback on which nothing listens: a container has all of its ports."""
    random = Random()
    while True:
        begin = f"127.{random.randrange(64, 250)}.{random.randrange(1, 250)}."
        with socket.socket() as probe, suppress(OSError):
            probe.bind((f"{begin}21", 1883))
            return begin
