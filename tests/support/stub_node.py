"""A stand-in for a node under the supervisor: says what a node says, listens where it is told, does what a test asks.

What a test asks for lies in the folder of the node, `DATA/node-1/asked.json`, before it starts:

    error         say this and exit with 1
    silent        never be ready
    deaf          do not end when told to
    drain         seconds until it ends when told to

Each start adds its process id to `DATA/node-1/started`. A client that connects is told the name of the node. It starts
in a tenth of the time of a node.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    orders = json.loads(sys.stdin.readline())
    own = orders["overrides"]
    name, folder = own["broker.node"], Path(own["data.dir"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "started").open("a") as file:
        file.write(f"{os.getpid()}\n")
    path = folder / "asked.json"
    asked = json.loads(path.read_text()) if path.exists() else {}
    log("stub_begins", orders=own)
    if "error" in asked:
        print(f"error: {asked['error']}", file=sys.stderr)
        raise SystemExit(1)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    listening = [listen(bind) for bind in own["listeners.tcp.bind"]]
    if not asked.get("silent"):
        http = " ".join(at for at in own["http.bind"] if own["http.bind"] != "off")
        tcp = " ".join(own["listeners.tcp.bind"])
        print(f"motorcade 0 ready  tcp {tcp}" + (f"  http {http}" if http else ""), flush=True)
    with selectors.DefaultSelector() as selector:
        for one in (wake, sys.stdin, *listening):
            selector.register(one, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    if not os.read(0, 100):
                        raise SystemExit(1)  # the supervisor is gone
                elif key.fileobj is wake:
                    for each in wake.recv(100):
                        react(each, asked)
                elif isinstance(key.fileobj, socket.socket):
                    client = key.fileobj.accept()[0]
                    client.sendall(name.encode())
                    client.close()


def react(number: int, asked: dict[str, object]) -> None:
    log("stub_signalled", signal=signal.Signals(number).name)
    if number == signal.SIGTERM and not asked.get("deaf"):
        time.sleep(float(str(asked.get("drain", 0))))
        print("stubs say this\nto standard error", file=sys.stderr)
        raise SystemExit(0)


def listen(bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, int(port)))
    sock.listen()
    return sock


def log(event: str, **fields: object) -> None:
    told = {"event": event, "level": "info", "logger": "stub", "timestamp": "2026-01-01T00:00:00Z", **fields}
    print(json.dumps(told), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
