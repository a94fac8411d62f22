"""Proofs as files (C2SP tlog-proof): one entry, its place, the hashes that lead to a checkpoint, and the checkpoint.

::

    c2sp.org/tlog-proof@v1
    extra eyJuIjo3...
    index 7
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

    athanor.audit/3f2a9c01
    ...

``extra`` has the entry itself, so the file needs nothing beside it but the public key. Pure.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, read_checkpoint
from appliance.common.audit.cosignature import Cosignature, Witness, first_note, read_cosignatures
from appliance.common.audit.merkle import leaf_hash
from appliance.common.audit.proofs import includes

FIRST_LINE = "c2sp.org/tlog-proof@v1"

MAX_PROOF_BYTES = 1 << 17
"""Most bytes of a proof: an entry, 63 hashes, and a checkpoint with the signatures of its witnesses."""

_TEXT = re.compile(
    re.escape(FIRST_LINE) + r"\nextra ([A-Za-z0-9+/=]+)\nindex (0|[1-9][0-9]{0,17})\n((?:[A-Za-z0-9+/=]{44}\n)*)\n(.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Proven:
    """What a proof shows."""

    index: int
    entry: bytes
    checkpoint: Checkpoint
    cosigned: tuple[Cosignature, ...]


def write_proof(entry: bytes, index: int, hashes: Sequence[bytes], note: str) -> str:
    """Make the text of a proof."""
    lines = [FIRST_LINE, f"extra {_text(entry)}", f"index {index}", *map(_text, hashes)]
    return "".join(f"{line}\n" for line in lines) + "\n" + note


def read_proof(text: str, verifier: Verifier, witnesses: Sequence[Witness] = ()) -> Proven:
    """Read a proof.

    Raises:
        CheckpointError: it is none, its checkpoint is another log's, or the entry is not in the tree at its place.
    """
    found = _TEXT.fullmatch(text) if len(text) <= MAX_PROOF_BYTES else None
    if found is None:
        raise CheckpointError("that is no proof of an entry")
    checkpoint = read_checkpoint(first_note(found[4]), verifier)
    cosigned = read_cosignatures(found[4], witnesses)
    try:
        entry, *hashes = (base64.b64decode(one, validate=True) for one in (found[1], *found[3].split()))
    except ValueError as error:
        raise CheckpointError("that is no proof of an entry") from error
    if [_text(one) for one in (entry, *hashes)] != [found[1], *found[3].split()]:
        raise CheckpointError("that is no proof of an entry")
    index = int(found[2])
    if not includes(index, checkpoint.size, leaf_hash(entry), hashes, checkpoint.root):
        raise CheckpointError(f"entry {index} of the checkpoint's tree is another")
    return Proven(index, entry, checkpoint, tuple(cosigned))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
