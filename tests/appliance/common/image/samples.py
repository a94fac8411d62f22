"""Images small enough to be made for each test: two roles, a few files, everything else as the builder makes it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from isolation.image.manifest import MANIFEST, SBOM, ImageRole, Manifest, encode_manifest, list_place, read_manifest
from isolation.image.rootfs import encode_list, tree_lines
from isolation.ipc.messages import PROTOCOL_VERSION


def make_image(
    place: Path, content: str = "content", version: str = "1.0", protocol: int = PROTOCOL_VERSION
) -> Manifest:
    """A whole image at ``place``, which must not exist."""
    roles = {}
    for name in ("engine", "text"):
        tree = place / name
        (tree / "opt/d").mkdir(parents=True)
        (tree / "opt/f").write_text(f"{content} of {name}")
        (tree / "opt/d/program").write_bytes(b"\x7fELF")
        (tree / "opt/d/program").chmod(0o755)
        (tree / "opt/f").chmod(0o644)
        for path in (tree / "opt/d", tree / "opt", tree):
            path.chmod(0o755)
        roles[name] = write_list(place, name)
    (place / SBOM).write_text("{}\n")
    bill = hashlib.sha256(b"{}\n").hexdigest()
    manifest = Manifest("", version, "cpu", protocol, "x86_64", "3.11.7", roles, bill, {})
    (place / MANIFEST).write_bytes(encode_manifest(manifest))
    return read_manifest(place)[0]


def write_list(place: Path, name: str, extra: str = "") -> ImageRole:
    """The list of a tree, with a line that is not in the tree if wanted, and what the manifest says of it."""
    data = encode_list(tuple(tree_lines(place / name))) + extra.encode()
    list_place(place, name).write_bytes(data)
    files = [path for path in (place / name).rglob("*") if path.is_file()]
    return ImageRole(hashlib.sha256(data).hexdigest(), len(files), sum(path.stat().st_size for path in files))
