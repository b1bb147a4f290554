"""Finding, loading, configuring, reloading and unloading plugins, and what stays behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motorcade import tasks
from motorcade.core.errors import PluginError
from motorcade.extension.hooks import POINTS
from motorcade.extension.plugin import Plugins, available
from motorcade.tasks import Tasks
from tests.support.tables import each_case
from tests.unit.plugins.hub import MemoryHub

GREETER = """
from typing import ClassVar
import msgspec
from motorcade.core.errors import ConfigError
from motorcade.extension.plugin import Plugin, hook

class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    greeting: str = "hello"
    limit: int = 3

class Greeter(Plugin):
    Config: ClassVar = Config
    VERSION = 1

    async def start(self):
        self.stopped = False
        self.context.spawn(self.wait(), "wait")

    async def wait(self):
        import asyncio
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.context.counters["cancelled"] += 1
            raise

    async def reload(self, config):
        if config.limit > 100:
            raise ConfigError("limit: at most 100")
        await super().reload(config)

    async def stop(self):
        self.stopped = True

    @hook("client.connected", priority=7)
    def connected(self, client):
        self.context.counters["connected"] += 1

    @hook("message.publish", topics=["a/#"])
    @hook("client.disconnected")
    def both(self, *args):
        return None
"""


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def plugins(hub: MemoryHub, tmp_path: Path) -> AsyncIterator[Plugins]:
    running = Plugins(hub, hub.hooks, tmp_path / "data")
    yield running
    await running.unload_all()


def written(folder: Path, text: str, name: str = "greeter.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def callbacks(hub: MemoryHub) -> list[str]:
    return [point for point in POINTS for _ in hub.hooks.lookup(point)]


def modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("motorcade_plugin_")}


def tasks_of(name: str) -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(f"{name}.")]


# --- finding ------------------------------------------------------------------------------------------------------


async def test_by_entry_point(plugins: Plugins) -> None:
    loaded = await plugins.load("retained")
    assert "motorcade.plugins.retained:RetainedPlugin" == loaded.origin == available()["retained"]
    assert ["retained"] == [p.name for p in plugins.loaded()]


async def test_by_the_path_of_a_file(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    """Marked methods are registered with what the mark says; one method may serve two points."""
    path = written(tmp_path, GREETER)
    loaded = await plugins.load("greeter", {"greeting": "hi"}, path)
    assert (path, "hi", 3) == (loaded.origin, loaded.plugin.config.greeting, loaded.plugin.config.limit)
    assert ["client.connected", "client.disconnected", "message.publish"] == sorted(callbacks(hub))
    (connected,) = hub.hooks.lookup("client.connected")
    (publish,) = hub.hooks.lookup("message.publish")
    assert (7, "greeter") == (connected.priority, connected.owner)
    assert ("a/#",) == publish.topics
    assert tmp_path / "data" / "greeter" == loaded.context.data


async def test_by_the_path_of_a_package_folder(plugins: Plugins, tmp_path: Path) -> None:
    """With modules of its own, imported relatively."""
    written(tmp_path, "from .work import Greeter as Base\nclass Mine(Base):\n    pass\n", "pack/__init__.py")
    written(tmp_path, GREETER.replace("class Greeter", "WORD = 'deep'\nclass Greeter"), "pack/work.py")
    with pytest.raises(PluginError, match="exactly one subclass"):
        await plugins.load("two", path=str(tmp_path / "pack"))
    written(tmp_path, "from .work import Greeter\nfrom . import work\n", "pack/__init__.py")
    loaded = await plugins.load("pack", path=str(tmp_path / "pack"))
    assert ("Greeter", str(tmp_path / "pack")) == (type(loaded.plugin).__name__, loaded.origin)


@pytest.fixture
def bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python write bytecode beside sources, as it does outside of tests."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)


async def test_an_edited_file_is_read_again(plugins: Plugins, tmp_path: Path, bytecode: None) -> None:
    """Even if it was edited within the second, and to the same length."""
    for version in (1, 2, 3):
        path = written(tmp_path, GREETER.replace("VERSION = 1", f"VERSION = {version}"))
        loaded = await plugins.load("greeter", path=path)
        assert version == loaded.plugin.VERSION  # type: ignore[attr-defined]
        await plugins.unload("greeter")


async def test_an_edited_module_of_a_package_is_read_again(plugins: Plugins, tmp_path: Path, bytecode: None) -> None:
    written(tmp_path, "from .work import Greeter\n", "pack/__init__.py")
    for version in (1, 2):
        written(tmp_path, GREETER.replace("VERSION = 1", f"VERSION = {version}"), "pack/work.py")
        loaded = await plugins.load("pack", path=str(tmp_path / "pack"))
        assert version == loaded.plugin.VERSION  # type: ignore[attr-defined]
        await plugins.unload("pack")


@each_case(
    ("text", "told"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import there_is_no_such_module\n", "there_is_no_such_module"),
        ("raise RuntimeError('at import')\n", "at import"),
        ("value = 1\n", "exactly one subclass of Plugin, it defines 0"),
        (GREETER + "\nclass Other(Plugin):\n    pass\n", "exactly one subclass of Plugin, it defines 2"),
        ("from motorcade.plugins.retained import RetainedPlugin\n", "it defines 0"),
    ],
)
async def test_what_cannot_be_a_plugin(plugins: Plugins, hub: MemoryHub, tmp_path: Path, text: str, told: str) -> None:
    """The message tells why, and nothing stays behind."""
    before = modules()
    with pytest.raises(PluginError, match=told):
        await plugins.load("broken", path=written(tmp_path, text))
    assert ([], [], before) == (plugins.loaded(), callbacks(hub), modules())


async def test_names_and_paths_that_do_not_exist(plugins: Plugins, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"no plugin 'nothing'.*retained"):
        await plugins.load("nothing")
    with pytest.raises(PluginError, match="there is no plugin at"):
        await plugins.load("nothing", path=str(tmp_path / "nothing.py"))
    with pytest.raises(PluginError, match="'nothing' is not loaded"):
        await plugins.unload("nothing")
    with pytest.raises(PluginError, match="'nothing' is not loaded"):
        await plugins.reload("nothing", {})


async def test_a_name_is_loaded_once(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    path = written(tmp_path, GREETER)
    await plugins.load("greeter", path=path)
    with pytest.raises(PluginError, match="loaded already"):
        await plugins.load("greeter", path=path)
    await plugins.load("second", path=path)
    assert 6 == len(callbacks(hub))


# --- configuration ------------------------------------------------------------------------------------------------


@each_case(
    ("config", "told"), [({"greting": "x"}, "greting"), ({"limit": "many"}, "limit"), ({"greeting": 1}, "greeting")]
)
async def test_a_wrong_key_is_named(
    plugins: Plugins, hub: MemoryHub, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    with pytest.raises(PluginError, match=rf"'greeter'.*{told}"):
        await plugins.load("greeter", config, written(tmp_path, GREETER))
    assert ([], []) == (plugins.loaded(), callbacks(hub))


async def test_a_plugin_without_options_takes_none(plugins: Plugins, tmp_path: Path) -> None:
    text = "from motorcade.extension.plugin import Plugin\nclass Bare(Plugin):\n    pass\n"
    with pytest.raises(PluginError, match="speed"):
        await plugins.load("bare", {"speed": 1}, written(tmp_path, text))
    assert "bare" == (await plugins.load("bare", {}, written(tmp_path, text))).name


async def test_reload_takes_the_new_or_keeps_the_old(plugins: Plugins, tmp_path: Path) -> None:
    """A configuration that is refused, by its type or by the plugin, changes nothing."""
    loaded = await plugins.load("greeter", {"limit": 5}, written(tmp_path, GREETER))
    plugin = loaded.plugin
    await plugins.reload("greeter", {"limit": 6})
    assert 6 == plugin.config.limit
    with pytest.raises(PluginError, match="limt"):
        await plugins.reload("greeter", {"limt": 7})
    with pytest.raises(Exception, match="at most 100"):
        await plugins.reload("greeter", {"limit": 101})
    assert 6 == plugin.config.limit
    assert [loaded] == plugins.loaded()


# --- starting and stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "self.stopped = False",
            "self.context.spawn(self.wait(), 'early'); raise OSError('port is taken')",
            "port is taken",
        ),
        (
            "self.stopped = False",
            "self.context.spawn(self.wait(), 'early'); raise ConfigError('file is missing')",
            "missing",
        ),
        ('@hook("client.disconnected")', '@hook("client.disconected")', r"client\.disconected"),
        ('topics=["a/#"]', 'topics=["#/a"]', "last level"),
        ("def connected(self", "async def connected(self", "plain function"),
        ('@hook("client.disconnected")', '@hook("message.publish")', "already"),
    ],
)
async def test_a_plugin_that_fails_to_start_leaves_nothing_behind(
    plugins: Plugins, hub: MemoryHub, tmp_path: Path, old: str, new: str, told: str
) -> None:
    """Neither callbacks nor tasks, whether its start() or one of its marks was wrong."""
    assert old in GREETER
    with pytest.raises(PluginError, match=rf"(?s)'greeter'.*{told}"):
        await plugins.load("greeter", {}, written(tmp_path, GREETER.replace(old, new)))
    assert ([], [], []) == (plugins.loaded(), callbacks(hub), tasks_of("greeter"))
    await plugins.load("greeter", {}, written(tmp_path, GREETER))


async def test_unloading_cancels_tasks_and_removes_callbacks(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    loaded = await plugins.load("greeter", {}, written(tmp_path, GREETER))
    await asyncio.sleep(0)
    assert ["greeter.wait"] == tasks_of("greeter")
    await plugins.unload("greeter")
    assert ([], [], []) == (plugins.loaded(), callbacks(hub), tasks_of("greeter"))
    assert loaded.plugin.stopped is True  # type: ignore[attr-defined]
    assert 1 == loaded.context.counters["cancelled"]


async def test_nothing_of_a_plugin_loaded_by_path_outlives_it(plugins: Plugins, tmp_path: Path) -> None:
    """Neither its modules nor its class stay in the process, however it ended; the same for one that never started."""
    before = (modules(), set(sys.path_importer_cache))
    written(tmp_path, "from .work import Greeter\n", "pack/__init__.py")
    written(tmp_path, GREETER, "pack/work.py")
    classes = []
    for number, (path, within) in enumerate(
        (
            (written(tmp_path, GREETER), None),
            (written(tmp_path, GREETER.replace("self.stopped = True", "raise RuntimeError"), "bad.py"), None),
            (str(tmp_path / "pack"), None),
            (str(tmp_path / "pack"), (str(tmp_path),)),
        )
    ):
        loaded = await plugins.load(f"greeter-{number}", {}, path, within=within)
        classes.append(weakref.ref(type(loaded.plugin)))
        assert modules() != before[0]
        with contextlib.suppress(PluginError):
            await plugins.unload(f"greeter-{number}")
        del loaded
    failing = written(tmp_path, GREETER.replace("self.stopped = False", "raise RuntimeError"))
    for config in ({}, {"limit": "many"}):
        with pytest.raises(PluginError):
            await plugins.load("greeter", config, failing)
    assert before == (modules(), set(sys.path_importer_cache))
    gc.collect()
    assert [None] * 4 == [each() for each in classes]


async def test_a_stop_that_raises_still_takes_everything_away(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    """Whoever asked hears of it; the name is free again."""
    text = GREETER.replace("self.stopped = True", "raise RuntimeError('stuck')")
    await plugins.load("greeter", {}, written(tmp_path, text))
    with pytest.raises(Exception, match="stuck"):
        await plugins.unload("greeter")
    assert ([], [], []) == (plugins.loaded(), callbacks(hub), tasks_of("greeter"))


async def test_all_are_unloaded_though_one_fails(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    order: list[str] = []
    for name in ("one", "two", "three"):
        text = GREETER.replace("self.stopped = True", "self.note(self.context.name)")
        loaded = await plugins.load(name, {}, written(tmp_path, text, f"{name}.py"))

        def note(which: str) -> None:
            order.append(which)
            if which == "two":
                raise RuntimeError("stuck")

        loaded.plugin.note = note  # type: ignore[attr-defined]
    await plugins.unload_all()
    assert ["three", "two", "one"] == order, "last loaded first"
    assert ([], []) == (plugins.loaded(), callbacks(hub))


async def test_a_plugin_that_fails_to_tell_its_figures_spoils_no_others(plugins: Plugins, tmp_path: Path) -> None:
    """They are asked for the statistics of the whole node."""
    lines = [f"    def {name}(self):\n        return 1 / 0\n" for name in ("gauges", "history", "metrics", "tables")]
    loaded = await plugins.load("greeter", path=written(tmp_path, GREETER + "\n" + "\n".join(lines)))
    assert (0, {}) == (plugins.history(), plugins.gauges())
    assert [] == loaded.tables() and isinstance(loaded.metrics({}), list)
    assert 4 == loaded.context.counters["gauges_failed"]


async def test_a_task_that_fails_is_counted(plugins: Plugins, tmp_path: Path) -> None:
    text = GREETER.replace("await asyncio.Event().wait()", "raise OSError('gone')")
    loaded = await plugins.load("greeter", {}, written(tmp_path, text))
    for _ in range(10):
        await asyncio.sleep(0)
    assert 1 == loaded.context.counters["task_failed"]
    assert not loaded.context.tasks


async def test_a_task_given_as_a_function_is_run_again_until_the_plugin_is_unloaded(
    hub: MemoryHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node knows that it stands still, and by which name."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE", 0.001)
    supervisor = Tasks()
    plugins = Plugins(hub, hub.hooks, tmp_path / "data", tasks=supervisor)
    text = GREETER.replace("await asyncio.Event().wait()", "raise OSError('gone')").replace("self.wait()", "self.wait")
    loaded = await plugins.load("greeter", {}, written(tmp_path, text))
    async with asyncio.timeout(60):
        while loaded.context.counters["task_failed"] < 3:  # noqa: ASYNC110 - each comes after a pause
            await asyncio.sleep(0.001)
    assert supervisor.failures["greeter.wait"] >= 3
    (standing,) = supervisor.standing_still()
    assert ("greeter.wait", "OSError: gone") == (standing.name, standing.error)
    await plugins.unload("greeter")
    assert not supervisor.standing_still() and not loaded.context.tasks


async def test_loading_and_unloading_at_the_same_time(plugins: Plugins, hub: MemoryHub, tmp_path: Path) -> None:
    """One after the other: the second load of a name is refused, the unload finds what was loaded."""
    path = written(tmp_path, GREETER)
    results = await asyncio.gather(
        plugins.load("greeter", {}, path),
        plugins.load("greeter", {}, path),
        plugins.unload("greeter"),
        return_exceptions=True,
    )
    assert [False, True, False] == [isinstance(result, PluginError) for result in results]
    assert ([], []) == (plugins.loaded(), callbacks(hub))
