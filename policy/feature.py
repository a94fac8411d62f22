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
