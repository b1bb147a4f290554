"""The data types of MQTT (chapter 1.5) as bytes: integers, strings, binary data.

Writers return the bytes and raise ValueError for what cannot be said. Readers take the body and a position, return the
value and the position after it, and raise `ProtocolError`; `field` names what is being read in the error's message.
"""

from __future__ import annotations

from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.reasons import ProtocolError

MAX_VARINT = 268_435_455  #: four digits of seven bits
MAX_LENGTH = 65_535  #: bytes of a string or of binary data


def malformed(detail: str) -> ProtocolError:
    """Return the error for bytes that cannot be decoded."""
    return ProtocolError(ReasonCode.MALFORMED_PACKET, detail)


def violation(detail: str) -> ProtocolError:
    """Return the error for bytes that can be decoded, but break the protocol."""
    return ProtocolError(ReasonCode.PROTOCOL_ERROR, detail)


# --- writing ------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """Encode a Variable Byte Integer in its shortest form."""  # [MQTT-1.5.5-1]
    if 0 <= number < 0x80:
        return bytes((number,))
    if 0 <= number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if not 0 <= number <= MAX_VARINT:
        raise ValueError(f"{number} does not fit a variable byte integer")
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def two(number: int) -> bytes:
    """Encode a Two Byte Integer."""
    if not 0 <= number <= 0xFFFF:
        raise ValueError(f"{number} does not fit two bytes")
    return number.to_bytes(2, "big")


def four(number: int) -> bytes:
    """Encode a Four Byte Integer."""
    if not 0 <= number <= 0xFFFF_FFFF:
        raise ValueError(f"{number} does not fit four bytes")
    return number.to_bytes(4, "big")


def utf8(text: str) -> bytes:
    """Encode a UTF-8 Encoded String with its length."""
    raw = text.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError: [MQTT-1.5.4-1]
    if "\0" in text:
        raise ValueError("a string must not contain U+0000")  # [MQTT-1.5.4-2]
    return binary(raw)


def binary(data: bytes) -> bytes:
    """Encode Binary Data with its length."""
    if len(data) > MAX_LENGTH:
        raise ValueError(f"{len(data)} bytes do not fit a field of at most {MAX_LENGTH}")
    return len(data).to_bytes(2, "big") + data


# --- reading ------------------------------------------------------------------------------------------------------


def read_byte(body: bytes, at: int, field: str) -> tuple[int, int]:
    """Read one byte."""
    if at >= len(body):
        raise malformed(f"packet ends before {field}")
    return body[at], at + 1


def read_two(body: bytes, at: int, field: str) -> tuple[int, int]:
    """Read a Two Byte Integer."""
    end = at + 2
    if end > len(body):
        raise malformed(f"packet ends before {field}")
    return int.from_bytes(body[at:end], "big"), end


def read_four(body: bytes, at: int, field: str) -> tuple[int, int]:
    """Read a Four Byte Integer."""
    end = at + 4
    if end > len(body):
        raise malformed(f"packet ends before {field}")
    return int.from_bytes(body[at:end], "big"), end


def read_varint(body: bytes, at: int, field: str) -> tuple[int, int]:
    """Read a Variable Byte Integer; only the shortest form is right."""
    number, at = read_byte(body, at, field)
    if number < 0x80:
        return number, at
    number &= 0x7F
    for shift in (7, 14, 21):
        digit, at = read_byte(body, at, field)
        number |= (digit & 0x7F) << shift
        if digit < 0x80:
            if not digit:
                raise malformed(f"{field} is not in its shortest form")  # [MQTT-1.5.5-1]
            return number, at
    raise malformed(f"{field} is longer than four bytes")


def read_binary(body: bytes, at: int, field: str) -> tuple[bytes, int]:
    """Read Binary Data."""
    start = at + 2
    end = start + int.from_bytes(body[at:start], "big")
    if start > len(body) or end > len(body):
        raise malformed(f"packet ends inside {field}")
    return body[start:end], end


def read_utf8(body: bytes, at: int, field: str) -> tuple[str, int]:
    """Read a UTF-8 Encoded String. A byte order mark is a character like any other: [MQTT-1.5.4-3]."""
    raw, end = read_binary(body, at, field)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"{field} is not UTF-8") from error  # [MQTT-1.5.4-1], 3.1.1: [MQTT-1.5.3-1]
    if "\0" in text:
        raise malformed(f"{field} contains U+0000")  # [MQTT-1.5.4-2], 3.1.1: [MQTT-1.5.3-2]
    return text, end
