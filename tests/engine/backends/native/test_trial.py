"""Which form computes: the fastest on this model's shapes, told with its figures; noise decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.native import trial
from engine.backends.native.library import Library, UnusableKernelsError, open_libraries
from engine.backends.native.manifest import FORMS, PLAIN
from engine.backends.native.trial import Candidate, Heads, Trial, try_forms
from engine.config import EngineConfig
from engine.model.layers.layers import Linear
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model

HEADS = Heads(4, 2, 24)


def layer(dtype: torch.dtype = torch.float32) -> list[Linear]:
    """Two matrices with few exponents."""
    generator = torch.Generator().manual_seed(1)
    return [Linear((torch.randn(96, 64, generator=generator) * 0.02).to(dtype)) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_form_is_timed_at_every_number_of_rows(
    kernel_dir: Callable[..., Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of every variant that runs here, compressed where that is possible, and plain operations."""
    monkeypatch.setattr(trial, "HOPELESS", 1e9)
    matrices = layer(dtype)
    found = try_forms(open_libraries(str(kernel_dir())), matrices, HEADS, most_rows=16, int8=False)
    names = {one.name for one in found.seconds}
    variants = {one.variant for one in open_libraries(str(kernel_dir()))}
    expected = variants | {f"{name} compressed" for name in variants} if dtype == torch.bfloat16 else variants
    assert names == expected | {PLAIN}
    assert all(list(times) == [1, 4, 16] and min(times.values()) > 0 for times in found.seconds.values())
    assert "at 1/4/16 rows" in str(found)
    assert all(one.loaded.shape == (96, 64) for one in matrices)


def test_the_fastest_on_average_is_taken_and_noise_prefers_the_first() -> None:
    """A form that is 3 % faster later in the list is not taken, one that is 10 % faster is; one that was given up at
    some number of rows never is. Plain operations, whose bits differ, must be faster by a quarter."""
    library = Library(None, 1, 1, "a")
    first, second, third = (Candidate(name, library) for name in "abc")
    plain = Candidate(PLAIN, None)
    assert Trial({first: {1: 1.0, 4: 1.0}, plain: {1: 0.9, 4: 0.9}}).best is first
    assert Trial({first: {1: 1.0, 4: 1.0}, plain: {1: 0.7, 4: 0.7}}).best is plain
    assert Trial({first: {1: 1.0, 4: 1.0}, second: {1: 0.97, 4: 0.97}}).best is first
    assert Trial({first: {1: 1.0, 4: 1.0}, second: {1: 0.9, 4: 0.9}}).best is second
    assert Trial({first: {1: 1.0, 4: 1.0}, third: {1: 0.1}}).best is first


def test_a_hopeless_form_is_given_up(kernel_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A form at twice the best of a number of rows is not timed at the next; after the budget none is begun."""
    times = iter([*[0.0, 1.0] * 3, 2.1, *[1.0] * 99])
    monkeypatch.setattr(trial, "_seconds", lambda _product: next(times))
    found = try_forms(open_libraries(str(kernel_dir())), layer(), HEADS, most_rows=16, int8=False)
    assert [len(times) for times in found.seconds.values()][:2] == [3, 1]
    assert "more" in str(found)
    monkeypatch.setattr(trial, "BUDGET_S", 0.0)
    found = try_forms(open_libraries(str(kernel_dir())), layer(), HEADS, most_rows=16, int8=False)
    assert len(found.seconds) == 1


def test_slower_kernels_are_not_used(
    kernel_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose plain operations won says so with the figures; with the real figures, kernels compute."""
    save_model(tmp_path, model_config())
    config = EngineConfig(
        model_dir=str(tmp_path), model_digest="00", threads=2, kv_bytes=1 << 20, kernels=str(kernel_dir())
    )
    assert "rows: " in load_engine(config, warm=False).runner.description

    def plain_wins(libraries: object, *_: object, **__: object) -> Trial:
        return Trial({Candidate("x86-64-v3", next(iter(libraries))): {1: 0.002}, Candidate(PLAIN, None): {1: 0.001}})

    monkeypatch.setattr("engine.backends.native.load.try_forms", plain_wins)
    engine = load_engine(config, warm=False)
    said = engine.runner.description
    assert FORMS[engine.ready().form] == PLAIN
    assert said.startswith("plain operations; no compiled kernels: they are slower here: ")
    assert "x86-64-v3 2.00, plain operations 1.00" in said
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_the_form_of_an_earlier_trial_is_taken(
    kernel_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a trial, also plain operations; the engine tells its number. A form that this machine lacks, or a library
    that is gone, is tried anew."""
    folder = kernel_dir()
    save_model(tmp_path, model_config())
    config = EngineConfig(model_dir=str(tmp_path), model_digest="00", threads=2, kv_bytes=1 << 20, kernels=str(folder))
    tried: list[object] = []

    def counted(*given: object, **named: object) -> Trial:
        tried.append(given)
        return try_forms(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.backends.native.load.try_forms", counted)
    for variant in [one.variant for one in open_libraries(str(folder))]:
        engine = load_engine(replace(config, form=variant), warm=False)
        assert f"kernels {variant} with" in engine.runner.description
        assert FORMS[engine.ready().form] == variant
    engine = load_engine(replace(config, form=PLAIN), warm=False)
    assert engine.runner.description.startswith("plain operations") and FORMS[engine.ready().form] == PLAIN
    assert not tried
    for odd in ("", "armv9", "x86-64-v9 compressed"):
        assert load_engine(replace(config, form=odd), warm=False).ready().form != 0
    assert len(tried) == 3
    torch.set_num_threads(1)


def test_without_a_library_there_is_no_trial(tmp_path: Path) -> None:
    """The reason is the library's own."""
    with pytest.raises(UnusableKernelsError, match="cannot be read"):
        try_forms(open_libraries(str(tmp_path)), layer(), HEADS, most_rows=4, int8=False)


def test_a_released_library_starts_again(kernel_dir: Callable[..., Path]) -> None:
    """A trial's loser gives its memory back; a later engine of the process may use it."""
    folder = str(kernel_dir())
    libraries: list[Library] = list(open_libraries(folder))
    for one in libraries:
        one.release()
    try_forms(open_libraries(folder), layer(), HEADS, most_rows=4, int8=False)
