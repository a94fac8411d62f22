"""What is left of one step: a short-lived object, so that the scheduler keeps no "how much is left" between steps."""

from __future__ import annotations


class StepBudget:
    """Tokens that may still be put into this step."""

    __slots__ = ("scores", "tokens")

    def __init__(self, max_num_batched_tokens: int, scores: int = 0) -> None:
        self.tokens = max_num_batched_tokens
        self.scores = scores
        """Tokens of prompts that may still be scored."""

    def spend(self, tokens: int) -> None:
        """Take tokens out of the budget; no more than are left."""
        assert 0 <= tokens <= self.tokens, "a step beyond its token budget"
        self.tokens -= tokens

    def cut(self, most: int) -> None:
        """Leave no more than ``most`` tokens."""
        self.tokens = min(self.tokens, most)

    def chunk(self, wanted: int) -> int:
        """Spend as much of ``wanted`` as is left and say how much that is."""
        granted = min(wanted, self.tokens)
        self.spend(granted)
        return granted
