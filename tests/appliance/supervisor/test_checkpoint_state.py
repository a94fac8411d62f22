"""What is told of checkpoints: there, not there and why, avoided; on the way to the gateway, and in its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.common.checkpoint_status import CheckpointStatus, from_wire, to_wire
from appliance.common.control_checkpoints import CheckpointState
from appliance.gateway.telemetry import names
from appliance.gateway.watch.checkpoints import Checkpoints
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.checkpoint_state import COMPARES, checkpoint_state
from appliance.supervisor.warm import WarmStarts
from isolation.gvisor.checkpoint import ACCOUNT, Label, open_store

HERE = (("runsc", "20240729"), ("processor", "aa"), ("kernel", "6.1"))
ENGINE, TEXT, MODEL = ("engine", ""), ("text", ""), ("engine", "llama")


class Machine:
    """Stands in for the runtime: what is told needs nothing else of it."""

    surroundings = HERE
    fills_folders = True


@pytest.fixture
def warm(tmp_path: Path) -> WarmStarts:
    """Warm starts with an empty store, of which a base of each role was looked for."""
    machine: Any = Machine()
    found = WarmStarts(open_store(tmp_path / "saved"), machine, tmp_path / "run")
    found.looked_for = {ENGINE: "e" * 64, TEXT: "t" * 64}
    return found


def keep(warm: WarmStarts, key: str, label: Label) -> None:
    """Put a checkpoint into the store."""
    with warm.store.draft() as draft:
        (draft / "pages.img").write_bytes(b"pages")
        warm.store.keep(draft, key, 1.0, label)


def told(warm: WarmStarts) -> dict[tuple[str, str], CheckpointStatus]:
    """What the gateway has of it, by role and model."""
    state = checkpoint_state(warm)
    return {(one.role, one.model): one for one in from_wire(state.kept, state.problems)}


def test_one_that_is_there_is_told_with_size_and_time(warm: WarmStarts) -> None:
    """A base has its size and when it was made, and no problem; one of a model stands behind the bases."""
    keep(warm, "e" * 64, Label("engine", "", "/run/x", 1_800_000_000.7, HERE))
    keep(warm, "a" * 64, Label("engine", "llama", "/run/x", 1.0, HERE))
    warm.looked_for[MODEL] = "a" * 64
    found = told(warm)
    assert list(found) == [ENGINE, TEXT, MODEL]
    assert found[ENGINE] == CheckpointStatus(role="engine", bytes=5, made_at=1_800_000_000)
    assert found[MODEL].bytes == 5 and not found[MODEL].problem


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (None, "not made yet"),
        (Label("engine", "", "/run/x", 1.0, HERE), "other files or settings"),
        (
            Label("engine", "", "/run/x", 1.0, (("runsc", "20240729"), ("processor", "bb"), ("kernel", "6.1"))),
            "another processor",
        ),
        (
            Label("engine", "", "/run/x", 1.0, (("runsc", "20260928"), ("processor", "aa"), ("kernel", "7.0"))),
            "runsc and kernel",
        ),
        (Label("text", "", "/run/x", 1.0, ()), "not made yet"),
    ],
)
def test_one_that_is_not_there_is_told_with_the_reason(warm: WarmStarts, label: Label | None, problem: str) -> None:
    """Nothing was made, or what was made is of another processor, runsc or kernel, or of other files."""
    if label is not None:
        keep(warm, "f" * 64, label)
    found = told(warm)[ENGINE]
    assert not found.bytes and not found.made_at
    assert problem in found.problem


def test_a_runsc_that_compares_mounts_is_told(warm: WarmStarts) -> None:
    """Where no base can serve all models, each role says so, beside what its models have."""
    warm.shares, warm.looked_for = False, {MODEL: "a" * 64}
    keep(warm, "a" * 64, Label("engine", "llama", "/run/x", 1.0, HERE))
    found = told(warm)
    assert list(found) == [ENGINE, MODEL]
    assert found[ENGINE].problem == COMPARES and not found[MODEL].problem


def test_boots_may_change_what_is_told_meanwhile(warm: WarmStarts) -> None:
    """A sandbox looks for a checkpoint in its thread while the state is told: no error, which would end the supervisor,
    since none of its tasks may end. Where no base can serve all models the names are looked at one by one."""
    warm.shares = False
    warm.looked_for = Growing(warm.looked_for)
    assert set(told(warm)) >= {ENGINE, TEXT}
    with pytest.raises(RuntimeError):
        sorted({role for role, _ in warm.looked_for})  # the control


class Growing(dict[tuple[str, str], str]):
    """Names that another thread adds to whenever one is looked at in Python; a copy is taken in one step."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for one in super().__iter__():
            yield one
            self["engine", f"m{len(self)}"] = "0" * 64


def test_what_failed_for_one_model_is_not_told_of_another(warm: WarmStarts) -> None:
    """A template with a model that was too large is the reason for that model alone; the base and another model's are
    not made yet."""
    warm.looked_for |= {MODEL: "a" * 64, ("engine", "small"): "b" * 64}
    warm.problems[MODEL] = "a checkpoint of 9000 MiB is not saved"
    found = told(warm)
    assert found[MODEL].problem.startswith("a checkpoint of 9000 MiB")
    assert found[ENGINE].problem.startswith("not made yet")
    assert found["engine", "small"].problem.startswith("not made yet")
    warm.leave([cast(BootPlan, SimpleNamespace(name="engine-large", role_name=MODEL[0], model=MODEL[1]))])
    assert not warm.problems, "another model of this name has other reasons"


def test_an_account_that_nobody_wrote_ends_nothing(warm: WarmStarts) -> None:
    """Damage that reads as a number without an end, as ten thousand brackets, or as a time before all times: no
    checkpoint, and no error. Control: what is whole beside it is told."""
    keep(warm, "e" * 64, Label("engine", "", "/run/x", 1.0, HERE))
    begin = '{"format": 1, "key": "KEY", "cold_s": 1, "files": '
    texts = (begin + '[["a", Infinity, ""]]}', "[" * 60_000, begin + '[["a", 1, ""]], "label": {"made_at": -5}}')
    for number, text in enumerate(texts):
        folder = warm.store.root / f"{number:064d}"
        folder.mkdir()
        (folder / ACCOUNT).write_text(text.replace("KEY", folder.name))
    assert [one.key for one in warm.store.kept()] == ["e" * 64]
    assert told(warm)[ENGINE].bytes == 5
    assert all(warm.store.find(f"{number:064d}") is None for number in range(3))


def test_a_failure_and_those_who_begin_without_are_told(warm: WarmStarts) -> None:
    """What kept the last template from being saved is the reason; a base that some sandboxes avoid names three."""
    warm.problems[TEXT] = "3 MiB are free " + "x" * 400
    keep(warm, "e" * 64, Label("engine", "", "/run/x", 1.0, HERE))
    warm.trust.note_ready("e" * 64, "engine-good")
    for name in "abcd":
        assert not warm.trust.is_at_fault("e" * 64, f"engine-{name}")
    found = told(warm)
    assert found[TEXT].problem.startswith("3 MiB are free") and len(found[TEXT].problem) == 300
    assert found[ENGINE].bytes and found[ENGINE].problem.endswith("engine-a, engine-b, engine-c and 1 more")


@pytest.mark.parametrize(
    "state",
    [
        CheckpointState({"card:": [1, 1]}, {}),
        CheckpointState({"engine:": [1]}, {}),
        CheckpointState({"engine:": [-1, 1]}, {}),
        CheckpointState({"engine:": [1, 1]}, {"text:": "why"}),
        CheckpointState({"engine:": [0, 0]}, {"engine:": "x" * 301}),
    ],
)
def test_the_gateway_takes_nothing_else(state: CheckpointState) -> None:
    """What no supervisor tells is refused, and what was told before stays."""
    checkpoints = Checkpoints()
    checkpoints.take(CheckpointState({"engine:": [7, 1]}, {}))
    with pytest.raises(ValueError, match="no supervisor"):
        checkpoints.take(state)
    assert [one.bytes for one in checkpoints.found] == [7]


def test_sizes_are_metrics() -> None:
    """Sizes are added up by role and kind; a base that is not there has 0."""
    rows = [
        CheckpointStatus(role="engine", problem="not made yet"),
        CheckpointStatus(role="engine", model="a:b", bytes=5, made_at=1.0),
        CheckpointStatus(role="engine", model="c", bytes=6, made_at=1.0),
    ]
    checkpoints = Checkpoints()
    checkpoints.take(CheckpointState(*to_wire(rows)))
    assert checkpoints.found[1].model == "a:b"
    levels = {
        tuple(one.labels.values()): one.value for one in checkpoints.levels() if one.name == names.CHECKPOINT_SIZE
    }
    assert levels == {("engine", "base"): 0, ("engine", "model"): 11}
