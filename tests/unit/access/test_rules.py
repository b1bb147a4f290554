"""Rule files: what is read, what is refused and where, and what the rules answer."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.client import Certificate, ClientInfo
from motorcade.core.errors import AccessFileError
from motorcade.plugins.access import aclfile, terms
from motorcade.plugins.access.aclfile import Format
from motorcade.plugins.access.rules import Action, Rule, first_match
from tests.support.tables import each_case

SEED = """
{allow, {user, "dashboard"}, subscribe, ["$SYS/#"]}.

{allow, {ipaddr, "127.0.0.1"}, pubsub, ["$SYS/#", "#"]}.

{deny, all, subscribe, ["$SYS/#", {eq, "#"}]}.

{allow, all}.
"""


def may(text: str, client: ClientInfo, action: str, asked: str, *, no_match: bool = False) -> bool:
    return aclfile.parse(text, "acl.conf").decide(client, Action(action), asked, no_match=no_match)[0]


def who(*, user: str | None = None, client: str = "c1", host: str = "192.0.2.1", **more) -> ClientInfo:
    return ClientInfo(client, user, host, **more)


@each_case(
    ("client", "action", "asked", "expected"),
    [
        (who(user="dashboard"), "subscribe", "$SYS/#", True),
        (who(user="dashboard"), "subscribe", "$SYS/broker/clients/+", True),
        (who(), "subscribe", "$SYS/#", False),
        (who(), "subscribe", "$SYS/broker/uptime", False),
        (who(), "subscribe", "$share/g/$SYS/#", False),
        (who(), "subscribe", "#", False),
        (who(), "subscribe", "$share/g/#", False),
        (who(host="127.0.0.1"), "subscribe", "#", True),
        (who(host="::ffff:127.0.0.1"), "subscribe", "#", True),
        (who(), "subscribe", "a/#", True),
        (who(), "publish", "$SYS/x", True),
    ],
)
def test_the_rules_of_the_design_do_what_they_say(client: ClientInfo, action: str, asked: str, expected: bool) -> None:
    assert expected == may(SEED, client, action, asked)


@each_case(
    ("text", "client", "matches"),
    [
        ("all", who(), True),
        ('"c1"', who(), True),
        ('"c1"', who(client="c2", user="c1"), False),
        ('<<"c1">>', who(), True),
        ('{user, "u"}', who(user="u"), True),
        ('{username, "u"}', who(user="U"), False),
        ('{user, "u"}', who(), False),
        ("{user, all}", who(), True),
        ('{client, "c1"}', who(), True),
        ('{clientid, "c"}', who(), False),
        ('{client, {re, "^c\\\\d$"}}', who(), True),
        ('{client, {re, "^c\\\\d$"}}', who(client="c1\n"), False),
        ('{user, {re, "adm"}}', who(user="an admin"), True),
        ('{user, {re, ".*"}}', who(), False),
        ('{ipaddr, "192.0.2.0/24"}', who(), True),
        ('{ipaddr, "192.0.2.2"}', who(), False),
        ('{ipaddr, "::1"}', who(host="::1"), True),
        ('{ipaddr, "0.0.0.0/0"}', who(host=""), False),
        ('{ipaddrs, ["10.0.0.0/8", "192.0.2.0/24"]}', who(), True),
        ('{\'and\', [{user, "u"}, {client, "c1"}]}', who(user="u"), True),
        ('{\'and\', [{user, "u"}, {client, "c1"}]}', who(user="u", client="x"), False),
        ('{\'or\', [{user, "u"}, {client, "c1"}]}', who(client="x", user="u"), True),
        ("{'or', [{user, \"u\"}, {'and', [all, {client, \"c1\"}]}]}", who(), True),
    ],
)
def test_who_a_rule_is_about(text: str, client: ClientInfo, matches: bool) -> None:
    assert matches == may(f"{{allow, {text}, all, all}}.", client, "publish", "t")


@each_case(
    ("topic", "client", "action", "asked", "expected"),
    [
        ("a/+", who(), "publish", "a/b", True),
        ("a/+", who(), "publish", "a/b/c", False),
        ("a/+", who(), "subscribe", "a/#", False),
        ("a/#", who(), "subscribe", "a/+", True),
        ("cars/${clientid}/#", who(), "subscribe", "cars/c1/#", True),
        ("cars/${clientid}/#", who(), "subscribe", "cars/+/#", False),
        ("cars/%c", who(), "publish", "cars/c1", True),
        ("cars/%u", who(), "publish", "cars/None", False),
        ("cars/%u", who(user="u"), "publish", "cars/u", True),
        ("car-${username}", who(user="u"), "publish", "car-u", True),
        ("cn/${cert_common_name}", who(certificate=Certificate("car", "CN=car")), "publish", "cn/car", True),
        ("f/${client_attrs.fleet}", who(attributes={"fleet": "north"}), "publish", "f/north", True),
        ("f/${client_attrs.fleet}", who(), "publish", "f/", False),
        ("eq a/+", who(), "subscribe", "a/+", True),
        ("eq a/+", who(), "subscribe", "a/b", False),
        ("eq $ECQ/${clientid}/#", who(), "subscribe", "$ECQ/c1/#", True),
        ("eq $ECQ/${clientid}/#", who(), "subscribe", "$ECQ/c2/#", False),
        # A client must not choose rules by choosing its name.
        ("cars/${clientid}/#", who(client="+"), "subscribe", "cars/+/#", False),
        ("cars/${clientid}/#", who(client="#"), "publish", "cars/x", False),
        ("cars/${clientid}", who(client="a/b"), "publish", "cars/a/b", False),
        ("cars/${clientid}", who(client=""), "publish", "cars/", False),
        ("${clientid}/#", who(client="$SYS"), "subscribe", "$SYS/#", False),
        ("eq ${clientid}/#", who(client="$SYS"), "subscribe", "$SYS/#", False),
    ],
)
def test_topics_of_an_allow_rule(topic: str, client: ClientInfo, action: str, asked: str, expected: bool) -> None:
    assert expected == may(f'{{allow, all, all, ["{topic}"]}}.', client, action, asked)


@each_case("asked", ["secret/#", "#", "+/keys", "secret/+/x", "secret", "$share/g/+/#"])
def test_no_wide_subscription_slips_past_a_narrow_deny(asked: str) -> None:
    assert not may('{deny, all, subscribe, ["secret/#"]}. {allow, all}.', who(), "subscribe", asked)


def test_a_literal_deny_refuses_only_that_filter() -> None:
    text = '{deny, all, subscribe, [{eq, "#"}, {eq, "+/#"}]}. {allow, all}.'
    assert [False, False, True] == [may(text, who(), "subscribe", asked) for asked in ("#", "+/#", "a/#")]


def test_the_first_rule_that_applies_decides() -> None:
    text = '{allow, all, publish, ["a/b"]}. {deny, all, publish, ["a/#"]}. {allow, all}.'
    assert [True, False, True] == [may(text, who(), "publish", asked) for asked in ("a/b", "a/c", "b")]


def test_no_match_denies_unless_the_switch_says_otherwise() -> None:
    text = '{allow, {user, "x"}, all, all}.'
    assert not may(text, who(), "publish", "t")
    assert may(text, who(), "publish", "t", no_match=True)


@each_case("text", ["", "  \n", "% nothing but words\n", "# nothing\n"])
def test_a_file_without_rules_denies_everything(text: str) -> None:
    """Even with the switch: an emptied file must not open the broker."""
    assert not may(text, who(host="127.0.0.1"), "publish", "t", no_match=True)


def test_a_malformed_share_is_refused() -> None:
    assert [False] * 3 == [may("{allow, all}.", who(), "subscribe", f) for f in ("$share", "$share/g", "$share//a")]


@each_case(
    ("text", "line", "words"),
    [
        ("{allow, all}", 1, "expected '.' at the end of the rule, found the end of the file"),
        ("\n\n{allow all}.", 3, "expected ',' or '}', found 'all'"),
        ("{permit, all}.", 1, "expected a rule {allow|deny"),
        ('{allow, {user, "x"}}.', 1, "expected a rule"),
        ("allow.", 1, "expected a rule"),
        ("{}.", 1, "expected a rule"),
        ('{allow, all, read, ["a"]}.', 1, "expected publish, subscribe, pubsub or all, found read"),
        ('{allow, all, publish, "a"}.', 1, "expected a list"),
        ("{allow, all, publish, []}.", 1, "expected a list […] with something in it, found []"),
        ('{allow, all, publish, ["a/#/b"]}.', 1, "bad topic filter"),
        ('{allow, all, publish, [""]}.', 1, "bad topic filter"),
        ("{allow, all, publish, [a]}.", 1, "expected a topic filter in quotes"),
        ('{allow, all, publish,\n  ["${vin}"]}.', 2, "unknown placeholder ${vin}"),
        ('{allow, all, publish, ["car-%c"]}.', 1, "whole levels"),
        ('{allow, {ipaddr, "300.1.1.1"}, all, all}.', 1, "expected an IP address"),
        ('{allow, {user, {re, "("}}, all, all}.', 1, "bad regular expression"),
        ('{allow, {user, {re, "\\d"}}, all, all}.', 1, "written twice"),
        ('{allow, {zone, "x"}, all, all}.', 1, "expected all, {user"),
        ("{allow, {'and', []}, all, all}.", 1, "expected a list"),
        ('{allow, {user, ""}, all, all}.', 1, "expected text in double quotes"),
        ('{allow, {user, "x}, all, all}.\n{allow, all}.', 1, "the string does not end on its line"),
        ("{allow, all}.\n# {deny, all}.", 2, "comments begin with %"),
        ("{allow, All}.", 1, "cannot read 'All}.'"),
        ("{allow, all}.}", 1, "expected a rule, such as"),
        ("{allow, " + "{" * 100, 1, "inside each other"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(AccessFileError) as caught:
        aclfile.parse(text, "acl.conf", Format.RULES)
    assert str(caught.value).startswith(f"acl.conf:{line}: ")
    assert words in str(caught.value)


def test_a_file_that_is_not_text_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "acl.conf"
    file.write_bytes(b"{allow, all}.\n% \xff\n")
    with pytest.raises(AccessFileError, match=r"acl.conf:2: not UTF-8"):
        aclfile.load(file)
    with pytest.raises(AccessFileError, match="cannot be read"):
        aclfile.load(tmp_path / "missing")


def test_a_rule_that_is_never_reached_is_told() -> None:
    found = aclfile.parse("{allow, all}.\n\n{deny, all}.", "acl.conf").warnings()
    assert ["acl.conf:3: never reached, line 1 decides everything before it"] == found


# --- the parser against what it is given ---

words = st.text(string.ascii_letters + string.digits + " _-/+#$%{}[],.'\"\\", max_size=12)
trees = st.recursive(
    st.one_of(st.tuples(st.just("string"), words), st.tuples(st.just("atom"), words)),
    lambda inner: st.tuples(st.sampled_from(["tuple", "list"]), st.lists(inner, max_size=4)),
    max_leaves=12,
)


def write(tree: tuple[str, Any]) -> str:
    kind, value = tree
    if kind in ("tuple", "list"):
        opening, closing = "{}" if kind == "tuple" else "[]"
        return f"{opening} {', '.join(map(write, value))} % comment }}\n{closing}"
    quote = '"' if kind == "string" else "'"
    return quote + str(value).replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote


def read(term: terms.Term):
    if term.kind in ("tuple", "list"):
        return (str(term.kind), list(map(read, term.items)))
    return (str(term.kind), term.text)


@given(st.lists(trees, max_size=4))
def test_terms_come_back_as_they_were_written(forest) -> None:
    text = "".join(f"{write(tree)}.\n" for tree in forest)
    assert forest == [read(term) for term in terms.parse(text, "f")]


@given(st.text(st.sampled_from("{}[],.'\"\\%<>aA0 \n#$") | st.characters(), max_size=60))
def test_no_text_does_anything_but_parse_or_name_its_line(text: str) -> None:
    for format_ in Format:
        problem = None
        try:
            aclfile.parse(text, "f", format_)
        except AccessFileError as error:
            problem = str(error)
        assert problem is None or problem.startswith("f:")


@given(st.data())
def test_a_rule_file_cut_short_never_loses_a_rule_silently(data: st.DataObject) -> None:
    """Every prefix has the complete rules before the cut, or is refused."""
    cut = data.draw(st.integers(0, len(SEED)))
    text = SEED[:cut]
    try:
        found = aclfile.parse(text, "f").rules
    except AccessFileError:
        return
    assert text.count("}.") == len(found)


# --- mosquitto's files ---

MOSQUITTO = """\
# the first topics are for clients without user name
topic read public/#

user alice
topic cars/#
topic deny cars/secret/#
topic write "quoted" thing

user bob b
topic readwrite a b/c

pattern write sensor/%u/data
pattern read to/%c/#
"""


@each_case(
    ("client", "action", "asked", "expected"),
    [
        (who(), "subscribe", "public/#", True),
        (who(), "publish", "public/a", False),
        (who(user="alice"), "subscribe", "public/#", False),
        (who(user="alice"), "publish", "cars/a", True),
        (who(user="alice"), "subscribe", "cars/open/#", True),
        (who(user="alice"), "publish", "cars/secret/x", False),
        (who(user="alice"), "subscribe", "cars/#", False),
        (who(user="bob b"), "publish", "a b/c", True),
        (who(user="alice"), "publish", "sensor/alice/data", True),
        (who(user="alice"), "publish", "sensor/bob/data", False),
        (who(), "publish", "sensor//data", False),
        (who(), "subscribe", "to/c1/#", True),
        (who(client="+"), "subscribe", "to/+/#", False),
    ],
)
def test_mosquitto_files_are_read(client: ClientInfo, action: str, asked: str, expected: bool) -> None:
    text = MOSQUITTO.replace('topic write "quoted" thing\n', "")
    assert Format.MOSQUITTO == aclfile.detect(text)
    assert expected == may(text, client, action, asked)


@each_case(
    ("text", "line", "words_"),
    [
        (MOSQUITTO, 7, "bad topic filter"),
        ("user", 1, "expected user NAME"),
        ("user a\ntopik a", 2, "expected user NAME"),
        ("topic a b", 1, "expected read, write, readwrite or deny"),
        ("topic read a/#/b", 1, "bad topic filter"),
        ("pattern read car-%c", 1, "whole levels"),
    ],
)
def test_a_broken_mosquitto_file_is_refused(text: str, line: int, words_: str) -> None:
    if text is MOSQUITTO:
        text = text.replace('"quoted" thing', "a+/x")
    with pytest.raises(AccessFileError) as caught:
        aclfile.parse(text, "acl", Format.MOSQUITTO)
    assert str(caught.value).startswith(f"acl:{line}: ")
    assert words_ in str(caught.value)


def test_of_many_rules_a_client_meets_only_those_that_could_concern_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with the same answers as when all are asked; the work does not grow with the file."""
    lines = [f'{{allow, {{user, "u{i % 50}"}}, publish, ["a/{i % 7}/#"]}}.' for i in range(3000)]
    lines[1500:1500] = ['{deny, all, publish, ["a/3/#"]}.', '{allow, {client, "c1"}, publish, ["a/3/x"]}.']
    lines += ['{deny, {user, {re, "^u1"}}, all, all}.', '{allow, "c1", all, ["b"]}.']
    file = aclfile.parse("\n".join(lines), "f")
    asked: list[int] = []
    applies = Rule.applies

    def counted(self: Rule, client: ClientInfo, action: Action, topic: str) -> bool:
        asked.append(self.line)
        return applies(self, client, action, topic)

    for user in ("u1", "u7", "u49", "nobody", None):
        for client_id in ("c1", "c2"):
            client = ClientInfo(client_id, user, "127.0.0.1")
            for topic in ("a/3/x", "a/5", "b", "c"):
                expected = first_match(file.rules, client, Action.PUBLISH, topic)
                monkeypatch.setattr(Rule, "applies", counted)
                assert expected is file.match(client, Action.PUBLISH, topic)
                monkeypatch.undo()
                assert len(asked) <= 65 and asked == sorted(asked)
                asked.clear()
