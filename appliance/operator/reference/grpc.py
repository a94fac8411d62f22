"""docs/reference/grpc.md: services, messages and fields of the proto files with their comments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from appliance.operator.reference.errors import error_rows
from appliance.operator.reference.markdown import code, page, section, table

APPLIANCE = Path(__file__).resolve().parents[2]
PLACES = (
    (APPLIANCE / "gateway" / "grpc", ("inference", "usage", "batch")),
    (APPLIANCE / "operator" / "api", ("admin", "policy")),
)
PROTOS = tuple(
    folder / "proto" / "athanor" / name / "v1" / f"{name}.proto" for folder, names in PLACES for name in names
)

Place = tuple[int, ...]
"""Place in a descriptor, as protoc's source information numbers it (descriptor.proto)."""

_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _VALUE, _METHOD, _SYNTAX = 2, 3, 2, 2, 12


def render() -> str:
    """The page."""
    methods, about, parts = list[str](), list[str](), list[str]()
    for proto in PROTOS:
        file, comments = _described(proto)
        # The operator's messages have names of the tenants' ones.
        outer = "" if proto.is_relative_to(PLACES[0][0]) else f"{proto.stem}."
        about.append(comments[_SYNTAX,] + f"\n\nThe package is `{file.package}`.")
        for number, service in enumerate(file.service):
            methods.append(_methods(file.package, service, number, comments))
        for number, message in enumerate(file.message_type):
            parts += _messages(message, (_MESSAGE, number), outer, comments)
        for number, enum in enumerate(file.enum_type):
            parts.append(_enum(enum, (_ENUM, number), outer, comments))
    about.append(
        "The files are in `appliance/gateway/grpc/proto` and, for the operator, `appliance/operator/api/proto`."
    )
    errors = section("Errors", table(("status", "ErrorInfo.reason", "meaning"), error_rows(for_grpc=True)))
    return page("gRPC API", "\n\n".join(about), section("Methods", *methods), *parts, errors)


def _methods(package: str, service: Any, number: int, comments: Mapping[Place, str]) -> str:
    rows = [
        [
            code(f"{package}.{service.name}/{one.name}"),
            code(_short(one.input_type)),
            ("stream of " if one.server_streaming else "") + code(_short(one.output_type)),
            comments.get((_SERVICE, number, _METHOD, index), ""),
        ]
        for index, one in enumerate(service.method)
    ]
    return table(("method", "request", "response", "meaning"), rows)


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


def _described(proto: Path) -> tuple[FileDescriptorProto, dict[Place, str]]:
    """Descriptor of the proto, and its comments by place."""
    import grpc_tools  # type: ignore[import-untyped]
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        included = Path(grpc_tools.__file__).parent / "_proto"
        options = [f"--proto_path={proto.parents[3]}", f"--proto_path={included}", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *options, "--include_source_info", str(proto)]) != 0:
            raise RuntimeError(f"protoc refused {proto}; its message is above")
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    found = {}
    for one in file.source_code_info.location:
        text = " ".join((one.leading_comments or one.trailing_comments).split())
        if text:
            found[tuple(one.path)] = text
    return file, found
