"""Roles of operators on other machines, by what a certificate names and what a token claims: without a socket."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from appliance.common.errors import UnauthenticatedError
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.operator_roles import OperatorRole
from appliance.gateway.front.operator_access import OperatorResolver, certificate_credential
from appliance.gateway.front.tokens import TokenVerifier
from isolation.keys.tokens import read_key_set
from tests.appliance.gateway.front.issuers import AUDIENCE, ISSUER, NOW, Provider

VIEWER, OPERATOR = OperatorRole.VIEWER, OperatorRole.OPERATOR


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        pytest.param([("URI", "spiffe://corp.example/ops/a")], "spiffe://corp.example/ops/a", id="one"),
        pytest.param(
            [("URI", "spiffe://corp.example/ops/a"), ("DNS", "a")], "spiffe://corp.example/ops/a", id="beside"
        ),
        pytest.param([("URI", "spiffe://corp.example/a"), ("URI", "spiffe://corp.example/b")], "", id="two"),
        pytest.param([("URI", "https://corp.example/a"), ("DNS", "a")], "", id="no spiffe id"),
        pytest.param([("URI", "spiffe://corp.example/../a")], "", id="dots"),
        pytest.param([("DNS", "ci.corp.example")], "dns:ci.corp.example", id="dns"),
        pytest.param([("email", "ann@corp.example")], "email:ann@corp.example", id="mail"),
        pytest.param([("DNS", "a"), ("email", "b")], "", id="two kinds"),
        pytest.param([("IP Address", "10.0.0.1")], "", id="address"),
        pytest.param([], "", id="none"),
    ],
)
def test_a_certificate_names_one_operator_or_nobody(names: list[tuple[str, str]], wanted: str) -> None:
    """A URI goes before other names, and several of a kind name nobody."""
    assert certificate_credential(names) == wanted


@pytest.mark.parametrize(
    ("claim", "roles"),
    [
        pytest.param("readers", {VIEWER}, id="text"),
        pytest.param(["readers", "others"], {VIEWER}, id="list"),
        pytest.param(["deployers"], {VIEWER, OPERATOR}, id="reads too"),
        pytest.param(["Deployers", "deployers ", "deploy"], set(), id="other spellings"),
        pytest.param(["a group", 5, None, {"deployers": 1}, ["deployers"]], set(), id="no texts"),
        pytest.param({"deployers": True}, set(), id="object"),
        pytest.param(None, set(), id="absent"),
    ],
)
def test_a_claim_gives_the_roles_that_list_its_texts_exactly(claim: Any, roles: set[OperatorRole]) -> None:
    """Whatever else is in it gives none; who it is stays the subject. The same token with another subject, where the
    claim for roles is ``sub``, has what lists that subject (control)."""
    provider = Provider()
    provider.add("one")
    files = {"certificate": Path("s.pem"), "key": Path("s.key")}
    issuer = {"name": "corp", "issuer": ISSUER, "audiences": [AUDIENCE], "keys_file": Path("/none")}
    listed = {"viewers": ["oidc:corp:readers", "oidc:corp:ann"], "operators": ["oidc:corp:deployers"]}
    for role_claim, wanted in (("groups", roles), ("sub", {VIEWER})):
        tokens = [{**issuer, "role_claim": role_claim}]
        section = RemoteOperatorsConfig.model_validate(
            {"admin": "10.0.0.5:1", "tls": files, "tokens": tokens, **listed}
        )
        verifier = TokenVerifier(section.tokens)
        keys = verifier.issuers[0].keys = read_key_set(json.loads(provider.published()))
        verifier.issuers[0].thumbprints = frozenset(key.thumbprint for key in keys.values())
        resolver = OperatorResolver(verifier, lambda section=section: section, lambda: datetime.fromtimestamp(NOW, UTC))
        token = provider.token("one", provider.claims(sub="ann", groups=claim))
        found = resolver.resolve([f"Bearer {token}"], None)
        assert (found.who, found.roles) == ("oidc:corp:ann", wanted)
        nobody = OperatorResolver(verifier, lambda: None, lambda: datetime.fromtimestamp(NOW, UTC))
        assert not nobody.resolve([f"Bearer {token}"], None).roles
        with pytest.raises(UnauthenticatedError):
            resolver.resolve([f"Bearer {token}", f"Bearer {token}"], None)
