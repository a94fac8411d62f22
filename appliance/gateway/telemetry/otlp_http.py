"""Exporters of OTLP over http/protobuf, the SDK's own, with a bound on what a collector answers.

What a collector answers is read only as far as it matters: one that never ends its answer would fill our memory.
"""

from __future__ import annotations

import time
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

MAX_ANSWER_BYTES = 64 << 10
"""Bytes of a collector's answer that are read: a partial success has a sentence, a proxy's error page a screen."""

ANSWER_S = 10.0
"""Seconds in which an answer's body must have come: the exporters' own limit applies to each read anew."""


def span_exporter() -> OTLPSpanExporter:
    """Return an exporter of spans to where the environment says."""
    return OTLPSpanExporter(session=BoundedSession())


def metric_exporter() -> OTLPMetricExporter:
    """Return an exporter of metrics to where the environment says."""
    return OTLPMetricExporter(session=BoundedSession())


class BoundedSession(requests.Session):
    """A session that reads at most ``MAX_ANSWER_BYTES`` of an answer, for at most ``ANSWER_S``; a longer one counts by
    its status alone, and its connection is closed. A redirection is not followed, and is a failure: the exporters would
    take it for a success."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send as ``requests.Session.send`` does; the answer is read up to a bound."""
        answer = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        if answer.is_redirect:
            answer.close()
            raise requests.TooManyRedirects(f"the collector's address answers {answer.status_code}")
        until = time.monotonic() + ANSWER_S
        kept = bytearray()
        whole = False
        try:
            while len(kept) < MAX_ANSWER_BYTES and time.monotonic() < until:
                piece = answer.raw.read1(MAX_ANSWER_BYTES - len(kept))
                if not piece:
                    whole = True
                    break
                kept += piece
        finally:
            if not whole:
                answer.close()
        answer._content = bytes(kept)
        answer._content_consumed = True  # of requests: the body is not to be read again
        return answer
