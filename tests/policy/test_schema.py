"""policy.schema: credentials, names, bounds, and the published JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
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
        "oidc:corp:team-a",
        "oidc:corp-2:auth0|63f0:x@example.org",
        "oidc:c:" + "v" * 200,
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
        "oidc:",
        "oidc:corp",
        "oidc:corp:",
        "oidc:Corp:x",
        "oidc:-corp:x",
        "oidc:corp:team a",
        "oidc:corp:team-\u00e4",
        "oidc:corp:x\n",
        "oidc:corp:*\t",
        "oidc:c:" + "v" * 201,
        "oidc:" + "c" * 33 + ":x",
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


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ('{"requests_per_minute": 0}', "tenants.a.limits.requests_per_minute: must be at least 1, found 0"),
        ('{"requests_per_minute": "600"}', "tenants.a.limits.requests_per_minute: must be a whole number, found '600'"),
        (
            '{"requests_per_minute": [600]}',
            "tenants.a.limits.requests_per_minute: must be a whole number, found a list",
        ),
        ('{"requests_per_minute": {}}', "tenants.a.limits.requests_per_minute.rate: this key is required"),
        (
            '{"requests_per_minute": {"rate": 0}}',
            "tenants.a.limits.requests_per_minute.rate: must be at least 1, found 0",
        ),
        (
            '{"requests_per_minute": {"rate": 60, "burst": 1000001}}',
            "tenants.a.limits.requests_per_minute.burst: must be at most 1000000, found 1000001",
        ),
        (
            '{"input_tokens_per_minute": {"rate": 60, "burst": 3601}}',
            "tenants.a.limits.input_tokens_per_minute: the burst is at most 60 minutes of the rate: 3600",
        ),
        (
            '{"output_tokens_per_minute": {"rate": 60, "exceed": "queue"}}',
            "tenants.a.limits.output_tokens_per_minute.exceed: unknown key; did you mean 'exceeded'?",
        ),
        (
            '{"tokens_per_minute": {"rate": 60, "exceeded": "wait"}}',
            "tenants.a.limits.tokens_per_minute.exceeded: must be 'refuse', 'queue' or 'downgrade', found 'wait'",
        ),
        ('{"concurrency": {"rate": 4}}', "tenants.a.limits.concurrency.at_once: this key is required"),
        ('{"kv_tokens": 0}', "tenants.a.limits.kv_tokens: must be at least 1, found 0"),
        ('{"kv_tokens": {"rate": 4}}', "tenants.a.limits.kv_tokens.at_once: this key is required"),
        (
            '{"kv_tokens": {"at_once": 4, "exceed": "queue"}}',
            "tenants.a.limits.kv_tokens.exceed: unknown key; did you mean 'exceeded'?",
        ),
        ('{"max_queue_s": 601}', "tenants.a.limits.max_queue_s: must be at most 600, found 601"),
    ],
)
def test_wrong_rates_have_their_places(limits: str, problem: str) -> None:
    """A rate is a number or a mapping, and each mistake in either is told at its key."""
    with pytest.raises(PolicySchemaError) as caught:
        policy(limits=limits)
    assert problem in [f"{one.path}: {one.message}" for one in caught.value.problems]


def test_a_rate_in_both_forms_is_one_policy() -> None:
    """A mapping that says what a number says is the same policy; a burst or a treatment of its own makes another."""
    number = policy(limits='{"requests_per_minute": 600, "concurrency": 4}')
    same = policy(limits='{"requests_per_minute": {"rate": 600, "burst": 600}, "concurrency": {"at_once": 4}}')
    assert same.tenants == number.tenants
    assert same.digest == number.digest
    others = [
        policy(limits=text)
        for text in (
            '{"requests_per_minute": {"rate": 600, "burst": 601}, "concurrency": 4}',
            '{"requests_per_minute": {"rate": 600, "exceeded": "queue"}, "concurrency": 4}',
            '{"requests_per_minute": 600, "concurrency": {"at_once": 4, "exceeded": "downgrade"}}',
        )
    ]
    assert len({one.digest for one in (number, *others)}) == 4
    limits = others[0].tenants["a"].limits
    assert (limits.requests_per_minute, limits.requests_burst) == (600, 601)


def test_the_published_schema_takes_both_forms() -> None:
    """Editors accept a number and a mapping, and refuse what the loader refuses."""
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))

    def taken(value: object) -> bool:
        tenant = {"credentials": ["key:a"], "models": ["m"], "limits": {"tokens_per_minute": value}}
        return validator.is_valid({"version": 1, "tenants": {"a": tenant}})

    assert taken(600) and taken({"rate": 600}) and taken({"rate": 600, "burst": 60, "exceeded": "queue"})
    assert not any(map(taken, (0, "600", {}, {"rate": 0}, {"rate": 1, "exceeded": "wait"}, {"rate": 1, "bursts": 2})))
