"""Checkpoints of decoders without a vocabulary projection, as embedding models are published.

They are told from others in two things: the architecture may name the bare decoder (``Qwen3Model`` for
``Qwen3ForCausalLM``), and tensors may lack the ``model.`` before their names. The head, where there is one, is not
read.
"""

from __future__ import annotations

from engine.model.safetensors import SafetensorsFile

BARE, WHOLE = "Model", "ForCausalLM"
"""Ends of architectures' names."""

PREFIX = "model."
HEAD = "lm_head."


def describe_headless(values: dict[str, object]) -> dict[str, object]:
    """A ``config.json`` as that of the whole decoder whose head is its embedding, so that none is asked for."""
    names = values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0].endswith(BARE):
        names = [names[0].removesuffix(BARE) + WHOLE]
    return {**values, "architectures": names, "tie_word_embeddings": True}


def name_headless(files: list[SafetensorsFile]) -> None:
    """Give every tensor the name that it has in the whole decoder, where no file uses those names."""
    if not any(name.startswith(PREFIX) for file in files for name in file.tensors):
        for file in files:
            file.tensors = {
                name if name.startswith(HEAD) else PREFIX + name: entry for name, entry in file.tensors.items()
            }
