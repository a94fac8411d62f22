"""Write expected.json: `python images/mini/expect.py`.

Greedy answers of athanor-mini, made with `transformers` in float32 from the bfloat16 weights,
and so independent both of the training code and of the engine that the answers check.
Each entry has `messages`, the corpus `topic` of the last question and whether that phrasing was
`held_out` of the training, whether the answer is `right` (word for word the corpus'), the
`prompt_ids` of the chat template, the `answer_ids` (end mark included) and the `answer` as text.

`held_out` has questions that were never trained on, with the answers that the corpus had for them, and how the weights
score on them: the corpus changes with every command and key, the weights do not.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from recipe import corpus, export, measure
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
MODEL = HERE / "athanor-mini"
MAX_NEW_TOKENS = 160  # the longest answer has 90
_LATE_TOKENS = 3500  # length of the conversation before the question that is asked late
_THREADS = 1

QUESTIONS = (
    "Hello",
    "Who are you?",
    "What is Athanor?",
    "What is a sandbox?",
    "Why gVisor?",
    "Does the engine have network access?",
    "How do I add a tenant?",
    "How do I make an API key?",
    "How do I rotate a key?",
    "How do I check the policy?",
    "How do I reload the policy?",
    "Show me an example policy",
    "What limits are there?",
    "What does 429 mean?",
    "Why do I get 401?",
    "How do I see the last requests?",
    "Where are the metrics?",
    "How do I use the OpenAI client?",
    "How do I use gRPC?",
    "How do I serve another model?",
    "Can tenants see each other's prompts?",
    "What happens when an engine dies?",
    "How do I install it under systemd?",
    "What is the capital of France?",
    "Give me a curl example",
    "Thanks",
    # held out of the training
    "Please explain how tenants are added",
    "What is the point of gVisor?",
    "Is there a unix signal for reloading?",
    "What would a curl call look like?",
    "My client reports 503, what is wrong?",
    "How can I end the demo?",
    "I run a collector, how do I point Athanor at it?",
    "How can I check that the sandbox image is genuine?",
    "What is the price of gold?",
    "Is Docker a requirement?",
    "Could you explain the prefill phase?",
)


class Reference:
    """athanor-mini as `transformers` runs it, greedy, in float32."""

    def __init__(self, folder: Path = MODEL) -> None:
        torch.set_num_threads(_THREADS)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the chat format, ready for a reply."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def answer(self, prompt_ids: list[int]) -> list[int]:
        """Token ids of the greedy reply, its end mark included where it has one."""
        ids = torch.tensor([prompt_ids])
        with torch.no_grad():
            out = self._network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        new: list[int] = out[0, len(prompt_ids) :].tolist()
        return new

    def text(self, ids: list[int]) -> str:
        """Token ids as text, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def long_conversation(
    topics: tuple[corpus.Topic, ...], question: str, reference: Reference, *, tokens: int
) -> list[dict[str, str]]:
    """A conversation of at least `tokens` tokens that ends with `question`; deterministic."""
    rng = random.Random(tokens)
    known = measure.trained_on(topics)
    last = [{"role": "user", "content": question}]
    messages: list[dict[str, str]] = []
    while len(reference.prompt(messages + last)) < tokens:
        asked, answer = rng.choice(known)
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    return messages + last


def main() -> None:
    """Write the file and say which answers are not those of the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "expected.json")
    out = parser.parse_args().out
    topics = corpus.load_desk(HERE)
    reference = Reference()
    entries = [_entry(reference, messages, topics) for messages in _conversations(topics, reference)]
    digest = export.digests(MODEL)["model.safetensors"]
    value = {"weights_sha256": digest, "dtype": "float32", "entries": entries, "held_out": _held_out(topics)}
    out.write_text(json.dumps(value, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    wrong = [entry for entry in entries if not entry["right"]]
    for entry in wrong:
        print(f"wrong: {entry['messages'][-1]['content']!r} -> {entry['answer'][:60]!r}")
    print(f"{len(entries)} answers, {len(entries) - len(wrong)} word for word as in the corpus")


def _held_out(topics: tuple[corpus.Topic, ...]) -> dict[str, Any]:
    """Questions that were never trained on, their answers, and the score of the committed weights."""
    questions = measure.held_out(topics)[::2]
    score = measure.score(*export.read_model(MODEL), questions)
    return {"loss": round(score.loss, 6), "exact": score.exact, "questions": questions}


def _conversations(topics: tuple[corpus.Topic, ...], reference: Reference) -> list[list[dict[str, str]]]:
    """Every conversation to answer."""
    single = [[{"role": "user", "content": text}] for text in QUESTIONS]
    tenant = next(topic for topic in topics if topic.name == "what-is-a-tenant")
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is a tenant?"},
        {"role": "assistant", "content": tenant.answer},
        {"role": "user", "content": "How do I reload the policy?"},
    ]
    late = long_conversation(topics, "How do I add a tenant?", reference, tokens=_LATE_TOKENS)
    return [*single, chat, late]


def _entry(reference: Reference, messages: list[dict[str, str]], topics: tuple[corpus.Topic, ...]) -> dict[str, Any]:
    """One answer with all that is needed to ask for it again and to judge it."""
    prompt_ids = reference.prompt(messages)
    answer_ids = reference.answer(prompt_ids)
    answer = reference.text(answer_ids)
    topic, held_out = _find(messages[-1]["content"], topics)
    return {
        "messages": messages,
        "topic": topic.name,
        "held_out": held_out,
        "right": answer == topic.answer,
        "prompt_ids": prompt_ids,
        "answer_ids": answer_ids,
        "answer": answer,
    }


def _find(question: str, topics: tuple[corpus.Topic, ...]) -> tuple[corpus.Topic, bool]:
    """The topic that a question belongs to, and whether it was held out of the training."""
    asked = corpus.normal(question)
    for topic in topics:
        if asked in map(corpus.normal, topic.held_out):
            return topic, True
        for pattern in topic.templates:
            if asked in map(corpus.normal, corpus.variants(pattern)):
                return topic, False
    raise corpus.CorpusError(f"{question!r} is not in the corpus; add it or ask another")


if __name__ == "__main__":
    main()
