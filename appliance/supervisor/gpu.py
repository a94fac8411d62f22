"""GPUs of a model: from its configuration and the machine to what its engine's sandbox gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import structlog

from appliance.common.card_plan import CardPlan
from appliance.common.card_table import CardTable, CardUse, ModelOnCard, Placed
from appliance.common.catalog import ModelFiles
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.errors import StartError
from appliance.common.gpu_defaults import on_processor
from appliance.common.gpu_placement import DEFAULT_FOLDER, architecture_of, candidates, cards_of, kernel_command
from appliance.common.model_memory import files_bytes
from appliance.common.model_shape import read_shape
from isolation.errors import GpuError
from isolation.gpu.bundle_additions import gpu_access, plain_environment
from isolation.gpu.card_memory import with_memory
from isolation.gpu.gpu_facts import GpuFacts, look_at_gpus
from isolation.gpu.listed_drivers import listed_drivers
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import Mount, SandboxSpec
from isolation.image.manifest import KERNELS_DIR
from isolation.ipc.messages import Role

log = structlog.get_logger()

GUEST_GPU_KERNELS = "/gpu-kernels"
"""Path at which an engine finds kernels compiled for its GPU."""

COMPILED = "sm_*"
"""Names of the folders of compiled kernels, which begin with their architecture."""


class Cards:
    """Cards of this machine while engines are planned; looked at when the first engine with a GPU is. Blocks."""

    def __init__(
        self,
        using: Iterable[CardUse] = (),
        going: Iterable[str] = (),
        out: Mapping[int, str] = MappingProxyType({}),
        *,
        start: bool = False,
    ) -> None:
        """``using``: what engines hold now; ``going``: names of the engines among them that end before those that are
        planned begin; ``out``: why each card that no engine gets is given to none; ``start``: of the appliance, which a
        lost card does not keep from serving its other models."""
        self._using, self._going, self._out = tuple(using), frozenset(going), dict(out)
        self._start = start
        self._facts: GpuFacts | None = None
        self._table: CardTable | None = None

    @property
    def facts(self) -> GpuFacts:
        """Facts about the machine, the memory of its cards among them."""
        if self._facts is None:
            self._facts = with_memory(look_at_gpus())
            if self._facts.memory_problem:
                log.warning("the memory of the GPUs is not known", problem=self._facts.memory_problem)
        return self._facts

    def place(self, engine: str, model: ModelOnCard) -> Placed:
        """Give an engine its card; the next one finds it taken.

        Raises:
            StartError: there is no room.
        """
        if self._table is None:
            self._table = CardTable(cards_of(self.facts, self._using, self._out), self._using).without(self._going)
        self._table, placed = self._table.place(engine, model, self.candidates(model.config), silent=self._start)
        return placed

    def candidates(self, model: ModelConfig) -> tuple[int, ...]:
        """Return the indices of the cards that a model may use."""
        return candidates(self.facts, model, self._out)


@dataclass(frozen=True, slots=True)
class EngineOnCard:
    """What the plan of an engine gets from its card; without one, what it was."""

    spec: SandboxSpec
    model: ModelConfig
    """With what the configuration leaves to the card."""
    use: CardUse | None = None


def with_gpu(
    spec: SandboxSpec, config: ApplianceConfig, model: ModelConfig, files: ModelFiles, runtime: Runtime, cards: Cards
) -> EngineOnCard:
    """Plan an engine with its GPU, or unchanged.

    Args:
        spec: of the sandbox, without any.
        config: of the appliance.
        model: whose engine it is.
        files: of the model.
        runtime: that boots it; one without a wall hides no GPU, and the program is told which one is its own.
        cards: of this machine, with what engines hold of them.

    Raises:
        StartError: the model is to have what this machine cannot give.
    """
    if model.gpu == "off":
        return EngineOnCard(spec, model)
    facts = cards.facts
    try:
        if model.gpu == "auto" and not facts.driver and not facts.cards:
            log.info("no GPU on this machine: the model runs on the processor", model=model.name)
            return EngineOnCard(spec, _sized(model, None))
        found = ModelOnCard(model, read_shape(files.folder), files_bytes(files.engine))
        if not facts.driver or not set(cards.candidates(model)) & set(facts.cards):
            # Not for the table of cards: the error says what of the machine is missing.
            gpu_access(facts, model.gpu, 0, (facts.driver,))
        placed = cards.place(spec.name, found)
        given = _given(spec, facts, placed.use.card, runtime)
    except GpuError as error:
        raise StartError(
            f"model {model.name} cannot have its GPU: {error}; `athanor doctor` says more, `gpu: off` does without"
        ) from error
    sized = _sized(model, placed.plan)
    kernels, command = gpu_kernels(config), _command(config, sized, found, facts, placed.use.card)
    if kernels is None or not any(kernels.glob(COMPILED)):
        raise StartError(_without_kernels(model.name, kernels, command))
    plan = "" if placed.plan is None else placed.plan.words()
    # The command too: whether some of these kernels are the model's only the engine can tell.
    tell = log.warning if placed.plan is not None and placed.plan.limited else log.info
    tell("an engine has a GPU", model=model.name, card=placed.use.card, plan=plan, kernels=command)
    # Not pinned: the card may be beside another node than the one that the engine's turn gives it.
    mounts = (*given.mounts, Mount(kernels, GUEST_GPU_KERNELS))
    return EngineOnCard(replace(given, mounts=mounts, cpus=()), sized, placed.use)


def _sized(model: ModelConfig, plan: CardPlan | None) -> ModelConfig:
    """The model with what it leaves to its card; without a plan as on the processor."""
    return model.model_copy(update=on_processor(dict(model)) if plan is None else plan.settings())


def _given(spec: SandboxSpec, facts: GpuFacts, card: int, runtime: Runtime) -> SandboxSpec:
    """The spec with one card.

    Raises:
        GpuError: the machine cannot give it to a sandbox.
    """
    if not isinstance(runtime, GvisorRuntime):
        return replace(spec, env=(*spec.env, *plain_environment(facts, card)))
    access = gpu_access(facts, (card,), runtime.runsc.version, listed_drivers(runtime.runsc.path))
    return replace(spec, gpu=access)


def _command(config: ApplianceConfig, model: ModelConfig, found: ModelOnCard, facts: GpuFacts, card: int) -> str:
    """The command that compiles the model's kernels."""
    name = next((one.name for one in cards_of(facts) if one.index == card), "")
    rows = min(model.max_num_seqs, model.max_num_batched_tokens)
    named = config.sandbox.gpu_kernels
    folder = DEFAULT_FOLDER if named is None else str(named)
    return kernel_command(model, found.shape, rows, architecture_of(name), folder)


def _without_kernels(model: str, named: Path | None, command: str) -> str:
    there = "is named" if named is None else f"are in {named}"
    line = f"`sandbox: gpu_kernels: {DEFAULT_FOLDER}` names their folder; " if named is None else ""
    return (
        f"model {model} is to have a GPU, no engine can compile kernels, and no compiled ones {there}: `{command}` "
        f"compiles them; {line}or `gpu: off`"
    )


def gpu_kernels(config: ApplianceConfig) -> Path | None:
    """Folder of kernels compiled for GPUs: the configured one, else that of the image."""
    if config.sandbox.gpu_kernels is not None:
        return config.sandbox.gpu_kernels
    image = config.sandbox.image
    baked = None if image is None else image / Role.ENGINE.name.lower() / KERNELS_DIR[1:]
    return baked if baked is not None and baked.is_dir() else None


def guest_gpu_kernels(spec: SandboxSpec, runtime: Runtime) -> str:
    """Path at which the engine of this sandbox finds compiled kernels; empty where it has none."""
    if all(mount.target != GUEST_GPU_KERNELS for mount in spec.mounts):
        return ""
    return runtime.guest_path(spec, GUEST_GPU_KERNELS)
