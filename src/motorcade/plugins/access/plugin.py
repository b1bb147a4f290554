"""The access plugin: a chain of authentication backends and one rule file.

    CONNECT -> too many failures? -> backend, backend, … -> no decision: anonymous? -> is the client id its own?

Rule 1: everything fails closed. A file that is not understood keeps the plugin from starting, and on reload keeps
what was in force; a backend that raises or takes too long refuses the client.
Rule 2: where backends are configured, a client is anonymous only if it shows nothing: no user name, no password.
What no backend accepts is refused, so that a backend may always pass on.
Rule 3: a client hears the same about a wrong password as about a user that does not exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.errors import AccessFileError
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Continue, Decision, Deny, Stop
from motorcade.extension.metrics import Counts, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.plugins.access import aclfile, backends
from motorcade.plugins.access.backends import ACL_ATTRIBUTE, Accepted, Backend
from motorcade.plugins.access.config import AccessConfig, Jwt
from motorcade.plugins.access.expressions import SubjectError
from motorcade.plugins.access.memory import Failures, Known, network_of
from motorcade.plugins.access.metrics import COUNTS, FAILURE_BYTES, KNOWN_BYTES
from motorcade.plugins.access.rules import Action, Rule, first_match, needs_rule

HOOK_TIMEOUT = 60.0  #: seconds; behind `timeout` of the configuration and the delay after failures
MAX_DELAY = 2.0  #: seconds that the answer to a failed log-in is held back at most
MAX_SHOWN = 64  #: characters of a user name in the log
MAX_CLAIMS = 1000  #: different rule claims of tokens that are kept compiled

#: What counts as a failed log-in. Being busy or unavailable is our failure, not the client's.
_FAILURES = (ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.NOT_AUTHORIZED, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)


@dataclass(frozen=True, slots=True)
class _InForce:
    """Everything that was read from files; replaced as a whole."""

    chain: tuple[Backend, ...]
    rules: aclfile.RuleFile | None

    async def close(self) -> None:
        for backend in self.chain:
            await backend.close()


class AccessPlugin(Plugin):
    """Authenticates clients and authorizes what they publish and subscribe to."""

    Config: ClassVar[type[msgspec.Struct]] = AccessConfig
    description: ClassVar[str] = "authentication (password file, JWT, HTTP, certificate) and access rules"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS

    config: AccessConfig

    def __init__(self, context: Context, config: AccessConfig) -> None:
        super().__init__(context, config)
        self._in_force = _InForce((), None)
        self._failures = Failures(config.max_failures, config.max_failure_entries)
        self._addresses = Failures(config.max_address_failures, config.max_failure_entries)
        self._known = Known(config.max_known)
        self._claims: OrderedDict[str, tuple[Rule, ...]] = OrderedDict()

    def tables(self) -> Iterable[Table]:
        failures, known, config = len(self._failures) + len(self._addresses), len(self._known), self.config
        bound = 2 * config.max_failure_entries * FAILURE_BYTES
        yield Table("access_failures", failures, failures * FAILURE_BYTES, bound)
        yield Table("access_known", known, known * KNOWN_BYTES, config.max_known * KNOWN_BYTES)

    async def start(self) -> None:
        self._in_force = await asyncio.to_thread(_read, self.config)
        self._tell("access_loaded")

    async def reload(self, config: AccessConfig) -> None:
        """Read everything again; an `AccessFileError` leaves all as it was."""
        fresh = await asyncio.to_thread(_read, config)
        old, self._in_force = self._in_force, fresh
        self.config = config
        self._failures.limit = config.max_failures
        self._addresses.limit = config.max_address_failures
        self._failures.size = self._addresses.size = config.max_failure_entries
        self._known.size = config.max_known
        self.context.counters["reloaded"] += 1
        self._tell("access_reloaded")
        self.context.hub.recheck_access()
        await old.close()

    async def stop(self) -> None:
        await self._in_force.close()

    @property
    def _anonymous(self) -> str:
        if self.config.anonymous != "auto":
            return self.config.anonymous
        return "deny" if self.config.authentication else "loopback"

    def _tell(self, event: str) -> None:
        rules = self._in_force.rules
        self.context.log.info(
            event,
            backends=[backend.name for backend in self._in_force.chain],
            anonymous=self._anonymous,
            rules=len(rules.rules) if rules else None,
        )
        for warning in rules.warnings() if rules else ():
            self.context.log.warning("access_rules", warning=warning)

    # --- authentication ---

    @hook("client.authenticate", timeout=HOOK_TIMEOUT)
    def authenticate(
        self, client: ClientInfo, credentials: Credentials, so_far: Decision | None
    ) -> Stop | Continue | Awaitable[Stop | Continue | None] | None:
        """Ask the chain. Without one there is nothing to wait for."""
        if not self._in_force.chain:
            return self._undecided(client, credentials, so_far)
        return self._ask_chain(client, credentials, so_far)

    async def _ask_chain(
        self, client: ClientInfo, credentials: Credentials, so_far: Decision | None
    ) -> Stop | Continue | None:
        name = client.username or client.client_id
        now = self.context.hub.now()
        chain = self._in_force.chain
        known = self._known.has(name, client.host)
        if self._failures.blocked(name, client.host, now) or (
            not known and self._addresses.blocked("", client.host, now)
        ):
            return self._answer_blocked(client, credentials, chain, self.context.hub.wall())
        # A name that has got in from this address before does not wait behind what else comes from there.
        flow = f"{network_of(client.host)} {name}" if known else network_of(client.host)
        for backend in chain:
            answer = await self._ask(backend, client, credentials, self.context.hub.wall(), flow)
            if isinstance(answer, Deny):
                return await self._refuse(client, answer, backend.name)
            if answer is not None:
                answer = self._bound(client, answer)
                if isinstance(answer, Deny):
                    return await self._refuse(client, answer, backend.name)
                self._failures.forget(name, client.host)
                self._known.add(name, client.host)
                return self._admit(client, answer, backend.name)
        if client.username or credentials.password is not None or credentials.method is not None:
            wrong_method = Deny(ReasonCode.BAD_AUTHENTICATION_METHOD, "no plugin knows this authentication method")
            if so_far is not None:
                return None
            return await self._refuse(client, wrong_method if credentials.method else Deny(), "nobody", final=False)
        return self._undecided(client, credentials, so_far)

    async def _ask(
        self, backend: Backend, client: ClientInfo, credentials: Credentials, now: float, flow: str
    ) -> Accepted | Deny | None:
        try:
            async with asyncio.timeout(self.config.timeout):
                return await backend.check(client, credentials, now, flow)
        except TimeoutError:
            return Deny(ReasonCode.SERVER_BUSY, "the log-in took too long")

    def _answer_blocked(
        self, client: ClientInfo, credentials: Credentials, chain: tuple[Backend, ...], now: float
    ) -> Stop:
        """Let in, after too many failures, only a client that got in with the same credentials a short while ago.

        So a vehicle is not locked out by another client that tries its name from behind the same gateway.
        """
        for backend in chain:
            known = backend.remembered(client, credentials, now)
            answer = self._bound(client, known) if known is not None else None
            if isinstance(answer, Accepted):
                return self._admit(client, answer, backend.name)
        self.context.counters["throttled"] += 1
        self.context.log.warning(
            "login_throttled", client_id=client.client_id, username=_shown(client.username), host=client.host
        )
        return Stop(Deny(ReasonCode.CONNECTION_RATE_EXCEEDED, "too many failed log-ins, try again later"))

    def _bound(self, client: ClientInfo, accepted: Accepted) -> Accepted | Deny:
        """Hold the client to its own client id, if that is configured."""
        allow = accepted.allow
        match self.config.bind_client_id:
            case "username":
                own = allow.username if allow.username is not None else client.username
            case "cn":
                own = client.certificate.common_name if client.certificate else None
            case "claim":
                own = accepted.claimed_client_id
            case "off":
                return accepted
        wanted = allow.client_id if allow.client_id is not None else client.client_id
        if not own or own != wanted:
            return Deny(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "this identity may not use this client id")
        return Accepted(dataclasses.replace(allow, client_id=own), accepted.claimed_client_id)

    def _admit(self, client: ClientInfo, accepted: Accepted, by: str) -> Stop:
        self.context.counters["allowed"] += 1
        self.context.log.debug("login_accepted", client_id=client.client_id, username=_shown(client.username), by=by)
        return Stop(accepted.allow)

    async def _refuse(self, client: ClientInfo, deny: Deny, by: str, *, final: bool = True) -> Stop | Continue:
        self.context.counters["denied"] += 1
        self.context.log.warning(
            "login_refused",
            client_id=client.client_id,
            username=_shown(client.username),
            host=client.host,
            by=by,
            reason=deny.reason.name,
            detail=deny.detail,
        )
        if deny.reason in _FAILURES:
            name = client.username or client.client_id
            now = self.context.hub.now()
            self._addresses.failed("", client.host, now)
            count = self._failures.failed(name, client.host, now)
            # Holding the answer back slows guessing down; the connection counts as not logged in meanwhile.
            await asyncio.sleep(min(MAX_DELAY, self.config.failure_delay * count))
        return Stop(deny) if final else Continue(deny)

    def _undecided(
        self, client: ClientInfo, credentials: Credentials, so_far: Decision | None
    ) -> Stop | Continue | None:
        """Answer when no backend decided. Plugins behind this one may still decide; if none does, this holds."""
        if so_far is not None:
            return None
        if credentials.method is not None:
            return Continue(Deny(ReasonCode.BAD_AUTHENTICATION_METHOD, "no plugin knows this authentication method"))
        anonymous = self._anonymous
        if self.config.bind_client_id == "off" and (
            anonymous == "allow" or (anonymous == "loopback" and client.is_loopback)
        ):
            self.context.counters["anonymous"] += 1
            return Continue(Allow())
        self.context.counters["denied"] += 1
        self.context.log.warning("login_refused", client_id=client.client_id, host=client.host, by="anonymous")
        return Continue(Deny(ReasonCode.NOT_AUTHORIZED, "a log-in is needed"))

    # --- authorization ---

    @hook("client.authorize")
    def authorize(self, client: ClientInfo, action: str, asked: str, so_far: bool | None) -> Stop | Continue | None:
        """Decide by the first rule that applies; the broker remembers the answer for the connection."""
        if client.superuser:
            return Stop(True)
        claim = client.attributes.get(ACL_ATTRIBUTE)
        file = self._in_force.rules
        needed = needs_rule(client, Action(action), asked)
        if claim is None and file is None and not (needed and self._in_force.chain):
            return Continue(True) if so_far is None else None
        rule = first_match(self._claimed(claim), client, Action(action), asked) if claim is not None else None
        try:
            if rule is None and file is not None:
                rule = file.match(client, Action(action), asked)
        except SubjectError:
            self.context.counters["name_too_long"] += 1
            return Stop(False)
        if rule is None and so_far is not None:
            return None
        empty = file is not None and not file.rules
        allowed = rule.allow if rule is not None else self.config.no_match == "allow" and not empty and not needed
        if not allowed:
            self.context.counters[f"{action}_denied"] += 1
            self.context.log.debug(  # no louder: a client must not fill the log at the rate at which it can publish
                "access_denied",
                client_id=client.client_id,
                username=_shown(client.username),
                action=action,
                topic=asked,
                rule=f"{file.name}:{rule.line}" if rule is not None and rule.line and file is not None else None,
            )
        return Stop(allowed) if rule is not None else Continue(allowed)

    def _claimed(self, claim: str) -> tuple[Rule, ...]:
        rules = self._claims.get(claim)
        if rules is None:
            rules = self._claims[claim] = aclfile.claimed_rules(json.loads(claim))
            if len(self._claims) > MAX_CLAIMS:
                self._claims.popitem(last=False)
        return rules


def _read(config: AccessConfig) -> _InForce:
    """Read every file; all of them or `AccessFileError`. Runs in a thread: large files must not hold up clients."""
    _check(config)
    rules = aclfile.load(config.acl_file, config.acl_format) if config.acl_file else None
    return _InForce(tuple(backends.build(options) for options in config.authentication), rules)


def _check(config: AccessConfig) -> None:
    """Refuse configurations in which no client could ever log in."""
    kinds = config.authentication
    if config.bind_client_id == "claim" and not any(isinstance(k, Jwt) and k.client_id_claim for k in kinds):
        raise AccessFileError("bind_client_id = 'claim' needs authentication by jwt with client_id_claim")
    if config.bind_client_id != "off" and not kinds:
        raise AccessFileError("bind_client_id needs at least one way of authentication")


def _shown(username: str | None) -> str | None:
    """Return a user name for the log. A long one may be a token: only its beginning is told."""
    return username if username is None or len(username) <= MAX_SHOWN else f"{username[:8]}…"
