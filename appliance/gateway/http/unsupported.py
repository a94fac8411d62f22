"""Fields of other servers' APIs that are refused because their loss would change the answer, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.common.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that is refused with advice."""

    advice: str
    """What the caller does instead; ends the message."""
    harmless: tuple[object, ...] = ()
    """Values, besides null, false and empty ones, that ask for nothing."""


_TOOLS = "offer the functions as tools, and answer a call with a message of the role tool"
_CHAT = "tools are for conversations, as of /v1/chat/completions"
_MODALITY = "answers are text; leave it out"
_CONSTRAIN = "constrain the answer with structured_outputs (choice, regex or grammar)"
_TEMPLATE = "lay the conversation out yourself and send it as the prompt of /v1/completions"
_SHORTEN = "shorten the text before you send it; nothing is truncated here"
_INSTRUCTION = "put the instruction that the model was trained with before each text"

FIELDS: Mapping[str, Unsupported] = {
    "best_of": Unsupported("ask for n answers and choose one of them", (1,)),
    "functions": Unsupported(_TOOLS),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "suffix": Unsupported("put the text after the gap into the prompt, in the form that the model was trained for"),
    "audio": Unsupported(_MODALITY),
    "modalities": Unsupported(_MODALITY, (["text"],)),
    "moderation": Unsupported("check the text in your application, before the request or after the answer"),
    "web_search_options": Unsupported("search in your application and put what it found into a message"),
    "min_tokens": Unsupported("for an answer of an exact length set ignore_eos and max_tokens", (0,)),
    "bad_words": Unsupported(_CONSTRAIN),
    "allowed_token_ids": Unsupported(_CONSTRAIN),
    "truncate_prompt_tokens": Unsupported(_SHORTEN),
    "use_beam_search": Unsupported("ask for n answers with logprobs and take the likeliest"),
    "chat_template": Unsupported(_TEMPLATE),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE),
    "documents": Unsupported("put their text into a message"),
}
"""Fields of a request for text."""

COMPLETION_FIELDS: Mapping[str, Unsupported] = {
    "tools": Unsupported(_CHAT),
    "tool_choice": Unsupported(_CHAT, ("none", "auto")),
}
"""Fields of a request for a completion, besides."""

MESSAGE_FIELDS: Mapping[str, Unsupported] = {
    "function_call": Unsupported("write the call into tool_calls"),
    "audio": Unsupported("send a transcript as the message's content"),
}
"""Fields of one message."""

TOKENIZE_FIELDS: Mapping[str, Unsupported] = {
    "chat_template": Unsupported(_TEMPLATE),
    "add_generation_prompt": Unsupported(_TEMPLATE, (True,)),
    "continue_final_message": Unsupported(_TEMPLATE),
    "return_token_strs": Unsupported("ask /detokenize for the text of single ids"),
}
"""Fields of a request for token ids."""

EMBED_FIELDS: Mapping[str, Unsupported] = {
    "truncate_prompt_tokens": Unsupported(_SHORTEN),
    "truncation": Unsupported(_SHORTEN),
    "input_type": Unsupported(_INSTRUCTION),
    "task": Unsupported(_INSTRUCTION),
}
"""Fields of a request for embeddings."""


_WHOLE = "send what shall be scored as one text; the fields of an object are not joined here"

SCORE_FIELDS: Mapping[str, Unsupported] = {
    "truncate_prompt_tokens": Unsupported(_SHORTEN),
    "truncation": Unsupported(_SHORTEN),
    "max_tokens_per_doc": Unsupported(_SHORTEN),
    "max_chunks_per_doc": Unsupported(_SHORTEN),
    "rank_fields": Unsupported(_WHOLE, (["text"],)),
    "instruction": Unsupported("put the instruction that the model was trained with before the query"),
    "activation": Unsupported("scores are probabilities or cosines here", (True,)),
    "use_activation": Unsupported("scores are probabilities or cosines here", (True,)),
    "chat_template": Unsupported("the operator says how a pair becomes one text"),
}
"""Fields of a request for scores."""


def refuse_unsupported(document: Mapping[str, Any], known: Mapping[str, Unsupported], at: str = "") -> None:
    """Refuse a document that asks for something by one of these fields; ``at`` stands before their names.

    Raises:
        InvalidRequestError: it does; ``param`` names the field, and the message says what to do instead.
    """
    for name, one in known.items():
        value = document.get(name)
        if value is None or value is False or value in ("", [], {}):
            continue
        # Not "value in harmless": True equals 1 in Python.
        if not any(type(value) is type(other) and value == other for other in one.harmless):
            which = " with this value" if one.harmless else ""
            raise InvalidRequestError(f"{at}{name} is not supported{which}; {one.advice}", param=f"{at}{name}")
