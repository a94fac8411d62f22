"""Size and speed of coded bfloat16 weights, and whether every bit comes back: the bars of docs/compressed-weights.md.

    python bench/compressed_weights.py                 # normal tensors, the embedded model, a conversion
    python bench/compressed_weights.py --model DIR ... # other model folders; float32 is rounded to bfloat16 first
    python bench/compressed_weights.py --weights 24    # tensors of 2^24 weights

One core does all of it. Speeds are bytes of plain bfloat16 by processor time, which a busy machine does not change as
much as wall time; both are printed, with the speed of copying memory in the same run. Each bar has a verdict, and the
exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from appliance.operator import kernels
from appliance.operator.conversion_child import run_converter
from engine.backends.native.coding import open_codec
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.coded.codec import NumpyCodec, WeightCodec
from engine.model.coded.layout import ALIGNMENT, CHUNK, HEADER_BYTES, Code
from engine.model.coded.palette import choose_code

MOST_RATIO = 0.69
LEAST_ENCODE = 50e6
LEAST_DECODE = 200e6
"""Bars: bytes by bytes of plain bfloat16, and these a second on one core."""

ROUNDS = 5
SLAB = 1_024 * CHUNK

Words = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Timed:
    """Best time of some rounds."""

    processor_s: float
    wall_s: float

    def words(self, size: int) -> str:
        """Speeds for people."""
        return f"{size / self.processor_s / 1e6:8,.0f} MB/s (wall {size / self.wall_s / 1e6:,.0f})"


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> Timed:
    """Run some rounds; the least processor time and the least wall time of one."""
    times = []
    for _ in range(rounds):
        began = time.process_time(), time.perf_counter()
        work()
        times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return Timed(min(one for one, _ in times), min(one for _, one in times))


def rounded(numbers: NDArray[np.float32]) -> Words:
    """Numbers as bfloat16."""
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def encode(codec: WeightCodec, words: Words) -> tuple[Code, list[tuple[bytes, bytearray]], int]:
    """What a conversion does with a tensor, in slabs: count, measure, code. Gives code, slabs and bytes in the file."""
    slabs = [words[at : at + SLAB].tobytes() for at in range(0, len(words), SLAB)]
    counts = [sum(one) for one in zip(*(codec.count(slab) for slab in slabs), strict=True)]
    code = choose_code(counts)
    for slab in slabs:
        codec.measure(code, slab)
    parts = [codec.encode(code, slab) for slab in slabs]
    size = HEADER_BYTES + sum(len(table) + len(data) for table, data in parts)
    return code, parts, size + -size % ALIGNMENT


def decode(codec: WeightCodec, code: Code, parts: list[tuple[bytes, bytearray]], target: Words) -> None:
    """Decode slabs into memory."""
    view = memoryview(target.view(np.uint8).data)
    for number, (table, data) in enumerate(parts):
        codec.decode(code, table, data, view[number * SLAB * 2 : (number + 1) * SLAB * 2])


def measure(name: str, codec: WeightCodec, words: Words, rounds: int = ROUNDS) -> tuple[float, float, float, bool]:
    """Print and give ratio, speed of coding and decoding, and whether every bit came back."""
    target = np.empty_like(words)
    code, parts, size = encode(codec, words)
    coding = timed(lambda: encode(codec, words), rounds)
    decoding = timed(lambda: decode(codec, code, parts, target), rounds)
    same, plain = bool(np.array_equal(target, words)), words.nbytes
    print(
        f"  {name:28} ratio {size / plain:.4f}   code {coding.words(plain)}   decode {decoding.words(plain)}"
        f"   every bit {'equal' if same else 'NOT EQUAL'}",
        flush=True,
    )
    return size / plain, plain / coding.processor_s, plain / decoding.processor_s, same


def cases(exponent: int) -> dict[str, Words]:
    """Normal tensors of several spreads, and one with every bit pattern among normal ones."""
    draw, count = np.random.default_rng(0), 1 << exponent
    normal = draw.standard_normal(count, np.float32)
    specials = rounded(normal * np.float32(0.02)).copy()
    specials[: 1 << 16] = np.arange(1 << 16, dtype=np.uint16)
    rows = np.exp(draw.standard_normal((count >> 12, 1), np.float32) * np.float32(0.7))
    return {
        "normal, 0.02": rounded(normal * np.float32(0.02)),
        "normal, 1.0": rounded(normal),
        "normal, rows of other sizes": rounded((normal.reshape(-1, 1 << 12) * rows * np.float32(0.02)).reshape(-1)),
        "every bit pattern among them": specials,
    }


def convert(folder: Path, scratch: Path) -> tuple[float, bool]:
    """Convert a model's weight files with the program, and print what it takes. Gives the ratio of all bytes, and
    whether every tensor comes back through the engine's reader."""
    plain = coded = 0
    same, compiled = True, str(kernels.installed() or "")
    codec = open_codec(compiled)
    began, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        source = path
        tensors = load_file(path)
        if any(one.dtype == torch.float32 for one in tensors.values()):
            source = scratch / "rounded.safetensors"
            save_file({name: one.to(torch.bfloat16) for name, one in tensors.items()}, source)
        target = scratch / f"{folder.name}-{path.name}"
        run_converter("engine.convert.compress", [str(source), str(target), "coded", compiled], lambda *_: None)
        plain, coded = plain + source.stat().st_size, coded + target.stat().st_size
        with SafetensorsFile(target, lambda: codec) as file:
            for name, tensor in load_file(source).items():
                found = torch.empty_like(tensor)
                if found.numel():
                    file.read_stretch(name, 0, memoryview(found.view(-1).view(torch.uint8).numpy().data))
                same &= torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    print(
        f"  {folder.name:28} ratio {coded / plain:.4f} of {plain / 1e6:,.1f} MB, files whole;"
        f" {spent:.1f} s of processor time, {time.perf_counter() - wall:.1f} s of wall time"
        f"   every bit {'equal' if same else 'NOT EQUAL'}",
        flush=True,
    )
    return coded / plain, same


def load(path: Path, codec: WeightCodec, name: str) -> None:
    """Print the speed of the engine's reader over a file in the page cache, into memory that is there."""
    with SafetensorsFile(path, lambda: codec) as file:
        room = {one: bytearray(entry.data_bytes) for one, entry in file.tensors.items()}

        def read() -> None:
            for one, target in room.items():
                file.read_stretch(one, 0, memoryview(target))

        plain = sum(map(len, room.values()))
        print(f"  {name:28} {timed(read).words(plain)} of plain bytes, {path.stat().st_size / 1e6:,.1f} MB read")


def large_model(folder: Path, exponent: int) -> Path:
    """A folder with a weight file of normal tensors, for the speed of a whole conversion."""
    made = folder / "normal tensors, a file"
    made.mkdir()
    draw = torch.Generator().manual_seed(0)
    shape = (1 << (exponent - 12), 1 << 12)
    tensors = {f"w{one}": (torch.randn(shape, generator=draw) * 0.02).to(torch.bfloat16) for one in range(4)}
    save_file(tensors, made / "model.safetensors")
    return made


def main() -> int:
    """Measure, and compare with the bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="further model folders")
    parser.add_argument("--weights", type=int, default=24, help="binary logarithm of the weights of a tensor")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    codec = open_codec(str(kernels.installed() or ""))
    print(f"{codec.name}; one core; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    block = np.zeros(1 << 26, np.uint8)
    print(f"copying memory: {timed(block.copy).words(block.nbytes).strip()}\n\ntensors of 2^{given.weights} weights:")
    found = [measure(name, codec, words) for name, words in cases(given.weights).items()]
    print("\nwithout compiled kernels:")
    small = cases(20)["normal, 0.02"]
    found_slow = measure(NumpyCodec.name, NumpyCodec(), small, 2)
    print("\nfiles, by `athanor model convert --compress` (four passes, compared):")
    with tempfile.TemporaryDirectory() as scratch:
        folders = [embedded_model(), *given.model, large_model(Path(scratch), given.weights)]
        converted = [convert(folder, Path(scratch)) for folder in folders]
        print("\nread by the engine's reader, one thread:")
        large = folders[-1] / "model.safetensors"
        load(large, codec, "plain file")
        load(Path(scratch) / f"{folders[-1].name}-{large.name}", codec, "compressed file")
    bars = {
        f"ratio <= {MOST_RATIO}": max(one[0] for one in [*found, *converted]) <= MOST_RATIO,
        f"code >= {LEAST_ENCODE / 1e6:.0f} MB/s a core": min(one[1] for one in found) >= LEAST_ENCODE,
        f"decode >= {LEAST_DECODE / 1e6:.0f} MB/s a core": min(one[2] for one in found) >= LEAST_DECODE,
        "every bit equal": all(one[-1] for one in [*found, found_slow, *converted]),
    }
    print()
    for bar, held in bars.items():
        print(f"{'holds' if held else 'MISSED'}: {bar}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
