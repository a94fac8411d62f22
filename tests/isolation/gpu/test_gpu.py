"""GPUs of a sandbox: facts of a machine, what follows from them, and the bundle; no GPU is needed for any of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import GpuError, IsolationError
from isolation.gpu import card_memory
from isolation.gpu.bundle_additions import gpu_access
from isolation.gpu.card_memory import parse_memory, with_memory
from isolation.gpu.gpu_drivers import CAPABILITIES_SINCE, CURRENT, SUPPORTED, check_driver, supported_drivers
from isolation.gpu.gpu_facts import CardMemory, GpuFacts, Library, Places, look_at_gpus
from isolation.gpu.listed_drivers import listed_drivers, read_answer
from isolation.gvisor.bundle import Bundle, Profile, oci_config
from isolation.gvisor.runsc import RunscCommand
from isolation.gvisor.spec import Device
from isolation.host.process import run
from tests.isolation.gpu.gpu_machine import DRIVER, FACTS, RUNSC, make_machine, make_node
from tests.isolation.gvisor.test_bundle import GOLDEN, make_sources, spec

GPU_GOLDEN = GOLDEN.with_name("gpu.json")
root = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")


def nodes(**changes: object) -> GpuFacts:
    """The machine with its first card's node changed."""
    return replace(FACTS, nodes=tuple(replace(one, **changes) if one.index == 0 else one for one in FACTS.nodes))


def libraries(version: str) -> GpuFacts:
    """The machine with libraries of this version."""
    return replace(FACTS, libraries=tuple(replace(one, version=version) for one in FACTS.libraries))


def without(name: str) -> GpuFacts:
    """The machine without one of its nodes."""
    return replace(FACTS, nodes=tuple(one for one in FACTS.nodes if one.name != name))


@root
def test_a_machine_is_seen_as_it_is(tmp_path: Path) -> None:
    """Driver, cards, nodes and libraries are found; nodes of displays and tools and the compiler are passed over."""
    places = make_machine(tmp_path)
    seen = look_at_gpus(places)
    folder = places.libraries[0]
    assert replace(seen, libraries=()) == replace(FACTS, libraries=())
    assert seen.libraries == tuple(
        Library(name, DRIVER, folder / f"{name}.{DRIVER}") for name in ("libcuda.so", "libnvidia-ml.so")
    )
    access = gpu_access(seen, "auto", RUNSC)
    assert access is not None
    assert [one.path for one in access.devices] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]


@root
def test_what_changes_on_a_machine_is_seen(tmp_path: Path) -> None:
    """Instances, MPS, a node that is a link, closed nodes, a second version of a library."""
    places = make_machine(tmp_path)
    (places.proc / "driver/nvidia/capabilities/gpu0/mig/gi1").mkdir()
    places.mps.mkdir()
    (places.mps / "control").touch()
    (places.dev / "nvidia1").symlink_to("nvidia0")
    make_node(places.dev / "nvidia2", 195, 2, mode=0o660)
    (places.libraries[0] / "libcuda.so.535.1").touch()
    (places.run / "nvidia-persistenced/socket").unlink()
    seen = look_at_gpus(places)
    assert (seen.mig, seen.mps, seen.persistent, seen.cards) == ((0,), True, False, (0, 1, 2))
    by_name = {one.name: one for one in seen.nodes}
    assert not by_name["nvidia1"].character
    assert not by_name["nvidia2"].open_to_all
    assert seen.versions("libcuda.so") == ("535.1", DRIVER)


def test_a_machine_without_any(tmp_path: Path) -> None:
    """Nothing is found where nothing is, ``auto`` then gives no GPU, and a wish for one is refused."""
    nowhere = tmp_path / "x"
    seen = look_at_gpus(Places(dev=nowhere, proc=nowhere, libraries=(nowhere,), mps=nowhere, run=nowhere))
    assert seen == GpuFacts()
    assert gpu_access(seen, "auto", RUNSC) is None
    with pytest.raises(GpuError, match="no driver"):
        gpu_access(seen, (0,), RUNSC)


@pytest.mark.parametrize(
    ("facts", "wanted", "says"),
    [
        (replace(FACTS, driver=""), "auto", r"no driver.*modprobe nvidia"),
        (replace(FACTS, driver="999.1"), "auto", r"runsc of 20240729.*driver 999\.1.*install driver 550\.90\.07"),
        (without("nvidia0"), "auto", "no /dev/nvidia0.*nvidia-modprobe"),
        (FACTS, (1,), "there is no /dev/nvidia1; nvidia-modprobe -c=1"),
        (without("nvidiactl"), "auto", "there is no /dev/nvidiactl; nvidia-modprobe -c=0"),
        (without("nvidia-uvm"), "auto", "there is no /dev/nvidia-uvm; modprobe nvidia-uvm"),
        (replace(FACTS, memory_major=None), "auto", "nvidia-uvm is not loaded; modprobe nvidia-uvm"),
        (replace(FACTS, memory_major=235), "auto", "not the driver's device 235:0"),
        (nodes(minor=1), "auto", "nvidia0 is not the driver's device 195:0"),
        (nodes(major=10, minor=203), "auto", "not the driver's device"),
        (nodes(character=False), "auto", "not the driver's device"),
        (nodes(open_to_all=False), "auto", "chmod 666 /dev/nvidia0"),
        (libraries("550.54.15"), "auto", r"version 550\.90\.07 is needed, and there is 550\.54\.15.*restart"),
        (replace(FACTS, libraries=()), "auto", "none is there"),
        (replace(FACTS, libraries=tuple(replace(one, open_to_all=False) for one in FACTS.libraries)), "auto", "o\\+r"),
        (replace(FACTS, mig=(0,)), "auto", "MIG instances"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_mend(facts: GpuFacts, wanted: str | tuple[int, ...], says: str) -> None:
    """Every fault of the machine is an error that names it and says what to do."""
    with pytest.raises(GpuError, match=says):
        gpu_access(facts, wanted, RUNSC)


def test_the_table_is_what_runsc_itself_says(runsc_path: Path) -> None:
    """The row of Debian's runsc against its own list."""
    said = run([str(runsc_path), "nvproxy", "list-supported-drivers"], timeout_s=20.0).stdout.split()
    assert sorted(said) == sorted(supported_drivers(SUPPORTED[0][0]))


def test_only_what_is_known_on_both_sides_is_known_between() -> None:
    """A row is exact; between two rows counts what both have; before the first nothing; after the last its drivers."""
    (first, older), (last, newer) = SUPPORTED
    assert supported_drivers(first - 1) == ()
    assert supported_drivers(first) == older
    assert set(supported_drivers(first + 1)) == set(older) & set(newer) == {"535.129.03"}
    assert supported_drivers(last) == supported_drivers(last + 5) == newer


@pytest.mark.parametrize(
    ("driver", "runsc", "mend"),
    [
        ("580.65.06", 20_240_729, "install driver 550.90.07, or use runsc of 20260821"),
        ("550.90.07", 20_260_821, "install driver 610.57.04, or use runsc of 20240729"),
        ("580.65.06", 20_240_729, "python images/runsc.py --into DIR --release"),
        ("700.1", 20_261_001, "use a later runsc whose own list has the driver"),
        ("550.90.07", 20_230_101, "use runsc of 20240729"),
        ("700.1", 20_230_101, "use a current runsc, if its list has the driver: python images/runsc.py"),
    ],
)
def test_a_driver_that_runsc_does_not_know_is_refused(driver: str, runsc: int, mend: str) -> None:
    """Older, newer or unknown: both versions are named, with what would fit."""
    with pytest.raises(GpuError) as caught:
        check_driver(driver, runsc)
    assert driver in str(caught.value) and str(runsc) in str(caught.value) and mend in str(caught.value)
    check_driver("535.129.03", 20_250_101)


def test_what_runsc_lists_comes_before_the_table(runsc_path: Path) -> None:
    """A driver that only the list has is taken, and one that only the table has is refused; the real runsc lists."""
    listed = listed_drivers(runsc_path)
    assert set(listed) == set(supported_drivers(RUNSC))
    check_driver(DRIVER, RUNSC, listed)
    check_driver("999.1", RUNSC, (*listed, "999.1"))
    with pytest.raises(GpuError, match=r"does not list the driver 550\.90\.07.*install driver 999\.1"):
        check_driver(DRIVER, RUNSC, ("999.1",))
    assert gpu_access(replace(FACTS, driver="999.1", libraries=libraries("999.1").libraries), "auto", RUNSC, ("999.1",))


@pytest.mark.parametrize(
    ("script", "listed", "problem"),
    [
        ("echo 580.159.04; echo; echo 610.57", ("580.159.04", "610.57"), ""),
        ("echo 'Usage: runsc <flags> <subcommand>'; exit 128", (), ""),
        ("echo 580.159.04 supported", None, "'580.159.04 supported' is no version of a driver"),
        ("true", None, "it lists nothing"),
        ("echo 580.159.04; exit 1", None, "it ended with status 1"),
        ("echo 'panic'; exit 128", None, "it ended with status 128"),
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error(
    script: str, listed: tuple[str, ...] | None, problem: str, tmp_path: Path
) -> None:
    """A runsc that does not know the command leaves the word to the table; any other odd answer is refused with the
    command, what is odd and the way to a runsc that was tried."""
    program = tmp_path / "runsc"
    program.write_text(f'#!/bin/sh\n[ "$*" = "nvproxy list-supported-drivers" ] || exit 3\n{script}\n')
    program.chmod(0o755)
    if listed is not None:
        assert listed_drivers(program) == listed
        return
    with pytest.raises(GpuError, match=rf"{program} nvproxy list-supported-drivers.*{problem}.*images/runsc\.py"):
        listed_drivers(program)


def test_the_real_runsc_refuses_an_unknown_command_as_the_reader_expects(runsc_path: Path) -> None:
    """The status and the usage by which a runsc without the command is known are the real one's."""
    done = run([str(runsc_path), "nvproxy", "no-such-command"], timeout_s=20.0, check=False)
    assert read_answer(runsc_path, done) == ()


def test_a_runsc_that_is_not_there_cannot_be_asked(tmp_path: Path) -> None:
    """The error names the command."""
    with pytest.raises(GpuError, match="nvproxy list-supported-drivers` failed"):
        listed_drivers(tmp_path / "none")


def test_the_release_that_is_recommended_is_the_one_that_is_pinned() -> None:
    """Errors name the release whose checksum images/runsc.py has."""
    pinned = re.search(r'^RELEASE = "(.*)"$', Path("images/runsc.py").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == CURRENT


NVML = """
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInitWithFlags(unsigned flags) { return %(status)d; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned place, void **card) {
    if (%(hangs)d) pause();
    *card = (void *)(long)(place + 1); return place == %(lost)d ? 15 : 0;
}
int nvmlDeviceGetMinorNumber(void *card, unsigned *minor) { *minor = 4 - (long)card; return 0; }
int nvmlDeviceGetUUID(void *card, char *text, unsigned size) { strncpy(text, "GPU-0a", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *card, memory *found) {
    found->total = 85899345920ull; found->free = (long)card << 30; found->used = 0; return 0;
}
int nvmlDeviceGetMigMode(void *card, unsigned *now, unsigned *later) {
    if (%(mig)d < 0) return 3;
    *now = *later = (long)card == %(mig)d; return 0;
}
"""


def pretended(folder: Path, *, status: int = 0, lost: int = -1, hangs: bool = False, mig: int = -1) -> GpuFacts:
    """A machine whose NVML is a library made here."""
    source, library = folder / "nvml.c", folder / f"libnvidia-ml.so.{status}{lost}{hangs}{mig}"
    source.write_text(NVML % {"status": status, "lost": lost, "hangs": hangs, "mig": mig})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return replace(FACTS, libraries=(Library("libnvidia-ml.so", DRIVER, library),))


def test_a_driver_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question ends with its reason, and no second program is started beside one that still hangs; once that is
    gone cards are asked again."""
    monkeypatch.setattr(card_memory, "TIMEOUT_S", 1.0)
    hanging = pretended(tmp_path, hangs=True)
    # As in a driver, where no signal reaches it.
    monkeypatch.setattr(card_memory.Child, "kill", lambda _self: None)
    assert "took longer than 1 s" in with_memory(hanging).memory_problem
    assert "still hangs in the driver" in with_memory(pretended(tmp_path)).memory_problem
    monkeypatch.undo()
    card_memory._left[0].end(grace_s=0)
    assert len(with_memory(pretended(tmp_path)).memory) == 2


def test_the_memory_of_cards_is_asked_by_a_program_of_its_own(tmp_path: Path) -> None:
    """A library with NVML's functions is asked for every card, by the number of its node; a card that does not answer
    is left out, and a library that fails, that is missing, or that tells nonsense leaves the reason."""
    found = {status: with_memory(pretended(tmp_path, status=status)) for status in (0, 9)}
    assert [one.index for one in with_memory(pretended(tmp_path, lost=0)).memory] == [2]
    assert found[0].memory == (CardMemory(2, "GPU-0a", 80 << 30, 2 << 30), CardMemory(3, "GPU-0a", 80 << 30, 1 << 30))
    assert "Driver Not Loaded" in found[9].memory_problem and not found[9].memory
    # In the mode of instances, though none was made: /proc tells nothing of it.
    assert (with_memory(pretended(tmp_path, mig=1)).mig, found[0].mig) == ((3,), ())
    gone = with_memory(replace(FACTS, libraries=()))
    assert gone.memory_problem == f"there is no libnvidia-ml.so.{DRIVER}"
    assert with_memory(GpuFacts()) == GpuFacts()
    for text in ("", "{}x", '[{"index": 0}]', '[{"index": 0, "uuid": "GPU-1", "total": 1, "free": 2, "mig": false}]'):
        with pytest.raises(ValueError, match="NVML"):
            parse_memory(text)


def test_the_bundle_of_a_sandbox_with_a_gpu_is_the_golden_file() -> None:
    """Every word that a GPU adds is reviewed: devices, two libraries, environment, and nothing else."""
    plain = spec()
    found = oci_config(replace(plain, gpu=gpu_access(FACTS, (0,), RUNSC)), Profile.ROOT)
    assert found == json.loads(GPU_GOLDEN.read_text())
    base = json.loads(GOLDEN.read_text())
    linux = found["linux"]
    assert isinstance(linux, dict)
    assert {key: linux[key] for key in linux if key != "devices"} == base["linux"]
    assert [key for key in found if found[key] != base.get(key)] == ["process", "mounts", "linux"]
    assert "hooks" not in found


def test_a_sandbox_without_a_gpu_has_nothing_of_it(tmp_path: Path) -> None:
    """No device, library, variable or flag; the control beside it has them all."""
    make_sources(tmp_path)
    command = RunscCommand(Path("/r/runsc"), Path("/run/a"), Profile.ROOT, CAPABILITIES_SINCE)
    gpu = replace(FACTS, libraries=tuple(replace(one, path=tmp_path / one.path.name) for one in FACTS.libraries))
    for one in gpu.libraries:
        one.path.touch()
    words = ("nvidia", "nvproxy", "LD_LIBRARY_PATH", "CUDA")
    for access in (None, gpu_access(gpu, "auto", RUNSC)):
        (parent := tmp_path / str(access is None)).mkdir()
        bundle = Bundle.create(parent, replace(spec(tmp_path), gpu=access), Profile.ROOT)
        config = (bundle.path / "config.json").read_text()
        argv = " ".join((*command.create("x", bundle), *command.start("x", gpu=bundle.gpu)))
        assert [word in config + argv for word in words] == [access is not None] * len(words)
    assert "nvproxy" not in " ".join(command.delete("x"))


def test_flags_fit_the_release() -> None:
    """Capabilities are bounded where runsc can do that; the driver's version is never told to it."""
    flags = {
        version: RunscCommand(Path("/r"), Path("/a"), Profile.ROOT, version).flags(gpu=True)[-2:]
        for version in (CAPABILITIES_SINCE - 1, CAPABILITIES_SINCE)
    }
    assert flags[CAPABILITIES_SINCE - 1][-1] == "--nvproxy"
    assert flags[CAPABILITIES_SINCE] == ["--nvproxy", "--nvproxy-allowed-driver-capabilities=compute,utility"]


@pytest.mark.parametrize(
    "path",
    [
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/cuse",
        "/dev/nvidia0/../kvm",
        "/dev/nvidia",
        "/dev/nvidia1234",
    ],
)
def test_no_other_device_can_be_asked_for(path: str) -> None:
    """A specification of a sandbox cannot name a device that no program needs for computing."""
    with pytest.raises(IsolationError):
        Device(path, 195, 0)


@root
@pytest.mark.parametrize(("forced", "saved"), [(False, False), (True, False), (True, True)])
def test_a_real_sandbox_gets_the_nodes(runsc_path: Path, tmp_path: Path, forced: bool, saved: bool) -> None:
    """Real runsc on nodes without a driver: it looks for the driver itself and refuses. With the ABI forced on it,
    as the product never does, the program sees exactly the nodes and libraries that were planned; so does a copy of one
    that was saved before it opened any."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.isolation.gpu.gpu_probe",
            str(runsc_path),
            str(tmp_path),
            DRIVER if forced else "",
            *(["saved"] if saved else []),
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    if "no mount namespace" in done.stdout:
        pytest.skip("this machine gives no mount namespace")
    report = json.loads(done.stdout.splitlines()[-1])
    if not forced:
        assert "driver version" in report["refused"]
        return
    # A copy goes on behind what its original has printed.
    assert report["said"] == 1
    assert report["devices"] == ["nvidia-uvm", "nvidia0", "nvidiactl"]
    assert report["libraries"] == ["libcuda.so.1", "libnvidia-ml.so.1"]
    assert report["path"] == "/nvidia"
    assert set(report["opened"]) == {6}  # ENXIO: the sentry asked the host, and no driver answers there
