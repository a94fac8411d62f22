"""The one table of the numbers that a caller may send to have a token chosen.

``Sampling`` is the table and the message part at once: each field carries its ``Parameter``. Derived from it are the
wire's columns and bounds, what HTTP and gRPC read and refuse, the rows of the samplers, the device's words, the warm-up
and the table of ``docs/sampling.md``. A new scalar is one field here and its arithmetic in each sampler.

A number has one name everywhere: field of ``Sampling``, JSON field, field of the proto message ``Sampling``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from isolation.ipc.frame import MAX_U32, MAX_U64

Number = int | float

LEAST_FLOAT = 5e-324
"""The least float above 0: "above 0" as a closed range."""

MOST_FLOAT = 1.7976931348623157e308

MAX_TOP_K = 1 << 20
"""Largest top-k of a caller: above every published vocabulary."""

GREEDY_BELOW = 1e-5
"""A temperature under this is taken as 0: a division by it would overflow 32-bit logits."""


def _greedy(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_BELOW else float(temperature)


def _keep_all(top_k: int) -> int:
    """vLLM writes "keep all" as -1."""
    return max(0, top_k)


def _unsigned(seed: int) -> int:
    """OpenAI's seed is signed, the wire's is not: both spellings of one 64-bit number are taken."""
    return seed & MAX_U64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number of ``Sampling``: its type, its ranges, and what the documents say of it."""

    title: str
    """Name in the documents' table."""
    meaning: str
    """What the number does, one sentence, for the references."""
    default: Number
    """Value where a caller sends none; the seed is drawn instead."""
    identity: Number
    """Value at which the parameter changes nothing."""
    low: Number
    """Least value that a caller may send."""
    high: Number
    """Largest value that a caller may send."""
    least: Number
    """Least value on the wire."""
    most: Number
    """Largest value on the wire."""
    example: Number
    """A value that has an effect: the warm-up and tests compute with it."""
    code: str = "d"
    """``struct`` code on the wire: ``d``, ``I`` or ``Q``."""
    convert: Callable[[Any], Number] = float
    """A caller's value as the wire carries it."""
    above: bool = False
    """Whether ``low`` itself is refused."""
    hint: str = ""
    """What to do instead, said where ``low`` itself is refused."""
    span: str = ""
    """The range in the documents' table; empty: "``low`` to ``high``"."""
    absent: str = ""
    """The default in the documents' table; empty: the number."""
    name: str = ""
    """Field of ``Sampling``, JSON field and field of the proto message."""

    @property
    def kind(self) -> type[int] | type[float]:
        """Type of the number in JSON."""
        return float if self.code == "d" else int


def _row(
    *,
    default: Number,
    low: Number,
    high: Number,
    identity: Number | None = None,
    least: Number | None = None,
    most: Number | None = None,
    **rest: Any,
) -> Any:
    """A dataclass field that carries its row of the table. The identity is the default, and the wire's range the
    caller's, where nothing else is said."""
    parameter = Parameter(
        default=default,
        low=low,
        high=high,
        identity=default if identity is None else identity,
        least=low if least is None else least,
        most=high if most is None else most,
        **rest,
    )
    return field(default=default, metadata={"parameter": parameter})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Numbers that choose a token, in wire order. Greedy when ``temperature`` is 0. Order of application: penalties,
    temperature, top-k, top-p, min-p, typical-p."""

    temperature: float = _row(
        title="temperature",
        default=1.0,
        low=0.0,
        high=2.0,
        most=MOST_FLOAT,
        example=1.5,
        convert=_greedy,
        span="0 to 2; below 1e-5 counts as 0",
        meaning="Divisor of the scores; 0 takes the likeliest token.",
    )
    top_k: int = _row(
        title="top-k",
        default=0,
        low=-1,
        high=MAX_TOP_K,
        least=0,
        most=MAX_U32,
        example=50,
        code="I",
        convert=_keep_all,
        span="0 to 1,048,576; 0 keeps all, as does -1 over HTTP (vLLM)",
        meaning="Keeps the k likeliest tokens; 0 keeps all.",
    )
    top_p: float = _row(
        title="top-p",
        default=1.0,
        low=0.0,
        high=1.0,
        least=LEAST_FLOAT,
        example=0.9,
        above=True,
        hint="temperature 0 takes the likeliest token",
        span="above 0, at most 1",
        meaning="Keeps the smallest set of the likeliest tokens whose probability reaches this.",
    )
    min_p: float = _row(
        title="min-p",
        default=0.0,
        low=0.0,
        high=1.0,
        example=0.05,
        meaning="Drops tokens less likely than this share of the likeliest one's probability.",
    )
    typical_p: float = _row(
        title="typical-p",
        default=1.0,
        low=0.0,
        high=1.0,
        least=LEAST_FLOAT,
        example=0.6,
        above=True,
        hint="1 keeps all",
        span="above 0, at most 1",
        meaning="Keeps the smallest set of tokens whose information is nearest to the entropy and whose "
        "probability reaches this (locally typical sampling, arXiv 2202.00666).",
    )
    repetition_penalty: float = _row(
        title="repetition",
        default=1.0,
        low=0.01,
        high=100.0,
        least=LEAST_FLOAT,
        most=MOST_FLOAT,
        example=1.1,
        meaning="Divides positive and multiplies negative scores of tokens in prompt and output, as in CTRL "
        "(arXiv 1909.05858).",
    )
    presence_penalty: float = _row(
        title="presence",
        default=0.0,
        low=-2.0,
        high=2.0,
        example=0.1,
        meaning="Subtracted from the scores of tokens in the output.",
    )
    frequency_penalty: float = _row(
        title="frequency",
        default=0.0,
        low=-2.0,
        high=2.0,
        example=0.1,
        meaning="Subtracted once for each time that a token stands in the output.",
    )
    seed: int = _row(
        title="seed",
        default=0,
        low=-(1 << 63),
        high=MAX_U64,
        least=0,
        example=1,
        code="Q",
        convert=_unsigned,
        span="all of 64 bits, signed or unsigned over HTTP",
        absent="drawn at random",
        meaning="Key of the request's random numbers; the host draws one where none is sent, so that a request can "
        "be repeated.",
    )


PARAMETERS: tuple[Parameter, ...] = tuple(replace(one.metadata["parameter"], name=one.name) for one in fields(Sampling))
"""The table, in wire order."""

NAMES = tuple(one.name for one in PARAMETERS)

WIRE_CODES = "".join(one.code for one in PARAMETERS)
"""``struct`` codes of all numbers, in wire order."""

values_of: Callable[[Sampling], tuple[Number, ...]] = attrgetter(*NAMES)
"""All numbers of a ``Sampling``, in wire order."""

_examples: dict[str, Any] = {one.name: one.example for one in PARAMETERS}
EXAMPLE = Sampling(**_examples)
"""Sampling in which every number has an effect."""

_BOUNDS = tuple((one.name, one.least, one.most) for one in PARAMETERS)


def out_of_bounds(sampling: Sampling) -> str:
    """What is wrong with the first number that the wire cannot carry; empty where all are sound. NaN never is."""
    for (name, least, most), value in zip(_BOUNDS, values_of(sampling), strict=True):
        if not least <= value <= most:
            return f"{name} is {value}, outside {least}..{most}"
    return ""
