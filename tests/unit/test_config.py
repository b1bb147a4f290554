"""Where values come from, what is refused, and how the refusal reads."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import pytest

from motorcade import config
from motorcade.config import ListenAddress, LoadedConfig, PluginSetting
from motorcade.core.errors import ConfigError
from motorcade.extension.declared import BadOptionsError, Name
from motorcade.extension.plugin import GROUP, Plugin
from tests.support.node import ROOT
from tests.support.tables import each_case

Read = Callable[..., LoadedConfig]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """`read(toml text, environment, command line)`; the file is motorcade.toml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def read_(
        text: str = "", environ: dict[str, str] | None = None, overrides: dict[str, object] | None = None
    ) -> LoadedConfig:
        Path("motorcade.toml").write_text(text)
        return config.load(Path("motorcade.toml"), environ or {}, overrides or {})

    return read_


def test_without_anything_only_loopback_is_bound() -> None:
    """The default configuration listens on no address that another machine can reach."""
    loaded = config.load(None, {}, {})
    listeners = loaded.config.listeners
    assert [ListenAddress("127.0.0.1", 1883)] == config.addresses(listeners.tcp.bind)
    assert [ListenAddress("127.0.0.1", 8083)] == config.addresses(listeners.ws.bind)
    assert [] == config.addresses(listeners.tls.bind) + config.addresses(listeners.wss.bind)
    assert [ListenAddress("127.0.0.1", 18083)] == config.addresses(loaded.config.http.bind)
    assert {"default"} == {origin for _, _, origin in loaded.entries()}


def test_the_stronger_source_wins_and_is_named(read: Read) -> None:
    """Command line over environment over file over default, each value with its origin."""
    loaded = read(
        '[session]\nwindow = 1\nqueue = 2\n\n[listeners]\ntcp.bind = "127.0.0.1:1"\n',
        {"MOTORCADE_SESSION__WINDOW": "10", "MOTORCADE_LISTENERS__TCP__BIND": "127.0.0.1:2"},
        {"listeners.tcp.bind": "127.0.0.1:3"},
    )
    assert (10, 2) == (loaded.config.session.window, loaded.config.session.queue)
    assert "127.0.0.1:3" == loaded.config.listeners.tcp.bind
    assert "environment MOTORCADE_SESSION__WINDOW" == loaded.origin("session.window")
    assert "file motorcade.toml:3" == loaded.origin("session.queue")
    assert "command line --mqtt" == loaded.origin("listeners.tcp.bind")
    assert "default" == loaded.origin("session.queue_bytes")


@each_case(
    ("text", "wanted"),
    [
        ("[session]\nwindow = 5\nqueu = 5\n", "motorcade.toml:3: unknown key 'session.queu'; did you mean 'queue'?"),
        ("# head\n\n[sesion]\nwindow = 5\n", "motorcade.toml:3: unknown key 'sesion'; did you mean 'session'?"),
        ("[session]\nwindow = 'a'\n", "motorcade.toml:2: session.window = 'a': Expected int, got str"),
        ("[limits]\nallow = [1]\n", "motorcade.toml:2: limits.allow = [1]: Expected str, got int"),
        ("[session]\nwindow = 0\n", "motorcade.toml:2: session.window: 0 must be between 1 and 65535"),
        ("[limits]\nbyte_rate = -1\n", "motorcade.toml:2: limits.byte_rate: -1.0 must be at least 0"),
        ("session = 3\n", "motorcade.toml:1: [session] is a section; write keys below it"),
        ("[plugins]\nretained = 1\n", "motorcade.toml:2: plugins.retained must be a section [plugins.retained]"),
        ("[plugins.x]\nenabled = 1\n", "motorcade.toml:2: plugins.x.enabled = 1: Expected bool, got int"),
        ("[http]\nbind = '0.0.0.0:1'\n", "motorcade.toml:2: http.bind: '0.0.0.0:1' can be reached from outside"),
        ("[listeners.tcp]\nbind = '1883'\n", "motorcade.toml:2: listeners.tcp.bind: '1883' is not an address"),
        ("[listeners.tcp]\nbind = 'a:99999'\n", "motorcade.toml:2: listeners.tcp.bind: 'a:99999' is not an address"),
        ("[listeners.tls]\nbind = '*:8883'\n", "motorcade.toml:1: listeners.tls: needs 'certificate'"),
        ("[limits]\n\n\ndeny = ['10.0.0.0/33']\n", "motorcade.toml:4: limits.deny: '10.0.0.0/33'"),
        ("[limits]\nwrite_high = 1\n", "limits.write_low: must not be above limits.write_high (1)"),
        ("[session]\nshared_strategy = 'rand'\n", "motorcade.toml:2: session.shared_strategy: unknown strategy 'rand'"),
        ("[store]\nurl = 'sqlite://x'\n", "motorcade.toml:2: store.url: 'sqlite://x' does not name a store"),
        ("[cluster]\nbind = '7946'\n", "motorcade.toml:2: cluster.bind: '7946' is not an address"),
        ("[cluster]\nbind = '*:7946'\n", "motorcade.toml:2: cluster.bind: '*:7946' is every interface: say in"),
        ("[cluster]\nadvertise = '*:7946'\n", "cluster.advertise: '*:7946' does not say where"),
        ("[cluster]\nbind = '10.0.0.1:7946'\n", "cluster.bind: '10.0.0.1:7946' can be reached from outside"),
        (
            "[cluster]\nbind = '198.41.0.4:7946'\nsecret_file = 'x'\n",
            "motorcade.toml:2: cluster.bind: '198.41.0.4:7946' may be reached over networks that are not private",
        ),
        ("[cluster]\nkey = 'k.pem'\n", "motorcade.toml:2: cluster.key: a certificate and its key go together"),
        ("[cluster]\nca = 'ca.pem'\n", "motorcade.toml:2: cluster.ca: a node that asks others for a certificate"),
        (
            "[cluster]\naddressed = ['agent/VIN/#']\n",
            "motorcade.toml:2: cluster.addressed: 'agent/VIN/#' must have the level {client} once, for the id of the",
        ),
        ("[cluster]\naddressed = ['{client}/#', '$a/{client}']\n", "cluster.addressed: '$a/{client}' begins with $"),
        (f"[cluster]\naddressed = {['a/{client}'] * 17}\n", "cluster.addressed: there may be 16 patterns, not 17"),
        ("[cluster]\nlease = 4\n", "cluster.view_lease: 5 must be more than cluster.lease + 1, which is 5"),
        ("[cluster]\npatience = 0\n", "motorcade.toml:2: cluster.patience = 0"),
        ("[session]\n\nwindow = = 1\n", "motorcade.toml:3: not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_file_line_and_key(read: Read, text: str, wanted: str) -> None:
    """A person can go straight to the line."""
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert wanted in str(caught.value)


def test_links_between_machines_need_a_secret_and_beyond_private_networks_tls(read: Read) -> None:
    """And on loopback neither."""
    for good in (
        "bind = '127.0.0.1:7946'",
        "bind = '10.0.0.1:7946'\nsecret_file = 's'",
        "bind = '198.41.0.4:7946'\nsecret_file = 's'\nplain = true",
        "bind = '*:7946'\nadvertise = 'a.example:7946'\ncertificate = 'c'\nkey = 'k'\nca = 'a'",
    ):
        read(f"[cluster]\n{good}\n")


def test_a_line_is_found_below_things_that_only_look_like_keys(read: Read) -> None:
    """Keys inside strings that go on over lines, and of other sections, do not lead astray."""
    text = '[broker]\nnode = """\nwindow = 1\n"""\n[plugins.x]\nwindow = 1\n["session"]\n"window" = "no"\n'
    with pytest.raises(ConfigError, match=r"motorcade.toml:8: session.window"):
        read(text)


def test_an_inline_table_is_named_by_its_line(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"motorcade.toml:2: unknown key 'session.windo'; did you mean 'window'"):
        read("\nsession = { windo = 3 }\n")


@each_case(
    ("variable", "value", "wanted"),
    [
        ("MOTORCADE_SESION__WINDOW", "1", "environment MOTORCADE_SESION__WINDOW: unknown key 'sesion'"),
        ("MOTORCADE_SESSION__WINDOW", "many", "environment MOTORCADE_SESSION__WINDOW: session.window = 'many'"),
        ("MOTORCADE_SESSION____WINDOW", "1", "environment MOTORCADE_SESSION____WINDOW: an empty part"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, {variable: value}, {})
    assert wanted in str(caught.value)


def test_variables_are_toml_if_they_can_be() -> None:
    """Lists, numbers and truth values are read as TOML; other text, and text that looks like a number, is text."""
    loaded = config.load(
        None,
        {
            "MOTORCADE_LISTENERS__TCP__BIND": '["127.0.0.1:1", "[::1]:2"]',
            "MOTORCADE_SESSION__STORE_QOS0": "true",
            "MOTORCADE_BROKER__NODE": "7",
            "MOTORCADE_PLUGINS__X__LEVEL": "3",
            "MOTORCADE_CONFIG": "no section, so no key",
        },
        {},
    )
    assert [ListenAddress("127.0.0.1", 1), ListenAddress("::1", 2)] == config.addresses(
        loaded.config.listeners.tcp.bind
    )
    assert loaded.config.session.store_qos0 is True
    assert "7" == loaded.config.broker.node
    assert {"level": 3} == loaded.config.plugins["x"]


def test_a_file_reference_is_read_and_shown_as_a_reference(read: Read) -> None:
    """Secrets can live in files, and `config show` never shows them."""
    Path("secret").write_text("hush\n")
    loaded = read(
        "[plugins.x]\nurl = 'file://secret'\n[plugins.y]\ntoken = 'plain'\nusers = [{ password = 'p', name = 'n' }]\n"
    )
    assert "hush" == loaded.config.plugins["x"]["url"]
    shown = {key: value for key, value, _ in loaded.entries()}
    assert "file://secret" == shown["plugins.x.url"]
    assert "***" == shown["plugins.y.token"]
    assert [{"password": "***", "name": "n"}] == shown["plugins.y.users"]


def test_a_missing_secret_file_is_an_error(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"motorcade.toml:2: plugins.x.secret: cannot read file://nowhere"):
        read("[plugins.x]\nsecret = 'file://nowhere'\n")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*no\.toml"):
        config.load(tmp_path / "no.toml", {}, {})


def test_reading_again_sees_the_changed_file_and_the_same_command_line(read: Read) -> None:
    loaded = read("[session]\nwindow = 1\nqueue = 1\n", {"MOTORCADE_SESSION__QUEUE": "9"}, {"broker.node": "a"})
    Path("motorcade.toml").write_text("[session]\nwindow = 2\n")
    again = loaded.again().config
    assert (2, 9, "a") == (again.session.window, again.session.queue, again.broker.node)


def test_built_in_plugins_are_on_and_access_comes_first(read: Read) -> None:
    """`enabled` and `path` are for the loader; everything else is the plugin's own."""
    loaded = read(
        "[plugins.mine]\npath = 'mine.py'\nlevel = 3\n"
        "[plugins.systopics]\nenabled = false\n"
        "[plugins.access]\nno_match = 'allow'\n"
    )
    wanted = [
        PluginSetting("access", None, {"no_match": "allow"}),
        *(PluginSetting(name, None, {}) for name in config.DEFAULT_PLUGINS if name != "systopics"),
        PluginSetting("mine", "mine.py", {"level": 3}),
    ]
    assert wanted == config.plugins_to_load(loaded.config)


@each_case(
    ("text", "wanted"),
    [
        (
            "[plugins.access]\nno_mach = 'deny'\n",
            "motorcade.toml:2: unknown key 'plugins.access.no_mach'; did you mean 'no_match'?",
        ),
        ("[plugins.access]\nno_match = 'maybe'\n", "motorcade.toml:2: plugins.access.no_match = 'maybe'"),
        (
            "[plugins.queues.queue.jobs]\ntopics = ['jobs/#']\nkind = 'last_value'\nkey = 'colour'\n",
            "motorcade.toml:4: plugins.queues.queue.jobs.key: 'colour' is none of",
        ),
        (
            "[plugins.streams.stream.log]\ntopics = ['log/#/x']\n",
            "motorcade.toml:2: plugins.streams.stream.log.topics: 'log/#/x': '#' must be the last level",
        ),
        (
            "[plugins.streams.stream.log]\nretension = 5\n",
            "motorcade.toml:2: unknown key 'plugins.streams.stream.log.retension'; did you mean 'retention'?",
        ),
        (
            "[plugins.capture.rule.copy]\ntopics = ['a']\n\nto = 'nowhere'\n",
            "motorcade.toml:4: plugins.capture.rule.copy.to: 'nowhere' is no target",
        ),
        (
            "[plugins.acess]\nno_match = 'deny'\n",
            "motorcade.toml:1: there is no plugin 'acess'; did you mean 'access'?",
        ),
    ],
)
def test_tables_of_installed_plugins_are_checked_with_their_lines(read: Read, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.check_plugins(read(text))
    assert wanted in str(caught.value)


def test_good_plugin_tables_pass(read: Read) -> None:
    config.check_plugins(read("[plugins.access]\n[[plugins.access.authentication]]\ntype = 'password'\nfile = 'x'\n"))


def test_an_empty_plugin_section_passes(read: Read) -> None:
    config.check_plugins(read("[plugins.retained]\n"))


# -- tables by name


class BoxOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topics: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]  #: what falls into it
    kind: Literal["wooden", "tin"] = "wooden"  #: of what it is
    max_messages: Annotated[int, msgspec.Meta(ge=0)] = 10_000  #: then it is shut
    token: int = 0  #: sounds secret

    def __post_init__(self) -> None:
        if self.kind == "tin" and self.max_messages > 100_000:
            raise ValueError("max_messages: a tin box is small")


class BoxesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    box: dict[Name, BoxOptions] = {}  #: boxes by name

    def __post_init__(self) -> None:
        for name, options in self.box.items():
            if name in options.topics:
                raise BadOptionsError(f"box {name!r}: topics: a box cannot be in itself")
            if options.max_messages == 13 and "lucky" not in self.box:
                raise BadOptionsError(f"box {name!r}: there must be a box 'lucky'")


class BoxesPlugin(Plugin):
    """Boxes."""

    Config: ClassVar[type[msgspec.Struct]] = BoxesConfig


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin with such tables is installed."""
    installed = list(importlib.metadata.entry_points(group=GROUP))
    entry = importlib.metadata.EntryPoint("boxes", "tests.unit.test_config:BoxesPlugin", GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [*installed, entry])


@each_case(
    ("text", "wanted"),
    [
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\nmax_mesages = 5\n",
            "motorcade.toml:3: unknown key 'plugins.boxes.box.a.max_mesages'; did you mean 'max_messages'?",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\n[plugins.boxes.box.b]\ntopics = 'a'\n",
            "motorcade.toml:4: plugins.boxes.box.b.topics = 'a': Expected array, got str",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\nkind = 'paper'\n",
            "motorcade.toml:3: plugins.boxes.box.a.kind = 'paper': must be one of 'wooden', 'tin'",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\nkind = 'tin'\nmax_messages = 1_000_000\n",
            "motorcade.toml:4: plugins.boxes.box.a.max_messages: a tin box is small",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\n\n[plugins.boxes.box.b]\n",
            "motorcade.toml:4: [plugins.boxes.box.b]: topics must be given",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['b']\n[plugins.boxes.box.b]\nkind = 'tin'\ntopics = ['b']\n",
            "motorcade.toml:5: plugins.boxes.box.b.topics: a box cannot be in itself",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['b']\n[plugins.boxes.box.b]\nmax_messages = 13\ntopics = ['a']\n",
            "motorcade.toml:3: [plugins.boxes.box.b]: there must be a box 'lucky'",
        ),
        ("[plugins.boxes.box.-x]\ntopics = ['a']\n", "motorcade.toml:1: box name '-x': letters, digits"),
        ('[plugins.boxes.box."a b"]\ntopics = ["a"]\n', "motorcade.toml:1: box name 'a b': letters, digits"),
        (
            "[plugins.boxes.box]\na = 3\n",
            "motorcade.toml:2: plugins.boxes.box.a must be a section [plugins.boxes.box.a]",
        ),
        (
            "[plugins.boxes]\nbox = 3\n",
            "motorcade.toml:2: plugins.boxes.box must be a section [plugins.boxes.box.NAME]",
        ),
        (
            "[plugins.boxes.boxx.a]\ntopics = ['a']\n",
            "motorcade.toml:2: unknown key 'plugins.boxes.boxx'; did you mean 'box'?",
        ),
        (
            "[plugins.boxes.box.a]\ntopics = ['a']\n[plugins.boxes.box.a.b]\nc = 1\n",
            "motorcade.toml:3: unknown key 'plugins.boxes.box.a.b'",
        ),
        (
            '[plugins.boxes.box."a.b"]\ntopics = ["a"]\nkin = 1\n',
            """motorcade.toml:3: unknown key 'plugins.boxes.box."a.b".kin'; did you mean 'kind'?""",
        ),
    ],
)
def test_what_is_wrong_with_a_named_table_is_told_with_its_line(
    read: Read, boxes: None, text: str, wanted: str
) -> None:
    """Unknown keys, wrong values, what is missing and what does not go together, each where it stands."""
    with pytest.raises(ConfigError) as caught:
        config.check_plugins(read(text))
    assert wanted in str(caught.value)


def test_named_tables_pass_and_are_shown(read: Read, boxes: None) -> None:
    """From the file and from variables; a name that TOML cannot write bare stands in quotes."""
    text = "[plugins.boxes.box.a]\ntopics = ['a/#']\n[plugins.boxes.box.'b.c']\ntopics = ['b']\n[plugins.boxes.box]\n"
    environ = {"MOTORCADE_PLUGINS__BOXES__BOX__D__TOPICS": '["d/#"]', "MOTORCADE_PLUGINS__BOXES__BOX__A__KIND": "tin"}
    loaded = read(text, environ)
    config.check_plugins(loaded)
    shown = {key: (value, origin) for key, value, origin in loaded.entries() if key.startswith("plugins.")}
    assert {
        "plugins.boxes.box.a.topics": (["a/#"], "file motorcade.toml:2"),
        'plugins.boxes.box."b.c".topics': (["b"], "file motorcade.toml:4"),
        "plugins.boxes.box.d.topics": (["d/#"], "environment MOTORCADE_PLUGINS__BOXES__BOX__D__TOPICS"),
        "plugins.boxes.box.a.kind": ("tin", "environment MOTORCADE_PLUGINS__BOXES__BOX__A__KIND"),
    } == shown
    written = "\n".join(f"{key} = {config.toml(value)}" for key, (value, _) in shown.items())
    assert loaded.config.plugins == tomllib.loads(written)["plugins"]


def test_reading_again_checks_named_tables_too(read: Read, boxes: None) -> None:
    """A reload names the line as well."""
    loaded = read("[plugins.boxes.box.a]\ntopics = ['b']\n")
    Path("motorcade.toml").write_text("[plugins.boxes.box.a]\ntopcs = ['a']\n")
    with pytest.raises(ConfigError, match=r"motorcade.toml:2: unknown key 'plugins.boxes.box.a.topcs'"):
        loaded.again()


def test_a_password_in_a_url_is_not_shown(read: Read) -> None:
    loaded = read(
        "[plugins.x]\nredis = 'redis://:hush@h:1/0'\nother = 'rediss+cluster://me:hu/sh@h'\nplain = 'redis://h:1'\n"
    )
    shown = {key: value for key, value, _ in loaded.entries()}
    assert "redis://:***@h:1/0" == shown["plugins.x.redis"]
    assert "rediss+cluster://me:***@h" == shown["plugins.x.other"]
    assert "redis://h:1" == shown["plugins.x.plain"]


def test_every_option_has_a_comment_and_stands_on_the_page() -> None:
    """docs/configuration.md is what `motorcade config reference` prints; make it again after a change."""
    assert config.reference() == (ROOT / "docs" / "configuration.md").read_text()
    assert "|  |" not in config.reference()


def test_values_are_written_as_toml() -> None:
    """What `config show` prints can be put into a file."""
    for key, value, _ in config.load(None, {}, {}).entries():
        assert value == tomllib.loads(f"value = {config.toml(msgspec.to_builtins(value))}")["value"] or value == (), key
