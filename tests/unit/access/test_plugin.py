"""The plugin as a whole: the chain, anonymous clients, binding, limits on failures, reloading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import argon2
import pytest

from motorcade.core.client import Certificate, ClientInfo
from motorcade.core.errors import AccessFileError, PluginError
from motorcade.extension.hooks import Allow, Callback, Deny, Stop
from motorcade.plugins.access.memory import WINDOW, Failures, SuccessCache
from tests.support.tables import each_case

from .conftest import Start

CHEAP = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text(f"alice:{CHEAP.hash('secret')}\nc1:{CHEAP.hash('one')}\n")
    return path


def passwords(file: Path, **more: Any) -> dict[str, Any]:
    return {"type": "password", "file": str(file)} | more


# --- nobody decided ---


@each_case(
    ("anonymous", "host", "kind"),
    [
        ("loopback", "127.0.0.1", Allow),
        ("loopback", "::1", Allow),
        ("loopback", "192.0.2.1", Deny),
        ("allow", "192.0.2.1", Allow),
        ("deny", "127.0.0.1", Deny),
    ],
)
@each_case("chain", [True, False])
async def test_anonymous_clients(start: Start, file: Path, anonymous: str, host: str, kind: type, chain: bool) -> None:
    node = await start(authentication=[passwords(file)] if chain else [], anonymous=anonymous)
    assert isinstance(await node.authenticate(ClientInfo("c1", None, host)), kind)


@each_case(("chain", "kind"), [(True, Deny), (False, Allow)])
async def test_a_backend_ends_the_trust_in_loopback(start: Start, file: Path, chain: bool, kind: type) -> None:
    node = await start(authentication=[passwords(file)] if chain else [])
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "127.0.0.1")), kind)


async def test_whoever_shows_something_is_not_anonymous(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], anonymous="allow")
    client = ClientInfo("c1", None, "127.0.0.1")
    assert isinstance(await node.authenticate(client), Allow)
    assert isinstance(await node.authenticate(client, password=b"x"), Deny)
    assert isinstance(await node.authenticate(ClientInfo("c1", "alice", "127.0.0.1")), Deny)
    assert isinstance(await node.authenticate(client, method="SCRAM-SHA-1", data=b""), Deny)


async def test_without_configuration_loopback_may_do_everything_and_nobody_else_gets_in(start: Start) -> None:
    node = await start()
    client = ClientInfo("c1", "whoever", "127.0.0.1")
    assert isinstance(await node.authenticate(client, password=b"whatever"), Allow)
    assert node.authorize(client, "publish", "$SYS/x")
    assert node.authorize(client, "subscribe", "#")
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "192.0.2.1")), Deny)
    refused = await node.authenticate(client, method="SCRAM-SHA-1", data=b"")
    assert "BAD_AUTHENTICATION_METHOD" == refused.reason.name


async def test_a_plugin_behind_this_one_may_decide_what_nobody_here_decided(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], anonymous="deny")
    behind = Callback(lambda client, credentials, so_far: Stop(Allow(superuser=True)), -10, "mine")
    node.hooks.add("client.authenticate", behind)
    assert (await node.authenticate(ClientInfo("c1", None, "192.0.2.1"))).superuser
    assert (await node.log_in("unknown", "x")).superuser
    assert isinstance(await node.log_in("alice", "wrong"), Deny)  # decided here


# --- the chain ---


async def test_backends_are_asked_in_order_until_one_decides(start: Start, file: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.write_text(f"bob:{CHEAP.hash('b')}\nalice:{CHEAP.hash('other')}\n")
    node = await start(authentication=[passwords(file), passwords(second, superusers=["bob"])])
    assert not (await node.log_in("alice", "secret")).superuser
    assert (await node.log_in("bob", "b")).superuser
    assert isinstance(await node.log_in("alice", "other"), Deny)  # the first file knows her


CAR = Certificate("car-7", "CN=car-7,O=Fleet", ("car-7.example", "x.example"), not_after=9_999_999_999.0)


@each_case(
    ("options", "username", "client_id"),
    [
        ({}, "car-7", None),
        ({"username": "san"}, "car-7.example", None),
        ({"username": "dn", "client_id": "cn"}, "CN=car-7,O=Fleet", "car-7"),
    ],
)
async def test_a_certificate_names_the_client(start: Start, options: Any, username: str, client_id: str | None) -> None:
    node = await start(authentication=[{"type": "certificate"} | options], anonymous="deny")
    answer = await node.authenticate(ClientInfo("c1", "root", "192.0.2.1", certificate=CAR))
    assert Allow(username=username, client_id=client_id, expires_at=9_999_999_999.0) == answer
    assert isinstance(await node.authenticate(ClientInfo("c1", "car-7", "192.0.2.1")), Deny)


async def test_a_certificate_without_the_name_or_expired_is_refused(start: Start) -> None:
    node = await start(authentication=[{"type": "certificate", "username": "san"}], anonymous="allow")
    bare = Certificate("car-7", "CN=car-7")
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "::1", certificate=bare)), Deny)
    node = await start(authentication=[{"type": "certificate", "client_id": "dn"}], anonymous="allow")
    wild = Certificate("car-7", "CN=car-7+UID=7")
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "::1", certificate=wild)), Deny)
    old = Certificate("car-7", "CN=car-7", ("car-7.example",), not_after=node.time - 1)
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "::1", certificate=old)), Deny)


async def test_a_client_id_can_be_bound_to_the_user_name(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], bind_client_id="username", anonymous="allow")
    assert "c1" == (await node.log_in("c1", "one", "c1")).client_id
    refused = await node.log_in("alice", "secret", "c1")
    assert "CLIENT_IDENTIFIER_NOT_VALID" == refused.reason.name
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "127.0.0.1")), Deny)  # has no name to be held to


async def test_a_client_id_can_be_bound_to_the_certificate(start: Start) -> None:
    node = await start(authentication=[{"type": "certificate"}], bind_client_id="cn")
    assert isinstance(await node.authenticate(ClientInfo("car-7", None, "192.0.2.1", certificate=CAR)), Allow)
    assert isinstance(await node.authenticate(ClientInfo("car-8", None, "192.0.2.1", certificate=CAR)), Deny)


# --- failures ---


async def test_after_too_many_failures_even_the_right_password_must_wait(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], max_failures=3)
    for _ in range(3):
        assert "BAD_USER_NAME_OR_PASSWORD" == (await node.log_in("alice", "wrong")).reason.name
    assert "CONNECTION_RATE_EXCEEDED" == (await node.log_in("alice", "secret")).reason.name
    assert 1 == node.counter("throttled")
    assert isinstance(await node.log_in("alice", "secret", host="192.0.2.9"), Allow)  # nobody is locked out elsewhere
    assert isinstance(await node.log_in("c1", "one"), Allow)
    node.time += WINDOW
    assert isinstance(await node.log_in("alice", "secret"), Allow)


async def test_unknown_users_are_limited_alike(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], max_failures=2)
    answers = [await node.log_in(name, "wrong") for _ in range(3) for name in ("alice", "nobody")]
    assert answers[0::2] == answers[1::2]
    assert "CONNECTION_RATE_EXCEEDED" == answers[-1].reason.name


async def test_who_was_in_a_short_while_ago_is_not_locked_out_by_others(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], max_failures=2)
    await node.log_in("alice", "secret")
    for _ in range(4):
        await node.log_in("alice", "wrong")
    assert isinstance(await node.log_in("alice", "secret"), Allow)
    assert "CONNECTION_RATE_EXCEEDED" == (await node.log_in("alice", "wrong")).reason.name


def test_the_table_of_failures_is_bounded() -> None:
    failures = Failures(limit=1, size=3)
    for i in range(10):
        failures.failed(f"user{i}", "192.0.2.1", 0.0)
    assert 3 == len(failures)
    assert failures.blocked("user9", "192.0.2.1", 1.0)
    assert not failures.blocked("user0", "192.0.2.1", 1.0)


def test_ipv6_addresses_count_by_their_network() -> None:
    failures = Failures(limit=1, size=3)
    failures.failed("u", "2001:db8::1", 0.0)
    assert failures.blocked("u", "2001:db8::2", 0.0)
    assert not failures.blocked("u", "2001:db8:0:1::1", 0.0)


def test_the_table_of_successes_is_bounded_and_forgets() -> None:
    cache: SuccessCache[str] = SuccessCache(lifetime=10, size=2)
    for i in range(5):
        cache.put((f"user{i}", b"p"), "in", 0.0)
    assert 2 == len(cache)
    assert ["in", None, None] == [
        cache.get(("user4", b"p"), 9.0),
        cache.get(("user4", b"p"), 10.0),
        cache.get(("user0", b"p"), 0.0),
    ]
    cache.put(("ab", "c"), "in", 0.0)
    assert cache.get(("a", "bc"), 0.0) is None
    cache.put((None,), "in", 0.0)
    assert cache.get(("",), 0.0) is None


# --- rules ---


async def test_rules_decide_and_superusers_skip_them(start: Start, tmp_path: Path) -> None:
    rules = tmp_path / "acl.conf"
    rules.write_text('{allow, all, publish, ["a/#"]}.')
    node = await start(acl_file=str(rules))
    client = ClientInfo("c1", None, "127.0.0.1")
    assert [True, False] == [node.authorize(client, "publish", topic) for topic in ("a/b", "b")]
    assert not node.authorize(client, "subscribe", "a/b")
    assert 2 == node.counter("publish_denied") + node.counter("subscribe_denied")
    client.superuser = True
    assert node.authorize(client, "subscribe", "#")


@each_case(("no_match", "text", "expected"), [("deny", "x", False), ("allow", "x", True), ("allow", "", False)])
async def test_no_match(start: Start, tmp_path: Path, no_match: str, text: str, expected: bool) -> None:
    rules = tmp_path / "acl.conf"
    rules.write_text('{allow, {user, "x"}, all, all}.' if text else "")
    node = await start(acl_file=str(rules), no_match=no_match)
    assert expected == node.authorize(ClientInfo("c1", None, "127.0.0.1"), "publish", "t")


async def test_commands_to_the_fleet_need_a_rule_as_soon_as_clients_log_in(
    start: Start, file: Path, tmp_path: Path
) -> None:
    """So do rewinds of others' queues. Whatever holds where no rule applies, a rule must allow them."""
    client = ClientInfo("c1", "alice", "127.0.0.1")
    guarded = ("$SDV-FANOUT", "$SDV-FANOUT/trigger", "$SDV-FANOUT/data/x", "$ECQ/rewind/c2")
    free = ("$ECQ/rewind/c1", "$SCQ/rewind/q", "$SDV-FANOUTS", "a", "$SYS/x")

    def answers(node: Any, action: str = "publish", who: ClientInfo = client) -> tuple[set[bool], set[bool]]:
        told = [{node.authorize(who, action, topic) for topic in topics} for topics in (guarded, free)]
        return told[0], told[1]

    rules = tmp_path / "acl.conf"
    node = await start(authentication=[passwords(file)])
    assert ({False}, {True}) == answers(node), "no rules at all"
    assert ({True}, {True}) == answers(node, "subscribe")
    assert ({True}, {True}) == answers(node, who=ClientInfo("c1", "alice", "127.0.0.1", superuser=True))
    rules.write_text('{allow, {user, "x"}, all, all}.')
    node = await start(authentication=[passwords(file)], acl_file=str(rules), no_match="allow")
    assert ({False}, {True}) == answers(node), "no rule applies"
    rules.write_text('{allow, {user, "alice"}, publish, ["$SDV-FANOUT/#", "$ECQ/rewind/c2"]}.')
    node = await start(authentication=[passwords(file)], acl_file=str(rules), no_match="allow")
    assert ({True}, {True}) == answers(node)
    assert ({True}, {True}) == answers(await start()), "nobody logs in: clients of this machine may do everything"


# --- files that are wrong ---


@each_case(
    "options",
    [
        {"acl_file": "BROKEN"},
        {"acl_file": "MISSING"},
        {"authentication": [{"type": "password", "file": "BROKEN"}]},
        {"authentication": [{"type": "password", "file": "MISSING"}]},
        {"authentication": [{"type": "ldap"}]},
        {"authentication": [{"type": "password"}]},
        {"acl": "x"},
        {"anonymous": "maybe"},
        {"bind_client_id": "username"},
        {"bind_client_id": "claim", "authentication": [{"type": "certificate"}]},
    ],
)
async def test_what_is_wrong_keeps_the_plugin_from_starting(start: Start, tmp_path: Path, options: Any) -> None:
    (tmp_path / "BROKEN").write_text("{allow, all")
    text = json.dumps(options).replace("BROKEN", str(tmp_path / "BROKEN")).replace("MISSING", str(tmp_path / "MISSING"))
    with pytest.raises(PluginError):
        await start(**json.loads(text))


async def test_reload_takes_new_files_and_lets_the_broker_check_again(start: Start, file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "acl.conf"
    rules.write_text("{allow, all}.")
    options = {"authentication": [passwords(file)], "acl_file": str(rules), "failure_delay": 0.0}
    node = await start(**options)
    client = ClientInfo("c1", None, "127.0.0.1")
    assert node.authorize(client, "publish", "t")
    rules.write_text("{deny, all}.")
    (tmp_path / "passwords").write_text(f"bob:{CHEAP.hash('b')}\n")
    await node.plugins.reload("access", options)
    assert 1 == node.rechecks
    assert not node.authorize(client, "publish", "t")
    assert isinstance(await node.log_in("bob", "b"), Allow)
    assert isinstance(await node.log_in("alice", "secret"), Deny)


@pytest.mark.parametrize("broken", ["acl.conf", "passwords"])
async def test_reload_of_a_broken_file_keeps_everything(start: Start, file: Path, tmp_path: Path, broken: str) -> None:
    rules = tmp_path / "acl.conf"
    rules.write_text('{allow, {user, "alice"}, all, all}.')
    options = {"authentication": [passwords(file)], "acl_file": str(rules), "failure_delay": 0.0}
    node = await start(**options)
    rules.write_text("{allow, all}.")
    (tmp_path / "passwords").write_text(f"bob:{CHEAP.hash('b')}\n")
    (tmp_path / broken).write_text("{allow, all}. {")
    with pytest.raises(AccessFileError):
        await node.plugins.reload("access", options)
    assert 0 == node.rechecks
    assert isinstance(await node.log_in("alice", "secret"), Allow)
    assert isinstance(await node.log_in("bob", "b"), Deny)
    assert node.authorize(ClientInfo("c", "alice", ""), "publish", "t")
    assert not node.authorize(ClientInfo("c", "bob", ""), "publish", "t")


async def test_a_backend_that_breaks_refuses(start: Start, file: Path) -> None:
    node = await start(authentication=[passwords(file)], anonymous="allow")
    (loaded,) = node.plugins.loaded()
    await loaded.plugin.stop()  # its threads are gone, so nothing can be checked
    assert isinstance(await node.log_in("alice", "secret"), Deny)
