"""policy.content: what a request may hold; properties of the decision, and mistakes in a file with their places."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isolation.ipc.sampling import NAMES
from policy.content import REQUEST_FIELDS, ROLES
from policy.errors import PolicySchemaError
from policy.explain import explain
from policy.loader import Source, load_policy
from policy.model import PolicySet
from policy.request import Content
from policy.simulate import Question, decide

FIELDS = ("seed", "tools", "n", "stop")


def policy(rules: dict[str, Any]) -> PolicySet:
    """A policy of one tenant with these rules."""
    tenant = {"credentials": ["key:a"], "models": ["*"], "content": rules}
    return load_policy([Source("p.yaml", json.dumps({"version": 1, "tenants": {"a": tenant}}))])


def passes(rules: dict[str, Any], content: Content) -> bool:
    """Whether the content is allowed."""
    return decide(policy(rules), Question(tenant="a", model="m", content=content)).allowed


rules = st.fixed_dictionaries(
    {
        "max_request_bytes": st.none() | st.integers(1, 30),
        "denied_fields": st.lists(st.sampled_from(FIELDS), max_size=4, unique=True),
        "roles": st.lists(st.sampled_from(ROLES), max_size=5, unique=True),
    }
)
contents = st.builds(
    Content,
    bytes=st.integers(0, 40),
    fields=st.frozensets(st.sampled_from(FIELDS)),
    roles=st.frozensets(st.sampled_from(ROLES)),
)


@given(rules, contents, st.data())
def test_widening_never_denies_more(narrow: dict[str, Any], content: Content, data: st.DataObject) -> None:
    """More bytes, fewer denied fields and more roles, or none of the three, allow all that was allowed before."""
    limit, denied, roles = narrow["max_request_bytes"], narrow["denied_fields"], narrow["roles"]
    wide = {
        "max_request_bytes": None
        if limit is None or data.draw(st.booleans())
        else limit + data.draw(st.integers(0, 20)),
        "denied_fields": [one for one in denied if data.draw(st.booleans())],
        "roles": data.draw(
            st.sampled_from([[], [*roles, *(one for one in ROLES if one not in roles)][: len(roles) + 1]])
        )
        if roles
        else [],
    }
    assert passes(wide, content) or not passes(narrow, content)


@given(rules, contents)
def test_the_decision_is_what_the_rules_say(given_rules: dict[str, Any], content: Content) -> None:
    """A content passes exactly if its bytes, fields and roles do, and a denial names the rule that is broken."""
    limit, denied, roles = (given_rules[key] for key in ("max_request_bytes", "denied_fields", "roles"))
    broken = {
        "max_request_bytes": limit is not None and content.bytes > limit,
        "denied_fields": bool(content.fields & {*denied}),
        "roles": bool(roles) and not content.roles <= {*roles},
    }
    decision = decide(policy(given_rules), Question(tenant="a", model="m", content=content))
    assert decision.allowed == (not any(broken.values()))
    if not decision.allowed:
        key = decision.rule.removeprefix("tenants.a.content.").partition("[")[0]
        assert key == next(name for name, is_broken in broken.items() if is_broken)
        assert decision.rule in explain(decision)
        assert decision.retry_after_s is None


def test_every_number_of_sampling_can_be_denied() -> None:
    """A number that a caller may send is a field of the policy."""
    assert {*NAMES} <= {*REQUEST_FIELDS}


@pytest.mark.parametrize(
    ("written", "column", "said"),
    [
        ("{denied_fields: [seed, logprob]}", 33, "did you mean 'logprobs'?"),
        ("{denied_fields: [colour]}", 27, "no field of requests that can be denied; known here: temperature"),
        ("{denied_fields: [messages]}", 27, "'messages' is no field of requests that can be denied"),
        ("{denied_fields: seed}", 26, "must be a list, found 'seed'"),
        ("{roles: [user, owner]}", 25, "found 'owner'"),
        ("{max_request_bytes: 0}", 30, "must be at least 1, found 0"),
        ("{max_request_bytes: 1.5}", 30, "must be a whole number"),
        ("{max_bytes: 5}", 11, "unknown key; did you mean 'max_request_bytes'?"),
    ],
)
def test_a_mistake_is_told_at_its_place(written: str, column: int, said: str) -> None:
    """Unknown names of fields and roles, wrong values and unknown keys: line, column and what would be right."""
    text = f"version: 1\ntenants:\n  a:\n    credentials: ['key:a']\n    models: ['*']\n    content: {written}\n"
    with pytest.raises(PolicySchemaError) as error:
        load_policy([Source("p.yaml", text)])
    [problem] = error.value.problems
    assert (problem.line, problem.column, said in problem.message) == (6, column + 4, True), str(problem)
