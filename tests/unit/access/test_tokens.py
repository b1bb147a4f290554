"""JSON Web Tokens, made and signed as an identity service would."""

from __future__ import annotations

import base64
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from motorcade.core.client import ClientInfo
from motorcade.core.errors import PluginError
from motorcade.extension.hooks import Allow, Deny
from tests.support.tables import each_case

from .conftest import Node, Start

SECRET = "a secret of more than thirty-two bytes, shared"
RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def public_pem(key: rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def hs256(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "jwt", "secret": SECRET, "algorithms": ["HS256"]} | more]


async def show(node: Node, claims: dict[str, Any], client_id: str = "c1", username: str | None = "u") -> Any:
    token = jwt.encode(claims, SECRET, "HS256")
    return await node.authenticate(ClientInfo(client_id, username, "192.0.2.1"), password=token.encode())


async def test_a_token_lets_its_bearer_in_under_its_name_until_it_expires(start: Start) -> None:
    node = await start(authentication=hs256())
    answer = await show(node, {"sub": "alice", "exp": int(node.time) + 60}, username="whoever")
    assert isinstance(answer, Allow)
    assert ("alice", int(node.time) + 60) == (answer.username, answer.expires_at)


async def test_a_token_without_a_name_proves_none(start: Start) -> None:
    """The user name is whatever the client likes, so rules must not see it."""
    node = await start(authentication=hs256())
    answer = await show(node, {}, username="root")
    assert isinstance(answer, Allow)
    assert "" == answer.username


@each_case(
    ("claims", "options"),
    [
        ({"exp": 1_000_000_000}, {}),
        ({"nbf": 9_999_999_999}, {}),
        ({"exp": 10**400}, {}),
        ({"exp": 10**400}, {"leeway": 1.0}),
        ({}, {"require": ["exp"]}),
        ({"iss": "other"}, {"issuer": "us"}),
        ({"aud": "other"}, {"audience": "us"}),
        ({"clientid": "c2"}, {"verify_claims": {"clientid": "${clientid}"}}),
        ({}, {"verify_claims": {"clientid": "${clientid}"}}),
        ({"sub": 7}, {}),
        ({"sub": "u", "acl": {"pub": ["a/#/b"]}}, {}),
        ({"sub": "u", "acl": "all"}, {}),
        ({"client_attrs": {"fleet": 7}}, {}),
    ],
)
async def test_a_token_of_ours_that_does_not_fit_is_refused(start: Start, claims: Any, options: Any) -> None:
    node = await start(authentication=hs256(**options), anonymous="allow")
    answer = await show(node, claims)
    assert isinstance(answer, Deny)
    assert "NOT_AUTHORIZED" == answer.reason.name


async def test_claims_are_compared_with_the_client(start: Start) -> None:
    node = await start(authentication=hs256(verify_claims={"clientid": "${clientid}", "tenant": "north"}))
    assert isinstance(await show(node, {"clientid": "c1", "tenant": "north"}), Allow)
    assert isinstance(await show(node, {"clientid": "c1", "tenant": "south"}), Deny)


async def test_a_token_is_for_one_client_id(start: Start) -> None:
    node = await start(authentication=hs256(client_id_claim="vin"))
    assert "c1" == (await show(node, {"vin": "c1"})).client_id
    for wrong in ({"vin": "c2"}, {}, {"vin": 1}):
        assert "CLIENT_IDENTIFIER_NOT_VALID" == (await show(node, wrong)).reason.name


@each_case(
    "token",
    [
        jwt.encode({"sub": "u"}, "another secret, also more than thirty-two bytes", "HS256"),
        jwt.encode({"sub": "u"}, "", "none"),
        jwt.encode({"sub": "u"}, SECRET.ljust(64), "HS512"),
        jwt.encode({"sub": "u"}, RSA, "RS256"),
        "a.b.c",
        "..",
        "not a token",
        "\x00\xff",
    ],
)
async def test_what_we_did_not_sign_passes_on_and_nobody_gets_in(start: Start, token: str) -> None:
    node = await start(authentication=hs256(), anonymous="allow")
    answer = await node.log_in("u", token)
    assert isinstance(answer, Deny)


async def test_a_public_key_is_never_taken_for_a_secret(start: Start, tmp_path: Path) -> None:
    """The classic confusion: a token signed by HMAC with the public key as secret."""
    (tmp_path / "key.pem").write_bytes(public_pem(RSA))
    options = {"type": "jwt", "public_key_file": str(tmp_path / "key.pem"), "algorithms": ["RS256"]}
    node = await start(authentication=[options])
    real = jwt.encode({"sub": "u"}, RSA, "RS256")
    assert isinstance(await node.log_in("u", real), Allow)
    head, body = (_base64url(json.dumps(part).encode()) for part in ({"alg": "HS256"}, {"sub": "root"}))
    signature = hmac.digest(public_pem(RSA), f"{head}.{body}".encode(), "sha256")
    assert isinstance(await node.log_in("u", f"{head}.{body}.{_base64url(signature)}"), Deny)
    with pytest.raises(PluginError, match="public key cannot check HS"):
        await start(authentication=[options | {"algorithms": ["RS256", "HS256"]}])


async def test_keys_of_a_key_set_are_chosen_by_their_id(start: Start, tmp_path: Path) -> None:
    keys = [
        json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(RSA.public_key())) | {"kid": "old", "alg": "RS256"},
        json.loads(jwt.algorithms.ECAlgorithm.to_jwk(EC.public_key())) | {"kid": "new", "alg": "ES256"},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    options = {"type": "jwt", "jwks_file": str(tmp_path / "keys.json"), "algorithms": ["RS256", "ES256"]}
    node = await start(authentication=[options])
    for key, algorithm, kid, kind in (
        (RSA, "RS256", "old", Allow),
        (EC, "ES256", "new", Allow),
        (EC, "ES256", "old", Deny),
        (EC, "ES256", "lost", Deny),
        (EC, "ES256", None, Deny),
    ):
        token = jwt.encode({"sub": "u"}, key, algorithm, headers={"kid": kid} if kid else None)
        assert isinstance(await node.log_in("u", token), kind), kid


async def test_the_token_may_come_by_enhanced_authentication(start: Start) -> None:
    node = await start(authentication=hs256())
    token = jwt.encode({"sub": "alice"}, SECRET, "HS256").encode()
    client = ClientInfo("c1", None, "192.0.2.1")
    assert "alice" == (await node.authenticate(client, method="JWT", data=token)).username
    other = await node.authenticate(client, method="SCRAM-SHA-256", data=token)
    assert "BAD_AUTHENTICATION_METHOD" == other.reason.name


async def test_rules_in_the_token_go_before_those_of_the_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "acl.conf").write_text('{allow, all, publish, ["open/#"]}.')
    node = await start(authentication=hs256(), acl_file=str(tmp_path / "acl.conf"))
    answer = await show(node, {"acl": {"pub": ["cars/${clientid}/#"], "sub": ["eq open/#"]}})
    client = ClientInfo("c1", "u", "192.0.2.1", attributes=answer.attributes)
    asked = [("publish", "cars/c1/x"), ("publish", "cars/c2/x"), ("publish", "open/x"), ("subscribe", "open/#")]
    assert [True, False, True, True] == [node.authorize(client, *question) for question in asked]
    answer = await show(node, {"acl": [{"permission": "deny", "action": "all", "topic": "open/secret"}]})
    client = ClientInfo("c1", "u", "192.0.2.1", attributes=answer.attributes)
    assert [False, True] == [node.authorize(client, "publish", topic) for topic in ("open/secret", "open/x")]


async def test_a_token_with_rules_is_held_to_them_where_there_is_no_file(start: Start) -> None:
    node = await start(authentication=hs256())
    answer = await show(node, {"acl": {"pub": ["a"]}})
    client = ClientInfo("c1", "u", "192.0.2.1", attributes=answer.attributes)
    assert [True, False] == [node.authorize(client, "publish", topic) for topic in ("a", "b")]


@each_case(
    "options",
    [
        {"algorithms": ["HS256"]},
        {"algorithms": ["HS256"], "secret": SECRET, "jwks_file": "x"},
        {"algorithms": [], "secret": SECRET},
        {"algorithms": ["none"], "secret": SECRET},
        {"algorithms": ["RS256"], "secret": SECRET},
        {"algorithms": ["RS256"], "public_key_file": "/dev/null"},
        {"algorithms": ["RS256"], "jwks_file": "/dev/null"},
        {"algorithms": ["HS256"], "secret_file": "/does/not/exist"},
        {"algorithms": ["HS256"], "secret": ""},
        {"algorithms": ["HS256"], "secret": SECRET, "algorithm": "HS256"},
    ],
)
async def test_a_configuration_that_makes_no_sense_does_not_start(start: Start, options: dict[str, Any]) -> None:
    with pytest.raises(PluginError):
        await start(authentication=[{"type": "jwt"} | options])
