"""What is left of one engine's keys and values after it was killed, and what the next one can read of it.

``python bench/gpu_canary.py [--rehearse] [--kernels DIR] [--out FILE]``, from the repository's root, with torch, Triton
and numpy; some 40 seconds, alone on the card, since one part takes all of its memory. The model's values are a pattern:
their map is zero and its bias is drawn, so that every token of every layer leaves the same known bytes in the cache.

* ``living``: an engine in this bench's process; the search finds the pattern in its cache, and in memory of its own
  that it gave back and took again: the control;
* ``killed``: the real engine program under its list, killed while steps are under way;
* ``tenant``: a process that takes all free memory of the card and searches what it was given;
* ``next``: another engine, whose pattern is another one, with as large a cache as there is room for: what it can read.

Whether a driver cleans memory between two processes is told. The bar is about the engine: its cache holds nothing of
the one before when it is ready, and none of it after requests. Exit status 0: that is so, and the control found it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from appliance.operator.calls.engine_load import EngineLoad
from appliance.operator.calls.session import Mode, Trial, run
from appliance.operator.calls.text_load import TextLoad
from bench.gpu_child import PartError, told
from bench.gpu_engines import SMALL, TINY, published, write_checkpoint
from bench.gpu_program import program_environment
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.model.checkpoint.registry import describe_model, load_model_config
from engine.startup.load import load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

PARTS = ("living", "killed", "tenant", "next")

LIMITS = {"living": 40.0, "killed": 40.0, "tenant": 25.0, "next": 40.0}
"""Seconds of each part on a card."""

PATIENCE = 6.0
"""So many times longer on a processor, which others may use too."""

SEEDS = (20_261, 20_262)
"""What the two models' patterns are drawn from."""

WORDS = 3
"""Words of eight bytes of a pattern that have to follow each other."""

CHUNK = 1 << 27
"""Bytes that are searched at once."""

PIECES = (8 << 30, 1 << 30, 1 << 28, 1 << 25)
"""Bytes of the pieces in which memory is taken, one size until there is no more."""

REHEARSED_PIECES = 4
"""Pieces of the smallest size that a rehearsal takes."""

KILLED_TOKENS = 400
"""Tokens after which the program is killed."""

REQUESTS = 8


def main() -> int:
    """Run the parts; gives 0 when the next engine finds nothing and the control does."""
    options = _options()
    if options.part:
        _part(options)
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --rehearse runs everything on the CPU")
    options.out.unlink(missing_ok=True)
    found: dict[str, dict[str, Any]] = {}
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="gpu-canary-", dir=shared if shared.is_dir() else None) as name:
        folders = [Path(name) / str(seed) for seed in SEEDS]
        for folder, seed in zip(folders, SEEDS, strict=True):
            folder.mkdir()
            write_model(folder, seed, toy=options.rehearse)
        for part in PARTS:
            began = time.monotonic()
            try:
                found[part] = _kill(options, folders[0]) if part == "killed" else _child(options, part, folders)
            except PartError as error:
                found[part] = {"failed": str(error)}
            _put(options.out, part, seconds=round(time.monotonic() - began, 1), **found[part])
    told_all = verdict(found)
    _put(options.out, "verdict", **told_all)
    return 0 if told_all["met"] else 1


def verdict(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts say together. Each is unmet, or unknown, where its part gave no figure."""
    living, killed, tenant, following = (found.get(part, {}) for part in PARTS)
    control = living.get("in_cache", 0) > 0 and following.get("own_in_cache", 0) > 0
    died = killed.get("status") == -signal.SIGKILL and killed.get("tokens", 0) > 0
    clean = following.get("old_when_ready") == 0 and following.get("old_after_requests") == 0
    left = tenant.get("found")
    return {
        "met": control and died and clean,
        "control_found_it": control,
        "killed_at_work": died,
        "next_engine_reads_nothing": clean,
        "driver_cleans_between_processes": None if left is None else left == 0,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes")
    parser.add_argument("--out", type=Path, default=Path("gpu-canary.jsonl"))
    parser.add_argument("--kernels", type=Path, help="kernels that were compiled ahead for this model and these rows")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _child(options: argparse.Namespace, part: str, folders: list[Path]) -> dict[str, Any]:
    arguments = [str(Path(__file__).resolve()), "--part", part, "--folders", *map(str, folders)]
    arguments += ["--rehearse"] if options.rehearse else []
    arguments += ["--kernels", str(options.kernels.resolve())] if options.kernels else []
    limit = LIMITS[part] * (PATIENCE if options.rehearse else 1.0)
    figures: dict[str, Any] = {}
    for line in told(arguments, first_s=limit, whole_s=limit):
        figures |= line
    return figures


def _part(options: argparse.Namespace) -> None:
    """One of the parts that have a process of their own."""
    device = torch.device("cpu" if options.rehearse else "cuda")
    parts: dict[str, Callable[[], None]] = {
        "living": lambda: living(options, device),
        "tenant": lambda: tenant(options, device),
        "next": lambda: following(options, device),
    }
    parts[options.part]()


def pattern(seed: int, layer: int, size: int) -> Tensor:
    """The values that every token has in a layer, as bfloat16 numbers between 1 and 2."""
    drawn = torch.randint(0, 128, (size,), generator=torch.Generator().manual_seed(seed * 100 + layer))
    return (1.0 + drawn / 128.0).to(torch.bfloat16)


def words_of(seed: int, toy: bool) -> list[list[int]]:
    """The first words of each layer's pattern."""
    sizes = TINY if toy else SMALL
    width = sizes["num_kv_heads"] * sizes["head_dim"]
    return [pattern(seed, layer, width).view(torch.int64)[:WORDS].tolist() for layer in range(sizes["num_layers"])]


def write_model(folder: Path, seed: int, *, toy: bool) -> None:
    """A Qwen2 of random weights whose values are the pattern."""
    sizes = TINY if toy else SMALL
    config = published(sizes) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config.pop("head_dim")
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, piece in describe_model(load_model_config(str(folder))).pieces.items():
        tensor = torch.empty(piece.shape).normal_(0.0, 0.05, generator=generator).to(torch.bfloat16)
        if "norm" in name:
            tensor.fill_(1.0)
        elif "v_proj.weight" in name:
            tensor.zero_()
        elif "v_proj.bias" in name:
            tensor = pattern(seed, int(name.split(".")[2]), piece.shape[0])
        tensors[name] = tensor
    write_checkpoint(folder, config, tensors)


def _config(options: argparse.Namespace, folder: Path, kv_bytes: int | None = None) -> EngineConfig:
    toy = options.rehearse
    return EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        backend="device",
        threads=2,
        kv_bytes=kv_bytes or (1 << 22 if toy else 4 << 30),
        max_context=64 if toy else 1_024,
        max_num_seqs=4 if toy else 16,
        max_num_batched_tokens=32 if toy else 512,
        gpu_kernels=str(options.kernels.resolve()) if options.kernels else "",
    )


class Search:
    """Counts a pattern in memory. What it needs is taken first, so that it takes nothing when all is taken."""

    def __init__(self, device: torch.device) -> None:
        self._flags = [torch.empty(CHUNK // 8, dtype=torch.bool, device=device) for _ in range(2)]
        self.count(torch.zeros(1 << 10, dtype=torch.uint8, device=device), [[1] * WORDS])

    def count(self, memory: Tensor, wanted: list[list[int]]) -> tuple[int, int]:
        """How often one of the patterns lies there, and how many words are not zero."""
        found = filled = 0
        flat = memory.reshape(-1).view(torch.uint8)
        for begin in range(0, len(flat) // 8 * 8, CHUNK):
            words = flat[begin : begin + CHUNK]
            words = words[: len(words) // 8 * 8].view(torch.int64)
            last = len(words) - WORDS + 1
            same, one = (flags[: max(last, 0)] for flags in self._flags)
            for sought in wanted if last > 0 else ():
                torch.eq(words[:last], sought[0], out=same)
                for at in range(1, WORDS):
                    same &= torch.eq(words[at : last + at], sought[at], out=one)
                found += int(same.sum())
            some = torch.ne(words, 0, out=self._flags[0][: len(words)])
            filled += int(some.sum())
        return found, filled


def _serve(engine: Engine, options: argparse.Namespace, until: int) -> int:
    """Requests of a tenant; gives the tokens made, some requests still being live."""
    context, vocab = engine.scheduler.limits.max_context, engine.scheduler.limits.vocab_size
    prompt = context // 2
    for number in range(1, REQUESTS + 1):
        ids = array("I", [(number * 31 + place * 7) % vocab for place in range(prompt)])
        engine.add(Submit(number, bytes(32), ids, context // 4, Sampling(temperature=0.0), ignore_eos=True))
    made = 0
    while made < until and engine.has_work:
        output = engine.step()
        made += len(output.token_ids) if output is not None else 0
    return made


def _cache(engine: Engine) -> tuple[Tensor, ...]:
    runner = engine.runner
    assert isinstance(runner, DeviceRunner), "the configuration asks for the device backend"
    return runner.storage.memory


def living(options: argparse.Namespace, device: torch.device) -> None:
    """The control: the search finds what is there."""
    wanted, search = words_of(SEEDS[0], options.rehearse), Search(device)
    engine = load_engine(_config(options, options.folders[0]), warm=False)
    made = _serve(engine, options, 2 * REQUESTS)
    count = sum(search.count(memory, wanted)[0] for memory in _cache(engine))
    _tell(tokens=made, in_cache=count)
    size = CHUNK // 2
    row = torch.tensor(wanted[0], device=device)
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    memory.view(torch.int64)[: size // 8 // WORDS * WORDS].view(-1, WORDS).copy_(row)
    del memory
    again = search.count(torch.empty(size, dtype=torch.uint8, device=device), wanted)[0]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    fresh = search.count(torch.empty(size, dtype=torch.uint8, device=device), wanted)[0]
    _tell(taken_again_from_torch=again, taken_again_from_driver=fresh)


def tenant(options: argparse.Namespace, device: torch.device) -> None:
    """Take all free memory, and search it."""
    wanted, search = words_of(SEEDS[0], options.rehearse), Search(device)
    held: list[Tensor] = []
    for size in PIECES if not options.rehearse else PIECES[-1:]:
        while not options.rehearse or len(held) < REHEARSED_PIECES:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                break
    counts = [search.count(memory, wanted) for memory in held]
    size = sum(len(memory) for memory in held)
    _tell(bytes=size, found=sum(found for found, _ in counts), filled_share=8 * sum(some for _, some in counts) / size)


def following(options: argparse.Namespace, device: torch.device) -> None:
    """The next engine: what its cache holds when it is there, and after requests."""
    old, own = (words_of(seed, options.rehearse) for seed in SEEDS)
    search, kv_bytes = Search(device), None
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        kv_bytes = min(free * 3 // 4, 48 << 30)
    engine = load_engine(_config(options, options.folders[1], kv_bytes), warm=False)
    counts = [search.count(memory, old) for memory in _cache(engine)]
    size = sum(memory.nbytes for memory in _cache(engine))
    _tell(cache_bytes=size, old_when_ready=sum(found for found, _ in counts), filled_words=sum(x for _, x in counts))
    warm_up(engine)
    made = _serve(engine, options, 2 * REQUESTS)
    left = sum(search.count(memory, old)[0] for memory in _cache(engine))
    seen = sum(search.count(memory, own)[0] for memory in _cache(engine))
    _tell(tokens=made, old_after_requests=left, own_in_cache=seen)


class Killer:
    """Kills a program while it computes."""

    def __init__(self, tokens: int) -> None:
        """``tokens``: after how many."""
        self._tokens = tokens
        self._pid = 0

    def started(self, pid: int) -> None:
        """The program is there."""
        self._pid = pid

    def serving(self, load: EngineLoad | TextLoad) -> None:
        """Load is put on; requests are always under way from now on."""
        threading.Thread(target=self._watch, args=(load,), daemon=True).start()

    def _watch(self, load: EngineLoad | TextLoad) -> None:
        while load.tokens < self._tokens and not load.drained:
            time.sleep(0.005)
        os.kill(self._pid, signal.SIGKILL)


def _kill(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The real program under its list, with load on it, killed."""
    limit = LIMITS["killed"] * (PATIENCE if options.rehearse else 1.0)
    trial = Trial(
        config=_config(options, folder),
        mode=Mode.ENFORCE,
        seconds=limit,
        environment=program_environment(),
        ready_timeout_s=limit,
        watch=Killer(40 if options.rehearse else KILLED_TOKENS),
    )
    outcome = run(trial)
    said = {} if outcome.status == -signal.SIGKILL else {"said": outcome.said[-500:]}
    return {"status": outcome.status, "tokens": outcome.tokens, "ready_s": outcome.ready_s, **said}


def _tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _put(path: Path, kind: str, **values: Any) -> None:
    line = json.dumps({"kind": kind, **values})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
