"""Boot of one sandbox: from a plan to a sandbox that has given a real token, or to nothing. Blocks; called in
threads."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog

from appliance.common.adapter_files import CONFIG_FILE
from appliance.common.card_table import CardUse
from appliance.common.catalog import ModelFiles
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.control import COLD, RESTORED
from appliance.common.errors import StartError
from appliance.common.model_memory import model_need
from appliance.common.sleep_rules import ALWAYS
from appliance.supervisor.gate import Latch, check_model
from appliance.supervisor.gpu import Cards, EngineOnCard, guest_gpu_kernels, with_gpu
from appliance.supervisor.layout import FOLDERS, GUEST_ADAPTERS, GUEST_KERNELS, engine_place, role_threads, sandbox_spec
from appliance.supervisor.ranks import rank_problem
from appliance.supervisor.sandbox_output import claimed, last_words, line_logger
from appliance.supervisor.saved_start import SavedStart
from engine.config import EngineConfig, TextConfig
from isolation.errors import SandboxStartError
from isolation.gvisor.runtime import Runtime, Sandbox
from isolation.gvisor.spec import SandboxSpec
from isolation.host.locked_file import LockedFile
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.errors import AttachError, PeerGoneError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import NAMESPACE_KEY_BYTES, Configure, EngineReady, Failed, Hello, Role, TextReady
from isolation.ipc.sampling import Sampling
from isolation.ipc.segment import standard_layout
from isolation.ipc.text import Encode, Encoded, SourceKind

log = structlog.get_logger()

CONNECT_TIMEOUT_S = 60.0
"""Seconds from start to connection: the guest imports torch first, 2-5 s in gVisor, more on a busy machine."""

LOAD_TIMEOUT_S = 600.0
"""Seconds from configuration to ready: weights are read and warmed."""

PROBE_TIMEOUT_S = 60.0
"""Seconds for the first real token of a large model on a slow machine."""

END_TOLD_S = 5.0
"""Most seconds from the end of a guest's channel to that of its sandbox, so that its last output is read."""

SLICE_S = 0.25
"""Seconds between two looks whether the sandbox still lives, during a wait."""

PROBE_ID = 1
"""Wire id of the readiness probe; the gateway's ids start far above."""

MAX_VOCABULARY = 1 << 20
"""Most entries of a vocabulary; the largest published ones have a quarter of it."""

MAX_NAME_CHARS = 16
"""Characters of the model's name in a sandbox's: the name is part of a socket's path (108 bytes in all)."""

OWN_NAME_CHARS = 9
OWN_TAG_CHARS = 13
"""Characters of the model's name, and of the digest that tells one tenant's sandbox from all others, in its name."""

SOCKET_NAME = "host.sock"
"""The socket that the guest connects to, in its directory mounted at /ipc."""


@dataclass(frozen=True, slots=True)
class BootPlan:
    """Plan of a boot; made once from the configuration, used at every boot."""

    name: str
    model: str
    role: Role
    spec: SandboxSpec
    socket_dir: Path
    configuration: bytes
    embeds: bool = False
    """Whether the engine gives vectors."""
    tenant: str = ""
    """Tenant that the sandbox belongs to; empty: shared."""
    spills: bool = False
    """Whether KV may leave the engine, over a second channel."""
    files: ModelFiles | None = None
    """The model's files, checked before each boot."""
    pinned: str = ""
    """Digest that the files must have; empty: any."""
    threads: str = ""
    """Number of the engine's threads with its reason, for people; empty for a text sandbox."""
    card: CardUse | None = None
    """What the engine may hold of a GPU; None without one."""
    ahead_bytes: int = 0
    """Memory that the engine takes with its model, where a checkpoint may hold both (``warm.ahead``); 0: none may."""
    ranks: int = 1
    """Processes that compute together in the engine."""

    @property
    def digest(self) -> str:
        """Digest of the model's files."""
        return "" if self.files is None else self.files.digest

    @property
    def role_name(self) -> str:
        """``engine`` or ``text``."""
        return self.role.name.lower()


@dataclass(slots=True)
class Booted:
    """A ready sandbox. ``channel`` is None once the gateway has it."""

    sandbox: Sandbox
    channel: Channel | None
    socket_dir: Path
    layout: str
    ready: dict[str, int]
    boot_s: float
    spill: Channel | None = None
    """The engine's second channel; None once a port has it."""
    start: str = COLD
    """How it began: a constant of ``appliance.common.control``."""
    said: str = ""
    """Last line of its output when it became ready."""
    computes: str = ""
    """What an engine says that it computes with; a claim, for people."""
    ahead: bool = False
    """Whether it began with its model loaded."""
    weights: LockedFile | None = None
    """Its weights, where it has them mapped from a file; None once they may leave memory."""

    def describe_end(self) -> str:
        """Cause of its end, for people."""
        self.sandbox.wait(1.0)
        ending = self.sandbox.ending()
        # What it said of its start explains no death.
        return (ending.reason if ending is not None else "was ended") + last_words(self.sandbox, 1, self.said)


def plan_boots(
    config: ApplianceConfig, model: ModelConfig, files: ModelFiles, runtime: Runtime, cards: Cards | None = None
) -> tuple[BootPlan, ...]:
    """Plans of the shared sandboxes of one model: engine and text sandbox, or the latter alone where the engine is
    outside of the appliance; ``cards`` as in ``plan_boot``."""
    roles = (Role.TEXT,) if model.external is not None else (Role.ENGINE, Role.TEXT)
    return tuple(plan_boot(config, model, files, runtime, role, cards=cards) for role in roles)


def plan_boot(
    config: ApplianceConfig,
    model: ModelConfig,
    files: ModelFiles,
    runtime: Runtime,
    role: Role,
    tenant: str = "",
    cards: Cards | None = None,
) -> BootPlan:
    """Plan of one sandbox of one model; a tenant's own differs from the shared one by its name, NUMA node and card.
    ``cards``: GPUs of this machine, with what engines hold of them; None: nothing is held.

    Raises:
        StartError: the model is to have a GPU that this machine cannot give, or ranks that its cores or its own shape
            do not allow.
    """
    name = sandbox_name(model.name, role, tenant)
    socket_dir = config.run_dir / "ipc" / name
    threads = role_threads(config, role, engine_place(config, model, tenant), model.ranks)
    if problem := rank_problem(model, threads):
        raise StartError(problem)
    spec = sandbox_spec(config, files, role, name, socket_dir, threads)
    if runtime.fills_folders:
        spec = replace(spec, folders=FOLDERS[role])
    on_card = EngineOnCard(spec, model)
    if role is Role.ENGINE:
        on_card = with_gpu(spec, config, model, files, runtime, Cards() if cards is None else cards)
        spec, model = on_card.spec, on_card.model
    guest_model = runtime.guest_path(spec, "/model")
    spills = not tenant and role is Role.ENGINE and model.runner == "model" and config.sandbox.spill is not None
    spills = spills and model.ranks == 1
    if role is Role.ENGINE:
        configuration = _engine_configuration(config, model, files, runtime, spec, threads.count, spills=spills)
    else:
        configuration = TextConfig(
            model_dir=guest_model, wipe_memory=config.wipe_memory, memory_bytes=runtime.told_memory(spec)
        ).to_json()
    return BootPlan(
        name,
        model.name,
        role,
        spec,
        socket_dir,
        configuration,
        model.runner in ("embed", "classify"),
        tenant,
        spills,
        files,
        model.digest,
        threads.reason,
        on_card.use,
        0 if tenant or spills or on_card.use is not None else _ahead_bytes(model, files, role),
        threads.ranks,
    )


def _ahead_bytes(model: ModelConfig, files: ModelFiles, role: Role) -> int:
    """Memory of an engine whose model may sleep, which a checkpoint may hold; 0 for others: what is always there is
    loaded once, and ranks have shared memory with their host's help."""
    wanted = role is Role.ENGINE and model.keep != ALWAYS and model.runner != "null" and model.ranks == 1
    return model_need(model, files.engine).about if wanted else 0


def _engine_configuration(
    config: ApplianceConfig,
    model: ModelConfig,
    files: ModelFiles,
    runtime: Runtime,
    spec: SandboxSpec,
    threads: int,
    *,
    spills: bool,
) -> bytes:
    """Tell an engine what it serves; ``model`` has what its card decides."""
    return EngineConfig(
        model_dir=runtime.guest_path(spec, "/model"),
        model_digest=files.digest,
        dtype=model.dtype,
        threads=threads,
        kv_bytes=model.kv_bytes,
        block_size=model.block_size,
        max_context=model.max_context,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        runner=model.runner,
        pooling=model.pooling,
        step_us=model.step_us,
        kernels="" if config.sandbox.kernels is None else runtime.guest_path(spec, GUEST_KERNELS),
        quantization="none" if model.weights == "stored" else model.weights,
        spill=spills,
        backend=model.engine_backend,
        gpu_kernels=guest_gpu_kernels(spec, runtime),
        gpu_share=model.gpu_share,
        palette=model.gpu_palette,
        adapters=_adapter_places(files, spec, runtime),
        adapter_bytes=model.adapter_bytes,
        tensor_parallel=model.tensor_parallel,
        pipeline_parallel=model.pipeline_parallel,
        expert_parallel=model.expert_parallel,
    ).to_json()


def _adapter_places(files: ModelFiles, spec: SandboxSpec, runtime: Runtime) -> str:
    """Tell an engine where each adapter's description is, by digest."""
    place = {one.digest: f"{GUEST_ADAPTERS}/{one.digest}/{CONFIG_FILE}" for one in files.adapters}
    found = {digest: str(Path(runtime.guest_path(spec, target)).parent) for digest, target in place.items()}
    return json.dumps(found) if found else ""


def sandbox_name(model: str, role: Role, tenant: str = "") -> str:
    """Short name of lower-case letters, digits and hyphens; it differs by model and tenant and does not show the
    tenant's name."""
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in model.lower()).strip("-")
    if tenant:
        tag = hashlib.sha256(f"{model}\0{tenant}".encode()).hexdigest()[:OWN_TAG_CHARS]
        plain = plain[:OWN_NAME_CHARS]
    else:
        tag = "" if plain == model and len(plain) <= MAX_NAME_CHARS else hashlib.sha256(model.encode()).hexdigest()[:6]
    return "-".join(part for part in (role.name.lower(), plain[:MAX_NAME_CHARS].strip("-"), tag) if part)


def boot(
    plan: BootPlan, runtime: Runtime, stop: threading.Event, saved: SavedStart | None = None, gate: Latch | None = None
) -> Booted:
    """Boot, connect, configure, load, and get one real token; ``stop`` ends it within ``SLICE_S`` and a kill.

    Args:
        plan: what.
        runtime: where.
        stop: asks to give it up.
        saved: begin with what was saved of a program that had come so far that it waited for its host.
        gate: holds the program back; None: nothing does.

    Raises:
        IsolationError, ProtocolError: it did not come up, or its model's files are not those that were pinned or there
            at the start; nothing of it is left.
    """
    held = Latch() if gate is None else gate

    def hold() -> None:
        if held.wait(plan.name, stop):
            check_model(plan.files, plan.pinned)  # Meanwhile its files may have changed.

    check_model(plan.files, plan.pinned)
    began, waited_s = time.monotonic(), held.waited_s
    channels: list[Channel] = []
    # A supervisor that was killed while it listened has left its socket here, and on that nobody can listen again.
    shutil.rmtree(plan.socket_dir, ignore_errors=True)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, plan.socket_dir, ignore_errors=True)
        plan.socket_dir.mkdir(parents=True, exist_ok=True)
        plan.socket_dir.chmod(0o755)
        with Listener(str(plan.socket_dir / SOCKET_NAME)) as listener:
            spec, image = (plan.spec, None) if saved is None else (saved.spec(plan.spec), saved.folder)
            sandbox = runtime.boot(spec, on_line=line_logger(plan.name), image=image, hold=hold)
            undo.callback(_abandon, channels, sandbox)
            began += held.waited_s - waited_s  # For memory of others; no part of a boot.
            until = None if saved is None else began + saved.patience_s
            booting = _Booting(plan, sandbox, stop, until)
            expected = None if runtime.label.startswith("unsafe") else sandbox.peer_pids
            channels.append(booting.connect(listener, expected, plan.role))
            if saved is not None:
                saved.verified()
            booting.configure(channels[0])
            booting = booting.told(saved)
            if plan.spills:
                channels.append(booting.connect(listener, expected, Role.SPILL))
        ready = booting.await_ready(channels[0])
        booting.probe(channels[0], ready)
        sandbox.settle()
        weights = None if saved is None else saved.lock_weights()
        undo.pop_all()
    numbers = {name: int(value) for name, value in asdict(ready).items()}
    layout = standard_layout().encode().hex()
    spill = channels[1] if plan.spills else None
    took = time.monotonic() - began
    start, tail = COLD if saved is None else RESTORED, sandbox.output_tail()
    said, computes = tail[-1] if tail else "", claimed(tail)
    return Booted(
        sandbox, channels[0], plan.socket_dir, layout, numbers, took, spill, start, said, computes, weights=weights
    )


def end(booted: Booted) -> None:
    """End a sandbox and remove all of it."""
    if booted.channel is not None:
        booted.channel.close()
        booted.channel = None
    if booted.spill is not None:
        booted.spill.close()
        booted.spill = None
    try:
        _remove(booted.sandbox)
    finally:
        if booted.weights is not None:
            booted.weights.close()
            booted.weights = None
        shutil.rmtree(booted.socket_dir, ignore_errors=True)


def _abandon(channels: list[Channel], sandbox: Sandbox) -> None:
    for channel in channels:
        channel.close()
    _remove(sandbox)


def _remove(sandbox: Sandbox) -> None:
    sandbox.kill()
    sandbox.wait(20.0)
    sandbox.delete()


@dataclass(frozen=True, slots=True)
class _Booting:
    """Sandbox that is booting. Every wait looks whether it lives and whether the boot was abandoned."""

    plan: BootPlan
    sandbox: Sandbox
    stop: threading.Event
    until: float | None = None
    """Deadline on the monotonic clock; None for none."""

    def connect(self, listener: Listener, expected: frozenset[int] | None, role: Role) -> Channel:
        """Wait for the guest's connection; gives the channel."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            self._check()
            try:
                return listener.accept(expected, SLICE_S, standard_layout(), role)
            except AttachError:
                if time.monotonic() > deadline:
                    raise SandboxStartError(
                        f"sandbox {self.plan.name} did not connect within {CONNECT_TIMEOUT_S:g} s"
                        f"{last_words(self.sandbox)}"
                    ) from None

    def configure(self, channel: Channel) -> None:
        """Greet the guest and send its configuration."""
        self._await(channel, lambda message: isinstance(message, Hello), CONNECT_TIMEOUT_S)
        channel.send(Configure(self.plan.configuration))

    def told(self, saved: SavedStart | None) -> _Booting:
        """Return the boot of a sandbox that has its configuration. One that loads its model now does what a started one
        does, and the model may be larger than that of the sandbox that was saved, where that was of another one: it has
        no deadline as a copy."""
        other = saved is not None and not saved.with_model and self.plan.spec.folders
        return replace(self, until=None) if other else self

    def await_ready(self, channel: Channel) -> EngineReady | TextReady:
        """Wait until it has loaded; gives its report."""
        ready = self._await(channel, lambda message: isinstance(message, EngineReady | TextReady), LOAD_TIMEOUT_S)
        assert isinstance(ready, EngineReady | TextReady)
        if ready.vocab_size > MAX_VOCABULARY:
            raise SandboxStartError(
                f"sandbox {self.plan.name} claims {ready.vocab_size} token ids; at most {MAX_VOCABULARY} are served"
            )
        return ready

    def probe(self, channel: Channel, ready: EngineReady | TextReady) -> None:
        """Get a real token, or real ids, which makes a sandbox ready. Nothing of it is kept in the engine."""
        if isinstance(ready, TextReady):
            channel.send(Encode(PROBE_ID, SourceKind.TEXT, b"ready?", 64))
            self._await(channel, lambda message: isinstance(message, Encoded), PROBE_TIMEOUT_S)
            return
        prompt = array("I", [ready.vocab_size // 2])
        namespace = secrets.token_bytes(NAMESPACE_KEY_BYTES)
        if self.plan.embeds:
            channel.send(Embed(PROBE_ID, namespace, prompt))
        else:
            channel.send(
                Submit(PROBE_ID, namespace, prompt, 1, Sampling(temperature=0.0), ignore_eos=True, retain=False)
            )
        self._await(channel, _has_token, PROBE_TIMEOUT_S)

    def _await(self, channel: Channel, wanted: Callable[[Message], bool], timeout_s: float) -> Message:
        """Wait for the first message of the wanted type; others are skipped, however many come.

        Raises:
            SandboxStartError: the sandbox ended or refused the probe, the boot was abandoned, or time ran out.
            ProtocolError: it broke the protocol.
        """
        try:
            return self._listen(channel, wanted, time.monotonic() + timeout_s)
        except TimeoutError:
            raise SandboxStartError(f"sandbox {self.plan.name} did not answer within {timeout_s:g} s") from None
        except PeerGoneError:
            # That it ended says nothing; its last words say why.
            self.sandbox.wait(END_TOLD_S)
            self._check()
            raise

    def _listen(self, channel: Channel, wanted: Callable[[Message], bool], deadline: float) -> Message:
        while True:
            # One at a time: what comes behind the wanted message belongs to the next owner of the channel.
            messages = channel.receive(1)
            for message in messages:
                if wanted(message):
                    return message
                if _refuses(message):
                    raise SandboxStartError(f"sandbox {self.plan.name} cannot answer the simplest request")
            self._check()
            if time.monotonic() > deadline:
                raise TimeoutError
            if not messages:
                channel.wait(SLICE_S)

    def _check(self) -> None:
        if self.stop.is_set():
            raise SandboxStartError(f"sandbox {self.plan.name} was not wanted any more while it started")
        if self.until is not None and time.monotonic() > self.until:
            raise SandboxStartError(f"sandbox {self.plan.name} was restored and is not ready in time")
        if self.sandbox.poll() is not None:
            ending = self.sandbox.ending()
            reason = ending.reason if ending is not None else "ended"
            raise SandboxStartError(f"sandbox {self.plan.name} {reason} while starting{last_words(self.sandbox)}")


def _has_token(message: Message) -> bool:
    return isinstance(message, StepOutput) and PROBE_ID in message.requests


def _refuses(message: Message) -> bool:
    """Whether the probe was answered by a failure, so that waiting longer is useless."""
    if isinstance(message, StepOutput):
        return any(failure.request == PROBE_ID for failure in message.failures)
    return isinstance(message, Failed)
