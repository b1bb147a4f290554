"""A generator that stops between phases (`mqttload … --pause`), so that somebody can look at the broker meanwhile.

generator                         here
{"phase": "asleep", …}  ───────▶  listener("asleep"), which may read, kill or restart the broker
                        ◀───────  its answer: empty, or the broker's new process id
{"phase": "fill", …}    ───────▶  …
{"phase": "drain", …}   ───────▶  the end
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from threading import Timer
from typing import Any

from .machine import BenchError

LAST = "drain"


def converse(
    command: Sequence[str], patience: float, listener: Callable[[str], str] = lambda _: ""
) -> dict[str, dict[str, Any]]:
    """Run the generator; what it said of each phase. Raises BenchError when it ends before the last, or too late."""
    said: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        [*command, "--pause"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as generator:
        assert generator.stdin is not None
        assert generator.stdout is not None
        assert generator.stderr is not None
        late = Timer(patience, generator.kill)
        late.start()
        try:
            for line in generator.stdout:
                raw = json.loads(line)
                said[raw["phase"]] = raw
                if raw["phase"] != LAST:
                    generator.stdin.write(listener(raw["phase"]) + "\n")
                    generator.stdin.flush()
            errors = generator.stderr.read().strip().splitlines()
            code = generator.wait()
        except BaseException:
            generator.kill()
            raise
        finally:
            in_time = late.is_alive()
            late.cancel()
    if code == 0 and LAST in said:
        return said
    if not in_time:
        raise BenchError(f"no end after {patience:.0f} s; it had told of {', '.join(said) or 'nothing'}")
    raise BenchError(errors[-1] if errors else f"the generator ended with {code}")
