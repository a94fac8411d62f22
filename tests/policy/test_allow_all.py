"""policy.allow_all: what ``unsafe_allow_all`` stands for, what may stand beside it, and that nothing narrows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings

from policy.allow_all import BESIDE, KEY, WIDEST
from policy.changes import changes
from policy.decision import Reason
from policy.errors import PolicySchemaError
from policy.loader import Source, load_policy
from policy.model import Limits, PolicySet
from policy.origins import find_origin, settings_of
from policy.rates import TREATMENTS
from policy.references import dangling, located
from policy.schema import LimitsSchema, TenantSchema, schema_text
from policy.simulate import Load, Question, decide
from tests.policy.drawn_policies import documents, loaded, loads, questions

FILE = """\
version: 1
defaults: {limits: {concurrency: 2, spend_per_day: 1}, hours: ["mon-fri 08:00-18:00"], features: {tools: false}}
prices: {currency: EUR, rules: [{models: ["x"], input: 1, output: 1}]}
tenants:
  alpha:
    credentials: ["key:a"]
    unsafe_allow_all: true
"""


def load(text: str = FILE) -> PolicySet:
    """The policy of one file."""
    return load_policy([Source("p.yaml", text)])


def test_every_field_is_widened_or_may_stand_beside_it() -> None:
    """Each key of a tenant is either one that the flag stands for, or one that may stand beside it, or the name of a
    group, which may not; so a key that is added has to be put into one of them. All keys of limits are written out."""
    assert {*WIDEST} | BESIDE | {"inherits"} == {*TenantSchema.model_fields}
    assert not {*WIDEST} & BESIDE
    for name in ("limits", "features", "content", "end_users"):
        assert WIDEST[name].model_fields_set == {*type(WIDEST[name]).model_fields}
    assert (
        load().tenants["alpha"].features == load(FILE.replace("tools: false", "tools: true")).tenants["alpha"].features
    )


@pytest.mark.parametrize("name", [name for name in LimitsSchema.model_fields if not name.startswith("spend")])
def test_each_limit_is_the_largest_there_can_be(name: str) -> None:
    """No file can have a larger number than the tenant's, and what may be absent is absent."""
    limit = getattr(load().tenants["alpha"].limits, name)
    if limit is None:
        return
    wide: dict[str, Any] = {"version": 1, "tenants": {"a": {"credentials": ["key:a"], "models": ["*"]}}}
    wide["tenants"]["a"]["limits"] = {name: limit}
    assert getattr(loaded(wide).tenants["a"].limits, name) == limit
    wide["tenants"]["a"]["limits"] = {name: limit + 1}
    with pytest.raises(PolicySchemaError, match=f"limits.{name}: must be at most {limit}"):
        loaded(wide)


def test_defaults_narrow_nothing() -> None:
    """A tenant that others' defaults would limit by number, money, hours and feature is allowed at any time, and an
    unpriced model too. Control: without the key the same request is denied by those defaults."""
    question = Question(tenant="alpha", model="m", input_tokens=500_000, feature=None, unix_s=0.0)
    load_now = Load(running=4_000, spent_today=10_000.0)
    assert decide(load(), question, load_now).allowed
    usual = load(FILE.replace("unsafe_allow_all: true", 'models: ["*"]'))
    assert decide(usual, question, load_now).reason is Reason.OUT_OF_HOURS
    assert not load().bounds_spend


@settings(max_examples=200, deadline=None)
@given(documents, questions, loads)
def test_it_never_denies_what_another_tenant_is_allowed(document: dict, asked: dict, used: dict) -> None:
    """Whatever a drawn policy allows a tenant, the same tenant with the key in place of its rules is allowed, for a
    request that names its output tokens (one that names none is granted more, and reserves it)."""
    policy = loaded(document)
    narrow = decide(policy, Question(**asked), Load(**used))
    event(f"allowed before: {narrow.allowed}")
    if not narrow.allowed or "max_tokens" not in asked:
        return
    wide = json.loads(json.dumps(document))
    rules = wide["tenants"][asked["tenant"]]
    kept = {"class": "isolation_class"}
    wide["tenants"][asked["tenant"]] = {k: v for k, v in rules.items() if kept.get(k, k) in BESIDE} | {KEY: True}
    left = ("requests_left", "tokens_left", "input_tokens_left", "output_tokens_left")
    load_now = Load(**{name: value for name, value in used.items() if name not in left})
    assert decide(loaded(wide), Question(**asked), load_now).allowed


@pytest.mark.parametrize("field", sorted({*WIDEST} | {"inherits"}))
def test_no_rule_stands_beside_it(field: str) -> None:
    """Each key that the flag stands for is refused at its place; a flag that is false is as good as none."""
    value = {"limits": "{}", "features": "{}", "content": "{}", "end_users": "{}", "deterministic": "never"}
    value |= {"models": '["m"]', "inherits": "staff"}
    more = f"    {field}: {value.get(field, '[]')}\n"
    groups = "tenant_groups:\n  staff: {models: [m]}\n"
    with pytest.raises(PolicySchemaError) as caught:
        load(FILE + more + groups)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.path) == (8, 5, f"tenants.alpha.{field}")
    assert "unsafe_allow_all allows everything" in problem.message
    off = FILE.replace(f"{KEY}: true", f"{KEY}: false")
    models = "" if field == "models" else '    models: ["m"]\n'
    if field != "inherits":
        assert load(off + more + models + groups).tenants["alpha"].models == ("m",)


def test_what_may_stand_beside_it_does() -> None:
    """How a tenant is kept stays its own: class, share of KV, priority, adapters; class strict stays deterministic."""
    own = "    class: strict\n    kv: {reservation: 20%}\n    priority: low\n"
    own += "    adapters: ['m:a']\n    external: refuse\n"
    tenant = load(FILE + own).tenants["alpha"]
    assert (tenant.isolation_class.value, tenant.priority.value, tenant.adapters) == ("strict", "low", ("m:a",))
    assert (tenant.deterministic.value, tenant.external.value, tenant.unsafe_allow_all) == ("always", "refuse", True)


def test_only_a_tenant_has_it() -> None:
    """Groups and defaults have no such key, and a text is no truth value."""
    for text, problem in (
        (FILE.replace("defaults: {", f"defaults: {{{KEY}: true, "), "only tenants have this key"),
        (FILE + f"tenant_groups:\n  g: {{models: [m], {KEY}: true}}\n", "only tenants have this key"),
        (FILE.replace("all: true", 'all: "yes"'), "must be true or false, found 'yes'"),
        (FILE.replace("all: true", "all: false"), "tenants.alpha.models: this key is required"),
        (FILE.replace("allow_all: true", "allow_al: true"), "unknown key; did you mean 'unsafe_allow_all'?"),
    ):
        with pytest.raises(PolicySchemaError) as caught:
            load(text)
        assert problem in str(caught.value)


def test_explanations_and_settings_name_it() -> None:
    """The place of every value that it stands for is its own; another value's is where that is written."""
    sources = [Source("p.yaml", FILE)]
    denied = decide(load(), Question(tenant="alpha", model="m"), Load(running=5_000))
    origin = find_origin(sources, denied.rule)
    assert str(origin) == "tenants.alpha.unsafe_allow_all (p.yaml:7:23)"
    found = {one.path: one.origin for one in settings_of(sources, load(), "alpha")}
    named = {path for path, place in found.items() if place is not None and place.path.endswith(KEY)}
    assert named == {path for path in found if path.partition(".")[0] in WIDEST}
    assert found["class"] is None


def test_a_policy_that_writes_it_out_differs_by_the_key_alone() -> None:
    """The same values written out decide alike; the digest differs, and the difference is told as wider."""
    limits = {key: value for key, value in WIDEST["limits"].model_dump().items() if value is not None}
    tenant = {"credentials": ["key:a"], "models": ["*"], "limits": limits, "deterministic": "allowed"}
    tenant["features"] = WIDEST["features"].model_dump()
    written = loaded({"version": 1, "tenants": {"alpha": tenant}})
    short = loaded({"version": 1, "tenants": {"alpha": {"credentials": ["key:a"], KEY: True}}})
    assert replace(written.tenants["alpha"], unsafe_allow_all=True) == short.tenants["alpha"]
    (told,) = changes(written, short)
    assert (told.path, told.direction.value) == ("tenants.alpha.unsafe_allow_all", "wider")
    assert all(getattr(short.tenants["alpha"].limits, name).value == "refuse" for name in TREATMENTS)
    assert isinstance(short.tenants["alpha"].limits, Limits)


def test_other_tools_take_it() -> None:
    """The published schema takes a tenant that has the key alone, and names that lead nowhere are looked for."""
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    tenant: dict[str, Any] = {"credentials": ["key:a"], KEY: True}
    assert validator.is_valid({"version": 1, "tenants": {"a": tenant}})
    assert not validator.is_valid({"version": 1, "tenants": {"a": {"credentials": ["key:a"]}}})
    found = dangling(load(), [], None)
    assert [str(one) for one in located(found, [Source("p.yaml", FILE)], "keys")] == [
        "p.yaml:6:5: tenants.alpha.models[0]: no model is named '*'"
    ]
