"""How long a step takes on a card, as a linear model: what was measured here, and what others publish.

A step costs a fixed time (the weights are read once), a time for each row that decodes, for each token of context that
those rows read, and where there are prompts a fixed time more, a time for each prompt token and for each pair of a
prompt token and a token that it attends to. The numbers are least squares of relative errors, none below zero, over the
``points`` or ``rates`` beside them (attention of the measured card: its kernel's 532 TFLOP/s, 524,288 operations a
pair); ``tests/bench/test_simulation.py`` compares model and points. Seconds throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
EIGHT_B_KV_BYTES = 131_072
"""Bytes of KV of a token: Llama 3.1 8B, 32 layers, 8 heads of 128, keys and values in bfloat16."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step that was timed."""

    rows: int
    context: int
    """Tokens of context of each row."""
    prompt: int
    """Prompt tokens beside them, all of one prompt that begins in this step."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Output tokens a second of a saturated card."""

    prompt: int
    output: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Linear model of one card with one model."""

    name: str
    source: str
    fixed_s: float
    row_s: float
    context_s: float
    prompt_fixed_s: float
    token_s: float
    attention_s: float
    kv_token_bytes: int
    kv_bytes: int
    """Memory that is left for KV."""
    memory_bytes_per_s: float
    """Speed at which a block is zeroed that changes its owner."""
    points: tuple[Point, ...] = ()
    rates: tuple[Rate, ...] = ()

    def seconds(self, rows: int, context: int, prompt: int, attended: float, zeroed: int = 0) -> float:
        """Return the time of a step.

        Args:
            rows: rows that decode.
            context: tokens of context of all of them together.
            prompt: prompt tokens.
            attended: sum over the prompt tokens of the tokens that each attends to.
            zeroed: bytes of KV that are zeroed first.
        """
        taken = self.fixed_s + self.row_s * rows + self.context_s * context + zeroed / self.memory_bytes_per_s
        if prompt:
            taken += self.prompt_fixed_s + self.token_s * prompt + self.attention_s * attended
        return taken

    def saturated(self, prompt: int, output: int) -> float:
        """Return the output tokens a second of a card that is never idle and whose fixed times are shared by so many
        rows that they vanish: what the published rates are of."""
        each = self.token_s * prompt + self.attention_s * prompt * prompt / 2
        each += output * (self.row_s + self.context_s * (prompt + output / 2))
        return output / each

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the memory holds."""
        return self.kv_bytes // self.kv_token_bytes


H200 = StepTimes(
    name="h200-bf16",
    source="measured on one H200, 2026-11-26: docs/gpu.md, rows of fp8's control, one pass and 256 streams",
    fixed_s=4.314e-3,
    row_s=1.176e-5,
    context_s=3.372e-8,
    prompt_fixed_s=2.631e-3,
    token_s=2.115e-5,
    attention_s=9.86e-10,
    kv_token_bytes=EIGHT_B_KV_BYTES,
    kv_bytes=110 * 10**9,
    memory_bytes_per_s=4.3e12,
    points=(
        Point(1, 512, 0, 4.28e-3),
        Point(64, 512, 0, 6.25e-3),
        Point(256, 512, 0, 11.8e-3),
        Point(256, 1_500, 0, 20.7e-3),
        Point(64, 1_032, 256, 17.0e-3),
        Point(64, 1_032, 512, 20.0e-3),
        Point(200, 1_032, 512, 24.9e-3),
        Point(64, 1_032, 2_048, 55.8e-3),
        Point(200, 1_032, 8_192, 231e-3),
    ),
)
"""This engine on one H200, Llama 8B's shape in bfloat16. 256 prompt tokens beside 64 rows are two passes, which are
faster there."""

_SHAPES = (
    (128, 128),
    (128, 2_048),
    (128, 4_096),
    (500, 2_000),
    (1_000, 1_000),
    (1_000, 2_000),
    (2_048, 128),
    (2_048, 2_048),
    (5_000, 500),
    (20_000, 2_000),
)
"""Prompt and output tokens of the published rates."""

_SOURCE = "published: NVIDIA/TensorRT-LLM at 00f37686, docs/source/performance/perf-overview.md, Llama 3.1 8B FP8, v1.0"


def _rates(*values: float) -> tuple[Rate, ...]:
    return tuple(Rate(*shape, value) for shape, value in zip(_SHAPES, values, strict=True))


H200_FP8 = StepTimes(
    name="h200-fp8-published",
    source=f"{_SOURCE}; fixed time: 8 GB of weights at 0.8 of 4.8 TB/s",
    fixed_s=2.1e-3,
    row_s=1.897e-5,
    context_s=1.636e-8,
    prompt_fixed_s=0.0,
    token_s=1.367e-5,
    attention_s=5.583e-10,
    kv_token_bytes=EIGHT_B_KV_BYTES // 2,
    kv_bytes=116 * 10**9,
    memory_bytes_per_s=4.3e12,
    rates=_rates(27_911, 26_221, 18_027, 20_770, 17_744, 16_828, 3_538, 12_194, 3_902, 1_804),
)

H100_FP8 = StepTimes(
    name="h100-fp8-published",
    source=f"{_SOURCE}; fixed time: 8 GB of weights at 0.8 of 3.35 TB/s",
    fixed_s=3.0e-3,
    row_s=1.684e-5,
    context_s=2.408e-8,
    prompt_fixed_s=0.0,
    token_s=1.313e-5,
    attention_s=7.843e-10,
    kv_token_bytes=EIGHT_B_KV_BYTES // 2,
    kv_bytes=61 * 10**9,
    memory_bytes_per_s=3.0e12,
    rates=_rates(28_312, 22_714, 14_325, 17_660, 15_220, 13_899, 3_450, 9_305, 3_459, 1_351),
)

CARDS = {one.name: one for one in (H200, H200_FP8, H100_FP8)}
"""Cards by name."""
