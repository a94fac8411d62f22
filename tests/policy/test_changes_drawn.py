"""policy.changes over drawn policies: all that differs is told, and what is not narrower denies no more."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.changes import changes
from policy.match import glob_matches
from policy.model import Exceeded, Limits
from policy.rates import BURSTS, TREATMENTS, effective
from policy.simulate import Load, Question, decide
from policy.told import Direction
from tests.policy.drawn_policies import documents, loaded, loads, questions


@settings(max_examples=60, deadline=None)
@given(documents, documents)
def test_a_change_is_told_exactly_where_the_digests_differ(old: dict, new: dict) -> None:
    """Nothing that the digest covers is left out, and nothing else is told."""
    before, after = loaded(old), loaded(new)
    assert bool(changes(before, after)) == (before.digest != after.digest)
    assert not changes(before, loaded(copy.deepcopy(old)))


patterns = st.text("ab*", min_size=1, max_size=5)


@settings(max_examples=300)
@given(patterns, patterns, st.text("ab", max_size=6))
def test_a_covered_pattern_matches_nothing_more(wide: str, narrow: str, name: str) -> None:
    """A pattern that matches another as text matches every name that the other matches."""
    if glob_matches(wide, narrow) and glob_matches(narrow, name):
        assert glob_matches(wide, name)


def widest(name: str, *limits: Limits) -> Any:
    """The value of a limit that allows the most; no rate of its own, no limit of spend, and waiting before refusing."""
    if name in TREATMENTS:
        values = [getattr(one, name) for one in limits]
        return next((value for value in values if value is not Exceeded.REFUSE), Exceeded.REFUSE)
    values = [effective(one, name) if name in BURSTS else getattr(one, name) for one in limits]
    return None if None in values else max(values)


@settings(max_examples=60, deadline=None)
@given(documents, documents, questions, loads)
def test_no_narrower_change_denies_no_more(old: dict, new: dict, asked: dict, used: dict) -> None:
    """Where nothing is told to be narrower, a request that named its output and was allowed is allowed still. Some
    fields of the new policy are taken over, so that such pairs are common."""
    before, after = loaded(old), loaded(new)
    tenants = {}
    for name, tenant in before.tenants.items():
        other = after.tenants.get(name, tenant)
        limits = Limits(**{f.name: widest(f.name, tenant.limits, other.limits) for f in fields(Limits)})
        tenants[name] = replace(tenant, limits=limits, models=(*tenant.models, *other.models))
    wider = replace(before, tenants=tenants, digest="0" * 64)
    assert not any(one.direction is Direction.NARROWER for one in changes(before, wider))
    question = Question(**{"max_tokens": 1, **asked})
    load = Load(**used)
    if decide(before, question, load).allowed:
        assert decide(wider, question, load).allowed
