"""Members that have links and nothing else, in the loop of the test.

async with member("a", 1) as a, member("b", 2) as b:
    await a.meets(b)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trustme
from msgspec.structs import replace

from motorcade.cluster.greeting import Hello, Identity
from motorcade.cluster.link import Link
from motorcade.cluster.links import Links
from motorcade.cluster.options import LinkOptions
from motorcade.cluster.security import LinkSecurity, link_security
from motorcade.extension.cluster import Peer
from motorcade.tasks import Tasks
from tests.support.standing_clock import StandingLoop, until

OPTIONS = LinkOptions(bind="127.0.0.1:0")


class Member:
    """A member, and what it was told."""

    def __init__(self, me: Identity, options: LinkOptions, security: LinkSecurity | None) -> None:
        self.me = me
        self.items: list[tuple[str, bytes]] = []  #: from whom, and the item
        self.events: list[str] = []
        self.refusals: list[str] = []
        self.pongs: list[tuple[str, float, bytes]] = []
        self.pong_body = b"positions"
        self.refuses = ""
        self.address = ""
        self.links = Links(me, self, options, security or link_security(options), Tasks())
        self.links.on_item("item", self.take)

    @property
    def id(self) -> str:
        return self.me.id

    def take(self, peer: Peer, body: bytes) -> None:
        self.items.append((peer.id, body))

    def link(self, other: Member) -> Link:
        link = self.links.peer(other.id)
        assert link is not None
        return link

    def linked_to(self, other: Member) -> bool:
        link = self.links.peer(other.id)
        return link is not None and link.wire is not None

    def expects(self, other: Member, address: str = "") -> None:
        self.links.expect([(other.id, other.me.number, address or other.address)])

    async def meets(
        self, other: Member, address: str = "", until: Callable[..., Awaitable[object]] = until
    ) -> tuple[Link, Link]:
        """Have a link to another member, perhaps by another way."""
        low, high = sorted((self, other), key=lambda one: one.me.number)
        high.expects(low, address)
        await until(lambda: low.linked_to(high) and high.linked_to(low), "linked")
        return self.link(other), other.link(self)

    # -- LinksOwner

    def admit(self, hello: Hello) -> str:
        return self.refuses

    def linked(self, link: Link) -> None:
        self.events.append(f"linked {link.id}")

    def unlinked(self, link: Link, why: str) -> None:
        self.events.append(f"unlinked {link.id}: {why}")

    def refused(self, member: str, why: str) -> None:
        self.refusals.append(why)

    def pong(self, link: Link) -> bytes:
        return self.pong_body

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        self.pongs.append((link.id, sent_at, body))


@asynccontextmanager
async def member(
    name: str,
    number: int,
    options: LinkOptions = OPTIONS,
    *,
    cluster: str = "fleet",
    store: str = "store-1",
    token: bytes = b"",
    security: LinkSecurity | None = None,
) -> AsyncIterator[Member]:
    me = Identity(cluster, store, name, number, token or f"token of {name}".encode(), "1.0")
    one = Member(me, options, security)
    one.address = await one.links.open()
    try:
        yield one
    finally:
        closing = asyncio.ensure_future(one.links.close())
        if isinstance(asyncio.get_running_loop(), StandingLoop):
            await until(closing.done, "closed")
        await closing


class Papers:
    """Certificates of members, from the right authority and from another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.foreign = trustme.CA(), trustme.CA()
        self.ca.cert_pem.write_to_path(folder / "ca.pem")
        self.foreign.cert_pem.write_to_path(folder / "foreign.pem")

    def options(
        self, host: str = "127.0.0.1", *, foreign: bool = False, ca: str = "ca", secret: bytes = b""
    ) -> LinkOptions:
        """Return the options of a member with a certificate for a host."""
        leaf = (self.foreign if foreign else self.ca).issue_cert(host)
        name = f"{host}-{foreign}"
        leaf.cert_chain_pems[0].write_to_path(self.folder / f"{name}.pem")
        leaf.private_key_pem.write_to_path(self.folder / f"{name}.key")
        return replace(
            self.secret(secret) if secret else OPTIONS,
            certificate=str(self.folder / f"{name}.pem"),
            key=str(self.folder / f"{name}.key"),
            ca=str(self.folder / f"{ca}.pem") if ca else "",
        )

    def secret(self, secret: bytes) -> LinkOptions:
        file = self.folder / secret.hex()
        file.write_bytes(secret + b"\n")
        file.chmod(0o600)
        return replace(OPTIONS, secret_file=str(file))
