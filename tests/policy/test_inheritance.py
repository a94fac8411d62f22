"""policy.inheritance and policy.origins: what tenants have in effect, where it is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from policy.changes import changes
from policy.errors import PolicyError, PolicySchemaError, PolicySyntaxError
from policy.inheritance import MAX_INHERITANCE
from policy.loader import MAX_PROBLEMS, Source, load_policy
from policy.model import PolicySet
from policy.origins import find_origin
from policy.positions import load_yaml
from policy.references import dangling, located
from policy.schema import MAX_TENANT_GROUPS, DefaultsSchema, TenantGroupSchema, TenantSchema
from policy.simulate import Load, Question, decide
from tests.policy.drawn_inheritance import expanded, in_files, policies
from tests.policy.drawn_policies import loads, questions
from tests.policy.test_yaml_reading import python_calls

FOLDER = Path(__file__).parent
ERRORS = load_yaml((FOLDER / "inheritance_errors.yaml").read_text(), "inheritance_errors.yaml")[0]

LEAST_ERRORS = 30
"""Wrong policies that the data has at least."""

EXAMPLE = """\
version: 1
defaults:                     # what every tenant of the policy has unless it or a group says otherwise
  limits: {requests_per_minute: 300}
tenant_groups:
  staff: {models: ["*"], limits: {tokens_per_minute: 500000}}
  interns: {inherits: staff, limits: {requests_per_minute: 30}, features: {tools: false}}
tenants:
  alpha: {inherits: interns, credentials: ["key:alpha-1"]}
  beta:  {credentials: ["key:beta-1"], models: ["athanor-mini"]}
"""

WRITTEN_OUT = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits: {requests_per_minute: 30, tokens_per_minute: 500000}
    features: {tools: false}
  beta:
    credentials: ["key:beta-1"]
    models: ["athanor-mini"]
    limits: {requests_per_minute: 300}
"""


def load(*texts: str) -> PolicySet:
    """The policy of these texts."""
    return load_policy(sources(*texts))


def sources(*texts: str) -> list[Source]:
    """Texts as files ``0.yaml``, ``1.yaml`` and so on."""
    return [Source(f"{number}.yaml", text) for number, text in enumerate(texts)]


def outcome(files: list[Source]) -> PolicySet | None:
    """The policy of these files; None when they are refused."""
    try:
        return load_policy(files)
    except PolicyError:
        return None


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case["name"])
def test_errors_stand_where_the_value_is_written(case) -> None:
    """Each wrong policy gives exactly the expected lines, whatever order its files are given in."""
    files = [Source(name, text) for name, text in case["files"].items()]
    for given_files in (files, files[::-1]):
        with pytest.raises(PolicyError) as caught:
            load_policy(given_files)
        assert str(caught.value).splitlines() == case["expect"]
        assert type(caught.value) is (PolicySyntaxError if case.get("kind") == "syntax" else PolicySchemaError)


def test_the_errors_are_many_and_are_of_the_new_sections() -> None:
    """Control of the test above: the policies are different ones, and the example with all sections is valid."""
    assert len({json.dumps(case["files"]) for case in ERRORS}) == len(ERRORS) >= LEAST_ERRORS
    assert load(EXAMPLE).tenants.keys() == {"alpha", "beta"}


def test_the_example_is_what_it_says() -> None:
    """Own keys go before the group's, those before its group's, those before the defaults; the digest is that of the
    policy that writes all of it out."""
    policy = load(EXAMPLE)
    alpha, beta = policy.tenants["alpha"], policy.tenants["beta"]
    assert alpha.models == ("*",)
    assert (alpha.limits.requests_per_minute, alpha.limits.tokens_per_minute) == (30, 500_000)
    assert (beta.limits.requests_per_minute, beta.limits.tokens_per_minute) == (300, 200_000)
    assert (alpha.features.tools, beta.features.tools) == (False, True)
    assert policy == load(WRITTEN_OUT)
    assert policy.digest == load(WRITTEN_OUT).digest
    assert not changes(load(WRITTEN_OUT), policy)


def test_groups_and_defaults_have_the_keys_of_a_tenant() -> None:
    """A key that tenants get is one of groups and defaults too, but for credentials and ``unsafe_allow_all``, and
    models and adapters of the defaults."""
    tenant = set(TenantSchema.model_fields) - {"unsafe_allow_all"}
    assert set(TenantGroupSchema.model_fields) == tenant - {"credentials"}
    assert set(DefaultsSchema.model_fields) == tenant - {"credentials", "models", "adapters", "inherits"}


@settings(max_examples=150, deadline=None)
@given(policies(), st.data())
def test_inheritance_equals_the_expanded_policy(document, data) -> None:
    """A policy with groups and defaults, in any files, and the policy that writes all of it out are one: both are
    refused, or tenants, digest and decisions are the same."""
    one = outcome(data.draw(in_files(document)))
    other = outcome([Source("p.yaml", json.dumps(expanded(document)))])
    event("valid" if one else "refused")
    if one is None or other is None:
        assert one is other
        return
    assert one == other
    assert one.digest == other.digest
    assert list(one.prices) == list(other.prices)
    question, load_of_it = data.draw(questions), data.draw(loads)
    assert decide(one, Question(**question), Load(**load_of_it)) == decide(
        other, Question(**question), Load(**load_of_it)
    )


@settings(max_examples=80, deadline=None)
@given(policies(), st.data())
def test_the_order_of_files_does_not_matter(document, data) -> None:
    """Files that are given in another order give the same policy, or the same problems in the same order."""
    files = data.draw(in_files(document))
    other = data.draw(st.permutations(files))

    def told(some: list[Source]) -> object:
        try:
            return load_policy(some)
        except PolicyError as error:
            return str(error)

    assert told(files) == told(other)


@settings(max_examples=80, deadline=None)
@given(policies(), st.data())
def test_a_group_that_no_tenant_inherits_changes_nothing(document, data) -> None:
    """Without the groups from which no tenant inherits, the policy is the same."""
    used: set[str] = set()
    for tenant in document["tenants"].values():
        name = tenant.get("inherits")
        while name and name not in used:
            used.add(name)
            name = document["tenant_groups"][name].get("inherits")
    less = document | {"tenant_groups": {name: document["tenant_groups"][name] for name in used}}
    one, other = (outcome([Source("p.yaml", json.dumps(each))]) for each in (document, less))
    assert one == other
    assert one is None or other is None or one.digest == other.digest


def test_a_used_group_changes_the_digest() -> None:
    """Control of the test above: a value of a group that a tenant inherits is part of the digest."""
    assert (
        load(EXAMPLE).digest != load(EXAMPLE.replace("tokens_per_minute: 500000", "tokens_per_minute: 500001")).digest
    )
    unused = EXAMPLE.replace("tenant_groups:\n", "tenant_groups:\n  guests: {weight: 7, class: strict}\n")
    assert load(EXAMPLE).digest == load(unused).digest


def test_groups_hold_in_every_file() -> None:
    """A drop-in inherits from a group of a later file, and defaults of one file are those of all."""
    first = 'version: 1\ntenants: {alpha: {inherits: interns, credentials: ["key:alpha-1"]}}\n'
    second = (
        "version: 1\n"
        "defaults: {limits: {requests_per_minute: 300}}\n"
        'tenants: {beta: {credentials: ["key:beta-1"], models: ["athanor-mini"]}}\n'
        "tenant_groups: {interns: {inherits: staff, limits: {requests_per_minute: 30}, features: {tools: false}}}\n"
    )
    third = 'version: 1\ntenants: {}\ntenant_groups: {staff: {models: ["*"], limits: {tokens_per_minute: 500000}}}\n'
    assert load(first, second, third) == load(EXAMPLE)


def test_equal_parts_of_tenants_stay_one_object() -> None:
    """Tenants that inherit the same have it as one object; so do those whose own limits make them equal."""
    lines = "".join(f'  t{number}: {{inherits: staff, credentials: ["key:{number}"]}}\n' for number in range(50))
    text = f'version: 1\ntenant_groups: {{staff: {{models: ["m"], limits: {{concurrency: 3}}}}}}\ntenants:\n{lines}'
    text += '  own: {inherits: staff, credentials: ["key:own"], limits: {concurrency: 3}}\n'
    tenants = load(text).tenants.values()
    for part in ("models", "limits", "features", "kv"):
        assert len({id(getattr(tenant, part)) for tenant in tenants}) == 1, part


def test_a_tenant_group_shares_nothing() -> None:
    """Tenants of one tenant group are in no sharing group, so each has its own blocks and its own reservation. Control:
    a sharing group of the same name and members is noted in them."""
    text = (
        'version: 1\ntenant_groups: {lab: {models: ["m"]}}\ntenants:\n'
        '  alpha: {inherits: lab, credentials: ["key:a"]}\n'
        '  beta: {inherits: lab, credentials: ["key:b"]}\n'
    )
    policy = load(text)
    assert [tenant.group for tenant in policy.tenants.values()] == [None, None]
    assert not policy.groups
    shared = load(text + "sharing_groups: {lab: {tenants: [alpha, beta]}}\n")
    assert [tenant.group for tenant in shared.tenants.values()] == ["lab", "lab"]
    assert shared.digest != policy.digest


def chained(groups: int) -> str:
    """A policy with a chain of so many groups, of which the last has the models."""
    lines = [f"  g{number}: {{inherits: g{number + 1}}}\n" for number in range(1, groups)]
    lines.append(f'  g{groups}: {{models: ["m"]}}\n')
    return "version: 1\ntenant_groups:\n" + "".join(lines) + 'tenants: {a: {inherits: g1, credentials: ["key:a"]}}\n'


def test_a_chain_has_eight_groups_at_most() -> None:
    """Eight are inherited through; the ninth is refused at the group from which on it is too far. Much longer chains
    are refused at the same cost for each group, and told once."""
    assert MAX_INHERITANCE == 8
    assert load(chained(8)).tenants["a"].models == ("m",)
    with pytest.raises(PolicySchemaError, match=r"^0.yaml:3:18: tenant_groups.g1.inherits: this chain has more than 8"):
        load(chained(9))
    with pytest.raises(PolicySchemaError) as caught:
        load(chained(MAX_TENANT_GROUPS))
    (problem,) = caught.value.problems
    assert problem.path == f"tenant_groups.g{MAX_TENANT_GROUPS - 8}.inherits"


def test_there_are_a_thousand_groups_in_all_files_at_most() -> None:
    """As many are taken; one more is refused, in one file by the schema, in two where the one too many stands."""

    def groups(first: int, last: int) -> str:
        return "version: 1\ntenants: {}\ntenant_groups:\n" + "".join(f"  g{n}: {{}}\n" for n in range(first, last))

    load(groups(0, MAX_TENANT_GROUPS))
    load(groups(0, 600), groups(600, MAX_TENANT_GROUPS))
    with pytest.raises(PolicySchemaError, match=f"0.yaml:4:3: tenant_groups: .*{MAX_TENANT_GROUPS}"):
        load(groups(0, MAX_TENANT_GROUPS + 1))
    with pytest.raises(PolicySchemaError) as caught:
        load(groups(0, 600), groups(600, MAX_TENANT_GROUPS + 2))
    assert [str(problem) for problem in caught.value.problems] == [
        "1.yaml:404:3: tenant_groups.g1000: there are more than 1000 tenant groups together"
    ]


def test_a_wrong_value_of_a_group_does_not_hide_other_problems() -> None:
    """Two hundred tenants that inherit one wrong value are one problem, so that another mistake is told too. Control:
    written at each tenant it is two hundred problems, of which as many are told as may be."""
    inherit = "".join(f'  t{number}: {{inherits: apart, credentials: ["key:{number}"]}}\n' for number in range(200))
    tail = '  zeta: {credentials: ["key:z"], models: ["m"], kv: {borrow: false}}\n'
    text = f'version: 1\ntenant_groups: {{apart: {{models: ["m"], class: strict}}}}\ntenants:\n{inherit}{tail}'
    with pytest.raises(PolicySchemaError) as caught:
        load(text)
    first, second = caught.value.problems
    assert (first.path, first.line) == ("tenant_groups.apart.class", 2)
    assert first.message.endswith("tenants t0, t1, t2 and 197 more inherit it")
    assert second.path == "tenants.zeta.kv.borrow"
    with pytest.raises(PolicySchemaError) as caught:
        load(text.replace("inherits: apart", 'models: ["m"], class: strict'))
    assert len(caught.value.problems) == MAX_PROBLEMS


def test_work_grows_with_the_number_of_tenants_that_inherit() -> None:
    """Twice the tenants of twenty groups are at most twice the calls of Python functions."""
    half, whole = (python_calls(lambda: load(grouped(count))) for count in (500, 1_000))
    assert whole < 2.05 * half


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.sampled_from([None, 1, "", "staff", "m", "key:a", True]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["inherits", "models", "credentials", "limits", "kv", "staff", "alpha", "cap"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(["tenants", "tenant_groups", "defaults"]),
)
def test_any_content_is_loaded_or_refused(content, section) -> None:
    """Whatever stands in one of the sections, beside a file that inherits from it, the outcome is a policy or problems
    that are told."""
    odd = json.dumps({"version": 1, "tenants": {}} | {section: content})
    try:
        load(odd, 'version: 1\ntenants: {beta: {inherits: staff, credentials: ["key:b"]}}\n')
    except PolicyError as error:
        assert error.problems


def grouped(tenants: int) -> str:
    """A policy of so many tenants in twenty groups."""
    groups = "".join(f"  g{number}: {{models: [m], weight: {number + 1}}}\n" for number in range(20))
    lines = "".join(
        f'  t{number}: {{inherits: g{number % 20}, credentials: ["key:{number}"], limits: {{concurrency: 2}}}}\n'
        for number in range(tenants)
    )
    return f"version: 1\ntenant_groups:\n{groups}tenants:\n{lines}"


@pytest.mark.parametrize(
    ("rule", "origin"),
    [
        ("tenants.alpha.limits.requests_per_minute", "tenant_groups.interns.limits.requests_per_minute (0.yaml:6:60)"),
        ("tenants.alpha.limits.tokens_per_minute", "tenant_groups.staff.limits.tokens_per_minute (0.yaml:5:54)"),
        ("tenants.alpha.features.tools", "tenant_groups.interns.features.tools (0.yaml:6:83)"),
        ("tenants.alpha.models[0]", "tenant_groups.staff.models[0] (0.yaml:5:20)"),
        ("tenants.alpha.models", "tenant_groups.staff.models (0.yaml:5:19)"),
        ("tenants.beta.limits.requests_per_minute", "defaults.limits.requests_per_minute (0.yaml:3:33)"),
        ("tenants.beta.models[0]", "tenants.beta.models[0] (0.yaml:9:49)"),
        ("tenants.beta.limits.concurrency", "None"),
        ("tenants.gamma.limits.concurrency", "None"),
        ("prices.rules", "None"),
        ("tenants", "None"),
    ],
)
def test_the_place_of_a_value(rule: str, origin: str) -> None:
    """A rule leads to where its value is written: at the tenant, a group or the defaults; the schema's defaults and
    rules that are no tenant's are written nowhere."""
    found = find_origin(sources(EXAMPLE), rule)
    assert str(found) == origin
    assert found is None or found.inherited == (not origin.startswith("tenants."))


def test_a_name_that_leads_nowhere_is_told_once_for_its_group() -> None:
    """A model of a group that is not served is a warning at the group with its tenants, not one for each. Control: a
    model of a tenant's own is told at the tenant."""
    text = (
        'version: 1\ntenant_groups:\n  staff: {models: ["m", "gone"]}\ntenants:\n'
        '  alpha: {inherits: staff, credentials: ["key:a"]}\n'
        '  beta: {inherits: staff, credentials: ["key:b"]}\n'
        '  gamma: {models: ["gone"], credentials: ["key:c"]}\n'
    )
    found = located(dangling(load(text), ["m"], None), sources(text), "keys")
    assert [str(one) for one in found] == [
        "0.yaml:3:25: tenant_groups.staff.models[1]: no model is named 'gone'; served: m; "
        "tenants alpha and beta inherit it",
        "0.yaml:7:20: tenants.gamma.models[0]: no model is named 'gone'; served: m",
    ]
