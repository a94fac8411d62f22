"""Files, batches and stored responses on a whole appliance with real models: the official client, other tenants,
reloads and a shred."""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.system import commands
from tests.system.batch_appliance import MINI, POLICY, Kept, requests_file, wait
from tests.system.conftest import PLAIN
from tests.system.many_models import embedding_model
from tests.system.test_grpc_document import Reader

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def kept(runsc_path: Path, in_full: bool) -> Iterator[Kept]:
    """An appliance with the embedded model, in the full count also with one of vectors."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        vectors = Path(folder) / "models" / "vectors"
        models = [MINI]
        if in_full:
            embedding_model(vectors)
            models.append({**MINI, "name": "vectors", "path": str(vectors), "runner": "embed"})
        made = Kept(Path(folder), runsc_path, models)
        made.prepare()
        made.start()
        yield made
        made.stop()


def athanor(kept: Kept, *words: str) -> str:
    """What a command prints."""
    done = commands.athanor(*words, "--config", str(kept.config))
    assert done.returncode == 0, done.stderr
    return done.stdout


def reload(kept: Kept) -> None:
    """Put the policy's file in force."""
    answer = httpx.post(kept.ready["admin"] + "/reload", timeout=60, verify=PLAIN)
    assert answer.status_code == 200, answer.text


def begin(client: openai.OpenAI, count: int, url: str = "/v1/chat/completions", **body: Any) -> Any:
    """A new batch."""
    file = client.files.create(file=("in.jsonl", requests_file(count, url, **body)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]


def ended(kept: Kept, client: openai.OpenAI, batch: str) -> Any:
    """A batch that is over."""

    def look() -> Any:
        one = client.batches.retrieve(batch)
        return one if one.status in ("completed", "failed", "expired", "cancelled") else None

    return wait(look, 120, kept.tail)


def results(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    """Lines of a file of results."""
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


VECTORS = ("/v1/embeddings", "/v1/rerank", "/v1/score")
"""Routes of a model that embeds. What a batch makes of such lines ``tests/appliance/gateway/batches`` shows too."""

ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    *(pytest.param(url, marks=pytest.mark.full) for url in VECTORS),
]


@pytest.mark.parametrize("url", ROUTES)
def test_the_official_client_gets_answers_of_models(kept: Kept, url: str) -> None:
    """Each route's lines are answered by a real model; each is in the audit log once, with its batch, the price of
    batches and the least priority of its trace; the batch's own entries are there too."""
    client = kept.openai()
    batch = begin(client, 8, url)
    done = ended(kept, client, batch.id)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 8, 8, 0)
    found = results(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [f"line-{number}" for number in range(8)]

    def logged() -> Any:
        mine = [one for one in kept.entries() if one.get("batch") == batch.id]
        return mine if sum(one["kind"] == "request" for one in mine) == 8 and len(mine) == 10 else None

    entries = wait(logged, 30)
    assert [one["event"] for one in entries if one["kind"] == "batch"] == ["created", "completed"]
    # Lines end in any order; their requests are numbered as the lines are.
    requests = sorted(
        (one for one in entries if one["kind"] == "request"), key=lambda one: int(one["request"].rpartition("-")[2])
    )
    for entry, answer in zip(requests, found, strict=True):
        usage = answer["response"]["body"]["usage"]
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        output = usage.get("completion_tokens", usage.get("output_tokens", 0))
        assert (entry["input_tokens"], entry["output_tokens"]) == (prompt, output)
        assert entry["cost"] == prompt * 500 + output * 1_000
    trace = kept.get(f"/traces/{batch.id}-1").text
    assert batch.id in trace


def test_a_line_of_several_prompts(kept: Kept) -> None:
    """A real model answers the prompts of a line as its route answers them in one request; each is in the audit log
    once, and usage and cost are the sums of what it has."""
    client, prompts = kept.openai(), ["The furnace", "A sandbox is", "Once"]
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "n": 2, "seed": 3}
    batch = begin(client, 2, "/v1/completions", prompt=prompts, **asked)
    done = ended(kept, client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)
    found = [one["response"]["body"] for one in results(client, done.output_file_id)]
    whole = client.completions.create(model="athanor-mini", prompt=prompts, **asked)
    for body in found:
        assert [(one["index"], one["text"]) for one in body["choices"]] == [
            (one.index, one.text) for one in whole.choices
        ]
        assert whole.usage is not None
        used = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        assert used == (whole.usage.prompt_tokens, whole.usage.completion_tokens)

    def logged() -> Any:
        mine = [one for one in kept.entries() if one["kind"] == "request" and one["batch"] == batch.id]
        return mine if len(mine) >= 6 else None

    entries = wait(logged, 30)
    wanted = {f"{batch.id}-{line}{more}" for line in (1, 2) for more in ("", ".1", ".2")}
    assert sorted(one["request"] for one in entries) == sorted(wanted)
    for number, body in enumerate(found, start=1):
        mine = [one for one in entries if one["request"].partition(".")[0] == f"{batch.id}-{number}"]
        prompt, output = (sum(one[name] for one in mine) for name in ("input_tokens", "output_tokens"))
        assert (prompt, output) == (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        assert sum(one["cost"] for one in mine) == prompt * 500 + output * 1_000


def test_the_page_about_grpc_is_true(kept: Kept, root: Path, tmp_path: Path) -> None:
    """The program of docs/grpc.md that leaves a file and fetches its answers, as it stands there."""
    text = (root / "docs/grpc.md").read_text()
    reader = Reader(text, tmp_path, kept.ready["grpc"], kept.keys["alpha"])
    status, choices = reader.python("batch.py", "python-batch-code").splitlines()
    assert status == "BATCH_STATUS_COMPLETED 1 of 1"
    assert len(ast.literal_eval(choices)) == 2


def test_the_operator_sees_batches(kept: Kept) -> None:
    """Status, doctor and metrics tell that no batch is open, and what is kept."""
    client = kept.openai()
    client.files.create(file=("in.jsonl", b"{}"), purpose="batch")

    def told() -> Any:
        queue = kept.get("/status").json()["batches"]
        return queue if queue["files"] and not queue["open"] else None

    queue = wait(told, 30)
    assert 0 < queue["stored_bytes"] < queue["max_bytes"] == 16 << 30
    assert "no batch is open" in commands.athanor("status", "--admin", kept.ready["admin"]).stdout
    done = commands.athanor("doctor", "--config", str(kept.config))
    assert re.search(r"batches\s+none is open; [\d,]+ files?", done.stdout), done.stdout + done.stderr
    metrics = kept.get("/metrics").text
    assert re.search(r"athanor_batch_stuck_batches(\{.*\})? 0", metrics)
    assert re.search(r"athanor_batch_oldest_seconds(\{.*\})? 0", metrics)


def test_another_tenant_finds_nothing(kept: Kept) -> None:
    """Ids of another tenant's file, batch and results are 404s like unknown ones, through the whole appliance."""
    alpha, beta = kept.openai(), kept.openai("beta")
    batch = begin(alpha, 2)
    done = ended(kept, alpha, batch.id)
    for file in (done.input_file_id, done.output_file_id):
        for call in (beta.files.retrieve, beta.files.content, beta.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file)  # type: ignore[operator]
    for call in (beta.batches.retrieve, beta.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert list(beta.files.list()) == list(beta.batches.list()) == []
    assert alpha.files.retrieve(done.output_file_id).id == done.output_file_id


def test_a_reload_that_takes_the_model_away_ends_the_lines(kept: Kept) -> None:
    """A policy that gives the tenant another model: every line that is left has a typed error, and the batch is over.
    One that takes the switch away refuses files as well; with the first policy again (control) both are back."""
    client = kept.openai()
    batch = begin(client, 400, max_tokens=16)
    wait(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, 60)
    (kept.state / "policy.yaml").write_text(POLICY.replace('models: ["*"], features', 'models: ["x"], features', 1))
    reload(kept)
    done = ended(kept, client, batch.id)
    counts = done.request_counts
    assert counts.completed + counts.failed == 400 and counts.failed > 0
    codes = {one["response"]["body"]["error"]["code"] for one in results(client, done.error_file_id)}
    assert codes <= {"model_not_found", "model_not_allowed"}
    (kept.state / "policy.yaml").write_text(POLICY.replace("{batches: true", "{batches: false", 1))
    reload(kept)
    with pytest.raises(openai.PermissionDeniedError):
        client.files.list()
    (kept.state / "policy.yaml").write_text(POLICY)
    reload(kept)
    assert ended(kept, client, begin(client, 1).id).status == "completed"


def test_a_large_file_comes_back_and_no_process_holds_it(kept: Kept) -> None:
    """64 MiB go in and come back; the gateway grows by a quarter of it at most."""
    pid = kept.pid("gateway")
    assert pid is not None
    data = (b'{"custom_id": "' + b"x" * 8_000 + b'"}\n') * (64 << 20 >> 13)
    headers = {"authorization": f"Bearer {kept.keys['beta']}"}

    def held() -> int:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) << 10

    before = held()
    answer = httpx.post(
        kept.ready["http"] + "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("big.jsonl", data)},
        headers=headers,
        timeout=120,
        verify=PLAIN,
    )
    assert answer.status_code == 200, answer.text
    assert kept.openai("beta").files.content(answer.json()["id"]).read() == data
    assert held() - before < len(data) // 4
    kept.openai("beta").files.delete(answer.json()["id"])


def test_responses_of_models_are_kept_continued_and_shredded(kept: Kept) -> None:
    """A real model continues a stored response, and its prompt is that of the whole conversation sent again; another
    tenant finds nothing, and after `athanor tenant shred` nobody does, on the disk neither. The audit log has an entry
    for each thing done, and the metrics count them."""
    alpha, beta = kept.openai(), kept.openai("beta")
    asked = {"model": "athanor-mini", "max_output_tokens": 8, "temperature": 0}
    first = alpha.responses.create(input="What is a canary-71c05b?", **asked)
    second = alpha.responses.create(input="And a tenant?", previous_response_id=first.id, **asked)
    items = [
        {"role": "user", "content": "What is a canary-71c05b?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And a tenant?"},
    ]
    whole = alpha.responses.create(input=items, store=False, **asked)  # type: ignore[arg-type]
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    *_, last = alpha.responses.create(input="hi", previous_response_id=second.id, stream=True, **asked)
    third = last.response
    assert [one.store for one in (first, second, whole, third)] == [True, True, False, True]
    assert alpha.responses.retrieve(third.id).output_text == third.output_text
    assert "canary-71c05b" in str(list(alpha.responses.input_items.list(third.id)))
    for call in (beta.responses.retrieve, beta.responses.delete, beta.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)  # type: ignore[operator]
    alpha.responses.delete(second.id)
    other = beta.responses.create(input="canary-71c05b", **asked)
    assert "objects removed" in athanor(kept, "tenant", "shred", "alpha", "--yes")
    for one in (first, third):
        with pytest.raises(openai.NotFoundError):
            alpha.responses.retrieve(one.id)
    assert beta.responses.retrieve(other.id).output_text == other.output_text
    assert b"canary-71c05b" not in b"".join(path.read_bytes() for path in (kept.state / "batches").iterdir())

    def told() -> Any:
        events = [one["event"] for one in kept.entries() if one["kind"] == "response" and one["tenant"] != "beta"]
        return events if len(events) == 7 else None

    assert sorted(wait(told, 30)) == ["deleted", *["kept"] * 3, *["read"] * 3]
    metrics = kept.get("/metrics").text
    assert re.search(r'athanor_response_operations_total{.*"kept".*"alpha".*} 3', metrics)
    assert ended(kept, alpha, begin(alpha, 1).id).status == "completed"


def test_logit_bias_reaches_the_model(kept: Kept) -> None:
    """An id at +100 is the whole answer of a real model, in its sandbox, by chat and completions; of an id beyond its
    vocabulary the field is named."""
    client = kept.openai()
    asked: dict[str, Any] = {"model": "athanor-mini", "max_tokens": 3, "temperature": 0, "seed": 1}
    plain = client.completions.create(prompt="What is", logprobs=0, **asked)
    chosen = httpx.post(
        kept.ready["http"] + "/tokenize",
        json={"model": "athanor-mini", "prompt": "the", "add_special_tokens": False},
        headers={"authorization": f"Bearer {kept.keys['alpha']}"},
        timeout=20,
        verify=PLAIN,
    ).json()["tokens"][0]
    biased = client.completions.create(prompt="What is", logit_bias={str(chosen): 100}, **asked)
    text = biased.choices[0].text
    assert text != plain.choices[0].text and text == text[: len(text) // 3] * 3
    messages: Any = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(messages=messages, logit_bias={str(chosen): 100}, **asked)
    assert chat.choices[0].message.content == text
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=messages, logit_bias={"1000000": 1}, **asked)
    assert refused.value.param == "logit_bias"


def test_a_shred_leaves_no_file(kept: Kept) -> None:
    """After `athanor tenant shred` the tenant's files and batches are gone, its text is nowhere in the folder, and the
    other tenant's (control) are as before; what it leaves afterwards is kept."""
    alpha, beta = kept.openai(), kept.openai("beta")
    kept_file = beta.files.create(file=("beta.jsonl", b"beta keeps this\n"), purpose="batch").id
    batch = begin(alpha, 3)
    done = ended(kept, alpha, batch.id)
    assert "objects removed" in athanor(kept, "tenant", "shred", "alpha", "--yes")
    for file in (done.input_file_id, done.output_file_id):
        with pytest.raises(openai.NotFoundError):
            alpha.files.content(file)
    with pytest.raises(openai.NotFoundError):
        alpha.batches.retrieve(batch.id)
    on_disk = b"".join(path.read_bytes() for path in (kept.state / "batches").iterdir())
    assert b"line-0" not in on_disk and b"beta keeps this" not in on_disk
    assert beta.files.content(kept_file).read() == b"beta keeps this\n"
    assert ended(kept, alpha, begin(alpha, 1).id).status == "completed"
