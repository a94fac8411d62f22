"""What the supervisor tells of its checkpoints: which there are, and why one is not there or not used."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.checkpoint_status import MAX_PROBLEM_CHARS, CheckpointStatus, to_wire
from appliance.common.control_checkpoints import CheckpointState
from appliance.supervisor.warm import WarmStarts
from isolation.gvisor.checkpoint import Checkpoint

COMPARES = "this runsc compares mounts at a restore, so each model has a checkpoint of its own (docs/runsc.md)"
"""Why there is no base."""

NOT_STARTED = "not made yet: what would begin with it sleeps since the start"
"""Why there is none of a model that nobody has asked for."""

_SHOWN = 3
"""Sandboxes that are named in a reason."""


def checkpoint_state(warm: WarmStarts) -> CheckpointState:
    """Return what there is of what sandboxes have looked for since the supervisor's start, or would where their models
    have slept since. Reads the store.

    Raises:
        OSError: the store cannot be read.
    """
    return CheckpointState(*to_wire(_rows(warm)))


def _rows(warm: WarmStarts) -> Iterator[CheckpointStatus]:
    # Boots change it meanwhile, in other threads.
    kept, looked_for = {one.key: one for one in warm.store.kept()}, warm.looked_for.copy()
    if not warm.shares:
        for role in sorted({role for role, _ in looked_for}):
            yield CheckpointStatus(role=role, problem=COMPARES)
    for (role, model), key in sorted(looked_for.items()):
        found = kept.get(key)
        if found is not None:
            size, made_at, problem = found.size, found.label.made_at, _avoided(warm, key)
        else:
            size, made_at, problem = 0, 0.0, _missing(warm, role, model, tuple(kept.values()))
        yield CheckpointStatus(role=role, model=model, bytes=size, made_at=made_at, problem=problem[:MAX_PROBLEM_CHARS])


def _avoided(warm: WarmStarts, key: str) -> str:
    names = sorted(warm.trust.avoiders(key))
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"begin without it, since they failed with it: {', '.join(names[:_SHOWN])}{more}"


def _missing(warm: WarmStarts, role: str, model: str, kept: tuple[Checkpoint, ...]) -> str:
    """Why a checkpoint is not there."""
    if problem := warm.problems.get((role, model)):
        return problem
    others = [one.label for one in kept if (one.label.role, one.label.model) == (role, model)]
    if not others and (role, model) in warm.not_started:
        return NOT_STARTED
    if not others:
        return "not made yet: that begins once everything serves"
    newest = max(others, key=lambda label: label.made_at)
    here = dict(warm.surroundings)
    differs = [name for name, value in newest.made_with if here.get(name) != value]
    of = f"another {' and '.join(differs)}" if differs else "other files or settings"
    return f"the newest there is was made with {of}, and is not used"
