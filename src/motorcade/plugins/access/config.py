"""The configuration of the access plugin, `[plugins.access]`. Every bound has its name and default here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from motorcade.plugins.access.aclfile import Format

Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Algorithm = Literal[
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
NameInCertificate = Literal["cn", "san", "dn"]


class BackendConfig(Struct, forbid_unknown_fields=True, frozen=True, tag_field="type"):
    """The options that all ways to authenticate have in common: they are told apart by `type`."""


class Password(BackendConfig, tag="password", frozen=True):
    """User names and password hashes in a file."""

    file: str
    superusers: tuple[str, ...] = ()  #: users that access rules do not concern
    workers: Positive = 2  #: threads that check passwords; one check takes tens of milliseconds
    max_waiting: Positive = 100  #: log-ins that may wait for a thread; the next ones hear "server busy"
    cache_seconds: Seconds = 300.0  #: how long a right password need not be hashed again; 0 is always hash
    cache_size: Positive = 10_000  #: passwords remembered (as keyed hashes); the oldest is forgotten first


class Jwt(BackendConfig, tag="jwt", frozen=True):
    """A JSON Web Token as password (or as data of enhanced authentication with method `JWT`)."""

    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)]
    secret: str | None = None
    secret_file: str | None = None
    public_key_file: str | None = None
    jwks_file: str | None = None
    from_: Literal["password", "username"] = msgspec.field(default="password", name="from")
    username_claim: str = "sub"
    client_id_claim: str | None = None  #: the client id must be what this claim says
    acl_claim: str | None = "acl"  #: rules that go before those of the rule file
    superuser_claim: str | None = None
    attributes_claim: str | None = "client_attrs"
    verify_claims: dict[str, str] = {}  #: claims that must be as given, after filling in ${clientid} and ${username}
    require: tuple[str, ...] = ()  #: claims that must be there, for instance ["exp"]
    issuer: str | None = None
    audience: str | None = None
    leeway: Seconds = 0.0  #: by how much clocks may differ


class Http(BackendConfig, tag="http", frozen=True):
    """Ask a service: POST with JSON, answered with JSON."""

    url: str
    timeout: Annotated[float, Meta(gt=0)] = 2.0  #: seconds for the whole exchange; then the client is refused
    pool: Positive = 16  #: connections to the service
    max_waiting: Positive = 1000  #: questions under way; the next ones hear "server busy"
    headers: dict[str, str] = {}
    ca_file: str | None = None
    cache_seconds: Seconds = 60.0  #: how long "allow" need not be asked for again; 0 is always ask
    cache_size: Positive = 10_000


class ClientCertificate(BackendConfig, tag="certificate", frozen=True):
    """The TLS certificate that the listener has verified."""

    username: NameInCertificate = "cn"
    client_id: NameInCertificate | None = None  #: the client gets this part of the certificate as client id


AnyBackend = Password | Jwt | Http | ClientCertificate


class AccessConfig(Struct, forbid_unknown_fields=True, frozen=True):
    """The options of access: authentication and rules."""

    authentication: tuple[AnyBackend, ...] = ()  #: asked in this order until one decides
    #: clients that show nothing; auto: deny where backends are configured, else loopback
    anonymous: Literal["auto", "loopback", "allow", "deny"] = "auto"
    acl_file: str | None = None
    acl_format: Format = Format.AUTO
    no_match: Literal["deny", "allow"] = "deny"  #: when there are rules and none applies
    bind_client_id: Literal["off", "username", "claim", "cn"] = "off"  #: what the client id must be equal to
    timeout: Annotated[float, Meta(gt=0, le=30)] = 5.0  #: seconds that one log-in may take; then it is refused
    max_failures: Annotated[int, Meta(ge=0)] = 10  #: failed log-ins per minute, user name and address; 0 is no limit
    max_address_failures: Annotated[int, Meta(ge=0)] = 100  #: the same per minute and address, all names; 0 is no limit
    max_failure_entries: Positive = 10_000  #: names and addresses watched; the oldest is forgotten first
    max_known: Annotated[int, Meta(ge=0)] = 100_000  #: names and addresses that got in and are preferred during a flood
    failure_delay: Annotated[float, Meta(ge=0, le=10)] = (
        0.2  #: seconds, times the failures of the last minute, at most 2
    )
