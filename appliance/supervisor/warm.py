"""Warm starts: sandboxes that begin as copies of one that had imported everything and had served no tenant.

A *template* is a sandbox of the same spec whose socket directory is empty. Its program imports, finds no host, says so
and waits: there its memory is saved. It has had no key, request or descriptor of ours, and it has served nobody. It has
no file of a model either, so one checkpoint, the *base*, starts the sandboxes of all models: the folders in which
they have theirs are empty in it (``SandboxSpec.folders``). Where the runtime cannot fill folders at a restore, each
model has one of its own, by the same code.

That of a model that may sleep has loaded the model before, so that a wake need not prepare its weights again: its
configuration is an argument of its program then, and part of the checkpoint's name. A copy of a template connects, is
told everything, seeds its generators anew and locks itself down as a program does that was started. Templates are
started when everything serves, one at a time, with half a core.

Nothing depends on a checkpoint. What cannot be found, read or restored is dropped, and the sandbox starts cold.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from appliance.common.catalog import check_files
from appliance.common.config import ApplianceConfig
from appliance.common.control import FALLEN_BACK
from appliance.common.errors import ConfigError
from appliance.common.model_digests import Identity, identity_of
from appliance.common.model_memory import machine_memory
from appliance.supervisor.boot import Booted, BootPlan, boot
from appliance.supervisor.gate import Latch
from appliance.supervisor.saved_start import BaseTrust, BrokenModels, CheckpointReader, SavedStart
from appliance.supervisor.templates import (
    NAME_CHARS,
    key_of,
    label_of,
    not_started,
    place_of,
    save,
    start_is_ahead,
    start_is_base,
    starts,
    useless,
)
from isolation.errors import CheckpointError, IsolationError
from isolation.gvisor.checkpoint import Checkpoint, CheckpointStore, ListedFolders, open_store
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import SandboxSpec
from isolation.ipc.errors import ProtocolError

log = structlog.get_logger()

BEGIN_AFTER_S = 1.0
"""Seconds before each template is started, so that what has just become ready can answer its first requests."""

MOST_TEMPLATES = 3
"""Most templates of one sandbox in a supervisor's life: where no checkpoint ever serves, no more are made."""

AHEAD_FREE = 1.25
"""Memory that must be available for a template with a model, as a multiple of what it takes: it loads the model beside
the engine that serves, and is written to the disk through the page cache."""


class WarmStarts:
    """Store of checkpoints. ``boot`` and ``drop`` block and are called in threads; ``run`` is a task; ``ask`` and
    ``close`` are called from its loop."""

    def __init__(self, store: CheckpointStore, runtime: Runtime, run_dir: Path) -> None:
        self.store = store
        self._runtime = runtime
        self.run_dir = run_dir
        self.told: Callable[[BootPlan], BootPlan] = lambda plan: plan
        """What an engine of a plan is told (``Forms.told``); set by the owner."""
        self.reserved: Callable[[], int] = lambda: 0
        """Memory that wakes of models may need (``ModelKeepers.reserved``); set by the owner, called in threads."""
        self._wanted: asyncio.Queue[tuple[BootPlan, float, int] | None] = asyncio.Queue()
        """Plan, seconds of its cold start, and ``_left_of`` of its name when it was asked for."""
        self._asked: Counter[str] = Counter()
        """Templates of each sandbox that were made, failed, or wait for their turn."""
        self.trust = self._trust = BaseTrust()
        self._broken = BrokenModels()
        self.surroundings, self.shares = runtime.surroundings, runtime.fills_folders
        self.looked_for: dict[tuple[str, str], str] = {}
        """Name of the last checkpoint that a sandbox looked for or had made, or would look for, by role and model; no
        model: the base. Changed in threads: read a copy."""
        self.not_started: set[tuple[str, str]] = set()
        """Those that no sandbox has looked for, since models sleep since the start."""
        self.problems: dict[tuple[str, str], str] = {}
        """Why the last template of each was not made, or not kept, by role and model."""
        self.plans: Callable[[], tuple[BootPlan, ...]] | None = None
        """Plans of all models that there are, awake or asleep; set by the owner. None: not known."""
        self._left_of: Counter[str] = Counter()
        """How often a sandbox of each name has left: what was asked for before is of another."""
        self._making = asyncio.Lock()
        """Held while a checkpoint is made or removed."""
        self._stop = threading.Event()
        self._give_way = threading.Event()
        """Set to give up the template with a model that is under way."""
        self._under_way: BootPlan | None = None
        """Sandbox of the template with a model that is being made."""
        self._reader = CheckpointReader()
        self._listed = ListedFolders()
        self._ahead: dict[str, str] = {}
        """Name of the checkpoint with the model, by sandbox."""
        self._left_keys: set[str] = set()
        """Names of those of sandboxes that have left, until ``forget`` has removed them."""
        self._names = threading.Lock()
        """Held while ``_ahead``, ``_left_keys`` and ``_left_of`` change together."""

    def boot(self, plan: BootPlan, stop: threading.Event, gate: Latch | None = None) -> Booted:
        """Boot from a checkpoint where there is one, of those with the model first; without one where there is none,
        that fails, or the model is known to fail both ways. ``gate``: as ``boot``.

        Raises:
            IsolationError, ProtocolError: as ``boot``.
        """
        fallen, doubted = False, None
        model = plan.digest or plan.name, plan.role_name
        for start in () if self._broken.knows(*model) else starts(plan):
            saved = self._find(start)
            if saved is None:
                continue
            try:
                booted = boot(start if saved.with_model else plan, self._runtime, stop, saved, gate)
            except (IsolationError, ProtocolError, OSError) as error:
                if stop.is_set():
                    raise
                damage = saved.damage()
                log.warning(
                    "a checkpoint could not be used; the sandbox starts without",
                    sandbox=plan.name,
                    checkpoint=saved.checkpoint.key[:NAME_CHARS],
                    problem=str(damage or error),
                )
                fallen = True
                if start_is_base(start) and damage is None:  # A ``CheckpointError`` then: it was replaced.
                    doubted = None if isinstance(error, CheckpointError) else saved.checkpoint
                else:
                    self._drop_found(saved.checkpoint)
            else:
                if start_is_base(start):
                    self._trust.note_ready(saved.checkpoint.key, plan.name)
                booted.ahead = saved.with_model
                return booted
        try:
            booted = boot(plan, self._runtime, stop, gate=gate)
        except (IsolationError, ProtocolError, OSError):
            if doubted is not None and not stop.is_set():
                self._broken.note(*model)
            raise
        self._broken.forget(*model)
        # All models begin with the base: one that cannot start at all is no reason to make another.
        if doubted is not None and self._trust.is_at_fault(doubted.key, plan.name):
            self._drop_found(doubted)
        if fallen:
            booted.start = FALLEN_BACK
        return booted

    def _drop_found(self, checkpoint: Checkpoint) -> None:
        """Drop what failed, and nothing that was made in its place since."""
        if self.store.find(checkpoint.key) == checkpoint:
            self._trust.forget(checkpoint.key)
            self.store.drop(checkpoint.key)

    def boot_cold(self, plan: BootPlan, stop: threading.Event, gate: Latch | None = None) -> Booted:
        """Boot without a checkpoint, and drop those there are: one may be why sandboxes of this plan die again and
        again. The base of all models goes where it may be blamed (``BaseTrust``).

        Raises:
            IsolationError, ProtocolError: as ``boot``.
        """
        own = self._keys_of(plan, shared=False) | ({self._ahead.pop(plan.name, "")} - {""})
        # A model that fails cold as well is no witness against the base.
        shared = set() if self._broken.knows(plan.digest or plan.name, plan.role_name) else self._keys_of(plan) - own
        for key in own | {key for key in shared if self._trust.is_blamed(key, plan.name)}:
            self._trust.forget(key)
            self.store.drop(key)
        return boot(plan, self._runtime, stop, gate=gate)

    def _find(self, plan: BootPlan) -> SavedStart | None:
        """Checkpoint for this plan, whose reading has begun. Tenants' own sandboxes have none: copies share the
        original's memory layout, which must tell nothing about each other."""
        if plan.tenant:
            return None
        try:
            key = self.key(plan.spec)
        except OSError as error:
            log.warning("no checkpoint can be looked for", sandbox=plan.name, problem=str(error))
            return None
        if key:
            self.looked_for[place_of(plan)] = key
            self.not_started.discard(place_of(plan))
        checkpoint = self.store.find(key) if key else None
        if checkpoint is None or self._trust.is_avoided(key, plan.name):
            return None
        ahead = start_is_ahead(plan)
        if ahead:
            self._note_ahead(plan, key, self._left_of[plan.name])
        return SavedStart(checkpoint, self._reader.begin(checkpoint), ahead)

    def key(self, spec: SandboxSpec, listed: ListedFolders | None = None) -> str:
        """Name of the checkpoint of such sandboxes; empty where none can be made. ``listed``: what is known of folders;
        None: what earlier names were made of.

        Raises:
            OSError: a file of the sandbox is gone.
        """
        return key_of(self._runtime, spec, listed or self._listed)

    def ask(self, plan: BootPlan, cold_s: float) -> None:
        """Ask for a checkpoint for the next time, after a cold start."""
        if not plan.tenant and self._asked[plan.name] < MOST_TEMPLATES:
            self._asked[plan.name] += 1
            self._wanted.put_nowait((plan, cold_s, self._left_of[plan.name]))

    def leave(self, plans: Iterable[BootPlan]) -> None:
        """Note that sandboxes are gone, before others of their names begin; ``forget`` removes their checkpoints."""
        self.make_way()
        with self._names:
            for plan in plans:
                self._asked.pop(plan.name, None)
                self._trust.leave(plan.name)
                self.looked_for.pop((plan.role_name, plan.model), None)
                self.not_started.discard((plan.role_name, plan.model))
                self.problems.pop((plan.role_name, plan.model), None)
                self._left_of[plan.name] += 1
                self._left_keys |= {self._ahead.pop(plan.name, "")} - {""}

    async def forget(self, plans: Iterable[BootPlan], staying: Iterable[BootPlan]) -> None:
        """Remove the checkpoints of sandboxes that have left, also one that is being made, but for the base and for one
        that another which stays begins with: two models may have the same files."""
        async with self._making:
            await asyncio.to_thread(self._drop, tuple(plans), tuple(staying))

    def _drop(self, plans: tuple[BootPlan, ...], staying: tuple[BootPlan, ...]) -> None:
        with self._names:
            kept = {self._ahead.get(plan.name, "") for plan in staying}
            gone, self._left_keys = self._left_keys, set()
        for plan in plans:
            gone |= self._keys_of(plan, shared=False)
        for key in gone - kept.union(*map(self._keys_of, staying)):
            self.store.drop(key)

    def _keys_of(self, plan: BootPlan, *, shared: bool = True) -> set[str]:
        """Names of all checkpoints that a plan may begin with; none where its files are gone. ``shared``: the base
        too, which models that come later begin with."""
        found, told = set[str](), self.told(plan)
        for start in (*starts(plan), *(starts(told) if told != plan else ())):
            if shared or not start_is_base(start):
                with suppress(OSError):
                    found.add(self.key(start.spec))
        return found - {""}

    def _note_ahead(self, plan: BootPlan, key: str, left: int) -> None:
        """Note the checkpoint with the model of a sandbox; of one that has left meanwhile it is to be removed."""
        with self._names:
            if left == self._left_of[plan.name]:
                # One of other files than it has now goes with the next that leaves.
                self._left_keys |= {self._ahead.get(plan.name, key)} - {key}
                self._ahead[plan.name] = key
            else:
                self._left_keys.add(key)

    async def run(self) -> None:
        """Remove those that no model can use, and make the requested ones, one at a time, until ``close``."""
        if self.plans is not None:
            try:
                async with self._making:
                    await asyncio.to_thread(remove_useless, self, self.plans())
            except OSError as error:
                log.warning("no checkpoint is removed", problem=str(error))
        while (wanted := await self._wanted.get()) is not None:
            plan, cold_s, left = wanted
            counts, start = False, plan
            try:
                async with self._making:
                    for start in reversed(starts(plan)):
                        if left == self._left_of[plan.name]:
                            counts |= await asyncio.to_thread(self.take, start, cold_s, left) is not None
            except (IsolationError, OSError) as error:
                if self._stop.is_set():
                    return  # it was given up with everything else
                counts = True
                if left == self._left_of[plan.name]:
                    self.problems[place_of(start)] = str(error)
                log.warning("no checkpoint was made; starts stay cold", sandbox=plan.name, problem=str(error))
            if not counts and left == self._left_of[plan.name]:
                self._asked[plan.name] -= 1

    def take(self, plan: BootPlan, cold_s: float, left: int = 0) -> Checkpoint | None:
        """Start a template, save it, end it; None where that is impossible now or was done already. ``left``: as in
        ``_left_of`` when it was asked for.

        Raises:
            IsolationError, OSError: it failed; nothing of it is left.
        """
        if self._stop.wait(BEGIN_AFTER_S):
            return None
        # What was written in place since the folders were listed would be noticed by the second look alone.
        self._listed = ListedFolders()
        key, ahead = self.key(plan.spec), start_is_ahead(plan)
        if not key:
            return None
        if ahead:
            self._note_ahead(plan, key, left)
        self._give_way.clear()
        # Before the look for room: a wake that begins behind that look finds it, also while files are checked.
        self._under_way = plan if ahead else None
        try:
            made = self._make(plan, key, cold_s, ahead=ahead)
        finally:
            self._under_way = None
        if made is not None:
            self.problems.pop(place_of(plan), None)
            of = "all models" if start_is_base(plan) else plan.model
            log.info("checkpoint made", sandbox=plan.name, of=of, checkpoint=key[:NAME_CHARS], mib=made.size >> 20)
        return made

    def _make(self, plan: BootPlan, key: str, cold_s: float, *, ahead: bool) -> Checkpoint | None:
        """Make the checkpoint with this key; as ``take``."""
        # ``close`` sets the first of both first.
        if self._stop.is_set() or self.store.find(key) is not None or (ahead and not has_room(plan, self.reserved())):
            return None
        before = _checked(plan) if ahead else {}
        with self.store.draft(plan.ahead_bytes if ahead else 0) as draft:
            try:
                save(self._runtime, self.run_dir, plan, key, draft, self._give_way if ahead else self._stop)
            except IsolationError:
                if not ahead or not self._give_way.is_set() or self._stop.is_set():
                    raise
                log.info("a template with a model is given up for models that start", sandbox=plan.name)
                return None
            if self.key(plan.spec, ListedFolders()) != key or _identities(before) != before:
                raise CheckpointError("files of the sandbox have changed while its template started")
            made = self.store.keep(draft, key, cold_s, label_of(plan, self._runtime, self.run_dir))
            stamp = made.stamp()
            if stamp is not None and self.store.find(key) == made:  # Else another writer was faster.
                self._reader.note(made, stamp)
        return made

    def make_way(self) -> None:
        """Give up a template with a model that is under way: its memory is for models that start now."""
        self._give_way.set()

    def make_way_for_wake(self) -> None:
        """Give up a template with a model that is under way, unless the memory is enough for it beside the models that
        wake: where models take turns all the time, one that gave way to each wake would never be finished."""
        plan = self._under_way
        if plan is not None and not has_room(plan, self.reserved()):
            self.make_way()

    def close(self) -> None:
        """Give up what is being made; ``run`` ends when nothing of it is left. Sandboxes still start meanwhile, as
        those of a gateway that has just left do, and find what is there."""
        self._stop.set()
        self._give_way.set()
        self._wanted.put_nowait(None)


def remove_useless(warm: WarmStarts, plans: tuple[BootPlan, ...]) -> None:
    """Remove what no model that there is can begin with (``useless``), and note what those that sleep would begin
    with.

    Raises:
        OSError: the files of a model, or the store, cannot be looked at; nothing is removed.
    """
    every = [start for one in plans for plan in (one, warm.told(one)) for start in starts(plan)]
    found = [(place_of(start), warm.key(start.spec)) for start in every]
    kept = warm.store.kept()
    asleep = not_started(found, warm.looked_for.keys(), {one.key for one in kept})
    warm.not_started |= asleep.keys()
    warm.looked_for |= asleep
    for key in useless(kept, [(role, key) for (role, _), key in found], warm.run_dir):
        log.info("a checkpoint that no model can use is removed", checkpoint=key[:NAME_CHARS])
        warm.store.drop(key)


def has_room(plan: BootPlan, reserved: int) -> bool:
    """Return whether the memory for a template with the model is available, beside what wakes may need (``reserved``):
    no model is refused or put to sleep because of a template."""
    free = machine_memory().available - reserved
    if free < AHEAD_FREE * plan.ahead_bytes:
        log.info("no checkpoint with the model is made beside it", sandbox=plan.name, available_mib=free >> 20)
        return False
    return True


def open_warm_starts(config: ApplianceConfig, runtime: Runtime) -> WarmStarts | None:
    """Warm starts that the configuration asks for; None where it does not, or where the directory cannot be used."""
    directory = config.sandbox.checkpoints
    if directory is None:
        return None
    try:
        store = open_store(directory, config.sandbox.checkpoints_max_bytes)
        log.info("checkpoints are kept", directory=str(directory), at_most_mib=store.bound() >> 20)
        return WarmStarts(store, runtime, config.run_dir)
    except (CheckpointError, OSError) as error:
        log.error("checkpoints are off", directory=str(directory), problem=str(error))
        return None


def _checked(plan: BootPlan) -> dict[Path, Identity]:
    """Check the files that a template with the model loads, as before each boot; returns what ``_identities`` has to
    find once it is saved. What it has loaded outlives the files, so nothing may be in it that was not checked: the
    times of content, which are part of the checkpoint's name, can be set by anybody, those of change cannot.

    Raises:
        CheckpointError: a file is not the one that was pinned, signed or there at the start.
    """
    if plan.files is None:
        return {}
    hashed = (*plan.files.hashed, *(one for adapter in plan.files.adapters for one in adapter.hashed))
    # Before the check: what changes after this is noticed, whether the check reads the files again or not. A file may
    # also be replaced together with its folder, which leaves the file's own times alone.
    before = _identities(path for one in hashed for path in (one.path, one.path.parent))
    try:
        check_files(plan.files, plan.pinned)
    except ConfigError as error:
        raise CheckpointError(error.message) from error
    return before


def _identities(paths: Iterable[Path]) -> dict[Path, Identity]:
    """What tells files and folders from any others. Raises: OSError: one is gone."""
    return {path: identity_of(path.stat()) for path in paths}
