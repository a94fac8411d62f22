"""athanor.batch.v1 over a real socket, before the sealed store: files both ways, batches, bounds, and who may."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import hpack
import openai
import pytest
from google.rpc import error_details_pb2 as details

from appliance.common.batches.values import PIECE_BYTES
from appliance.gateway.grpc import batch_calls
from appliance.gateway.grpc.batch_calls import BATCH_SERVICE
from appliance.gateway.grpc.generated import batch_pb2 as pb
from appliance.gateway.grpc.generated.batch_pb2_grpc import BatchServiceStub
from appliance.gateway.grpc.wire import framed
from appliance.selftest.fuzzed_batches import BATCH_METHODS, batch_message
from appliance.selftest.fuzzed_requests import CODES
from tests.appliance.gateway.batches.stack import LIMITED, POLICY, Stack, stacked, until
from tests.appliance.gateway.batches.test_batches import line, results
from tests.appliance.gateway.grpc import raw_grpc as raw
from tests.appliance.gateway.grpc.grpc_client import detail_of, refused

DAY_S = 86_400
HTTP = "/v1/chat/completions"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


@pytest.fixture
async def channel(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it, with grpcio's own bound of 4 MiB a message."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.ends.grpc_port}") as opened:
        yield opened


class Client:
    """The service's methods as one tenant."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, tenant: str = "acme") -> None:
        self.stub = BatchServiceStub(channel)
        self.proof = (("authorization", f"Bearer {stack.keys[tenant]}"),)

    def ask(self, method: str, message: Any = None, **fields: Any) -> Any:
        """Call a method, with the message of its name made of these fields."""
        made = getattr(pb, f"{method}Request")(**fields) if message is None else message
        return getattr(self.stub, method)(made, metadata=self.proof)

    async def upload(self, parts: Iterable[bytes], name: str = "in.jsonl", **head: Any) -> pb.File:
        """Keep a file of these parts."""
        messages = [pb.UploadFileRequest(head=pb.FileHead(name=name, **head))]
        messages += [pb.UploadFileRequest(data=part) for part in parts]
        return (await self.ask("UploadFile", iter(messages))).file

    async def content(self, file: str) -> list[bytes]:
        """The pieces of a file."""
        return [piece.data async for piece in self.ask("DownloadFile", file_id=file)]


@pytest.fixture
def client(stack: Stack, channel: grpc.aio.Channel) -> Client:
    """Tenant acme's."""
    return Client(stack, channel)


async def test_a_batch_from_file_to_results(stack: Stack, client: Client) -> None:
    """What the service keeps, runs and gives is what the routes by HTTP find, and the other way round."""
    text = "\n".join(json.dumps(line(f"l-{number}")) for number in range(5)) + "\n" + json.dumps(line("x", n=0)) + "\n"
    file = await client.upload([text.encode()])
    assert (file.name, file.purpose, file.size) == ("in.jsonl", pb.FILE_PURPOSE_BATCH, len(text))
    assert file.expires_at.seconds - file.created_at.seconds == 30 * DAY_S
    metadata = {"team": "blue"}
    made = (await client.ask("CreateBatch", input_file_id=file.id, endpoint=HTTP, metadata=metadata)).batch
    assert (made.status, made.endpoint, dict(made.metadata)) == (pb.BATCH_STATUS_VALIDATING, HTTP, metadata)
    assert made.expires_at.seconds - made.created_at.seconds == DAY_S

    async def look() -> pb.Batch | None:
        one: pb.Batch = (await client.ask("GetBatch", batch_id=made.id)).batch
        return one if one.HasField("ended_at") else None

    done = await until(look)
    assert done.status == pb.BATCH_STATUS_COMPLETED
    assert (done.total_lines, done.completed_lines, done.failed_lines) == (6, 5, 1)
    found = [json.loads(one) for one in b"".join(await client.content(done.output_file_id)).splitlines()]
    assert [one["custom_id"] for one in found] == [f"l-{number}" for number in range(5)]
    official = stack.openai()
    seen = await official.batches.retrieve(made.id)
    assert (seen.output_file_id, seen.metadata) == (done.output_file_id, metadata)
    assert await results(official, seen.output_file_id) == found
    files = (await client.ask("ListFiles")).files
    assert {one.id for one in files} == {file.id, done.output_file_id, done.error_file_id}
    assert [one.id for one in (await client.ask("ListBatches")).batches] == [made.id]
    uploaded = await official.files.create(file=("by-http.jsonl", b"x"), purpose="batch")
    assert (await client.ask("GetFile", file_id=uploaded.id)).file.name == "by-http.jsonl"
    page = await client.ask("ListFiles", limit=1, oldest_first=True, purpose=pb.FILE_PURPOSE_BATCH)
    assert ([one.id for one in page.files], page.has_more) == ([file.id], True)
    page = await client.ask("ListFiles", after=file.id, oldest_first=True, purpose=pb.FILE_PURPOSE_BATCH)
    assert [one.id for one in page.files] == [uploaded.id]
    await client.ask("DeleteFile", file_id=uploaded.id)
    with pytest.raises(openai.NotFoundError):
        await official.files.retrieve(uploaded.id)


async def test_a_key_makes_one_batch(stack: Stack, client: Client) -> None:
    """A call that is sent again with its key answers with the batch that the first made, by either API; another request
    with it is FAILED_PRECONDITION, and too long a key INVALID_ARGUMENT. Control: without one there are two."""
    file = await client.upload([json.dumps(line("a")).encode()])
    asked = {"input_file_id": file.id, "endpoint": HTTP}
    ids = [(await client.ask("CreateBatch", **asked, idempotency_key="k")).batch.id for _ in range(2)]
    assert ids[0] == ids[1]
    official = stack.openai().batches
    window = {"completion_window": "24h", "extra_headers": {"idempotency-key": "k"}}
    assert (await official.create(**asked, **window)).id == ids[0]  # type: ignore[call-overload]
    other = await refused(client.ask("CreateBatch", **asked, metadata={"a": "b"}, idempotency_key="k"))
    assert other.code() is grpc.StatusCode.FAILED_PRECONDITION
    long = await refused(client.ask("CreateBatch", **asked, idempotency_key="k" * 256))
    assert long.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len({(await client.ask("CreateBatch", **asked)).batch.id for _ in range(2)} | {ids[0]}) == 3


async def test_a_refused_file_and_a_cancelled_batch(stack: Stack, client: Client) -> None:
    """Mistakes have the numbers of their lines; a batch in which lines run is cancelled, and then over: cancelling it
    once more, and deleting a file in use, are FAILED_PRECONDITION."""
    bad = await client.upload([b"{}\n\nnot json\n"])
    made = (await client.ask("CreateBatch", input_file_id=bad.id, endpoint=HTTP)).batch

    async def failed() -> Any:
        one = (await client.ask("GetBatch", batch_id=made.id)).batch
        return one if one.status == pb.BATCH_STATUS_FAILED else None

    problems = (await until(failed)).problems
    assert [(one.line, one.code, one.field) for one in problems] == [
        (1, "invalid_custom_id", "custom_id"),
        (3, "invalid_json_line", ""),
    ]
    gate = asyncio.Event()
    stack.service.script = [stack.service.script[0], gate, *stack.service.script[1:]]
    good = await client.upload([json.dumps(line("a")).encode()])
    made = (await client.ask("CreateBatch", input_file_id=good.id, endpoint=HTTP)).batch
    await until(lambda: stack.service.requests)
    assert (await refused(client.ask("DeleteFile", file_id=good.id))).code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await client.ask("CancelBatch", batch_id=made.id)).batch.status == pb.BATCH_STATUS_CANCELLING
    gate.set()

    async def over() -> Any:
        one = (await client.ask("GetBatch", batch_id=made.id)).batch
        return one if one.status == pb.BATCH_STATUS_CANCELLED else None

    assert (await until(over)).completed_lines == 1
    assert (await refused(client.ask("CancelBatch", batch_id=made.id))).code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("sizes", [(), (0, 1), (3, PIECE_BYTES - 1, 5), (PIECE_BYTES, PIECE_BYTES, 7)], ids=str)
async def test_a_file_comes_back_as_it_went_in(client: Client, sizes: tuple[int, ...]) -> None:
    """In whatever parts it is sent; no part that comes back is larger than 1 MiB."""
    draw = random.Random(str(sizes))
    parts = [draw.randbytes(size).replace(b"\n", b" ") for size in sizes]
    file = await client.upload(parts, keep={"seconds": 3_600})
    assert file.expires_at.seconds - file.created_at.seconds == 3_600
    pieces = await client.content(file.id)
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)


async def test_downloads_that_nobody_reads_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tenant so many at a time, since each holds pieces in memory; one more is refused until one ends."""
    monkeypatch.setattr(batch_calls, "DOWNLOADS_EACH", 2)
    file = await client.upload([b"x" * (PIECE_BYTES - 1) + b"\n"] * 12)
    unread = [client.ask("DownloadFile", file_id=file.id) for _ in range(2)]
    for call in unread:
        assert (await call.read()).data
    error = await refused(client.ask("DownloadFile", file_id=file.id).read())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    unread[0].cancel()

    async def whole() -> bool:
        try:
            return sum(map(len, await client.content(file.id))) == file.size
        except grpc.aio.AioRpcError:
            return False

    assert await until(whole)
    unread[1].cancel()


HEAD = pb.UploadFileRequest(head=pb.FileHead(name="x"))


@pytest.mark.parametrize(
    ("messages", "code", "field"),
    [
        ([], "INVALID_ARGUMENT", "head"),
        ([pb.UploadFileRequest()], "INVALID_ARGUMENT", "head"),
        ([pb.UploadFileRequest(data=b"x")], "INVALID_ARGUMENT", "head"),
        ([HEAD, HEAD], "INVALID_ARGUMENT", "data"),
        ([pb.UploadFileRequest(head=pb.FileHead(name="x" * 257))], "INVALID_ARGUMENT", "head.name"),
        ([pb.UploadFileRequest(head=pb.FileHead(keep={"seconds": 3_599}))], "INVALID_ARGUMENT", "head.keep"),
        ([pb.UploadFileRequest(head=pb.FileHead(keep={"nanos": 1}))], "INVALID_ARGUMENT", "head.keep"),
        ([pb.UploadFileRequest(head=pb.FileHead(name="x" * 70_000))], "RESOURCE_EXHAUSTED", ""),
        ([HEAD, pb.UploadFileRequest(data=bytes(PIECE_BYTES + 100))], "RESOURCE_EXHAUSTED", ""),
    ],
    ids=["none", "empty", "no-head", "two-heads", "name", "keep", "nanos", "long-head", "long-part"],
)
async def test_wrong_uploads_are_refused_and_leave_nothing(
    client: Client, messages: list[pb.UploadFileRequest], code: str, field: str
) -> None:
    """The field is named, a message that is too large is not read, and nothing is kept."""
    error = await refused(client.ask("UploadFile", iter(messages)))
    assert error.code().name == code
    if field:
        assert detail_of(error, details.BadRequest).field_violations[0].field == field
    assert list((await client.ask("ListFiles")).files) == []


async def test_an_upload_that_is_left_or_stops_leaves_nothing(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that cancels in the middle, and one that sends nothing more for too long: no file, and no place of the
    tenant's uploads stays taken."""
    for _ in range(5):
        call = client.stub.UploadFile(metadata=client.proof)
        with suppress(grpc.aio.AioRpcError):  # One too many while places come back.
            await call.write(HEAD)
            await call.write(pb.UploadFileRequest(data=b"x" * 1_000))
        call.cancel()
    await asyncio.sleep(1.0)
    monkeypatch.setattr(batch_calls, "IDLE_S", 0.2)
    call = client.stub.UploadFile(metadata=client.proof)
    await call.write(HEAD)
    with pytest.raises(grpc.aio.AioRpcError) as stopped:
        await call
    assert stopped.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list((await client.ask("ListFiles")).files) == []
    for number in range(5):
        await client.upload([b"%d" % number])
    assert len((await client.ask("ListFiles")).files) == 5


def upload_frames(stack: Stack, stream: int, content: bytes) -> bytes:
    """A call of UploadFile whose last frame says that there is no more."""
    proof = ("authorization", f"Bearer {stack.keys['acme']}")
    head = raw.frame(raw.HEADERS, raw.END_HEADERS, stream, raw.head(f"/{BATCH_SERVICE}/UploadFile", proof))
    return head + raw.frame(raw.DATA, raw.END_STREAM, stream, content)


async def test_an_upload_that_ends_inside_a_message_is_refused(stack: Stack, client: Client) -> None:
    """A caller that says its last behind a part of a message, or of a message's length, has sent no whole file, and
    nothing is kept. Without that part (control) the file is kept."""
    whole = framed(HEAD.SerializeToString()) + framed(pb.UploadFileRequest(data=b"one\n").SerializeToString())
    message = framed(pb.UploadFileRequest(data=b"two\n").SerializeToString())
    peer = await raw.Peer.connect(cast(Any, SimpleNamespace(front_ends=stack.ends)))
    decoder = hpack.Decoder()
    try:
        told = []
        for stream, rest in ((1, message[:3]), (3, message[:-1]), (5, b"")):
            peer.say(upload_frames(stack, stream, whole + rest))
            rows: dict[str, str] = {}
            while "grpc-status" not in rows:
                rows = dict(decoder.decode((await peer.until(raw.HEADERS)).payload))
            told.append(rows["grpc-status"])
            assert stack.store.figures()["files"] == (not rest)
        assert told == [str(grpc.StatusCode.INVALID_ARGUMENT.value[0])] * 2 + ["0"]
    finally:
        peer.close()
    (file,) = (await client.ask("ListFiles")).files
    assert file.size == 4


async def test_a_drain_ends_uploads_with_a_retryable_error(stack: Stack, client: Client) -> None:
    """An upload that outlasts a drain is told that the appliance stops, as a generation is, and nothing is kept."""
    call = client.stub.UploadFile(metadata=client.proof)
    await call.write(HEAD)
    await call.write(pb.UploadFileRequest(data=b"x"))
    await asyncio.sleep(0.2)
    stopping = asyncio.create_task(stack.ends.stop(0.2))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call
    await stopping
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in str(ended.value.details())
    assert detail_of(ended.value, details.RetryInfo).retry_delay.seconds > 0
    assert stack.store.figures()["files"] == 0


@pytest.mark.parametrize(
    ("method", "fields", "named"),
    [
        ("CreateBatch", {"input_file_id": "../x", "endpoint": HTTP}, "input_file_id"),
        ("CreateBatch", {"input_file_id": "file-1", "endpoint": "/v1/messages"}, "endpoint"),
        (
            "CreateBatch",
            {"input_file_id": "file-1", "endpoint": HTTP, "completion_window": {"seconds": 60}},
            "completion_window",
        ),
        ("CreateBatch", {"input_file_id": "file-1", "endpoint": HTTP, "metadata": {"k" * 65: "v"}}, "metadata"),
        ("ListFiles", {"limit": 0}, "limit"),
        ("ListFiles", {"after": "a b"}, "after"),
        ("ListBatches", {"limit": 101}, "limit"),
        ("ListBatches", {"after": "a b"}, "after"),
    ],
)
async def test_wrong_questions_name_their_field(
    client: Client, method: str, fields: dict[str, Any], named: str
) -> None:
    """INVALID_ARGUMENT with the field."""
    error = await refused(client.ask(method, **fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail_of(error, details.BadRequest).field_violations[0].field == named


async def test_others_find_what_nobody_has(stack: Stack, channel: grpc.aio.Channel, client: Client) -> None:
    """Every method that takes an id answers another tenant as it answers for an id that does not exist, to the letter;
    its lists are empty. The owner (control) finds all."""
    file = await client.upload([json.dumps(line("a")).encode()])
    made = (await client.ask("CreateBatch", input_file_id=file.id, endpoint=HTTP)).batch
    other = Client(stack, channel, "globex")
    for method, name, mine in (
        ("GetFile", "file_id", file.id),
        ("DownloadFile", "file_id", file.id),
        ("DeleteFile", "file_id", file.id),
        ("GetBatch", "batch_id", made.id),
        ("CancelBatch", "batch_id", made.id),
        ("CreateBatch", "input_file_id", file.id),
        ("ListFiles", "after", file.id),
        ("ListBatches", "after", made.id),
    ):
        more = {"endpoint": HTTP} if method == "CreateBatch" else {}
        unknown = mine.replace(mine[-12:], "0" * 12)
        told = [await refused(other.ask(method, **{name: one}, **more)) for one in (mine, unknown)]
        assert {one.code() for one in told} == {grpc.StatusCode.NOT_FOUND}, method
        assert len({one.details() for one in told}) == 1, method
    assert list((await other.ask("ListFiles")).files) == list((await other.ask("ListBatches")).batches) == []
    assert (await client.ask("GetFile", file_id=file.id)).file == file
    assert (await client.ask("GetBatch", batch_id=made.id)).batch.id == made.id


@pytest.mark.parametrize("method", BATCH_METHODS)
async def test_who_may_not_is_refused(stack: Stack, channel: grpc.aio.Channel, method: str) -> None:
    """No credential, a scope without batches, a tenant without the switch and one of which nothing is kept: refused by
    every method before its message is read. The owner of the switch (control) is not."""
    draw = random.Random(method)
    data = batch_message(method, draw)

    async def code(tenant: str) -> str:
        proof = (("authorization", f"Bearer {stack.keys[tenant]}"),) if tenant else ()
        call = channel.unary_stream(f"/{BATCH_SERVICE}/{method}")(data, metadata=proof, timeout=10)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    assert await code("") == "UNAUTHENTICATED"
    assert {await code(name) for name in (LIMITED, "without", "forgets")} == {"PERMISSION_DENIED"}
    assert await code("acme") in {"OK", "NOT_FOUND", "INVALID_ARGUMENT"}


@pytest.mark.parametrize("how", ["key", "policy"])
async def test_what_is_taken_away_ends_an_upload(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A key that is revoked, and a switch that is turned off, end an upload that is on its way; nothing is kept."""
    monkeypatch.setattr(batch_calls, "RECHECK_S", 0.0)
    call = client.stub.UploadFile(metadata=client.proof)
    await call.write(HEAD)
    await call.write(pb.UploadFileRequest(data=b"x"))
    await asyncio.sleep(0.2)
    if how == "key":
        stack.revoke_all()
    else:
        stack.use(POLICY.replace("{batches: true", "{batches: false", 1))
    await call.write(pb.UploadFileRequest(data=b"x"))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call
    wanted = grpc.StatusCode.UNAUTHENTICATED if how == "key" else grpc.StatusCode.PERMISSION_DENIED
    assert ended.value.code() is wanted
    assert stack.store.figures()["files"] == 0


async def test_padded_answers_are_of_few_lengths(stack: Stack, client: Client) -> None:
    """A tenant of a padded class cannot be told by the length of a batch's answer how far it is."""
    stack.service.padded.add("acme")
    files = [await client.upload([b"x"], name="n" * length) for length in (1, 100)]
    told = [await client.ask("GetFile", file_id=one.id) for one in files]
    assert len({one.ByteSize() for one in told}) == 1
    stack.service.padded.clear()
    told = [await client.ask("GetFile", file_id=one.id) for one in files]
    assert len({one.ByteSize() for one in told}) == 2


async def test_drawn_messages_find_no_defect(stack: Stack, channel: grpc.aio.Channel, client: Client) -> None:
    """600 messages of every method, some cut or with bytes changed, with ids that exist and that do not: each ends with
    a code of the closed list, none by a defect, and the service (control) answers as before."""
    draw = random.Random(21)
    file = await client.upload([json.dumps(line("a")).encode()])
    ids, codes = (file.id,), set[str]()
    for number in range(600):
        method = BATCH_METHODS[number % len(BATCH_METHODS)]
        data = bytearray(batch_message(method, draw, ids))
        if data and draw.random() < 0.3:
            data[draw.randrange(len(data))] = draw.randrange(256)
            del data[draw.randrange(len(data)) :]
        call = channel.unary_stream(f"/{BATCH_SERVICE}/{method}")(bytes(data), metadata=client.proof, timeout=10)
        try:
            async for _ in call:
                pass
            codes.add("OK")
        except grpc.aio.AioRpcError as error:
            codes.add(error.code().name)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= codes <= CODES
    assert datetime.fromtimestamp((await client.upload([b"x"])).created_at.seconds, UTC).year >= 2026
