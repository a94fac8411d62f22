"""Checkpoints of decoders without a vocabulary projection, the form in which embedding models and classifiers are
published.

They differ in two ways: the architecture may name the bare decoder (``Qwen3Model`` for ``Qwen3ForCausalLM``) or the
classifier (``Qwen3ForSequenceClassification``), and tensor names may lack the prefix ``model.``. A vocabulary
projection, if present, is not read. A classifier has ``score.weight``: a row of weights for each label, applied to the
hidden state of the last token behind the last norm.
"""

from __future__ import annotations

from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.safetensors import SafetensorsFile

BARE, LABELLED, WHOLE = "Model", "ForSequenceClassification", "ForCausalLM"
"""Suffixes of architecture names: without a head, with a head of labels, with one of the vocabulary."""

PREFIX = "model."
HEADS = ("lm_head.", "score.")

MAX_LABELS = 4_096
"""Most outputs of a classification head; published ones have at most some hundred."""

DEFAULT_LABELS = 2
"""Outputs of a head whose description does not say, as in transformers."""


def describe_labelled(values: dict[str, object]) -> tuple[dict[str, object], int]:
    """Rewrite a classifier's ``config.json`` as that of the whole decoder; give the number of its labels too.

    Raises:
        ModelLoadError: it is no classifier, or the number of its labels is out of range.
    """
    fields, names = Fields("config.json", values), values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).endswith(LABELLED):
        raise fields.error(f"architectures must name one classifier, as Qwen3{LABELLED}")
    labels = fields.integer("num_labels", 1, MAX_LABELS, default=DEFAULT_LABELS)
    if not fields.absent("id2label"):
        labels = len(fields.section("id2label").values)
        if not 1 <= labels <= MAX_LABELS:
            raise fields.error(f"id2label must have 1 to {MAX_LABELS} labels")
    whole = {**values, "architectures": [str(names[0]).removesuffix(LABELLED) + WHOLE]}
    return describe_headless(whole), labels


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
                name if name.startswith(HEADS) else PREFIX + name: entry for name, entry in file.tensors.items()
            }
