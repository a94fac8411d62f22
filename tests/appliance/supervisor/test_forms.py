"""An engine is told the form of an earlier trial, and what it chose is remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.common.form_cache import open_form_cache
from appliance.supervisor import forms as forms_module
from appliance.supervisor.boot import Booted, BootPlan
from appliance.supervisor.forms import Forms
from appliance.supervisor.layout import GUEST_KERNELS
from engine.backends.native.manifest import FORMS, MANIFEST, PLAIN
from engine.config import EngineConfig
from isolation.gvisor.spec import Mount
from isolation.ipc.messages import Role

CLAIM = "compiled kernels x86-64-v3 with vectors, 1 thread; ms a layer at 1 rows: x86-64-v3 0.02"


def plan_of(kernels: Path, **changes: Any) -> BootPlan:
    """An engine's plan of which only configuration and mounts are real."""
    configuration = EngineConfig(model_dir="/model", model_digest="00", **changes).to_json()
    spec: Any = SimpleNamespace(mounts=(Mount(kernels, GUEST_KERNELS),))
    return BootPlan("engine-m", "m", Role.ENGINE, spec, kernels, configuration)


def booted_with(form: str, computes: str = CLAIM) -> Booted:
    """A ready engine that computes in a form."""
    sandbox: Any = None
    return Booted(sandbox, None, Path(), "", {"form": FORMS.index(form)}, 1.0, computes=computes)


def kernels_in(tmp_path: Path) -> Path:
    """A folder of kernels of which only the manifest is read."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / MANIFEST).write_text("sources 00\n")
    return folder


def told_form(forms: Forms, plan: BootPlan) -> str:
    """What the engine's configuration says."""
    return str(json.loads(forms.told(plan).configuration)["form"])


def test_the_first_choice_holds(tmp_path: Path) -> None:
    """The second start is told the form, also in another process, and shows the trial's figures with their day."""
    plan = plan_of(kernels_in(tmp_path))
    forms = Forms(open_form_cache(tmp_path / "forms.json"), "gvisor/systrap")
    assert told_form(forms, plan) == ""
    first = booted_with("x86-64-v3")
    forms.note(plan, first)
    assert first.computes == CLAIM
    later = Forms(open_form_cache(tmp_path / "forms.json"), "gvisor/systrap")
    assert told_form(later, plan) == "x86-64-v3"
    second = booted_with("x86-64-v3", "compiled kernels; the fastest")
    later.note(plan, second)
    day = later.find(plan)
    assert day is not None and second.computes == f"{CLAIM}; tried on {day.tried}"


def test_another_choice_replaces_the_first(tmp_path: Path) -> None:
    """An engine that could not have the form has tried anew, and its choice is kept with its own figures."""
    plan = plan_of(kernels_in(tmp_path))
    forms = Forms(open_form_cache(tmp_path / "forms.json"), "gvisor/systrap")
    forms.note(plan, booted_with("x86-64-v3"))
    forms.note(plan, booted_with(PLAIN, "plain operations; slower"))
    kept = forms.find(plan)
    assert kept is not None and (kept.form, kept.said) == (PLAIN, "plain operations; slower")


def test_what_the_times_depend_on_is_part_of_the_key(tmp_path: Path, monkeypatch: Any) -> None:
    """Another model, number of threads, runtime, kernels or processor is tried anew."""
    kernels = kernels_in(tmp_path)
    plan = plan_of(kernels)
    cache = open_form_cache(tmp_path / "forms.json")
    forms = Forms(cache, "gvisor/systrap")
    forms.note(plan, booted_with("x86-64-v3"))
    assert told_form(forms, plan) == "x86-64-v3"
    assert told_form(forms, plan_of(kernels, threads=2)) == ""
    assert told_form(forms, plan_of(kernels, dtype="float32")) == ""
    other = EngineConfig(model_dir="/model", model_digest="01").to_json()
    assert told_form(forms, replace(plan, configuration=other)) == ""
    assert told_form(Forms(cache, "gvisor/kvm"), plan) == ""
    with monkeypatch.context() as patch:
        patch.setattr(forms_module, "processor", lambda: "another")
        assert told_form(forms, plan) == ""
    (kernels / MANIFEST).write_text("sources 01\n")
    assert told_form(forms, plan) == ""


def test_sandboxes_without_forms_are_left_alone(tmp_path: Path) -> None:
    """A text sandbox, an engine without kernels, one that chose nothing, and a claim of an unknown form."""
    kernels = kernels_in(tmp_path)
    forms = Forms(open_form_cache(tmp_path / "forms.json"), "gvisor/systrap")
    plan = plan_of(kernels)
    text, bare = replace(plan, role=Role.TEXT), replace(plan, spec=SimpleNamespace(mounts=()))  # type: ignore[arg-type]
    for one in (text, bare):
        forms.note(one, booted_with("x86-64-v3"))
        assert forms.told(one) is one
    for number in (0, len(FORMS), 255):
        odd = booted_with("")
        odd.ready["form"] = number
        forms.note(plan, odd)
    (kernels / MANIFEST).unlink()
    forms.note(plan, booted_with("x86-64-v3"))
    assert not (tmp_path / "forms.json").exists()
