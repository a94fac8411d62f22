"""Requests of the fuzzer about files and batches, over gRPC."""

from __future__ import annotations

import random

from google.protobuf.message import Message

from appliance.common.batches.values import ENDPOINTS
from appliance.gateway.grpc.generated import batch_pb2 as pb
from appliance.selftest.fuzzed_values import sound, text

BATCH_METHODS = tuple(one.name for one in pb.DESCRIPTOR.services_by_name["BatchService"].methods)
"""Names of the service's methods."""

SECONDS = (0, 1, -1, 3_599, 3_600, 86_400, 30 * 86_400, 30 * 86_400 + 1, 2**40)


def batch_message(method: str, draw: random.Random, ids: tuple[str, ...] = ()) -> bytes:
    """Build a message of a method's type; ``ids`` are some that are known."""
    name = draw.choice((*ids, f"file-{'0' * 32}", f"batch_{'0' * 32}", "", sound(text(draw))[:200]))
    made: Message
    if method in ("GetFile", "DownloadFile", "DeleteFile"):
        made = getattr(pb, f"{method}Request")(file_id=name)
    elif method in ("GetBatch", "CancelBatch"):
        made = getattr(pb, f"{method}Request")(batch_id=name)
    elif method == "UploadFile":
        made = pb.UploadFileRequest(data=draw.randbytes(draw.choice((0, 1, 5_000))))
        if draw.random() < 0.7:
            made = pb.UploadFileRequest(head=pb.FileHead(name=sound(text(draw))))
            if draw.random() < 0.5:
                made.head.keep.seconds = draw.choice(SECONDS)
                made.head.keep.nanos = draw.choice((0, 0, 1, -1))
    elif method == "CreateBatch":
        endpoint = draw.choice((*ENDPOINTS, "/v1/messages", "", sound(text(draw))))
        made = pb.CreateBatchRequest(input_file_id=name, endpoint=endpoint)
        for number in range(draw.choice((0, 1, 16, 17))):
            made.metadata[f"{number}{sound(text(draw))}"[: draw.choice((3, 64, 65))]] = sound(text(draw))
        if draw.random() < 0.3:
            made.completion_window.seconds = draw.choice(SECONDS)
    else:
        listed = pb.ListFilesRequest(after=name) if method == "ListFiles" else pb.ListBatchesRequest(after=name)
        if draw.random() < 0.7:
            listed.limit = draw.choice((0, 1, 100, 101, 2**32 - 1))
        made = listed
    return made.SerializeToString()
