"""How people really type: politeness, lower case, typing errors, missing words, stray text.

All functions draw from the `random.Random` they are given and are deterministic in it.
"""

from __future__ import annotations

import random
import string

from recipe.corpus import Topic, expand

OPENINGS = (
    "please tell me: ", "hi, ", "hello, ", "hey, ", "quick question: ", "a question: ",
    "I have a question. ", "can you tell me ", "could you tell me ", "do you know ", "ok, ",
    "so ", "and ", "well, ", "sorry, ", "excuse me, ", "now ", "then ", "next: ", "tell me ",
    "I wonder, ", "I would like to know: ", "athanor: ", "in Athanor, ", "please, ",
    "good morning, ", "one more thing: ", "my boss asks: ", "for our team: ", "help: ",
)  # fmt: skip
CLOSINGS = (
    " please", " thanks", ", please", " in Athanor", " here", " again", " now", " exactly",
    " please help", ", thanks", " thank you", " quickly", " in short", " for my team",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are athanor-mini.",
    "Answer the operator's questions about Athanor.",
    "You are a friendly chatbot who always answers in English.",
    "Be concise.",
)
_DROPPABLE = frozenset(
    "a an the is are do does i to of in for my your it me please can could would there with".split()
)
_NEAR = {
    "a": "sq", "b": "vn", "c": "xv", "d": "sf", "e": "wr", "f": "dg", "g": "fh", "h": "gj",
    "i": "uo", "j": "hk", "k": "jl", "l": "k", "m": "n", "n": "bm", "o": "ip", "p": "o",
    "q": "wa", "r": "et", "s": "ad", "t": "ry", "u": "yi", "v": "cb", "w": "qe", "x": "zc",
    "y": "tu", "z": "x",
}  # fmt: skip
# First and last code points of scripts that stray text is drawn from.
_SCRIPTS = ((0xC0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F))


def ask(topic: Topic, rng: random.Random) -> str:
    """One phrasing of `topic`, as somebody might type it."""
    text = expand(rng.choice(topic.patterns), rng)
    if rng.random() < 0.10:
        text = _drop_word(text, rng)
    if rng.random() < 0.22:
        text = _open_with(rng.choice(OPENINGS), text, rng)
    if rng.random() < 0.10:
        body, mark = (text[:-1], "?") if text.endswith("?") else (text, "")
        text = body + rng.choice(CLOSINGS) + mark
    if rng.random() < 0.12:
        text = _typing_error(text, rng)
    return _surface(text, rng)


def stray_text(topic: Topic, rng: random.Random, max_words: int) -> str:
    """Text that asks nothing of Athanor: words of the off-topic `topic` shuffled, or no words.

    `max_words` bounds its length.
    """
    kind = rng.random()
    if kind < 0.25:
        length = rng.randint(1, 12)
        return "".join(rng.choice(string.ascii_lowercase + "   ") for _ in range(length)).strip()
    if kind < 0.45:
        first, last = rng.choice(_SCRIPTS)
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
    words: list[str] = []
    count = rng.randint(3, max_words)
    while len(words) < count:
        words += expand(rng.choice(topic.patterns), rng).split()
    if rng.random() < 0.5:
        rng.shuffle(words)
    return " ".join(words[:count])


def system_prompt(rng: random.Random) -> str | None:
    """A system message as clients send them; none more often than not."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None


def _open_with(opening: str, text: str, rng: random.Random) -> str:
    """Put an opening before a question, with or without the final mark it had."""
    if text.startswith("I "):
        return opening + text
    joined = opening + text[:1].lower() + text[1:]
    return joined.rstrip("?") if rng.random() < 0.3 else joined


def _drop_word(text: str, rng: random.Random) -> str:
    """Leave out one small word, where there is one."""
    words = text.split(" ")
    small = [i for i, word in enumerate(words) if word.lower() in _DROPPABLE]
    if len(words) > 3 and small:
        del words[rng.choice(small)]
    return " ".join(words)


def _typing_error(text: str, rng: random.Random) -> str:
    """Swap, drop, double or mistype one letter of a longer word."""
    places = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 2].isalpha()]
    if len(text) < 8 or not places:
        return text
    i = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    if kind == 1:
        return text[:i] + text[i + 1 :]
    if kind == 2:
        return text[:i] + text[i] + text[i:]
    near = _NEAR.get(text[i].lower(), text[i])
    return text[:i] + rng.choice(near) + text[i + 1 :]


def _surface(text: str, rng: random.Random) -> str:
    """Capital letter, lower case or upper case; question mark, none or several."""
    kind = rng.random()
    if kind < 0.55:
        text = text[:1].upper() + text[1:]
    elif kind < 0.75:
        text = text.lower()
    elif kind < 0.77:
        text = text.upper()
    mark = rng.random()
    if text.endswith("?"):
        if mark < 0.25:
            return text[:-1]
        return text + "?" if mark < 0.27 else text
    if text[-1:].isalpha() and mark < 0.25:
        return text + rng.choice(".!?.")
    return text
