"""Requests of the fuzzer for scores, over HTTP and gRPC."""

from __future__ import annotations

import random
from typing import Any

from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.selftest.fuzzed_values import prompt, sound, text, value
from appliance.selftest.real_appliance import MODEL

SCORING = ("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify")


def scored(path: str, draw: random.Random) -> dict[str, Any]:
    """Draw the texts of a request for scores."""
    texts = [draw.choice((text(draw), {"text": text(draw)}, value(draw))) for _ in range(draw.choice((0, 1, 3, 40)))]
    given = draw.choice((texts, text(draw), value(draw)))
    if path == "/v1/classify":
        return {"input": given}
    names = (
        ("query", "documents")
        if path.endswith("rerank")
        else draw.choice((("text_1", "text_2"), ("queries", "documents")))
    )
    return {names[0]: draw.choice((text(draw), prompt(draw))), names[1]: given}


def ranking(draw: random.Random) -> pb.RerankRequest:
    """Build a gRPC request for scores."""
    texts = [sound(text(draw)) for _ in range(draw.choice((0, 1, 3, 40)))]
    made = pb.RerankRequest(model=draw.choice((MODEL, MODEL, "x", "")), query=sound(text(draw)), documents=texts)
    if draw.random() < 0.5:
        made.top_n = draw.choice((0, 1, 2_048, 2_049, 2**32 - 1))
    return made
