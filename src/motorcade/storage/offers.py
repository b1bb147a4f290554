"""Messages that are offered to a client: the store looks which of its subscriptions match.

    records `subscription` of the client ─▶ those of its mailbox that match ─▶ body … granted, retained, identifiers, ""

The store reads of such a record what decides who gets what: the first fields of `session_records.SubscriptionRecord`,
and the generation. The body that a publisher gives ends where these values begin, which are the last fields of
`session_records.SessionEntry`. lua/offer.lua does the same as this file.

Rule 1: of several subscriptions that match one copy is made, with the highest QoS and the identifiers of all, in the
        order of their filters.
Rule 2: a record of another generation than the mailbox is a left-over of a session that has ended. 0 stands for any.
Rule 3: shared subscriptions do not count: the publisher's node chooses who gets their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from motorcade.core.topic import matches
from motorcade.storage.homes import records_of
from motorcade.storage.ports import Draft, Offer, Offered

SUBSCRIPTIONS: Final = "subscription"
SHARED: Final = "$share/"


class SubscriptionTerms(msgspec.Struct, array_like=True, gc=False):
    """The terms of a subscription, as far as the store knows it from its record."""

    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int = 0
    identifier: int = 0
    user_properties: msgspec.Raw = msgspec.Raw()
    generation: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SubscriptionTerms).decode


def offered(offer: Offer, home: str, records: Mapping[str, bytes], generation: int) -> Offered | None:
    """Return how a client gets a message; None if no subscription matches. `generation`: of its mailbox; 0: none."""
    prefix, _ = records_of(home, SUBSCRIPTIONS)
    found: list[SubscriptionTerms] = []
    for key in sorted(records):
        filter_ = key[len(prefix) :]
        if filter_.startswith(SHARED) or not matches(filter_, offer.topic):
            continue
        terms = _decode(records[key])
        if terms.generation in (0, generation) and not (offer.own and terms.no_local):
            found.append(terms)
    if not found:
        return None
    return Offered(
        max(min(offer.qos, terms.qos) for terms in found),
        offer.retain and any(terms.retain_as_published for terms in found),
        tuple(terms.identifier for terms in found if terms.identifier),
    )


def body_of(beginning: bytes, found: Offered) -> bytes:
    """Return the body of an entry."""
    return beginning + b"".join(map(_encode, (found.granted, found.retained, found.identifiers, "")))


def draft_of(draft: Draft, found: Offered) -> Draft:
    """Return the entry that is appended."""
    return msgspec.structs.replace(draft, body=body_of(draft.body, found), droppable=not found.granted)


def is_stored(offer: Offer, found: Offered, attached: str) -> bool:
    """Return True if it is appended; else the member that has the client attached gives it to it, if there is one."""
    return found.granted > 0 or (offer.keep_qos0 and not attached)
