"""A listener on real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from pathlib import Path

import pytest

from motorcade.broker.listener import Endpoint, Listener
from motorcade.core.errors import ConfigError
from tests.support.ports import free_port
from tests.support.virtual import MemoryNode


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("copies", [0, 1])
async def test_a_listener_that_cannot_be_renewed_goes_on_as_it_was(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for the second of its sockets: the copy of the first is given back."""
    node = MemoryNode(loop=asyncio.get_running_loop())
    listener = Listener(node.broker, Endpoint("tcp", "", free_port()))
    await listener.open()
    opened = descriptors()
    made: list[int] = []

    def dup(fd: int, real: object = os.dup) -> int:
        if len(made) == copies:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(fd))  # type: ignore[operator]
        return made[-1]

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(ConfigError, match="cannot take new certificates: Too many open files"):
        await listener.renew(ssl.create_default_context())
    await asyncio.sleep(0)  # closing takes a turn
    assert listener.endpoint.tls is None and len(made) == copies
    assert opened == descriptors()
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.close()
    await listener.close()
