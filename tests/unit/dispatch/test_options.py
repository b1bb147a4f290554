"""Options: names of keys, and what makes no sense."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from motorcade.dispatch.options import DispatchOptions
from motorcade.redis.slots import slot_of

NAMES = ("published", "received", "processed", "pending", "dead", "lock", "registry")


def test_what_stands_beside_a_key_is_where_the_key_is() -> None:
    for prefix, name in itertools.product(("", "fleet:", "fleet:{eu}:"), NAMES):
        options = DispatchOptions(prefix=prefix)
        assert slot_of(options.key(name)) == slot_of(options.beside(name, "fence")), (prefix, name)
        assert options.key(name) != options.beside(name, "fence")


def test_names_are_those_of_the_contract() -> None:
    options = DispatchOptions()
    wanted = ("messages:published", "messages:processed", "messages:pending", "messages:dead")
    assert wanted == tuple(map(options.key, ("published", "processed", "pending", "dead")))
    assert ("distributed_leader_lock", "consumer:ids") == (options.key("lock"), options.key("registry"))


def test_what_makes_no_sense_is_refused() -> None:
    for values, why in (
        ({"redis": "http://x"}, "redis: must be"),
        ({"workers": ["a:1", "b"]}, "workers: 'b' is not"),
        ({"listen": "a:70000"}, "listen: 'a:70000' is not"),
        ({"advertise": ":1"}, "advertise: ':1' is not"),
        ({"handler": "module"}, "handler: 'module' is not"),
        ({"dead": "a}b"}, "dead: 'a}b'"),
        ({"pending": ""}, "pending: a name has"),
        ({"remember": 5.0}, "remember: must be at least"),
        ({"batch": 5000}, "<= 2000"),
        ({"window": 0}, ">= 1"),
        ({"intake": "kafka"}, "kafka"),
        ({"windows": 1}, "windows"),
    ):
        with pytest.raises(msgspec.ValidationError, match=why):
            msgspec.convert(values, DispatchOptions)
