"""policy.editing: a tenant more or less in a policy's text, and every other character as it was."""

from __future__ import annotations

import difflib

import pytest

from policy.editing import NEW_FILE, Value, with_tenant, without_tenant
from policy.errors import PolicySyntaxError
from policy.first_policy import first_policy
from policy.loader import Source, load_policy

NEW: dict[str, Value] = {
    "credentials": ("key:new-1",),
    "models": ("m", "qwen3-*"),
    "class": "strict",
    "kv": {"reservation": "20%"},
}

BLOCK = """\
# head
version: 1
tenants:
  alpha:   # the first
    credentials: ["key:a"]   # its key
    models: ["*"]
    # hours: []

  # beta pays
  beta:
    credentials:
    - key:b
    models: ["m"]
    limits:
      concurrency: 3 # few
    # weight: 2

# what follows is of all
sharing_groups:
  lab: {tenants: [alpha, beta]}
"""

FORMS = {
    "block": BLOCK,
    "blank lines between": (
        "version: 1\ntenants:\n  a: {credentials: ['key:a'], models: ['*']}\n\n"
        "  b: {credentials: ['key:b'], models: ['*']}\nroutes: {}\n"
    ),
    "wide steps": "version: 1\ntenants:\n    a:\n        credentials: ['key:a']\n        models: ['*']\n",
    "entries in brackets": "version: 1\ntenants:\n  a: {credentials: ['key:a'], models: ['*']}  # one\nroutes: {}\n",
    "tenants in brackets": "version: 1\ntenants: {a: {credentials: ['key:a'], models: ['*']}}\n",
    "brackets over lines": (
        "version: 1\ntenants: {\n  a: {credentials: ['key:a'], models: ['*']},  # one\n"
        "  b: {credentials: ['key:b'], models: ['*']}, # two\n}\n"
    ),
    "all in brackets": '{"version": 1, "tenants": {"a": {"credentials": ["key:a"], "models": ["*"]}}}\n',
    "no last newline": "version: 1\ntenants:\n  a:\n    credentials: ['key:a']\n    models: ['*']",
    "carriage returns": BLOCK.replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + BLOCK,
    "marks of a document": "---\nversion: 1\ntenants:\n  a: {credentials: ['key:a'], models: ['*']}\n...\n",
    "line ends of YAML 1.1": "version: 1 # \u2028\ntenants:\n  a: {credentials: ['key:a'], models: ['*']} # \x85 x\n",
    "init": first_policy("policy.yaml", "acme"),
    "no tenants": NEW_FILE,
    "no tenants, with a comment": "version: 1\ntenants: {}  # none yet\nroutes: {}\n",
}


def source(text: str) -> Source:
    """One file."""
    return Source("policy.yaml", text)


@pytest.mark.parametrize("form", FORMS)
def test_a_tenant_is_added_and_nothing_else_changes(form: str) -> None:
    """Whatever the form of the file: the policy has the tenant as if it were written by hand, and no line of the old
    text is gone but the one that said that there are no tenants, or to which a comma or a newline came."""
    old = FORMS[form]
    added = with_tenant(source(old), "new", NEW)
    policy = load_policy([added])
    tenant = policy.tenants["new"]
    assert (tenant.credentials, tenant.models, tenant.isolation_class) == (("key:new-1",), ("m", "qwen3-*"), "strict")
    assert {*policy.tenants} - {"new"} == {*load_policy([source(old)]).tenants}
    gone = [line for line in difflib.ndiff(old.splitlines(), added.text.splitlines()) if line.startswith("- ")]
    assert len(gone) <= (0 if form in ("block", "blank lines between", "wide steps", "carriage returns", "init") else 1)
    assert ("\r\n" in added.text) == ("\r\n" in old)
    assert added.text.startswith("\ufeff") == old.startswith("\ufeff")


@pytest.mark.parametrize("form", FORMS)
def test_what_was_added_can_be_taken_out(form: str) -> None:
    """Removed again, the tenant leaves the text that was there before, but for a newline at the end that was missing,
    and the form of an empty section."""
    old = FORMS[form]
    back = without_tenant(with_tenant(source(old), "new", NEW), "new").text
    if form == "no last newline":
        old += "\n"
    assert back.replace("{}  #", "{} #") == old.replace("{}  #", "{} #")


def test_a_tenant_goes_with_the_comments_of_its_entry_and_out_of_the_lists() -> None:
    """The comments inside the entry go, those before it and behind it stay, and so does the blank line; groups and
    prefixes in either form name the tenant no more; a tenant that another file has is taken out of the lists alone."""
    text = BLOCK.replace("lab: {tenants: [alpha, beta]}", "lab: {tenants: [alpha, beta, c]}")
    text += "  other:\n    tenants:\n    - beta  # it\n    - d\n    - e\n"
    text += (
        "public_prefixes:\n  p: {model: m, tenants: [beta, alpha], text: x}\n  q: {model: m, tenants: all, text: y}\n"
    )
    found = without_tenant(source(text), "beta").text
    assert found == (
        text[: text.index("  beta:")]
        + "\n# what follows is of all\nsharing_groups:\n  lab: {tenants: [alpha, c]}\n"
        + "  other:\n    tenants:\n    - d\n    - e\n"
        + "public_prefixes:\n  p: {model: m, tenants: [alpha], text: x}\n  q: {model: m, tenants: all, text: y}\n"
    )
    elsewhere = "version: 1\ntenants: {}\nsharing_groups:\n  lab: {tenants: [beta, x, y]}\n"
    assert without_tenant(source(elsewhere), "beta").text == elsewhere.replace("beta, ", "")
    assert without_tenant(source(elsewhere), "unknown").text == elsewhere


def test_the_last_tenant_leaves_a_policy_without_tenants() -> None:
    """The section stays and says that it is empty."""
    text = "version: 1\ntenants: # mine\n  a:\n    credentials: ['key:a']\n    models: ['*']\n    # more\nroutes: {}\n"
    assert without_tenant(source(text), "a").text == "version: 1\ntenants: {} # mine\nroutes: {}\n"


def test_names_that_yaml_reads_otherwise_are_quoted() -> None:
    """An id such as 12 or null is a text in the file, and in every version of YAML."""
    for name in ("12", "null", "on", "1e5", "a-b"):
        added = with_tenant(source(NEW_FILE), name, {**NEW, "inherits": name})
        assert (f"\n  {name}:" if name == "a-b" else f'\n  "{name}":') in added.text
        groups = f'tenant_groups: {{"{name}": {{}}}}\n'
        assert [*load_policy([Source("p", added.text + groups)]).tenants] == [name]


def test_a_form_that_is_not_changed_is_told_with_its_place() -> None:
    """A text whose tenants cannot be changed so that the rest stays is an error at its line, and no text: here a key
    that is written over a line of its own."""
    text = "version: 1\n? tenants\n: a: {credentials: ['key:a'], models: ['*']}\n"
    load_policy([source(text)])
    with pytest.raises(PolicySyntaxError) as error:
        without_tenant(source(text), "a")
    [problem] = error.value.problems
    assert (problem.file, problem.line, problem.path) == ("policy.yaml", 2, "tenants.a")
    assert "athanor policy edit" in problem.message
