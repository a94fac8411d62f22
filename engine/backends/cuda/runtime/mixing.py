"""When decoding rows are computed in one pass with a step's prompts, and when a pass of their own is better.

A pass reads all weights. In one pass they are read once; but a pass of many tokens waits for products, not for memory,
and then each row that joins takes as long as a token of a prompt, whereas a recorded step of few rows waits for the
weights alone. Behind two passes the device has the second one to compute while the host commits a plan and makes the
next; behind one that the plan waits for it has nothing. So what is best depends on the tokens, on the rows, and on
whether a prompt ends with the pass, since its first token is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = 1 << 30
"""Tokens or rows: more than there are."""

Limits = tuple[tuple[int, int], ...]
"""Pairs, in ascending order of the first: of prompts of up to so many tokens in all, rows that join them at the
most."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """The largest numbers of rows that join prompts."""

    goes_on: Limits = ()
    """Where no prompt ends: the plan waits for nothing of the pass."""
    ends: Limits = ()
    """Where some prompt ends, or where rows of this plan are among those that join: the plan waits for the pass."""
    least_bytes: int = 0
    """Bytes of weights: those of a smaller model are read in less time than a host needs for a plan."""

    def joins(self, tokens: int, rows: int, *, waits: bool) -> bool:
        """Whether so many rows join prompts of so many tokens. ``waits``: whether the plan waits for the pass."""
        most = next((most for limit, most in (self.ends if waits else self.goes_on) if tokens <= limit), 0)
        return 0 < rows <= most

    def of_model(self, weights: int) -> Mixing:
        """That of a model of so many bytes."""
        return self if weights >= self.least_bytes else NEVER

    @property
    def ever(self) -> bool:
        """Whether rows join any prompts."""
        return bool(self.goes_on or self.ends)


NEVER = Mixing()
"""Two passes, always."""

ALWAYS = Mixing(((ANY, ANY),), ((ANY, ANY),))
"""One pass wherever there can be one."""
