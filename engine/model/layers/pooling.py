"""How an embedding model makes one vector of a text: read from its own files, or told by the configuration.

Files, in the layout of sentence-transformers: ``modules.json`` lists what follows the decoder,
``1_Pooling/config.json`` (here ``pooling.json``: a sandbox sees single files) says which tokens count. Understood are
a pooling module with one mode and a normalising one behind it; anything else (a dense layer, two modes at once) would
change every number and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.errors import ModelLoadError
from engine.model.checkpoint.config import MAX_JSON_BYTES, read_json, read_json_object

MODULES_FILE = "modules.json"
POOLING_FILE = "pooling.json"

MAX_MODULES = 8

_TRANSFORMER, _POOLING, _NORMALISE = "Transformer", "Pooling", "Normalize"


class PoolingMode(Enum):
    """Which tokens' hidden states make the vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True, slots=True)
class Pooling:
    """One way to make a vector."""

    mode: PoolingMode
    normalise: bool
    """Divide by its length (L2)."""


NORMALISED = "+normalise"

POOLINGS = tuple(mode.value + end for mode in PoolingMode for end in ("", NORMALISED))
"""What a configuration may say besides ``auto``."""

_KEYS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}
"""Truth values of ``1_Pooling/config.json`` that are understood."""


def read_pooling(told: str, model_dir: str) -> Pooling:
    """What the configuration tells, or the model's files where it says ``auto``.

    Raises:
        ModelLoadError: there are no such files, or they ask for what is not supported.
    """
    if told != "auto":
        return Pooling(PoolingMode(told.removesuffix(NORMALISED)), told.endswith(NORMALISED))
    directory = Path(model_dir)
    if not (directory / MODULES_FILE).exists():
        raise ModelLoadError(
            f"{MODULES_FILE} is missing, so how this model makes a vector is not known; "
            f"say it as pooling: {', '.join(POOLINGS)}"
        )
    return Pooling(_read_mode(directory), _read_modules(directory))


def _read_modules(directory: Path) -> bool:
    """Whether vectors are normalised; the list of modules must be one that is understood."""
    modules = read_json(directory / MODULES_FILE, MAX_JSON_BYTES)
    if not isinstance(modules, list) or len(modules) > MAX_MODULES:
        raise ModelLoadError(f"{MODULES_FILE} is not a list of at most {MAX_MODULES} modules")
    kinds = []
    for module in modules:
        kind = module.get("type") if isinstance(module, dict) else None
        path = module.get("path") if isinstance(module, dict) else None
        kinds.append(kind.rpartition(".")[2] if isinstance(kind, str) else "")
        if kinds[-1] == _POOLING and path != "1_Pooling":
            raise ModelLoadError(f"{MODULES_FILE}: the pooling module must be in 1_Pooling")
    if kinds not in ([_TRANSFORMER, _POOLING], [_TRANSFORMER, _POOLING, _NORMALISE]):
        raise ModelLoadError(
            f"{MODULES_FILE}: supported are Transformer, Pooling and, behind them, Normalize; nothing else"
        )
    return kinds[-1] == _NORMALISE


def _read_mode(directory: Path) -> PoolingMode:
    values = read_json_object(directory / POOLING_FILE, MAX_JSON_BYTES)
    asked = {key for key, value in values.items() if key.startswith("pooling_mode") and value is True}
    if isinstance(values.get("pooling_mode"), str):
        asked |= {key for key, mode in _KEYS.items() if mode.value == str(values["pooling_mode"]).removesuffix("token")}
    if len(asked) != 1 or not asked <= _KEYS.keys():
        raise ModelLoadError(f"1_Pooling/config.json must turn on exactly one of: {', '.join(_KEYS)}")
    return _KEYS[asked.pop()]
