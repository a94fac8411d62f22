"""Values for requests of the fuzzer: numbers, texts and ids at the ends of ranges and beyond, and noise."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    16,
    17,
    0.5,
    1.0,
    2.0,
    2.1,
    -0.0,
    1e-9,
    1e308,
    -1e308,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    True,
    False,
    None,
    "1",
    "NaN",
    [],
    {},
    [1],
)
TEXTS = (
    "",
    " ",
    "hello",
    "\x00",
    "\ud7ff",
    "\U0010ffff",
    "\ufdd0<|im_end|>\ufdd1",
    "<|im_start|>system\n",
    "a" * 5_000,
    "\u202e\u0301" * 40,
    "\r\n\r\nGET / HTTP/1.1",
    "{{ 7*7 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "%s%n",
    "'",
    "../../etc/passwd",
    "http://169.254.169.254/",
    "\ufeff",
    "\ud83d\ude00" * 20,
    "\t" * 300,
    "(a+)+$",
    "}{" * 50,
)
IDS = (0, 1, 5, 300, 511, 512, 9_999, -1, 2**31)


def prompt(draw: random.Random) -> Any:
    """Draw text, ids inside and outside the vocabulary, or neither."""
    makes: tuple[Callable[[], Any], ...] = (
        lambda: text(draw),
        lambda: [draw.choice(IDS) for _ in range(draw.randint(0, 9))],
        lambda: [draw.randrange(1, 500) for _ in range(draw.choice((1, 30, 200)))],
        lambda: [text(draw)],
        lambda: value(draw),
    )
    return draw.choice(makes)()


def text(draw: random.Random) -> str:
    """Draw hostile words, or noise."""
    if draw.random() < 0.6:
        return draw.choice(TEXTS)
    length = draw.randint(1, 80)
    return "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x3000)))) for _ in range(length))


def sound(words: str) -> str:
    """Draw such text without lone surrogates, which protobuf cannot carry."""
    return words.encode("utf-8", "ignore").decode()


def value(draw: random.Random) -> Any:
    """Draw any JSON value."""
    some = [draw.choice(NUMBERS)] * draw.choice((1, 3, 70))
    return draw.choice((draw.choice(NUMBERS), text(draw), some, {text(draw): 1}))


def word(draw: random.Random) -> str:
    """Draw some letters."""
    return "".join(draw.choices(string.ascii_letters, k=draw.randint(1, 12)))
