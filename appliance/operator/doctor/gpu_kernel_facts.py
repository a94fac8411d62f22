"""Looks at what models with a GPU get: their cards, and folders of compiled kernels and what they are for. No kernel
is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from appliance.common.card_table import Card, ModelOnCard, Placed
from appliance.common.catalog import find_files
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.errors import ApplianceError, StartError, reason_of
from appliance.common.gpu_defaults import on_processor
from appliance.common.gpu_placement import candidates, cards_of, place_models
from appliance.common.image.check import resolve
from appliance.common.model_memory import files_bytes
from appliance.common.model_shape import read_shape
from appliance.operator.doctor.facts import CardFacts, GpuKernelFacts, MadeKernels
from appliance.supervisor.gpu import gpu_kernels
from engine.backends.cuda.kernels import folder
from engine.errors import ConfigurationError
from isolation.errors import RootfsError
from isolation.gpu.gpu_facts import GpuFacts
from isolation.image.python_rootfs import OURS_DIR
from isolation.ipc.messages import Role

SOURCES = "engine/backends/cuda/kernels"
"""Folder of the kernels' sources inside an engine's root file system."""


def look_at_cards(models: Iterable[ModelConfig], facts: GpuFacts, *, running: bool) -> tuple[CardFacts, ...]:
    """Cards of the models that are given one, as a start would choose them.

    Args:
        models: of the configuration.
        facts: of the machine.
        running: the appliance runs, so what is held of a card is its own.
    """
    if not facts.cards:
        return ()
    found = [one for model in models if model.gpu != "off" and (one := _on_card(model)) is not None]
    placed = place_models(facts, found, running=running)
    cards = () if running else cards_of(facts)
    return tuple(_card(one, given, facts, cards) for one, given in zip(found, placed, strict=True))


def _on_card(model: ModelConfig) -> ModelOnCard | None:
    """The model; None where its files are none, as the finding about it says."""
    try:
        stored = files_bytes(find_files(model.name, model.folder)[0])
    except (ApplianceError, OSError):
        return None
    return ModelOnCard(model, read_shape(model.folder), stored)


def _card(model: ModelOnCard, given: Placed | StartError, facts: GpuFacts, cards: Iterable[Card]) -> CardFacts:
    """The card of one model; ``cards`` as far as it is known what other programs hold of them."""
    name, others = model.config.name, {card.index: card.others for card in cards}
    if isinstance(given, StartError):
        usable = candidates(facts, model.config)
        cut_up = tuple(card for card in usable if card in facts.mig)
        held = sum(others.get(card, 0) for card in usable)
        return CardFacts(model=name, problem=given.message, others=held, cut_up=cut_up)
    number = given.use.card
    called = next((card.name for card in cards_of(facts) if card.index == number), "")
    found = CardFacts(model=name, card=number, name=called, others=others.get(number, 0))
    if given.plan is None:
        return replace(found, unknown=facts.memory_problem)
    return replace(found, plan=given.plan.words(), rows=given.plan.rows, limited=given.plan.limited)


def look_at_gpu_kernels(config: ApplianceConfig, model: ModelConfig, rows: int = 0) -> GpuKernelFacts | None:
    """What is there for a model; None for one that is given no GPU. ``rows``: sequences of one step by the plan of its
    card; 0: what the configuration says."""
    if model.gpu == "off":
        return None
    try:
        found = resolve(config)
    except (RootfsError, ApplianceError):
        # The finding about the image says so.
        found = config
    place = gpu_kernels(found)
    try:
        description = folder.description_digest(model.folder)
    except OSError:
        description = ""
    facts = GpuKernelFacts(
        model=model.name,
        model_path=str(model.folder),
        path="" if place is None else str(place),
        needed=model.gpu != "auto",
        dtype="" if model.dtype == "auto" else model.dtype,
        block_size=model.block_size,
        weights="fp8" if model.weights == "fp8" else "stored",
        rows=rows or _rows(model),
    )
    if place is None:
        return facts
    try:
        return replace(facts, made=tuple(_made(facts, place, description, _sources(found.sandbox.image))))
    except OSError as error:
        return replace(facts, problem=reason_of(error))


def _rows(model: ModelConfig) -> int:
    """Sequences of one step, as the configuration says, or as on the processor."""
    told = model.model_copy(update=on_processor(dict(model)))
    return min(told.max_num_seqs, told.max_num_batched_tokens)


def _sources(image: Path | None) -> str:
    """Beginning of the digest of the sources that the engine will have."""
    own = Path(folder.__file__).parent
    theirs = own if image is None else image / Role.ENGINE.name.lower() / OURS_DIR[1:] / SOURCES
    return folder.sources_digest(theirs if theirs.is_dir() else own)[: folder.DIGEST_CHARS]


def _made(facts: GpuKernelFacts, place: Path, description: str, sources: str) -> Iterator[MadeKernels]:
    """What lies below a folder, as far as its names say that it is compiled kernels."""
    for path in sorted(place.iterdir()):
        try:
            name = folder.read_name(path.name)
        except ConfigurationError:
            continue
        asked = folder.read_asked(path)
        wanted = facts.block_size, facts.rows, facts.weights
        fits = asked is None or (
            (asked.block_size, asked.rows, asked.weights) == wanted
            and description in ("", asked.description)
            and facts.dtype in ("", asked.dtype)
        )
        yield MadeKernels(architecture=name.architecture, ours=name.kernels == sources, fits=fits)
