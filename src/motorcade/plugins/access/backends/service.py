"""Asks an HTTP service.

    POST {"clientid", "username", "password", "peerhost", …}
    200  {"result": "allow" | "deny" | "ignore", "is_superuser"?, "client_attrs"?, "expire_at"?}

Fails closed: whatever is not this answer in time refuses the client. Redirects are not followed, and proxies of the
environment are not used: credentials go to the configured URL and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from typing import Literal

import httpx
import msgspec

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.errors import AccessFileError
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access.backends import ACL_ATTRIBUTE, Accepted, Answer
from motorcade.plugins.access.config import Http
from motorcade.plugins.access.fair import FairQueue
from motorcade.plugins.access.memory import SuccessCache

MAX_ANSWER = 64 * 1024  #: bytes

_UNAVAILABLE = Deny(ReasonCode.SERVER_UNAVAILABLE, "authentication is not available")


class ServiceAnswer(msgspec.Struct, frozen=True):
    """The service's answer. Other fields are ignored."""

    result: Literal["allow", "deny", "ignore"]
    is_superuser: bool = False
    client_attrs: dict[str, str] = {}
    expire_at: float | None = None  #: seconds since the epoch


class ServiceBackend:
    """Allows, denies or passes on as the service says."""

    def __init__(self, config: Http) -> None:
        self._config = config
        self._cache: SuccessCache[Accepted] = SuccessCache(config.cache_seconds, config.cache_size)
        at_once = min(config.pool, config.max_waiting)
        self._queue = FairQueue(at_once, config.max_waiting - at_once)
        try:
            self._http = httpx.AsyncClient(
                headers=config.headers,
                timeout=config.timeout,
                limits=httpx.Limits(max_connections=config.pool, max_keepalive_connections=config.pool),
                verify=ssl.create_default_context(cafile=config.ca_file),
                follow_redirects=False,
                trust_env=False,
            )
            url = httpx.URL(config.url)
            self.name = f"service {url.host}"  # for the log: the rest of the address may hold keys
        except (httpx.InvalidURL, ValueError) as error:
            raise AccessFileError(f"authentication by http: bad url or header: {error}") from error
        except OSError as error:
            raise AccessFileError(f"{config.ca_file}: cannot be used as certificate authority: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise AccessFileError(f"authentication by http: expected an http:// or https:// URL, found {config.url!r}")

    async def check(self, client: ClientInfo, credentials: Credentials, now: float, flow: str = "") -> Answer:
        if credentials.method is not None:
            return None
        known = self.remembered(client, credentials, now)
        if known is not None:
            return known
        if not await self._queue.enter(flow):
            return Deny(ReasonCode.SERVER_BUSY, "too many log-ins at once")
        try:
            async with asyncio.timeout(self._config.timeout):
                answer = await self._ask(_question(client, credentials))
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, _Unexpected) as error:
            return Deny(_UNAVAILABLE.reason, f"{_UNAVAILABLE.detail} ({type(error).__name__})")
        finally:
            self._queue.leave()
        return self._judge(answer, client, credentials, now)

    def remembered(self, client: ClientInfo, credentials: Credentials, now: float) -> Accepted | None:
        if credentials.method is not None:
            return None
        known = self._cache.get(_shown(client, credentials), now)
        if known is not None and known.allow.expires_at is not None and known.allow.expires_at <= now:
            return None
        return known

    async def close(self) -> None:
        self._queue.close()
        await self._http.aclose()

    async def _ask(self, question: dict[str, object]) -> ServiceAnswer:
        body = msgspec.json.encode(question)
        headers = {"content-type": "application/json", "accept": "application/json"}
        async with self._http.stream("POST", self._config.url, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise _Unexpected(f"status {response.status_code}")
            collected = bytearray()
            async for chunk in response.aiter_bytes():
                collected += chunk
                if len(collected) > MAX_ANSWER:
                    raise _Unexpected("the answer is too long")
        return msgspec.json.decode(collected, type=ServiceAnswer)

    def _judge(self, answer: ServiceAnswer, client: ClientInfo, credentials: Credentials, now: float) -> Answer:
        if answer.result == "ignore":
            return None
        if answer.result == "deny" or (answer.expire_at is not None and answer.expire_at <= now):
            return Deny()
        attributes = {key: value for key, value in answer.client_attrs.items() if key != ACL_ATTRIBUTE}
        allow = Allow(superuser=answer.is_superuser, attributes=attributes, expires_at=answer.expire_at)
        accepted = Accepted(allow)
        self._cache.put(_shown(client, credentials), accepted, now)
        return accepted


class _Unexpected(Exception):  # noqa: N818 - never leaves this file
    """The service answered something else than it should."""


def _shown(client: ClientInfo, credentials: Credentials) -> tuple[bytes | str | None, ...]:
    """Return everything that the service decides by."""
    certificate = client.certificate.subject if client.certificate else None
    return client.client_id, client.username, credentials.password, client.host, client.listener, certificate


def _question(client: ClientInfo, credentials: Credentials) -> dict[str, object]:
    question: dict[str, object] = {
        "clientid": client.client_id,
        "username": client.username,
        "peerhost": client.host,
        "peerport": client.port,
        "listener": client.listener,
        "proto_ver": client.version,
        "clean_start": client.clean_start,
        "keepalive": client.keep_alive,
    }
    if client.certificate is not None:
        question["cert_common_name"] = client.certificate.common_name
        question["cert_subject"] = client.certificate.subject
    try:
        question["password"] = credentials.password.decode() if credentials.password is not None else None
    except UnicodeDecodeError:
        question["password"] = None
        question["password_base64"] = base64.b64encode(credentials.password or b"").decode()
    return question
