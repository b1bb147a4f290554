"""Does the broker know whether a message would be heard, without making a route for its topic?"""

from __future__ import annotations

from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback
from tests.support.virtual import MemoryNode


def test_by_subscribers() -> None:
    for filter_, topic, heard in (
        ("$SDV-FANOUT/receipt/#", "$SDV-FANOUT/receipt/r/v", True),
        ("$SDV-FANOUT/receipt/r/v", "$SDV-FANOUT/receipt/r/v", True),
        ("$SDV-FANOUT/receipt/+/w", "$SDV-FANOUT/receipt/r/v", False),
        ("$share/g/$SDV-FANOUT/#", "$SDV-FANOUT/receipt/r/v", True),
        ("#", "$SDV-FANOUT/receipt/r/v", False),
        ("+/receipt/#", "$SDV-FANOUT/receipt/r/v", False),
        ("#", "a/b", True),
        ("a/+", "a/b", True),
        ("b/+", "a/b", False),
    ):
        node = MemoryNode()
        assert not node.broker.heard(topic)
        session = node.client("c").connection.session
        assert session is not None
        node.state.pubsub.subscribe(session, Subscription(filter_, 1))
        assert heard is node.broker.heard(topic), filter_
        if topic.startswith("$"):
            begins = filter_.removeprefix("$share/g/").startswith("$SDV-FANOUT")
            assert begins is node.broker.heard_below("$SDV-FANOUT")
        assert not node.state.pubsub.routes, "nothing is remembered of a topic that is only asked for"
        node.state.pubsub.unsubscribe(session, filter_)
        assert not node.broker.heard(topic)
        assert not node.broker.heard_below("$SDV-FANOUT")


def test_by_plugins() -> None:
    for filter_, heard in (("$SDV-FANOUT/#", True), ("#", False), ("+/r", False), ("$SDV-FANOUT/x", False), ("", True)):
        node = MemoryNode()

        def look(*_: object) -> None:
            """Only being there counts."""

        node.hooks.add("message.publish", Callback(look, 0, "one", (filter_,) if filter_ else ()))
        assert heard is node.broker.heard("$SDV-FANOUT/r"), filter_
        assert not node.broker.heard("$SDV-FANOUT/r", besides="one")
        node.hooks.remove_owner("one")
        assert not node.broker.heard("$SDV-FANOUT/r")
