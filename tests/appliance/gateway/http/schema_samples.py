"""Values inside and outside of a JSON Schema, drawn from its words: ends of ranges, each alternative, other types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

LONGEST = 2_000
"""Texts and lists at the end of a longer range are left out: they would be megabytes."""

ODD: tuple[Any, ...] = (
    True,
    7,
    -1,
    1.5,
    10**30,
    "",
    "zz \u20ac",
    [],
    [None],
    [7],
    ["zz"],
    {},
    {"zz": 1},
    {"type": "zz"},
)
"""Values of every type."""


class Samples:
    """Draws from the schemas of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._components = document["components"]
        self._schemas = self._components["schemas"]

    def validator(self, schema: Mapping[str, Any]) -> Draft202012Validator:
        """What says whether a value satisfies a schema."""
        return Draft202012Validator({**schema, "components": self._components})

    def within(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Values that satisfy a schema, the simplest first."""
        if "$ref" in schema:
            yield from self.within(self._schemas[schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema:
            for one in schema["anyOf"]:
                yield from self.within(one)
        elif "const" in schema:
            yield schema["const"]
        elif "enum" in schema:
            yield from schema["enum"]
        else:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            for kind in kinds:
                yield from getattr(self, f"_{kind}")(schema)

    def without(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Values that do not satisfy a schema: one beyond each end, and of other types."""
        holds = self.validator(schema)
        yield from (one for one in (*self._beyond(schema), *ODD) if not holds.is_valid(one))

    def _beyond(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for one in schema.get("anyOf", ()):
            yield from self._beyond(one)
        if "minimum" in schema:
            yield schema["minimum"] - 1
        if "exclusiveMinimum" in schema:
            yield schema["exclusiveMinimum"]
        if "maximum" in schema:
            yield schema["maximum"] + 1
        if schema.get("maxLength", LONGEST) < LONGEST:
            yield "a" * (schema["maxLength"] + 1)
        if schema.get("maxItems", LONGEST) < LONGEST and "items" in schema:
            yield [next(self.within(schema["items"]))] * (schema["maxItems"] + 1)
        if schema.get("maxProperties", LONGEST) < LONGEST:
            yield {str(place): 1 for place in range(schema["maxProperties"] + 1)}
        for name, one in schema.get("properties", {}).items():
            first = next(self.within({**schema, "properties": {}} if not schema.get("required") else schema))
            yield from ({**first, name: bad} for bad in self.without(one))

    def _null(self, _schema: Mapping[str, Any]) -> Iterator[Any]:
        yield None

    def _boolean(self, _schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from (True, False)

    def _integer(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from {schema.get("minimum", 0), schema.get("maximum", 7)}

    def _number(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        yield from {schema.get("minimum", 0.5), schema.get("maximum", 0.5)}

    def _string(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        if schema.get("contentMediaType"):
            yield "{}"
            return
        least, most = schema.get("minLength", 0), schema.get("maxLength", 1)
        yield from ("a" * size for size in sorted({max(least, 1), least, most}) if size <= LONGEST)

    def _array(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        first = next(self.within(schema["items"]))
        yield [first]
        if not schema.get("minItems"):
            yield []
        for one in self.within(schema["items"]):
            yield [one]

    def _object(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        fields = schema.get("properties", {})
        least = {name: next(self.within(fields[name])) for name in schema.get("required", ())}
        yield least
        for name, one in fields.items():
            yield from ({**least, name: value} for value in self.within(one))
