"""Executes step plans on a device that runs ahead of them.

Decoding rows advance on the device alone (``engine.device.loop``). While the host commits a step and plans the next,
the device computes it already: as soon as a plan's own step is started, those of the plans to come are, for all rows
that will decode then. A plan whose step was run ahead only takes its tokens. Rows that the plan has and the step had
not (there are some after a preemption, or where the host chooses tokens) are computed in a step of their own. What was
run ahead for rows that have ended is dropped; it was written to blocks that were theirs at that place of the queue.

Prompts are computed as they come (``engine.device.prefill``), between two steps. Tokens of rows with penalties, masks
or log-probabilities are chosen by the host from the step's logits; a step with such rows is not run ahead of.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.chooser import Chooser
from engine.device.host_rows import DEVICE_STOPS, UNKNOWN, HostRows, Ints, spare_stamp
from engine.device.launches import NO_LANE, Launch, Launcher
from engine.device.loop import FOREIGN, NOTHING, DeviceLoop, upload
from engine.device.model import DeviceModel
from engine.device.operations import Operations
from engine.device.prefill import Prefill, Prefilled
from engine.device.replay import make_replayer
from engine.device.rows import Deltas, RowLayout
from engine.device.storage import DeviceStorage
from engine.device.tables import Tables
from engine.kv.tags import NO_STAMP
from engine.masks import MaskedLogits
from engine.sampler import Sampler, Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import FAILED, Chunk, StepPlan

STEADY_STEPS = 4
"""Plans without a prompt after which several steps are run ahead: somebody who comes then waits for a few steps, and a
host that is late now and then holds up nothing."""

MOST_AHEAD = 4
"""Steps that are run ahead at once while nobody comes."""


class DeviceRunner:
    """A loaded model with its KV memory and the state of all rows, on one device."""

    def __init__(
        self,
        model: DeviceModel,
        storage: DeviceStorage,
        limits: SchedulerLimits,
        operations: Operations,
        *,
        eager: bool = False,
        most_ahead: int = MOST_AHEAD,
    ) -> None:
        """``eager``: compute every step anew instead of replaying a recording. ``most_ahead``: 0 for a device that
        waits for every plan."""
        self.limits = limits
        self.storage = storage
        self._device = storage.device
        tables = Tables.of(storage.layout, limits.max_context)
        self._most_ahead = min(most_ahead, *(group.block_size for group in tables.groups))
        layout = RowLayout(limits.max_num_seqs, limits.max_num_seqs, DEVICE_STOPS, tables.width)
        self._stamps = torch.full((storage.num_blocks,), NO_STAMP, dtype=torch.int64, device=self._device)
        spares = [spare for row in range(limits.max_num_seqs) for spare in storage.spares(row)]
        stamps = [spare_stamp(storage.number(spare)) for spare in spares]
        self._stamps[spares] = torch.tensor(stamps, device=self._device)
        loop = self._loop = DeviceLoop(layout, model, operations, self._stamps, tables)
        self._deltas = Deltas(layout)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._launcher = Launcher(loop, make_replayer(loop.step, self._stream, eager=eager), self._deltas)
        self._rows = HostRows(limits, storage, self._deltas, tables)
        self._prefill = Prefill(loop, model, storage, operations, self._rows)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)
        self._pending: deque[Launch] = deque()
        self._decode_list: list[int] = []
        self._decode_rows: Ints = np.zeros(0, dtype=np.int64)
        self._steady = 0
        if self._stream is not None:
            # Weights and state were written on another stream, for which this one does not wait by itself.
            torch.cuda.synchronize(self._device)
        self.num_ahead = 0
        """Rows' tokens that were there before their plan came."""

    @property
    def backend(self) -> str:
        """What computes."""
        return f"the device backend on {self._device.type}"

    @property
    def writes_code(self) -> bool:
        """Kernels are compiled before it serves, or come from a cache."""
        return False

    @property
    def deterministic(self) -> bool:
        """Libraries choose a product's kernel by its rows, so a row's bits depend on how many there are beside it."""
        return False

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """These blocks have been filled from outside, for the holders of these stamps."""
        with self._queue():
            self._stamp(np.array(blocks, dtype=np.int64), np.array(stamps, dtype=np.int64))

    def prove(self) -> None:
        """Load all code and record the steps of all buckets; nothing has to be proved where nothing is promised."""
        with self._queue(), torch.inference_mode():
            self._launcher.warm()

    def touch(self) -> None:
        """Write every page of its KV memory once more; only while no request is live."""
        with self._queue(), torch.inference_mode():
            self._pending.clear()
            self.storage.touch()

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        with self._queue(), torch.inference_mode():
            self._prepare(plan)
            if not plan.decode_rows and not plan.prefills:
                return Samples([])
            return self._execute(plan)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens that the host keeps of these rows; the device's own stay until it writes there again."""
        self._rows.forget(rows)
        self._sampler.forget(rows)

    def _queue(self) -> AbstractContextManager[object]:
        """Everything is put into one queue of the device: what is written before is there for what reads after."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _prepare(self, plan: StepPlan) -> None:
        """Clean blocks, admit rows, and give rows their blocks."""
        spares = [spare for admission in plan.admissions for spare in self.storage.spares(admission.row)]
        if plan.zero_blocks or spares:
            dirty = upload(np.array(plan.zero_blocks + spares, dtype=np.int64), self._device)
            self.storage.zero(dirty)
            if plan.zero_stamps:
                self._stamp(dirty[: len(plan.zero_blocks)], np.array(plan.zero_stamps, dtype=np.int64))
        for admission in plan.admissions:
            for launch in self._pending:
                launch.lane_of[admission.row] = NO_LANE
            self._rows.admit(admission)
            self._sampler.admit(admission)
        stamps = plan.grown_stamps or [NO_STAMP] * len(plan.grown_rows)
        tables = plan.grown_tables or [0] * len(plan.grown_rows)
        for grown in zip(plan.grown_rows, tables, plan.grown_indices, plan.grown_blocks, stamps, strict=True):
            self._rows.grow(*grown)
        for table, moves in self._rows.take_moves():
            self.storage.move(table, upload(moves, self._device))

    def _stamp(self, blocks: Ints | torch.Tensor, stamps: Ints) -> None:
        ids = blocks if isinstance(blocks, torch.Tensor) else upload(blocks, self._device)
        self._stamps.index_copy_(0, ids, upload(stamps, self._device))

    def _execute(self, plan: StepPlan) -> Samples:
        rows = self._decoding(plan)
        parts = self._decode(rows)
        prefilled = None
        if plan.prefills:
            self._loop.announce(self._deltas)
            prefilled = self._prefill.run(plan.prefills)
            for chunk in plan.prefills:
                self._rows.ahead[chunk.row] = chunk.start + chunk.length if chunk.last else UNKNOWN
        by_host = set(plan.masks)
        if self._rows.by_host[plan.sample_rows].any():
            by_host.update(row for row in plan.sample_rows if self._rows.by_host[row])
        if not by_host:
            self._run_ahead(plan, rows)
        step = _Step(plan, rows, parts, prefilled, by_host)
        return self._collect(step)

    def _decode(self, rows: Ints) -> list[tuple[Launch, Ints]]:
        """Steps of which each has some of these rows: what was run ahead, and the rest. The second of each pair says
        for every row whether it is there."""
        parts = []
        missing = np.ones(len(rows), dtype=np.bool_)
        if self._pending and len(rows):
            launch = self._pending.popleft()
            there = (launch.lane_of[rows] != NO_LANE) & (launch.positions[rows] == self._rows.position[rows])
            parts.append((launch, there))
            missing = ~there
            self.num_ahead += int(there.sum())
        if missing.any():
            self._rows.resume(rows[missing])
            parts.append((self._launch(rows[missing]), missing))
        return parts

    def _launch(self, rows: Ints) -> Launch:
        launch = self._launcher.launch(rows, self._rows.ahead)
        self._rows.ahead[rows] += 1
        return launch

    def _run_ahead(self, plan: StepPlan, rows: Ints) -> None:
        """Start the steps of plans to come, unless some are under way."""
        self._steady = 0 if plan.prefills else self._steady + 1
        if self._pending:
            return
        host = self._rows
        ending = [chunk.row for chunk in plan.prefills if chunk.last]
        coming = np.concatenate((rows, np.array(ending, dtype=np.int64)))
        # The plan's token stands at ``ahead``, and with it there is one token more than that.
        coming = coming[host.ahead[coming] + 1 < host.limit[coming]]
        if len(coming):
            depth = self._most_ahead if self._steady >= STEADY_STEPS else min(self._most_ahead, 1)
            self._pending.extend(self._launch(coming) for _ in range(depth))

    def _decoding(self, plan: StepPlan) -> Ints:
        """The plan's decoding rows; the scheduler keeps the list as long as they are the same."""
        if plan.decode_rows is not self._decode_list:
            self._decode_list = plan.decode_rows
            self._decode_rows = np.array(plan.decode_rows, dtype=np.int64)
        return self._decode_rows

    def _collect(self, step: _Step) -> Samples:
        """Wait for the step's tokens, choose what the host chooses, and note how far rows are."""
        plan, rows, host = step.plan, step.rows, self._rows
        tokens: Ints = np.empty(len(rows), dtype=np.int64)
        for launch, there in step.parts:
            tokens[there] = self._launcher.tokens(launch)[launch.lane_of[rows[there]]]
        assert NOTHING not in tokens, "a row that decodes was not computed"
        unsound: list[int] = []
        if step.prefilled is not None:
            verdicts = step.prefilled.verdicts.numpy()
            ending = len(verdicts) - len(plan.prefills)
            tokens = np.concatenate((tokens, verdicts[:ending]))
            unsound = [chunk.row for chunk, one in zip(plan.prefills, verdicts[ending:], strict=True) if one == FOREIGN]
        sampled = plan.sample_rows
        foreign = frozenset(sampled[place] for place in np.flatnonzero(tokens == FOREIGN)).union(unsound)
        tokens[tokens == FOREIGN] = FAILED
        samples = Samples(tokens.tolist(), foreign=foreign)
        self._choose(step, samples)
        host.last[sampled] = samples.token_ids
        host.position[rows] += 1
        for chunk in plan.prefills:
            host.position[chunk.row] = chunk.start + chunk.length
        return samples

    def _choose(self, step: _Step, samples: Samples) -> None:
        """Let the host choose tokens that the device cannot, and score prompts."""
        plan, prefilled, host = step.plan, step.prefilled, self._rows
        places = [
            place for place, row in enumerate(plan.sample_rows) if row in step.by_host and row not in samples.foreign
        ]
        decoding = len(step.rows)
        groups = [[place for place in places if place < decoding], [place for place in places if place >= decoding]]
        for number, group in enumerate(groups):
            if not group:
                continue
            chosen_rows = [plan.sample_rows[place] for place in group]
            if number == 0:
                launch = step.parts[-1][0]
                lines, logits = launch.lane_of[chosen_rows], launch.logits
                positions = host.position[chosen_rows] + 1
                assert (lines != NO_LANE).all(), "rows of the host are in the last step that was started"
            else:
                assert prefilled is not None, "a prompt that ends was computed"
                lines, logits = np.array(group) - decoding, prefilled.logits
                positions = np.array([chunk.start + chunk.length for chunk in plan.prefills if chunk.last])[lines]
            logits = logits.index_select(0, upload(lines, self._device))
            chosen = self._chooser.choose(logits, chosen_rows, positions, plan.masks)
            for place, token_id in zip(group, chosen.token_ids, strict=True):
                samples.token_ids[place] = token_id
            samples.logprobs += [replace(entry, index=group[entry.index]) for entry in chosen.logprobs]
            host.ahead[chosen_rows] = UNKNOWN
        if prefilled is not None:
            self._score(plan.prefills, prefilled, samples)

    def _score(self, chunks: list[Chunk], prefilled: Prefilled, samples: Samples) -> None:
        """Log-probabilities of prompts, of chunks that were computed."""
        place = sum(chunk.last for chunk in chunks)
        for chunk in chunks:
            if chunk.num_scored and chunk.row not in samples.foreign:
                lines = prefilled.logits[place : place + chunk.num_scored]
                tokens = self._rows.known[chunk.row][chunk.score_from : chunk.score_from + chunk.num_scored]
                samples.prompts.append(self._chooser.score(lines, chunk.row, chunk.score_from, tokens))
            place += chunk.num_scored


@dataclass(frozen=True, slots=True)
class _Step:
    """A plan that was started."""

    plan: StepPlan
    rows: Ints
    """Of its decoding requests."""
    parts: list[tuple[Launch, Ints]]
    prefilled: Prefilled | None
    by_host: set[int]
    """Rows whose tokens the host chooses."""
