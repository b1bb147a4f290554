"""Options of dispatchers and workers, and the names of their keys in Redis.

All keys, with the default names, which `[dispatch]` may change and put a prefix before:

    messages:published                      stream   what is to be processed; or the channel of that name
    messages:received                       stream   what came over the channel (`intake`), until it is processed
    {messages:received}:call                hash     the call that has put something into it last, and how much
    messages:pending                        zset     message id -> when it was handed to a worker last (ms)
    {messages:pending}:deliveries           hash     message id -> deliveries, of those that took more than one
    messages:processed                      stream   id, payload, worker: one entry per message
    {messages:processed}:seen:0, :1         sets     message ids that were written, the newer and the older half
    {messages:processed}:seen               hash     which of the two is the newer one, and since when
    messages:dead                           stream   id, payload, reason, deliveries, worker, time: what was given up
    {messages:dead}:ids                     hash     message id -> entry, while its place in the intake is cleared
    {messages:published}:origin             string   number that tells ids of this consumer group from those of others
    {messages:published}:trimmed            hash     entries that were trimmed before they were read or finished
    {messages:published}:retried:ENTRY      string   a dead letter that was sent back; expires
    consumer:ids                            zset     HOST:PORT of workers that live -> until when (ms)
    distributed_leader_lock                 string   token of the leader; expires with its lease
    {distributed_leader_lock}:epoch         string   number of the leadership given last
    {distributed_leader_lock}:state         string   JSON: what the leader tells about itself; expires
    {KEY}:fence                             string   `EPOCH TOKEN` of who may write KEY, for each KEY a leader writes

On a cluster a key and what stands beside it have the same hash tag, so one script can change them together; different
names above lie wherever they lie.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

#: Fields of a stream's entry that are the message, the first one found; capture rules write `payload`. An entry with
#: one field is that field's value; any other entry is a JSON object of its fields.
MESSAGE_FIELDS: Final = (b"payload", b"message", b"data")

SCHEMES: Final = ("redis", "rediss", "redis+cluster", "rediss+cluster")
_ADDRESS: Final = re.compile(r"(?:\[[^\]]+\]|[^:\[\]\s]+):(\d{1,5})")


class DispatchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dispatchers and workers: `motorcade dispatch leader` and `motorcade dispatch worker`."""

    redis: str = "redis://127.0.0.1:6379"  #: `redis://HOST:PORT` or `redis+cluster://HOST:PORT,…`; rediss for TLS
    workers: tuple[str, ...] = ()  #: `HOST:PORT` of workers, besides those that register themselves
    intake: Literal["stream", "channel"] = "stream"  #: channel: pub/sub, at most once until the leader has received it

    prefix: str = ""  #: of the names of all keys, and of the channel
    published: str = "messages:published"  #: stream or channel that messages come from
    received: str = "messages:received"  #: stream that keeps what came over the channel
    processed: str = "messages:processed"  #: stream that workers write to
    pending: str = "messages:pending"  #: sorted set of what is on its way to a worker
    dead: str = "messages:dead"  #: stream of what was given up
    lock: str = "distributed_leader_lock"  #: the leader's lease
    registry: str = "consumer:ids"  #: sorted set of workers that live
    group: str = "dispatch"  #: consumer group of the intake
    keep_published: bool = False  #: leave processed entries in the intake, for other readers, which have to trim it

    lease: Seconds = 2.0  #: seconds that a leader keeps the lock without a renewal
    ack_timeout: Seconds = 2.0  #: seconds that a worker has for a message before another one gets it
    max_deliveries: Positive = 5  #: of one message; then it is put into `dead`
    retry_pause: Seconds = 0.1  #: seconds before a message that a worker has refused is sent again; doubled each time
    window: Positive = 1024  #: messages that a worker may have at once, sent and not acknowledged
    window_bytes: Positive = 8 * 1024 * 1024  #: of their payloads together; one message may always be sent
    batch: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 512  #: messages that are read at once, at most
    batch_bytes: Positive = 4 * 1024 * 1024  #: of a batch, about, as far as sizes so far tell
    max_message: Positive = 1024 * 1024  #: bytes; larger ones are put into `dead`
    max_received: Positive = 1_000_000  #: messages of the channel that wait; more are dropped
    max_receiving: Positive = 20_000  #: messages of the channel on their way to `received`; more are dropped
    max_dead: Count = 100_000  #: entries of `dead`, about; the oldest go first; 0: all are kept
    max_processed: Count = 0  #: entries of `processed`, about; the oldest go first; 0: all are kept
    max_workers: Positive = 1000  #: workers that a leader is connected with; more are ignored
    cut_off: Seconds = 1.0  #: seconds that a worker that broke the rules is left alone; doubled each time, to a minute
    stop_patience: Seconds = 5.0  #: seconds that what has begun may take when a leader or a worker is stopped
    replicas: int = -1  #: that confirm a write before it counts; -1: one, if the server has any

    secret_file: str = ""  #: file with a secret that leaders and workers show each other that they know; empty: none
    tls_cert: str = ""  #: PEM file with the certificate of a worker, or of a leader; empty: a worker has no TLS
    tls_key: str = ""  #: PEM file with its private key
    tls_ca: str = ""  #: PEM file with the CA that has signed the other side's; a leader with one connects with TLS

    listen: str = "127.0.0.1:9701"  #: `HOST:PORT` where a worker waits for leaders; port 0: any
    advertise: str = ""  #: `HOST:PORT` under which leaders find the worker; empty: as `listen`
    register: bool = True  #: whether a worker puts itself into `registry`
    parallel: Positive = 8  #: calls of a handler at the same time in one worker
    max_leaders: Positive = 100  #: leaders that may be connected with a worker; more are closed at once
    max_waiting: Positive = 10_000  #: messages in a worker; with more, it stops reading
    remember: Seconds = 120.0  #: seconds, at least, that a written id is known; what is half as old is not written
    handler: str = ""  #: `module:function` that works on messages; empty: the message is written as it came
    report: Seconds = 3.0  #: seconds between two lines about messages per second

    def __post_init__(self) -> None:
        if self.redis.partition("://")[0] not in SCHEMES:
            raise ValueError("redis: must be redis://…, rediss://…, redis+cluster://… or rediss+cluster://…")
        for name in ("published", "received", "processed", "pending", "dead", "lock", "registry"):
            if problem := _wrong_name(self.prefix + getattr(self, name)):
                raise ValueError(f"{name}: {problem}")
        _check_addresses("workers", *self.workers)
        _check_addresses("listen", self.listen)
        if self.advertise:
            _check_addresses("advertise", self.advertise)
        if self.handler and not all(self.handler.partition(":")):
            raise ValueError(f"handler: {self.handler!r} is not module:function")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key: each needs the other")
        if self.remember < 5 * self.ack_timeout:
            raise ValueError("remember: must be at least five times ack_timeout")

    def key(self, name: str) -> str:
        """Return the full name of `published`, `pending`, …"""
        found: str = self.prefix + getattr(self, name)
        return found

    def beside(self, name: str, what: str) -> str:
        """Return a key in the same slot as `key(name)`."""
        return f"{{{hash_tag(self.key(name))}}}:{what}"

    @property
    def source(self) -> str:
        """The option that names the stream that messages are read from."""
        return "published" if self.intake == "stream" else "received"


def hash_tag(key: str) -> str:
    """Return the part of a key that decides its slot in a cluster."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if 0 <= start < end - 1 else key


def _check_addresses(option: str, *texts: str) -> None:
    for text in texts:
        found = _ADDRESS.fullmatch(text)
        if found is None or int(found[1]) > 65535:
            raise ValueError(f"{option}: {text!r} is not HOST:PORT or [IPV6]:PORT")


def _wrong_name(key: str) -> str:
    if not key or len(key) > 512 or "\0" in key:
        return "a name has 1 to 512 characters and no U+0000"
    if "}" in hash_tag(key):
        return f"{key!r}: with '}}' in it, a name must have a part in braces, as in 'fleet:{{eu}}'"
    return ""
