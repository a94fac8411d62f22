"""G7, silent wire: sizes and times of a padded tenant's answers disclose neither the prompt nor its topic.

Fifty prompts in five topics are each sent several times over a loopback socket (``wire_capture``). An observer with
samples of all of them identifies the prompt of another capture by its nearest neighbour, and its topic by its
neighbours among other prompts; once by sizes and times, once by sizes alone.

* ``G7.sizes``: all streams, and all answers that are not streamed, have equal sizes in equal order.
* ``G7.cost``: the cost of padding in bytes and seconds; it rises when a busy machine misses ticks.
* ``G7.fingerprint``, ``G7.topic``: the observer does no better than chance. The short form has few samples, so its bars
    are wider by three standard deviations.

Controls: answers of an unpadded tenant are identified.

Not covered: the size of the request itself, the requested form of answer, and which of the few record counts an answer
needs; all answers here need the smallest. The existence of an answer is visible, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from appliance.gateway.front.padding import Padding
from appliance.selftest.result import Result, judged
from appliance.selftest.wire_capture import PROMPTS, TOPICS, Record, capture_all

COMMAND = "athanor selftest --only G7"
SHORT, FULL = 4, 30
"""Repetitions of each prompt."""

AT_ONCE = 40
"""Number of concurrent requests."""

MOST_RECORDS = 96
"""Number of leading records of a capture that are used."""

SHARES = 19
"""Points at which the distributions of sizes and gaps are sampled; they are invariant under time shifts."""

NEIGHBOURS = 5
FINGERPRINT, TOPIC = 0.04, 0.02
"""Release bars: share of right answers, and average precision above chance."""

Floats = NDArray[np.float64]


def run(full: bool) -> list[Result]:
    """Run the rows of G7."""
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
    """Check that all answers of one kind have equal lengths, and equal pieces where pieces arrived separately."""
    kinds = [{sum(record.size for record in one) for one in capture.values()} for capture in captures]
    streamed = [tuple(record.size for record in one) for one in captures[0].values()]
    apart = {one for one in streamed if len(one) == max(map(len, streamed))}
    figure = f"{[len(kind) for kind in kinds]} totals over {[len(one) for one in captures]} answers"
    passed = all(len(kind) == 1 for kind in kinds) and len(apart) == 1
    bar = "one total and one order of sizes of each kind"
    return judged("G7.sizes", passed, figure=figure, bar=bar, command=COMMAND)


def cost_row(padded: dict[tuple[int, int], list[Record]], plain: dict[tuple[int, int], list[Record]]) -> Result:
    """Measure the cost of padding for a stream: bytes, and seconds to its end; compared with the required minimum."""
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
    """Run the observer: it must learn little from a claim's captures, much from a control's."""
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
            f"{name}.fingerprint",
            hits <= FINGERPRINT + wide,
            figure=told,
            bar=f"at most {100 * (FINGERPRINT + wide):.1f} %",
            command=COMMAND,
        ),
        judged(
            f"{name}.topic", beyond <= TOPIC + broad, figure=topic, bar=f"at most {TOPIC + broad:+.3f}", command=COMMAND
        ),
    ]


def features(records: Sequence[Record]) -> Floats:
    """Return sizes, times and gaps of the first records, their distributions, their number, and the end time."""
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
    """Return the distance between every two captures, each feature scaled by its variance; infinite to itself."""
    spread = rows.std(axis=0)
    scaled = rows[:, spread > 0] / spread[spread > 0]
    square = (scaled**2).sum(axis=1)
    found = square[:, None] + square[None, :] - 2 * scaled @ scaled.T
    np.fill_diagonal(found, np.inf)
    return np.asarray(found)


def right(apart: Floats, prompts: NDArray[np.int64]) -> float:
    """Return the share of captures whose nearest neighbour has their prompt; ties count proportionally."""
    nearest = apart <= apart.min(axis=1, keepdims=True) * (1 + 1e-12)
    same = prompts[:, None] == prompts[None, :]
    return float(((nearest & same).sum(axis=1) / nearest.sum(axis=1)).mean())


def precision(apart: Floats, prompts: NDArray[np.int64], topic_of: NDArray[np.int64] | None = None) -> float:
    """Return the mean over topics of the average precision of "has this topic", scored by the nearest captures of other
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
    """Compute the area under precision over recall; ties are taken together."""
    total, above, area = int(positive.sum()), 0, 0.0
    for level in np.unique(score)[::-1]:
        gained = int((positive & (score == level)).sum())
        above += gained
        area += gained / total * above / int((score >= level).sum())
    return area
