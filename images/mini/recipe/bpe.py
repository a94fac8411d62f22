"""The tokenizer: byte-level BPE trained on the corpus, and the chat format around messages.

The chat format is ChatML: `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n` for each message. Byte-level
BPE has a token for every byte, so any text can be encoded and decoding gives it back exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipe.corpus import Topic
from recipe.frames import SYSTEM_PROMPTS
from recipe.phrasing import ask

VOCAB_SIZE = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Answers are few and questions many: answers are repeated so that merges serve both.
_ANSWER_WEIGHT = 12
_QUESTIONS = 12_000


def train_tokenizer(topics: Sequence[Topic], seed: int) -> Tokenizer:
    """Train the tokenizer on answers and sampled questions; deterministic in `seed`."""
    rng = random.Random(seed)
    texts = [topic.answer for topic in topics] * _ANSWER_WEIGHT
    texts += [ask(rng.choice(topics), rng) for _ in range(_QUESTIONS)]
    texts += [*SYSTEM_PROMPTS, "system\n", "user\n", "assistant\n"] * _ANSWER_WEIGHT
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def turn(tokenizer: Tokenizer, role: str, content: str) -> list[int]:
    """Token ids of one whole message, its closing newline included."""
    return [*opening(tokenizer, role, content), TURN_END_ID, *newline(tokenizer)]


def opening(tokenizer: Tokenizer, role: str, content: str = "") -> list[int]:
    """Token ids of a message that is not closed: what stands before a reply."""
    return [TURN_START_ID, *_plain(tokenizer, f"{role}\n{content}")]


def newline(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the newline after a message's end mark."""
    return _plain(tokenizer, "\n")


def reply(tokenizer: Tokenizer, answer: str) -> list[int]:
    """Token ids that the model should produce after `opening("assistant")`, the end included."""
    return [*_plain(tokenizer, answer), TURN_END_ID]


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
