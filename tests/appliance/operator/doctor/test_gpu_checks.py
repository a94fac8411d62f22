"""What the doctor says of GPUs: nothing bad of a good machine, and each fault with its mend."""

from __future__ import annotations

import shlex
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

from appliance.common.gpu_placement import architecture_of
from appliance.operator.cli import kernels
from appliance.operator.doctor.facts import CardFacts, Gpu, GpuKernelFacts, MadeKernels
from appliance.operator.doctor.finding import Severity
from appliance.operator.doctor.gpu_checks import check_cards, check_gpu, check_gpu_kernels
from appliance.operator.doctor.gpu_kernel_facts import look_at_cards
from isolation.errors import GpuError
from isolation.gpu.bundle_additions import gpu_access
from isolation.gpu.gpu_drivers import INSTALL_CURRENT
from isolation.gpu.gpu_facts import GpuFacts
from tests.appliance.common.cards import CARD_80, machine, make_8b, model
from tests.isolation.gpu.gpu_machine import DRIVER, FACTS, RUNSC


def gpu(found: GpuFacts, known: tuple[str, ...] = (DRIVER,)) -> Gpu:
    """As the doctor gathers it."""
    return Gpu(names=found.models, driver=found.driver, known=known, found=found)


def changed(name: str, **changes: object) -> GpuFacts:
    """The good machine with one node changed."""
    return replace(FACTS, nodes=tuple(replace(one, **changes) if one.name == name else one for one in FACTS.nodes))


NEWER = replace(FACTS, driver="999.1", libraries=tuple(replace(one, version="999.1") for one in FACTS.libraries))
"""A driver that nobody knows."""

FAULTS = {
    "unsupported driver": (NEWER, "gpu", "install driver 550.90.07, or a newer runsc"),
    "no control node": (replace(FACTS, nodes=FACTS.nodes[:2]), "gpu devices", "nvidia-modprobe -c=0"),
    "no card": (replace(FACTS, nodes=(FACTS.nodes[0], FACTS.nodes[2])), "gpu devices", "nvidia-modprobe -c=0"),
    "uvm not loaded": (replace(FACTS, memory_major=None), "gpu devices", "modprobe nvidia-uvm"),
    "another device": (changed("nvidia0", major=10), "gpu devices", "rm /dev/nvidia0"),
    "permission": (changed("nvidiactl", open_to_all=False), "gpu devices", "chmod 666 /dev/nvidiactl"),
    "missing library": (replace(FACTS, libraries=FACTS.libraries[:1]), "gpu libraries", "install the libraries"),
    "old library": (
        replace(FACTS, libraries=tuple(replace(one, version="535.1") for one in FACTS.libraries)),
        "gpu libraries",
        "reboot",
    ),
    "closed library": (
        replace(FACTS, libraries=tuple(replace(one, open_to_all=False) for one in FACTS.libraries)),
        "gpu libraries",
        "chmod o+r",
    ),
    "instances": (replace(FACTS, mig=(0,)), "gpu instances", "-mig 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_told_with_its_mend(name: str) -> None:
    """The finding names it, and what it warns of is what ends the start of a model that asks for a GPU."""
    found, check, mend = FAULTS[name]
    bad = [one for one in check_gpu(gpu(found), RUNSC) if one.level is Severity.WARNING]
    assert bad
    assert {one.check for one in bad} == {check}
    assert mend in bad[0].mend
    assert all(one.means for one in bad)
    with pytest.raises(GpuError):
        gpu_access(found, "auto", RUNSC)


def test_a_good_machine_is_good() -> None:
    """The control: nothing is warned of, and a sandbox would get its GPU."""
    assert [one.level for one in check_gpu(gpu(FACTS), RUNSC)] == [Severity.OK]
    assert gpu_access(FACTS, "auto", RUNSC) is not None


def test_what_is_only_to_be_known_is_a_note() -> None:
    """MPS and a card that sleeps keep nobody from serving; a machine without a driver is no fault either."""
    notes = check_gpu(gpu(replace(FACTS, mps=True, persistent=False)), RUNSC)
    assert [(one.check, one.level) for one in notes[1:]] == [
        ("gpu mps", Severity.NOTE),
        ("gpu persistence", Severity.NOTE),
    ]
    assert [one.level for one in check_gpu(Gpu(), RUNSC)] == [Severity.NOTE]


def test_the_table_speaks_where_runsc_does_not() -> None:
    """What runsc lists counts, also against the table; without its list the table judges, without runsc nothing does.
    The way to a current runsc is in the mend, and an answer that cannot be read is a finding of its own."""
    refused = check_gpu(gpu(replace(FACTS, driver="999.1"), ()), RUNSC)[0]
    assert refused.level is Severity.WARNING
    assert INSTALL_CURRENT in refused.mend and "install driver 550.90.07" in refused.mend
    assert [one.level for one in check_gpu(gpu(FACTS, ()), 0)] == [Severity.OK]
    assert check_gpu(gpu(NEWER, ("999.1",)), RUNSC)[0].level is Severity.OK
    assert check_gpu(gpu(FACTS, ("999.1",)), RUNSC)[0].level is Severity.WARNING
    odd = replace(gpu(FACTS, ()), list_problem="the answer of `runsc` cannot be read")
    (finding,) = check_gpu(odd, RUNSC)
    assert (finding.level, finding.mend) == (Severity.WARNING, INSTALL_CURRENT)
    assert "cannot be read" in finding.what


MADE = MadeKernels(architecture="sm_90", ours=True, fits=True)
KERNELS = GpuKernelFacts(
    model="llama",
    model_path="/srv/my llama",
    path="/etc/athanor/gpu-kernels",
    needed=True,
    dtype="bfloat16",
    block_size=32,
    rows=64,
    made=(MADE,),
)
WITHOUT = {
    "none named": ({"path": "", "made": ()}, "no folder of compiled kernels is named"),
    "unreadable": ({"problem": "permission denied", "made": ()}, "permission denied"),
    "empty": ({"made": ()}, "no compiled kernels are in"),
    "older": ({"made": (replace(MADE, ours=False),)}, "sources of another version"),
    "other card": ({"made": (replace(MADE, architecture="sm_80"),)}, "are for sm_80, the card is sm_90"),
    "other model": ({"made": (replace(MADE, fits=False),)}, "for another model, or not with dtype bfloat16"),
    "each a little": (
        {"made": (replace(MADE, fits=False), replace(MADE, architecture="sm_80"), replace(MADE, ours=False))},
        "for another model",
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_kernels_for_its_gpu_is_a_problem(name: str) -> None:
    """What is there is said, and the mend is a command with the model's own numbers; control: with one that fits there
    is nothing to mend."""
    changes, said = WITHOUT[name]
    (finding,) = check_gpu_kernels([replace(KERNELS, **changes)], gpu(FACTS))
    assert finding.level is Severity.PROBLEM and said in finding.what and "not served" in finding.means
    command = shlex.split(finding.mend, comments=True)
    asked = dict(zip(command[4::2], command[5::2], strict=True))
    assert command[:4] == ["athanor", "kernels", "gpu", "/etc/athanor/gpu-kernels"]
    assert asked == {
        "--model": "/srv/my llama",
        "--architecture": "sm_90",
        "--dtype": "bfloat16",
        "--block-size": "32",
        "--max-num-seqs": "64",
    }
    assert ("sandbox: gpu_kernels:" in finding.mend) == (name == "none named")
    (good,) = check_gpu_kernels([KERNELS], gpu(FACTS))
    assert good.level is Severity.OK
    options = {f"--{parameter.replace('_', '-')}" for parameter in signature(kernels.gpu).parameters}
    assert asked.keys() < options


def test_kernels_of_a_gpu_that_nobody_knows_are_left_to_the_engine() -> None:
    """A card that no table names judges no architecture, and the mend leaves it open; a model that may do without a GPU
    needs none where there is no driver, and one that may not does."""
    unknown = replace(gpu(FACTS), names=("NVIDIA Z9000",))
    other = replace(KERNELS, made=(replace(MADE, architecture="sm_100"),), dtype="")
    assert [one.level for one in check_gpu_kernels([other], unknown)] == [Severity.OK]
    (finding,) = check_gpu_kernels([replace(other, made=())], unknown)
    assert "--architecture SM --block-size" in finding.mend
    assert [one.level for one in check_gpu_kernels([replace(KERNELS, needed=False, path="")], Gpu())] == [Severity.NOTE]
    assert [one.level for one in check_gpu_kernels([replace(KERNELS, path="")], Gpu())] == [Severity.PROBLEM]


@pytest.mark.parametrize(
    ("card", "architecture"),
    [("NVIDIA H100 80GB HBM3", "sm_90"), ("NVIDIA A100-SXM4-80GB", "sm_80"), ("NVIDIA L40S", "sm_89"), ("Z9000", "")],
)
def test_architectures_are_known_by_a_card_s_name(card: str, architecture: str) -> None:
    """By a whole word of it."""
    assert architecture_of(card) == architecture


def test_the_plan_of_an_8b_model_is_shown_and_a_third_model_is_refused(tmp_path: Path) -> None:
    """From the files of three models and a machine with two cards: the plans of two, which add up, and the refusal with
    its numbers."""
    models = [model(name, str(make_8b(tmp_path / name))) for name in "abc"]
    name = "card {} (NVIDIA H100 80GB HBM3)"
    first, second, third = check_cards(look_at_cards(models, machine(2), running=False))
    assert [one.level for one in (first, second, third)] == [Severity.OK, Severity.OK, Severity.PROBLEM]
    assert (first.check, first.what.startswith(f"{name.format(0)}: 73,403 MiB (90 % of 81,559 MiB) = ")) == (
        "gpu of a",
        True,
    )
    held, _, parts = first.what.removeprefix(f"{name.format(0)}: ").partition(";")[0].partition(" = ")
    numbers = [int(part.rpartition(" ")[2].replace(",", "")) for part in parts.split(" + ")]
    assert sum(numbers) == int(held.partition(" ")[0].replace(",", ""))
    assert second.what.startswith(name.format(1))
    assert "b may hold 90 %, 5 % are left and 90 % (72 GiB) are asked for" in third.what


def test_what_other_programs_hold_is_named(tmp_path: Path) -> None:
    """A card of which another program holds 50 GiB gives an engine the rest, and that is a warning with all numbers;
    one with too little left is refused with them, and nvidia-smi says whose they are. A display's share is none."""
    eight = model("a", str(make_8b(tmp_path / "a")))
    found = {}
    for left in (CARD_80 - (300 << 20), 30 << 30, 10 << 30):
        (found[left >> 30],) = check_cards(look_at_cards([eight], machine(1, free=left), running=False))
    well, less, refused = found.values()
    assert [one.level for one in (well, less, refused)] == [Severity.OK, Severity.WARNING, Severity.PROBLEM]
    assert "30,720 MiB (all that is free of 81,559 MiB; gpu_share 90 % are 73,403 MiB) = weights" in less.what
    assert "other programs hold 50 GiB of it" in less.means
    assert "other programs hold 70 GiB, 10 GiB are free" in refused.what
    assert refused.mend.startswith("nvidia-smi ")


def test_an_engine_that_was_moved_is_where_it_is(tmp_path: Path) -> None:
    """Of an appliance that runs, an engine's card is told where a start would choose another, or refuse it."""
    eight = model("a", str(make_8b(tmp_path / "a")))
    (planned,) = look_at_cards([eight], machine(2), running=True)
    (same,) = check_cards([replace(planned, now=(0,))])
    (moved,) = check_cards([replace(planned, now=(1,))])
    (refused,) = check_cards([CardFacts(model="a", problem="no GPU has room for an engine of a", now=(1,))])
    assert (same.level, moved.level, refused.level) == (Severity.OK, Severity.WARNING, Severity.WARNING)
    assert moved.what == "its engine is on card 1; a start gives it card 0 (NVIDIA H100 80GB HBM3)"
    assert refused.what == "its engine is on card 1; no GPU has room for an engine of a"


def test_a_card_that_is_cut_up_is_given_to_no_model(tmp_path: Path) -> None:
    """Asked for by number or as the only one, it is refused by name with the command that makes it whole; with a whole
    one beside it, that is taken."""
    eight = str(make_8b(tmp_path / "a"))
    alone, beside = replace(machine(1), mig=(0,)), replace(machine(2), mig=(0,))
    for facts, asked in ((alone, "auto"), (beside, [0])):
        (finding,) = check_cards(look_at_cards([model("a", eight, gpu=asked)], facts, running=False))
        assert finding.level is Severity.PROBLEM
        assert "no GPU can be given to an engine of a: card 0 is cut up into MIG instances" in finding.what
        assert finding.mend.startswith("nvidia-smi -i 0 -mig 0")
    (finding,) = check_cards(look_at_cards([model("a", eight)], beside, running=False))
    assert finding.level is Severity.OK and finding.what.startswith("card 1 ")


def test_cards_are_not_looked_for_where_they_are_not_asked_for(tmp_path: Path) -> None:
    """No finding without a card, for a model without one, or for files that are none; a note where the card's memory is
    not known, with the reason."""
    eight = model("a", str(make_8b(tmp_path / "a")))
    assert look_at_cards([eight], GpuFacts(), running=False) == ()
    assert look_at_cards([model(gpu="off"), model(path=str(tmp_path / "none"))], machine(1), running=False) == ()
    unknown = replace(machine(1, total=0), memory_problem="NVML: nvmlInit_v2 gives 9")
    (finding,) = check_cards(look_at_cards([eight], unknown, running=False))
    assert finding.level is Severity.NOTE and finding.what.endswith("not known: NVML: nvmlInit_v2 gives 9")
