"""Plugins by path from a caller that is not trusted: what is executed is what was opened and checked."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motorcade.core.errors import PluginError
from motorcade.extension import checked
from motorcade.extension.plugin import Plugins
from tests.unit.plugins.hub import MemoryHub

GOOD = "from motorcade.extension.plugin import Plugin\nclass Mine(Plugin):\n    WORD = 'good'\n"
EVIL = GOOD.replace("good", "evil")
STRANGER = 65534


@pytest.fixture
async def plugins(tmp_path: Path) -> AsyncIterator[Plugins]:
    hub = MemoryHub()
    running = Plugins(hub, hub.hooks, tmp_path / "data")
    yield running
    await running.unload_all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    return tmp_path / "plugins"


async def test_a_file_within_the_folder_is_loaded(plugins: Plugins, folder: Path) -> None:
    file = folder / "mine.py"
    file.write_text(GOOD)
    loaded = await plugins.load("mine", path=str(file), within=[str(folder)])
    assert ("good", str(file)) == (loaded.plugin.WORD, loaded.origin)  # type: ignore[attr-defined]


async def test_what_is_executed_is_what_was_checked(
    plugins: Plugins, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file that takes the place of the good one right after the check is not run, and no link is followed."""
    file, evil = folder / "mine.py", folder / "evil.py"
    file.write_text(GOOD)
    evil.write_text(EVIL)
    evil.chmod(0o666)
    check = checked._check  # the moment at which an attacker would strike

    def swapped_afterwards(handle: int, place: Path) -> os.stat_result:
        about = check(handle, place)
        evil.replace(file)
        return about

    monkeypatch.setattr(checked, "_check", swapped_afterwards)
    loaded = await plugins.load("mine", path=str(file), within=[str(folder)])
    assert "good" == loaded.plugin.WORD  # type: ignore[attr-defined]
    monkeypatch.undo()
    resolve = Path.resolve

    def swapped_for_a_link(self: Path, strict: bool = False) -> Path:
        place = resolve(self, strict)
        if self == file:
            file.unlink()
            file.symlink_to("/etc/hostname")
        return place

    monkeypatch.setattr(Path, "resolve", swapped_for_a_link)
    with pytest.raises(PluginError, match="no plugin at"):
        await plugins.load("again", path=str(file), within=[str(folder)])


async def test_only_listed_folders_are_open(plugins: Plugins, folder: Path, tmp_path: Path) -> None:
    """Not another one, not one reached by a link or by dots, and none if none is listed."""
    outside = tmp_path / "outside.py"
    outside.write_text(GOOD)
    (folder / "link.py").symlink_to(outside)
    for path in (outside, folder / "link.py", folder / ".." / "outside.py"):
        with pytest.raises(PluginError, match=r"http\.plugin_paths"):
            await plugins.load("mine", path=str(path), within=[str(folder)])
    with pytest.raises(PluginError, match=r"is off.*http\.plugin_paths"):
        await plugins.load("mine", path=str(outside), within=[])


async def test_what_others_could_have_written_is_refused(plugins: Plugins, folder: Path) -> None:
    """The file itself, a folder above it, a module of a package."""
    file = folder / "deep" / "mine.py"
    file.parent.mkdir()
    file.write_text(GOOD)
    file.chmod(0o666)
    with pytest.raises(PluginError, match=r"mine\.py can be written by every user \(mode 666\)"):
        await plugins.load("mine", path=str(file), within=[str(folder)])
    file.chmod(0o600)
    file.parent.chmod(0o777)
    with pytest.raises(PluginError, match="deep can be written by every user"):
        await plugins.load("mine", path=str(file), within=[str(folder)])
    file.parent.chmod(0o1777)  # a folder such as /tmp: each has its own files there
    await plugins.load("mine", path=str(file), within=[str(folder)])
    if os.geteuid() == 0:  # only root can give files away
        os.chown(file, STRANGER, STRANGER)
        with pytest.raises(PluginError, match="belongs to another user"):
            await plugins.load("theirs", path=str(file), within=[str(folder)])
    os.mkfifo(folder / "pipe.py")
    with pytest.raises(PluginError, match="no plugin at"):
        await plugins.load("pipe", path=str(folder / "pipe.py"), within=[str(folder)])


async def test_modules_of_a_package_are_checked_and_read_at_once(plugins: Plugins, folder: Path) -> None:
    """What is imported later is what was read with the package, and nothing that came beside it since."""
    package = folder / "pack"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "late.py").write_text("WORD = 'good'\n")
    work = "    def late(self):\n        from .inner.late import WORD\n        return WORD\n"
    work += "    def beside(self):\n        from . import beside\n        return beside\n"
    (package / "__init__.py").write_text(GOOD + work)
    loaded = await plugins.load("pack", path=str(package), within=[str(folder)])
    (package / "inner" / "late.py").write_text("WORD = 'evil'\n")
    (package / "beside.py").write_text("WORD = 'evil'\n")
    assert "good" == loaded.plugin.late()  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        loaded.plugin.beside()  # type: ignore[attr-defined]
    await plugins.unload("pack")
    (package / "beside.py").chmod(0o666)
    with pytest.raises(PluginError, match=r"beside\.py can be written by every user"):
        await plugins.load("pack", path=str(package), within=[str(folder)])
    (package / "beside.py").unlink()
    (package / "beside.py").symlink_to("/etc/hostname")
    with pytest.raises(PluginError, match=r"beside\.py is a link"):
        await plugins.load("pack", path=str(package), within=[str(folder)])
