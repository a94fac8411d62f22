"""Whether files and batches move, by the word of the running appliance. Pure; what is stuck is an alert besides."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.batch_status import BatchQueue
from appliance.common.figures import counted, duration, size
from appliance.operator.doctor.finding import Area, Finding, Subject


def check_batches(queue: BatchQueue | None) -> Iterator[Finding]:
    """Yield what is to be said of files and batches: nothing where none are kept, or nothing runs."""
    if queue is None:
        return
    subject = Subject(Area.SERVICE, "batches")
    kept = f"{counted(queue.files, 'file')} and {counted(queue.responses, 'stored response')} take "
    kept += f"{size(queue.stored_bytes)} of {size(queue.max_bytes)}"
    if not queue.open:
        yield subject.ok(f"none is open; {kept}")
        return
    what = f"{counted(queue.open, 'batch', 'batches')} open, the oldest for {duration(queue.oldest_s)}: "
    what += f"{counted(queue.waiting_lines, 'line')} left, {queue.running_lines:,} running; {kept}"
    if not queue.stuck:
        yield subject.ok(what)
        return
    stuck = f"{counted(queue.stuck, 'batch', 'batches')} of these ended no line for 15 minutes"
    yield subject.warning(what, means=f"{stuck}; alerts name the reason", mend="athanor status")
