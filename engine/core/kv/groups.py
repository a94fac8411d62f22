"""Which layers share a block table, and how many tokens a block of each table holds.

Layers of one reach share a table: what lies behind a window is then given back for all of them at once. A reach that
covers every context the engine takes is as good as ``FULL``.

One pool for all tables. How the memory is best divided between layers that keep everything and layers that keep a
window depends on the lengths of the sequences that happen to run, so no fixed division is good. For 56 GiB of KV of
Llama 4 Scout (12 layers of whole contexts, 36 of chunks of 8,192; 4,096 bytes a token and layer): two pools that are
divided for one long sequence leave the 36 layers room for a single chunk, so that 4 chats of 2,000 tokens would fit
instead of 152; divided for chats, the longest sequence is 0.31 million tokens instead of 1.2. Blocks of equal bytes
serve either at any time.

Equal bytes. A block of the table with the most layers holds ``block_size`` tokens; a block of another holds a multiple,
so that both take about as many *rows* (tokens times layers). What is lost is the difference:

=====================  =======  ======  ============================  =============================
model                  layers   window  tokens in a block             lost of a block
=====================  =======  ======  ============================  =============================
Llama 4 Scout          12 + 36   8,192  48 and 16                     nothing
gpt-oss-20b            12 + 12     128  16 and 16                     nothing
Gemma 3 27B            10 + 52   1,024  80 and 16                     3.8 % of those of the 10 layers
Gemma 3 12B            8 + 40    1,024  80 and 16                     nothing
Gemma 3 4B             5 + 29    1,024  96 and 16                     3.3 % of those of the 29 layers
=====================  =======  ======  ============================  =============================

(Tables for groups of equal numbers of layers, the other known way, would need seven tables for Gemma 3 27B, and lose
13 % of the windows' blocks.) The price is coarser blocks where everything is kept: half of one is empty on average, and
cached prefixes end on their bounds.

Layers whose shapes differ share one table, in which everything is kept.
"""

from __future__ import annotations

from itertools import product
from math import lcm

from engine.core.kv.layout import FULL, KvGroup, LayerLayout, Reach

MAX_MULTIPLE = 32
"""Times ``block_size`` that a block of few layers may hold: beyond it, its last block would waste more than its equal
size gains."""


def divide(layers: tuple[LayerLayout, ...], block_size: int, max_context: int) -> tuple[KvGroup, ...]:
    """Deal the layers of a whole model to block tables; none where one table keeps everything.

    Args:
        layers: of the whole model, also for a rank that has a part of it: all ranks follow one plan.
        block_size: tokens of the smallest block.
        max_context: tokens of the longest sequence.
    """
    counts: dict[Reach, int] = {}
    for layer in layers:
        reach = FULL if layer.reach.covers(max_context) else layer.reach
        counts[reach] = counts.get(reach, 0) + 1
    reaches = sorted(counts, key=lambda reach: reach != FULL)
    if reaches == [FULL]:
        return ()
    if len(reaches) == 1:
        return (KvGroup(reaches[0], block_size),)
    if len({(layer.heads, layer.key_dim, layer.value_dim, layer.latent) for layer in layers}) > 1:
        return ()
    multiples = _multiples([counts[reach] for reach in reaches])
    return tuple(KvGroup(reach, block_size * times) for reach, times in zip(reaches, multiples, strict=True))


def granule(groups: tuple[KvGroup, ...]) -> int:
    """Tokens on whose multiples a block of every table ends."""
    return lcm(*(group.block_size for group in groups))


def _multiples(counts: list[int]) -> tuple[int, ...]:
    """How many times ``block_size`` a block of each table holds: the least loss in the worst of them."""
    most = max(counts)
    choices = [sorted({min(MAX_MULTIPLE, most // one), min(MAX_MULTIPLE, -(-most // one))}) for one in counts]

    def loss(multiples: tuple[int, ...]) -> float:
        rows = [one * times for one, times in zip(counts, multiples, strict=True)]
        return 1 - min(rows) / max(rows)

    return min(product(*choices), key=loss)
