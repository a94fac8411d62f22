"""Checkpoints of decoders without a vocabulary projection, the form in which embedding models are published.

They differ in two ways: the architecture may name the bare decoder (``Qwen3Model`` for ``Qwen3ForCausalLM``), and
tensor names may lack the prefix ``model.``. A head, if present, is not read.
"""

from __future__ import annotations

from engine.model.checkpoint.safetensors import SafetensorsFile

BARE, WHOLE = "Model", "ForCausalLM"
"""Suffixes of architecture names without and with a head."""

PREFIX = "model."
HEAD = "lm_head."


def describe_headless(values: dict[str, object]) -> dict[str, object]:
    """Rewrite a ``config.json`` as that of the whole decoder with tied embeddings, so that no head is required."""
    names = values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0].endswith(BARE):
        names = [names[0].removesuffix(BARE) + WHOLE]
    return {**values, "architectures": names, "tie_word_embeddings": True}


def name_headless(files: list[SafetensorsFile]) -> None:
    """Map every tensor to its name in the whole decoder, when no file uses those names."""
    if not any(name.startswith(PREFIX) for file in files for name in file.tensors):
        for file in files:
            file.tensors = {
                name if name.startswith(HEAD) else PREFIX + name: entry for name, entry in file.tensors.items()
            }
