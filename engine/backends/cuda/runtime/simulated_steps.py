"""The beginning and the end of a step as tensor operations; see ``Operations.begin_step`` and ``end_step``."""

from __future__ import annotations

import torch

from engine.backends.cuda.runtime.loop import FOREIGN, NOTHING, RING_STEPS
from engine.backends.cuda.runtime.loop_state import Faults, LoopState, StepRows
from engine.backends.cuda.runtime.operations import Sampled
from engine.backends.cuda.runtime.rows import Field
from engine.backends.cuda.runtime.sampling_state import report_words


def begin_step(faults: Faults, state: LoopState, bucket: int) -> StepRows:
    """What the first ``bucket`` lanes compute."""
    rows = state.lanes[:bucket]
    tokens, positions, _, done = state.fields[: Field.DONE + 1].index_select(1, rows).unbind(0)
    live = done == 0
    # Filled, and not chosen between with a number of the host: that would be copied to a GPU, which no graph takes.
    entries, sound = state.checked(faults, rows, positions, (positions + 1).masked_fill(~live, 0))
    idle = ~(live & sound)
    slots = state.tables.slots(entries, torch.arange(bucket, device=rows.device), positions, idle)
    places = positions + 1
    lengths = places.masked_fill(idle, 0)
    # Lanes that compute nothing choose as the padding row, for which nothing is counted.
    choosers = rows.masked_fill(idle, state.layout.rows)
    return StepRows(rows, tokens, positions, slots, state.tables.split(entries), lengths, choosers, places)


def end_step(state: LoopState, begun: StepRows, sampled: Sampled) -> None:
    """Advance rows by what was chosen, and tell it."""
    rows, chosen = begun.rows, sampled.tokens
    computed = begun.choosers != state.layout.rows
    live = state.fields[Field.DONE].index_select(0, rows) == 0
    # A row that has failed is done, but its lane looks up a vector all the same: that of an id that there is.
    state.put(Field.LAST, rows, torch.where(computed, chosen, begun.tokens).clamp(min=0))
    state.put(Field.POSITION, rows, begun.positions + computed.long())
    state.put(Field.DONE, rows, (~computed | state.ends(rows, chosen, begun.places + 1)).long())
    out = torch.full_like(state.ring[:1], NOTHING)
    untold = torch.full_like(chosen, NOTHING).masked_fill(live, FOREIGN)
    out[0, : len(rows)] = torch.where(computed, chosen, untold)
    slot = state.turn % RING_STEPS
    state.ring.index_copy_(0, slot, out)
    state.reports[:, : len(rows)].index_copy_(0, slot, report_words(sampled).unsqueeze(0))
    state.turn.add_(1)
