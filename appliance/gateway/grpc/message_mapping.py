"""Messages of ``athanor.inference.v1`` <-> ours: pure, no range is checked here but presence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from appliance.common.errors import InvalidRequestError, ModelNotFoundError
from appliance.gateway.front import request_builder, sampling_builder, score_builder
from appliance.gateway.front.attest_builder import build_attest
from appliance.gateway.front.end_user import end_user
from appliance.gateway.front.request_builder import Stamp, Turn, TurnCall
from appliance.gateway.front.tool_builder import (
    MAX_TOOLS,
    ToolChoice,
    ToolSpec,
    arguments_object,
    build_tools,
    checked_call_id,
    checked_tools,
    shown_tools,
)
from appliance.gateway.generate_request import (
    AttestRequest,
    ChatPrompt,
    ChoiceFinished,
    Delta,
    Embeddings,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Grammar,
    Operation,
    Prompt,
    PromptToken,
    PromptTokens,
    ScoreOperation,
    ScoreRequest,
    Scores,
    Started,
    TextPrompt,
    Tokenized,
    TokenizerOperation,
    TokenizerRequest,
    TokenLogprob,
    TokenPrompt,
    Tools,
)
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.model_card import ModelCard
from isolation.ipc.grammar import GrammarKind, Whitespace
from isolation.ipc.messages import Priority
from isolation.ipc.output import MAX_CALLS
from isolation.ipc.sampling import NAMES

_TOOLS = "conversation.tools"
_MODES = (pb.TOOL_MODE_UNSPECIFIED, pb.TOOL_MODE_AUTO, pb.TOOL_MODE_NONE, pb.TOOL_MODE_REQUIRED)
_NAMES = {"stop_ids": "stop_token_ids", "service_tier": "priority", "n": "choices"}
_NAMES |= {"chat_template_kwargs": "conversation.template_arguments", "name": "conversation.messages"}
_NAMES |= {name: f"sampling.{name}" for name in NAMES}
"""Field of ``GenerateRequest`` or the policy -> field of the message, where they differ."""
_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant", pb.ROLE_TOOL: "tool"}
_PRIORITIES = {pb.PRIORITY_HIGH: Priority.HIGH, pb.PRIORITY_NORMAL: Priority.NORMAL, pb.PRIORITY_LOW: Priority.LOW}
_WHITESPACES = {
    pb.WHITESPACE_UNSPECIFIED: None,
    pb.WHITESPACE_COMPACT: Whitespace.COMPACT,
    pb.WHITESPACE_FLEXIBLE: Whitespace.FLEXIBLE,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}


def to_request(message: pb.GenerateRequest, stamp: Stamp) -> GenerateRequest:
    """The request that the message asks for.

    Raises:
        InvalidRequestError: a field is missing or out of range; ``param`` is its path in the message.
    """
    operation, prompt, tools = _prompt(message)
    given = {field.name: value for field, value in message.sampling.ListFields()}
    request = GenerateRequest(
        request_id=stamp.request_id,
        operation=operation,
        model=message.model,
        prompt=prompt,
        sampling=sampling_builder.sampling_of(given, stamp, "sampling."),
        sent=sampling_builder.sent(given),
        max_tokens=message.max_output_tokens if message.HasField("max_output_tokens") else None,
        max_tokens_param="max_output_tokens",
        stop=tuple(message.stop),
        stop_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=_asked(message, "logprobs"),
        deadline=stamp.deadline,
        stream=True,
        priority=_priority(message),
        grammar=_grammar(message),
        tools=tools,
        prompt_logprobs=_asked(message, "prompt_logprobs"),
        logit_bias=sampling_builder.logit_bias_of(message.logit_bias, "logit_bias") if message.logit_bias else None,
        choices=_asked(message, "choices"),
        choices_param="choices",
        deterministic=message.deterministic,
        cache_key=message.prompt_cache_key,
        end_user=end_user(message.end_user, "end_user"),
    )
    return request_builder.checked(request, _NAMES)


def to_response(event: Event, request: GenerateRequest) -> pb.GenerateResponse:
    """The message for one event of the session."""
    if isinstance(event, Delta):
        delta = pb.Delta(
            text=event.text,
            token_ids=event.token_ids,
            logprobs=[_logprob(entry) for entry in event.logprobs],
            choice=event.choice,
            reasoning=event.reasoning,
            tool_calls=[
                pb.ToolCallDelta(
                    index=call.index, id=call.call_id, name=call.name, arguments=call.arguments, refused=call.refused
                )
                for call in event.calls
            ],
        )
        return pb.GenerateResponse(delta=delta)
    if isinstance(event, Started):
        started = pb.Started(
            request_id=request.request_id,
            model=request.model,
            input_tokens=event.input_tokens,
            cached_input_tokens=event.cached_tokens,
        )
        return pb.GenerateResponse(started=started)
    if isinstance(event, PromptTokens):
        return pb.GenerateResponse(prompt=pb.Prompt(tokens=[_prompt_token(token) for token in event.tokens]))
    if isinstance(event, ChoiceFinished):
        ended = pb.ChoiceFinished(
            choice=event.choice, reason=_REASONS[event.reason], stop=event.stop, tool_call_error=event.refused
        )
        return pb.GenerateResponse(choice_finished=ended)
    return pb.GenerateResponse(finished=_finished(event))


def to_embed_request(message: pb.EmbedRequest, stamp: Stamp) -> EmbedRequest:
    """The request for embeddings that the message asks for.

    Raises:
        InvalidRequestError: a field is missing or out of range; ``param`` is its path in the message.
    """
    request_builder.check_most(len(message.inputs), request_builder.MAX_INPUTS, "inputs", "entries")
    inputs: list[TextPrompt | TokenPrompt] = []
    for index, entry in enumerate(message.inputs):
        at, kind = f"inputs[{index}]", entry.WhichOneof("input")
        if kind == "token_ids":
            inputs.append(request_builder.token_prompt(entry.token_ids.ids, f"{at}.token_ids.ids"))
        elif kind == "text" and entry.text:
            inputs.append(request_builder.text_prompt(entry.text, f"{at}.text"))
        else:
            raise InvalidRequestError(f"{at} holds neither text nor token_ids", param=at)
    dimensions = message.dimensions if message.HasField("dimensions") else None
    priority = _priority(message)
    request = request_builder.build_embed(message.model, inputs, dimensions, stamp, priority=priority, param="inputs")
    return replace(request, end_user=end_user(message.end_user, "end_user"))


def to_embed_response(embeddings: Embeddings, request_id: str, model: str) -> pb.EmbedResponse:
    """The message for the vectors."""
    return pb.EmbedResponse(
        request_id=request_id,
        model=model,
        vectors=[pb.Vector(values=vector) for vector in embeddings.vectors],
        usage=pb.Usage(input_tokens=embeddings.input_tokens),
    )


def to_score_request(message: pb.RerankRequest, stamp: Stamp) -> tuple[ScoreRequest, int]:
    """The request for scores that the message asks for, and how many of the best are wanted.

    Raises:
        InvalidRequestError: a field is missing or out of range; ``param`` is its path in the message.
    """
    most = score_builder.MAX_DOCUMENTS
    request_builder.check_most(len(message.documents), most, "documents", "entries")
    for at, text in (("query", message.query), *((f"documents[{i}]", one) for i, one in enumerate(message.documents))):
        if not text:
            raise InvalidRequestError(f"{at} is empty", param=at)
    query = request_builder.text_prompt(message.query, "query")
    texts = [request_builder.text_prompt(one, f"documents[{i}]") for i, one in enumerate(message.documents)]
    top = message.top_n if message.HasField("top_n") else most
    request_builder.check_range(top, 1, most, "top_n")
    priority = _priority(message)
    request = score_builder.build_score(ScoreOperation.RERANK, message.model, [query], texts, stamp, priority=priority)
    return replace(request, end_user=end_user(message.end_user, "end_user")), top


def to_rerank_response(scores: Scores, request: ScoreRequest, top: int) -> pb.RerankResponse:
    """The message for the best documents."""
    return pb.RerankResponse(
        request_id=request.request_id,
        model=request.model,
        results=[pb.RankedDocument(index=index, score=scores.values[index][0]) for index in scores.best(top)],
        usage=pb.Usage(input_tokens=scores.input_tokens),
    )


def to_tokenizer_request(message: pb.CountTokensRequest, stamp: Stamp) -> tuple[TokenizerRequest, bool]:
    """The request to the tokenizer that the message asks for, and whether its ids are wanted.

    Raises:
        InvalidRequestError: a field is missing or out of range; ``param`` is its path in the message.
    """
    request_builder.check_model(message.model)
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("one of conversation and text is required", param="input")
    chat = kind == "conversation"
    request = TokenizerRequest(
        request_id=stamp.request_id,
        operation=TokenizerOperation.TOKENIZE,
        model=message.model,
        prompt=_conversation(message.conversation, _specs(message.conversation))
        if chat
        else request_builder.text_prompt(message.text, "text"),
        deadline=stamp.deadline,
    )
    return request, message.include_token_ids


def to_count_response(found: Tokenized, request_id: str, *, with_ids: bool) -> pb.CountTokensResponse:
    """The message for the tokens of an input."""
    return pb.CountTokensResponse(
        request_id=request_id,
        input_tokens=len(found.token_ids),
        max_context_tokens=found.max_context,
        token_ids=pb.TokenIds(ids=found.token_ids) if with_ids else None,
    )


def to_attest_request(message: pb.AttestRequest, stamp: Stamp) -> AttestRequest:
    """The request for an attestation that the message asks for.

    Raises:
        InvalidRequestError: a field is missing or out of range; ``param`` is its path in the message.
    """
    return build_attest(message.model, message.nonce, stamp)


def to_models(cards: Sequence[ModelCard]) -> pb.ListModelsResponse:
    """The message for a tenant's models."""
    return pb.ListModelsResponse(models=[_model(card) for card in cards])


def to_model(cards: Sequence[ModelCard], name: str) -> pb.GetModelResponse:
    """The message for one of a tenant's models.

    Raises:
        InvalidRequestError: no model could have this name.
        ModelNotFoundError: the tenant has none of this name.
    """
    request_builder.check_model(name)
    for card in cards:
        if card.name == name:
            return pb.GetModelResponse(model=_model(card))
    raise ModelNotFoundError("no such model, or none that you may use", param="model", details={"model": name})


def _model(card: ModelCard) -> pb.Model:
    return pb.Model(
        name=card.name, created_unix_s=card.created, max_context_tokens=card.max_context, digest=card.digest
    )


def _asked(message: pb.GenerateRequest, name: Literal["choices", "logprobs", "prompt_logprobs"]) -> int:
    """Value of a bounded field, or its default where it is absent."""
    return request_builder.asked(name, getattr(message, name) if message.HasField(name) else None, name)


def _prompt(message: pb.GenerateRequest) -> tuple[Operation, Prompt, Tools | None]:
    kind, choice = message.WhichOneof("input"), _tool_choice(message.tool_choice)
    if kind == "conversation":
        specs = _specs(message.conversation)
        tools = build_tools(specs, choice, _TOOLS)
        return Operation.CHAT, _conversation(message.conversation, specs if choice.calls else ()), tools
    if message.HasField("tool_choice"):
        raise InvalidRequestError("tool_choice goes with a conversation", param="tool_choice")
    if kind == "text":
        return Operation.TEXT_COMPLETION, request_builder.text_prompt(message.text, "text"), None
    if kind == "token_ids":
        ids = request_builder.token_prompt(message.token_ids.ids, "token_ids.ids")
        return Operation.TEXT_COMPLETION, ids, None
    raise InvalidRequestError("one of conversation, text and token_ids is required", param="input")


def _specs(message: pb.Conversation) -> Sequence[ToolSpec]:
    request_builder.check_most(len(message.tools), MAX_TOOLS, _TOOLS, "entries")
    specs = []
    for index, tool in enumerate(message.tools):
        at = f"{_TOOLS}[{index}]"
        parameters = _struct(tool.parameters, f"{at}.parameters") if tool.HasField("parameters") else None
        description = tool.description if tool.HasField("description") else None
        specs.append(ToolSpec(tool.name, description, parameters, tool.strict, at))
    return checked_tools(specs, _TOOLS)


def _tool_choice(message: pb.ToolChoice) -> ToolChoice:
    if message.mode not in _MODES:
        raise InvalidRequestError(
            "tool_choice.mode must be TOOL_MODE_AUTO, TOOL_MODE_NONE or TOOL_MODE_REQUIRED", param="tool_choice.mode"
        )
    request_builder.check_most(len(message.only), MAX_TOOLS, "tool_choice.only", "entries")
    return ToolChoice(
        calls=message.mode != pb.TOOL_MODE_NONE,
        required=message.mode == pb.TOOL_MODE_REQUIRED,
        only=tuple(message.only) or None,
        parallel=message.parallel if message.HasField("parallel") else True,
        param="tool_choice",
    )


def _conversation(message: pb.Conversation, tools: Sequence[ToolSpec]) -> ChatPrompt:
    turns = [_turn(turn, f"conversation.messages[{i}]") for i, turn in enumerate(message.messages)]
    at = "conversation.template_arguments"
    arguments = _struct(message.template_arguments, at) if message.HasField("template_arguments") else None
    shown = shown_tools(tools)
    return request_builder.chat_prompt(turns, "conversation.messages", arguments, at, shown)


def _struct(message: Struct, at: str) -> dict[str, Any]:
    """The JSON object of a message; numbers that are whole are integers."""
    try:
        found: dict[str, Any] = _whole_numbers(MessageToDict(message))
    except ValueError:  # infinities and NaN, which JSON has not
        raise InvalidRequestError(f"{at} holds a number that is none", param=at) from None
    return found


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _priority(message: pb.GenerateRequest | pb.EmbedRequest | pb.RerankRequest) -> Priority | None:
    if message.priority == pb.PRIORITY_UNSPECIFIED:
        return None
    asked = _PRIORITIES.get(message.priority)
    if asked is None:
        raise InvalidRequestError("priority must be PRIORITY_HIGH, PRIORITY_NORMAL or PRIORITY_LOW", param="priority")
    return asked


def _grammar(message: pb.GenerateRequest) -> Grammar | None:
    if not message.HasField("structured_output"):
        return None
    asked, at = message.structured_output, "structured_output.whitespace"
    if asked.whitespace not in _WHITESPACES:
        raise InvalidRequestError("whitespace must be WHITESPACE_COMPACT or WHITESPACE_FLEXIBLE", param=at)
    return request_builder.spaced(_form(asked), _WHITESPACES[asked.whitespace], at)


def _form(asked: pb.StructuredOutput) -> Grammar:
    at = f"structured_output.{asked.WhichOneof('form')}"
    match asked.WhichOneof("form"):
        case "json_schema":
            kind = GrammarKind.JSON_SCHEMA_LENIENT if asked.lenient else GrammarKind.JSON_SCHEMA
            return request_builder.grammar(kind, asked.json_schema, at)
        case "json_object":
            return request_builder.grammar(GrammarKind.JSON_SCHEMA, request_builder.ANY_OBJECT, at)
        case "regex":
            return request_builder.grammar(GrammarKind.REGEX, asked.regex, at)
        case "lark":
            return request_builder.grammar(GrammarKind.LARK, asked.lark, at)
        case "choice":
            return request_builder.choice_grammar(asked.choice.values, f"{at}.values")
    raise InvalidRequestError(
        "structured_output needs one of json_schema, json_object, regex, lark and choice", param="structured_output"
    )


def _turn(message: pb.ChatMessage, at: str) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(
            f"{at}.role must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL", param=f"{at}.role"
        )
    return Turn(
        role,
        message.content,
        message.name if message.HasField("name") else None,
        _calls(message, f"{at}.tool_calls"),
        _call_id(message, f"{at}.tool_call_id"),
        message.reasoning if message.HasField("reasoning") else None,
    )


def _calls(message: pb.ChatMessage, at: str) -> tuple[TurnCall, ...]:
    if message.tool_calls and message.role != pb.ROLE_ASSISTANT:
        raise InvalidRequestError(f"{at} is for messages of ROLE_ASSISTANT", param=at)
    request_builder.check_most(len(message.tool_calls), MAX_CALLS, at, "entries")
    return tuple(
        TurnCall(
            checked_call_id(call.id, f"{at}[{index}].id"),
            call.name,
            arguments_object(call.arguments, f"{at}[{index}].arguments"),
        )
        for index, call in enumerate(message.tool_calls)
    )


def _call_id(message: pb.ChatMessage, at: str) -> str | None:
    if message.HasField("tool_call_id") != (message.role == pb.ROLE_TOOL):
        raise InvalidRequestError(f"{at} is required in messages of ROLE_TOOL, and for them alone", param=at)
    return checked_call_id(message.tool_call_id, at) if message.HasField("tool_call_id") else None


def _logprob(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, text=text, logprob=logprob) for token_id, text, logprob in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, text=entry.text, logprob=entry.logprob, top=top)


def _prompt_token(entry: PromptToken) -> pb.PromptToken:
    top = [pb.TopLogprob(token_id=token_id, text=text, logprob=logprob) for token_id, text, logprob in entry.top]
    return pb.PromptToken(token_id=entry.token_id, text=entry.text, logprob=entry.logprob, top=top)


def _finished(event: Finished) -> pb.Finished:
    counted = pb.Usage(
        input_tokens=event.input_tokens,
        cached_input_tokens=event.cached_tokens,
        output_tokens=event.output_tokens,
        reasoning_tokens=event.reasoning_tokens,
    )
    return pb.Finished(
        reason=_REASONS[event.reason],
        usage=counted,
        stop=event.stop,
        choice=event.choice,
        tool_call_error=event.refused,
    )
