"""G1 by timing: is a prompt that another tenant has just sent answered sooner than a fresh one?

One appliance has two tenants; prompts are random ids used once. In each round alpha sends a fresh prompt, and then, in
random order, beta guesses that prompt, beta sends a fresh one, and alpha repeats its own. Beta's time to first token
must not differ between guesses and fresh prompts; alpha's repetitions must differ from alpha's fresh prompts, which is
the control. The measure is the area under the ROC curve (AUC): the probability that a fresh prompt takes longer than a
known one. Its standard error is DeLong's (Biometrics 44, 1988); load drifts affect both arms alike, because they are
interleaved.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from appliance.common.figures import counted
from appliance.operator.cli.bench_target import Target, own_appliance
from appliance.selftest.result import Result, judged

ROUNDS = {True: {64: 4_000, 256: 4_000, 1_024: 3_000}, False: {512: 150}}
"""Samples of an arm by prompt length, in the full and in the short form. With 1,600, a fair coin would pass three
lengths at the full form's bound one time in two; with these, ninety-eight times in a hundred."""

MOST_AUC = {True: 0.53, False: 0.62}
"""Largest upper bound (95 %, one-sided) for guesses; the short form alone has an error of 0.03."""

LEAST_CONTROL = 0.95
"""Smallest AUC of the control, for prompts of at least this many tokens:"""
CONTROL_FROM = 256

WARM_ROUNDS = 10
KV_BYTES = 256 << 20
IDS = range(8, 2_000)
"""Valid token ids of the embedded model."""
ONE_SIDED_95 = 1.645
COMMAND = "python appliance/selftest/g1_timing.py"


class Arms(NamedTuple):
    """Samples in seconds to the first token."""

    guessed: list[float]
    fresh: list[float]
    repeated: list[float]
    own_fresh: list[float]
    attached: list[int]
    """Cached prompt tokens reported to beta."""
    reused: list[int]
    """Cached prompt tokens reported for alpha's repetitions."""


class Auc(NamedTuple):
    """Area under the curve, and its standard error."""

    area: float
    error: float

    @property
    def upper(self) -> float:
        """Return the upper bound of the distance from chance, whichever arm is faster."""
        return 0.5 + abs(self.area - 0.5) + ONE_SIDED_95 * self.error


def auc(known: Sequence[float], fresh: Sequence[float]) -> Auc:
    """Estimate the probability that ``fresh`` takes longer than ``known``; ties count half. Each needs two samples."""
    one, other = np.asarray(known), np.asarray(fresh)
    of_known = _placements(one, other)
    of_fresh = 1 - _placements(other, one)
    variance = of_known.var(ddof=1) / len(one) + of_fresh.var(ddof=1) / len(other)
    return Auc(float(of_known.mean()), float(np.sqrt(variance)))


def _placements(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each value the share of the others above it."""
    ordered = np.sort(others)
    below_or_equal = np.searchsorted(ordered, values, side="right")
    below = np.searchsorted(ordered, values, side="left")
    above: np.ndarray = 1 - (below + below_or_equal) / 2 / len(others)
    return above


class TenantConnection:
    """A tenant's persistent connection."""

    def __init__(self, target: Target, key: str) -> None:
        place = urlsplit(target.url if "//" in target.url else f"http://{target.url}")
        self._model = target.model
        self._socket = socket.create_connection((place.hostname, place.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\ncontent-length: "
        )

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds until the one-token answer arrives, and the cached prompt tokens that it reports.

        Raises:
            RuntimeError: the answer is an error, which would invalidate the other figures.
        """
        body = json.dumps({"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        data = f"{self._head}{len(body)}\r\n\r\n".encode() + body
        began = time.perf_counter()
        self._socket.sendall(data)
        head, rest = self._until(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
        while len(rest) < length:
            rest += self._more()
        took = time.perf_counter() - began
        answer = json.loads(rest)
        if "usage" not in answer:
            raise RuntimeError(f"no answer but {answer}")
        return took, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _until(self, mark: bytes) -> tuple[bytes, bytes]:
        text = b""
        while mark not in text:
            text += self._more()
        head, _, rest = text.partition(mark)
        return head, rest

    def _more(self) -> bytes:
        piece = self._socket.recv(1 << 16)
        if not piece:
            raise RuntimeError("the server closed the connection")
        return piece


def collect(target: Target, length: int, rounds: int, seed: int) -> Arms:
    """Collect samples of all arms; the first rounds warm up and are dropped."""
    draw = random.Random(seed)
    alpha, beta = (TenantConnection(target, key) for key in target.api_keys[:2])
    arms = Arms([], [], [], [], [], [])
    for number in range(-WARM_ROUNDS, rounds):
        prompt, other = (draw.choices(IDS, k=length) for _ in range(2))
        own_fresh, _ = alpha.ask(prompt)
        took: dict[str, tuple[float, int]] = {}
        for arm in draw.sample(("guessed", "fresh", "repeated"), 3):
            caller = alpha if arm == "repeated" else beta
            took[arm] = caller.ask(other if arm == "fresh" else prompt)
        if number >= 0:
            arms.own_fresh.append(own_fresh)
            for arm, (seconds, _) in took.items():
                getattr(arms, arm).append(seconds)
            arms.attached.extend((took["guessed"][1], took["fresh"][1]))
            arms.reused.append(took["repeated"][1])
    alpha.close()
    beta.close()
    return arms


def rows(length: int, arms: Arms, *, full: bool) -> list[Result]:
    """Build the guarantee's and the control's rows for one prompt length."""
    command = COMMAND + (" --full" if full else "")
    found, control = auc(arms.guessed, arms.fresh), auc(arms.repeated, arms.own_fresh)
    samples = len(arms.guessed)
    least = LEAST_CONTROL if length >= CONTROL_FROM else 0.5
    return [
        judged(
            f"G1.timing.{length}",
            found.upper <= MOST_AUC[full],
            bar=f"upper 95 % <= {MOST_AUC[full]}",
            command=command,
            figure=f"AUC {found.area:.3f}, upper {found.upper:.3f}, {counted(samples, 'sample')} an arm",
        ),
        judged(
            f"G1.timing.{length}.control",
            control.area >= least,
            bar=f"AUC >= {least}",
            command=command,
            figure=f"AUC {control.area:.3f} for one's own prompts",
        ),
        judged(
            f"G1.cached.{length}",
            not any(arms.attached),
            bar="0 for another tenant's prompt",
            command=command,
            figure=f"{sum(map(bool, arms.attached))} of {counted(len(arms.attached), 'answer')} named cached tokens",
        ),
        judged(
            f"G1.cached.{length}.control",
            all(arms.reused),
            bar="all of one's own",
            command=command,
            figure=f"{sum(map(bool, arms.reused))} of {counted(samples, 'repetition')}",
        ),
    ]


def run(full: bool) -> Iterator[Result]:
    """Start an appliance with the embedded model and take all figures."""
    return measured(full)


def measured(full: bool) -> Iterator[Result]:
    """Take all figures, one length after the other; the full form takes an hour."""
    with own_appliance(None, KV_BYTES, "auto") as target:
        for length, rounds in ROUNDS[full].items():
            yield from rows(length, collect(target, length, rounds, seed=length), full=full)


if __name__ == "__main__":
    for result in measured("--full" in sys.argv[1:]):
        print(f"{result.id:28} {result.verdict:5} {result.figure} ({result.bar})", flush=True)
