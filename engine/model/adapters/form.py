"""Description of an adapter: ``adapter_config.json`` as PEFT writes it, checked key by key.

An adapter is what somebody else made, so nothing in it is followed that is not understood. A key that is not known here
is passed over only where its value says nothing (null, false, empty); any other value is an error that names the key,
because it may change what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.errors import AdapterLoadError, ModelLoadError
from engine.model.checkpoint.fields import Fields

MAX_RANK = 256
"""Largest rank; published adapters have 8 to 256."""

MAX_ALPHA = 65_536.0
"""Largest ``lora_alpha``; it is usually one or two times the rank."""

MAX_PATTERNS = 4_096
"""Most entries of ``rank_pattern`` and of ``alpha_pattern``: some for each layer."""

WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_type", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_version"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "task_type", "bias", "init_lora_weights"),
        *("megatron_core", "runtime_config", "eva_config", "qalora_group_size"),
    )
)
"""Keys that are read here, and those without an effect on a trained adapter. Which maps an adapter changes is told by
its tensors, every one of which must be understood."""

REFUSALS = {
    "modules_to_save": "whole copies of modules, which would replace the model's own",
    "use_dora": "DoRA, which needs the norms of the merged weights",
    "lora_bias": "biases of its own",
    "trainable_token_indices": "single rows of the embedding, replaced",
    "layer_replication": "a model with repeated layers",
    "target_parameters": "parameters that are no maps",
    "alora_invocation_tokens": "a change that begins in the middle of a prompt",
}
"""Key -> what an adapter with it has, for people."""

OWN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base model as it is; others subtract something from its weights."""


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """What the description says of the numbers."""

    rank: int
    alpha: float
    root_scaled: bool
    """Whether products are divided by the root of the rank (rsLoRA)."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of maps whose names end so."""
    alphas: dict[str, float] = field(default_factory=dict)

    def rank_of(self, name: str) -> int:
        """Return the rank of a published map."""
        return self.ranks.get(_ending(self.ranks, name), self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor of a published map's product."""
        alpha, rank = self.alphas.get(_ending(self.alphas, name), self.alpha), self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.root_scaled else rank)


def read_form(fields: Fields) -> AdapterForm:
    """Check the fields of an ``adapter_config.json``.

    Raises:
        AdapterLoadError: a key is missing, malformed, out of range or asks for what is not supported.
    """
    try:
        return _read(fields)
    except ModelLoadError as error:
        raise AdapterLoadError(str(error)) from error


def _read(fields: Fields) -> AdapterForm:
    fields.only("peft_type", ("LORA",), default="")
    fields.only("task_type", ("CAUSAL_LM",), default="CAUSAL_LM")
    fields.only("bias", ("none",), default="none")
    for key, what in REFUSALS.items():
        if fields.values.get(key):
            raise fields.error(f"{key} is not supported: {what}")
    start = fields.values.get("init_lora_weights", True)
    if start not in OWN_STARTS:
        raise fields.error("init_lora_weights is one that changes the base model's weights; convert the adapter first")
    for key in sorted(fields.values.keys() - WITHOUT_EFFECT - REFUSALS.keys()):
        value = fields.values[key]
        if value is not None and value is not False and value not in ("", [], {}):
            raise fields.error(f"the key {key[:64]!a} is not known, and its value may change what the adapter means")
    return AdapterForm(
        rank=fields.integer("r", 1, MAX_RANK),
        alpha=_alpha(fields, "lora_alpha", 8.0),
        root_scaled=fields.boolean("use_rslora"),
        ranks={name: one.integer(name, 1, MAX_RANK) for name, one in _patterns(fields, "rank_pattern")},
        alphas={name: _alpha(one, name, 0.0) for name, one in _patterns(fields, "alpha_pattern")},
    )


def _alpha(fields: Fields, key: str, default: float) -> float:
    alpha = fields.number(key, 0.0, MAX_ALPHA, default=default)
    if not alpha > 0.0:
        raise fields.error(f"{key[:64]!a} must be above 0")
    return alpha


def _patterns(fields: Fields, key: str) -> list[tuple[str, Fields]]:
    """Return the entries of a mapping from names. PEFT takes regular expressions there, which are not evaluated: a name
    has letters, digits, underscores and dots alone."""
    if fields.absent(key):
        return []
    section = fields.section(key)
    if len(section.values) > MAX_PATTERNS:
        raise fields.error(f"{key} has more than {MAX_PATTERNS} entries")
    for name in section.values:
        if not name.isascii() or not name.replace("_", "").replace(".", "").isalnum():
            raise fields.error(f"{key}: {name[:64]!a} is no plain name of a map; expressions are not evaluated")
    return [(name, section) for name in section.values]


def _ending(names: Iterable[str], name: str) -> str:
    """Return the first of some names that ``name`` ends with, at a dot; empty where it ends with none."""
    return next((one for one in names if name == one or name.endswith(f".{one}")), "")
