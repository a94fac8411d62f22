"""This engine beside the ones people would use instead: same weights, same prompts, same threads, alternating order.

``python bench/peers.py setup`` makes an environment for the peers (requirements/peers.lock, hashes checked), builds
llama.cpp from its Python package's sources with cmake and a C++ compiler (ten minutes on two cores) and writes the
weights in every format. ``python bench/peers.py run`` measures: every engine in a process of its own, loaded and
warmed; rounds go forth and back through the engines (ABBA), so that a machine that slows down slows all. A ratio is
taken within one pass; the table shows the median and the range over the passes. Tokens a second are of the whole round,
prompts included; processor time is that of the engine's process.

transformers runs in this project's own environment (the same torch, the version of requirements/dev.lock); llama.cpp is
its own ``llama-batched-bench``, which feeds random ids and does no sampling, and whose processor time is not taken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

DEFAULT_HOME = Path(tempfile.gettempdir()) / "athanor-peers"
SEED = 0
OURS = "ours"
COMPILED = "ours, compiled kernels"
"""With ``--kernels``, a directory that holds them for this machine; ratios are of it then."""
ENGINES = (OURS, "transformers generate", "transformers continuous batching", "openvino-genai", "llama.cpp")

CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_UI=OFF",
)
LLAMA_TRIES = 5
"""Runs of llama.cpp's benchmark until one prints its figures."""
TARGETS = ("llama-batched-bench", "llama-server")


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one number of streams."""

    model: str
    """``stories260K`` or ``0.5B shape``."""
    dtype: str
    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.model} {self.dtype}, {self.streams} stream{'s' if self.streams > 1 else ''}"


CASES = (
    Case("stories260K", "float32", 1, 16, 200),
    Case("stories260K", "float32", 16, 16, 200),
    Case("0.5B shape", "bfloat16", 1, 16, 24),
    Case("0.5B shape", "bfloat16", 16, 16, 24),
)


@dataclass(slots=True)
class Seen:
    """Rounds of one engine in one case."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us_per_token: list[float] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    """Ids of the first answer; the same for engines that compute the same."""


Round = Callable[[Case], tuple[float, float | None, list[int]]]
"""Runs a case once: tokens a second, processor microseconds a token if known, ids of the first answer."""


def prompts(case: Case) -> list[list[int]]:
    """The same for every engine and round."""
    draw = random.Random(f"{SEED}:{case.name}")
    return [[1, *draw.choices(range(8, 500), k=case.prompt_tokens - 1)] for _ in range(case.streams)]


@contextmanager
def worker(engine: str, python: Path, *arguments: object) -> Iterator[Round]:
    """An engine of ``bench/peer_worker.py``, for the time of the block."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    argv = [str(python), str(ROOT / "bench" / "peer_worker.py"), engine, *map(str, arguments)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> dict[str, Any]:
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                sys.exit(f"{engine} ended by itself:\n{log.read()[-2000:]}")
            return dict(json.loads(line))

        def run(case: Case) -> tuple[float, float | None, list[int]]:
            task = {"prompts": prompts(case), "output_tokens": case.output_tokens}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            done = answer()
            assert done["tokens"] == case.streams * case.output_tokens, (engine, done["tokens"])
            return done["tokens"] / done["wall_s"], done["cpu_s"] / done["tokens"] * 1e6, done["first"]

        answer()
        try:
            yield run
        finally:
            process.stdin.close()
            process.wait()


def llama(binary: Path, gguf: Path, threads: int) -> Round:
    """llama.cpp's own benchmark of batched decoding; one process a round."""

    def run(case: Case) -> tuple[float, float | None, list[int]]:
        # It divides the context among the sequences in multiples of 256 and refuses a tight one; what is not used is
        # not read.
        context = case.streams * (256 + -(-(case.prompt_tokens + case.output_tokens) // 256) * 256)
        argv = [
            str(binary),
            "-m",
            str(gguf),
            "-c",
            str(context),
            "-t",
            str(threads),
            "-tb",
            str(threads),
            # The second, for one sequence, gives its logger the time to write the first: on a busy machine it
            # often ends before the last line is out.
            "-npp",
            str(case.prompt_tokens),
            "-ntg",
            str(case.output_tokens),
            "-npl",
            f"{case.streams},1",
            "--output-format",
            "jsonl",
            "-ngl",
            "0",
        ]
        for _ in range(LLAMA_TRIES):
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
            found = [row for row in map(_figures, done.stdout.splitlines()) if row.get("pl") == case.streams]
            if found:
                break
        else:
            sys.exit(f"llama.cpp printed no figures for {case.name}:\n{done.stderr[-2000:]}")
        row = found[0]
        return case.streams * case.output_tokens / (row["t_pp"] + row["t_tg"]), None, []

    return run


def _figures(line: str) -> dict[str, Any]:
    """A line of figures; nothing of any other line."""
    return dict(json.loads(line)) if line.startswith("{") and line.endswith("}") else {}


def measure(case: Case, rounds: dict[str, Round], passes: int) -> dict[str, Seen]:
    """The case through all engines, forth and back, so many times."""
    seen = {name: Seen() for name in rounds}
    order = list(rounds)
    for number in range(passes):
        for name in order if number % 2 == 0 else reversed(order):
            rate, cpu, first = rounds[name](case)
            seen[name].tokens_per_s.append(rate)
            seen[name].first = first
            if cpu is not None:
                seen[name].cpu_us_per_token.append(cpu)
    return seen


def ratios(mine: list[float], theirs: list[float]) -> dict[str, float]:
    """Median and range of the ratio within each pass."""
    values = [one / other for one, other in zip(mine, theirs, strict=True)]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(case: Case, seen: dict[str, Seen]) -> dict[str, Any]:
    """One case as plain values."""
    base = next(name for name in (COMPILED, OURS) if name in seen)
    mine = seen[base]
    rows = {}
    for name, one in seen.items():
        rows[name] = {
            "tokens_per_s": statistics.median(one.tokens_per_s),
            "all_tokens_per_s": one.tokens_per_s,
            "cpu_us_per_token": statistics.median(one.cpu_us_per_token) if one.cpu_us_per_token else None,
            "same_ids": one.first == mine.first if one.first else None,
        }
    others = [name for name in seen if name != base]
    return {
        "name": case.name,
        "engines": rows,
        "ratios": {name: ratios(mine.tokens_per_s, seen[name].tokens_per_s) for name in others},
        "cpu_ratios": {
            name: ratios(seen[name].cpu_us_per_token, mine.cpu_us_per_token)
            for name in others
            if seen[name].cpu_us_per_token
        },
    }


def show(found: dict[str, Any]) -> None:
    """The tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(120, Console().width))
    console.print(f"\n[bold]{found['heading']}[/bold]\n")
    for case in found["cases"]:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        table.add_column(case["name"].upper(), no_wrap=True)
        for title in ("TOKENS/S", "OURS/THEIRS", "RANGE", "CPU us/TOKEN", "THEIRS/OURS", "SAME IDS"):
            table.add_column(title, justify="right", no_wrap=True)
        for name, row in case["engines"].items():
            ratio, cpu = case["ratios"].get(name), case["cpu_ratios"].get(name)
            same = {None: "-", True: "yes", False: "no"}[row["same_ids"]]
            table.add_row(
                name,
                f"{row['tokens_per_s']:,.1f}",
                f"[bold]{ratio['median']:.2f}x[/bold]" if ratio else "",
                f"{ratio['least']:.2f} to {ratio['most']:.2f}" if ratio else "",
                f"{row['cpu_us_per_token']:,.0f}" if row["cpu_us_per_token"] else "-",
                f"{cpu['median']:.2f}x" if cpu else "",
                same,
            )
        console.print(table, "")


def run(options: argparse.Namespace) -> int:
    """Measure every case that is asked for, write and show."""
    home: Path = options.home
    stories = options.stories.resolve()
    models = {
        "stories260K": {"hf": stories, "ov": home / "stories-ov", "gguf": home / "stories.gguf"},
        "0.5B shape": {"hf": home / "half", "ov": home / "half-ov", "gguf": home / "half.gguf"},
    }
    cases = [case for case in CASES if options.only in case.name]
    results = []
    for model, dtype in dict.fromkeys((case.model, case.dtype) for case in cases):
        files = models[model]
        with ExitStack() as held:
            rounds: dict[str, Round] = {}
            for engine in options.engines:
                if engine == "llama.cpp":
                    rounds[engine] = llama(home / "llama-batched-bench", files["gguf"], options.threads)
                    continue
                theirs = engine == "openvino-genai"
                python = home / "venv" / "bin" / "python" if theirs else Path(sys.executable)
                folder = files["ov"] if theirs else files["hf"]
                rounds[engine] = held.enter_context(worker(engine, python, folder, dtype, options.threads))
                if engine == OURS and options.kernels:
                    arguments = (folder, dtype, options.threads, options.kernels.resolve())
                    rounds[COMPILED] = held.enter_context(worker(OURS, python, *arguments))
            for case in cases:
                if case.model == model:
                    results.append(summary(case, measure(case, rounds, options.passes)))
    heading = f"{options.passes} passes forth and back, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}"
    found = {"heading": heading, "cases": results}
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"peers": found}, indent=2) + "\n")
    if options.plots:
        from appliance.operator.bench import plots

        plots.draw({"peers": found}, options.plots)
    return 0


def setup(options: argparse.Namespace) -> int:
    """Environment, llama.cpp, weights; what is there already is left as it is."""
    home: Path = options.home
    home.mkdir(parents=True, exist_ok=True)
    python = home / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(home / "venv", with_pip=True)
        locks = [part for name in ("peers", "cpu") for part in ("-r", str(ROOT / "requirements" / f"{name}.lock"))]
        pip(python, "install", "--require-hashes", "--no-deps", *locks)
    if not (home / TARGETS[-1]).exists():
        build_llama(python, home)
    weights = str(ROOT / "bench" / "peer_weights.py")
    if not (home / "half" / "tokenizer_config.json").exists():
        subprocess.run([sys.executable, weights, "shape", str(home / "half")], check=True)
    for name, folder, kind in (("stories", options.stories.resolve(), "fp32"), ("half", home / "half", "fp16")):
        if not (home / f"{name}.gguf").exists():
            subprocess.run([python, weights, "gguf", str(folder), str(home / f"{name}.gguf")], check=True)
        if not (home / f"{name}-ov" / "openvino_detokenizer.xml").exists():
            # fp16 is optimum's word for "as they are": no compression to int8.
            argv = [
                home / "venv" / "bin" / "optimum-cli",
                "export",
                "openvino",
                "--model",
                folder,
                "--task",
                "text-generation-with-past",
                "--weight-format",
                kind,
                home / f"{name}-ov",
            ]
            subprocess.run(list(map(str, argv)), check=True)
    print(f"ready: python bench/peers.py run --home {home} --stories {options.stories}")
    return 0


def build_llama(python: Path, home: Path) -> None:
    """llama.cpp out of the source distribution of its Python package, at low priority."""
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        lock = str(ROOT / "requirements" / "peers-sources.lock")
        wanted = ("--require-hashes", "--no-deps", "--no-binary", "llama-cpp-python", "-r", lock)
        pip(python, "download", *wanted, "-d", scratch)
        archive = next(Path(scratch).glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
        source = next(Path(scratch).glob("llama_cpp_python-*/vendor/llama.cpp"))
        build = source / "build"
        subprocess.run(["nice", "cmake", "-S", source, "-B", build, *CMAKE_OPTIONS], check=True)
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run(["nice", "cmake", "--build", build, "-j", jobs, "--target", *TARGETS], check=True)
        for target in TARGETS:
            (build / "bin" / target).rename(home / target)


def pip(python: Path, *arguments: str) -> None:
    """The peers' pip."""
    subprocess.run([str(python), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("setup", "run"))
    parser.add_argument("--home", type=Path, default=DEFAULT_HOME, help="where peers and weights are kept")
    parser.add_argument("--stories", type=Path, required=True, help="folder of stories260K in Hugging Face's layout")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--passes", type=int, default=4, help="an even number: forth and back")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--kernels", type=Path, help="compiled kernels: this engine is measured with and without")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    return setup(options) if options.command == "setup" else run(options)


if __name__ == "__main__":
    sys.exit(main())
