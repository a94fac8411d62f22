"""The text part of a model that also sees: a family for what its publisher calls ``...ForConditionalGeneration``.

Its description has one of a text model inside, its text tensors have a prefix, and the tensors of its vision part are
not read. Pictures cannot be given to it.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.fields import Fields
from engine.model.layers.decoder import Decoder, Family

TEXT_SECTION = "text_config"
TEXT_PREFIX = "language_model"


def text_part(family: Family, *, outer: str, inner: str, unread: tuple[str, ...]) -> Family:
    """The family that runs the text part.

    Args:
        family: of text alone.
        outer: the architecture that descriptions name.
        inner: that of the family of text.
        unread: prefixes of tensors that only pictures need.
    """

    def read(fields: Fields) -> ModelConfig:
        fields.architecture((outer,))
        text = fields.section(TEXT_SECTION)
        config = family.read(Fields(text.name, {**text.values, "architectures": [inner]}))
        return replace(config, architecture=outer, stop_ids=frozenset(text.stop_ids()))

    def build(config: ModelConfig, checklist: Checklist) -> Decoder:
        checklist.ignore_prefixes(*unread)
        return family.build(config, checklist.under(TEXT_PREFIX))

    return Family(read, build)
