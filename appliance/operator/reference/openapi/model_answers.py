"""Schemas of what models answer, whole and as events of a stream: closed objects, as in ``answers``."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.gateway.http.openai_objects import REASONING, REFUSED
from appliance.operator.reference.openapi.shapes import (
    ANY_OBJECT,
    ANY_TEXT,
    COUNT,
    NULL,
    NUMBER,
    TIME,
    TRUTH,
    Schema,
    constant,
    either,
    given,
    items,
    or_null,
    ref,
    word,
)

FINISH = word("stop", "length", "tool_calls")

_USAGE: dict[str, Schema] = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
_BARE_SCORE: dict[str, Schema] = {"token": ANY_TEXT, "logprob": NUMBER}
_SCORE: dict[str, Schema] = {**_BARE_SCORE, "bytes": items(COUNT)}
_SCORED_PROMPT: Schema = items(
    or_null(
        {
            "type": "object",
            "additionalProperties": given({"logprob": NUMBER, "rank": or_null(COUNT), "decoded_token": ANY_TEXT}),
        }
    )
)
_HEAD: dict[str, Schema] = {"id": ANY_TEXT, "created": TIME, "model": ANY_TEXT}
_TEXT_CHOICE: dict[str, Schema] = {
    "index": COUNT,
    "text": ANY_TEXT,
    "logprobs": or_null(
        given(
            {
                "tokens": items(ANY_TEXT),
                "token_logprobs": items(or_null(NUMBER)),
                "top_logprobs": or_null(items(or_null({"type": "object", "additionalProperties": NUMBER}))),
                "text_offset": items(COUNT),
            }
        )
    ),
}
_CHAT_SCORES: Schema = or_null(given({"content": items(ref("TokenScore")), "refusal": NULL}))

GENERATION: Mapping[str, Schema] = {
    "TokenScore": given({**_SCORE, "top_logprobs": items(given(_SCORE))}),
    "Usage": given(
        {
            **_USAGE,
            "prompt_tokens_details": given({"cached_tokens": COUNT}),
            "completion_tokens_details": given({"reasoning_tokens": COUNT}),
        },
        "completion_tokens_details",
    ),
    "ChatCall": given(
        {"id": ANY_TEXT, "type": constant("function"), "function": given({"name": ANY_TEXT, "arguments": ANY_TEXT})}
    ),
    "ChatCompletion": given(
        {
            **_HEAD,
            "object": constant("chat.completion"),
            "choices": items(
                given(
                    {
                        "index": COUNT,
                        "message": given(
                            {
                                "role": constant("assistant"),
                                "content": or_null(ANY_TEXT),
                                "refusal": NULL,
                                REASONING: ANY_TEXT,
                                "tool_calls": items(ref("ChatCall"), 1),
                            },
                            REASONING,
                            "tool_calls",
                        ),
                        "logprobs": _CHAT_SCORES,
                        "finish_reason": FINISH,
                        REFUSED: ANY_TEXT,
                    },
                    REFUSED,
                ),
                1,
            ),
            "usage": ref("Usage"),
            "prompt_logprobs": _SCORED_PROMPT,
        },
        "prompt_logprobs",
    ),
    "ChatCompletionChunk": given(
        {
            **_HEAD,
            "object": constant("chat.completion.chunk"),
            "choices": items(
                given(
                    {
                        "index": COUNT,
                        "delta": given(
                            {
                                "role": constant("assistant"),
                                "content": ANY_TEXT,
                                REASONING: ANY_TEXT,
                                "tool_calls": items(
                                    given(
                                        {
                                            "index": COUNT,
                                            "id": ANY_TEXT,
                                            "type": constant("function"),
                                            "function": given({"name": ANY_TEXT, "arguments": ANY_TEXT}, "name"),
                                        },
                                        "id",
                                        "type",
                                    )
                                ),
                            },
                            "role",
                            "content",
                            REASONING,
                            "tool_calls",
                        ),
                        "logprobs": _CHAT_SCORES,
                        "finish_reason": or_null(FINISH),
                        REFUSED: ANY_TEXT,
                    },
                    REFUSED,
                )
            ),
            "usage": or_null(ref("Usage")),
        },
        "usage",
    ),
    "Completion": given(
        {
            **_HEAD,
            "object": constant("text_completion"),
            "choices": items(
                given({**_TEXT_CHOICE, "finish_reason": FINISH, "prompt_logprobs": _SCORED_PROMPT}, "prompt_logprobs"),
                1,
            ),
            "usage": ref("Usage"),
        }
    ),
    "CompletionChunk": given(
        {
            **_HEAD,
            "object": constant("text_completion"),
            "choices": items(given({**_TEXT_CHOICE, "finish_reason": or_null(FINISH)})),
            "usage": or_null(ref("Usage")),
        },
        "usage",
    ),
}

_STATUS = word("in_progress", "completed", "incomplete")
_OUTPUT_TEXT = given(
    {
        "type": constant("output_text"),
        "text": ANY_TEXT,
        "annotations": items(ANY_OBJECT),
        "logprobs": items(ref("TokenScore")),
    }
)
_REASONING_TEXT = given({"type": constant("reasoning_text"), "text": ANY_TEXT})
_ITEM: dict[str, Schema] = {"id": ANY_TEXT, "status": _STATUS}
_REPEATED = {"description": "As in the request."}

RESPONSES: Mapping[str, Schema] = {
    "OutputItem": either(
        given({**_ITEM, "type": constant("message"), "role": constant("assistant"), "content": items(_OUTPUT_TEXT)}),
        given(
            {**_ITEM, "type": constant("function_call"), "call_id": ANY_TEXT, "name": ANY_TEXT, "arguments": ANY_TEXT}
        ),
        given(
            {**_ITEM, "type": constant("reasoning"), "summary": items(ANY_OBJECT), "content": items(_REASONING_TEXT)}
        ),
    ),
    "ResponseUsage": given(
        {
            "input_tokens": COUNT,
            "input_tokens_details": given({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": given({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    ),
    "Response": given(
        {
            "id": ANY_TEXT,
            "object": constant("response"),
            "created_at": TIME,
            "status": _STATUS,
            "background": TRUTH,
            "error": NULL,
            "incomplete_details": or_null(given({"reason": constant("max_output_tokens")})),
            "instructions": or_null(ANY_TEXT),
            "max_output_tokens": or_null(COUNT),
            "max_tool_calls": NULL,
            "model": ANY_TEXT,
            "output": items(ref("OutputItem")),
            "parallel_tool_calls": TRUTH,
            "previous_response_id": or_null(ANY_TEXT),
            "reasoning": ANY_OBJECT,
            "service_tier": constant("default"),
            "store": TRUTH,
            "temperature": NUMBER,
            "text": ANY_OBJECT,
            "tool_choice": {**either(ANY_TEXT, ANY_OBJECT), **_REPEATED},
            "tools": {**items(ANY_OBJECT), **_REPEATED},
            "top_p": NUMBER,
            "truncation": word("disabled", "auto"),
            "usage": or_null(ref("ResponseUsage")),
            "user": NULL,
            "metadata": ANY_OBJECT,
        }
    ),
    "ResponseEvent": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "pattern": "^(error|response[.][a-z_.]+)$"},
            "sequence_number": COUNT,
            "response": ref("Response"),
            "item": ref("OutputItem"),
            "part": either(_OUTPUT_TEXT, _REASONING_TEXT),
            "item_id": ANY_TEXT,
            "output_index": COUNT,
            "content_index": COUNT,
            "delta": ANY_TEXT,
            "text": ANY_TEXT,
            "logprobs": items(given({**_BARE_SCORE, "top_logprobs": items(given(_BARE_SCORE))})),
            "name": ANY_TEXT,
            "arguments": ANY_TEXT,
            "code": ANY_TEXT,
            "message": ANY_TEXT,
            "param": or_null(ANY_TEXT),
            "error": ref("ErrorFacts"),
        },
        "required": ["type"],
        "additionalProperties": False,
    },
    "InputTokens": given({"object": constant("response.input_tokens"), "input_tokens": COUNT}),
    "ResponseDeleted": given({"id": ANY_TEXT, "object": constant("response"), "deleted": {"const": True}}),
}

_BLOCK = either(
    given({"type": constant("text"), "text": ANY_TEXT}),
    given({"type": constant("thinking"), "thinking": ANY_TEXT, "signature": ANY_TEXT}),
    given({"type": constant("tool_use"), "id": ANY_TEXT, "name": ANY_TEXT, "input": ANY_OBJECT}),
)
_STOP_REASON = or_null(word("end_turn", "max_tokens", "stop_sequence", "tool_use"))
_MESSAGE_USAGE = given(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    }
)

MESSAGES: Mapping[str, Schema] = {
    "MessageAnswer": given(
        {
            "id": ANY_TEXT,
            "type": constant("message"),
            "role": constant("assistant"),
            "model": ANY_TEXT,
            "content": items(_BLOCK),
            "stop_reason": _STOP_REASON,
            "stop_sequence": or_null(ANY_TEXT),
            "usage": _MESSAGE_USAGE,
        }
    ),
    "MessageEvent": either(
        given({"type": constant("message_start"), "message": ref("MessageAnswer")}),
        given({"type": constant("content_block_start"), "index": COUNT, "content_block": _BLOCK}),
        given(
            {
                "type": constant("content_block_delta"),
                "index": COUNT,
                "delta": either(
                    given({"type": constant("text_delta"), "text": ANY_TEXT}),
                    given({"type": constant("thinking_delta"), "thinking": ANY_TEXT}),
                    given({"type": constant("input_json_delta"), "partial_json": ANY_TEXT}),
                ),
            }
        ),
        given({"type": constant("content_block_stop"), "index": COUNT}),
        given(
            {
                "type": constant("message_delta"),
                "delta": given({"stop_reason": _STOP_REASON, "stop_sequence": or_null(ANY_TEXT)}),
                "usage": _MESSAGE_USAGE,
            }
        ),
        given({"type": constant("message_stop")}),
        ref("MessagesError"),
    ),
    "MessageCount": given({"input_tokens": COUNT}),
}
