"""Regenerates the code of all .proto files: ``python -m appliance.gateway.grpc.generate_code``. With the argument
``released`` it writes the descriptor sets with which later versions must agree, once for each release; with ``added``
it adds to them what they lack, files of a new service, and leaves what was released before as it is.

A tool of development; it needs grpcio-tools and mypy-protobuf. The modules are generated under a flat folder and their
imports rewritten, because the package paths of the .proto files (``athanor.inference.v1``, right for every other
language) would ask for a top-level Python package of that name.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc


@dataclass(frozen=True, slots=True)
class Schemas:
    """Proto files of one package, and where their code is."""

    folder: Path
    """Has ``proto`` and ``generated``."""
    names: tuple[str, ...]
    package: str
    """Python package of the code."""

    @property
    def root(self) -> Path:
        """Folder that imports of proto files are taken from."""
        return self.folder / "proto"

    @property
    def protos(self) -> tuple[Path, ...]:
        """The proto files."""
        return tuple(self.root / "athanor" / name / "v1" / f"{name}.proto" for name in self.names)

    @property
    def released(self) -> Path:
        """Descriptor set of the last release, for tests and for ``buf breaking``."""
        return self.folder / "proto" / "released.binpb"

    @property
    def generated(self) -> Path:
        """Folder of the code."""
        return self.folder / "generated"


_APPLIANCE = Path(__file__).resolve().parents[2]

TENANTS = Schemas(_APPLIANCE / "gateway" / "grpc", ("inference", "usage", "batch"), "appliance.gateway.grpc.generated")
"""What tenants call."""

OPERATOR = Schemas(_APPLIANCE / "operator" / "api", ("admin", "policy"), "appliance.operator.api.generated")
"""What the operator calls; the gateway imports none of it."""

HOSTS = Schemas(_APPLIANCE / "gateway" / "fleet", ("fleet",), "appliance.gateway.fleet.generated")
"""What hosts of a fleet call of each other."""

SCHEMAS = (TENANTS, OPERATOR, HOSTS)

_IMPORT = re.compile(r"^from athanor\.\w+\.v1 import", re.MULTILINE)


def generate(schemas: Schemas) -> dict[str, str]:
    """Run protoc; gives file name -> text of each generated module and stub, imports rewritten.

    Raises:
        RuntimeError: protoc refused the file; its own message is on stderr.
    """
    scripts = Path(sysconfig.get_path("scripts"))
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(
            [
                "protoc",
                f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
                f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
                f"--proto_path={schemas.root}",
                f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
                f"--python_out={folder}",
                f"--grpc_python_out={folder}",
                f"--mypy_out=quiet:{folder}",
                f"--mypy_grpc_out=quiet:{folder}",
                *map(str, schemas.protos),
            ]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}; its message is above")
        written = sorted(Path(folder).rglob("*.py*"))
        package = f"from {schemas.package} import"
        return {file.name: _IMPORT.sub(package, file.read_text(encoding="utf-8")) for file in written}


def descriptors(schemas: Schemas) -> bytes:
    """Return the descriptor set of the proto files.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        included = Path(grpc_tools.__file__).parent / "_proto"
        paths = [f"--proto_path={schemas.root}", f"--proto_path={included}"]
        options = ["--include_imports", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *paths, *options, *map(str, schemas.protos)]) != 0:
            raise RuntimeError("protoc refused a file; its message is above")
        return out.read_bytes()


def with_added(schemas: Schemas) -> bytes:
    """Return the descriptor set of the last release with the proto files that it lacks, and what these import.

    Raises:
        RuntimeError: protoc refused a file; its own message is on stderr.
    """
    before = {file.name: file for file in FileDescriptorSet.FromString(schemas.released.read_bytes()).file}
    # In the order of the present set: what is imported comes first.
    files = (before.get(file.name, file) for file in FileDescriptorSet.FromString(descriptors(schemas)).file)
    return FileDescriptorSet(file=files).SerializeToString(deterministic=True)


def main(arguments: Sequence[str]) -> int:
    """Write what ``generate`` gives, or ``descriptors``, or ``with_added``."""
    for schemas in SCHEMAS:
        if list(arguments) in (["released"], ["added"]):
            made = descriptors(schemas) if list(arguments) == ["released"] else with_added(schemas)
            schemas.released.write_bytes(made)
            continue
        for name, text in generate(schemas).items():
            (schemas.generated / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
