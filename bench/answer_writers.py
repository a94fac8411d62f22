"""`python -m bench.answer_writers`: time that the writers of three APIs take for a token of a stream, in one process
and in alternating order.

What the writers differ in is all that the APIs differ in for a token: the session, the decoding, the connection and the
engine are the same. The bar is 1.3 times the time of chat for the whole host (``bench/host.py``), so it is the
difference that counts, beside some 10 us.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from appliance.gateway.generate_request import Delta, GenerateRequest, Operation, Started, TextPrompt
from appliance.gateway.http.dialect import AnswerWriter
from appliance.gateway.http.messages_objects import MessageWriter
from appliance.gateway.http.openai_objects import Writer
from appliance.gateway.http.responses_objects import ResponseWriter
from isolation.ipc.sampling import Sampling

TOKENS = 20_000
ROUNDS = 15
REQUEST = GenerateRequest(
    request_id="req_0123456789abcdef01234567",
    operation=Operation.CHAT,
    model="m",
    prompt=TextPrompt("x"),
    sampling=Sampling(),
    stream=True,
)
DELTAS = [Delta(" token" if number % 7 else "\n\u00e9", (number,)) for number in range(100)]
MAKERS: dict[str, Callable[[], AnswerWriter]] = {
    "chat": lambda: Writer(REQUEST, 0, False),
    "responses": lambda: ResponseWriter(REQUEST, 0, shown=dict.fromkeys(ResponseWriter.REPEATED)),
    "messages": lambda: MessageWriter(REQUEST, 0),
}


def time_us(make: Callable[[], AnswerWriter]) -> float:
    """Microseconds of processor time a token."""
    writer = make()
    writer.opening(Started(1, 0))
    began = time.process_time()
    for number in range(TOKENS):
        writer.delta(DELTAS[number % len(DELTAS)])
    return (time.process_time() - began) / TOKENS * 1e6


def main() -> int:
    """Print the medians."""
    found: dict[str, list[float]] = {name: [] for name in MAKERS}
    for number in range(ROUNDS):
        names = list(MAKERS) if number % 2 else list(reversed(MAKERS))
        for name in names:
            found[name].append(time_us(MAKERS[name]))
    chat = statistics.median(found["chat"])
    for name, times in found.items():
        median = statistics.median(times)
        print(f"{name:10} {median:6.2f} us a token, {median - chat:+.2f} beside chat")
    return 0


if __name__ == "__main__":
    sys.exit(main())
