"""What a running request needs of a new policy, and that one which has it no more ends at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.common.errors import (
    ApplianceError,
    FeatureNotAllowedError,
    PermissionDeniedError,
    PolicyChangedError,
    UnauthenticatedError,
)
from appliance.gateway.generate_request import Principal
from appliance.gateway.request.withdrawal import Admitted, reason_to_end
from policy.decision import Obligations
from policy.files import Source
from policy.loader import load_policy
from policy.model import Determinism, IsolationClass, PolicySet, Priority, Retention

POLICY = """
version: 1
tenants:
  alpha: {{credentials: ["key:a", "spiffe://x.org/a"], models: [{models}]{terms}}}
  beta: {{credentials: ["key:b"], models: ["*"]}}
"""

NAMESPACES = {"alpha": b"k" * 32, "beta": b"l" * 32}

ADMITTED = Admitted(
    Principal("alpha", "key:a"),
    "m",
    Obligations(
        max_output_tokens=100,
        retention=Retention.STANDARD,
        isolation_class=IsolationClass.SHARED,
        weight=1,
        priority=Priority.NORMAL,
        deterministic=Determinism.NEVER,
    ),
    NAMESPACES["alpha"],
    b"",
)


def policy(models: str = '"m"', terms: str = "") -> PolicySet:
    """A policy with two tenants."""
    return load_policy([Source("p.yaml", POLICY.format(models=models, terms=terms))])


def test_what_holds_goes_on() -> None:
    """Under the same policy, under other limits, and for a certificate, which has no key."""
    before = policy()
    admitted = replace(ADMITTED, obligations=replace(ADMITTED.obligations, retention=before.tenants["alpha"].retention))
    assert reason_to_end(admitted, before, NAMESPACES, credential_holds=True) is None
    cut = policy(terms=", limits: {requests_per_minute: 1, concurrency: 1, max_output_tokens: 1}")
    assert reason_to_end(admitted, cut, NAMESPACES, credential_holds=True) is None
    certificate = replace(admitted, principal=Principal("alpha", "spiffe://x.org/a"))
    assert reason_to_end(certificate, before, NAMESPACES, credential_holds=True) is None


@pytest.mark.parametrize(
    ("change", "kind", "word", "rule"),
    [
        ("revoked", UnauthenticatedError, "credential", ""),
        ("tenant", UnauthenticatedError, "credential", "tenants"),
        ("moved", UnauthenticatedError, "credential", "tenants.alpha.credentials"),
        ("model", PermissionDeniedError, "model m", "tenants.alpha.models"),
        ("class", PolicyChangedError, "isolation class", "tenants.alpha.class"),
        ("retention", PolicyChangedError, "retention", "tenants.alpha.retention"),
        ("key", PolicyChangedError, "key", ""),
        ("group", PolicyChangedError, "sharing group", "sharing_groups"),
        ("external", PermissionDeniedError, "outside", "tenants.alpha.external"),
        ("batch", FeatureNotAllowedError, "files", "tenants.alpha.features.batches"),
        ("route", PolicyChangedError, "route fast", "routes.fast"),
    ],
)
def test_what_does_not_hold_ends(change: str, kind: type[ApplianceError], word: str, rule: str) -> None:
    """A revoked key, a removed tenant, a key that is another tenant's now, a model that was taken away, another class,
    retention, namespace key or sharing group, files and models outside that are allowed no more, a route that is gone:
    each with its own error, which names rule and digest where the policy ends the request, and none where a key alone
    does. It is no denial, which has a ``rule``; who has no credential any more is told neither."""
    now = policy()
    own = replace(ADMITTED.obligations, retention=now.tenants["alpha"].retention)
    admitted, namespaces = replace(ADMITTED, obligations=own), dict(NAMESPACES)
    if change == "tenant":
        now = load_policy([Source("p.yaml", 'version: 1\ntenants:\n  beta: {credentials: ["key:b"], models: ["*"]}\n')])
    elif change == "moved":
        admitted = replace(admitted, principal=Principal("alpha", "key:b"))
    elif change == "model":
        now = policy(models='"n"')
    elif change == "class":
        now = policy(terms=", class: strict, kv: {reservation: 20%}")
    elif change == "retention":
        other = next(one for one in Retention if one is not own.retention)
        admitted = replace(admitted, obligations=replace(own, retention=other))
    elif change == "key":
        namespaces["alpha"] = b"z" * 32
    elif change == "group":
        admitted = replace(admitted, group=b"g" * 32)
    elif change == "external":
        now, admitted = policy(terms=", external: refuse"), replace(admitted, external=True)
    elif change == "batch":
        admitted = replace(admitted, batch=True)
    elif change == "route":
        now, admitted = policy(models='"m", "fast"'), replace(admitted, alias="fast")
    error = reason_to_end(admitted, now, namespaces, credential_holds=change != "revoked")
    assert type(error) is kind
    assert word in error.message
    assert (error.cut_rule, error.cut_policy, error.rule) == (rule, now.digest if rule else "", "")
    told = {"rule": rule.removeprefix("tenants.alpha."), "policy": now.digest}
    assert error.details == ({} if kind is UnauthenticatedError or not rule else told)


@pytest.mark.parametrize("terms", ["regions: [eu-central]", "model_regions: [{models: ['*'], regions: [eu-central]}]"])
def test_a_region_that_is_allowed_no_more_ends_a_request(terms) -> None:
    """What runs where its tenant, or its model, may not be served any more is stopped; in one of the regions it goes
    on."""
    now = policy(terms=f", {terms}")
    retention = now.tenants["alpha"].retention
    admitted = replace(ADMITTED, obligations=replace(ADMITTED.obligations, retention=retention), region="eu-central")
    assert reason_to_end(admitted, now, NAMESPACES, credential_holds=True) is None
    error = reason_to_end(replace(admitted, region=""), now, NAMESPACES, credential_holds=True)
    assert isinstance(error, PermissionDeniedError)


def test_another_namespace_ends_a_request() -> None:
    """Blocks of a request that runs are named under a key that holds no more."""
    now = policy(terms=", namespace: user")
    error = reason_to_end(ADMITTED, now, NAMESPACES, credential_holds=True)
    assert isinstance(error, PolicyChangedError)
    assert "namespace" in error.message


def test_a_key_of_the_group_that_was_destroyed_names_no_rule() -> None:
    """Under the policy that admitted the request nothing of that policy ends it. Control: under a later policy its
    sharing groups do."""
    now = policy()
    own = replace(ADMITTED.obligations, retention=now.tenants["alpha"].retention)
    admitted = replace(ADMITTED, obligations=own, group=b"g" * 32, policy=now.digest)
    error = reason_to_end(admitted, now, NAMESPACES, credential_holds=True)
    assert isinstance(error, PolicyChangedError) and "sharing group" in error.message
    assert (error.cut_rule, error.cut_policy, error.details) == ("", "", {})
    later = reason_to_end(replace(admitted, policy="ab" * 32), now, NAMESPACES, credential_holds=True)
    assert later is not None and (later.cut_rule, later.cut_policy) == ("sharing_groups", now.digest)
