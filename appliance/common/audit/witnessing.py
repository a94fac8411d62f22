"""What witnesses are asked, what their answers mean, and what is known of each (C2SP tlog-witness).

A witness is posted ``add-checkpoint``: the size that it cosigned last, the proof that the tree of now continues that
one, and the checkpoint of now. It answers with its cosignature, or with the size that it has seen, or refuses. What is
known of each witness is in one file beside the tiles, ``TILES.witnesses.json``, which the supervisor and
``athanor doctor`` read. Pure but for that file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from appliance.common.audit.checkpoint import CheckpointError
from appliance.common.audit.cosignature import Witness, read_cosignature
from appliance.common.audit.proofs import SubtreeHash, prove_consistency
from appliance.common.figures import counted

MAX_STATE_BYTES = 1 << 16
"""Most bytes of the file; one of 16 witnesses has 8 KB."""

MAX_PROBLEM = 300
"""Most characters of what is kept of a refusal."""

CLOCK_S = 300
"""Seconds by which a witness's clock may be ahead."""

MEANINGS: Mapping[int, str] = {
    400: "it does not understand the request",
    403: "it knows the log by another key",
    404: "it does not know the log",
    409: "it has cosigned another tree of this size",
    422: "it says that the tree does not continue the one that it has cosigned",
}
"""Status of a refusal to what it says."""


@dataclass(frozen=True, slots=True)
class WitnessState:
    """What is known of one witness; zeros and an empty text before its first cosignature."""

    name: str
    size: int = 0
    """Entries of the tree that it cosigned last."""
    time: int = 0
    """When, in seconds of the Unix epoch, by its clock."""
    asked: int = 0
    """When it was asked last, by this machine's clock."""
    problem: str = ""
    """Why the last attempt brought no cosignature."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Result of one attempt."""

    state: WitnessState
    line: str = ""
    """Cosignature of the checkpoint, where there is one."""
    retry: bool = False
    """Whether it is to be asked again, from the size that ``state`` has now."""


def request_body(old: int, note: str, size: int, at: SubtreeHash) -> str:
    """Return the body of an add-checkpoint request over a checkpoint of ``size`` entries."""
    hashes = (base64.b64encode(one).decode() for one in prove_consistency(old, size, at))
    return "".join(f"{line}\n" for line in (f"old {old}", *hashes, "")) + note


def answered(state: WitnessState, witness: Witness, note: str, size: int, status: int, body: str, now: int) -> Answered:
    """Return what a witness's answer to a request over a checkpoint of ``size`` entries means."""
    state = replace(state, asked=now)
    if status == 200:
        return _cosigned(state, witness, note, size, body, now)
    text = body.strip()
    if status == 409 and text.isascii() and text.isdecimal() and len(text) < 19:
        if int(text) > size:
            seen = counted(int(text), "entry", "entries")
            return Answered(_refused(state, f"it has seen a tree of {seen}, and this log has {size}"))
        if int(text) != state.size:
            return Answered(replace(state, size=int(text)), retry=True)
    return Answered(_refused(state, MEANINGS.get(status, f"it answers with status {status}")))


def unreached(state: WitnessState, problem: str, now: int) -> WitnessState:
    """Return the state of a witness that could not be asked."""
    return _refused(replace(state, asked=now), f"it cannot be reached: {problem}")


def _cosigned(state: WitnessState, witness: Witness, note: str, size: int, body: str, now: int) -> Answered:
    problem = "it answers without a cosignature of its key"
    for line in body.splitlines(keepends=True):
        try:
            found = read_cosignature(note, line, witness)
        except CheckpointError as error:
            problem = str(error)
            continue
        if found.time > now + CLOCK_S:
            problem = "the time of its cosignature lies ahead"
            continue
        return Answered(replace(state, size=size, time=found.time, problem=""), line)
    return Answered(_refused(state, problem))


def _refused(state: WitnessState, problem: str) -> WitnessState:
    return replace(state, problem="".join(one if one.isprintable() else "?" for one in problem)[:MAX_PROBLEM])


def stale(states: Mapping[str, WitnessState], names: Iterable[str], now: float, max_age_s: float) -> list[str]:
    """Return what is wrong with configured witnesses, as sentences: those whose last cosignature is too old, or whose
    last answer was a refusal."""
    found = []
    for name in names:
        state = states.get(name, WitnessState(name))
        if state.problem and state.asked:
            found.append(f"the witness {name} did not cosign: {state.problem}")
        elif not state.time:
            found.append(f"the witness {name} has never cosigned")
        elif now - state.time > max_age_s:
            found.append(f"the witness {name} has not cosigned for {int((now - state.time) / 3_600)} h")
    return found


def states_file(tiles: Path) -> Path:
    """Return the path of the file of witnesses' states, beside the folder of tiles."""
    return tiles.with_name(f"{tiles.name}.witnesses.json")


def read_states(tiles: Path) -> dict[str, WitnessState]:
    """Read what is known of witnesses; nothing where there is no file, or none of ours.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with states_file(tiles).open("rb") as file:
            values = json.loads(file.read(MAX_STATE_BYTES))
        states = [WitnessState(**one) for one in values]
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return {}
    kinds = {field.name: str if field.name in ("name", "problem") else int for field in fields(WitnessState)}
    return {one.name: one for one in states if all(type(getattr(one, name)) is kind for name, kind in kinds.items())}


def states_text(states: Sequence[WitnessState]) -> bytes:
    """Return the content of the file."""
    return json.dumps([asdict(one) for one in states], indent=1).encode() + b"\n"
