"""4.7 Topic names and topic filters: which are legal, and which filter matches which name."""

from __future__ import annotations

from tests.support.cases import both_versions, each, each_row
from tests.support.checks import assert_filter_refused
from tests.support.clauses import clause
from tests.support.wire import Connect, subscribe_packet


def matches(connect: Connect, name: str, version: int, topic_filter: str, topic: str) -> bool:
    """Whether a subscriber of the filter gets a message of the topic; a second topic marks the end."""
    client, other = connect(version=version), connect(version=version)
    assert [1, 1] == client.subscribe([(topic_filter, 1), (f"{name}-end", 1)]).reasons
    other.publish(topic, name.encode(), 1)
    other.publish(f"{name}-end", b"end", 1)
    got = []
    while (message := client.receive()).topic != f"{name}-end":
        # Filters like `#` also see what other tests publish at the same time.
        if message.payload == name.encode():
            got.append(message.topic)
    assert got in ([], [topic])
    return bool(got)


@clause(v3="MQTT-4.7.1-2", v5="MQTT-4.7.1-1")
@both_versions
@each(wrong=("{}#", "{}/a#", "{}/#/b", "{}/#/", "#/{}", "##", "{}/##", "{}/+#"))
def test_the_multi_level_wildcard_stands_alone_at_the_end(
    connect: Connect, name: str, version: int, wrong: str
) -> None:
    """A # that shares its level or is not last is refused [MQTT-4.7.1-2] [MQTT-4.7.1-1]."""
    assert_filter_refused(connect(version=version), wrong.format(name))


@clause(v3="MQTT-4.7.1-3", v5="MQTT-4.7.1-2")
@both_versions
@each(wrong=("{}+", "+{}", "{}/a+", "{}/+a", "{}/++", "{}/+b/c"))
def test_the_single_level_wildcard_fills_its_level(connect: Connect, name: str, version: int, wrong: str) -> None:
    """A + that shares its level with anything is refused [MQTT-4.7.1-3] [MQTT-4.7.1-2]."""
    assert_filter_refused(connect(version=version), wrong.format(name))


@clause(v3=("MQTT-4.7.1-2", "MQTT-4.7.1-3", "MQTT-3.8.3-2"), v5=("MQTT-4.7.1-1", "MQTT-4.7.1-2"))
@both_versions
@each_row(
    "topic_filter topic expected",
    (
        ("{}/tennis/player1/#", "{}/tennis/player1", True),
        ("{}/tennis/player1/#", "{}/tennis/player1/ranking", True),
        ("{}/tennis/player1/#", "{}/tennis/player1/score/wimbledon", True),
        ("{}/tennis/player1/#", "{}/tennis/player2", False),
        ("{}/#", "{}", True),
        ("{}/#", "{}/", True),
        ("{}/#", "{}x/a", False),
        ("#", "{}/a/b/c", True),
        ("#", "/{}", True),
        ("{}/tennis/+", "{}/tennis/player1", True),
        ("{}/tennis/+", "{}/tennis/player1/ranking", False),
        ("{}/+", "{}", False),
        ("{}/+", "{}/", True),
        ("{}/+", "{}/a", True),
        ("+/+/{}", "a/b/{}", True),
        ("+/+/{}", "b/{}", False),
        ("/+/{}", "/a/{}", True),
        ("/+", "/{}", True),
        ("+/+", "/{}", True),
        ("+", "/{}", False),
        ("+", "{}", True),
        ("+/{}/#", "a/{}", True),
        ("+/{}/#", "a/{}/b/c", True),
        ("+/{}/+", "a/{}/b/c", False),
        ("{}/+/+/d", "{}/b//d", True),
        ("{}/+/c", "{}//c", True),
        ("{}/+/c", "{}/c", False),
    ),
)
def test_wildcards_match(
    connect: Connect, name: str, version: int, topic_filter: str, topic: str, expected: bool
) -> None:
    """# takes the parent and all levels below, + takes exactly one level, which may be empty
    [MQTT-4.7.1-2] [MQTT-4.7.1-3] [MQTT-4.7.1-1].
    """
    assert expected == matches(connect, name, version, topic_filter.format(name), topic.format(name))


@clause(v3="MQTT-1.5.3-3", v5="MQTT-1.5.4-3")
@both_versions
@each_row(
    "topic_filter topic expected",
    (
        ("{}", "{}", True),
        ("{}", "/{}", False),
        ("{}", "{}/", False),
        ("{}/", "{}/", True),
        ("/{}", "/{}", True),
        ("/{}", "{}", False),
        ("{}//a", "{}//a", True),
        ("{}//a", "{}/a", False),
        ("{}/a", "{}/A", False),
        ("{}/a b", "{}/a b", True),
        ("{}/a b", "{}/ab", False),
        ("{}/a", "{}/a ", False),
        ("{}/*", "{}/a", False),
        ("{}/.*", "{}/ab", False),
        ("\ufeff{}", "\ufeff{}", True),
        ("{}", "\ufeff{}", False),
    ),
)
def test_levels_are_compared_literally(
    connect: Connect, name: str, version: int, topic_filter: str, topic: str, expected: bool
) -> None:
    """Case, spaces, empty levels and separators at either end make a difference (4.7.3), and so does a byte order mark
    [MQTT-1.5.4-3].
    """
    assert expected == matches(connect, name, version, topic_filter.format(name), topic.format(name))


@clause(v3="MQTT-4.7.3-4", v5="MQTT-4.7.3-4")
@both_versions
@each_row(
    "topic_filter topic",
    (
        ("{}/\u00e9", "{}/e\u0301"),
        ("{}/e\u0301", "{}/\u00e9"),
        ("{}/\u212b", "{}/\u00c5"),
        ("{}/\uff21", "{}/A"),
        ("{}/\u017f", "{}/s"),
        ("{}/a", "{}/\ufeffa"),
        ("{}/\ufffd", "{}/\U0001f697"),
        ("{}/\u00df", "{}/ss"),
    ),
)
def test_characters_are_not_normalised(
    connect: Connect, name: str, version: int, topic_filter: str, topic: str
) -> None:
    """Names that only look alike, or are alike after normalisation, are different [MQTT-4.7.3-4]."""
    assert not matches(connect, name, version, topic_filter.format(name), topic.format(name))


@clause(v3="MQTT-4.7.3-4", v5="MQTT-4.7.3-4")
@both_versions
@each(word=("\u00e9", "e\u0301", "\ufeffx", "\U0001f697", "\ufffd", "\u6c7d\u8eca", "a\\b%2F"))
def test_characters_arrive_as_they_were_sent(connect: Connect, name: str, version: int, word: str) -> None:
    """A topic comes out byte for byte, byte order mark and all, by exact filter and by wildcard [MQTT-4.7.3-4]."""
    topic = f"{name}/{word}"
    assert matches(connect, name, version, topic, topic)
    assert matches(connect, name, version, f"{name}/+", topic)


@clause(v3="MQTT-4.7.2-1", v5="MQTT-4.7.2-1")
@both_versions
@each_row(
    "topic_filter topic expected",
    (
        ("#", "${}/a", False),
        ("+/a", "${}/a", False),
        ("+/#", "${}/a", False),
        ("+", "${}", False),
        ("${}/#", "${}/a", True),
        ("${}/+", "${}/a", True),
        ("${}/a", "${}/a", True),
        ("{}/#", "{}/$a", True),
        ("{}/+", "{}/$a", True),
        ("+/{}/$a", "x/{}/$a", True),
    ),
)
def test_a_leading_wildcard_does_not_match_a_dollar_topic(
    connect: Connect, name: str, version: int, topic_filter: str, topic: str, expected: bool
) -> None:
    """Topics that begin with $ are reached only by filters that begin with $; a $ elsewhere is nothing special
    [MQTT-4.7.2-1].
    """
    assert expected == matches(connect, name, version, topic_filter.format(name), topic.format(name))


@clause(v3="MQTT-4.7.2-1", v5="MQTT-4.7.2-1")
@both_versions
def test_a_leading_wildcard_gets_no_retained_dollar_topic(connect: Connect, name: str, version: int) -> None:
    """Retained messages of $ topics stay away from filters that begin with a wildcard too [MQTT-4.7.2-1]."""
    client, other = connect(version=version), connect(version=version)
    other.publish(f"${name}/x/{name}", b"hidden", 1, retain=True)
    other.publish(f"a/x/{name}", b"seen", 1, retain=True)
    client.send(subscribe_packet(1, [(f"+/x/{name}", 1)], version=version))
    received = [client.recv(), client.recv()]
    assert {b"", b"seen"} == {found.payload for found in received}
    client.expect_nothing()
    for topic in (f"${name}/x/{name}", f"a/x/{name}"):
        other.publish(topic, b"", 1, retain=True)


@clause(v3="MQTT-4.7.3-1", v5="MQTT-4.7.3-1")
@both_versions
def test_an_empty_topic_filter_is_refused(connect: Connect, version: int) -> None:
    """A filter of no characters is refused [MQTT-4.7.3-1]."""
    assert_filter_refused(connect(version=version), "")


@both_versions
@each(topic=("/", "//", "///"))
def test_separators_alone_are_a_topic(connect: Connect, name: str, version: int, topic: str) -> None:
    """A topic may consist of separators only (4.7.3)."""
    assert matches(connect, name, version, topic, topic)


@clause(v3="MQTT-4.7.3-3", v5="MQTT-4.7.3-3")
@both_versions
def test_a_topic_of_the_greatest_length_works(connect: Connect, name: str, version: int) -> None:
    """65535 bytes, all that the length in front of a string can tell, may be subscribed and published
    [MQTT-4.7.3-3].
    """
    topic = name + "x" * (65535 - len(name))
    assert matches(connect, name, version, topic, topic)


@both_versions
def test_many_levels_match(connect: Connect, name: str, version: int) -> None:
    """A topic of thirty levels is matched by exact, single-level and multi-level filters (4.7.1)."""
    levels = [name, *(f"l{n}" for n in range(29))]
    topic = "/".join(levels)
    for topic_filter in (topic, "/".join([name, *["+"] * 29]), "/".join([*levels[:15], "#"])):
        assert matches(connect, name, version, topic_filter, topic)
    assert not matches(connect, name, version, "/".join([name, *["+"] * 28]), topic)
