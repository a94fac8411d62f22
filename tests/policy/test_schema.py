"""policy.schema: credentials, names, bounds, and the published JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy.errors import PolicySchemaError
from policy.loader import Source, load_policy
from policy.schema import schema_text


def policy(*, credential: str = "key:a", model: str = "m", tenant: str = "a", limits: str = "{}"):
    """The policy of one tenant with one value of interest."""
    tenants = {tenant: {"credentials": [credential], "models": [model], "limits": json.loads(limits)}}
    return load_policy([Source("p.yaml", json.dumps({"version": 1, "tenants": tenants}))])


@pytest.mark.parametrize(
    "credential",
    [
        "key:a",
        "key:alpha-1_x.Y",
        "key:" + "a" * 63,
        "spiffe://athanor.local/tenant/alpha",
        "spiffe://a_b-c.d9/x",
        "spiffe://example.org/A/b/C-9_.z",
        "spiffe://" + "d" * 255 + "/" + "p" * (2048 - 9 - 256),
    ],
)
def test_accepted_credentials(credential: str) -> None:
    """Key ids and SPIFFE IDs within the specification are taken as they are."""
    assert policy(credential=credential).principals == {credential: "a"}


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "key:",
        "key:-a",
        "key:a b",
        "key:a/b",
        "key:" + "a" * 64,
        "KEY:a",
        "http://athanor.local/x",
        "SPIFFE://athanor.local/x",
        "spiffe:/athanor.local/x",
        "spiffe:///x",
        "spiffe://athanor.local",
        "spiffe://athanor.local/",
        "spiffe://athanor.local/x/",
        "spiffe://athanor.local//x",
        "spiffe://athanor.local/./x",
        "spiffe://athanor.local/../x",
        "spiffe://athanor.local/x?y=1",
        "spiffe://athanor.local/x#y",
        "spiffe://athanor.local:8443/x",
        "spiffe://user@athanor.local/x",
        "spiffe://Athanor.local/x",
        "spiffe://athanor.local/%41",
        "spiffe://athanor.local/a b",
        "spiffe://athanor.local/\u00e4",
        "spiffe://athanor.local/x\n",
        "spiffe://" + "d" * 256 + "/x",
        "spiffe://d/" + "p" * 2048,
    ],
)
def test_refused_credentials(credential: str) -> None:
    """Whatever the specification does not allow is refused at its place."""
    with pytest.raises(PolicySchemaError) as caught:
        policy(credential=credential)
    assert caught.value.problems[0].path == "tenants.a.credentials[0]"


@pytest.mark.parametrize("tenant", ["a", "0", "a-b-9", "a" * 63])
def test_accepted_tenant_ids(tenant: str) -> None:
    """Lower-case letters, digits and dashes make a tenant id."""
    assert tenant in policy(tenant=tenant).tenants


@pytest.mark.parametrize("tenant", ["", "-a", "A", "a_b", "a.b", "a" * 64, "a\n", "\u00e4"])
def test_refused_tenant_ids(tenant: str) -> None:
    """Anything else does not."""
    with pytest.raises(PolicySchemaError, match="does not fit the pattern"):
        policy(tenant=tenant)


@pytest.mark.parametrize("model", ["", "-m", "a b", "m\n", "a" * 129, "m?", "[m]"])
def test_refused_model_patterns(model: str) -> None:
    """Model patterns hold names and stars only."""
    with pytest.raises(PolicySchemaError, match="does not fit the pattern"):
        policy(model=model)


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("requests_per_minute", 1, 1_000_000),
        ("tokens_per_minute", 1, 1_000_000_000),
        ("concurrency", 1, 4_096),
        ("max_context_tokens", 2, 1 << 20),
        ("max_output_tokens", 1, 1 << 20),
    ],
)
def test_limits_are_bounded_on_both_sides(key: str, low: int, high: int) -> None:
    """The bounds themselves are accepted, one step beyond them is not."""
    for value in (low, high):
        limits = policy(limits=json.dumps({key: value})).tenants["a"].limits
        assert getattr(limits, key) == value
    for value in (low - 1, high + 1):
        with pytest.raises(PolicySchemaError, match=f"limits.{key}: must be at"):
            policy(limits=json.dumps({key: value}))


def test_the_published_json_schema_is_current(root: Path) -> None:
    """policy/schema.json is what ``python -m policy.export`` writes today."""
    assert (root / "policy" / "schema.json").read_text() == schema_text()
