"""Password files: ours, mosquitto's, and broken ones."""

from __future__ import annotations

import asyncio
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import argon2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.errors import AccessFileError
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access import passwords
from motorcade.plugins.access.passwords import PasswordFile
from tests.support.tables import each_case

from .conftest import Start

needs_mosquitto = pytest.mark.skipif(shutil.which("mosquitto_passwd") is None, reason="mosquitto is not installed")
CHEAP = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)  #: for tests that are not about the cost


def verify(file: PasswordFile, user: str, password: bytes) -> bool:
    stored, own = file.stored(user)
    return stored.verify(password) and own


def test_a_password_is_hashed_with_argon2id_of_the_documented_cost(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    assert passwords.set_password(file, "alice", b"secret")
    stored = file.read_text().removeprefix("alice:").strip()
    parameters = argon2.extract_parameters(stored)
    cost = (parameters.type, parameters.memory_cost, parameters.time_cost, parameters.parallelism)
    assert (argon2.Type.ID, 19 * 1024, 2, 1) == cost
    loaded = PasswordFile.load(file)
    assert verify(loaded, "alice", b"secret")
    assert not verify(loaded, "alice", b"Secret")
    assert not verify(loaded, "bob", b"secret")


@needs_mosquitto
@each_case("algorithm", ["sha512-pbkdf2", "sha512"])
def test_files_of_mosquitto_passwd_are_read(tmp_path: Path, algorithm: str) -> None:
    file = tmp_path / "passwords"
    file.touch()
    for user, password in (("alice", "secret"), ("bob", "pä:ss $7$")):
        subprocess.run(["mosquitto_passwd", "-H", algorithm, "-b", file, user, password], check=True)
    assert ("$7$" if algorithm == "sha512-pbkdf2" else "$6$") in file.read_text()
    loaded = PasswordFile.load(file)
    assert verify(loaded, "alice", b"secret")
    assert verify(loaded, "bob", "pä:ss $7$".encode())
    assert not verify(loaded, "bob", b"secret")


@needs_mosquitto
def test_our_changes_leave_lines_of_mosquitto_alone(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("# staff\n")
    subprocess.run(["mosquitto_passwd", "-b", file, "alice", "secret"], check=True)
    before = file.read_text()
    assert passwords.set_password(file, "bob", b"x")
    assert before == file.read_text()[: len(before)]
    assert passwords.delete_user(file, "bob")
    assert before == file.read_text()


def test_the_file_is_for_its_owner_only_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("")
    file.chmod(0o644)
    passwords.set_password(file, "alice", b"x")
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)
    assert [file] == list(tmp_path.iterdir())


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("")
    (tmp_path / "link").symlink_to("real")
    passwords.set_password(tmp_path / "link", "alice", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().startswith("alice:")


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    threads = [threading.Thread(target=passwords.set_password, args=(file, f"u{i}", b"x")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f"u{i}" for i in range(6)} == set(PasswordFile.load(file).users)


@each_case(
    "line",
    [
        "alice",
        "alice:",
        "alice:secret",
        ":$6$YWE=$YWE=",
        "alice:$1$a$b",
        "alice:$7$0$YWJj$" + "A" * 88,
        "alice:$7$99999999999$YWJj$" + "A" * 88,
        "alice:$7$101$YWJj$YWJj",
        "alice:$7$101$YW?j$" + "A" * 88,
        "alice:$6$$" + "A" * 88,
        "alice:$argon2id$v=19$m=19456,t=2,p=1$",
        "alice:$argon2i$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA",
        "alice:$argon2id$v=19$m=99999999,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA",
    ],
)
def test_a_bad_line_is_an_error_and_nobody_gets_in(tmp_path: Path, line: str) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"# staff\nbob:{CHEAP.hash('x')}\n{line}\n")
    with pytest.raises(AccessFileError, match=r"passwords:3: "):
        PasswordFile.load(file)
    before = file.read_bytes()
    with pytest.raises(AccessFileError, match=r"passwords:3: "):
        passwords.set_password(file, "carl", b"x")
    assert before == file.read_bytes()


def test_a_second_line_for_a_user_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"bob:{CHEAP.hash('x')}\nbob:{CHEAP.hash('y')}\n")
    with pytest.raises(AccessFileError, match="passwords:2: user 'bob' is there a second time"):
        PasswordFile.load(file)


@given(st.text(max_size=80))
def test_no_text_is_a_hash_by_accident(text: str) -> None:
    with pytest.raises(ValueError):
        passwords.parse_hash(text)


@each_case("user", ["", "a:b", "#a", "a\nb", " a", "a\0"])
def test_names_that_would_break_the_file_are_refused(tmp_path: Path, user: str) -> None:
    with pytest.raises(AccessFileError):
        passwords.set_password(tmp_path / "passwords", user, b"x")
    assert not (tmp_path / "passwords").exists()


def test_checking_an_unknown_user_is_the_work_of_checking_a_known_one(tmp_path: Path) -> None:
    """Each unknown name stands for one known user, always the same, so its time says nothing."""
    file = tmp_path / "passwords"
    file.write_text(f"bob:{CHEAP.hash('x')}\ncarl:{CHEAP.hash('y')}\n")
    loaded = PasswordFile.load(file)
    picked = {name: loaded.stored(name) for name in map(str, range(50))}
    assert picked == {name: loaded.stored(name) for name in picked}
    assert {(loaded.users["bob"], False), (loaded.users["carl"], False)} == set(picked.values())


# --- behind the hook ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text(f"alice:{CHEAP.hash('secret')}\nroot:{CHEAP.hash('toor')}\n")
    return path


def backend(file: Path, **more: object) -> list[dict[str, object]]:
    return [{"type": "password", "file": str(file)} | more]


async def test_right_wrong_and_unknown(start: Start, file: Path) -> None:
    """Somebody unknown hears exactly what somebody known with a wrong password hears."""
    node = await start(authentication=backend(file, superusers=["root"]))
    right = await node.log_in("alice", "secret")
    assert isinstance(right, Allow)
    assert not right.superuser
    assert (await node.log_in("root", "toor")).superuser
    wrong = await node.log_in("alice", "Secret")
    assert isinstance(wrong, Deny)
    assert wrong == await node.log_in("mallory", "secret")
    assert wrong == await node.log_in("alice", "x" * 5000)


async def test_a_right_password_is_remembered_and_a_wrong_one_is_not(start: Start, file: Path) -> None:
    node = await start(authentication=backend(file, cache_seconds=60))
    (loaded,) = node.plugins.loaded()
    (password,) = loaded.plugin._in_force.chain  # type: ignore[attr-defined]
    await node.log_in("alice", "wrong")
    assert 0 == len(password._cache)
    await node.log_in("alice", "secret")
    assert 1 == len(password._cache)
    assert b"secret" not in repr(password._cache._entries).encode()
    password._threads.shutdown()  # from here on nothing can be hashed any more
    assert (await node.log_in("alice", "secret")).superuser is False
    node.time += 61
    answer = await node.log_in("alice", "secret")  # must be hashed again, which is not possible: refused
    assert "SERVER_BUSY" == answer.reason.name


async def test_too_many_log_ins_at_once_hear_that_the_server_is_busy(start: Start, file: Path) -> None:
    node = await start(authentication=backend(file, workers=1, max_waiting=2))
    (loaded,) = node.plugins.loaded()
    (password,) = loaded.plugin._in_force.chain  # type: ignore[attr-defined]
    gate = threading.Event()
    password._threads.submit(gate.wait)  # the only worker is at work until the gate opens; one check waits behind it
    waiting = [asyncio.create_task(node.log_in("alice", "secret", f"c{i}")) for i in range(3)]
    async with asyncio.timeout(60):
        while password._queue.waiting < 2:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0)
    refused = await node.log_in("alice", "secret", "c4")
    assert "SERVER_BUSY" == refused.reason.name
    gate.set()
    assert [False] * 3 == [answer.superuser for answer in await asyncio.gather(*waiting)]
    assert (0, 0) == (password._queue.running, password._queue.waiting)


async def test_a_reload_ends_no_log_in_that_is_being_checked(start: Start, file: Path) -> None:
    """What has begun is decided by the files it began with; what waits for its turn is to be tried again."""
    node = await start(authentication=backend(file, workers=1))
    (loaded,) = node.plugins.loaded()
    (password,) = loaded.plugin._in_force.chain  # type: ignore[attr-defined]
    gate = threading.Event()
    password._threads.submit(gate.wait)
    begun, waits = (asyncio.create_task(node.log_in("alice", "secret", f"c{i}")) for i in range(2))
    async with asyncio.timeout(60):
        while password._queue.waiting < 1:  # noqa: ASYNC110 - a counter has no event
            await asyncio.sleep(0)
    await node.plugins.reload("access", {"authentication": backend(file, workers=1)})
    gate.set()
    assert isinstance(await begun, Allow)
    assert "SERVER_BUSY" == (await waits).reason.name
