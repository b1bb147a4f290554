"""JSON Web Tokens.

Rule 1: algorithms are a fixed list, and of the same kind as the key: a public key is never taken for a shared secret.
Rule 2: a token that is not signed by our key passes on (another backend may know the key). A token of ours that has
expired, or says something else than it must, is refused.
Rule 3: the user name is the one in the token. A token without that claim proves no name, whatever the client says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import msgspec

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.errors import AccessFileError
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access.aclfile import claimed_rules, read_text
from motorcade.plugins.access.backends import ACL_ATTRIBUTE, Accepted, Answer
from motorcade.plugins.access.config import Jwt
from motorcade.plugins.access.rules import RuleError

METHOD = "JWT"  #: name of the method of enhanced authentication
MAX_TOKEN = 16 * 1024  #: characters


class TokenBackend:
    """Allows the bearer of a valid token."""

    def __init__(self, config: Jwt) -> None:
        self.name = "token"
        self._config = config
        self._keys = _Keys(config)
        self._options: dict[str, Any] = {"require": list(config.require), "verify_aud": config.audience is not None}
        # Only text is ever compared with these; PyJWT would also insist on types we do not look at.
        self._options |= {"verify_sub": False, "verify_jti": False}

    async def check(self, client: ClientInfo, credentials: Credentials, now: float, flow: str = "") -> Answer:  # noqa: ARG002
        token = self._shown(client, credentials)
        if token is None or token.count(".") != 2 or len(token) > MAX_TOKEN:
            return None
        try:
            claims = self._verified(token)
        except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError, jwt.MissingRequiredClaimError) as error:
            return _refused(str(error))
        except (jwt.InvalidIssuerError, jwt.InvalidAudienceError, jwt.InvalidIssuedAtError) as error:
            return _refused(str(error))
        except (jwt.InvalidTokenError, jwt.PyJWTError, ValueError):
            return None
        return self._judge(client, claims, now) if claims is not None else None

    def remembered(self, client: ClientInfo, credentials: Credentials, now: float) -> Accepted | None:  # noqa: ARG002
        return None

    async def close(self) -> None:
        """Close; there is nothing to give back."""

    def _shown(self, client: ClientInfo, credentials: Credentials) -> str | None:
        if credentials.method is not None:
            raw = credentials.data if credentials.method.upper() == METHOD else None
        elif self._config.from_ == "username":
            return client.username
        else:
            raw = credentials.password
        try:
            return raw.decode("ascii") if raw is not None else None
        except UnicodeDecodeError:
            return None

    def _verified(self, token: str) -> dict[str, Any] | None:
        key = self._keys.for_token(jwt.get_unverified_header(token))
        if key is None:
            return None
        config = self._config
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(config.algorithms),
            options=self._options,  # type: ignore[arg-type]  # a typed dictionary since 2.11, a plain one before
            issuer=config.issuer,
            audience=config.audience,
            leeway=config.leeway,
        )
        return claims

    def _judge(self, client: ClientInfo, claims: Mapping[str, Any], now: float) -> Answer:
        config = self._config
        for claim, template in config.verify_claims.items():
            wanted = _filled(template, client)
            if wanted is None or claims.get(claim) != wanted:
                return _refused(f"claim {claim!r} does not fit the client")
        client_id = claims.get(config.client_id_claim) if config.client_id_claim else None
        if config.client_id_claim and (not isinstance(client_id, str) or client_id != client.client_id):
            return Deny(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "the token is for another client id")
        username = claims.get(config.username_claim, "")
        if not isinstance(username, str):
            return _refused(f"claim {config.username_claim!r} is not text")
        if not username and "${username}" in config.verify_claims.values():
            username = client.username or ""
        try:
            expires_at = float(claims["exp"]) + config.leeway if claims.get("exp") is not None else None
        except (OverflowError, ValueError, TypeError):  # of 10^400, say
            return _refused("claim 'exp' is no date")
        if expires_at is not None and not now < expires_at:
            return _refused("Signature has expired")
        try:
            attributes = self._attributes(claims)
        except (RuleError, ValueError) as error:
            return _refused(str(error))
        allow = Allow(
            superuser=config.superuser_claim is not None and claims.get(config.superuser_claim) is True,
            username=username,
            client_id=client_id,
            attributes=attributes,
            expires_at=expires_at,
        )
        return Accepted(allow, client_id)

    def _attributes(self, claims: Mapping[str, Any]) -> dict[str, str]:
        given = claims.get(self._config.attributes_claim, {}) if self._config.attributes_claim else {}
        try:
            attributes = msgspec.convert(given, dict[str, str])
        except msgspec.ValidationError as error:
            raise ValueError(f"claim {self._config.attributes_claim!r}: {error}") from error
        attributes.pop(ACL_ATTRIBUTE, None)
        if self._config.acl_claim and self._config.acl_claim in claims:
            rules = claims[self._config.acl_claim]
            claimed_rules(rules)  # a claim that is not understood refuses the client
            attributes[ACL_ATTRIBUTE] = json.dumps(rules)
        return attributes


class _Keys:
    """The key or keys that tokens may be signed with."""

    def __init__(self, config: Jwt) -> None:
        given = [config.secret, config.secret_file, config.public_key_file, config.jwks_file]
        if sum(option is not None for option in given) != 1:
            raise AccessFileError(
                "authentication by jwt takes one of secret, secret_file, public_key_file and jwks_file"
            )
        symmetric = {algorithm.startswith("HS") for algorithm in config.algorithms}
        self._single: str | bytes | None = None
        self._set: dict[str | None, jwt.PyJWK] = {}
        if config.jwks_file is not None:
            self._set = _read_set(config.jwks_file)
            return
        if config.public_key_file is not None:
            if symmetric != {False}:
                raise AccessFileError("authentication by jwt: a public key cannot check HS algorithms")
            self._single = read_text(config.public_key_file)
            _try_key(self._single, config)
            return
        if symmetric != {True}:
            raise AccessFileError("authentication by jwt: a secret can only check HS algorithms")
        self._single = config.secret.encode() if config.secret is not None else _read_secret(str(config.secret_file))
        if not self._single:
            raise AccessFileError("authentication by jwt: the secret is empty")

    def for_token(self, header: Mapping[str, Any]) -> str | bytes | jwt.PyJWK | None:
        """Return the key a token says it is signed with, or None if we do not have it."""
        if self._single is not None:
            return self._single
        kid = header.get("kid")
        if kid is None and len(self._set) == 1:
            return next(iter(self._set.values()))
        return self._set.get(kid)


def _try_key(key: str, config: Jwt) -> None:
    """Refuse at start what could never check a token."""
    for name in config.algorithms:
        try:
            jwt.get_algorithm_by_name(name).prepare_key(key)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise AccessFileError(f"{config.public_key_file}: not a public key for {name}") from error


def _read_secret(path: str) -> bytes:
    try:
        return Path(path).read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise AccessFileError(f"{path}: cannot be read: {error.strerror}") from error


def _read_set(path: str) -> dict[str | None, jwt.PyJWK]:
    try:
        keys = jwt.PyJWKSet.from_json(read_text(path)).keys
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        raise AccessFileError(f"{path}: not a JSON Web Key Set with usable keys: {error}") from error
    found: dict[str | None, jwt.PyJWK] = {}
    for key in keys:
        if key.key_id in found:
            raise AccessFileError(f"{path}: two keys with the id {key.key_id!r}")
        found[key.key_id] = key
    return found


def _filled(template: str, client: ClientInfo) -> str | None:
    for placeholder, value in (("${clientid}", client.client_id), ("${username}", client.username)):
        if placeholder in template:
            if not value:
                return None
            return template.replace(placeholder, value)
    return template


def _refused(detail: str) -> Deny:
    return Deny(ReasonCode.NOT_AUTHORIZED, f"token refused: {detail}")
