"""What comes and goes when entries change, and what memory is needed for it."""

from __future__ import annotations

from pathlib import Path

from appliance.common.config import ModelConfig
from appliance.common.model_memory import ENGINE_BYTES, ModelNeed, model_need, no_room
from appliance.common.served_models import difference, entry_digest, models_digest

GIB = 1 << 30
ONE, TWO = (ModelConfig(name=name, path=Path("/m") / name) for name in ("one", "two"))
SERVED = {model.name: entry_digest(model) for model in (ONE, TWO)}


def test_the_same_entries_change_nothing() -> None:
    """Control: in any order nothing comes and nothing goes, and both sides read the same."""
    found = difference(SERVED, (TWO, ONE))
    assert (bool(found), found.lines((ONE, TWO))) == (False, ())
    assert models_digest((ONE, TWO)) == models_digest((TWO, ONE)) != models_digest((ONE,))


def test_models_are_added_removed_and_changed() -> None:
    """One of each, told with the keys that differ; only what comes is booted."""
    new, other = ModelConfig(name="new", path=Path("/m/new")), TWO.model_copy(update={"kv_bytes": 5 * GIB})
    found = difference(SERVED, (other, new))
    assert (found.added, found.changed, found.removed) == ((new,), (other,), ("one",))
    assert found.coming == (new, other)
    assert found.lines((ONE, TWO)) == (
        "model new: added, its sandboxes are starting",
        "model two: kv_bytes (268435456 -> 5368709120), started anew",
        "model one: removed, its requests have 20 s to end",
    )


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    """A model beyond its sandbox's limit, and one beyond what the first has left; control: with more both fit."""
    (tmp_path / "a.safetensors").write_bytes(bytes(1_000))
    files = (("a.safetensors", tmp_path / "a.safetensors"), ("config.json", tmp_path / "none"))
    assert model_need(ONE, files) == ModelNeed("one", 1_000, 1_000, ONE.kv_bytes)
    assert model_need(ONE.model_copy(update={"weights": "int8"}), files).weights == 500
    tuned = {"name": "a", "path": "/a", "digest": "0" * 64}
    adapted = ModelConfig(name="one", path="/m/one", adapters=[tuned], adapter_bytes=GIB)
    assert model_need(adapted, files).about == model_need(ONE, files).about + GIB
    assert "adapters 1.0 GiB, " in model_need(adapted, files).words()
    on_card = model_need(ONE, files, on_card=True)
    assert (on_card.weights, on_card.kv, on_card.least, on_card.about) == (0, 0, 0, 2 * GIB)
    first, second = ModelNeed("first", GIB, GIB, GIB), ModelNeed("second", 2 * GIB, 2 * GIB, GIB)
    assert first.about == ENGINE_BYTES + 2 * GIB
    assert no_room((first, second), 4 * GIB, 6 * GIB) == {}
    assert "about 3.3 GiB" in no_room((first, second), 4 * GIB, 4 * GIB)["second"]
    assert (
        "needs at least 1.2 GiB, and an engine's sandbox may have 1.0 GiB" in no_room((first,), GIB, 9 * GIB)["first"]
    )
