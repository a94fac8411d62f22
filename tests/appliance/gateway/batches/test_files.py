"""/v1/files with the official client and by hand: over real sockets down to the sealed store."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.common.batches.values import PIECE_BYTES
from tests.appliance.gateway.batches.stack import Stack, stacked, until
from tests.appliance.gateway.front.support import talk
from tests.system.conftest import PLAIN

DATA = b'{"custom_id": "a"}\n' * 10


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


async def send(stack: Stack, method: str, path: str, tenant: str = "acme", **options: Any) -> httpx.Response:
    """One request by hand."""
    headers = {"authorization": f"Bearer {stack.keys[tenant]}", **options.pop("headers", {})}
    async with httpx.AsyncClient(base_url=stack.url, verify=PLAIN, timeout=20) as client:
        return await client.request(method, path, headers=headers, **options)


async def test_the_official_client_keeps_finds_reads_and_deletes_files(stack: Stack) -> None:
    """create, retrieve, content, list and delete of openai-python, for a file of several pieces and an empty one."""
    client = stack.openai()
    large = (b"x" * 4_095 + b"\n") * (3 * PIECE_BYTES // 4_096) + b"the end"
    made = [
        await client.files.create(file=(f"{name}.jsonl", data), purpose="batch")
        for name, data in (("large", large), ("small", DATA), ("empty", b""))
    ]
    assert [(one.filename, one.bytes, one.purpose, one.object) for one in made] == [
        ("large.jsonl", len(large), "batch", "file"),
        ("small.jsonl", len(DATA), "batch", "file"),
        ("empty.jsonl", 0, "batch", "file"),
    ]
    assert all(one.expires_at == one.created_at + 30 * 86_400 for one in made)
    assert await client.files.retrieve(made[0].id) == made[0]
    for one, data in zip(made, (large, DATA, b""), strict=True):
        assert (await client.files.content(one.id)).read() == data
    page = await client.files.list(limit=2)
    assert [one.id for one in page.data] == [made[2].id, made[1].id]
    assert [one.id async for one in client.files.list(limit=1, order="asc")] == [one.id for one in made]
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []
    gone = await client.files.delete(made[1].id)
    assert (gone.id, gone.deleted) == (made[1].id, True)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made[1].id)
    kept = await client.files.create(
        file=("short.jsonl", DATA), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert kept.expires_at == kept.created_at + 3_600


async def test_files_of_other_purposes_and_times_of_results(stack: Stack) -> None:
    """The official client keeps a file of bytes without lines, finds it by its purpose, and gets it back as bytes; no
    batch is made of it. Results of a batch are kept for the time that it asks for."""
    client = stack.openai()
    data = bytes(range(256)) * 6_000
    kept = await client.files.create(file=("a.bin", data), purpose="user_data")
    assert (kept.purpose, kept.bytes) == ("user_data", len(data))
    content = await client.files.content(kept.id)
    assert content.response.headers["content-type"] == "application/octet-stream" and content.read() == data
    assert [one.id async for one in client.files.list(purpose="user_data")] == [kept.id]
    asked: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError):
        await client.batches.create(input_file_id=kept.id, **asked)
    body = {"model": "m", "prompt": "x"}
    text = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    ends: list[int] = []
    for more in ({"output_expires_after": {"anchor": "created_at", "seconds": 3_600}}, {}):
        batch = await client.batches.create(input_file_id=file.id, **asked, **more)
        done = await stack.ended(client, batch.id, "completed")
        result = await client.files.retrieve(done.output_file_id or done.error_file_id or "")
        assert result.expires_at is not None
        ends.append(result.expires_at - result.created_at)
    assert ends == [3_600, 30 * 86_400]


async def test_what_others_have_is_like_what_nobody_has(stack: Stack) -> None:
    """For each route the answer to another tenant's id and to an unknown one are the same but for the request's id; its
    owner (control) gets an answer."""
    client = stack.openai()
    file = (await client.files.create(file=("in.jsonl", DATA), purpose="batch")).id
    batch = (await client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")).id
    await stack.ended(client, batch, "failed")
    routes = [
        ("GET", f"/v1/files/{file}", None),
        ("GET", f"/v1/files/{file}/content", None),
        ("GET", f"/v1/files?after={file}", None),
        ("GET", f"/v1/batches/{batch}", None),
        ("POST", f"/v1/batches/{batch}/cancel", None),
        ("GET", f"/v1/batches?after={batch}", None),
        ("POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}),
        ("DELETE", f"/v1/files/{file}", None),
    ]
    for method, path, body in routes:
        answers = []
        for name in (file, "file-0000000000000000"):
            other = "batch_0000" if name != file else batch
            known = json.loads(json.dumps(body).replace(file, name)) if body else None
            where = path.replace(file, name).replace(batch, other)
            answers.append(await send(stack, method, where, "globex", json=known))
        assert {one.status_code for one in answers} == {404}, path
        assert len({one.text for one in answers}) == 1, path
    for method, path, body in routes:
        answer = await send(stack, method, path, json=body)
        assert answer.status_code in (200, 409), (path, answer.text)


async def test_who_may_not_have_files_is_told_before_the_body(stack: Stack) -> None:
    """A stranger, a tenant without the switch and one of whom nothing is kept: refused while they still send, on every
    route, with a typed error."""

    async def begun(tenant: str) -> bytes:
        """The answer to an upload of which nothing but the head comes."""
        port = int(stack.url.rpartition(":")[2])
        head = f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {stack.keys[tenant]}\r\n"
        form = "content-type: multipart/form-data; boundary=b\r\ncontent-length: 9000\r\n\r\n"
        return await talk(port, (head + form).encode())

    for tenant, code in (("without", "feature_not_allowed"), ("forgets", "feature_not_allowed")):
        answer = await begun(tenant)
        assert b" 403 " in answer and code.encode() in answer
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/files/file-1"), ("GET", "/v1/batches")):
            refused = await send(stack, method, path, tenant)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
    stack.keys["stranger"] = "ath_nobody"
    assert b" 401 " in await begun("stranger")


@pytest.mark.parametrize(
    ("fields", "file", "param"),
    [
        ({}, ("x.jsonl", DATA), "purpose"),
        ({"purpose": "batch_output"}, ("x.jsonl", DATA), "purpose"),
        ({"purpose": "batch"}, None, "file"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, ("x.jsonl", DATA), "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "60"}, ("x.jsonl", DATA), "expires_after"),
        ({"purpose": "batch", "note": "n" * 5_000}, ("x.jsonl", DATA), "file"),
    ],
)
async def test_wrong_forms_are_refused_and_leave_nothing(
    stack: Stack, fields: dict[str, str], file: Any, param: str
) -> None:
    """A missing or unknown purpose, no file, a time out of range, a long field: 400 with the field; no file is kept."""
    files = {"file": file} if file else {"other": ("x", b"")}
    answer = await send(stack, "POST", "/v1/files", data=fields, files=files)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await send(stack, "GET", "/v1/files")).json()["data"] == []
    assert stack.store.figures()["bytes"] == 0


async def test_an_upload_that_stops_leaves_nothing(stack: Stack) -> None:
    """A client that leaves in the middle, and one whose body has no end mark; the next upload (control) is whole."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    head = f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {stack.keys['acme']}\r\n"
    part = 'content-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    writer.write(
        (head + "content-type: multipart/form-data; boundary=b\r\ncontent-length: 9000000\r\n\r\n").encode()
        + f"--b\r\n{part}".encode()
        + (b"x" * 1_023 + b"\n") * 2_048
    )
    await writer.drain()
    await until(lambda: stack.store.figures()["bytes"] > 0)
    writer.close()
    await until(lambda: stack.store.figures()["bytes"] == 0)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    cut = await send(stack, "POST", "/v1/files", content=f"--b\r\n{part}half".encode(), headers=headers)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "file")
    assert (await stack.openai().files.create(file=("x", DATA), purpose="batch")).bytes == len(DATA)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=%2e%2e", "after"), ("a=1&a=2", None)],
)
async def test_wrong_queries_are_refused(stack: Stack, query: str, param: str | None) -> None:
    """Values out of range, and a field that is there twice."""
    answer = await send(stack, "GET", f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_file_in_use_and_a_full_tenant(stack: Stack) -> None:
    """A file that a batch reads cannot be deleted (409); beyond what the tenant may keep an upload is refused (413)."""
    client = stack.openai()
    stack.service.script = [asyncio.Event()]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file.id)
    stack.use(
        "version: 1\ntenants:\n  acme: {credentials: ['key:acme-1'], models: ['*'], features: {batches: true}, "
        "limits: {max_stored_bytes: 1000}}\n"
    )
    answer = await send(stack, "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("x", b"y\n" * 800)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "storage_limit_exceeded")


async def test_the_supervisors_end_may_come_anew(stack: Stack) -> None:
    """When the socket is lost, calls fail with 503 and the next socket serves what was kept."""
    client = stack.openai()
    file = await client.files.create(file=("in.jsonl", DATA), purpose="batch")
    stack.port.gateway_left()
    await until(lambda: not stack.link.up)
    with pytest.raises(openai.InternalServerError) as away:
        await client.files.retrieve(file.id)
    assert away.value.status_code == 503
    await until(lambda: stack.link.up)
    assert (await client.files.content(file.id)).read() == DATA


async def begin_upload(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """An upload of which more would come, once the store has begun its file."""
    reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"))
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.keys['acme']}\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000000\r\n\r\n"
    )
    part = '--b\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + "x" * 1_000
    writer.write((head + part).encode())
    await until(lambda: _begun(stack))
    return reader, writer


def _begun(stack: Stack) -> int:
    with stack.store.book.look() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM files WHERE whole = 0").fetchone()[0])


async def test_a_drain_ends_uploads_with_a_retryable_error(stack: Stack) -> None:
    """An upload that outlasts a drain is answered 503 with the time to come back, and nothing of it is kept."""
    reader, writer = await begin_upload(stack)
    stopping = asyncio.create_task(stack.ends.stop(0.2))
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    await stopping
    writer.close()
    assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: " in head
    assert "shutting down" in json.loads(body)["error"]["message"]
    assert not _begun(stack) and stack.store.figures()["files"] == 0


async def test_a_drain_cuts_a_download_so_that_it_does_not_look_whole(stack: Stack) -> None:
    """A download that its client reads slowly ends with its connection, before the last chunk and without an error in
    the middle of the file. Control: one that is read comes whole, with its last chunk."""
    data = (b"x" * 4_095 + b"\n") * (8 << 8)
    file = await stack.openai().files.create(file=("in.jsonl", data), purpose="batch")
    asked = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.keys['acme']}\r\n"
    for drains in (False, True):
        reader, writer = await asyncio.open_connection(*stack.url.removeprefix("http://").split(":"), limit=1 << 16)
        writer.write((asked + "connection: close\r\n\r\n").encode())
        await reader.readuntil(b"\r\n\r\n")
        if drains:
            await stack.ends.stop(0.2)
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                found += part
        writer.close()
        assert found.endswith(b"0\r\n\r\n") is not drains
        assert (found.count(b"x") == data.count(b"x")) is not drains
        assert b"shutting down" not in found
