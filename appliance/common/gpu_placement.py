"""From the machine's GPUs and a configuration to the cards of its models: what the supervisor does and doctor shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType

from appliance.common.card_table import Card, CardTable, CardUse, ModelOnCard, Placed
from appliance.common.config import ModelConfig
from appliance.common.errors import StartError
from appliance.common.model_shape import ModelShape
from isolation.gpu.gpu_facts import GpuFacts

_CARDS = {"sm_80": "A100 A30", "sm_86": "A10 A40", "sm_89": "L4 L40 L40S", "sm_90": "H100 H200 H800 H20 GH200"}
ARCHITECTURES = {card: architecture for architecture, cards in _CARDS.items() for card in cards.split()}
"""Architecture by a word of a card's name (NVIDIA, "CUDA GPUs" and their compute capabilities); unknown for others."""

DEFAULT_FOLDER = "/etc/athanor/gpu-kernels"
"""Folder of compiled kernels, as the documents call it."""


CUT_UP = (
    "card {card} is cut up into MIG instances, which no engine gets: `nvidia-smi -i {card} -mig 0` makes it whole, "
    "and a list `gpu:` leaves it out"
)
"""Why no engine gets a card that is cut up: gVisor cannot pass instances on, and memory is told of whole cards."""


def cards_of(
    facts: GpuFacts, uses: Iterable[CardUse] = (), out: Mapping[int, str] = MappingProxyType({})
) -> tuple[Card, ...]:
    """Cards of a machine, for a ``CardTable``.

    Args:
        facts: with the cards' memory, where that is known.
        uses: what our engines hold already: the rest of what is not free is held by others.
        out: why each card that no engine gets is given to none; one that is cut up is among them.
    """
    uses, found = tuple(uses), list[Card]()
    out = {**{card: CUT_UP.format(card=card) for card in facts.mig}, **out}
    # Names come in the order of the bus; with one for each node they are taken in that order.
    names = facts.models if len(facts.models) == len(facts.cards) else ("",) * len(facts.cards)
    for index, name in zip(facts.cards, names, strict=True):
        memory = facts.memory_of(index)
        if memory is None:
            found.append(Card(index, name, out=out.get(index, "")))
            continue
        ours = sum(memory.total * one.percent // 100 for one in uses if one.card == index)
        found.append(Card(index, name, memory.total, max(0, memory.total - memory.free - ours), out.get(index, "")))
    return tuple(found)


def candidates(facts: GpuFacts, model: ModelConfig, lost: Container[int] = ()) -> tuple[int, ...]:
    """Indices of the cards that a model may use; of a list that names an absent one, that one alone, so that the error
    names it, unless it is known to be ``lost``."""
    if isinstance(model.gpu, str):
        whole = tuple(card for card in facts.cards if card not in facts.mig)
        return whole or facts.cards
    absent = [card for card in model.gpu if card not in facts.cards and card not in lost]
    return tuple(absent[:1]) or model.gpu


def place_models(facts: GpuFacts, models: Iterable[ModelOnCard], *, running: bool) -> Iterator[Placed | StartError]:
    """Place the shared engines of a configuration one after the other, as a start does.

    Args:
        facts: of the machine.
        models: those with a GPU, in the order of the configuration.
        running: engines of this configuration hold memory already, so nothing is known of others'.
    """
    everything = [CardUse("", card, 100) for card in facts.cards] if running else []
    table = CardTable(cards_of(facts, everything))
    for model in models:
        try:
            usable = candidates(facts, model.config)
            table, placed = table.place(model.config.name, model, usable, silent=not running)
        except StartError as error:
            yield error
        else:
            yield placed


def architecture_of(card: str) -> str:
    """The architecture of a card by its name; empty where the name says nothing."""
    words = re.split(r"[\s/_-]+", card)
    return next((ARCHITECTURES[word] for word in words if word in ARCHITECTURES), "")


def kernel_command(
    model: ModelConfig, shape: ModelShape | None, rows: int, architecture: str, folder: str = DEFAULT_FOLDER
) -> str:
    """The command that compiles a model's kernels.

    Args:
        model: its configuration.
        shape: of the model, for the type of its weights.
        rows: sequences of one step.
        architecture: of the card; empty where it is not known.
        folder: of compiled kernels.
    """
    dtype = model.dtype if model.dtype != "auto" else "" if shape is None else shape.dtype
    return command_words(folder, str(model.folder), architecture, dtype, model.block_size, rows, model.weights)


def command_words(
    folder: str, model: str, architecture: str, dtype: str, block_size: int, rows: int, weights: str = "stored"
) -> str:
    """The words of ``kernel_command``, from plain values; an empty type and stored weights are left out."""
    typed = f" --dtype {dtype}" if dtype else ""
    held = f" --weights {weights}" if weights == "fp8" else ""
    return (
        f"athanor kernels gpu {shlex.quote(folder)} --model {shlex.quote(model)} "
        f"--architecture {architecture or 'SM'}{typed} --block-size {block_size} --max-num-seqs {rows}{held}"
    )
