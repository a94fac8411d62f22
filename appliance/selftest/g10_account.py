"""G10, provable account: the verifier detects every later manipulation of the audit log.

The real writer writes a log over several segments, which is then manipulated in every way open to an attacker with the
disk but without the signing key: a bit flipped anywhere; entries removed, duplicated, exchanged, added, rewritten;
files truncated, removed; checkpoints of another key. A tail removed together with its checkpoints, and a second log
written with the stolen key, show against a witness: a checkpoint kept elsewhere. Every copy is verified with it.

Controls: an untouched copy verifies with this key and witness; and without a witness a log that was rolled back, or
written a second time, verifies too, so it is the witness that detects them.

Not covered: what a compromised gateway omits from or invents in its own reports; and entries younger than the last
checkpoint (a second). Each sandbox's entry names its model by digest (``g10_model``).
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from appliance.common.audit import files, log
from appliance.common.audit.checkpoint import Checkpoint, Verifier, sign_checkpoint
from appliance.common.audit.entry import Entry, entry, to_line
from appliance.common.audit.verify import verify
from appliance.common.figures import counted
from appliance.selftest.result import Result, judged
from appliance.selftest.spread import spread
from isolation.keys.signing import key_of

COMMAND = "athanor selftest --only G10"
SHORT, FULL = 300, 100_000
"""Number of mutations, all kinds together, in the short and the full form."""

ENTRIES, BATCH = 48, 4
"""Size of the check's log: small, so that the full form comes to each place of it many times, in minutes."""

SEED = 10
SMALL_SEGMENT = 3_000
"""Bytes at which the check's log starts another segment, so that it has a handful."""

Mutation = Callable[[Path, random.Random], bool]
"""Manipulates a copy of the log; False when it does not apply to this copy."""


def made_up(number: int) -> Entry:
    """Build an entry as a gateway reports it."""
    return entry(
        "request",
        request=f"req_{number:08x}",
        tenant=f"tenant-{number % 5}",
        principal="key:k1",
        model="m",
        alias="",
        operation="chat",
        rule="tenants.a.models",
        policy="ab" * 32,
        outcome="OK",
        input_tokens=number,
        cached_tokens=0,
        output_tokens=9,
        reasoning_tokens=0,
        cost=number * 100,
        queued_ms=0,
        cut_rule="",
        cut_policy="",
        downgraded="",
        adapter="",
        adapter_digest="",
        runner="model",
        listener="",
        end_user="",
        batch="",
    )


def write_log(directory: Path, entries: int = ENTRIES) -> tuple[Verifier, list[str]]:
    """Write a log of several segments; return its verifier and the checkpoint after each batch."""
    before, log.SEGMENT_BYTES = log.SEGMENT_BYTES, SMALL_SEGMENT
    try:
        audit = log.open_log(directory)
        notes = []
        for start in range(0, entries, BATCH):
            audit.append([(1_700_000_000_000 + number, made_up(number)) for number in range(start, start + BATCH)])
            notes.append(audit.checkpoint())
        audit.close()
    finally:
        log.SEGMENT_BYTES = before
    return audit.verifier, notes


def _pick(directory: Path, draw: random.Random, suffix: str) -> Path:
    return draw.choice(sorted(path for path in directory.iterdir() if path.suffix == suffix and path.stat().st_size))


def _edit_lines(change: Callable[[list[bytes], random.Random], None]) -> Mutation:
    """Make a mutation of the entries of one segment that keeps its header."""

    def mutate(directory: Path, draw: random.Random) -> bool:
        path = _pick(directory, draw, files.LOG_SUFFIX)
        lines = path.read_bytes().splitlines(keepends=True)
        before = list(lines)
        if len(lines) < 4:
            return False
        change(lines, draw)
        path.write_bytes(b"".join(lines))
        return lines != before

    return mutate


def flip(directory: Path, draw: random.Random) -> bool:
    """Flip one bit of an entry, a header or a checkpoint."""
    path = _pick(directory, draw, draw.choice((files.LOG_SUFFIX, files.CHECKPOINT_SUFFIX)))
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return True


def delete(lines: list[bytes], draw: random.Random) -> None:
    """Delete some entries."""
    at = draw.randrange(1, len(lines))
    del lines[at : at + draw.randint(1, 3)]


def reorder(lines: list[bytes], draw: random.Random) -> None:
    """Exchange two entries."""
    one, other = draw.sample(range(1, len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]


def double(lines: list[bytes], draw: random.Random) -> None:
    """Duplicate an entry."""
    at = draw.randrange(1, len(lines))
    lines.insert(at, lines[at])


def rewrite(lines: list[bytes], draw: random.Random) -> None:
    """Replace the tenant in an entry by another name of equal length."""
    at = draw.randrange(1, len(lines))
    lines[at] = lines[at].replace(b"tenant-", b"tenent-")


def forge(directory: Path, draw: random.Random) -> bool:
    """Append a well-formed entry with the right number to the last segment."""
    path = files.segment_paths(directory)[-1]
    segment = files.read_segment(path)
    with path.open("ab") as file:
        file.write(to_line(made_up(draw.randrange(999)), segment.start + len(segment.lines), 1) + b"\n")
    return True


def truncate(directory: Path, draw: random.Random) -> bool:
    """Truncate a segment; its checkpoints stay."""
    path = _pick(directory, draw, files.LOG_SUFFIX)
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.truncate(draw.randrange(size))
    return True


def drop_segment(directory: Path, draw: random.Random) -> bool:
    """Remove any one segment with its checkpoints."""
    path = draw.choice(files.segment_paths(directory))
    path.unlink()
    path.with_suffix(files.CHECKPOINT_SUFFIX).unlink()
    return True


def roll_back(directory: Path, draw: random.Random) -> bool:
    """Remove the end of the log together with its checkpoints: the rest was once signed."""
    path = files.segment_paths(directory)[-1]
    segment = files.read_segment(path)
    keep = draw.randrange(1, len(segment.checkpoints))
    notes = segment.checkpoints[:keep]
    size = int(notes[-1].split("\n")[1])
    lines = path.read_bytes().splitlines(keepends=True)[: 1 + size - segment.start]
    path.write_bytes(b"".join(lines))
    path.with_suffix(files.CHECKPOINT_SUFFIX).write_text("".join(notes))
    return True


def split_view(directory: Path, draw: random.Random) -> bool:
    """Write another log of equal name and length with the stolen signing key."""
    seed = (directory / files.SIGNING_KEY).read_bytes()
    key, name = key_of(seed), files.read_segment(files.segment_paths(directory)[0]).name
    for path in files.segment_paths(directory):
        path.unlink()
        path.with_suffix(files.CHECKPOINT_SUFFIX).unlink()
    audit = log.open_log(directory)
    audit.name = name
    audit.append([(1_700_000_000_000, made_up(draw.randrange(1 << 20))) for _ in range(ENTRIES)])
    audit.close()
    (directory / files.PUBLIC_KEY).write_text(Verifier(name, key.public).line() + "\n")
    return True


def strange_key(directory: Path, draw: random.Random) -> bool:
    """Sign all checkpoints of a segment again with another key."""
    key = key_of(draw.randbytes(32))
    path = _pick(directory, draw, files.CHECKPOINT_SUFFIX)
    verifier = Verifier(files.read_segment(path.with_suffix(files.LOG_SUFFIX)).name, b"")
    notes = []
    for note in files.read_segment(path.with_suffix(files.LOG_SUFFIX)).checkpoints:
        size, root = int(note.split("\n")[1]), draw.randbytes(32)
        notes.append(sign_checkpoint(Checkpoint(size, root), verifier.name, key))
    path.write_text("".join(notes), encoding="utf-8")
    return True


MUTATIONS: dict[str, Mutation] = {
    "flip": flip,
    "delete": _edit_lines(delete),
    "reorder": _edit_lines(reorder),
    "double": _edit_lines(double),
    "rewrite": _edit_lines(rewrite),
    "forge": forge,
    "truncate": truncate,
    "drop segment": drop_segment,
    "roll back": roll_back,
    "split view": split_view,
    "strange key": strange_key,
}


def undetected(attempts: int, seed: int) -> tuple[dict[str, int], int, bool]:
    """Return undetected mutations by kind, the number tried, and whether an untouched copy verified."""
    draw = random.Random(seed)
    missed: dict[str, int] = {}
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        original, copy = Path(folder) / "original", Path(folder) / "copy"
        verifier, notes = write_log(original)
        witnesses = [notes[-1]]
        shutil.copytree(original, copy)
        control = verify(copy, verifier, witnesses).sound
        shutil.rmtree(copy)
        names = list(MUTATIONS)
        while tried < attempts:
            name = names[tried % len(names)]
            shutil.copytree(original, copy)
            changed = MUTATIONS[name](copy, draw)
            if changed:
                tried += 1
                if verify(copy, verifier, witnesses).sound:
                    missed[name] = missed.get(name, 0) + 1
            shutil.rmtree(copy)
        return missed, tried, control


def sound_without_witness(mutation: Mutation) -> bool:
    """Return whether a log with this mutation verifies without a witness."""
    with tempfile.TemporaryDirectory() as folder:
        verifier, _ = write_log(Path(folder) / "log")
        mutation(Path(folder) / "log", random.Random(SEED))
        return verify(Path(folder) / "log", verifier).sound


def run(full: bool) -> list[Result]:
    """Run all rows of G10."""
    parts = spread(undetected, FULL if full else SHORT, SEED)
    missed = sum((Counter(part) for part, _, _ in parts), Counter[str]())
    tried, control = sum(part[1] for part in parts), all(part[2] for part in parts)
    names = f": {', '.join(missed)}" if missed else ""
    alone = sound_without_witness(roll_back) and sound_without_witness(split_view)
    return [
        judged(
            "G10.log",
            not missed,
            figure=f"{sum(missed.values())} of {counted(tried, 'change')} of {len(MUTATIONS)} kinds passed over{names}",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G10.log.control",
            control,
            figure="an untouched copy verifies" if control else "it does not",
            bar="it verifies",
            command=COMMAND,
        ),
        judged(
            "G10.witness.control",
            alone,
            figure="rolled back and split logs pass without a witness" if alone else "they do not pass without one",
            bar="only the witness shows them",
            command=COMMAND,
        ),
    ]
