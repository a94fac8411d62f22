"""The comparison of forms judges as it says, and its folders hold one variant each."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import pytest

from appliance.common.catalog import embedded_model
from bench import forms
from bench.cpu_cases import Case
from bench.forms import BAR, OWN, folders_of, judge, load_forms, measure
from engine.backends.native.library import UnusableKernelsError, open_libraries
from engine.backends.native.manifest import variants_of
from engine.backends.native.trial import PLAIN
from tests.compiled_kernels import compiled


def test_the_best_form_has_the_least_median() -> None:
    """One fast turn makes no best form, nor does a form that was left out; ratios are taken within a turn."""
    seconds = {OWN: [2.0, 2.0, 4.0], "a": [1.9, 1.9, 4.0], "b": [0.1, 3.0, 3.0], "left out": [0.1]}
    verdict = judge(seconds, 16)
    assert (verdict.streams, verdict.best) == (16, "a")
    assert verdict.ratios == (0.95, 0.95, 1.0)
    assert verdict.ratio >= BAR


def test_a_slow_choice_misses_the_bar() -> None:
    """Positive control: a choice that takes a tenth longer than the best form is below the bar."""
    assert judge({OWN: [1.1], "a": [1.0], "b": [2.0]}, 1).ratio < BAR


def test_a_folder_has_one_variant(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Each variant that this machine runs is opened from its own folder, and no other is found there."""
    variants = variants_of(platform.machine())
    alone = folders_of(variants, compiled(pytestconfig, tmp_path_factory), tmp_path)
    assert alone
    for name, folder in alone.items():
        assert [one.variant for one in open_libraries(str(folder))] == [name]
        with pytest.raises(UnusableKernelsError):
            next(open_libraries(str(folder), only=next(one.name for one in variants if one.name != name)))


@pytest.mark.full
def test_every_form_of_a_model_is_loaded_as_named(
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The own choice, plain operations, and each variant whether or not a trial would take it; then all decode."""
    monkeypatch.setattr(forms, "STREAMS", (1, 4))
    folder = compiled(pytestconfig, tmp_path_factory)
    alone = folders_of(variants_of(platform.machine()), folder, tmp_path)
    case = Case("mini", embedded_model(), "bfloat16", (1,), 8, 128)
    options = argparse.Namespace(threads=1, weights="stored", rounds=2, cpu_time=False)
    loaded = load_forms(case, options, folder, alone)
    names = [form.name for form in loaded]
    assert names[:2] == [OWN, PLAIN] and set(alone) <= set(names) and len(set(names)) == len(names)
    for form in loaded[2:]:
        name, _, compressed = form.name.partition(" ")
        assert f"compiled kernels {name} " in form.description
        assert form.engine.engine.runner.forward.compresses == bool(compressed)
    verdicts = measure(case, loaded, options)
    assert [one.streams for one in verdicts] == [1, 4]
    assert all(len(one.ratios) == 2 * forms.TURNS and one.best in names for one in verdicts)
