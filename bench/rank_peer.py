"""Two ranks beside ``transformers`` with ``tp_plan="auto"`` under torchrun with two processes: tokens per second.

``python -m bench.rank_peer [ROUNDS [SHAPE [DTYPE [ROWS...]]]]`` has both decode the same model in turn, one thread a
process, greedily, in processes that live through the run: SHAPE is one of ``bench.ranks`` without experts, DTYPE
float32 or bfloat16. It prints a JSON line for each number of rows: medians, the median of the ratios of a round, and
all ratios: beside other work one round says little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.ranks import SHAPES, Arm, save

ROWS = (1, 16)
ROUNDS = 5
DTYPES = {"float32": "tp2", "bfloat16": "bfloat16 tp2"}
"""Layouts of ``bench.ranks`` by dtype."""


class Peer:
    """The processes that torchrun has started."""

    def __init__(self, folder: Path, dtype: str, pipes: Path) -> None:
        asked, answers = pipes / "asked", pipes / "answers"
        os.mkfifo(asked)
        os.mkfifo(answers)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = ["-m", "bench.rank_peer_child", str(folder), dtype, str(asked), str(answers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([*launch, *program], env=environment, stderr=subprocess.DEVNULL)
        self._asked, self._answers = asked.open("w"), answers.open()
        self.description = self._answers.readline().strip()

    def rate(self, rows: int) -> float:
        """Tokens per second of so many rows."""
        print(rows, file=self._asked, flush=True)
        return float(self._answers.readline())

    def end(self) -> None:
        """Let them end."""
        self._asked.close()
        self._answers.close()
        self._process.wait(60)


@contextmanager
def both(shape: str, dtype: str) -> Iterator[tuple[Arm, Peer]]:
    """Start both with the same random model."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        maker = os.fork()
        if maker == 0:
            save(folder, SHAPES[shape])
            os._exit(0)
        assert os.waitpid(maker, 0)[1] == 0
        arm = Arm.start(folder, DTYPES[dtype])
        try:
            print(json.dumps({"ours": arm.answers().strip()}), flush=True)
            peer = Peer(folder, dtype, folder)
            print(json.dumps({"transformers": peer.description}), flush=True)
            yield arm, peer
            peer.end()
        finally:
            arm.end()


def main(arguments: list[str]) -> None:
    """Measure in turn."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    shape = arguments[1] if len(arguments) > 1 else "dense"
    dtype = arguments[2] if len(arguments) > 2 else "float32"
    with both(shape, dtype) as (arm, peer):
        for rows in tuple(map(int, arguments[3:])) or ROWS:
            rates = [(arm.rate(rows), peer.rate(rows)) for _ in range(rounds)]
            ours, theirs = (round(median(values), 1) for values in zip(*rates, strict=True))
            ratios = sorted(round(a / b, 2) for a, b in rates)
            load = round(os.getloadavg()[0], 1)
            line = {"shape": shape, "dtype": dtype, "rows": rows, "ours": ours, "transformers": theirs}
            print(json.dumps({**line, "ratio": median(ratios), "ratios": ratios, "load": load}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
