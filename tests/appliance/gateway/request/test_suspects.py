"""Blame after an engine's death: certain with one that was alone, careful with many."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from appliance.gateway.request import suspects as module
from appliance.gateway.request.suspects import FORGET_S, MAX_REMEMBERED, Standing, Suspects, fingerprint
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

CLEAN, SUSPECT, ALONE_ONLY, QUARANTINED = Standing
SUBMIT = Submit(1, b"n" * 32, array("I", [1, 2, 3]), 8, Sampling(temperature=0.0, seed=5))


def test_bystanders_become_suspects_and_not_more() -> None:
    """Everybody inside at the first death is suspected once; nobody is quarantined."""
    suspects = Suspects()
    suspects.engine_died([b"a", b"b"], 0.0)
    assert [suspects.standing(mark, 1.0) for mark in (b"a", b"b", b"c")] == [SUSPECT, SUSPECT, CLEAN]


def test_a_second_death_alone_quarantines_that_request_only() -> None:
    """Alone in the engine at its second death, copies of itself not counted: there is no doubt left."""
    suspects = Suspects()
    suspects.engine_died([b"a", b"b"], 0.0)
    suspects.engine_died([b"a", b"a"], 1.0)
    assert (suspects.standing(b"a", 2.0), suspects.standing(b"b", 2.0)) == (QUARANTINED, SUSPECT)


def test_a_first_death_alone_is_not_enough() -> None:
    """An engine may die of something else: once is a suspicion, also for who was alone."""
    suspects = Suspects()
    suspects.engine_died([b"a"], 0.0)
    assert suspects.standing(b"a", 1.0) is SUSPECT


def test_company_is_never_proof() -> None:
    """Who is the only suspect at deaths that others share is made to run alone, however often, and never quarantined:
    else a neighbour could die beside it on purpose."""
    suspects = Suspects()
    suspects.engine_died([b"victim", b"killer 0"], 0.0)
    for number in range(1, 6):
        suspects.engine_died([b"victim", b"killer %d" % number], float(number))
        assert suspects.standing(b"victim", float(number)) is ALONE_ONLY
    suspects.engine_died([b"victim"], 9.0)
    assert suspects.standing(b"victim", 9.0) is QUARANTINED


def test_suspicion_ends_with_a_good_answer_or_with_time() -> None:
    """A request that ends well is clean; an old suspicion lapses."""
    suspects = Suspects()
    suspects.engine_died([b"a", b"b"], 0.0)
    suspects.cleared(b"a")
    assert suspects.standing(b"a", 1.0) is CLEAN
    assert suspects.standing(b"b", FORGET_S + 1) is CLEAN


def test_memory_is_bounded() -> None:
    """However many requests die, only so many are remembered, the latest among them."""
    suspects = Suspects()
    for number in range(MAX_REMEMBERED + 10):
        suspects.engine_died([number.to_bytes(4, "little")], 0.0)
    assert suspects.standing((0).to_bytes(4, "little"), 1.0) is CLEAN
    assert suspects.standing((MAX_REMEMBERED + 9).to_bytes(4, "little"), 1.0) is SUSPECT


def test_a_fingerprint_names_the_question_and_not_the_drawn_seed() -> None:
    """A retry matches although ids and seeds differ; another tenant, prompt or temperature does not."""
    mark = fingerprint("alpha", "m", SUBMIT)
    again = replace(SUBMIT, request=9, sampling=replace(SUBMIT.sampling, seed=77))
    assert fingerprint("alpha", "m", again) == mark
    others = (
        fingerprint("beta", "m", SUBMIT),
        fingerprint("alpha", "n", SUBMIT),
        fingerprint("alpha", "m", replace(SUBMIT, token_ids=array("I", [1, 2]))),
        fingerprint("alpha", "m", replace(SUBMIT, sampling=Sampling(temperature=0.5))),
        fingerprint("alpham", "", SUBMIT),
    )
    assert mark not in others and len(set(others)) == len(others)


def test_a_fingerprint_tells_nothing_to_who_has_not_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request has the same one in one process, and another one in another."""
    mark = fingerprint("alpha", "m", SUBMIT)
    assert fingerprint("alpha", "m", SUBMIT) == mark
    monkeypatch.setattr(module, "_KEY", bytes(32))
    assert fingerprint("alpha", "m", SUBMIT) != mark
