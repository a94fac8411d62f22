"""Executes step plans on a device that runs ahead of them.

Decoding rows advance on the device alone (``engine.backends.cuda.runtime.loop``). While the host commits a step and
plans the next, the device computes it already: as soon as a plan's own step is started, those of the plans to come are,
for all rows that will decode then. A plan whose step was run ahead only takes its tokens. Rows that the plan has and
the step had not (there are some after a preemption, or where the host chooses tokens) are computed in a step of their
own. What was run ahead for rows that have ended is dropped; it was written to blocks that were theirs at that place of
the queue.

Prompts are computed as they come (``engine.backends.cuda.runtime.prefill``), between two steps.

A structured row waits for a mask before each token, so it cannot be run ahead of; the others are. When its mask has
come it *rides along* in the next step that is run ahead for them: that step has its token of this plan, and the others'
of the next one. So weights are read no more often for it, and the others' tokens are at most a step late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.penalties import has_penalties
from engine.backends.common.sampler import Sampler
from engine.backends.common.sliced_sampling import Chooser
from engine.backends.cuda.runtime.copying import ArenaSizes, arena_sizes
from engine.backends.cuda.runtime.device_memory import Resources, largest_plans, make_resources, take_memory
from engine.backends.cuda.runtime.exact import ExactPass
from engine.backends.cuda.runtime.host_rows import DEVICE_STOPS, UNKNOWN, HostRows, Ints, spare_stamp
from engine.backends.cuda.runtime.launches import NO_LANE, Launch, Launcher
from engine.backends.cuda.runtime.loop import FOREIGN, MOST_CHANGES, NOTHING, RING_STEPS, DeviceLoop
from engine.backends.cuda.runtime.model import DeviceModel
from engine.backends.cuda.runtime.operations import Operations
from engine.backends.cuda.runtime.prefill import Prefill, Prefilled
from engine.backends.cuda.runtime.replay import make_replayer
from engine.backends.cuda.runtime.rows import Deltas, RowLayout
from engine.backends.cuda.runtime.sampling_state import REPORT_WORDS, WORD_BITS, ChoiceMemory, entries
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import Tables
from engine.core.backend import Capabilities, Samples
from engine.core.kv.tags import NO_STAMP
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, Admission, Chunk, StepPlan
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs

Flags = NDArray[np.bool_]

STEADY_STEPS = 4
"""Plans without a prompt after which several steps are run ahead: somebody who comes then waits for a few steps, and a
host that is late now and then holds up nothing."""

MOST_AHEAD = 4
"""Steps that are run ahead at once while nobody comes."""


class DeviceRunner:
    """A loaded model with its KV memory and the state of all rows, on one device."""

    note = ""
    """What else there is to say of how it computes."""

    def __init__(
        self,
        model: DeviceModel,
        storage: DeviceStorage,
        limits: SchedulerLimits,
        operations: Operations,
        *,
        eager: bool = False,
        most_ahead: int = MOST_AHEAD,
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
        resources = resources or make_resources(self._device, sizes_of(limits))
        copies, self._memory = resources.copies, resources.memory
        self._copies = copies
        self._stamps.index_copy_(0, *copies.upload(np.array((spares, stamps), dtype=np.int64)))
        self._choices = ChoiceMemory(layout.lines, limits.vocab_size, limits.eos_ids, self._device, copies)
        loop = self._loop = DeviceLoop(layout, model, operations, self._choices, self._stamps, tables, copies)
        self._deltas = Deltas(layout)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._launcher = Launcher(loop, make_replayer(loop.step, self._stream, eager=eager), self._deltas)
        self._rows = HostRows(limits, storage, self._deltas, tables, adapters=self.capabilities.adapters)
        self._prefill = Prefill(loop, model, storage, operations, self._rows)
        self._exact = ExactPass(loop, model, storage, operations, self._rows)
        self._collector = StepCollector(self._launcher, self._rows, limits)
        self._pending: deque[Launch] = deque()
        self._decode_list: list[int] = []
        self._decode_rows: Ints = np.zeros(0, dtype=np.int64)
        self._places: Ints | None = None
        self._exact_rows: list[int] = []
        self._all = np.ones(0, dtype=np.bool_)
        self._steady = 0
        if self._stream is not None:
            # Weights and state were written on another stream, for which this one does not wait by itself.
            torch.cuda.synchronize(self._device)
        self._taken = self.num_ahead = 0
        """Rows' tokens that were there before their plan came."""

    @property
    def description(self) -> str:
        """What computes."""
        return f"the device backend on {self._device.type}" + (f"; {self.note}" if self.note else "")

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
            self._pending.clear()
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
            self.storage.move_most()
            self.forget([admission.row for admission in plan.admissions])

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
            for launch in self._pending:
                launch.lane_of[admission.row] = NO_LANE
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
        rows = self._decoding(plan)
        parts, riders = self._decode(rows)
        chunks, exact = self._dealt(plan)
        prefilled = []
        if chunks or exact or self._exact_rows:
            self._loop.announce(self._deltas)
        if chunks:
            prefilled.append(self._prefill.run(chunks))
            for chunk in chunks:
                self._rows.ahead[chunk.row] = chunk.start + chunk.length if chunk.last else UNKNOWN
        if exact or self._exact_rows:
            prefilled.append(self._exact.run(self._exact_rows, exact))
        parts += self._run_ahead(plan, rows, riders, chunks)
        return self._collector.collect(Started(plan, rows, self._places, parts, prefilled))

    def _dealt(self, plan: StepPlan) -> tuple[list[Chunk], list[Chunk]]:
        """The plan's chunks of ordinary rows, and those of deterministic ones."""
        own = self._rows.intake.exact
        if not own or not plan.prefills:
            return plan.prefills, []
        parts: tuple[list[Chunk], list[Chunk]] = [], []
        for chunk in plan.prefills:
            parts[chunk.row in own].append(chunk)
        return parts

    def _decode(self, rows: Ints) -> tuple[list[tuple[Launch, Flags]], Flags]:
        """Steps of which each has some of these rows: what was run ahead, and the rest. The second of each pair says
        for every row whether it is there. Last, which rows are to ride along with the next step that is run ahead."""
        host, parts, nobody = self._rows, [], ~self._all
        missing = self._all
        if self._pending and len(rows):
            launch = self._pending.popleft()
            there = (launch.lane_of[rows] != NO_LANE) & (launch.positions[rows] == host.position[rows])
            if host.any_guided:
                # A row that is guided was not run ahead of, or not yet under its mask.
                there &= ~host.guided[rows]
            num_there = int(np.count_nonzero(there))
            self.num_ahead += num_there
            if num_there == len(rows):
                return [(launch, self._all)], nobody
            parts.append((launch, there))
            missing = ~there
        if not len(rows):
            return parts, nobody
        host.resume(rows[missing])
        riders = missing & host.guided[rows]
        if self._most_ahead and (riders == missing).all():
            return parts, riders
        parts.append((self._launch(rows if missing is self._all else rows[missing]), missing))
        return parts, nobody

    def _launch(self, rows: Ints) -> Launch:
        host = self._rows
        reports = host.any_asked and bool((host.asked[rows] >= 0).any())
        launch = self._launcher.launch(rows, host.ahead, reports=reports)
        host.ahead[rows] += 1
        return launch

    def _run_ahead(self, plan: StepPlan, rows: Ints, riders: Flags, chunks: list[Chunk]) -> list[tuple[Launch, Flags]]:
        """Start the steps of plans to come, unless some are under way, and that of the riders; gives the latter.
        ``chunks``: those of the plan whose rows decode afterwards."""
        self._steady = 0 if plan.prefills else self._steady + 1
        parts, enough = [], 0
        if riders.any():
            coming = self._coming(chunks, rows)
            joined = len(coming) > 0 and len(self._pending) < self._most_ahead
            launch = self._launch(np.concatenate((rows[riders], coming)) if joined else rows[riders])
            parts.append((launch, riders))
            if joined:
                self._pending.append(launch)
                # The plan waits for this one, so there should be one more behind it.
                enough = 1
        if len(self._pending) > enough:
            return parts
        coming = self._coming(chunks, rows)
        if len(coming):
            quiet = self._steady >= STEADY_STEPS and not self._rows.any_guided
            depth = min(self._most_ahead if quiet else 1, self._most_ahead - len(self._pending))
            self._pending.extend(self._launch(coming) for _ in range(depth))
        return parts

    def _coming(self, chunks: list[Chunk], rows: Ints) -> Ints:
        """Rows that will decode after this plan, whatever it gives, and wait for nothing."""
        host, coming, after = self._rows, rows, self._rows.position[rows] + 1
        ending = [(chunk.row, chunk.start + chunk.length) for chunk in chunks if chunk.last]
        if ending:
            some = np.array(ending, dtype=np.int64).T
            coming, after = np.concatenate((rows, some[0])), np.concatenate((after, some[1]))
        ahead = host.ahead[coming]
        # Only those that are in all steps under way: the next one of another would be taken for a later plan's. The
        # plan's token stands at ``ahead``, and with it there is one token more than that.
        wanted = (ahead == after + len(self._pending)) & (ahead + 1 < host.limit[coming])
        if host.any_guided:
            wanted &= ~host.guided[coming]
        # The same array as long as the rows are the same: the launcher looks at no row then.
        return coming if wanted.all() else coming[wanted]

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
            self._all = np.ones(len(self._decode_rows), dtype=np.bool_)
        return self._decode_rows


def sizes_of(limits: SchedulerLimits) -> ArenaSizes:
    """Sizes of the arena of an engine: its largest copies are masks of all rows, a step's prompts, the counts of one
    prompt's ids, and changes of rows."""
    rows, tokens, word = limits.max_num_seqs, limits.max_num_batched_tokens, 8
    masks = rows * -(-limits.vocab_size // WORD_BITS) * 4
    prompts = (3 * tokens + 6 * rows + limits.max_logit_lines) * word
    counts = 2 * min(limits.max_context, limits.vocab_size) * word
    report = rows * REPORT_WORDS * 4
    return arena_sizes(
        largest_upload=max(masks, prompts, counts, 2 * MOST_CHANGES * word),
        fetched=max(3 * rows * word, report),
        mirrors=(RING_STEPS * rows * word, RING_STEPS * report),
    )


def _capabilities(storage: DeviceStorage, limits: SchedulerLimits, operations: Operations) -> Capabilities:
    """What a device can do before it was tried. Blocks stay on it; kernels are compiled before it serves, or come from
    a cache. Prompts have rooms of powers of two, each with kernels of its own."""
    rooms = tuple(1 << place for place in range(limits.max_num_seqs.bit_length()))
    gpu = storage.device.type == "cuda"
    return Capabilities(publish=True, gpu=gpu, deterministic=operations.exact, warm_rows=rooms)


@dataclass(frozen=True, slots=True)
class Started:
    """A plan that was started."""

    plan: StepPlan
    rows: Ints
    """Rows of its decoding requests, without those that were computed as prompts are."""
    places: Ints | None
    """Places of ``rows`` among the plan's; None: they are all of them."""
    parts: list[tuple[Launch, Flags]]
    """Steps of the device, and which of the rows each has."""
    prefilled: list[Prefilled]
    """What was computed as prompts are: the plan's chunks, and its deterministic rows."""


class StepCollector:
    """Waits for steps that were started, takes their tokens and log-probabilities, and scores prompts."""

    def __init__(self, launcher: Launcher, host: HostRows, limits: SchedulerLimits) -> None:
        self._launcher = launcher
        self._host = host
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)

    def admit(self, admission: Admission) -> None:
        """A request takes a row; of those whose prompts are scored the numbers are kept."""
        if admission.prompt_logprobs >= 0:
            self._sampler.admit(admission)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the ids that are kept of these rows."""
        self._sampler.forget(rows)

    def collect(self, step: Started) -> Samples:
        """Wait for the step's tokens and log-probabilities, and note how far rows are."""
        plan, rows, host = step.plan, step.rows, self._host
        ended = {chunk.row: place for place, chunk in enumerate(one for one in plan.prefills if one.last)}
        tokens: Ints = np.empty(len(plan.decode_rows) + len(ended), dtype=np.int64)
        logprobs: list[TokenLogprobs] = []
        for launch, there in step.parts:
            (found,) = np.nonzero(there)
            own = rows if len(found) == len(rows) else rows[found]
            places = found if step.places is None else step.places[found]
            lanes = launch.lane_of[own]
            tokens[places] = self._launcher.tokens(launch)[lanes]
            if launch.reports:
                logprobs += self._entries(places, own, tokens, self._launcher.reports(launch)[lanes])
        unsound: list[int] = []
        if step.prefilled:
            place_of = {row: len(plan.decode_rows) + place for row, place in ended.items()}
            if step.places is not None:
                place_of |= {row: place for place, row in enumerate(plan.decode_rows)}
            for prefilled in step.prefilled:
                unsound += self._take_prefilled(prefilled, place_of, tokens, logprobs)
        foreign = frozenset(unsound)
        if len(tokens) and tokens.min() < FAILED:
            assert NOTHING not in tokens, "a row that decodes was not computed"
            foreign = foreign.union(plan.sample_rows[place] for place in np.flatnonzero(tokens == FOREIGN))
            tokens[tokens == FOREIGN] = FAILED
        samples = Samples(tokens.tolist(), logprobs, foreign=foreign)
        if len(rows):
            host.last[rows] = tokens[: len(rows)] if step.places is None else tokens[step.places]
            host.position[rows] += 1
        scored: dict[int, PromptLogprobs] = {}
        for prefilled in step.prefilled:
            scored |= self._score(prefilled, samples.foreign)
        # In the plan's order, whichever way they were computed: that is how the scheduler tells requests apart.
        samples.prompts.extend(scored[chunk.row] for chunk in plan.prefills if chunk.row in scored)
        if len(step.parts) + len(step.prefilled) > 1:
            logprobs.sort(key=lambda entry: entry.index)
        return samples

    def _take_prefilled(
        self, prefilled: Prefilled, place_of: dict[int, int], tokens: Ints, logprobs: list[TokenLogprobs]
    ) -> list[int]:
        """Note the tokens of prompts that ended, and how far all are; gives the rows of chunks that were not computed.
        Log-probabilities are added to the others."""
        chunks, verdicts = prefilled.chunks, prefilled.verdicts.numpy()
        ended = [chunk.row for chunk in chunks if chunk.last]
        places = np.array([place_of[row] for row in ended], dtype=np.int64)
        tokens[places] = verdicts[: len(ended)]
        unsound = [chunk.row for chunk, one in zip(chunks, verdicts[len(ended) :], strict=True) if one == FOREIGN]
        if prefilled.reports is not None:
            rows = np.array(ended, dtype=np.int64)
            logprobs += self._entries(places, rows, tokens, prefilled.reports.numpy())
        for chunk in chunks:
            self._host.position[chunk.row] = chunk.start + chunk.length
        for row, token in zip(ended, tokens[places].tolist(), strict=True):
            self._host.last[row] = max(token, FAILED)
        return unsound

    def _entries(self, places: Ints, rows: Ints, tokens: Ints, words: NDArray[np.int32]) -> list[TokenLogprobs]:
        """Log-probabilities of these places' tokens, where their rows asked and there is a token."""
        asked = self._host.asked[rows]
        told = (asked >= 0) & (tokens[places] >= 0)
        return entries(places[told], words[told], asked[told])

    def _score(self, prefilled: Prefilled, foreign: frozenset[int]) -> dict[int, PromptLogprobs]:
        """Log-probabilities of prompts by row, of chunks that were computed."""
        chunks = prefilled.chunks
        place, found = sum(chunk.last for chunk in chunks), {}
        for chunk in chunks:
            if chunk.num_scored and chunk.row not in foreign:
                lines = prefilled.logits[place : place + chunk.num_scored]
                tokens = self._host.known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]
                found[chunk.row] = self._chooser.score(lines, chunk.row, chunk.score_from, tokens)
            place += chunk.num_scored
        return found
