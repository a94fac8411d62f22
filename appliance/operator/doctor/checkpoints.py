"""Whether sandboxes begin with a checkpoint, by the word of the running appliance. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.checkpoint_status import CheckpointStatus
from appliance.common.figures import size
from appliance.operator.doctor.finding import Area, Finding, Subject


def check_checkpoints(found: tuple[CheckpointStatus, ...]) -> Iterator[Finding]:
    """Yield a finding for each base, and for each other that is not there or that some sandboxes begin without."""
    for one in found:
        subject = Subject(Area.SERVICE, f"checkpoint {one.role}")
        of = f"of {one.model}" if one.model else "of all models"
        if not one.bytes:
            yield subject.note(f"none {of}, so starts are cold: {one.problem}")
        elif one.problem:
            yield subject.note(f"{of}, {size(one.bytes)}; {one.problem}")
        elif not one.model:
            yield subject.ok(f"{of}, {size(one.bytes)}")
