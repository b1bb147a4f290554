"""Payloads as JSON: what each becomes is said one by one; all at once must come to the same, or not be tried."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motorcade.pipelines.sources.json_payloads import JsonPayloads

KIND = pa.struct(
    [
        ("a", pa.int32()),
        ("b", pa.bool_()),
        ("d", pa.float64()),
        ("s", pa.string()),
        ("n", pa.struct([("x", pa.int64()), ("y", pa.list_(pa.field("element", pa.string())))])),
        ("l", pa.list_(pa.field("element", pa.struct([("i", pa.int8())])))),
    ]
)


def column(payloads: list[bytes]) -> pa.Array:
    return JsonPayloads(KIND).column(pa.array(payloads, pa.binary()))


def became(payload: bytes) -> Any:
    """One payload among two that are usual; fields that are null are left out. All of them, if others have changed."""
    made = column([b'{"a":1}', payload, b'{"a":3}']).to_pylist()
    if [1, 3, 3] != [made[0]["a"], made[-1]["a"], len(made)]:
        return made
    return _short(made[1])


def _short(made: Any) -> Any:
    if isinstance(made, dict):
        return {name: _short(value) for name, value in made.items() if value is not None}
    return made


def test_what_a_payload_becomes() -> None:
    cases: list[tuple[bytes, Any]] = [
        (b'{"a":7,"z":[{"a":8}]}', {"a": 7}),
        (b"{}", {}),
        (b' {"a": 7}\r\n', {"a": 7}),
        (b'{\n  "a": 7,\n  "b": true\n}', {"a": 7, "b": True}),
        (b'{"n":{"x":1,"y":["p",null,3]},"l":[{"i":1},{},4,{"i":128}]}',
         {"n": {"x": 1, "y": ["p", None, None]}, "l": [{"i": 1}, {"i": None}, None, {"i": None}]}),
        (b'{"a":1.0,"b":1,"d":7,"s":7}', {"d": 7.0}),
        (b'{"a":2147483648,"d":1e400,"s":"x"}', {"s": "x"}),
        (b'{"a":true,"d":false,"n":{"x":1e2}}', {"n": {}}),
        (b'{"a":null,"d":"1.5","n":[],"l":{}}', {}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"d":NaN,"a":1}', {"a": 1}),
        (b'{"z":[-Infinity],"a":1}', {"a": 1}),
        (b'{"z":Inf,"a":1}', None),
        (b'{"s":": NaN, Infinity"}', {"s": ": NaN, Infinity"}),
        ('{"s":"Wörter \U0001f697"}'.encode(), {"s": "Wörter \U0001f697"}),
        (rb'{"s":"\u0000\ud83d\ude97","\u0061":4}', {"s": "\0\U0001f697", "a": 4}),
        (rb'{"s":"\ud83d","a":4}', {"a": 4}),
        (b'{"s":"\xff"}', None),
        (b'{"s":"a\tb"}', None),
        (b'{"a":1', None),
        (b'{"a":1,}', None),
        (b'{"a":1}{"a":2}', None),
        (b'{"a":1} {"a":2}', None),
        (b'{"a":1},{"a":2}', None),
        (b'[{"a":1}]', None),
        (b"", None),
        (b"null", None),
        (b"7", None),
        ("\ufeff{}".encode(), None),
        (b'{"z":' + b"[" * 400 + b"]" * 400 + b',"a":5}', {"a": 5}),
        (b'{"z":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"z":' + b"{}," .join([b"["] + [b""] * 3000) + b"{}]" + b',"a":5}', {"a": 5}),
    ]  # fmt: skip
    found = [(payload[:80], made, became(payload)) for payload, made in cases]
    assert [] == [case for case in found if case[1] != case[2]]


def test_the_type_is_what_was_declared_either_way() -> None:
    """Spark refuses the slightest difference."""
    for payloads in ([b'{"a":1}'], [b'{"a":1}', b"no json"], []):
        assert len(payloads) == len(column(payloads))
        assert str(KIND) == str(column(payloads).type)  # `equals` does not look at the names inside of lists


def test_nobody_moves_the_rows_of_others() -> None:
    """Messages that are several objects or parts of one leave others where they are, whoever has thought them up."""
    for payloads in (
        [b'{"a":1}{"a":2}', b""],
        [b'{"a":1}{"a":2}', b'{"s":"}', b'{","b":true}'],
        [b'{"a":1}{"a":2}', b'{"n":{}', b"}"],
        [b'{"a":1}{"a":2}', b'{"n":', b'{"x":1}}'],
        [b'{"a":1}\n{"a":2}', b"{"],
        [b'{"a":1}\n{"a":2}', b'{"s":"}', b'{"}'],
        [b'{"l":[{"i":1}', b'{"i":2}]}', b'{"a":1}{"a":2}'],
        [b'{"a":', b"1}", b'{"a":1}{"a":2}'],
    ):  # fmt: skip
        made = column([b'{"a":10}', *payloads, b'{"a":20}']).to_pylist()
        assert [10, *[None] * len(payloads), 20] == [row and row["a"] for row in made], payloads


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-200, 200)
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyi"), inner, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(st.sampled_from(["a", "b", "d", "s", "n", "l", "z"]), _values, max_size=5)
_usual = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(-(2**31), 2**31 - 1),
        "b": st.booleans(),
        "d": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70),
        "s": st.text(),
        "n": st.fixed_dictionaries({}, optional={"x": st.integers(-(2**63), 2**63 - 1), "y": st.lists(st.text())}),
        "l": st.lists(st.fixed_dictionaries({}, optional={"i": st.integers(-128, 127), "q": st.floats()})),
        "z": _values,
    },
)


@st.composite
def _written(draw: st.DrawFn) -> bytes:
    """JSON as different programs write it; now and then a byte is another, or missing."""
    made = draw(_usual | _objects)
    text = json.dumps(made, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, None, 1])))
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if draw(st.integers(0, 9)) == 0:
        place = draw(st.integers(0, len(data) - 1))
        data[place : place + draw(st.integers(0, 1))] = draw(st.sampled_from([b"", b"{", b"}", b'"', b"\n", b"\xc3"]))
    return bytes(data)


@settings(deadline=None)
@given(st.lists(_written(), min_size=1, max_size=8))
@example([b'{"d": NaN, "z": Inf}'])
def test_all_at_once_comes_to_the_same(payloads: list[bytes]) -> None:
    bodies = JsonPayloads(KIND)
    slowly = bodies._fitted(payloads)
    assert slowly.equals(bodies.column(pa.array(payloads, pa.binary())))


@settings(deadline=None)
@given(st.lists(_usual, min_size=1, max_size=8))
def test_the_usual_is_done_at_once(made: list[dict[str, Any]]) -> None:
    """Or nobody would notice if it were not."""
    payloads = [json.dumps(one, allow_nan=True).encode() for one in made]
    if any(word in payload for payload in payloads for word in (b"NaN", b"Infinity", b"\\ud", b"e+")):
        return
    at_once = JsonPayloads(KIND)._at_once(pa.array(payloads, pa.binary()))
    assert at_once is not None
    assert at_once.equals(JsonPayloads(KIND)._fitted(payloads))
