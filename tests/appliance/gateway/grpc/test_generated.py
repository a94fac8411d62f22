"""The committed code is what the .proto gives, and every method of it is served."""

from __future__ import annotations

import ast
import asyncio

import pytest

from appliance.common.keys import KeyTable
from appliance.gateway.front.auth import Resolver
from appliance.gateway.grpc import generate_code
from appliance.gateway.grpc.generated import batch_pb2, inference_pb2, usage_pb2
from appliance.gateway.grpc.servicer import GrpcFrontEnd
from tests.appliance.gateway.front.support import PEPPER, ScriptedService


@pytest.mark.parametrize("schemas", generate_code.SCHEMAS, ids=lambda one: one.names[0])
def test_generated_code_is_up_to_date(schemas):
    """Running the generator changes no committed file and adds none."""
    committed = {
        file.name: file.read_text(encoding="utf-8")
        for file in schemas.generated.glob("*.py*")
        if file.name != "__init__.py"
    }
    assert committed == generate_code.generate(schemas)


def test_generated_code_imports_no_top_level_athanor():
    """The package path of the .proto asks for no Python package of its name."""
    for file in (file for schemas in generate_code.SCHEMAS for file in schemas.generated.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("athanor")
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("athanor") for alias in node.names)


async def test_every_method_of_the_schema_is_served():
    """The method table holds exactly the schema's methods besides health and reflection."""
    service = ScriptedService()
    front = GrpcFrontEnd(service, Resolver(service, lambda: KeyTable(PEPPER, {})))
    await asyncio.sleep(0)
    schemas = (
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        usage_pb2.DESCRIPTOR.services_by_name["UsageService"],
        batch_pb2.DESCRIPTOR.services_by_name["BatchService"],
    )
    wanted = {f"/{schema.full_name}/{method.name}" for schema in schemas for method in schema.methods}
    served = {name for name in front.methods() if name.startswith("/athanor.")}
    assert served == wanted


PROTOS = [proto for schemas in generate_code.SCHEMAS for proto in schemas.protos]


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_every_element_of_the_schema_is_commented(proto):
    """Service, methods, messages, fields and enum values each carry a leading comment in the .proto."""
    lines = proto.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        text = line.strip()
        starts = text.startswith(("service ", "rpc ", "message ", "enum ", "oneof ")) or (
            text.endswith(";") and " = " in text and not text.startswith(("//", "syntax", "package"))
        )
        if starts:
            assert lines[number - 1].strip().startswith("//"), text
