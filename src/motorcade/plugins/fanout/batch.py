"""A batch as the platform publishes it: a list of vehicles, a request, and data. Pure: bytes in, a checked batch out.

    topic `$SDV-FANOUT`          {"ids": [VIN, …], "request_id": "task_ota_1", "data": "…", "encoding": "utf8"|"base64"}
    topic `$SDV-FANOUT/trigger`  {"ids": [VIN, …], "request_id": "task_ota_1", "data_id": "…"}
    both, optional               "expires_in": seconds, "priority": 0 to 9 (9 first), "mode": "replace"|"append",
                                 "batch_id": "…": sent again under the same id it is stored once

Rule 1: all or nothing. A batch that is returned is right in every part; the error of one that is not names the field,
        the index and the value, and fits into the reason string of a PUBACK.
Rule 2: types are what JSON says they are: no number for a text, no `true` for a number, no null for what can be left
        out. A vehicle that is named twice gets one message, and is counted.
Rule 3: keys that mean nothing here are ignored, since platforms put notes of their own into batches, but named in
        `FanoutBatch.extra` for the log: a misspelt `expires_in` should not go unnoticed.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.vin import VinError, check_vin, have_shape
from motorcade.plugins.fanout.options import FanoutConfig, Mode
from motorcade.plugins.fanout.tables import INGRESS, TRIGGER

MAX_REASON: Final = 200  #: characters of an error
MAX_REQUEST_ID: Final = 128  #: characters
MAX_BATCH_ID: Final = 128  #: characters
MAX_DATA_ID: Final = 256  #: characters
MAX_EXPIRY: Final = 10**10  #: seconds
MAX_PRIORITY: Final = 9
MAX_EXTRA: Final = 10  #: unknown keys that are named

_SHOWN: Final = 40  # characters of a wrong value in an error
_OPTIONAL: Final = frozenset({"expires_in", "priority", "mode", "batch_id"})
_INLINE: Final = frozenset({"ids", "request_id", "data", "encoding"}) | _OPTIONAL
_TRIGGER: Final = frozenset({"ids", "request_id", "data_id"}) | _OPTIONAL

# Control characters and code points that are none: MQTT lets a receiver close the connection for them [MQTT-1.5.4].
_UNFIT: Final = "\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef" + "".join(
    chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
)
_NO_LEVEL: Final = re.compile(f"[/+#{_UNFIT}]")
_NO_TOPIC: Final = re.compile(f"[+#{_UNFIT}]")
_NO_BASE64: Final = re.compile("[^A-Za-z0-9+/=]")
_DIGEST: Final = re.compile("(?:[0-9a-fA-F]{40}|[0-9a-fA-F]{64})")
_DIGITS: Final = {"sha1": 40, "sha256": 64}


class BadBatchError(MotorcadeError):
    """A batch, or data for one, is refused; nothing of it is stored. The text is the reason the publisher hears."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 1]}…")


class FanoutBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is right in every part."""

    vins: tuple[str, ...]  #: each once, in the order in which they were named first
    duplicates: int  #: names that were there before
    request_id: str
    data: bytes | None  #: None: it was published before, as `data_id`
    data_id: str  #: empty: the batch carries its data
    expires_in: float | None  #: seconds; None: not before the retention is over
    priority: int
    mode: Mode
    batch_id: str = ""  #: empty: it has none
    extra: tuple[str, ...] = ()  #: keys that mean nothing here, shortened, at most `MAX_EXTRA` of them


_decode = msgspec.json.Decoder().decode


def parse(payload: bytes, config: FanoutConfig, *, trigger: bool) -> FanoutBatch:
    """Return the batch of a message to `$SDV-FANOUT` or `$SDV-FANOUT/trigger`; `BadBatchError` says why it is none."""
    fields, known = _object(payload), _TRIGGER if trigger else _INLINE
    vins = _vins(_required(fields, "ids"), config)
    request_id = _text(fields, "request_id")
    check_request_id(request_id)
    return FanoutBatch(
        vins=(unique := tuple(dict.fromkeys(vins))),
        duplicates=len(vins) - len(unique),
        request_id=request_id,
        data=None if trigger else _inline_data(fields, config),
        data_id=_data_id(fields) if trigger else "",
        expires_in=_expires_in(fields["expires_in"]) if "expires_in" in fields else None,
        priority=_priority(fields["priority"]) if "priority" in fields else 0,
        mode=cast("Mode", _choice(fields, "mode", ("replace", "append"))) if "mode" in fields else config.mode,
        batch_id=_batch_id(fields) if "batch_id" in fields else "",
        extra=() if fields.keys() <= known else tuple(key[:_SHOWN] for key in fields if key not in known)[:MAX_EXTRA],
    )


def check_request_id(request_id: str) -> None:
    """Raise `BadBatchError` unless it can be one level of a topic."""
    _check_text("request_id", request_id, MAX_REQUEST_ID, _NO_LEVEL, "no '/', '+', '#' or control characters")


def check_batch_id(batch_id: str) -> None:
    """Raise `BadBatchError` unless it can be an id like that of a request."""
    _check_text("batch_id", batch_id, MAX_BATCH_ID, _NO_LEVEL, "no '/', '+', '#' or control characters")


def check_data_id(data_id: str) -> None:
    """Raise `BadBatchError` unless it can be the end of a topic; it may have several levels."""
    _check_text("data_id", data_id, MAX_DATA_ID, _NO_TOPIC, "no '+', '#' or control characters")


def data_digests(data_id: str, data: bytes) -> None:
    """Raise `BadBatchError` if a data id is a SHA-1 or SHA-256 of something else than the data.

    It is one if it says so (`sha1:…`, `sha256:…`), or has just as many hexadecimal digits; any other id is taken as it
    is.
    """
    kind, colon, digits = data_id.partition(":")
    if not colon:
        kind, digits = ("sha1" if len(data_id) == _DIGITS["sha1"] else "sha256"), data_id
        if _DIGEST.fullmatch(data_id) is None:
            return
    elif kind not in _DIGITS:
        return
    if len(digits) != _DIGITS[kind] or _DIGEST.fullmatch(digits) is None:
        raise BadBatchError(
            f"data_id: {_shown(data_id)} is no {kind}: {_DIGITS[kind]} hexadecimal digits follow the colon"
        )
    found = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    if found != digits.lower():
        raise BadBatchError(f"data_id: {_shown(digits)} is not the {kind} of the data, that is {found}")


# -- the fields


def _object(payload: bytes) -> dict[str, Any]:
    try:
        fields = _decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBatchError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadBatchError(f"{_kind(fields)} instead of a JSON object with ids, request_id and data or data_id")
    return fields


def _required(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise BadBatchError(f"{key} is missing")
    return fields[key]


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise _wrong_type(key, _required(fields, key), "a text")
    return value


def _check_text(key: str, value: str, most: int, unfit: re.Pattern[str], rule: str) -> None:
    if not value:
        raise BadBatchError(f"{key} is empty")
    if len(value) > most:
        raise BadBatchError(f"{key}: {len(value)} characters are more than {most}: {_shown(value)}")
    if found := unfit.search(value):
        raise BadBatchError(f"{key}: {_shown(value)} has {found[0]!r} at character {found.start() + 1}; {rule}")


def _vins(ids: Any, config: FanoutConfig) -> list[str]:
    if not isinstance(ids, list):
        raise _wrong_type("ids", ids, "a list of VINs")
    if not ids:
        raise BadBatchError("ids: the list is empty; name at least one VIN")
    if len(ids) > config.max_vins:
        raise BadBatchError(
            f"ids: {len(ids)} VINs are more than {config.max_vins} (option max_vins); send several batches"
        )
    check_digit = config.check_digit
    if not check_digit and {str}.issuperset(map(type, ids)) and have_shape(ids):
        return ids  # mostly
    for index, vin in enumerate(ids):
        if not isinstance(vin, str):
            raise _wrong_type(f"ids[{index}]", vin, "a VIN")
        try:
            check_vin(vin, check_digit=check_digit)
        except VinError as error:
            raise BadBatchError(f"ids[{index}]: {error}") from error
    return ids


def _inline_data(fields: Mapping[str, Any], config: FanoutConfig) -> bytes:
    if "data" not in fields and "data_id" in fields:
        raise BadBatchError(f"data is missing; a batch that names its data by data_id goes to {TRIGGER}")
    text = _text(fields, "data")
    encoded = "encoding" in fields and _choice(fields, "encoding", ("utf8", "base64")) == "base64"
    data = _from_base64(text) if encoded else text.encode()
    check_size(len(data), config)
    return data


def check_size(size: int, config: FanoutConfig) -> None:
    """Raise `BadBatchError` if data of so many bytes is more than a vehicle can be sent."""
    if size > config.max_payload:
        raise BadBatchError(f"data: {size} bytes are more than {config.max_payload} (option max_payload)")


def _from_base64(text: str) -> bytes:
    if found := _NO_BASE64.search(text):
        raise BadBatchError(f"data: not base64: {found[0]!r} at character {found.start() + 1}")
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except binascii.Error as error:
        raise BadBatchError(f"data: not base64: {error}") from error


def _data_id(fields: Mapping[str, Any]) -> str:
    if "data_id" not in fields and "data" in fields:
        raise BadBatchError(f"data_id is missing; a batch that carries its data goes to {INGRESS}")
    data_id = _text(fields, "data_id")
    check_data_id(data_id)
    return data_id


def _batch_id(fields: Mapping[str, Any]) -> str:
    batch_id = _text(fields, "batch_id")
    check_batch_id(batch_id)
    return batch_id


def _expires_in(value: Any) -> float:
    if type(value) not in (int, float):
        raise _wrong_type("expires_in", value, "a number of seconds")
    if not 0 < value <= MAX_EXPIRY:
        raise BadBatchError(f"expires_in: {_shown(value)} is not above 0 and at most {MAX_EXPIRY} seconds")
    return float(value)


def _priority(value: Any) -> int:
    if type(value) is not int:
        raise _wrong_type("priority", value, "a whole number")
    if not 0 <= value <= MAX_PRIORITY:
        raise BadBatchError(f"priority: {_shown(value)} is not 0 to {MAX_PRIORITY}")
    return value


def _choice(fields: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise _wrong_type(key, value, "a text")
    if value not in choices:
        raise BadBatchError(f"{key}: {_shown(value)} is none of {', '.join(choices)}")
    return value


# -- words


def _wrong_type(key: str, value: Any, wanted: str) -> BadBatchError:
    return BadBatchError(f"{key}: {_kind(value)} instead of {wanted}")


def _kind(value: Any) -> str:
    """Return the kind of a JSON value, for people; with the value where that says something."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {_shown(value)}"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}…"
    text = str(value) if not isinstance(value, int) or value.bit_length() <= 128 else "so large a number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
