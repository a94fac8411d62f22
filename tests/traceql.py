"""The part of TraceQL that the dashboards use, parsed strictly and evaluated over spans that a collector received, and
Jaeger's search over the same spans. Weaker than a real Tempo and a real Jaeger: it shows that the queries find what
they are for, by this reading of the two languages.

Supported: sets of spans ``{ ... }`` with ``&&``, ``||``, comparisons of ``name``, ``status``, ``kind``, ``duration``
and attributes with an explicit scope; the operators ``>``, ``>>``, ``&&`` and ``||`` between sets; ``select``, ``rate``
and ``quantile_over_time`` behind them. Anything else is an error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.appliance.gateway.telemetry.collector import attributes

TOKENS = re.compile(
    r"""\s*(?:(?P<text>"[^"\\]*")|(?P<duration>\d+(?:\.\d+)?(?:ns|us|ms|s|m|h))|(?P<number>-?\d+(?:\.\d+)?)
    |(?P<field>(?:span|resource)\.[A-Za-z_][\w./-]*)|(?P<word>[a-z_]+)|(?P<sign>&&|\|\||>>|=~|!~|!=|>=|<=|[{}()|,=<>]))""",
    re.VERBOSE,
)

UNITS_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}

ENUMS = {
    "status": {"unset": Status.STATUS_CODE_UNSET, "ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR},
    "kind": {"server": Span.SPAN_KIND_SERVER, "internal": Span.SPAN_KIND_INTERNAL, "client": Span.SPAN_KIND_CLIENT},
}
INTRINSICS = {"name": str, "duration": int, "status": int, "kind": int}

SCALES: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda value, other: value == other,
    "!=": lambda value, other: value != other,
    ">": lambda value, other: value > other,
    ">=": lambda value, other: value >= other,
    "<": lambda value, other: value < other,
    "<=": lambda value, other: value <= other,
    "=~": lambda value, other: re.fullmatch(other, value) is not None,
    "!~": lambda value, other: re.fullmatch(other, value) is None,
}


class TraceQLError(ValueError):
    """A query that is none, or goes beyond the part that is supported."""


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as a collector received it."""

    trace: str
    span: str
    parent: str
    name: str
    kind: int
    status: int
    duration: int
    """Nanoseconds."""
    scoped: dict[str, object]
    """Attributes under ``span.`` and ``resource.``."""

    @classmethod
    def of(cls, span: Span, resource: dict[str, object]) -> CollectedSpan:
        """Make it from a span of the protocol and the attributes of its resource."""
        scoped = {f"span.{name}": value for name, value in attributes(span).items()}
        scoped |= {f"resource.{name}": value for name, value in resource.items()}
        ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        took = span.end_time_unix_nano - span.start_time_unix_nano
        return cls(*ids, span.name, span.kind, span.status.code, took, scoped)

    def get(self, name: str) -> Any:
        """The value of a field, None where it has none."""
        return getattr(self, name) if name in INTRINSICS else self.scoped.get(name)


Spans = Sequence[CollectedSpan]
Test = Callable[[CollectedSpan], bool]
Find = Callable[[Spans], list[CollectedSpan]]


@dataclass(slots=True)
class Query:
    """A parsed query."""

    find: Find
    fields: set[str] = field(default_factory=set)
    """Attributes that it names."""
    aggregate: str = ""
    by: str = ""
    """Field of the series; empty: spans are the result."""

    def spans(self, spans: Spans) -> list[CollectedSpan]:
        """The spans that it matches."""
        return self.find(spans)

    def series(self, spans: Spans) -> dict[str, int]:
        """Spans that each series of an aggregate is made of, by its label."""
        found: dict[str, int] = defaultdict(int)
        for span in self.find(spans):
            found[str(span.get(self.by))] += 1
        return dict(found)


def parse(text: str) -> Query:
    """Parse a query.

    Raises:
        TraceQLError: it is none.
    """
    parser = _Parser(list(_tokens(text)))
    query = Query(parser.sets())
    while parser.accept("|"):
        parser.stage(query)
    if parser.rest:
        raise TraceQLError(f"{parser.rest[0]} is too much in {text}")
    query.fields = parser.fields
    return query


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, text = 0, text.rstrip()
    while place < len(text):
        found = TOKENS.match(text, place)
        if found is None:
            raise TraceQLError(f"no token at {text[place:]}")
        place = found.end()
        assert found.lastgroup is not None
        yield found.lastgroup, found[found.lastgroup]


class _Parser:
    """Descends over the tokens of one query."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.rest = tokens
        self.fields: set[str] = set()

    def accept(self, sign: str) -> bool:
        """Take this token if it is the next."""
        if self.rest and self.rest[0] in (("sign", sign), ("word", sign)):
            self.rest.pop(0)
            return True
        return False

    def need(self, sign: str) -> None:
        """Take this token."""
        if not self.accept(sign):
            raise TraceQLError(f"{sign} is missing before {self.rest[:1]}")

    def take(self, *kinds: str) -> tuple[str, str]:
        """Take a token of one of some kinds."""
        if not self.rest or self.rest[0][0] not in kinds:
            raise TraceQLError(f"one of {kinds} is missing before {self.rest[:1]}")
        return self.rest.pop(0)

    def sets(self) -> Find:
        """Sets of spans and the operators between them, from the left."""
        left = self.one_set()
        while self.rest and self.rest[0] in [("sign", one) for one in (">", ">>", "&&", "||")]:
            sign = self.rest.pop(0)[1]
            left = _joined(left, sign, self.one_set())
        return left

    def one_set(self) -> Find:
        """A set of spans."""
        self.need("{")
        test = (lambda _: True) if self.rest[:1] == [("sign", "}")] else self.either()
        self.need("}")
        return lambda spans: [span for span in spans if test(span)]

    def either(self) -> Test:
        """Tests of which one has to hold."""
        left = self.both()
        while self.accept("||"):
            left = _or(left, self.both())
        return left

    def both(self) -> Test:
        """Tests that all have to hold."""
        left = self.comparison()
        while self.accept("&&"):
            left = _and(left, self.comparison())
        return left

    def name(self) -> str:
        """A field."""
        kind, found = self.take("field", "word")
        if kind == "word" and found not in INTRINSICS:
            raise TraceQLError(f"{found} is no field")
        if kind == "field":
            self.fields.add(found)
        return found

    def comparison(self) -> Test:
        """One comparison, or several in parentheses."""
        if self.accept("("):
            inner = self.either()
            self.need(")")
            return inner
        name, sign = self.name(), self.take("sign")[1]
        if sign not in SCALES:
            raise TraceQLError(f"{sign} compares nothing")
        kind, text = self.take("text", "duration", "number", "word")
        return _test(name, sign, kind, text)

    def stage(self, query: Query) -> None:
        """What stands behind a ``|``."""
        word = self.take("word")[1]
        self.need("(")
        if word == "select":
            self.name()
            while self.accept(","):
                self.name()
            self.need(")")
            return
        if word == "quantile_over_time":
            if self.name() != "duration":
                raise TraceQLError("quantiles are of durations")
            self.need(",")
            if not 0 < float(self.take("number")[1]) < 1:
                raise TraceQLError("a quantile is between 0 and 1")
        elif word != "rate":
            raise TraceQLError(f"{word} is no stage")
        self.need(")")
        self.need("by")
        self.need("(")
        query.aggregate, query.by = word, self.name()
        self.need(")")


def _or(one: Test, other: Test) -> Test:
    return lambda span: one(span) or other(span)


def _and(one: Test, other: Test) -> Test:
    return lambda span: one(span) and other(span)


def _test(name: str, sign: str, kind: str, text: str) -> Test:
    if kind == "word" and text == "nil":
        if name in INTRINSICS or sign not in ("=", "!="):
            raise TraceQLError("nil is compared with attributes, by = and !=")
        return lambda span: (span.get(name) is None) is (sign == "=")
    value: Any
    if kind == "word":
        if text not in ENUMS.get(name, {}):
            raise TraceQLError(f"{text} is no value of {name}")
        value = ENUMS[name][text]
    elif kind == "duration":
        number, unit = re.fullmatch(r"([\d.]+)(\w+)", text).groups()  # type: ignore[union-attr]
        value = float(number) * UNITS_NS[unit]
    else:
        value = text[1:-1] if kind == "text" else float(text)
    if name in INTRINSICS and isinstance(value, str) is not (INTRINSICS[name] is str):
        raise TraceQLError(f"{text} is no value of {name}")
    if sign in ("=~", "!~"):
        re.compile(value)
    compare = SCALES[sign]

    def holds(span: CollectedSpan) -> bool:
        found = span.get(name)
        return found is not None and isinstance(found, str) is isinstance(value, str) and compare(found, value)

    return holds


def _joined(left: Find, sign: str, right: Find) -> Find:
    def find(spans: Spans) -> list[CollectedSpan]:
        first, second = left(spans), right(spans)
        if sign == ">":
            above = {(span.trace, span.span) for span in first}
            return [span for span in second if (span.trace, span.parent) in above]
        if sign == ">>":
            above = {(span.trace, span.span) for span in first}
            parents = {(span.trace, span.span): span.parent for span in spans}
            return [span for span in second if above & set(_ancestors(span, parents))]
        traces = [{span.trace for span in one} for one in (first, second)]
        if sign == "&&" and not traces[0] & traces[1]:
            return []
        both = [span for span in (*first, *second) if sign == "||" or span.trace in traces[0] & traces[1]]
        return list({(span.trace, span.span): span for span in both}.values())

    return find


def _ancestors(span: CollectedSpan, parents: dict[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    here = (span.trace, span.parent)
    while here in parents:
        yield here
        here = (span.trace, parents[here])


TAG = re.compile(r"([\w.]+)=([\w./:-]+)")


def search(spans: Spans, asked: dict[str, Any]) -> set[str]:
    """The traces that Jaeger's search finds: those with a span of the service that has operation, tags and duration.

    Raises:
        TraceQLError: it is no search.
    """
    tags = dict(TAG.findall(asked["tags"]))
    if TAG.sub("", asked["tags"]).strip():
        raise TraceQLError(f"no tags: {asked['tags']}")
    least = asked["minDuration"]
    number, unit = re.fullmatch(r"([\d.]+)(ns|us|ms|s|m|h)", least or "0ns").groups()  # type: ignore[union-attr]
    return {
        span.trace
        for span in spans
        if span.scoped["resource.service.name"] == asked["service"]
        and asked["operation"] in ("", span.name)
        and span.duration >= float(number) * UNITS_NS[unit]
        and all(_tag(span, name) == value for name, value in tags.items())
    }


def _tag(span: CollectedSpan, name: str) -> str:
    """A tag as Jaeger makes it of a span: the attributes, and ``error`` of the status."""
    if name == "error":
        return "true" if span.status == Status.STATUS_CODE_ERROR else ""
    return str(span.scoped.get(f"span.{name}", ""))
