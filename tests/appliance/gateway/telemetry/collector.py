"""An OTLP collector on a real socket, over HTTP or gRPC, which may also be told to hang.

Over gRPC it is the service that the protocol's authors generate from their definition.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Queue

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 10.0
"""Patience of the tests; nothing waits so long when it works."""


class Collector:
    """What arrived so far, and the knob that makes every export hang until it is let go."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.requests: Queue[ExportTraceServiceRequest] = Queue()
        self.metrics: Queue[ExportMetricsServiceRequest] = Queue()
        self.arrived = threading.Event()
        self.release = threading.Event()
        self.release.set()
        self.url = ""

    def spans(self, count: int) -> list[Span]:
        """Wait for so many spans and give them in order of arrival."""
        return [span for _, span in self.with_resources(count)]

    def with_resources(self, count: int) -> list[tuple[dict[str, str], Span]]:
        """Wait for so many spans and give them in order of arrival, each with the attributes of its resource."""
        found: list[tuple[dict[str, str], Span]] = []
        while len(found) < count:
            try:
                request = self.requests.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError(f"{len(found)} of {count} spans arrived") from None
            for group in request.resource_spans:
                resource = {one.key: one.value.string_value for one in group.resource.attributes}
                for scope in group.scope_spans:
                    found += [(resource, span) for span in scope.spans]
        return found


@contextmanager
def running() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.arrived.set()
            collector.release.wait(WAIT_S)
            collector.bodies.append(body)
            if self.path == "/v1/traces":
                collector.requests.put(ExportTraceServiceRequest.FromString(body))
            else:
                collector.metrics.put(ExportMetricsServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            try:
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                pass  # the exporter gave up on a collector that was told to hang

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: ExportTraceServiceRequest, _: object) -> ExportTraceServiceResponse:
        self._collector.arrived.set()
        self._collector.release.wait(WAIT_S)
        self._collector.bodies.append(request.SerializeToString())
        self._collector.requests.put(request)
        return ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: ExportMetricsServiceRequest, _: object) -> ExportMetricsServiceResponse:
        self._collector.metrics.put(request)
        return ExportMetricsServiceResponse()


@contextmanager
def running_grpc() -> Iterator[Collector]:
    """The same over gRPC."""
    collector = Collector()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(collector), server)
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            collector.release.set()
            server.stop(1).wait()


def attributes(span: Span) -> dict[str, object]:
    """A span's attributes as plain values."""
    found: dict[str, object] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
