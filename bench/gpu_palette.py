"""Products from palettes on a card: ``python bench/gpu_palette.py [--rehearse] [--only SECTION]``.

25 seconds on a card. The two matrices of a Llama 8B's MLP with 1 to 16 rows: torch's product, our plain one, and all
ways to take it from a palette, each over more memory than a cache holds, as replays of a CUDA graph; then which way an
engine would take, the bits of every weight, and how far results are from float64's. Lines without an escape have to
have the bits of the same product of the plain matrix. ``adapters``: a step's linear maps with and without adapters.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_adapters import MAPS, TILES, adapters, compile_adapters
from bench.gpu_pieces import (
    BF16,
    DEVICE,
    META,
    REHEARSE,
    ROTATED,
    Figures,
    end,
    noise,
    read_bandwidth,
    seconds_of,
    tried,
)
from engine.backends.cuda.kernels import gemv, palette
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.adapters import AdapterTile
from engine.backends.cuda.kernels.ahead import LaunchForm, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.gemv import FewRows, Scratch
from engine.backends.cuda.kernels.lines import LineCut, Map
from engine.backends.cuda.kernels.palette import Palette, PaletteMap
from engine.backends.cuda.kernels.palette_choice import COUNTS, Cut, Matrix, PaletteChoice, most_numbers, multiply, ways
from engine.backends.cuda.kernels.palette_direct import DirectCut, direct_rows
from engine.backends.cuda.kernels.palette_products import PaletteCut

PRODUCTS: dict[str, tuple[int, int, str]] = {"gate_up": (14_336, 4_096, "silu"), "down": (4_096, 14_336, "")}
"""Outputs, inputs and the gate, in front of which there is a norm."""
if REHEARSE:
    PRODUCTS = {"gate_up": (48, 256, "silu"), "down": (40, 384, "")}

PLAIN = FewRows(alone=LineCut(8, 4))
"""As ``sm_90`` has it."""
SAME_ORDER = FewRows(depth=64)
"""The plain cut whose sums ``PaletteCut`` repeats."""

MORE_WAYS: dict[int, tuple[Cut, ...]] = {
    1: (PaletteCut(lines=4, warps=2), PaletteCut(lines=8, warps=2), PaletteCut(lines=2, warps=4)),
    8: (DirectCut(lines=32), PaletteCut(programs=512)),
}
"""Ways beside those that an engine tries."""
if REHEARSE:
    MORE_WAYS = {1: (PaletteCut(lines=2, warps=1),)}


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Something without contents."""
    return torch.empty(shape, dtype=dtype, device=META)


def compile_form(form: LaunchForm) -> None:
    """Compile a form into Triton's cache."""
    form.compile()


def compile_one(given: tuple[str, int, Cut | FewRows | str]) -> None:
    """Compile one product into Triton's cache, without the card; an error comes again where it is measured."""
    name_kernels()
    name, rows, cut = given
    outputs, size, kind = PRODUCTS[name]
    lines, gate = outputs * (2 if kind else 1), Gate(kind) if kind else None
    x, out, gain = meta(rows, size), meta(rows, outputs), meta(size) if kind else None
    scratch = Scratch(meta(1 << 20, dtype=torch.float32), meta(gemv.MOST_COUNTERS, dtype=torch.int32))
    packed = Palette.empty(lines, size, 1, META)
    with meeting_forms("sm_90", compile_form):
        if cut == "twin":
            direct_rows(x, Map(meta(lines, size), None, gain, 1e-5), out, scratch, DirectCut(), gate=gate)
        elif cut == "expand":
            palette.expand(packed, meta(lines, size))
        elif isinstance(cut, FewRows):
            gemv.few_rows(x, Map(meta(lines, size), None, gain, 1e-5), out, scratch, cut, gate=gate)
        else:
            assert not isinstance(cut, str)
            multiply(x, PaletteMap(packed, None, gain, 1e-5), out, scratch, cut, gate=gate)


def compile_map(given: tuple[AdapterTile, str]) -> None:
    """Compile adapters' products beside one map."""
    name_kernels()
    with meeting_forms("sm_90", compile_form):
        compile_adapters(*given)


def compiled() -> list[tuple[str, int, Cut | FewRows | str]]:
    """Everything that is measured, once for each form."""
    found: list[tuple[str, int, Cut | FewRows | str]] = []
    for name in PRODUCTS:
        found += [(name, 8, "twin"), (name, 16, "twin"), (name, 8, "expand"), (name, 8, SAME_ORDER)]
        for rows in (1, 8, 16):
            # Forms for 2 to 8 rows are one, and kernels that are not direct have one for all.
            cuts = [*ways(rows), *MORE_WAYS.get(rows, ())]
            found += [(name, rows, cut) for cut in cuts if rows < 16 or isinstance(cut, DirectCut)]
        found += [(name, 1, PLAIN), (name, 8, PLAIN)]
    return found


def reference(x: Tensor, weight: Tensor, gain: Tensor | None, kind: str) -> Tensor:
    """The result in float64."""
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * gain.double()
    # A stretch of lines at once: the whole matrix in float64 has a GB.
    y = torch.cat([wide @ part.double().T for part in weight.split(4_096)], 1)
    if not kind:
        return y
    first, second = y.chunk(2, 1)
    return F.silu(first) * second


class Product:
    """One matrix, plain and in a palette, several times."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outputs, self.size, self.kind = PRODUCTS[name]
        self.gate = Gate(self.kind) if self.kind else None
        self.gain = noise(self.size) if self.kind else None
        lines = self.outputs * (2 if self.kind else 1)
        weight = noise(lines, self.size, spread=self.size**-0.5)
        found = palette.packed(weight)
        assert found is not None, "normal numbers fit a palette"
        self.packed = [found] * max(2, -(-ROTATED // found.nbytes))
        self.packed = [Palette(*(part.clone() for part in one)) for one in self.packed]
        self.plain = [weight, *(weight.clone() for _ in range(max(1, -(-ROTATED // weight.nbytes) - 1)))]
        self.scratch = Scratch.empty(
            max(1, most_numbers([Matrix(weight, self.gate, self.gain)], PLAIN)) * 2, torch.device(DEVICE)
        )

    def run_plain(self, x: Tensor, out: Tensor, cut: FewRows, weight: Tensor) -> None:
        """Our plain product."""
        gemv.few_rows(x, Map(weight, None, self.gain, 1e-5), out, self.scratch, cut, gate=self.gate)

    def run_packed(self, x: Tensor, out: Tensor, cut: Cut, one: Palette) -> None:
        """The product from a palette."""
        multiply(x, PaletteMap(one, None, self.gain, 1e-5), out, self.scratch, cut, gate=self.gate)

    def clean_outputs(self) -> Tensor:
        """Outputs whose lines have no escapes."""
        counts = self.packed[0].starts.diff()
        return (counts == 0) if self.gate is None else (counts.view(2, -1) == 0).all(0)

    def check_bits(self, figures: Figures) -> None:
        """Every bit of every weight."""
        out = torch.empty_like(self.plain[0])
        palette.expand(self.packed[0], out)
        differ = int((out.view(torch.int16) != self.plain[0].view(torch.int16)).sum())
        figures.put(
            "palette bits", piece=self.name, weights=out.numel(), differ=differ,
            escapes=len(self.packed[0].escapes), bytes_share=self.packed[0].nbytes / self.plain[0].nbytes,
        )  # fmt: skip

    def check_order(self, figures: Figures, rows: int) -> None:
        """Outputs, as float32, that differ from those of the plain matrix in the same order of sums: without escapes,
        and with some, where the order differs."""
        x, clean = noise(rows, self.size), self.clean_outputs()
        found, plain = (torch.zeros(rows, self.outputs, device=DEVICE) for _ in range(2))
        pairs: list[tuple[str, Callable[[], None], Callable[[], None]]] = []
        if not REHEARSE:
            given = Map(self.plain[0], None, self.gain, 1e-5)
            twin = partial(direct_rows, x, given, plain, self.scratch, DirectCut(), gate=self.gate)
            pairs.append(("direct", twin, partial(self.run_packed, x, found, DirectCut(), self.packed[0])))
        pairs.append((
            "several", partial(self.run_plain, x, plain, SAME_ORDER, self.plain[0]),
            partial(self.run_packed, x, found, PaletteCut(), self.packed[0]),
        ))  # fmt: skip
        for kind, first, second in pairs:
            first()
            second()
            differ = found != plain
            figures.put(
                "palette order", piece=self.name, rows=rows, kind=kind, outputs=int(clean.sum()) * rows,
                differ=int(differ[:, clean].sum()), with_escapes=int((~clean).sum()) * rows,
                with_escapes_differ=int(differ[:, ~clean].sum()),
            )  # fmt: skip

    def measure(self, figures: Figures, bandwidth: float, rows: int) -> None:
        """All ways, and what torch has."""
        x, out = noise(rows, self.size), torch.empty(rows, self.outputs, device=DEVICE, dtype=BF16)
        target = reference(x, self.plain[0], self.gain, self.kind)
        scale = target.abs().max()

        def time_one(kind: str, run: Callable[[], None], copies: int, moved: int, cut: str) -> float:
            taken = seconds_of(run, copies)
            error = 0.0 if kind == "torch" else float((out.double() - target).abs().max() / scale)
            figures.put(
                "palette product", piece=self.name, rows=rows, kind=kind, us=taken * 1e6, gb_per_s=moved / taken / 1e9,
                share=moved / taken / bandwidth, error=error, cut=cut,
            )  # fmt: skip
            return taken

        def run_torch() -> None:
            for one in self.plain:
                F.linear(x, one)

        def run_plain() -> None:
            for one in self.plain:
                self.run_plain(x, out, PLAIN, one)

        bytes_plain, bytes_packed = self.plain[0].nbytes, self.packed[0].nbytes
        time_one("torch", run_torch, len(self.plain), bytes_plain, "the matrix alone")
        base = time_one("plain", run_plain, len(self.plain), bytes_plain, "")
        best = base
        for cut in (*ways(rows), *MORE_WAYS.get(rows, ())):

            def run_packed(cut: Cut = cut) -> None:
                for one in self.packed:
                    self.run_packed(x, out, cut, one)

            def one_way(cut: Cut = cut, run: Callable[[], None] = run_packed) -> None:
                nonlocal best
                out.fill_(torch.nan)
                best = min(best, time_one("palette", run, len(self.packed), bytes_packed, repr(cut)))

            tried(one_way, f"{self.name} x {rows} by {cut}")
        figures.put(
            "palette ratio", piece=self.name, rows=rows, plain_us=base * 1e6, best_us=best * 1e6, ratio=base / best
        )


def products(figures: Figures, bandwidth: float) -> None:
    """Both matrices, and what an engine of two layers would choose."""
    matrices: list[Matrix] = []
    for name in PRODUCTS:

        def one_product(name: str = name) -> None:
            product = Product(name)
            tried(partial(product.check_bits, figures), f"bits of {name}")
            for rows in (8, 16):
                tried(partial(product.check_order, figures, rows), f"order of {name}")
            for rows in COUNTS:
                tried(partial(product.measure, figures, bandwidth, rows), f"{name} x {rows}")
            matrices.extend(Matrix(weight, product.gate, product.gain) for weight in product.plain)

        tried(one_product, name)

    def chosen() -> None:
        choice = PaletteChoice(PLAIN)
        choice.choose(matrices, Scratch.empty(most_numbers(matrices, PLAIN), torch.device(DEVICE)))
        figures.put("palette choice", said=str(choice))

    tried(chosen, "choice")


def main() -> None:
    """Run the sections."""
    name_kernels()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=("products", "adapters"))
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    if not REHEARSE:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("spawn")) as pool:
            wanted = [pool.submit(compile_one, one) for one in compiled() if options.only != "adapters"]
            if options.only != "products":
                wanted += [pool.submit(compile_map, (tile, name)) for tile in TILES for name in MAPS]
            for given in wanted:
                tried(given.result, "compilation")
        figures.put("compiled", forms=len(wanted))
    sections: tuple[Callable[[Figures, float], None], ...] = (products, adapters)
    with torch.inference_mode():
        bandwidth = read_bandwidth(figures)
        for section in sections:
            if options.only in (None, section.__name__):
                tried(lambda section=section: section(figures, bandwidth), section.__name__)
    figures.table()


if __name__ == "__main__":
    main()
    end()
