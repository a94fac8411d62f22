"""policy.first_policy: what ``athanor policy init`` writes is a policy, and so is what its comments offer."""

from __future__ import annotations

import re

from policy.first_policy import SCHEMA_NAME, first_policy
from policy.loader import Source, load_policy
from policy.model import KvShare, Tenant
from policy.prices import BILLIONTHS
from policy.schema import FeaturesSchema, TenantSchema

TEXT = first_policy("drafts/policy.yaml", "acme")


def load(text: str):
    """The policy of one text."""
    return load_policy([Source("policy.yaml", text)])


def test_it_is_a_policy_of_one_tenant() -> None:
    """The text loads, has the tenant that was named, and begins with the schema for editors."""
    tenant = load(TEXT).tenants["acme"]
    assert (tenant.credentials, tenant.models) == (("key:acme-1",), ("*",))
    assert TEXT.startswith(f"# yaml-language-server: $schema=./{SCHEMA_NAME}\n")
    assert "athanor policy check drafts/policy.yaml" in TEXT


def test_what_is_commented_out_is_the_default() -> None:
    """With the marks of the tenant's optional keys taken away the text is the same policy: each key is one and has its
    default; together with those in use no key of a tenant is missing but the name of a tenant group."""
    whole = re.sub(r"^    # (\w+: [\w{\[])", r"    \1", TEXT, flags=re.MULTILINE)
    assert whole.count("\n    # ") < TEXT.count("\n    # ") - 6
    assert load(whole).digest == load(TEXT).digest
    keys = set(re.findall(r"^    (\w+):", whole, re.MULTILINE))
    assert keys == {field.alias or name for name, field in TenantSchema.model_fields.items()} - {"inherits"}
    assert all(f"{name}: {str(field.default).lower()}" in whole for name, field in FeaturesSchema.model_fields.items())
    usual: Tenant = load(TEXT).tenants["acme"]
    assert usual.kv == KvShare()


def test_what_is_commented_out_at_the_end_loads() -> None:
    """The groups, the prefix, the prices and the route at the end load, once the other tenant is there; limits of spend
    too."""
    text = re.sub(
        r"^# ((?:defaults|tenant_groups|sharing_groups|public_prefixes|prices|routes):|  )",
        r"\1",
        TEXT,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^      # (spend_per_\w+: \d+)", r"      \1", text, flags=re.MULTILINE)
    text = text.replace(
        "tenants:\n  acme:", 'tenants:\n  another-tenant: {credentials: ["key:o"], inherits: staff}\n  acme:', 1
    )
    policy = load(text)
    other = policy.tenants["another-tenant"]
    assert (other.models, other.limits.tokens_per_minute, other.limits.requests_per_minute) == (("*",), 500_000, 300)
    assert policy.groups["lab"].tenants == ("acme", "another-tenant")
    assert policy.public["house-style"].tenants == ("acme", "another-tenant")
    assert (policy.currency, len(policy.prices)) == ("EUR", 1)
    assert policy.routes["fast"].models == ("athanor-mini", "athanor-next", "backup-model")
    assert policy.tenants["acme"].limits.spend_per_day == 20 * BILLIONTHS
