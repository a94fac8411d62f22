"""Structured output through the whole appliance, as its users ask for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import jsonschema
import openai
import pytest

from appliance.gateway.grpc.generated import inference_pb2, inference_pb2_grpc
from engine.text.grammar_child import COMPILE_CPU_S, MEMORY_BYTES
from engine.text.grammar_keeper import COMPILE_WALL_S, MASK_WALL_S, MAX_GRAMMARS, TENANT_GRAMMARS
from isolation.ipc.grammar import MAX_GRAMMAR_BYTES
from tests.engine.text.schema_maker import make_schema
from tests.system.commands import python
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

QUESTION = [{"role": "user", "content": "How do I add a tenant?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


def test_the_official_client_gets_what_its_schema_says(appliance: Appliance) -> None:
    """Hot and greedy, streamed and whole, each answer satisfies the schema; so do logprobs' tokens spell it."""
    client = appliance.openai()
    for number in range(4):
        answer = client.chat.completions.create(
            model="athanor-mini",
            messages=QUESTION,
            temperature=2.0 if number else 0,
            seed=number,
            max_tokens=300,
            response_format=FORMAT,
            logprobs=True,
            top_logprobs=3,  # type: ignore[arg-type]
        )
        choice = answer.choices[0]
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
    chunks = client.chat.completions.create(
        model="athanor-mini",
        messages=QUESTION,
        temperature=1.5,
        seed=9,
        max_tokens=300,
        stream=True,
        response_format=FORMAT,  # type: ignore[arg-type]
    )
    jsonschema.validate(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks)), SCHEMA)


def whole(**properties: object) -> dict[str, object]:
    """A schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORDS = {"type": "string", "pattern": "^[a-z ]{0,12}$"}
SMALL = [
    {"type": "boolean"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 6},
    whole(yes={"type": "boolean"}, why=WORDS),
    whole(at={"type": "array", "prefixItems": [{"enum": [1, 2]}, WORDS], "items": False, "minItems": 2}),
    whole(within=whole(x={"const": [1, {"y": "z w"}]})),
]
"""Schemas whose answers have one spelling each, but for whitespace."""


def shortest(text: str) -> str:
    """The same value, as JSON without whitespace."""
    return json.dumps(json.loads(text), separators=(",", ":"))


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.full)])
def test_json_has_no_needless_whitespace(appliance: Appliance, times: int) -> None:
    """Every hot answer of the real model under a schema ends by itself and is the shortest JSON of its value. With
    flexible whitespace the same requests give some that are not (control)."""
    client = appliance.openai()
    texts: dict[str, list[str]] = {"compact": [], "flexible": []}
    for whitespace, answers in texts.items():
        for seed, schema in enumerate(SMALL * times):
            choice = client.chat.completions.create(
                model="athanor-mini",
                messages=QUESTION,
                temperature=1.5,
                seed=seed,
                max_tokens=400,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "small", "schema": schema, "strict": True},
                },
                extra_body={} if whitespace == "compact" else {"whitespace": whitespace},
            ).choices[0]  # type: ignore[call-overload]
            assert choice.finish_reason == "stop" or whitespace == "flexible"
            if choice.finish_reason == "stop":
                answers.append(choice.message.content)
                jsonschema.validate(json.loads(answers[-1]), schema)
    assert texts["compact"] == [shortest(text) for text in texts["compact"]]
    assert texts["flexible"] != [shortest(text) for text in texts["flexible"]]


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_regex": "(ab){2,4}"}, "(ab){2,4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "<" W ">"\nW: /[a-z]{2,5}/'}}, "<[a-z]{2,5}>"),
    ],
)
def test_each_spelling_is_understood(appliance: Appliance, body: dict[str, object], pattern: str) -> None:
    """JSON mode, regular expressions, choices and Lark grammars hold for completions and chats."""
    client = appliance.openai("beta")
    options = {"model": "athanor-mini", "temperature": 1.8, "seed": 3, "max_tokens": 100, "extra_body": body}
    choice = client.completions.create(prompt="Say it:", **options).choices[0]
    endless = choice.finish_reason == "length" and choice.text.startswith("{")
    assert re.fullmatch(pattern, choice.text, re.DOTALL) or endless, choice.text
    reply = client.chat.completions.create(messages=QUESTION, **options).choices[0]  # type: ignore[call-overload]
    assert re.fullmatch(pattern, reply.message.content, re.DOTALL) or reply.finish_reason == "length"


async def test_grpc_takes_every_form(appliance: Appliance) -> None:
    """The typed API gives the same, and refuses a bad grammar with a reason of its own."""
    output = inference_pb2.StructuredOutput
    forms = {
        "[xyz]{4}": output(regex="[xyz]{4}"),
        "red|green": output(choice=inference_pb2.Choice(values=["red", "green"])),
        "[0-9]": output(lark="start: /[0-9]/"),
        "true|false": output(json_schema='{"type": "boolean"}'),
        r'\{"a":\[1,2\]\}': output(json_schema='{"const": {"a": [1, 2]}}'),
        r'\{\s*"a"\s*:\s*\[\s*1\s*,\s*2\s*\]\s*\}': output(
            json_schema='{"const": {"a": [1, 2]}}', whitespace=inference_pb2.WHITESPACE_FLEXIBLE
        ),
    }
    async with grpc.aio.insecure_channel(appliance.ready["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {appliance.key('alpha')}"),)

        async def text(form: inference_pb2.StructuredOutput) -> str:
            request = inference_pb2.GenerateRequest(
                model="athanor-mini", text="Say:", max_output_tokens=400, structured_output=form
            )
            return "".join([event.delta.text async for event in stub.Generate(request, metadata=metadata)])

        for pattern, form in forms.items():
            assert re.fullmatch(pattern, await text(form))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await text(output(regex="["))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "the grammar cannot be used" in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"guided_regex": "("}, "invalid_grammar"),
        ({"guided_grammar": "start: nothing"}, "invalid_grammar"),
        ({"guided_json": '{"type": "wrong"}'}, "invalid_grammar"),
        ({"guided_json": {"$ref": "#"}}, "invalid_grammar"),
        ({"guided_regex": "a?" * 20_000 + "a" * 20_000}, "grammar_too_complex"),
        ({"guided_regex": "a" * (300 << 10)}, "grammar_too_large"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value"),
        ({"response_format": {"type": "xml"}}, "invalid_value"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_value"),
        ({"guided_regex": "a", "ignore_eos": True}, "invalid_value"),
        ({"guided_json": {"type": "null"}, "whitespace": "endless"}, "invalid_value"),
        ({"guided_regex": "a", "whitespace": "compact"}, "invalid_value"),
    ],
)
def test_what_cannot_be_followed_is_refused(appliance: Appliance, body: dict[str, object], code: str) -> None:
    """Each gets a 400 with its own code at once."""
    with pytest.raises(openai.BadRequestError) as raised:
        appliance.openai().completions.create(model="athanor-mini", prompt="x", max_tokens=8, extra_body=body)
    assert raised.value.code == code


def test_a_body_beyond_the_limit_is_refused(appliance: Appliance) -> None:
    """Ten megabytes of schema never get as far as the schema."""
    body = {"guided_json": {"enum": ["x" * (10 << 20)]}}
    with pytest.raises(openai.APIStatusError) as raised:
        appliance.openai().completions.create(model="athanor-mini", prompt="x", max_tokens=8, extra_body=body)
    assert raised.value.status_code == 413


@pytest.mark.full
async def test_structured_and_plain_streams_run_together(appliance: Appliance) -> None:
    """Plain greedy answers are the same beside structured ones, bombs included, and structured ones stay valid."""
    client = appliance.async_openai(max_retries=0)
    plain = {"model": "athanor-mini", "messages": QUESTION, "temperature": 0, "max_tokens": 64}
    alone = (await client.chat.completions.create(**plain)).choices[0].message.content  # type: ignore[call-overload]

    async def structured(seed: int) -> None:
        answer = await client.chat.completions.create(
            model="athanor-mini", messages=QUESTION, temperature=1.5, seed=seed, max_tokens=300, response_format=FORMAT
        )  # type: ignore[call-overload]
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)

    async def bomb() -> None:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(
                model="athanor-mini", prompt="x", extra_body={"guided_regex": "a?" * 20_000 + "a" * 20_000}
            )

    async def same() -> None:
        answer = await client.chat.completions.create(**plain)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == alone

    await asyncio.gather(*(structured(seed) for seed in range(6)), bomb(), *(same() for _ in range(4)))


SCHEMAS = sorted((Path(__file__).parents[1] / "engine" / "text" / "schemas").glob("*.json"))


async def satisfied(client: openai.AsyncOpenAI, schema: dict[str, object], seed: int) -> bool:
    """Whether a hot answer under the schema came to its end; it then satisfies the schema."""
    answer = await client.chat.completions.create(
        model="athanor-mini",
        messages=QUESTION,
        temperature=2.0,
        seed=seed,
        max_tokens=350,
        extra_body={"guided_json": schema},
    )  # type: ignore[call-overload]
    if answer.choices[0].finish_reason == "length":
        return False
    jsonschema.Draft202012Validator(schema).validate(json.loads(answer.choices[0].message.content))
    return True


async def check_all(client: openai.AsyncOpenAI, schemas: list[dict[str, object]]) -> None:
    """Eight at a time, as many as a tenant may use at once; nine of ten come to an end."""
    gate = asyncio.Semaphore(TENANT_GRAMMARS)

    async def one(seed: int, schema: dict[str, object]) -> bool:
        async with gate:
            return await satisfied(client, schema, seed)

    ended = await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas)))
    assert sum(ended) >= 0.9 * len(schemas)


async def test_hot_answers_satisfy_schemas(appliance: Appliance) -> None:
    """Each tenth written schema, through the engine and the model at temperature 2."""
    await check_all(appliance.async_openai(), [json.loads(path.read_text()) for path in SCHEMAS[::10]])


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_hot_answers_satisfy_all_schemas(appliance: Appliance) -> None:
    """All 200."""
    schemas = [json.loads(path.read_text()) for path in SCHEMAS]
    await check_all(appliance.async_openai(), schemas + [make_schema(seed) for seed in range(200 - len(schemas))])


async def started_stream(client: openai.AsyncOpenAI, **options: object) -> AsyncIterator[str]:
    """A stream of text that has shown its first words."""
    options = {"model": "athanor-mini", "temperature": 1.0, "stream": True, "max_tokens": 400, **options}
    stream = await client.completions.create(prompt="Go on:", **options)  # type: ignore[call-overload]
    texts = (chunk.choices[0].text async for chunk in stream if chunk.choices)
    await anext(texts)
    return texts


async def rest(texts: AsyncIterator[str]) -> str:
    """The rest of a stream."""
    return "".join([text async for text in texts])


@pytest.mark.full
async def test_a_killed_text_sandbox_ends_structured_streams_alone(battered: Appliance) -> None:
    """They get a typed error that says so, a plain stream goes on to its end, and new ones are served afterwards."""
    client = battered.async_openai()
    endless = {"extra_body": {"guided_regex": "[a-z ]{4000}"}, "seed": 1}
    structured = await started_stream(client, **endless)
    plain = await started_stream(client, extra_body={"ignore_eos": True})
    generation = battered.status()["models"][0]["text"]["generation"]
    os.kill(battered.sandbox_pid("text"), signal.SIGKILL)
    with pytest.raises(openai.APIError) as raised:
        await rest(structured)
    assert "may be sent again" in raised.value.message
    assert await rest(plain)
    battered.wait_generation("text", generation)
    again = await client.completions.create(
        model="athanor-mini", prompt="x", max_tokens=20, extra_body={"guided_regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", again.choices[0].text)


@pytest.mark.full
async def test_a_killed_engine_replays_what_was_not_shown(battered: Appliance) -> None:
    """Structured requests that wait or have just begun are replayed from their beginning, under their grammar."""
    client = battered.async_openai()

    async def ask(seed: int) -> str:
        answer = await client.completions.create(
            model="athanor-mini",
            prompt="x " * 200,
            seed=seed,
            temperature=1.5,
            max_tokens=60,
            extra_body={"guided_regex": "[0-9]{4}-[a-z]{4}"},
        )
        return answer.choices[0].text

    alone = await ask(0)
    generation = battered.status()["models"][0]["engine"]["generation"]
    tasks = [asyncio.ensure_future(ask(seed)) for seed in range(8)]
    await asyncio.sleep(0.02)
    os.kill(battered.sandbox_pid("engine"), signal.SIGKILL)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for text in done:
        if isinstance(text, str):
            assert re.fullmatch("[0-9]{4}-[a-z]{4}", text)
        else:
            assert isinstance(text, openai.InternalServerError), text
    battered.wait_generation("engine", generation)
    assert await ask(0) == alone


@pytest.mark.full
def test_the_pages_commands_work(appliance: Appliance, root: Path) -> None:
    """The snippets of docs/structured-output.md, with this demo's address and key in place of the printed ones."""
    page = (root / "docs" / "structured-output.md").read_text()
    page = page.replace("http://127.0.0.1:8080", appliance.ready["http"]).replace(
        "ath_alpha-1_...", appliance.key("alpha")
    )
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert python(code).strip() in ("True", "False")
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert re.fullmatch("20[0-9]{2}-[01][0-9]", json.loads(done.stdout)["choices"][0]["text"])


def test_the_pages_limits_are_the_codes(root: Path) -> None:
    """Every bound that the page names has the value that the code has."""
    page = (root / "docs" / "structured-output.md").read_text()
    assert f"{MAX_GRAMMAR_BYTES >> 10} KiB (`MAX_GRAMMAR_BYTES`)" in page
    assert f"{COMPILE_CPU_S:g} s (`COMPILE_CPU_S`), {COMPILE_WALL_S:g} s of wall time" in page
    assert f"{MEMORY_BYTES >> 20} MiB (`MEMORY_BYTES`)" in page
    assert f"{MASK_WALL_S:g} s of wall time (`MASK_WALL_S`)" in page
    assert f"{TENANT_GRAMMARS} (`TENANT_GRAMMARS`)" in page
    assert f"{MAX_GRAMMARS} (`MAX_GRAMMARS`)" in page
