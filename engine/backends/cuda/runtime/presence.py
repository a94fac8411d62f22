"""Whether there is a GPU to compute on. One that is there and does not start is an error, never a reason to compute on
the processor: nobody would notice but by the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import ConfigurationError

DEVICES = Path("/dev")

MAX_REASON_CHARS = 200


def visible_gpus() -> tuple[str, ...]:
    """Nodes of NVIDIA's cards that this process sees; a sandbox sees those that it was given."""
    found = (path for path in DEVICES.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit())
    return tuple(sorted(map(str, found)))


def why_not_started() -> str:
    """What CUDA says when it is started; empty where it starts."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:MAX_REASON_CHARS]
    return ""


def gpu_starts(see: Callable[[], tuple[str, ...]] = visible_gpus, why_not: Callable[[], str] = why_not_started) -> bool:
    """Whether torch has a GPU.

    Args:
        see: which cards are visible.
        why_not: what CUDA says when it is started.

    Raises:
        ConfigurationError: a card is visible, and CUDA does not start.
    """
    if torch.cuda.is_available():
        return True
    nodes = see()
    if not nodes:
        return False
    reason = why_not() or "it has found no card"
    raise ConfigurationError(
        f"{', '.join(nodes)} is here and CUDA does not start ({reason}): the model would be computed on the processor; "
        "`athanor doctor` looks at driver, nodes and libraries; the cuda variant of the image has a torch for GPUs; "
        "`gpu: off` computes on the processor"
    )


LEAST_SCALED = (8, 9)
"""The first architecture with products of 8-bit floating point numbers (Ada Lovelace)."""


def check_architecture(capability: tuple[int, int]) -> None:
    """Check that a GPU multiplies 8-bit floating point numbers.

    Raises:
        ConfigurationError: it does not.
    """
    if capability < LEAST_SCALED:
        major, minor = capability
        raise ConfigurationError(
            f"weights: fp8 need a GPU of architecture sm_{LEAST_SCALED[0]}{LEAST_SCALED[1]} or later, and this one is "
            f"sm_{major}{minor}: take weights: stored"
        )
