"""policy.loader and policy.positions: what is accepted, and what an operator reads when it is
not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.errors import PolicyError, PolicySchemaError, PolicySyntaxError
from policy.loader import MAX_PROBLEMS, Source, load_policy
from policy.model import IsolationClass, KvShare, Limits, Priority, Retention
from policy.positions import MAX_TEXT_BYTES, Locator, dotted, load_yaml

CASES = Path(__file__).parent / "cases"
ERRORS = load_yaml((CASES / "errors.yaml").read_text(), "errors.yaml")[0]

FULL = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1", "spiffe://athanor.local/tenant/alpha"]
    models: ["athanor-mini", "qwen3-*"]
    class: shared
    retention: none
    weight: 7
    priority: low
    limits:
      requests_per_minute: 1
      tokens_per_minute: 2
      concurrency: 3
      max_context_tokens: 4
      max_output_tokens: 5
  beta: {credentials: ["key:b"], models: ["*"]}
"""


def load(text: str, name: str = "p.yaml"):
    """The policy of one text."""
    return load_policy([Source(name, text)])


@pytest.mark.parametrize("value", ["true", "1.0", "'1'", "2", "null"])
def test_the_version_is_a_number(value: str) -> None:
    """What merely equals 1 is none; the control: 1 is."""
    text = "version: {}\ntenants: {{a: {{credentials: ['key:a'], models: [m]}}}}\n"
    with pytest.raises(PolicyError, match="version"):
        load_policy([Source("p.yaml", text.format(value))])
    assert load_policy([Source("p.yaml", text.format(1))]).tenants


def test_every_field_arrives() -> None:
    """A file that sets everything gives a tenant with exactly those values."""
    alpha = load(FULL).tenants["alpha"]
    assert alpha.credentials == ("key:alpha-1", "spiffe://athanor.local/tenant/alpha")
    assert alpha.models == ("athanor-mini", "qwen3-*")
    assert (alpha.isolation_class, alpha.retention, alpha.weight, alpha.priority) == (
        IsolationClass.SHARED,
        Retention.NONE,
        7,
        Priority.LOW,
    )
    assert alpha.limits == Limits(
        requests_per_minute=1, tokens_per_minute=2, concurrency=3, max_context_tokens=4, max_output_tokens=5
    )


def test_defaults_are_the_documented_ones() -> None:
    """A tenant with credentials and models only gets the safe defaults."""
    beta = load(FULL).tenants["beta"]
    assert (beta.isolation_class, beta.retention, beta.weight, beta.priority) == (
        IsolationClass.SHARED,
        Retention.STANDARD,
        1,
        Priority.NORMAL,
    )
    assert beta.limits == Limits(
        requests_per_minute=600,
        tokens_per_minute=200_000,
        concurrency=64,
        max_context_tokens=4_096,
        max_output_tokens=1_024,
    )


def test_credentials_lead_to_their_tenant() -> None:
    """The index holds each credential once."""
    assert load(FULL).principals == {
        "key:alpha-1": "alpha",
        "spiffe://athanor.local/tenant/alpha": "alpha",
        "key:b": "beta",
    }


def test_a_loaded_policy_cannot_be_changed() -> None:
    """The mappings of a policy set are read-only views."""
    policy = load(FULL)
    with pytest.raises(TypeError):
        policy.tenants["gamma"] = policy.tenants["alpha"]  # type: ignore[index]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case["name"])
def test_errors_name_file_line_column_and_path(case) -> None:
    """Each wrong file gives exactly the expected lines and the expected kind of error."""
    kind = {"syntax": PolicySyntaxError, "schema": PolicySchemaError}[case["kind"]]
    with pytest.raises(PolicyError) as caught:
        load(case["text"])
    assert str(caught.value).splitlines() == case["expect"]
    assert type(caught.value) is kind


def test_drop_ins_are_merged_in_lexical_order() -> None:
    """Files of a directory make one policy, whatever order they are given in."""
    first = Source("10-a.yaml", "version: 1\ntenants: {a: {credentials: ['key:a'], models: [m]}}")
    second = Source("20-b.yaml", "version: 1\ntenants: {b: {credentials: ['key:b'], models: [m]}}")
    policy = load_policy([second, first])
    assert list(policy.tenants) == ["a", "b"]
    assert policy.digest == load_policy([first, second]).digest


def test_a_tenant_in_two_files_is_reported_at_the_second() -> None:
    """The later file, in lexical order, carries the problem and names the earlier one."""
    text = "version: 1\ntenants:\n  a: {credentials: ['key:a'], models: [m]}"
    with pytest.raises(PolicySchemaError) as caught:
        load_policy([Source("b.yaml", text), Source("a.yaml", text)])
    assert str(caught.value) == "b.yaml:3:3: tenants.a: tenant 'a' stands in a.yaml already"


def test_a_credential_in_two_files_is_reported_at_the_second() -> None:
    """Credentials are unique over all files."""
    with pytest.raises(PolicySchemaError) as caught:
        load_policy(
            [
                Source("a.yaml", "version: 1\ntenants: {a: {credentials: ['key:x'], models: [m]}}"),
                Source("b.yaml", "version: 1\ntenants: {b: {credentials: ['key:x'], models: [m]}}"),
            ]
        )
    [problem] = caught.value.problems
    assert (problem.file, problem.line, problem.path) == ("b.yaml", 2, "tenants.b.credentials[0]")


@pytest.mark.parametrize("groups", ["", "sharing_groups:\n  g: {tenants: [a, b]}\n"], ids=["tenants", "with a group"])
def test_all_files_together_have_no_more_accounts_than_an_engine_takes(
    monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    """The bound of one file holds for all of them, sharing groups included; the one too many is named where it stands.
    Control: as many as there may be are taken."""
    names = ("a", "b", "c") if groups else ("a", "b", "c", "d")
    sources = [
        Source(f"{name}.yaml", f'version: 1\ntenants:\n  {name}: {{credentials: ["key:{name}"], models: ["m"]}}\n')
        for name in names
    ]
    sources[-1] = Source(sources[-1].name, sources[-1].text + groups)
    monkeypatch.setattr("policy.loader.MAX_TENANTS", 4)
    load_policy(sources)
    monkeypatch.setattr("policy.loader.MAX_TENANTS", 3)
    with pytest.raises(PolicySchemaError) as caught:
        load_policy(sources)
    (problem,) = caught.value.problems
    assert (problem.file, problem.path) == (sources[-1].name, "sharing_groups.g" if groups else "tenants.d")


def test_syntax_problems_of_all_files_are_reported_together() -> None:
    """One broken file does not hide another."""
    with pytest.raises(PolicySyntaxError) as caught:
        load_policy([Source("b.yaml", "a: ["), Source("a.yaml", "a: *x"), Source("c.yaml", "1")])
    assert [problem.file for problem in caught.value.problems] == ["a.yaml", "b.yaml"]


def test_the_number_of_problems_is_bounded() -> None:
    """A file with thousands of mistakes gives a page, not a flood."""
    entries = "\n".join(f"  Tenant{index}: 1" for index in range(200))
    with pytest.raises(PolicySchemaError) as caught:
        load("version: 1\ntenants:\n" + entries)
    assert len(caught.value.problems) == MAX_PROBLEMS


def test_the_digest_is_of_the_content() -> None:
    """Comments, order and layout leave the digest alone; a changed number does not."""
    same = """\
    # a comment
    version: 1
    tenants:
      beta: {models: ["*"], credentials: ["key:b"], weight: 1}
      alpha:
        models: ["qwen3-*", "athanor-mini"]
        credentials: ["spiffe://athanor.local/tenant/alpha", "key:alpha-1"]
        retention: none
        weight: 7
        priority: low
        limits: {max_output_tokens: 5, requests_per_minute: 1, tokens_per_minute: 2,
                 concurrency: 3, max_context_tokens: 4}
    """
    assert load(FULL).digest == load(same).digest
    assert load(FULL).digest != load(FULL.replace("weight: 7", "weight: 8")).digest
    assert len(load(FULL).digest) == 64


def test_long_values_are_cut_in_messages() -> None:
    """A wrong value is repeated only in part."""
    with pytest.raises(PolicySchemaError) as caught:
        load(f"version: {'x' * 500}\ntenants: {{}}")
    assert len(str(caught.value)) < 120


def test_scalars_follow_yaml_1_2() -> None:
    """Words that YAML 1.1 reads as booleans or dates stay texts; quoting always makes a text."""
    data, _ = load_yaml(
        "[no, on, 2025-01-01, 0x10, 1_000, '1', \"true\", True, false, ~, null, -3, +4, 1.5, 2e3, .5]", "x"
    )
    assert data[:7] == ["no", "on", "2025-01-01", "0x10", "1_000", "1", "true"]
    assert data[7:] == [True, False, None, None, -3, 4, 1.5, 2000.0, 0.5]


def test_an_empty_document_is_none() -> None:
    """Nothing but comments is no data and no error."""
    data, locate = load_yaml("# nothing\n", "x")
    assert data is None
    assert locate(("a",)) == (1, 1)


def test_places_of_keys_and_values() -> None:
    """Every key and value is found; a path that does not exist is placed at its nearest parent."""
    _, locate = load_yaml("a:\n  b: [x, {c: 1}]\n  d:\n", "x")
    assert locate(("a", "b")) == (2, 6)
    assert locate.key(("a", "b")) == (2, 3)
    assert locate(("a", "b", 1, "c")) == (2, 14)
    assert locate.key(("a", "b", 0)) == (2, 7)
    assert locate(("a", "b", 1, "missing")) == (2, 10)
    assert locate(()) == (1, 1)
    assert Locator()(("a",)) == (1, 1)
    assert dotted(("a", "b", 1, "c")) == "a.b[1].c"


def test_forbidden_characters_are_placed() -> None:
    """A control character is named with its line and column."""
    with pytest.raises(PolicySyntaxError) as caught:
        load("version: 1\nten\x07ants: {}")
    assert str(caught.value) == "p.yaml:2:4: character U+0007 is not allowed"


def test_a_file_too_large_is_refused_unread() -> None:
    """The size is checked before any parsing."""
    with pytest.raises(PolicySyntaxError, match=f"larger than {4 << 20} bytes"):
        load("#" * (MAX_TEXT_BYTES + 1))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab01:-[]{},&*!|>'\"%#?~ \n\t<\u00e4\x00\ufeff\ud800", max_size=60))
def test_any_text_is_loaded_or_refused(text: str) -> None:
    """Whatever the text, the outcome is plain data or a placed problem, never another
    exception."""
    try:
        load_yaml(text, "x")
    except PolicySyntaxError as error:
        [problem] = error.problems
        assert min(problem.line, problem.column) >= 1


def test_a_class_brings_what_it_means() -> None:
    """Strict tenants are always deterministic without a word about it; dedicated ones as the file says; and each class
    asks for more than the one below it."""
    text = """
version: 1
tenants:
  s: {credentials: ["key:s"], models: ["m"]}
  t: {credentials: ["key:t"], models: ["m"], class: strict, kv: {reservation: 20%}}
  d: {credentials: ["key:d"], models: ["m"], class: dedicated, deterministic: allowed}
"""
    tenants = load_policy([Source("p.yaml", text)]).tenants
    assert [tenants[name].deterministic.value for name in "std"] == ["never", "always", "allowed"]
    shared, strict, dedicated = (tenants[name].isolation_class for name in "std")
    assert (shared.pads, shared.own_text, shared.own_engine, shared.exact, shared.partitions) == (False,) * 5
    assert (strict.pads, strict.own_text, strict.own_engine, strict.exact, strict.partitions) == (
        True,
        True,
        False,
        True,
        True,
    )
    assert tenants["t"].kv == KvShare(reservation=2_000, cap=2_000, borrow=False)
    assert (dedicated.pads, dedicated.own_text, dedicated.own_engine) == (True, True, True)


PUBLISHED = """version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["m"]}
  beta: {credentials: ["key:b"], models: ["*"], retention: none}
  gamma: {credentials: ["key:c"], models: ["other"]}
  delta: {credentials: ["key:d"], models: ["*"], class: dedicated}
public_prefixes:
"""


def test_public_prefixes_reach_those_who_may_begin_with_them() -> None:
    """All means every tenant of class shared that may use the model; a list means its members; a file beside the
    policy is text or messages. What they say is part of the digest."""
    more = (
        "  rules: {model: m, tenants: all, text: be kind}\n"
        "  talk: {model: m, tenants: [alpha], messages: [{role: system, content: hello}]}\n"
        "  filed: {model: m, tenants: [beta], file: one.json}\n"
    )
    files = {"one.json": '[{"role": "system", "content": "from a file"}]'}
    policy = load_policy([Source("p.yaml", PUBLISHED + more, files)])
    assert policy.public["rules"].tenants == ("alpha", "beta")
    assert not policy.public["rules"].chat
    assert json.loads(policy.public["talk"].source) == [{"role": "system", "content": "hello"}]
    assert "from a file" in policy.public["filed"].source
    assert policy.tenants["alpha"].public == ("rules", "talk")
    assert policy.tenants["beta"].public == ("filed", "rules")
    assert policy.tenants["delta"].public == policy.tenants["gamma"].public == ()
    other = load_policy([Source("p.yaml", PUBLISHED + more.replace("be kind", "be rude"), files)])
    assert other.digest != policy.digest


@pytest.mark.parametrize(
    ("prefix", "where", "says"),
    [
        ("{model: m, tenants: all}", "8:3", "exactly one of text, messages and file"),
        ("{model: m, tenants: all, text: a, file: a.txt}", "8:3", "found 2 of them"),
        ("{model: m, tenants: [gamma], text: a}", "8:29", "may not use the model 'm'"),
        ("{model: m, tenants: [alpha, delta], text: a}", "8:36", "class dedicated, which shares nothing"),
        ("{model: m, tenants: all, file: ../a.txt}", "8:39", "does not fit the pattern"),
        ("{model: m, tenants: all, file: b.txt}", "8:39", "no UTF-8 text public/b.txt"),
        ("{model: m, tenants: all, file: a.json}", "8:39", "no list of messages"),
        ("{model: m, tenants: all, text: a, texts: b}", "8:42", "did you mean 'text'?"),
        ("{model: m, tenants: all, messages: [{role: User, content: a}]}", "8:51", "does not fit the pattern"),
        ("{model: m, tenants: nobody, text: a}", "8:28", "tenants"),
    ],
)
def test_a_public_prefix_that_cannot_be_is_refused_where_it_stands(prefix: str, where: str, says: str) -> None:
    """Each with its line and column."""
    with pytest.raises(PolicySchemaError) as caught:
        load_policy([Source("p.yaml", f"{PUBLISHED}  one: {prefix}\n", {"a.json": '[{"role": 1}]'})])
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"p.yaml:{where}: public_prefixes.one")
    assert says in first
