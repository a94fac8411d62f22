"""Regenerates ``appliance/gateway/grpc/generated``: ``python -m appliance.gateway.grpc.generate_code``.

A tool of development; it needs grpcio-tools and mypy-protobuf. The modules are generated under a flat folder and their
imports rewritten, because the package paths of the .proto files (``athanor.inference.v1``, right for every other
language) would ask for a top-level Python package of that name.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

API = Path(__file__).resolve().parent
PROTO_ROOT = API / "proto"
PROTOS = tuple(PROTO_ROOT / "athanor" / name / "v1" / f"{name}.proto" for name in ("inference", "usage"))
GENERATED = API / "generated"

_IMPORT = re.compile(r"^from athanor\.\w+\.v1 import", re.MULTILINE)
_REWRITTEN = "from appliance.gateway.grpc.generated import"


def generate() -> dict[str, str]:
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
                f"--proto_path={PROTO_ROOT}",
                f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
                f"--python_out={folder}",
                f"--grpc_python_out={folder}",
                f"--mypy_out=quiet:{folder}",
                f"--mypy_grpc_out=quiet:{folder}",
                *map(str, PROTOS),
            ]
        )
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status}; its message is above")
        written = sorted(Path(folder).rglob("*.py*"))
        return {file.name: _IMPORT.sub(_REWRITTEN, file.read_text(encoding="utf-8")) for file in written}


def main() -> int:
    """Write what ``generate`` gives."""
    for name, text in generate().items():
        (GENERATED / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
