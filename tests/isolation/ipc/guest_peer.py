"""The guest of the tests with two processes; runs bare or inside a sandbox.

Arguments: the host's socket. The configuration is JSON: ``mode``, ``seed``, ``count``, ``fence``.

* ``echo``: answer each Abort with a step that names its request, napping at random, until Drain.
* ``flood``: send ``count`` large steps as fast as the ring takes them, then leave.
* ``tamper``: try to resize the segment and send what became of it as error numbers, 0 for success.
"""

import json
import os
import random
import sys
import time
from array import array

from engine.sandbox.attach import attach
from isolation.ipc import channel as channel_module
from isolation.ipc.engine import Drain, StepOutput
from isolation.ipc.errors import RingFull
from isolation.ipc.messages import EngineReady, Role

PATIENCE_S = 20
NAP_S = 30e-6
LARGE = 4000


def nap(rng):
    """Be busy for up to 30 us, so that the peer finds us at every point of going to sleep."""
    end = time.perf_counter() + rng.random() * NAP_S
    while time.perf_counter() < end:
        pass


def echo(channel, config):
    """Answer in order until Drain."""
    rng = random.Random(config["seed"])
    while True:
        for message in channel.receive():
            if isinstance(message, Drain):
                return
            channel.send(
                StepOutput(
                    requests=array("Q", [message.request]),
                    token_ids=array("I", [1]),
                    finishes=b"\0",
                    waiting=channel.missed_bells,
                )
            )
        if rng.random() < 0.5:
            nap(rng)
        if not channel.wait(PATIENCE_S):
            sys.exit("nothing came")


def flood(channel, config):
    """Send large steps, waiting for room."""
    for number in range(config["count"]):
        step = StepOutput(
            requests=array("Q", [number] * LARGE), token_ids=array("I", [number] * LARGE), finishes=bytes(LARGE)
        )
        while True:
            try:
                channel.send(step)
                break
            except RingFull:
                if not channel.wait(PATIENCE_S):
                    sys.exit("no room came")


def tamper(channel, _config):
    """Shrink, grow, empty."""
    memfd = channel.fds()[0]
    size = os.fstat(memfd).st_size
    for length in (size + 4096, size - 4096, 0):
        try:
            os.ftruncate(memfd, length)
            number = 0
        except OSError as error:
            number = error.errno
        channel.send(StepOutput(running=number))
        if number == 0:
            return


channel, data = attach(sys.argv[1], Role.ENGINE)
config = json.loads(data)
if not config.get("fence", True):
    channel_module.fence = lambda: None
channel.send(EngineReady(1, 1, 1, 1))
{"echo": echo, "flood": flood, "tamper": tamper}[config["mode"]](channel, config)
