"""How people really type: politeness, lower case, typing errors, missing words, stray text.

All functions draw from the `random.Random` they are given and are deterministic in it.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from recipe.corpus import Topic, expand, normal
from recipe.frames import (
    CLOSINGS,
    FILLERS,
    FRAMES,
    GOAL_FRAMES,
    KEYWORD_FRAMES,
    NOISE,
    OPENINGS,
    PHRASE_FRAMES,
    SITUATION_FRAMES,
    SMALL_WORDS,
    SYNONYMS,
    SYSTEM_PROMPTS,
)

_NEAR = {
    "a": "sq",
    "b": "vn",
    "c": "xv",
    "d": "sf",
    "e": "wr",
    "f": "dg",
    "g": "fh",
    "h": "gj",
    "i": "uo",
    "j": "hk",
    "k": "jl",
    "l": "k",
    "m": "n",
    "n": "bm",
    "o": "ip",
    "p": "o",
    "q": "wa",
    "r": "et",
    "s": "ad",
    "t": "ry",
    "u": "yi",
    "v": "cb",
    "w": "qe",
    "x": "zc",
    "y": "tu",
    "z": "x",
}
# First and last code points of scripts that stray text is drawn from.
_SCRIPTS = ((0xC0, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F))


# Form of a question -> how often it is drawn, where the topic has it.
_FORMS = {"patterns": 0.35, "goals": 0.3, "situations": 0.3, "phrases": 0.15, "keywords": 0.12}


def ask(topic: Topic, rng: random.Random, refused: Callable[[str], bool] | None = None) -> str:
    """One phrasing of `topic`, as somebody might type it; never one that is held out or `refused`."""
    held_out = {normal(text) for text in topic.held_out}
    while normal(text := _ask(topic, rng)) in held_out or (refused is not None and refused(text)):
        pass
    return text


def _ask(topic: Topic, rng: random.Random) -> str:
    """A form of the topic, some words changed, then typed."""
    text = _said(topic, rng)
    for _ in range(2):
        if rng.random() < 0.30:
            text = _synonym(text, rng)
    if rng.random() < 0.20:
        text = _drop_words(text, rng)
    if rng.random() < 0.20:
        text = _fill(text, rng)
    if rng.random() < 0.20:
        text = _open_with(rng.choice(OPENINGS), text, rng)
    if rng.random() < 0.15:
        body, mark = (text[:-1], "?") if text.endswith("?") else (text, "")
        text = body + rng.choice(CLOSINGS) + mark
    for _ in range(2):
        if rng.random() < 0.12:
            text = _typing_error(text, rng)
    return _surface(text, rng)


def _said(topic: Topic, rng: random.Random) -> str:
    """One form of a topic: a pattern, a goal, a situation, a name or a few words, in a frame."""
    forms = [form for form in _FORMS if getattr(topic, form)]
    form = rng.choices(forms, [_FORMS[form] for form in forms])[0]
    if form == "keywords":
        text = _few_words(topic.keywords, rng)
    else:
        text = expand(rng.choice(getattr(topic, form)), rng)
    if form == "phrases":
        text = rng.choice(PHRASE_FRAMES).format(text)
    elif form == "goals":
        text = rng.choice(GOAL_FRAMES).format(text)
    elif form == "situations":
        text = rng.choice(SITUATION_FRAMES).format(text)
    elif form == "patterns" and rng.random() < 0.45:
        text = _reframe(text, rng)
    return text


def _few_words(keywords: tuple[str, ...], rng: random.Random) -> str:
    """Some of a topic's words in any order, with or without a frame and small words between."""
    count = min(len(keywords), rng.randint(2, 4))
    # The first words say most.
    chosen = {keywords[min(int(rng.expovariate(3.5 / len(keywords))), len(keywords) - 1)] for _ in range(count)}
    words = sorted(chosen, key=keywords.index)
    if rng.random() < 0.6:
        rng.shuffle(words)
    if rng.random() < 0.4:
        words.insert(rng.randint(0, len(words)), rng.choice(sorted(SMALL_WORDS)))
    return rng.choice(KEYWORD_FRAMES).format(" ".join(expand(word, rng) for word in words))


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


def _reframe(text: str, rng: random.Random) -> str:
    """Begin the question in another way, where a way is known."""
    lower = text.lower()
    for beginning, others in FRAMES.items():
        if lower.startswith(beginning) and len(text) > len(beginning) + 1:
            return rng.choice(others) + text[len(beginning) :]
    return text


def _synonym(text: str, rng: random.Random) -> str:
    """Replace one word by another with the same sense."""
    words = text.split(" ")
    known = [i for i, word in enumerate(words) if word.rstrip("?,.") in SYNONYMS]
    if known:
        i = rng.choice(known)
        bare = words[i].rstrip("?,.")
        words[i] = rng.choice(SYNONYMS[bare]) + words[i][len(bare) :]
    return " ".join(words)


def _drop_words(text: str, rng: random.Random) -> str:
    """Leave out one small word, or all of them as in a search box."""
    words = text.split(" ")
    small = [i for i, word in enumerate(words) if word.lower() in SMALL_WORDS]
    if len(words) < 4 or not small:
        return text
    if rng.random() < 0.6:
        del words[rng.choice(small)]
    elif len(words) - len(small) >= 2:
        words = [word for i, word in enumerate(words) if i not in small]
    return " ".join(words)


def _fill(text: str, rng: random.Random) -> str:
    """Put in one or two words that change nothing."""
    words = text.split(" ")
    if len(words) > 2:
        for _ in range(rng.randint(1, 2)):
            words.insert(rng.randint(1, len(words) - 1), rng.choice(FILLERS if rng.random() < 0.3 else NOISE))
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
