"""Questions about two topic filters, which an access rule asks about a subscription.

    covers(a, b)    every topic that `b` matches is matched by `a`: an allow rule with `a` may grant `b`
    overlaps(a, b)  some topic is matched by both: a deny rule with `a` must refuse `b`

Both take valid filters. A filter that begins with a wildcard never matches a topic that begins with `$`,
so `#` covers neither `$SYS/#` nor overlaps with it. [MQTT-4.7.2-1]
"""

from __future__ import annotations


def covers(wide: str, narrow: str) -> bool:
    """Return True if `wide` matches everything that `narrow` matches."""
    if wide == narrow:
        return True
    if narrow[0] == "$" and wide[0] in "+#":
        return False
    if narrow == "#":
        return wide == "+/#"  # no topic has less than one level, so these two say the same
    rest = wide.split("/")
    levels = narrow.split("/")
    for i, level in enumerate(rest):
        if level == "#":
            return True
        if i >= len(levels) or levels[i] == "#" or level not in ("+", levels[i]):
            return False
    return len(rest) == len(levels)


def overlaps(one: str, other: str) -> bool:
    """Return True if a topic exists that both filters match."""
    if one == other:
        return True
    if (one[0] == "$" and other[0] in "+#") or (other[0] == "$" and one[0] in "+#"):
        return False
    a = one.split("/")
    b = other.split("/")
    for x, y in zip(a, b, strict=False):
        if "#" in (x, y):
            return True
        if x != y and "+" not in (x, y):
            return False
    longer = a if len(a) > len(b) else b
    shorter = min(len(a), len(b))
    return len(longer) == shorter or longer[shorter] == "#"
