"""Tokens as credentials: what holds, every known attack on them, and what a request with one costs."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import ValidationError

from appliance.common.errors import UnauthenticatedError
from appliance.common.keys import KeyTable, issue
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope
from appliance.common.token_claims import MAX_TOKEN_CHARS, TokenError, looks_like_token
from appliance.common.token_config import TokenIssuerConfig
from appliance.gateway.front import tokens as tokens_module
from appliance.gateway.front.auth import Resolver, holds
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.generate_request import Principal
from isolation.keys.tokens import TokenKeysError, read_key_set
from tests.appliance.gateway.front.issuers import AUDIENCE, ISSUER, NOW, Provider, encoded, make_key, public_jwk
from tests.appliance.gateway.front.support import PEPPER, ScriptedService

HOME = "192.0.2.7"
KINDS = ("RS256", "ES256", "EdDSA")


@pytest.fixture(scope="module")
def provider() -> Provider:
    """One key of each kind."""
    found = Provider()
    for kind in KINDS:
        found.add(kind.lower(), kind)
    return found


def config(**changes: Any) -> TokenIssuerConfig:
    """An issuer whose keys a test puts in force."""
    wanted = {"name": "corp", "issuer": ISSUER, "audiences": (AUDIENCE, "other"), "keys_file": Path("/none"), **changes}
    return TokenIssuerConfig(**wanted)


def tokens_of(provider: Provider, *others: TokenIssuerConfig, **changes: Any) -> TokenVerifier:
    """Tokens of the provider, whose keys are in force."""
    found = TokenVerifier((config(**changes), *others))
    use_keys(found, provider)
    return found


def use_keys(tokens: TokenVerifier, provider: Provider) -> None:
    """Put the provider's keys in force."""
    issuer = tokens.issuers[0]
    issuer.keys = read_key_set(json.loads(provider.published()))
    issuer.thumbprints = frozenset(key.thumbprint for key in issuer.keys.values())


def refusal(tokens: TokenVerifier, token: str, now: float = NOW) -> CredentialRefusal:
    """Why a token is refused."""
    with pytest.raises(TokenError) as caught:
        tokens.check(token, now)
    return caught.value.refusal


@pytest.mark.parametrize("kid", [kind.lower() for kind in KINDS])
def test_a_token_of_each_algorithm_is_a_credential(provider: Provider, kid: str) -> None:
    """The claim's exact value under the issuer's name is what the policy spells; the end has the leeway. One changed
    character of any part is refused."""
    tokens = tokens_of(provider)
    token = provider.token(kid)
    found = tokens.check(token, NOW)
    assert (found.claims.credential, found.claims.scopes) == ("oidc:corp:team-a", None)
    assert found.claims.ends == NOW + 630
    head, body, signature = token.split(".")
    other = provider.token(kid, provider.claims(sub="team-b")).split(".")
    for changed in (f"{head}.{other[1]}.{signature}", f"{head}.{body}.{other[2]}"):
        assert refusal(tokens, changed) is CredentialRefusal.JWT_SIGNATURE


def test_an_issuer_that_is_configured_no_more_is_refused(provider: Provider) -> None:
    """A token that held, and was remembered, is refused once its issuer's entry is gone or another one, as is the
    request that runs under it; the entry as it was (control) is taken again."""
    tokens, token = tokens_of(provider), provider.token("es256")
    proved = tokens.check(token, NOW)
    caller = Principal("t", proved.claims.credential, secret=proved.secret, ends=proved.claims.ends)
    for configured, holds_now in (((), False), ((config(),), True), ((config(audiences=("another",)),), False)):
        tokens.keep(configured)
        assert tokens.holds(caller, NOW) is holds_now
        assert bool(list(tokens.in_force)) is holds_now
        if holds_now:
            assert tokens.check(token, NOW)
        else:
            assert refusal(tokens, token) is CredentialRefusal.JWT_ISSUER


def test_no_algorithm_can_be_chosen_by_the_caller(provider: Provider) -> None:
    """None in any spelling, secrets of every kind, the public key as a secret, another asymmetric algorithm than the
    key's: refused. Control: the key's own."""
    tokens = tokens_of(provider)
    body = json.dumps(provider.claims()).encode()
    for name in ("none", "None", "NONE", "nOnE", "", "HS256", "HS384", "HS512", "RS384", "ES384", "PS256", "dir"):
        header = json.dumps({"alg": name, "kid": "rs256"}).encode()
        for signature in ("e", encoded(b"x" * 64)):
            assert refusal(tokens, f"{encoded(header)}.{encoded(body)}.{signature}") is CredentialRefusal.JWT_ALGORITHM
    public = (
        provider.keys["rs256"][1]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    header = json.dumps({"alg": "HS256", "kid": "rs256"}).encode()
    text = f"{encoded(header)}.{encoded(body)}"
    forged = f"{text}.{encoded(hmac.digest(public, text.encode(), hashlib.sha256))}"
    assert refusal(tokens, forged) is CredentialRefusal.JWT_ALGORITHM
    mixed = provider.signed("es256", json.dumps({"alg": "ES256", "kid": "rs256"}).encode(), body)
    assert refusal(tokens, mixed) is CredentialRefusal.JWT_ALGORITHM
    for alg in (None, 5, ["RS256"]):
        wrong = provider.signed("rs256", json.dumps({"alg": alg, "kid": "rs256"}).encode(), body)
        assert refusal(tokens, wrong) is CredentialRefusal.JWT_ALGORITHM
    assert tokens.check(provider.token("rs256"), NOW)


@pytest.mark.parametrize(
    "kid",
    [
        "/etc/passwd",
        "../../dev/null",
        "https://evil.example/keys",
        "rs256' OR '1'='1",
        "rs256\u0000",
        "",
        "RS256",
        "a" * 9_999,
    ],
)
def test_a_key_id_is_a_name_and_nothing_else(provider: Provider, kid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path is opened and no address fetched for it: it is looked up among the known ones."""
    tokens = tokens_of(provider)
    opened: list[object] = []
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: opened.append(args))
    token = provider.signed(
        "rs256", json.dumps({"alg": "RS256", "kid": kid}).encode(), json.dumps(provider.claims()).encode()
    )
    expected = CredentialRefusal.JWT_KEY if len(token) <= MAX_TOKEN_CHARS else CredentialRefusal.JWT_MALFORMED
    assert refusal(tokens, token) is expected
    assert opened == []


@pytest.mark.parametrize("name", ["jwk", "jku", "x5u", "x5c", "crit", "b64", "zip", "enc"])
def test_a_header_brings_no_key(provider: Provider, name: str) -> None:
    """A stranger's own key in the header, or its address, is refused though the rest holds; so is a header that changes
    how the token is read."""
    tokens = tokens_of(provider)
    assert refusal(tokens, provider.token("es256", **{name: ["x"]})) is CredentialRefusal.JWT_MALFORMED
    own = make_key("ES256")
    forged = jwt.encode(
        provider.claims(), own, "ES256", headers={"kid": "es256", "jwk": public_jwk("ES256", own, "es256")}
    )
    assert refusal(tokens, forged) is CredentialRefusal.JWT_MALFORMED
    assert refusal(tokens, jwt.encode(provider.claims(), own, "ES256", headers={"kid": "es256"})) is (
        CredentialRefusal.JWT_SIGNATURE
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iss": "https://login.example.com"}, CredentialRefusal.JWT_ISSUER),
        ({"iss": ISSUER.upper()}, CredentialRefusal.JWT_ISSUER),
        ({"iss": None}, CredentialRefusal.JWT_ISSUER),
        ({"iss": [ISSUER]}, CredentialRefusal.JWT_ISSUER),
        ({"aud": "another"}, CredentialRefusal.JWT_AUDIENCE),
        ({"aud": None}, CredentialRefusal.JWT_AUDIENCE),
        ({"aud": []}, CredentialRefusal.JWT_AUDIENCE),
        ({"aud": {AUDIENCE: 1}}, CredentialRefusal.JWT_AUDIENCE),
        ({"aud": "athanor "}, CredentialRefusal.JWT_AUDIENCE),
        ({"aud": ["x"] * 40 + [AUDIENCE]}, CredentialRefusal.JWT_AUDIENCE),
        ({"exp": None}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": str(NOW + 600)}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": True}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": 1 << 60}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": -5}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": NOW + 90_000}, CredentialRefusal.JWT_CLAIMS),
        ({"exp": NOW - 31}, CredentialRefusal.JWT_EXPIRED),
        ({"nbf": NOW + 31}, CredentialRefusal.JWT_EARLY),
        ({"iat": NOW + 31}, CredentialRefusal.JWT_EARLY),
        ({"nbf": "soon"}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": None}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": ""}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": ["team-a"]}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": "team a"}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": "team-\u00e4"}, CredentialRefusal.JWT_CLAIMS),
        ({"sub": "a" * 201}, CredentialRefusal.JWT_CLAIMS),
    ],
)
def test_claims_are_exact(provider: Provider, changes: dict[str, Any], reason: CredentialRefusal) -> None:
    """Each that is absent, of another type or another text is refused for its reason. Control: a list of audiences with
    ours among them holds."""
    tokens = tokens_of(provider)
    assert refusal(tokens, provider.token("es256", provider.claims(**changes))) is reason
    assert tokens.check(provider.token("es256", provider.claims(aud=["x", "other"])), NOW)


@pytest.mark.parametrize(
    ("claim", "at", "holds_then"),
    [
        ("exp", NOW - 29, True),
        ("exp", NOW - 30, False),
        ("nbf", NOW + 30, True),
        ("nbf", NOW + 30.5, False),
        ("iat", NOW + 30, True),
        ("iat", NOW + 30.5, False),
        ("exp", NOW + 86_430, True),
        ("exp", NOW + 86_431, False),
    ],
)
def test_the_edges_of_the_clock(provider: Provider, claim: str, at: float, holds_then: bool) -> None:
    """The leeway counts for all three times, to the second."""
    tokens = tokens_of(provider)
    token = provider.token("es256", provider.claims(**{claim: at}))
    if holds_then:
        assert tokens.check(token, NOW)
    else:
        refusal(tokens, token)


def test_texts_that_are_no_token(provider: Provider) -> None:
    """Huge ones, wrong parts, padding, other alphabets, claims that are no object or nest deeply, and a name twice are
    refused before a signature is checked. Control: what the same helper signs otherwise holds."""
    tokens = tokens_of(provider)
    header = b'{"alg": "ES256", "kid": "es256"}'
    good = json.dumps(provider.claims()).encode()
    token = provider.signed("es256", header, good)
    twice = [
        provider.signed("es256", header, good.replace(b'"sub": "team-a"', b'"sub": "team-a", "sub": "team-b"')),
        provider.signed("es256", header, good[:-1] + b', "aud": "x"}'),
        provider.signed("es256", b'{"alg": "ES256", "alg": "none", "kid": "es256"}', good),
        provider.signed("es256", header, b"{" + b'"a":' + b"[" * 60 + b"]" * 60 + b"}"),
        provider.signed("es256", header, b"[1]"),
        provider.signed("es256", header, b'{"exp": NaN}'),
        provider.signed("es256", header, b"\xff\xfe"),
        provider.signed("es256", header, good + b" " * 9_000),
    ]
    texts = [
        "", ".", "..", "...", "e.e.e", token + ".e", token + "=", token.replace(".", "", 1), " " + token, token + "\n",
        token.replace("_", "/").replace("-", "+") + "+", "e" * 9_000, *twice,
    ]  # fmt: skip
    for text in texts:
        assert refusal(tokens, text) is CredentialRefusal.JWT_MALFORMED, text[:80]
    assert tokens.signatures == 0
    for kind in ("JOSE", "dpop+jwt", 5):
        assert refusal(tokens, provider.token("es256", typ=kind)) is CredentialRefusal.JWT_MALFORMED
    assert tokens.check(token, NOW) and tokens.check(provider.token("es256", typ="at+jwt"), NOW)


def test_a_token_that_was_seen_costs_no_signature(provider: Provider) -> None:
    """A hundred requests with one token check one signature; a token that does not hold is checked each time and fills
    nothing."""
    tokens = tokens_of(provider)
    token, bad = provider.token("rs256"), provider.token("rs256", provider.claims(sub=None))
    for _ in range(100):
        tokens.check(token, NOW)
    assert tokens.signatures == 1
    for _ in range(10):
        refusal(tokens, bad)
    assert tokens.signatures == 11 and len(tokens._remembered) == 1
    start = time.process_time()
    for _ in range(1_000):
        tokens.check(token, NOW)
    assert (time.process_time() - start) / 1_000 < 50e-6


def test_what_is_remembered_is_bounded_and_ends(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten beyond the bound; one that has ended is refused though it was remembered."""
    monkeypatch.setattr(tokens_module, "MAX_REMEMBERED", 3)
    tokens = tokens_of(provider)
    made = [provider.token("eddsa", provider.claims(sub=f"t-{number}")) for number in range(5)]
    for token in made:
        tokens.check(token, NOW)
    assert len(tokens._remembered) == 3
    assert refusal(tokens, made[-1], NOW + 630) is CredentialRefusal.JWT_EXPIRED
    assert tokens.check(made[-1], NOW + 629)


def test_a_key_that_is_gone_ends_its_tokens(provider: Provider) -> None:
    """When the issuer takes a key back, or puts another in its place, tokens that it signed are refused though they
    were remembered, and requests that run under them do not hold. Tokens of other keys (control) go on."""
    tokens = tokens_of(provider)
    resolver = Resolver(service(), lambda: KeyTable(b"", {}), lambda: datetime.fromtimestamp(NOW, UTC), tokens=tokens)
    callers = [resolver.resolve([f"Bearer {provider.token(kid)}"], address=HOME) for kid in ("es256", "eddsa")]
    now = datetime.fromtimestamp(NOW, UTC)
    assert [holds(one, KeyTable(b"", {}), now, tokens) for one in callers] == [True, True]
    token = provider.token("es256")
    assert tokens.check(token, NOW)
    next_keys = Provider({**provider.keys, "es256": ("ES256", make_key("ES256"))})
    use_keys(tokens, next_keys)
    assert refusal(tokens, token) is CredentialRefusal.JWT_SIGNATURE
    assert [holds(one, KeyTable(b"", {}), now, tokens) for one in callers] == [False, True]
    assert not holds(callers[1], KeyTable(b"", {}), datetime.fromtimestamp(NOW + 630, UTC), tokens)
    assert not holds(callers[1], KeyTable(b"", {}), now)


def service() -> ScriptedService:
    """Of which one tenant is named by a token's value."""
    found = ScriptedService()
    found.tenants["oidc:corp:team-a"] = "acme"
    return found


def test_a_token_is_a_principal_of_the_policys_tenant(provider: Provider) -> None:
    """By the exact value; one that the policy does not name, and a token where no issuer is configured, are refused
    with the text of all refusals. Beside a key nothing changes: an id with dots makes no token of it."""
    now = datetime.fromtimestamp(NOW, UTC)
    plain, digest = issue("acme.e.x", PEPPER)
    tokens = tokens_of(provider)
    resolver = Resolver(service(), lambda: KeyTable(PEPPER, {}), lambda: now, tokens=tokens)
    caller = resolver.resolve([f"Bearer {provider.token('es256')}"], address=HOME)
    assert (caller.tenant, caller.credential, caller.scopes) == ("acme", "oidc:corp:team-a", None)
    without = Resolver(service(), lambda: KeyTable(PEPPER, {}), lambda: now)
    texts = set()
    for one, text in (
        (resolver, provider.token("es256", provider.claims(sub="team-b"))),
        (resolver, provider.token("es256", provider.claims(aud="x"))),
        (resolver, "e.e.e"),
        (resolver, plain),
        (without, provider.token("es256")),
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            one.resolve([f"Bearer {text}"], address=HOME)
        texts.add(str(caught.value))
    assert len(texts) == 1
    assert not looks_like_token(plain) and digest


def test_a_token_can_be_limited_by_a_claim(provider: Provider) -> None:
    """Words of the claim that are scopes here count, in a text or a list; others count nothing, and without the claim
    nothing is granted. Where no claim is configured (control) a token is not limited."""
    tokens = tokens_of(provider, scope_claim="scope")

    def scopes(**changes: Any) -> frozenset[Scope] | None:
        return tokens.check(provider.token("es256", provider.claims(**changes)), NOW).claims.scopes

    assert scopes(scope="openid generate models.read models") == {Scope.GENERATE, Scope.MODELS}
    assert scopes(scope=["embeddings", 5, "all"]) == {Scope.EMBEDDINGS}
    assert scopes() == scopes(scope={"generate": 1}) == scopes(scope="*") == frozenset()
    assert tokens_of(provider).check(provider.token("es256"), NOW).claims.scopes is None


def test_issuers_do_not_speak_for_each_other(provider: Provider) -> None:
    """A token is checked with the keys of the issuer that it names: another one's key signs nothing for it."""
    other = config(name="other", issuer="https://other.example.com", audiences=("athanor",))
    tokens = tokens_of(provider, other)
    forged = provider.token("es256", provider.claims(iss=other.issuer))
    assert refusal(tokens, forged) is CredentialRefusal.JWT_KEY
    tokens.issuers[1].keys = tokens.issuers[0].keys
    tokens.issuers[1].thumbprints = tokens.issuers[0].thumbprints
    assert tokens.check(forged, NOW).claims.credential == "oidc:other:team-a"


def test_a_token_without_a_key_id_needs_the_only_key() -> None:
    """Of several keys none is chosen for it."""
    one = Provider()
    one.add("a")
    token = one.signed("a", b'{"alg": "ES256"}', json.dumps(one.claims()).encode())
    tokens = tokens_of(one)
    assert tokens.check(token, NOW)
    one.add("b")
    use_keys(tokens, one)
    tokens._remembered.clear()
    assert refusal(tokens, token) is CredentialRefusal.JWT_KEY


def test_sets_of_keys_are_read_strictly(provider: Provider) -> None:
    """Secrets, keys for encryption, other curves, weak and malformed ones are left out; without any that is left, and
    with two of one id, too many, or none, a set is refused. A private part is not kept."""
    good = json.loads(provider.published())["keys"]
    weak = public_jwk("RS256", rsa.generate_private_key(65_537, 1_024), "weak")
    bad = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"},
        {**good[1], "kid": "enc", "use": "enc"},
        {**good[1], "kid": "ops", "key_ops": ["encrypt"]},
        {**good[1], "kid": "alg", "alg": "ES384"},
        {**good[1], "kid": "curve", "crv": "P-384"},
        {**good[1], "kid": "point", "x": good[1]["y"]},
        {**good[0], "kid": "rsa", "n": "AQAB"},
        {"kty": "EC", "kid": "empty"},
        {"kty": ["RSA"], "kid": "list"},
        weak,
    ]
    found = read_key_set({"keys": [*good, *bad]})
    assert sorted(found) == ["eddsa", "es256", "rs256"]
    for document in (
        {}, [], {"keys": {}}, {"keys": []}, {"keys": bad}, {"keys": [1]}, {"keys": [{"kid": 5}]},
        {"keys": [good[0], good[0]]}, {"keys": [{**good[1], "kid": f"k{number}"} for number in range(65)]},
    ):  # fmt: skip
        with pytest.raises(TokenKeysError):
            read_key_set(document)
    key = provider.keys["es256"][1]
    private = json.loads(jwt.get_algorithm_by_name("ES256").to_jwk(key))
    kept = read_key_set({"keys": [{**private, "kid": "x"}]})["x"]
    assert kept._key.key.public_numbers() == key.public_key().public_numbers()
    assert not hasattr(kept._key.key, "private_numbers")


@pytest.mark.parametrize(
    "changes",
    [
        {"keys_file": None},
        {"keys_url": "https://a.example/keys"},
        {"keys_file": None, "keys_url": "http://a.example/keys"},
        {"keys_file": None, "keys_url": "file:///etc/passwd"},
        {"keys_file": None, "keys_url": "https://u:p@a.example/keys"},
        {"keys_file": None, "keys_url": "https://a.example:99999/keys"},
        {"keys_file": None, "keys_url": "https://a.example/k\r\nhost: b"},
        {"keys_ca": Path("/x")},
        {"name": "Corp"},
        {"audiences": ()},
        {"leeway_s": 301},
        {"refresh_s": 5},
    ],
)
def test_a_wrong_issuer_is_refused_at_the_start(changes: dict[str, Any]) -> None:
    """By the schema of the configuration. Control: a right one is taken, from a file and from an address."""
    assert config() and config(keys_file=None, keys_url="https://a.example/keys", keys_ca=Path("/x"))
    with pytest.raises(ValidationError):
        config(**changes)
