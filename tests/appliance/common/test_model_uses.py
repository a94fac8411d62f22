"""Counts of uses: they fade with traffic, bursts count once, and one tenant's are bounded by those of the others."""

from __future__ import annotations

import pytest

from appliance.common.model_uses import LEAST_GAP_S, ModelUses


def test_counts_fade_with_the_uses_of_others_and_not_with_time() -> None:
    """A count is halved after so many uses of other models; a day without any changes nothing."""
    uses = ModelUses(half_life=4.0)
    uses.note("a", "t", 0.0)
    for number in range(4):
        uses.note(f"other-{number}", f"u-{number}", 10.0)
    assert uses.of("a") == pytest.approx(0.5)
    uses.note("b", "u-0", 86_400.0)
    assert uses.of("a") == pytest.approx(0.5 ** (5 / 4))
    assert uses.of("nothing") == 0.0


def test_a_burst_counts_once() -> None:
    """A thousand uses within the gap are one, and as many at its distance (the control) are that many. A request that
    came before one that was counted, and was served after it, is of its burst."""
    uses = ModelUses(half_life=1e9, always=1e9)
    for number in range(1_000):
        uses.note("burst", "t", number * LEAST_GAP_S / 1_001)
        uses.note("steady", "t", number * LEAST_GAP_S)
    assert uses.of("burst") == pytest.approx(1.0, rel=1e-3)
    assert uses.of("steady") == pytest.approx(1_000, rel=1e-3)
    uses.note("steady", "t", 0.0)
    assert uses.of("steady") == pytest.approx(1_000, rel=1e-3)


def test_uses_of_many_models_at_once_fade_others_as_one_does() -> None:
    """A tenant that uses a hundred models within a second halves no other count; a hundred tenants do (control)."""
    for tenants, left in ((1, 0.5 ** (1 / 4)), (100, 0.5**25)):
        uses = ModelUses(half_life=4.0)
        uses.note("a", "t", 0.0)
        for number in range(100):
            uses.note(f"other-{number}", f"u-{number % tenants}", 10.0)
        assert uses.of("a") == pytest.approx(left)


def test_a_tenant_counts_at_most_as_much_as_all_others() -> None:
    """A tenant that uses three models all the time keeps no three places from the model that others use now and then;
    counted as the uses of many tenants (control) they would. The order of the tenant's own models stays."""
    for tenants, kept in ((1, True), (50, False)):
        uses = ModelUses()
        for second in range(600):
            for model, every in (("x", 1), ("y", 1), ("z", 2)):
                if second % every == 0:
                    uses.note(model, f"hog-{second % tenants}", float(second))
            if second % 8 == 0:
                uses.note("ours", f"other-{second % 5}", float(second))
        assert (uses.of("ours") > uses.of("z")) is kept
        assert uses.of("x") == pytest.approx(uses.of("y"), rel=0.01)
        assert uses.of("x") > 1.5 * uses.of("z")
        others = uses.of("ours")
        if kept:
            assert uses.of("x") + uses.of("y") + uses.of("z") == pytest.approx(max(others, uses.always), rel=0.01)


def test_one_use_of_a_newcomer_does_not_outweigh_a_tenant_that_was_alone() -> None:
    """A tenant that was alone keeps the order of its models, and one use of another is less than each of them."""
    uses = ModelUses()
    for second in range(402):
        uses.note(f"m-{second % 6}", "alone", float(second))
    before = [uses.of(f"m-{number}") for number in range(6)]
    assert before == sorted(before) and sum(before) == pytest.approx(uses.always)
    uses.note("new", "newcomer", 402.0)
    assert all(uses.of("new") < uses.of(f"m-{number}") for number in range(6))


def test_a_request_is_judged_as_if_it_were_served() -> None:
    """The count for a tenant that asks is what it is once its use was counted, and asking leaves nothing behind."""
    uses = ModelUses(half_life=1e9)
    for number in range(40):
        uses.note("busy", f"u-{number % 20}", 2.0 * number)
    uses.note("a", "t", 0.0)
    expected = uses.of("a", "t")
    assert [uses.of("a", "t"), uses.of("a")] == [pytest.approx(2.0), pytest.approx(1.0)]
    uses.note("a", "t", 100.0)
    assert uses.of("a") == pytest.approx(expected)
    assert uses.of("never used", "t") == pytest.approx(1.0)


def test_models_that_are_gone_are_forgotten() -> None:
    """One that comes again under its name begins anew; the others keep their counts."""
    uses = ModelUses()
    for name in "ab":
        uses.note(name, "t", 0.0)
    uses.keep({"b"})
    assert (uses.of("a"), uses.of("b")) == (0.0, pytest.approx(1.0))


def test_tenants_that_the_policy_has_no_more_are_forgotten() -> None:
    """No name of theirs stays, and what they used counts no more; control: the counts of others are as they were."""
    uses, alone = ModelUses(half_life=1e9), ModelUses(half_life=1e9)
    for number in range(20):
        for tenant in ("stays", "gone"):
            uses.note("m", tenant, number * LEAST_GAP_S)
        uses.note("only-theirs", "gone", number * LEAST_GAP_S)
        alone.note("m", "stays", number * LEAST_GAP_S)
    assert "gone" in repr(uses)
    uses.forget_others({"stays"})
    assert "gone" not in repr(uses) and uses.of("only-theirs") == 0.0
    assert uses.of("m") == pytest.approx(alone.of("m"))


def test_what_has_faded_takes_no_memory_and_numbers_stay_finite() -> None:
    """Ten thousand tenants that came once leave an entry for each of the last uses alone, and counts are what they
    were after the unit was taken back."""
    uses = ModelUses(half_life=4.0)
    for number in range(10_000):
        uses.note("m", f"t-{number}", 2.0 * number)
    uses.keep({"m"})
    assert len(uses._models["m"].tenants) == len(uses._tenants) <= 41
    assert uses.of("m") == pytest.approx(1 / (1 - 0.5 ** (1 / 4)), rel=0.01)
