"""What the evaluator is asked: who wants what, and what the tenant uses at this moment."""

from __future__ import annotations

from dataclasses import dataclass

from policy.limits import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRequest:
    """One generation, as far as the policy is concerned."""

    tenant: str
    """Tenant id that ``policy.evaluate.principal`` gave for the caller's credential."""
    model: str
    """Name of the served model."""
    input_tokens: int | None
    """Exact prompt tokens, or None before the prompt is tokenised."""
    max_output_tokens: int | None
    """Output tokens asked for each choice: None for as many as allowed, 0 for none (embeddings)."""
    longest_input: int | None = None
    """Tokens of the longest text where there are several, which are held against the context one by one; None: the
    prompt is one."""
    structured: bool = False
    """Whether the output shall follow a grammar."""
    choices: int = 1
    """Outputs of the one prompt."""

    def __post_init__(self) -> None:
        if self.input_tokens is not None and self.input_tokens < 1:
            raise ValueError("a prompt has at least one token")
        if self.max_output_tokens is not None and self.max_output_tokens < 0:
            raise ValueError("a number of output tokens is not negative")
        if self.choices < 1:
            raise ValueError("at least one choice must be asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A tenant's use just before the request in question is admitted."""

    concurrency: int
    """Requests admitted and not yet finished."""
    request_bucket: Bucket
    token_bucket: Bucket
