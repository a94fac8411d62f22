"""What a model's entry leaves to its card: defaults of ``ModelConfig`` where the model has a GPU. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

CardNumber = Annotated[int, Field(ge=0, le=999)]
"""Number of a GPU: the N of /dev/nvidiaN."""

DEFAULT_SHARE = 90
"""Percent of a card that an engine may hold where neither gpu_share nor kv_bytes is given."""

LEAST = {"max_context": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16}
"""Least values of what may be left to a card."""

PROCESSOR = {"max_context": 32_768, "max_num_seqs": 128, "max_num_batched_tokens": 512}
"""Defaults of an engine on the processor. For one on a card 0 stands for "by card and model"
(``appliance.common.card_plan``)."""


def left_to_the_card(values: Any) -> Any:
    """Fill in what an entry that asks for a GPU leaves out; other entries, and what is no entry, come back unchanged.

    What is filled in is a value like any other, so that an entry means the same wherever it is read again.
    """
    if not isinstance(values, dict) or values.get("gpu", "off") == "off":
        return values
    filled = {**dict.fromkeys(PROCESSOR, 0), **values}
    if "kv_bytes" not in values:
        filled.setdefault("gpu_share", DEFAULT_SHARE)
    return filled


def on_processor(values: dict[str, int]) -> dict[str, int]:
    """What of these settings an engine without a known card is told instead: those that were left to the card."""
    return {name: default for name, default in PROCESSOR.items() if values[name] == 0}


def check_sizes(values: dict[str, Any]) -> None:
    """Check the settings of an entry that may be left to a card.

    Raises:
        ValueError: one is too small; 0 is for a model with a GPU.
    """
    for name, least in LEAST.items():
        if values[name] < least and (values[name] or values["gpu"] == "off"):
            raise ValueError(f"{name} is {values[name]}; it must be {least} at least, or 0 on a GPU: by card and model")
