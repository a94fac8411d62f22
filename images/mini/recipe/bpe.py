"""The tokenizer: byte-level BPE trained on the corpus, and the chat format around messages.

The chat format is ChatML: `<|im_start|>ROLE\\nCONTENT<|im_end|>\\n` for each message; tools.py has the form of
tools, calls and results, which CHAT_TEMPLATE renders too. Byte-level BPE has a token for every byte, so any text can be
encoded and decoding gives it back exactly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from recipe import tools
from recipe.corpus import Topic
from recipe.frames import SYSTEM_PROMPTS
from recipe.phrasing import ask

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)
CHAT_TEMPLATE = (
    "{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') + 'Tools:' }}"
    "{% for tool in tools %}{{ '\\n' + (tool['function'] | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}{% if not (tools and first and loop.first) %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) }}"
    "{{ ', \"arguments\": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Answers are few and questions many: answers are repeated so that merges serve both.
_ANSWER_WEIGHT = 12
_QUESTIONS = 24_000
_DIALOGUES = 600


def train_tokenizer(topics: Sequence[Topic], seed: int) -> Tokenizer:
    """Train the tokenizer on answers and sampled questions; deterministic in `seed`."""
    rng = random.Random(seed)
    texts = [topic.answer for topic in topics] * _ANSWER_WEIGHT
    texts += [ask(rng.choice(topics), rng) for _ in range(_QUESTIONS)]
    for _ in range(_DIALOGUES):
        dialogue = tools.draw(rng, ("", ""))
        texts += [tools.system_text(dialogue.tools), *map(tools.content, dialogue.messages)]
    texts += [*SYSTEM_PROMPTS, "system\n", "user\n", "assistant\n", "tool\n"] * _ANSWER_WEIGHT
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
