"""API features that can be withheld from a tenant, by their keys in the policy; apart from the model, since the command
line names them in its help and is to be quick."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """What can be withheld from a tenant; the value is its key in the policy."""

    STRUCTURED_OUTPUT = "structured_output"
    TOKENIZE = "tokenize"
    TOOLS = "tools"
    ATTESTATION = "attestation"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    BATCHES = "batches"
    STORED_RESPONSES = "stored_responses"
    WAKE = "wake"

    @property
    def said(self) -> str:
        """What a denial calls it."""
        return _SAID[self]


_SAID = {
    Feature.STRUCTURED_OUTPUT: "structured output",
    Feature.TOKENIZE: "the tokenizer alone",
    Feature.TOOLS: "tools",
    Feature.ATTESTATION: "attestations",
    Feature.EMBEDDINGS: "embeddings",
    Feature.RERANK: "reranking and classification",
    Feature.BATCHES: "files and batches",
    Feature.STORED_RESPONSES: "stored responses",
    Feature.WAKE: "a model that sleeps",
}
