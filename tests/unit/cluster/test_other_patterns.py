"""Two nodes with other addressed filters start at once: neither finds the other when it looks who is there."""

from __future__ import annotations

import pytest

from tests.support.cluster_world import LEASE, ClusterWorld


@pytest.mark.parametrize("other", [(), ("b/{client}",)])
def test_of_two_that_start_at_once_the_older_one_serves(other: tuple[str, ...]) -> None:
    world = ClusterWorld(2)
    world.hosts[1].addressed = other
    with world:
        for _ in range(60):
            world.wait(0.25)
            assert sum(host.node is not None and host.node.live for host in world.hosts) <= 1
        world.wait(3 * LEASE)
        live = [host for host in world.hosts if host.node is not None and host.node.live]
        assert 1 == len(live)
        refused = next(host for host in world.hosts if host is not live[0])
        assert not any(node.listens for node in refused.incarnations)
