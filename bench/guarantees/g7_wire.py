"""G7, silent wire: sizes and moments of a padded tenant's answers tell neither the prompt nor its topic.

Fifty prompts in five topics, each some times, over a loopback socket (``wire_capture``). An observer with samples of
all of them names the prompt of another by its nearest neighbour, and its topic by its neighbours of other prompts; once
by sizes and moments, once by sizes alone.

* ``G7.sizes``: all streams, and all answers that are not streamed, have the same sizes in the same order.
* ``G7.cost``: what that takes; where the machine is so busy that ticks are missed, it takes longer.
* ``G7.fingerprint``, ``G7.topic``: the observer does no better than by chance. The short form has few samples, so its
  bars are wider by three standard deviations.

Controls: the same answers of a tenant that is not padded are told apart.

Not covered: the size of the request itself, which shape of answer was asked for, and of an answer's length which of
the few numbers of records it needs; all answers here need the first. That there is an answer is seen, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.api.padding import Padding
from bench.guarantees.result import Result, judged
from bench.guarantees.wire_capture import PROMPTS, TOPICS, Record, capture_all

COMMAND = "athanor selftest --only G7"
SHORT, FULL = 4, 30
"""Repetitions of each prompt."""

AT_ONCE = 40
"""Requests at a time."""

MOST_RECORDS = 96
"""Of a capture, those that are looked at."""

SHARES = 19
"""Points at which the distributions of sizes and gaps are looked at, which no shift in time blurs."""

NEIGHBOURS = 5
FINGERPRINT, TOPIC = 0.04, 0.02
"""The release bars: right answers, and average precision beyond what chance gives."""

Floats = NDArray[np.float64]


def run(full: bool) -> list[Result]:
    """The rows of G7."""
    repetitions = FULL if full else SHORT
    padded = asyncio.run(capture_all(padded=True, repetitions=repetitions, at_once=AT_ONCE))
    whole = asyncio.run(capture_all(padded=True, repetitions=1, at_once=AT_ONCE, stream=False))
    plain = asyncio.run(capture_all(padded=False, repetitions=SHORT, at_once=AT_ONCE // 4))
    slack = 0.0 if full else 3.0
    return [
        sizes_row(padded, whole),
        cost_row(padded, plain),
        *observer_rows("G7", padded, slack),
        *observer_rows("G7.control", plain, slack),
    ]


def sizes_row(*captures: dict[tuple[int, int], list[Record]]) -> Result:
    """All answers of one kind are the same bytes long, in the same pieces where the pieces came apart."""
    kinds = [{sum(record.size for record in one) for one in capture.values()} for capture in captures]
    streamed = [tuple(record.size for record in one) for one in captures[0].values()]
    apart = {one for one in streamed if len(one) == max(map(len, streamed))}
    figure = f"{[len(kind) for kind in kinds]} totals over {[len(one) for one in captures]} answers"
    passed = all(len(kind) == 1 for kind in kinds) and len(apart) == 1
    bar = "one total and one order of sizes of each kind"
    return judged("G7.sizes", passed, figure=figure, bar=bar, command=COMMAND)


def cost_row(padded: dict[tuple[int, int], list[Record]], plain: dict[tuple[int, int], list[Record]]) -> Result:
    """What padding costs a stream: bytes, and seconds to its end; held against the least that the rules ask for."""
    costs = []
    for capture in (padded, plain):
        sizes = [sum(record.size for record in one) for one in capture.values()]
        ends = [one[-1].at_s for one in capture.values()]
        costs.append((np.mean(sizes) / 1_000, np.median(ends)))
    rules = Padding()
    least = rules.records(1) * rules.tick_s
    figure = " instead of ".join(f"{kilobytes:.1f} kB in {seconds:.2f} s" for kilobytes, seconds in costs)
    passed = bool(costs[0][1] <= 2 * least)
    return judged("G7.cost", passed, figure=figure, bar=f"at most {2 * least:.1f} s", command=COMMAND)


def observer_rows(name: str, captures: dict[tuple[int, int], list[Record]], slack: float) -> list[Result]:
    """What the observer makes of it: of a claim little, of a control much."""
    keys = sorted(captures)
    prompts = np.array([prompt for prompt, _ in keys])
    both = distances(np.stack([features(captures[key]) for key in keys]))
    hits = right(both, prompts)
    wide = slack * float(np.sqrt(FINGERPRINT * (1 - FINGERPRINT) / len(keys)))
    beyond = precision(both, prompts) - 1 / TOPICS
    shuffled = np.random.default_rng(5)
    null = [precision(both, prompts, shuffled.permutation(PROMPTS) % TOPICS) - 1 / TOPICS for _ in range(20)]
    broad = slack * float(np.std(null))
    told = f"{100 * hits:.1f} % of {len(keys)} named right (chance {100 / PROMPTS:.0f} %)"
    topic = f"average precision {beyond:+.3f} beyond chance"
    if name.endswith(".control"):
        seen = hits >= 10 * FINGERPRINT
        return [
            judged("G7.fingerprint.control", seen, figure=told, bar="at least 40 %", command=COMMAND),
            judged("G7.topic.control", beyond >= 5 * TOPIC, figure=topic, bar="at least +0.100", command=COMMAND),
        ]
    return [
        judged(
            f"{name}.fingerprint", hits <= FINGERPRINT + wide, figure=told,
            bar=f"at most {100 * (FINGERPRINT + wide):.1f} %", command=COMMAND,
        ),
        judged(
            f"{name}.topic", beyond <= TOPIC + broad, figure=topic, bar=f"at most {TOPIC + broad:+.3f}", command=COMMAND
        ),
    ]  # fmt: skip


def features(records: Sequence[Record]) -> Floats:
    """Sizes, moments and gaps of the first records, how they are distributed, their number, and where all ends."""
    sizes = np.zeros(MOST_RECORDS)
    moments = np.zeros(MOST_RECORDS)
    shown = records[:MOST_RECORDS]
    sizes[: len(shown)] = [record.size for record in shown]
    moments[: len(shown)] = [record.at_s for record in shown]
    gaps = np.diff(moments, prepend=0.0)
    shares = np.linspace(0.05, 0.95, SHARES)
    spread = [np.quantile([record.size for record in shown], shares), np.quantile(gaps[: len(shown)], shares)]
    ends = [len(records), records[-1].at_s, sum(one.size for one in records)]
    return np.concatenate([sizes, moments, gaps, *spread, *spread, ends])


def distances(rows: Floats) -> Floats:
    """Between every two captures, each number weighed by how much it varies; to itself infinite."""
    spread = rows.std(axis=0)
    scaled = rows[:, spread > 0] / spread[spread > 0]
    square = (scaled**2).sum(axis=1)
    found = square[:, None] + square[None, :] - 2 * scaled @ scaled.T
    np.fill_diagonal(found, np.inf)
    return np.asarray(found)


def right(apart: Floats, prompts: NDArray[np.int64]) -> float:
    """Share of captures whose nearest neighbour is of the same prompt; of several as near, each counts in part."""
    nearest = apart <= apart.min(axis=1, keepdims=True) * (1 + 1e-12)
    same = prompts[:, None] == prompts[None, :]
    return float(((nearest & same).sum(axis=1) / nearest.sum(axis=1)).mean())


def precision(apart: Floats, prompts: NDArray[np.int64], topic_of: NDArray[np.int64] | None = None) -> float:
    """Mean over topics of the average precision of "this is of the topic", scored by the nearest captures of other
    prompts."""
    topics = (np.arange(PROMPTS) % TOPICS if topic_of is None else topic_of)[prompts]
    others = np.where(prompts[:, None] == prompts[None, :], np.inf, apart)
    nearest = np.argsort(others, axis=1, kind="stable")[:, :NEIGHBOURS]
    found = []
    for topic in range(TOPICS):
        score = (topics[nearest] == topic).mean(axis=1)
        found.append(average_precision(score, topics == topic))
    return float(np.mean(found))


def average_precision(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Area under precision over recall, ties taken together."""
    total, above, area = int(positive.sum()), 0, 0.0
    for level in np.unique(score)[::-1]:
        gained = int((positive & (score == level)).sum())
        above += gained
        area += gained / total * above / int((score >= level).sum())
    return area
