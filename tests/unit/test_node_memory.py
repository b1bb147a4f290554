"""Memory that a node gives back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.node import ROOT

PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from motorcade.node import give_back_large_blocks
from motorcade.plugins.access.passwords import parse_hash

HASH = parse_hash("$argon2id$v=19$m=19456,t=1,p=1$" + "A" * 22 + "$" + "A" * 43)

def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if "tuned" in sys.argv and not give_back_large_blocks():
    sys.exit(77)
HASH.verify(b"wrong")
before = rss()
together = Barrier(6)

def check(_):
    together.wait()  # each in a thread of its own
    for _ in range(2):
        HASH.verify(b"wrong")

with ThreadPoolExecutor(6) as threads:
    list(threads.map(check, range(6)))
    print(rss() - before)
"""


def grown(*words: str) -> int:
    """MiB that a process is larger after six threads have checked passwords."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert 0 == done.returncode, done.stderr
    return int(done.stdout)


def test_what_checking_passwords_took_is_given_back() -> None:
    """While their threads live on; without the node's setting each of them keeps 19 MiB."""
    assert grown("tuned") < 19 < grown()
