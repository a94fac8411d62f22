"""What a change of proto files breaks for the clients that have the files of a release; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet

OWN = "athanor."
"""Beginning of our packages' names."""


def broken(before: FileDescriptorSet, after: FileDescriptorSet) -> list[str]:
    """The elements of the release that are gone, or are something else now."""
    old, new = dict(_elements(before)), dict(_elements(after))
    gone = [f"{name} is gone" for name in old if name not in new]
    return gone + [
        f"{name} was {old[name]} and is {new[name]}" for name in old if name in new and new[name] != old[name]
    ]


def _elements(files: FileDescriptorSet) -> Iterator[tuple[str, str]]:
    """Every element by its full name, with all that its users rely on."""
    for file in files.file:
        if not file.package.startswith(OWN):
            continue
        for service in file.service:
            for method in service.method:
                streams = method.client_streaming, method.server_streaming
                yield (
                    f"{file.package}.{service.name}/{method.name}",
                    f"{method.input_type} {method.output_type} {streams}",
                )
        for message in file.message_type:
            yield from _message(file.package, message)
        for enum in file.enum_type:
            yield from _enum(file.package, enum)


def _message(outer: str, message: Any) -> Iterator[tuple[str, str]]:
    name = f"{outer}.{message.name}"
    yield name, "message"
    groups: Mapping[int, str] = dict(enumerate(one.name for one in message.oneof_decl))
    for field in message.field:
        group = groups[field.oneof_index] if field.HasField("oneof_index") else ""
        kind = f"{field.type} {field.type_name} {field.label} {group} {field.proto3_optional}"
        yield f"{name}.{field.name}", f"{field.number} {kind}"
    for inner in message.nested_type:
        yield from _message(name, inner)
    for enum in message.enum_type:
        yield from _enum(name, enum)


def _enum(outer: str, enum: Any) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"{outer}.{enum.name}.{value.name}", str(value.number)
