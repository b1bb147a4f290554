"""Homes: the names that features give to what they store, by the features' own functions."""

from __future__ import annotations

import pytest

from motorcade.broker import session_records as sessions
from motorcade.plugins.fanout import tables as fanout
from motorcade.plugins.logs.compacted import tables as compacted
from motorcade.plugins.logs.queues import tables as queues
from motorcade.plugins.logs.streams import reader as streams
from motorcade.storage.homes import home_of_owner, home_of_record, is_indexed, records_of

CLIENTS = ["vin", "a/b", "3:x", "", "queue:x", "ü{}", "7"]


@pytest.mark.parametrize("client", CLIENTS)
def test_everything_of_a_client_has_one_home(client: str) -> None:
    exclusive, shared = compacted.EXCLUSIVE, compacted.SHARED
    homes = {
        home_of_owner(sessions.owner_of(client)),
        home_of_owner(fanout.owner_of(client)),
        home_of_owner(fanout.done_of(client)),
        home_of_owner(exclusive.owner_of(client)),
        home_of_record(sessions.SESSIONS, client),
        home_of_record(sessions.SUBSCRIPTIONS, sessions.pair(client, "a/+/#")),
        home_of_record(sessions.AWAITING, sessions.pair(client, "17")),
        home_of_record(exclusive.progress, exclusive.log_key(client).of(client)),
        home_of_record(shared.progress, shared.log_key("queue").of(client)),
        home_of_record(compacted.QUEUES, exclusive.owner_of(client)),
        home_of_record(streams.COLLECTION, streams.key_of("stream").of(client)),
        home_of_record(fanout.UNTOLD, fanout.untold_of(client, 17)),
    }
    assert {f"client:{client}"} == homes


def test_everything_of_a_queue_has_one_home() -> None:
    homes = {home_of_owner(queues.mailbox_of("orders", level)) for level in range(queues.MAX_LEVELS)}
    assert {"queue:orders"} == homes | {home_of_record(queues.COLLECTION, "orders")}
    shared = compacted.SHARED.owner_of("orders")
    assert shared == home_of_owner(shared) == home_of_record(compacted.QUEUES, shared)


def test_all_that_members_know_of_each_other_has_one_home() -> None:
    for collection in ("member", "cluster"):
        for key in ("1", "identity", "members", "client:x"):
            assert "members" == home_of_record(collection, key)
            assert is_indexed(collection, key, "members"), "also what is named like its home"
        assert ("", False) == records_of("members", collection)
        with pytest.raises(ValueError, match="members"):
            records_of("client:x", collection)
    assert "members" == home_of_owner("members")


def test_other_names_are_their_own_home() -> None:
    for name in ("v1", "fanout", "sessions:x", "client:x", "/", "3:vin"):
        assert name == home_of_owner(name) == home_of_record("retained", name) == home_of_record("fanout-data", name)
    for key in ("", "vin", ":", "9:vin", "x:vin", "-1:vin", "²:vin"):
        assert key == home_of_record(sessions.SUBSCRIPTIONS, key), "not made by `pair`"


@pytest.mark.parametrize("client", CLIENTS)
def test_records_of_a_home_are_found_by_how_their_keys_begin(client: str) -> None:
    home = f"client:{client}"
    assert (sessions.pair(client, ""), False) == records_of(home, sessions.SUBSCRIPTIONS)
    assert (client, True) == records_of(home, sessions.SESSIONS)
    assert (home, True) == records_of(home, "anything")
    assert ("v1", True) == records_of("v1", sessions.SUBSCRIPTIONS)
    for collection in (streams.COLLECTION, compacted.SHARED.progress, queues.COLLECTION, compacted.QUEUES):
        with pytest.raises(ValueError, match="lie together"):
            records_of(home, collection)
