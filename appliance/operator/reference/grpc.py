"""docs/reference/grpc.md: services, messages and fields of the proto with their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from appliance.operator.reference.http import error_rows
from appliance.operator.reference.markdown import code, page, section, table

API = Path(__file__).resolve().parents[2] / "gateway" / "grpc" / "proto"
PROTO = API / "athanor" / "inference" / "v1" / "inference.proto"

Place = tuple[int, ...]
"""Place in a descriptor, as protoc's source information numbers it (descriptor.proto)."""

_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _VALUE, _METHOD, _SYNTAX = 2, 3, 2, 2, 12


def render() -> str:
    """The page."""
    file, comments = _described()
    about = comments[_SYNTAX,] + f"\n\nThe package is `{file.package}`; the file, `appliance/gateway/grpc/proto`."
    methods = []
    for number, service in enumerate(file.service):
        rows = [
            [
                code(f"{service.name}/{one.name}"),
                code(_short(one.input_type)),
                ("stream of " if one.server_streaming else "") + code(_short(one.output_type)),
                comments.get((_SERVICE, number, _METHOD, index), ""),
            ]
            for index, one in enumerate(service.method)
        ]
        methods.append(table(("method", "request", "response", "meaning"), rows))
    parts = [section("Methods", *methods)]
    for number, message in enumerate(file.message_type):
        parts += _messages(message, (_MESSAGE, number), "", comments)
    for number, enum in enumerate(file.enum_type):
        parts.append(_enum(enum, (_ENUM, number), "", comments))
    parts.append(section("Errors", table(("status", "ErrorInfo.reason", "meaning"), error_rows(for_grpc=True))))
    return page("gRPC API", about, *parts)


def _messages(message: Any, place: Place, outer: str, comments: Mapping[Place, str]) -> Iterator[str]:
    """Sections of a message and of what is nested in it."""
    name = f"{outer}{message.name}"
    maps = {f".{one.name}" for one in message.nested_type if one.options.map_entry}
    rows = []
    for index, field in enumerate(message.field):
        alternative = field.HasField("oneof_index") and not field.proto3_optional
        group = f", one of `{message.oneof_decl[field.oneof_index].name}`" if alternative else ""
        meaning = comments.get((*place, _FIELD, index), "")
        rows.append([code(field.name), str(field.number), _type(field, maps) + group, meaning])
    shown = table(("field", "number", "type", "meaning"), rows) if rows else "No fields.\n"
    yield section(code(name), comments.get(place, "") + "\n", shown)
    for index, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from _messages(inner, (*place, _NESTED, index), f"{name}.", comments)
    for index, enum in enumerate(message.enum_type):
        yield _enum(enum, (*place, 4, index), f"{name}.", comments)


def _enum(enum: Any, place: Place, outer: str, comments: Mapping[Place, str]) -> str:
    rows = [
        [code(one.name), str(one.number), comments.get((*place, _VALUE, index), "")]
        for index, one in enumerate(enum.value)
    ]
    about = comments.get(place, "") + "\n"
    return section(code(f"{outer}{enum.name}"), about, table(("value", "number", "meaning"), rows))


def _type(field: FieldDescriptorProto, maps: set[str]) -> str:
    if field.type_name and any(field.type_name.endswith(one) for one in maps):
        return "map"
    word = (
        field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {word}"
    return f"optional {word}" if field.proto3_optional else word


def _short(type_name: str) -> str:
    return type_name.rpartition(".")[2]


def _described() -> tuple[FileDescriptorProto, dict[Place, str]]:
    """Descriptor of the proto, and its comments by place."""
    import grpc_tools  # type: ignore[import-untyped]
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        included = Path(grpc_tools.__file__).parent / "_proto"
        options = [f"--proto_path={API}", f"--proto_path={included}", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, "--include_source_info", str(PROTO)]) != 0:
            raise RuntimeError(f"protoc refused {PROTO}; its message is above")
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    found = {}
    for one in file.source_code_info.location:
        text = " ".join((one.leading_comments or one.trailing_comments).split())
        if text:
            found[tuple(one.path)] = text
    return file, found
