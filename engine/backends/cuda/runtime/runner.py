"""Executes step plans on a device that runs ahead of them.

Decoding rows advance on the device alone (``engine.backends.cuda.runtime.loop``). While the host commits a step and
plans the next, the device computes it already (``engine.backends.cuda.runtime.ahead``). A plan whose step was run ahead
only takes its tokens. Rows that the plan has and the step had not (there are some after a preemption, or where the host
chooses tokens) are computed in a step of their own. What was run ahead for rows that have ended is dropped; it was
written to blocks that were theirs at that place of the queue.

Prompts are computed as they come (``engine.backends.cuda.runtime.prefill``), between two steps or in one pass with
decoding rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from engine.backends.common.penalties import has_penalties
from engine.backends.cuda.runtime.ahead import NO_ROWS, RunAhead
from engine.backends.cuda.runtime.collector import Started, StepCollector
from engine.backends.cuda.runtime.copying import ArenaSizes, arena_sizes
from engine.backends.cuda.runtime.device_memory import Resources, largest_plans, make_resources, take_memory
from engine.backends.cuda.runtime.exact import ExactPass
from engine.backends.cuda.runtime.host_rows import DEVICE_STOPS, UNKNOWN, HostRows, Ints, spare_stamp
from engine.backends.cuda.runtime.launches import Launcher
from engine.backends.cuda.runtime.loop import MOST_CHANGES, RING_STEPS, DeviceLoop
from engine.backends.cuda.runtime.mixing import Mixing
from engine.backends.cuda.runtime.model import DeviceModel
from engine.backends.cuda.runtime.operations import Operations
from engine.backends.cuda.runtime.prefill import Prefill, Prefilled
from engine.backends.cuda.runtime.replay import make_replayer
from engine.backends.cuda.runtime.rows import Deltas, RowLayout
from engine.backends.cuda.runtime.sampling_state import REPORT_WORDS, WORD_BITS, ChoiceMemory
from engine.backends.cuda.runtime.side_queue import main_stream
from engine.backends.cuda.runtime.staging import make_content
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import Tables
from engine.core.backend import Capabilities, Samples
from engine.core.kv.tags import NO_STAMP
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from isolation.ipc.messages import WeightForm

MOST_AHEAD = 4
"""Steps that are run ahead at once while nobody comes."""


class DeviceRunner:
    """A loaded model with its KV memory and the state of all rows, on one device."""

    note = ""
    """What else there is to say of how it computes."""

    weights = WeightForm.UNKNOWN
    """Form in which the model's weights are held; set by what loads it."""

    def __init__(  # noqa: PLR0913 - ways to turn off, for comparison, what an engine does
        self,
        model: DeviceModel,
        storage: DeviceStorage,
        limits: SchedulerLimits,
        operations: Operations,
        *,
        eager: bool = False,
        most_ahead: int = MOST_AHEAD,
        mixing: Mixing | None = None,
        resources: Resources | None = None,
    ) -> None:
        """Take the memory of all rows.

        Args:
            model: what computes.
            storage: its KV.
            limits: of steps.
            operations: of the device.
            eager: compute every step anew instead of replaying a recording.
            most_ahead: steps that are run ahead at once; 0 for a device that waits for every plan.
            mixing: when decoding rows join prompts; None: as the operations have it.
            resources: None: those that fit the device, which are taken here.
        """
        self.model = model
        self.limits = limits
        self.capabilities = _capabilities(storage, limits, operations)
        self.storage = storage
        self._device = storage.device
        tables = Tables.of(storage.layout, limits.max_context)
        self._most_ahead = min(most_ahead, *(group.block_size for group in tables.groups))
        layout = RowLayout(limits.max_num_seqs, limits.max_num_seqs, DEVICE_STOPS, tables.width)
        self._stamps = torch.full((storage.num_blocks,), NO_STAMP, dtype=torch.int64, device=self._device)
        spares = [spare for row in range(limits.max_num_seqs) for spare in storage.spares(row)]
        stamps = [spare_stamp(storage.number(spare)) for spare in spares]
        resources = resources or make_resources(self._device, sizes_of(limits, storage.staged_sizes))
        copies, self._memory = resources.copies, resources.memory
        self._copies = copies
        self._stamps.index_copy_(0, *copies.upload(np.array((spares, stamps), dtype=np.int64)))
        self._choices = ChoiceMemory(layout.lines, limits.vocab_size, limits.eos_ids, self._device, copies)
        loop = self._loop = DeviceLoop(layout, model, operations, self._choices, self._stamps, tables, copies)
        self._deltas = Deltas(layout)
        self._stream = main_stream(self._device)
        self.content = make_content(storage, resources, self._stream)
        self._launcher = Launcher(loop, make_replayer(loop.step, self._stream, eager=eager), self._deltas)
        self._rows = HostRows(limits, storage, self._deltas, tables, adapters=self.capabilities.adapters)
        self._prefill = Prefill(loop, model, storage, operations, self._rows)
        self._exact = ExactPass(loop, model, storage, operations, self._rows)
        self._collector = StepCollector(self._launcher, self._rows, limits)
        self._mixing = operations.mixing if mixing is None else mixing
        self._ahead = RunAhead(self._launcher, self._rows, self._mixing, self._most_ahead)
        self._decode_list: list[int] = []
        self._decode_rows: Ints = np.zeros(0, dtype=np.int64)
        self._places: Ints | None = None
        self._exact_rows: list[int] = []
        if self._stream is not None:
            # Weights and state were written on another stream, for which this one does not wait by itself.
            torch.cuda.synchronize(self._device)
        self._taken = 0

    @property
    def description(self) -> str:
        """What computes."""
        return f"the device backend on {self._device.type}" + (f"; {self.note}" if self.note else "")

    @property
    def num_ahead(self) -> int:
        """Rows' tokens that were there before their plan came."""
        return self._ahead.num_early

    @property
    def num_mixed(self) -> int:
        """Passes that decoding rows and prompts had in common."""
        return self._ahead.num_mixed

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Record that blocks were filled from outside, for the holders of these stamps."""
        with self._queue():
            ids, given = self._copies.upload(np.array((blocks, stamps), dtype=np.int64))
            self._stamps.index_copy_(0, ids, given)

    def record(self, enough: Callable[[], bool]) -> None:
        """Record steps of buckets until ``enough`` says so, before anybody is served, and before there are weights if
        their memory is final. Recordings are all that is left of it."""
        with self._queue(), torch.inference_mode():
            self._launcher.warm(enough)
            self._launcher.reset()
            self.storage.clean()
            self._choices.clean()

    @property
    def recorded(self) -> tuple[int, ...]:
        """Buckets of rows whose steps are recorded."""
        return self._launcher.recorded

    def prove(self) -> None:
        """Load all code, record the steps of all buckets that are not recorded yet, try the deterministic class (where
        it fails, no deterministic request is served), and take the memory that steps will need."""
        with self._queue(), torch.inference_mode():
            self._launcher.warm()
            if self.capabilities.deterministic:
                found = self._exact.is_exact(self.limits.vocab_size)
                self.capabilities = replace(self.capabilities, deterministic=found)
            if self._memory is not None:
                take_memory(self._memory, self._run_largest)
                self.touch()

    def touch(self) -> None:
        """Write every page of its KV memory once more; only while no request is live. What is taken of the driver's
        memory is counted from the last time on."""
        with self._queue(), torch.inference_mode():
            self._ahead.pending.clear()
            self.storage.touch()
            self._choices.touch()
            self._rows.clear()
        if self._memory is not None:
            self._taken = self._memory.taken()

    @property
    def num_taken(self) -> int:
        """How often memory of the device, or page-locked memory, was taken from the driver since the last ``touch``: 0
        in an engine that serves."""
        return 0 if self._memory is None else self._memory.taken() - self._taken

    def _run_largest(self) -> None:
        """Run steps that need as much memory as any; rows and blocks are to be made zero then."""
        for plan in largest_plans(
            self.limits, self.storage.layout.num_blocks, deterministic=self.capabilities.deterministic
        ):
            self.execute(plan)
            if self._mixing.ever:
                self._mix_most(plan)
            self.storage.move_most()
            self.forget([admission.row for admission in plan.admissions])

    def _mix_most(self, plan: StepPlan) -> None:
        """Compute a plan's prompts once more, with fewer tokens and with lanes that have no row: so many lines and
        tokens as a pass can have that prompts and rows have in common."""
        lanes, chunks, left = self.limits.max_num_seqs - len(plan.prefills), [], 0
        for chunk in plan.prefills:
            length = max(1, chunk.length - max(0, lanes - left))
            left += chunk.length - length
            chunks.append(chunk._replace(length=length, num_scored=min(chunk.num_scored, length - 1)))
        lanes = min(lanes, left)
        if lanes:
            found: list[Prefilled] = []
            with self._queue(), torch.inference_mode():
                self._launcher.launch(
                    NO_ROWS, self._rows.ahead, run=lambda _: found.append(self._prefill.run(chunks, lanes))
                )
                for fetched in (found[0].verdicts, found[0].reports):
                    if fetched is not None:
                        fetched.numpy()

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        with self._queue(), torch.inference_mode():
            self._prepare(plan)
            if not plan.decode_rows and not plan.prefills:
                return Samples([])
            return self._execute(plan)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens that are kept of these rows; the newest of each stays on the device until it
        writes there again."""
        self._rows.forget(rows)
        self._collector.forget(rows)
        with self._queue(), torch.inference_mode():
            self._choices.forget(rows)

    def _queue(self) -> AbstractContextManager[object]:
        """Everything is put into one queue of the device: what is written before is there for what reads after."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _prepare(self, plan: StepPlan) -> None:
        """Clean blocks, admit rows, and give rows their blocks."""
        for admission in plan.admissions:
            self._ahead.admit(admission.row)
            self._collector.admit(admission)
        self._rows.intake.take(plan)
        self._write_blocks(plan.admissions)
        self._choices.admit(one for one in plan.admissions if has_penalties(one.sampling))
        self._choices.bias(one for one in plan.admissions if one.logit_bias is not None)
        if plan.masks:
            self._rows.guide(plan.masks)
            self._choices.put(plan.masks)

    def _write_blocks(self, admissions: list[Admission]) -> None:
        """Clean the plan's blocks and the spare ones of rows that begin, and move into new blocks what stands in spare
        ones; all that the device has to know of it, and what changed in rows, in one copy."""
        spares = [spare for admission in admissions for spare in self.storage.spares(admission.row)]
        moves, (zeroed, stamps) = self._rows.take_moves(), self._rows.renewed
        if not zeroed and not spares and not moves:
            return
        told: Ints = np.array(zeroed + spares + stamps, dtype=np.int64)
        parts = [told, *(slots for move in moves for slots in move)]
        if 0 < len(self._deltas) <= MOST_CHANGES:
            parts.extend(self._deltas.take())
        count, cleaned = len(zeroed), len(zeroed) + len(spares)
        sizes = [len(part) for part in parts[1:]]
        sent = torch.split(self._copies.upload(np.concatenate(parts)), [cleaned, len(stamps), *sizes])
        if cleaned:
            self.storage.zero(sent[0])
        if stamps:
            self._stamps.index_copy_(0, sent[0] if count == cleaned else sent[0][:count], sent[1])
        rest = sent[2:]
        for number in range(len(moves)):
            self.storage.move(rest[2 * number], rest[2 * number + 1])
        for place in range(2 * len(moves), len(rest), 2):
            self._loop.take_over(rest[place], rest[place + 1])

    def _execute(self, plan: StepPlan) -> Samples:
        rows, ahead = self._decoding(plan), self._ahead
        parts, missing = ahead.take(rows)
        chunks, exact = self._dealt(plan)
        joining = ahead.joining(chunks, rows, missing)
        prefilled: list[Prefilled] = []
        riders = ahead.start(rows, missing, parts) if joining is None else None
        if exact or self._exact_rows or (chunks and joining is None):
            self._loop.announce(self._deltas)
        if joining is not None:
            parts += ahead.join(rows, joining, lambda lanes: prefilled.append(self._prefill.run(chunks, lanes)))
        elif chunks:
            prefilled.append(self._prefill.run(chunks))
        for chunk in chunks:
            self._rows.ahead[chunk.row] = chunk.start + chunk.length if chunk.last else UNKNOWN
        if exact or self._exact_rows:
            prefilled.append(self._exact.run(self._exact_rows, exact))
        if joining is None or not len(joining.coming):
            parts += ahead.run(chunks, rows, riders, prompts=bool(plan.prefills))
        owes = joining is not None and not joining.waits
        if owes:
            # The next plan may evict these prompts' blocks before the host has waited for the pass.
            self.storage.mark_pass()
        return self._collector.collect(Started(plan, rows, self._places, parts, prefilled, owes))

    def _dealt(self, plan: StepPlan) -> tuple[list[Chunk], list[Chunk]]:
        """The plan's chunks of ordinary rows, and those of deterministic ones."""
        own = self._rows.intake.exact
        if not own or not plan.prefills:
            return plan.prefills, []
        parts: tuple[list[Chunk], list[Chunk]] = [], []
        for chunk in plan.prefills:
            parts[chunk.row in own].append(chunk)
        return parts

    def _decoding(self, plan: StepPlan) -> Ints:
        """The plan's ordinary decoding rows; the scheduler keeps the list as long as they are the same."""
        if plan.decode_rows is not self._decode_list:
            self._decode_list, own = plan.decode_rows, self._rows.intake.exact
            self._decode_rows = np.array(plan.decode_rows, dtype=np.int64)
            self._exact_rows = [row for row in plan.decode_rows if row in own]
            self._places = None
            if self._exact_rows:
                (self._places,) = np.nonzero(~np.isin(self._decode_rows, self._exact_rows))
                self._decode_rows = self._decode_rows[self._places]
        return self._decode_rows


def sizes_of(limits: SchedulerLimits, staged: tuple[int, ...] = ()) -> ArenaSizes:
    """Sizes of the arena of an engine: its largest copies are masks of all rows, a step's prompts, the counts of one
    prompt's ids, and changes of rows. ``staged``: of buffers for whole blocks."""
    rows, tokens, word = limits.max_num_seqs, limits.max_num_batched_tokens, 8
    masks = rows * -(-limits.vocab_size // WORD_BITS) * 4
    prompts = (3 * tokens + 6 * rows + limits.max_logit_lines) * word
    counts = 2 * min(limits.max_context, limits.vocab_size) * word
    report = rows * REPORT_WORDS * 4
    return arena_sizes(
        largest_upload=max(masks, prompts, counts, 2 * MOST_CHANGES * word),
        fetched=max(3 * rows * word, report),
        mirrors=(RING_STEPS * rows * word, RING_STEPS * report, *staged),
    )


def _capabilities(storage: DeviceStorage, limits: SchedulerLimits, operations: Operations) -> Capabilities:
    """What a device can do before it was tried. Kernels are compiled before it serves, or come from a cache. Prompts
    have rooms of powers of two, each with kernels of its own."""
    rooms = tuple(1 << place for place in range(limits.max_num_seqs.bit_length()))
    gpu = storage.device.type == "cuda"
    spills = storage.num_staged > 0
    return Capabilities(publish=True, gpu=gpu, deterministic=operations.exact, warm_rows=rooms, spill=spills)
