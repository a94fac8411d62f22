"""A step some of whose rows may not be computed: their tables name blocks that are not theirs (``engine.kv.tags``).

The rest of the step runs as if they were not there, so nothing of such a block is read, written or answered; their
places in the samples say ``FAILED``, and the commit ends their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.sampler import Samples
from engine.scheduler.plan import FAILED, StepPlan


def run_without(plan: StepPlan, foreign: frozenset[int], run: Callable[[StepPlan], Samples]) -> Samples:
    """What ``run`` gives of the plan without these rows, put at the places that the whole plan has."""
    rows = plan.sample_rows
    rest = plan.computing({*plan.decode_rows, *(chunk.row for chunk in plan.prefills)} - foreign)
    samples = run(rest) if rest.num_tokens else Samples([])
    places = [place for place, row in enumerate(rows) if row not in foreign]
    token_ids = [FAILED] * len(rows)
    for place, token_id in zip(places, samples.token_ids, strict=True):
        token_ids[place] = token_id
    logprobs = [replace(entry, index=places[entry.index]) for entry in samples.logprobs]
    return Samples(token_ids, logprobs, samples.prompts, foreign)
