"""How long steps may be while requests decode, and while a light tenant is about.

A request waits for the step in progress before anything can be done for it, and a step is as long as the prompt tokens
put into it. Who decodes waits for it between two tokens: a budget of tokens that suits an accelerator takes a second or
more on a processor. So while requests decode, prompts lengthen a step to ``STEP_NS`` by what was learned, or to
``1 + STRETCH`` times what it costs without them where that is more, and take a few tokens always: a step that is long
by itself would leave prompts nothing.

Where none decodes, full steps are best among tenants that all have much to do. Beside a *light*
tenant (one with few requests where another has many) they would decide its time to first token. So for
``LIGHT_MEMORY_NS`` after a light request the prompts in a step may lengthen it by ``STRETCH`` times what it costs
anyway, and a step that completes a light tenant's prompt takes prompts of light tenants only.

What a step costs is learned, not configured. For the budget: the duration of steps without prompts, and what prompts
add to it for each of their tokens. For a light tenant: durations are fitted to ``base + token * tokens`` by least
squares over the last steps, and only the ratio ``base / token`` is used. Until a step with prompts has said what a
token costs, those beside decoding requests are as short as beside a light tenant.
"""

from __future__ import annotations

LIGHT_MEMORY_NS = 5_000_000_000
"""Nanoseconds for which steps are kept short after a light request: a person, or a program that polls, is back."""

STEP_NS = 200_000_000
"""Nanoseconds that a step with prompts may take while requests decode: five tokens a second, which is about how fast
people read. A shorter one costs prompts more, since each step reads all weights once: of 200 ms that is a few percent
where a step without prompts takes 10 ms."""

STRETCH = 2
"""Prompt tokens that a step may take, in multiples of what it costs without them: a heavy neighbour of long prompts
then keeps at least two thirds of the speed that endless steps would give."""

FADE = 0.98
"""Weight of older steps at each new one: about the last fifty count."""

FADE_PROMPT_TOKENS = 8_192
"""Prompt tokens whose cost counts as much as that of all before: by tokens and not by steps, so that many small
prompts, which may cost nothing beside the reading of the weights, do not outweigh a large one."""

ODD = 4
"""A step with prompts counts with at most so many times the budget, or what it should have taken."""

MIN_FIXED_TOKENS, START_FIXED_TOKENS, MAX_FIXED_TOKENS = 16.0, 128.0, 4_096.0
"""Range, and value before anything is known, of the tokens that cost as much as an empty step. Published machines lie
between 10 (a model of half a billion weights on one core) and 300 (accelerators)."""

MIN_SPREAD = 4.0
"""Variance of tokens a step, in the steps that count, from which a slope can be fitted."""


class Pace:
    """Learns the cost of steps, and bounds them."""

    def __init__(self) -> None:
        self.fixed_tokens = START_FIXED_TOKENS
        """Tokens that take as long as a step without any."""
        self._plain_ns = 0.0
        """Mean duration of steps without prompts; 0 before there was one."""
        self._prompt_ns = self._prompt_count = 0.0
        """What prompts have added to steps, and their tokens; older ones count less."""
        self._light_until_ns = -1
        self._began_ns = -1
        self._tokens = self._prompt_tokens = 0
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def begin(self, now_ns: int) -> None:
        """A step begins: the one before it, unless there was a pause, has taken so long."""
        if self._began_ns >= 0:
            self._fit(self._tokens, now_ns - self._began_ns)
            self._weigh(self._prompt_tokens, now_ns - self._began_ns)
        self._began_ns = now_ns

    def planned(self, num_tokens: int, num_prompt_tokens: int) -> None:
        """The step that has begun computes so many tokens, of which so many are of prompts."""
        self._tokens, self._prompt_tokens = num_tokens, num_prompt_tokens

    def pause(self) -> None:
        """Nothing is left to do: the time until the next step is not a step's."""
        self._began_ns = -1

    def note_light(self, now_ns: int) -> None:
        """A light tenant's request was admitted."""
        self._light_until_ns = now_ns + LIGHT_MEMORY_NS

    def prompt_tokens(self, num_decodes: int, now_ns: int) -> int | None:
        """Prompt tokens that this step may take; None: as many as the budget leaves."""
        short = int(STRETCH * (self.fixed_tokens + num_decodes))
        if now_ns <= self._light_until_ns:
            return short
        if not num_decodes:
            return None
        if not self._prompt_count:
            return short
        most_ns = max(STEP_NS - self._plain_ns, STRETCH * self._plain_ns)
        token_ns = max(self._prompt_ns / self._prompt_count, 1.0)
        return max(int(STRETCH * MIN_FIXED_TOKENS), int(most_ns / token_ns))

    def _weigh(self, prompt_tokens: int, duration_ns: int) -> None:
        """Learn what a step takes without prompts, or what prompts have added to it: all of it, as long as no step was
        without."""
        if not prompt_tokens:
            weight = 1 - FADE if self._plain_ns else 1.0
            self._plain_ns += weight * (duration_ns - self._plain_ns)
            return
        added = max(0.0, duration_ns - self._plain_ns)
        if self._prompt_count:  # A machine that stood still says nothing of prompts.
            added = min(added, ODD * max(STEP_NS, prompt_tokens * self._prompt_ns / self._prompt_count))
        fade = FADE_PROMPT_TOKENS / (FADE_PROMPT_TOKENS + prompt_tokens)
        self._prompt_ns = fade * self._prompt_ns + added
        self._prompt_count = fade * self._prompt_count + prompt_tokens

    def _fit(self, tokens: int, duration_ns: int) -> None:
        duration = float(duration_ns)
        self._count = self._count * FADE + 1
        self._x = self._x * FADE + tokens
        self._y = self._y * FADE + duration
        self._xx = self._xx * FADE + tokens * tokens
        self._xy = self._xy * FADE + tokens * duration
        mean = self._x / self._count
        variance = self._xx / self._count - mean * mean
        if variance < MIN_SPREAD:
            return
        slope = (self._xy / self._count - mean * self._y / self._count) / variance
        base = self._y / self._count - slope * mean
        if slope > 0 and base > 0:
            self.fixed_tokens = min(max(base / slope, MIN_FIXED_TOKENS), MAX_FIXED_TOKENS)
