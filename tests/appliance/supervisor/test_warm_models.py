"""Which checkpoints are made, kept and dropped, of models that may sleep above all. Something else stands in for the
template, so no sandbox starts."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.model_memory import Memory
from appliance.supervisor.boot import BootPlan, plan_boot
from appliance.supervisor.checkpoint_state import NOT_STARTED, checkpoint_state
from appliance.supervisor.saved_start import SavedStart
from appliance.supervisor.templates import MOST_AHEAD_BYTES, place_of, starts
from appliance.supervisor.warm import MOST_TEMPLATES, WarmStarts, open_warm_starts
from isolation.errors import CheckpointError, SandboxStartError
from isolation.gvisor.checkpoint import Checkpoint, Label, ListedFolders
from isolation.gvisor.spec import Mount
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.ipc.messages import Role
from tests.appliance.supervisor.warm_plans import configure, make


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """Templates wait for nobody here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("appliance.supervisor.warm.BEGIN_AFTER_S", 0.0)
        yield


def test_where_nothing_can_be_saved_starts_are_cold(tmp_path: Path) -> None:
    """Without a sandbox there is no checkpoint, and nobody is bothered; a directory that others enter turns it off."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        warm, plan = make(tmp_path, runtime)
        assert warm.take(plan, 1.0) is None
        assert warm._find(plan) is None
        (tmp_path / "saved").chmod(0o777)
        assert open_warm_starts(configure(tmp_path), runtime) is None
    finally:
        runtime.close()


async def test_a_sandbox_that_starts_while_the_supervisor_stops_is_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of making checkpoints and the end of the sandboxes one that was lost may begin again: it finds
    its checkpoint, and the stop stays an orderly one."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        warm, plan = make(tmp_path, runtime)
        monkeypatch.setattr(warm, "key", lambda _spec: "k" * 64)
        with warm.store.draft() as draft:
            (draft / "pages.img").write_bytes(b"pages")
            warm.store.keep(draft, "k" * 64, 1.0)
        warm.close()
        found = warm._find(plan)
        assert found is not None
        found.verified()
    finally:
        runtime.close()


def test_a_checkpoint_that_was_replaced_after_it_was_verified_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that waited may have the weights of one checkpoint and the image of the next under the same name: a
    copy of it is given up, also where the bytes are equal. Control: the next start finds the new one whole."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        warm, plan = make(tmp_path, runtime)
        monkeypatch.setattr(warm, "key", lambda _spec: "k" * 64)

        def find() -> SavedStart:
            with warm.store.draft() as draft:
                (draft / "weights").write_bytes(b"weights")
                warm.store.keep(draft, "k" * 64, 1.0)
            found = warm._find(plan)
            assert found is not None
            return found

        found = find()
        found.verified()
        warm.store.drop("k" * 64)
        again = find()
        with pytest.raises(CheckpointError, match="was replaced"):
            found.verified()
        again.verified()
        warm.store.drop("k" * 64)
        with pytest.raises(CheckpointError, match="was replaced"):
            again.verified()
    finally:
        runtime.close()


def test_only_models_that_may_sleep_are_saved_with_their_engine(tmp_path: Path) -> None:
    """None of a model that is always kept, of a text sandbox, of a tenant's own, or of more than the bound; the control
    has one."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    try:
        _, plan = make(tmp_path, runtime, Role.ENGINE, keep="while_used")
        assert len(starts(plan)) == 2, "the control"
        assert len(starts(replace(plan, ahead_bytes=MOST_AHEAD_BYTES + 1))) == 1
        for role, tenant, keep in ((Role.ENGINE, "", "always"), (Role.TEXT, "", "never"), (Role.ENGINE, "t", "never")):
            _, plan = make(tmp_path, runtime, role, tenant, keep)
            assert starts(plan) == (plan,)
    finally:
        runtime.close()


class Filler:
    """Stands in for the template: writes an image, after what somebody does with the model's files meanwhile."""

    def __init__(self, meddle: Callable[[], object] = lambda: None) -> None:
        self.meddle = meddle
        self.stopped_by: list[threading.Event] = []

    def __call__(self, _runtime: Any, _spec: Any, folder: Path, *, stop: threading.Event, **_: Any) -> None:
        """What ``save_template`` does."""
        self.stopped_by.append(stop)
        self.meddle()
        if stop.is_set():
            raise SandboxStartError("a template did not come to the point where it waits")
        (folder / "pages.img").write_bytes(b"pages")


async def made_all(warm: WarmStarts) -> None:
    """Have everything made that was asked for."""
    warm._wanted.put_nowait(None)
    await warm.run()


def saved_keys(warm: WarmStarts) -> set[str]:
    """Names of the checkpoints that there are."""
    return set(os.listdir(warm.store.root))


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WarmStarts, BootPlan]]:
    """Warm starts without sandboxes, and the plan of an engine of a model of its own folder that may sleep."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    monkeypatch.setattr(UnsafeRuntime, "identity", lambda _self, spec: repr(spec.argv))
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 32 << 30))
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler())
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    config = configure(tmp_path, "while_used", folder)
    warm = open_warm_starts(config, runtime)
    assert warm is not None
    files = read_model("athanor-mini", folder)
    plan = plan_boot(config, config.models[0], files, runtime, Role.ENGINE)
    # Thousands of files of Python's take seconds to look at, and nothing here depends on them.
    mounts = tuple(one for one in plan.spec.mounts if one.source.is_relative_to(tmp_path))
    spec = replace(plan.spec, rootfs=replace(plan.spec.rootfs, mounts=()), mounts=mounts)
    try:
        yield warm, replace(plan, spec=spec)
    finally:
        runtime.close()


def changed_and_put_back(path: Path, *, whole_folder: bool = False) -> None:
    """Other bytes of the same size in the file, or in a folder in its folder's place, and the good ones again, with the
    times of content as they were."""
    if whole_folder:
        aside, other = path.parent.with_suffix(".aside"), path.parent.with_suffix(".other")
        shutil.copytree(path.parent, other, dirs_exist_ok=True)
        for source, target in ((path.parent, aside), (other, path.parent), (path.parent, other), (aside, path.parent)):
            source.rename(target)
        return
    found, data = path.stat(), path.read_bytes()
    for content in (bytes(len(data)), data):
        path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("whole_folder", [False, True])
def test_weights_that_nobody_checked_are_in_no_checkpoint(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch, whole_folder: bool
) -> None:
    """Weights that are swapped while the template loads them and put back afterwards, with their size and the time of
    their content, leave no checkpoint. Controls: that of the imports alone, and one where nothing changes, are kept."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    (weights,) = (path for name, path in plan.files.engine if name.endswith(".safetensors"))  # type: ignore[union-attr]
    meddle = Filler(lambda: changed_and_put_back(weights, whole_folder=whole_folder))
    monkeypatch.setattr("appliance.supervisor.templates.save_template", meddle)
    with pytest.raises(CheckpointError, match="have changed"):
        warm.take(with_model, 1.0)
    assert os.listdir(warm.store.root) == []
    assert warm.take(imports, 1.0) is not None
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler())
    assert warm.take(with_model, 1.0) is not None


def test_a_template_loads_no_model_that_was_not_pinned(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """Files that are not the pinned ones, or are not those of the start any more, are not loaded to be saved."""
    warm, plan = ahead
    with_model, _ = starts(plan)
    with pytest.raises(CheckpointError, match="pins"):
        warm.take(replace(with_model, pinned="0" * 64), 1.0)
    (weights,) = (path for name, path in plan.files.engine if name.endswith(".safetensors"))  # type: ignore[union-attr]
    found = weights.stat()
    weights.write_bytes(bytes(found.st_size))
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(CheckpointError, match="not what it was at the start"):
        warm.take(with_model, 1.0)
    assert os.listdir(warm.store.root) == []


def test_a_checkpoint_with_a_model_needs_room_for_all_of_it(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with the least that is left free and little more no template with a model is started. Control: that of
    the imports alone is made."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=(1 << 30) + 1))
    with pytest.raises(CheckpointError, match="are free"):
        warm.take(with_model, 1.0)
    assert warm.take(imports, 1.0) is not None


def told_a_form(plan: BootPlan) -> BootPlan:
    """A plan that tells the engine the form of an earlier trial."""
    return replace(plan, configuration=plan.configuration.replace(b'"form": ""', b'"form": "avx2"'))


@pytest.mark.parametrize("life", ["the same", "another", "another, and a form was tried", "the same, other files"])
async def test_what_leaves_takes_its_checkpoint_with_the_model_along(
    ahead: tuple[WarmStarts, BootPlan], life: str
) -> None:
    """A model that is taken away leaves neither of its checkpoints, whether this life or an earlier one has made them,
    also under the name of a form, also where its files are others by now. Control: both were there."""
    warm, plan = ahead
    told = told_a_form(plan) if "form" in life else plan
    assert ("form" in life) == (told != plan)
    for start in starts(told):
        warm.take(start, 1.0)
    assert len(saved_keys(warm)) == 2, "the control"
    if "another" in life:
        warm = WarmStarts(warm.store, warm._runtime, warm.run_dir)
        warm.told = told_a_form if "form" in life else warm.told
    with_model = warm.key(starts(told)[0].spec)
    if "files" in life:
        (plan.files.folder / "config.json").touch()  # type: ignore[union-attr]
        warm._listed = ListedFolders()
    warm.leave([plan])
    await warm.forget([plan], [])
    assert with_model not in saved_keys(warm)
    assert ("files" in life) or not saved_keys(warm)


async def test_a_changed_model_leaves_the_checkpoint_that_it_had(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """The model comes again with another configuration, as without an adapter. The new one's checkpoint stays, also
    where it is made before the old one's goes, and the old one's goes, also where it is made too late. What both begin
    with stays."""
    warm, old = ahead
    new = replace(old, configuration=old.configuration.replace(b'"max_num_seqs": ', b'"max_num_seqs": 1'))
    for start in starts(old):
        warm.take(start, 1.0)
    warm.leave([old])
    assert warm.take(starts(new)[0], 1.0, 1) is not None
    await warm.forget([old], [new])
    assert saved_keys(warm) == {warm.key(start.spec) for start in starts(new)}
    warm.leave([new])
    assert warm.take(starts(replace(new, name=old.name, configuration=b"{}"))[0], 1.0, 1) is not None, "it is late"
    await warm.forget([new], [old])
    assert saved_keys(warm) == {warm.key(old.spec)}


async def test_what_left_while_it_waited_gets_no_template(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """A template that was asked for before a model left is not made when another of its name has come. Control: that
    of the one that came is."""
    warm, old = ahead
    new = replace(old, configuration=old.configuration.replace(b'"max_num_seqs": ', b'"max_num_seqs": 1'))
    warm.ask(old, 1.0)
    warm.leave([old])
    warm.ask(new, 1.0)
    await made_all(warm)
    assert saved_keys(warm) == {warm.key(start.spec) for start in starts(new)}


async def test_what_was_put_off_does_not_count_as_made(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the memory is short, the checkpoint with the model is made once it is there. Control: failures
    count, and end it."""
    warm, plan = ahead
    warm.take(plan, 1.0)
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 0))
    for _ in range(MOST_TEMPLATES + 1):
        warm.ask(plan, 1.0)
        await made_all(warm)
    monkeypatch.setattr("appliance.supervisor.warm.machine_memory", lambda: Memory(64 << 30, 32 << 30))
    failing = Filler(lambda: changed_and_put_back(plan.files.folder / "config.json"))  # type: ignore[union-attr]
    monkeypatch.setattr("appliance.supervisor.templates.save_template", failing)
    for _ in range(MOST_TEMPLATES - 1):
        warm.ask(plan, 1.0)
        await made_all(warm)
    assert len(saved_keys(warm)) == 1
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler())
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert len(saved_keys(warm)) == 2
    warm.ask(plan, 1.0)
    assert warm._wanted.empty(), "three were made or failed"


async def test_a_template_with_a_model_makes_way_for_wakes(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is begun with memory that a wake may need, and one under way, also one whose files are being checked, is
    given up when a model wakes that needs its memory, without a trace and uncounted. Controls: beside a wake that
    leaves it enough one is made, and that of the imports alone goes on."""
    warm, plan = ahead
    with_model, imports = starts(plan)
    warm.reserved = lambda: 32 << 30
    assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler(warm.make_way))
    assert warm.take(imports, 1.0) is not None
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert (saved_keys(warm), warm._asked[plan.name]) == ({warm.key(imports.spec)}, 0)

    def wake_needs(memory: int) -> None:
        warm.reserved = lambda: memory
        warm.make_way_for_wake()

    def checked_meanwhile(_plan: BootPlan) -> dict[Path, Any]:
        wake_needs(32 << 30)
        return {}

    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler(lambda: wake_needs(32 << 30)))
    assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    with monkeypatch.context() as checking:  # Which may read all weights: a wake begins meanwhile.
        checking.setattr("appliance.supervisor.templates.save_template", Filler())
        checking.setattr("appliance.supervisor.warm._checked", checked_meanwhile)
        assert warm.take(with_model, 1.0) is None
    warm.reserved = lambda: 0
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler(lambda: wake_needs(1 << 30)))
    assert warm.take(with_model, 1.0) is not None


def test_a_file_written_in_place_is_noticed_at_the_end(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file below a folder that is written while the template starts, without a change of its folder, leaves no
    checkpoint. Control: the next one is kept, under the name that it has then."""
    warm, plan = ahead
    (inside := plan.files.folder.parent / "below").mkdir()  # type: ignore[union-attr]
    (inside / "file").write_text("one")
    plan = replace(plan, spec=replace(plan.spec, mounts=(*plan.spec.mounts, Mount(inside, "/below"))))
    warm.key(plan.spec)
    filler = Filler(lambda: (inside / "file").write_text("other"))
    monkeypatch.setattr("appliance.supervisor.templates.save_template", filler)
    with pytest.raises(CheckpointError, match="have changed"):
        warm.take(plan, 1.0)
    monkeypatch.setattr("appliance.supervisor.templates.save_template", Filler())
    made = warm.take(plan, 1.0)
    assert made is not None and warm.store.find(warm.key(plan.spec)) == made


def test_a_checkpoint_is_read_once_for_each_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that begins anew reads no checkpoint that the one before it has found whole, and reads one whose
    file was written since (control): damage is found."""
    runtime, read = UnsafeRuntime(tmp_path / "unsafe"), list[str]()
    verify = Checkpoint.verify

    def counted(checkpoint: Checkpoint) -> None:
        read.append(checkpoint.key)
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", counted)
    try:
        warm, _ = make(tmp_path, runtime)
        with warm.store.draft() as draft:
            (draft / "pages.img").write_bytes(b"pages")
            made = warm.store.keep(draft, "k" * 64, 1.0)
        for _ in range(2):
            warm._reader.begin(made).result()
        again = WarmStarts(warm.store, runtime, tmp_path)
        again._reader.begin(made).result()
        assert read == [made.key]
        (made.folder / "pages.img").write_bytes(b"pagez")
        with pytest.raises(CheckpointError, match="damaged"):
            WarmStarts(warm.store, runtime, tmp_path)._reader.begin(made).result()
    finally:
        runtime.close()


async def test_a_start_removes_what_no_model_can_use(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """What was made of files that the model no longer has, or by a release without labels, goes at a start; what the
    models that there are begin with stays, and so does what another supervisor made, also of the same model. With a
    model whose files cannot be looked at nothing goes, nor where nobody says which models there are."""
    warm, plan = ahead
    run_dir = str(warm.run_dir)
    labels = {
        "a": Label("engine", plan.model, run_dir, 1.0),
        "b": Label(),
        "c": Label("engine", plan.model, "/run/another", 1.0),
        "d": Label("text", "", run_dir, 1.0),
    }
    for key, label in labels.items():
        with warm.store.draft() as draft:
            (draft / "pages.img").write_bytes(b"pages")
            warm.store.keep(draft, key * 64, 1.0, label)
    for start in starts(plan):
        assert warm.take(start, 1.0) is not None
    used = {warm.key(start.spec) for start in starts(plan)}
    assert len(used) == 2
    every = {key * 64 for key in labels} | used
    await made_all(warm)
    assert saved_keys(warm) == every, "nobody says which models there are"
    gone = replace(plan, spec=replace(plan.spec, mounts=(*plan.spec.mounts, Mount(Path("/none/here"), "/model/none"))))
    warm.plans = lambda: (plan, gone)
    await made_all(warm)
    assert saved_keys(warm) == every, "files that cannot be looked at"
    warm.plans = lambda: (plan,)
    await made_all(warm)
    assert saved_keys(warm) == {"c" * 64, "d" * 64} | used


async def test_what_sleeps_since_the_start_is_told_with_its_checkpoints(ahead: tuple[WarmStarts, BootPlan]) -> None:
    """Of a model that nobody has asked for since the start it is told which checkpoints there are, and that what is not
    there waits for a request; once a sandbox has looked for one (the control), that it is made soon."""
    warm, plan = ahead
    place, warm.plans = f"engine:{plan.model}", lambda: (plan,)
    made = warm.take(starts(plan)[0], 1.0)
    assert made is not None
    warm.looked_for.clear()
    await made_all(warm)
    told = checkpoint_state(warm)
    assert told.kept[place][0] == made.size and place not in told.problems
    warm.store.drop(made.key)
    assert checkpoint_state(warm).problems[place] == NOT_STARTED
    warm._find(starts(plan)[0])
    assert "once everything serves" in checkpoint_state(warm).problems[place], "the control"


async def test_what_failed_for_a_model_goes_with_it(
    ahead: tuple[WarmStarts, BootPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for which a model has no checkpoint is not told of another that comes under its name, also where the
    model left while its template was made. Control: while it stays the reason is there."""
    warm, plan = ahead
    of = place_of(starts(plan)[0])
    assert of == ("engine", plan.model)

    def fails(_runtime: Any, _spec: Any, _folder: Path, **_: Any) -> None:
        if meddle:
            warm.leave([plan])
        raise OSError(28, "a template has no room")

    meddle = False
    monkeypatch.setattr("appliance.supervisor.templates.save_template", fails)
    monkeypatch.setattr("appliance.supervisor.warm.starts", lambda plan: starts(plan)[:1])
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert "no room" in warm.problems[of], "the control"
    warm.leave([plan])
    assert of not in warm.problems
    meddle = True
    warm.ask(plan, 1.0)
    await made_all(warm)
    assert of not in warm.problems
