"""Does another client see the same? ``python bench/second_client.py VLLM_RS TOKENIZER_DIR``, both against one server.

The other is ``vllm-rs bench serve``, a compiled program inside the vllm package's wheel (``vllm/vllm-rs``; unzip it, no
installation needed). The server answers with the pace it is told, from a process of its own: a first token after 80 ms,
each later one 8 ms after the one before. So what differs is the clients; a busy machine disturbs both alike, and they
take turns (ABBA). Printed are the medians of both and their ratio; the bar is 5 %.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator.bench import metrics, workload
from appliance.operator.bench.client import Client
from appliance.operator.bench.run import play

FIRST_S, LATER_S = 0.080, 0.008
STREAMS, REQUESTS, TOKENS, PROMPT = 8, 96, 64, 64
PASSES = 4

TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection; tokens come at their due times, so that a late one does not delay the rest."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split("\r\n")[0]) if "content-length:" in head else 0
            body = json.loads(await reader.readexactly(length) or b"{}")
            if "completions" not in head.split("\r\n")[0]:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            due = loop.time() + FIRST_S
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN))
                due += LATER_S
            counts = {"prompt_tokens": PROMPT, "completion_tokens": body["max_tokens"], "total_tokens": 0}
            last = b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n"
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve() -> None:
    """Print the port, then answer until ended."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def with_ours(url: str) -> dict[str, float]:
    """Medians in milliseconds, and requests a second over the whole run, as this project's client sees them."""
    import uvloop

    load = workload.parse_load(f"closed:{STREAMS},requests={REQUESTS}")
    plans = workload.plan(load, workload.Shape(PROMPT, TOKENS), tenants=1, seed=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(play(Client(url, "m", []), load, plans, plans[:STREAMS]))
    found = metrics.figures(run)
    assert not found.failed
    assert found.ttft and found.tpot and found.itl and found.e2e  # noqa: PT018 - none is missing without failures
    return {
        "ttft": found.ttft.p50 * 1e3,
        "tpot": found.tpot.p50 * 1e3,
        "itl": found.itl.p50 * 1e3,
        "e2e": found.e2e.p50 * 1e3,
        "requests/s": found.requests / found.duration_s,
    }


def with_other(url: str, program: str, tokenizer: str) -> dict[str, float]:
    """The same as the other client sees them."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            program,
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            url,
            "--model",
            "m",
            "--tokenizer",
            tokenizer,
            "--dataset-name",
            "random",
            "--random-input-len",
            str(PROMPT),
            "--random-output-len",
            str(TOKENS),
            "--num-prompts",
            str(REQUESTS),
            "--max-concurrency",
            str(STREAMS),
            "--num-warmups",
            str(STREAMS),
            "--ignore-eos",
            "--temperature",
            "0",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--metric-percentiles",
            "50,99",
            "--save-result",
            "--result-dir",
            folder,
            "--result-filename",
            "r.json",
        ]
        subprocess.run(argv, check=True, capture_output=True)
        found = json.loads((Path(folder) / "r.json").read_text())
    assert not found.get("failed")
    return {
        "ttft": found["median_ttft_ms"],
        "tpot": found["median_tpot_ms"],
        "itl": found["median_itl_ms"],
        "e2e": found["median_e2el_ms"],
        "requests/s": found["request_throughput"],
    }


def main(arguments: list[str]) -> int:
    """Take turns, print."""
    if arguments == ["serve"]:
        asyncio.run(serve())
        return 0
    program, tokenizer = arguments
    server = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for number in range(PASSES):
            turns = [lambda: ours.append(with_ours(url)), lambda: theirs.append(with_other(url, program, tokenizer))]
            for turn in turns if number % 2 == 0 else reversed(turns):
                turn()
    finally:
        server.terminate()
        server.wait()
    print(f"{'':12} {'ours':>9} {'vllm-rs':>9} {'ratio':>7}")
    for name in ours[0]:
        mine, other = (statistics.median(one[name] for one in all_of) for all_of in (ours, theirs))
        print(f"{name:12} {mine:9.2f} {other:9.2f} {mine / other:7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
