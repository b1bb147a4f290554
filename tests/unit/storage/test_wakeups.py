"""Wake-ups inside one process; what engines promise of them is in `tests/contracts/test_coordination.py`."""

from __future__ import annotations

from motorcade.storage.wakeups import MAX_WAKE_UPS, WakeUps


async def test_each_listener_of_the_node_is_told_and_nobody_else() -> None:
    wake_ups = WakeUps()
    with wake_ups.listener("a") as first, wake_ups.listener("a") as second, wake_ups.listener("b") as other:
        wake_ups.notify("a", b"1")
        assert (b"1", b"1") == (first.get_nowait(), second.get_nowait())
        assert other.empty()
    wake_ups.notify("a", b"2")
    with wake_ups.listener("a") as late:
        assert late.empty()


async def test_what_a_slow_listener_does_not_get_is_counted() -> None:
    """The others get it all the same."""
    wake_ups = WakeUps()
    with wake_ups.listener("a") as slow:
        for number in range(MAX_WAKE_UPS):
            wake_ups.notify("a", b"%d" % number)
        with wake_ups.listener("a") as quick:
            wake_ups.notify("a", b"last")
            assert b"last" == quick.get_nowait()
        assert (1, MAX_WAKE_UPS) == (wake_ups.lost, slow.qsize())
        assert b"0" == slow.get_nowait()
