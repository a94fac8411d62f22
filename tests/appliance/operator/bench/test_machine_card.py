"""Machine cards: their form, the facts from files of several machines, and what they never contain."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import re
import socket
from pathlib import Path

import pytest

from appliance.operator import kernels
from appliance.operator.bench import memory_speed
from appliance.operator.bench.errors import CardError
from appliance.operator.bench.machine_card import MachineCard
from appliance.operator.bench.processor import look_at_processor, memory_gib, parse_cores
from appliance.operator.cli import bench_record
from appliance.operator.cli.bench import CARD, with_card_file
from appliance.operator.cli.bench_record import cgroup_limit

from .test_command import bench

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C
stepping\t: 8
flags\t\t: fpu avx2

processor\t: 1
vendor_id\t: other
"""

ARM = """\
processor\t: 0
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd0c
CPU revision\t: 1

Serial\t\t: 10000000deadbeef
Model\t\t: Board of somebody
"""

SPEED = {"one_core": 12.34e9, "all_cores": 56.78e9, "torch": "2.13.0"}


def write(root: Path, files: dict[str, str]) -> Path:
    """Make files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def topology(*places: tuple[int, int]) -> dict[str, str]:
    """Files that say on which package and core each processor is."""
    files = {"sys/devices/system/cpu/online": f"0-{len(places) - 1}\n"}
    for number, (package, core) in enumerate(places):
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        files |= {f"{folder}/physical_package_id": f"{package}\n", f"{folder}/core_id": f"{core}\n"}
    return files


def test_a_card_is_sorted_with_one_fact_a_line() -> None:
    """A line for each fact and each feature, in the order of their names."""
    text = MachineCard(processor="x", features={"b": True, "a": None}).to_json()
    facts = [line.strip().split('"')[1] for line in text.splitlines() if line.startswith('  "')]
    assert facts == sorted(field.name for field in dataclasses.fields(MachineCard))
    assert '    "a": null,\n    "b": true\n' in text


def test_a_card_is_read_back() -> None:
    """Reading what was written gives the same card."""
    card = MachineCard(processor="x", memory_gib=23.5, features={"avx2": True}, note="busy")
    assert MachineCard.from_json(card.to_json()) == card


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hostname": "x"}, "hostname"),
        ({"logical_cores": "2"}, "logical_cores"),
        ({"note": None}, "note"),
        ({"features": {"avx2": "yes"}}, "features.avx2"),
    ],
)
def test_what_is_no_card_is_refused(change: dict[str, object], words: str) -> None:
    """Unknown facts and wrong types are named."""
    data = json.loads(MachineCard().to_json()) | change
    with pytest.raises(CardError, match=re.escape(words)):
        MachineCard.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_other_json_is_no_card(text: str) -> None:
    """Neither text, nor a list, nor an object without the facts is a card."""
    with pytest.raises(CardError):
        MachineCard.from_json(text)


def test_facts_of_an_x86_processor(tmp_path: Path) -> None:
    """Two packages with two threads a core: the first processor's names, physical cores by package and core."""
    places = topology((0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1))
    root = write(tmp_path, {"proc/cpuinfo": X86, "sys/devices/system/node/online": "0-1\n", **places})
    found = look_at_processor(root)
    assert (found.name, found.vendor) == ("Intel(R) Xeon(R) Platinum 8481C", "GenuineIntel")
    assert (found.family, found.model, found.stepping) == (6, 143, 8)
    assert (found.logical_cores, found.physical_cores, found.numa_nodes) == (8, 4, 2)


def test_facts_of_an_arm_processor(tmp_path: Path) -> None:
    """Numbers of implementer and part stand for names that the system does not tell."""
    found = look_at_processor(write(tmp_path, {"proc/cpuinfo": ARM, **topology((0, 0))}))
    assert (found.name, found.vendor, found.family, found.model, found.stepping) == (None, "0x41", None, 0xD0C, 1)


def test_an_unknown_fact_is_none(tmp_path: Path) -> None:
    """Without the files nothing is known, and nothing is guessed."""
    assert set(dataclasses.asdict(look_at_processor(tmp_path)).values()) == {None}
    assert memory_gib(tmp_path) is None


def test_memory_is_in_gib(tmp_path: Path) -> None:
    """24,684,084 kB are 23.5 GiB."""
    assert memory_gib(write(tmp_path, {"proc/meminfo": "MemTotal:       24684084 kB\nMemFree: 1 kB\n"})) == 23.5


def test_lists_of_cores() -> None:
    """Ranges, single ones and nothing."""
    assert parse_cores("0-2,7\n") == [0, 1, 2, 7]
    assert parse_cores("\n") == []


MOUNT_2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
MOUNT_1 = "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0, 0.0)),
        ({"proc/self/mountinfo": MOUNT_2, "proc/self/cgroup": "0::/\n"}, (2, 0.0)),
        (
            {
                "proc/self/mountinfo": MOUNT_2,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            (2, 1.5),
        ),
        (
            {
                "proc/self/mountinfo": MOUNT_2 + MOUNT_1,
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            (1, 2.0),
        ),
        (
            {
                "proc/self/mountinfo": MOUNT_2.replace(" / ", " /pod "),
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "50000 100000\n",
            },
            (2, 0.0),
        ),
    ],
)
def test_the_least_limit_of_a_group_and_those_above_counts(
    files: dict[str, str], expected: tuple[int, float], tmp_path: Path
) -> None:
    """No cgroups, no limit, version 2 with the limit above, version 1; a group that is not mounted tells none."""
    assert cgroup_limit(write(tmp_path, files)) == expected


def test_features_are_those_of_the_variants() -> None:
    """A processor with AVX2 alone runs the third version of x86-64; what it lacks is said."""
    if platform.machine() != "x86_64":
        pytest.skip("features of x86-64")
    features = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "sse2"})
    assert kernels.best_variant(features) == "x86-64-v3"
    told = kernels.telling_features(features)
    assert told["avx2"] and not told["avx512f"] and "sse2" not in told
    assert kernels.best_variant(frozenset()) == ""


def test_a_card_tells_no_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host name, user name, path or serial number is in a card; control: the check finds each of them in a note."""
    monkeypatch.setattr(bench_record, "_memory_speed", lambda: SPEED)
    monkeypatch.setattr(socket, "gethostname", lambda: "host-7f3a")
    monkeypatch.setattr(platform, "node", lambda: "host-7f3a")
    card = bench_record.record("")
    names = {socket.gethostname(), getpass.getuser(), Path.home().name, str(Path.cwd()), *serial_numbers()}
    assert told(card, names) == set()
    for name in names:
        assert told(dataclasses.replace(card, note=f"of {name}."), names) >= {name}


def told(card: MachineCard, names: set[str]) -> set[str]:
    """Names that stand as words in a card's values, and its values that look like paths."""
    values = [str(value) for name, value in dataclasses.asdict(card).items() if name != "features"]
    found = {name for name in names for value in values if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", value)}
    return found | {value for value in values if re.search(r"(^|\s)/\w", value)}


def serial_numbers() -> set[str]:
    """What tells this machine from others of its kind, where it can be read."""
    files = ("etc/machine-id", "proc/sys/kernel/random/boot_id", "sys/class/dmi/id/product_serial")
    found = set()
    for name in files:
        path = Path("/", name)
        if os.access(path, os.R_OK):
            found.add(path.read_text().strip())
    return found - {""}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--record"], ["--record", CARD]),
        (["--record", "a.json", "closed:1"], ["--record", "a.json", "closed:1"]),
        (["closed:1", "--record"], ["closed:1", "--record", CARD]),
        (["--record", "closed:1"], ["--record", CARD, "closed:1"]),
        (["--record", "--seed", "1"], ["--record", CARD, "--seed", "1"]),
        (["--record=a.json"], ["--record=a.json"]),
        (["closed:1"], ["closed:1"]),
    ],
)
def test_the_file_of_a_card_may_be_left_out(words: list[str], expected: list[str]) -> None:
    """A load or an option behind ``--record`` is no file."""
    assert with_card_file(words) == expected


def test_a_card_alone_measures_no_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without LOAD only the card is written, into the working directory, with the note."""
    monkeypatch.setattr(bench_record, "_memory_speed", lambda: SPEED)
    monkeypatch.chdir(tmp_path)
    done = bench("--record", "--note", "busy")
    assert done.exit_code == 0, done.output
    card = MachineCard.from_json((tmp_path / CARD).read_text())
    assert (card.note, card.memory_read_gb_s_one_core, card.memory_read_gb_s_all_cores) == ("busy", 12.3, 56.8)
    assert card.architecture == platform.machine() and card.logical_cores
    assert done.stdout == ""


def test_a_card_and_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a LOAD the card is written, then the load is measured."""
    monkeypatch.setattr(bench_record, "_memory_speed", lambda: SPEED)
    done = bench(
        "closed:1,requests=1", "--record", str(tmp_path / "c.json"), "--url", "http://127.0.0.1:1", "--model", "m"
    )
    assert done.exit_code == 1 and "1 of 1 failed" in done.stdout
    assert (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"), [(("--note", "x"), "add --record"), (("--record", "no/folder/c.json"), "cannot write")]
)
def test_wrong_cards_are_refused(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note without a card, and a card that cannot be written, say what is wrong."""
    monkeypatch.setattr(bench_record, "_memory_speed", lambda: SPEED)
    done = bench(*arguments)
    assert done.exit_code == 1 and words in done.output, done.output


def test_the_program_prints_speeds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object with what the card takes from it; of little memory, so that it is quick."""
    monkeypatch.setattr(memory_speed, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(memory_speed.torch, "set_num_threads", lambda count: None)
    assert memory_speed.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == SPEED.keys()
    assert found["one_core"] > 1e8 and found["all_cores"] > 1e8


@pytest.mark.full
def test_the_memorys_speed_is_measured_in_a_process_of_its_own() -> None:
    """A gigabyte is read for real."""
    found = bench_record._memory_speed()
    assert found["one_core"] > 1e8 and found["all_cores"] > 1e8
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", found["torch"])
