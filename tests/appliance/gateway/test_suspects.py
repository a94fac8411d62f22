"""Blame after an engine's death: certain with one on probation, careful with many."""

from __future__ import annotations

from array import array
from dataclasses import replace

from appliance.gateway.suspects import FORGET_S, MAX_REMEMBERED, Suspects, fingerprint
from isolation.ipc.messages import Sampling, Submit

SUBMIT = Submit(1, b"n" * 32, array("I", [1, 2, 3]), 8, Sampling(temperature=0.0, seed=5))


def test_bystanders_become_suspects_and_not_more() -> None:
    """Everybody live at the first death is suspected once; nobody is quarantined."""
    suspects = Suspects()
    suspects.engine_died([(b"a", False), (b"b", False)], 0.0)
    assert (suspects.deaths(b"a", 1.0), suspects.deaths(b"b", 1.0), suspects.deaths(b"c", 1.0)) == (1, 1, 0)


def test_a_death_during_probation_quarantines_that_request_only() -> None:
    """Alone in the engine at its death: the second death is its own."""
    suspects = Suspects()
    suspects.engine_died([(b"a", False), (b"b", False)], 0.0)
    suspects.engine_died([(b"a", True)], 1.0)
    assert (suspects.deaths(b"a", 2.0), suspects.deaths(b"b", 2.0)) == (2, 1)


def test_the_only_suspect_among_strangers_is_blamed_again() -> None:
    """A request seen at two deaths is quarantined; two such requests are not told apart and both stay suspects."""
    one, two = Suspects(), Suspects()
    one.engine_died([(b"a", False)], 0.0)
    one.engine_died([(b"a", False), (b"x", False)], 1.0)
    assert (one.deaths(b"a", 2.0), one.deaths(b"x", 2.0)) == (2, 1)
    two.engine_died([(b"a", False), (b"b", False)], 0.0)
    two.engine_died([(b"a", False), (b"b", False)], 1.0)
    assert (two.deaths(b"a", 2.0), two.deaths(b"b", 2.0)) == (1, 1)


def test_suspicion_ends_with_a_good_answer_or_with_time() -> None:
    """A request that ends well is clean; an old suspicion lapses."""
    suspects = Suspects()
    suspects.engine_died([(b"a", False), (b"b", False)], 0.0)
    suspects.cleared(b"a")
    assert suspects.deaths(b"a", 1.0) == 0
    assert suspects.deaths(b"b", FORGET_S + 1) == 0


def test_memory_is_bounded() -> None:
    """However many requests die, only so many are remembered, the latest among them."""
    suspects = Suspects()
    for number in range(MAX_REMEMBERED + 10):
        suspects.engine_died([(number.to_bytes(4, "little"), False)], 0.0)
    assert suspects.deaths((0).to_bytes(4, "little"), 1.0) == 0
    assert suspects.deaths((MAX_REMEMBERED + 9).to_bytes(4, "little"), 1.0) == 1


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
