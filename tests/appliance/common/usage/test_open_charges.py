"""Charges of running requests in memory that outlives a gateway: read after real kills, and hostile."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from appliance.common.usage import open_charges as module
from appliance.common.usage.open_charges import (
    ENDED,
    GATEWAY_LOST,
    MAX_OPEN,
    NO_CHARGE,
    OUTPUT,
    SLOT_BYTES,
    STATE,
    TEXT_AT,
    TEXT_BYTES,
    OpenCharges,
    create_memory,
    lost_requests,
)
from policy.model import Price
from tests.appliance.common.audit.entries import filled

PRICE = Price(input=10, cached_input=1, output=20)
PROMPT, CACHED = 9, 4


class Kept:
    """Memory of a gateway, as both sides have it."""

    def __init__(self) -> None:
        self.memfd = create_memory()
        self.charges = OpenCharges()
        self.charges.use(os.dup(self.memfd), os.dup(self.memfd))

    def lost(self) -> dict[str, tuple[object, ...]]:
        """Outcome, three numbers and cost of what is left, by request."""
        names = ("outcome", "input_tokens", "cached_tokens", "output_tokens", "cost")
        return {
            str(one.fields["request"]): tuple(one.fields[name] for name in names)
            for one in lost_requests(self.memfd)
            if one is not None
        }


def begun(charges: OpenCharges, name: str, most: int | None = None) -> module.OpenCharge:
    """A request that has just been let into an engine."""
    return charges.open(filled("request", request=name, outcome=GATEWAY_LOST), PRICE, most)


def test_what_a_gateway_leaves() -> None:
    """A request that nobody was shown costs nothing; one that was shown some costs the prompt and what was shown, at
    most what was reserved; one that had ended has its outcome and charge; one whose entry was sent is left out."""
    kept = Kept()
    begun(kept.charges, "waits")
    for name, most in (("streams", None), ("reserved", 100)):
        charge = begun(kept.charges, name, most)
        charge.show(PROMPT, CACHED)
        charge.words[OUTPUT] = 3
    begun(kept.charges, "whole").end("OK", PROMPT, 0, 7)
    sent = begun(kept.charges, "sent")
    sent.end("OK", PROMPT, 0, 7)
    sent.release()
    sent.release()
    assert kept.lost() == {
        "waits": (GATEWAY_LOST, 0, 0, 0, 0),
        "streams": (GATEWAY_LOST, PROMPT, CACHED, 3, 5 * 10 + 4 * 1 + 3 * 20),
        "reserved": (GATEWAY_LOST, PROMPT, CACHED, 3, 100),
        "whole": ("OK", PROMPT, 0, 7, 9 * 10 + 7 * 20),
    }


def test_slots_are_bounded_and_used_again() -> None:
    """The slot after the last is none, and a freed one is taken again; without memory there is none at all."""
    kept = Kept()
    charges = [begun(kept.charges, f"r{number}") for number in range(MAX_OPEN)]
    assert begun(kept.charges, "one more") is NO_CHARGE
    charges[5].release()
    assert begun(kept.charges, "again").slot == 5
    assert len(kept.lost()) == MAX_OPEN
    assert begun(OpenCharges(), "nowhere") is NO_CHARGE


def test_a_supervisor_that_comes_anew_gets_what_runs() -> None:
    """What is open moves to the new memory with its numbers and goes on there; nothing is left in the old one, so its
    end charges nothing twice. Memory of another size is refused, and both descriptors are closed."""
    kept = Kept()
    streams, whole = begun(kept.charges, "streams"), begun(kept.charges, "whole")
    streams.show(PROMPT, CACHED)
    whole.end("OK", PROMPT, 0, 7)
    newer = create_memory()
    kept.charges.use(os.dup(newer), os.dup(newer))
    assert kept.lost() == {}
    kept.memfd = newer
    streams.words[OUTPUT] = 2
    assert kept.lost()["streams"][3] == 2 and kept.lost()["whole"][0] == "OK"
    small, before = os.memfd_create("small"), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="size"):
        kept.charges.use(os.dup(small), os.dup(small))
    assert len(os.listdir("/proc/self/fd")) == before
    streams.release()
    assert set(kept.lost()) == {"whole"}


def test_what_no_gateway_writes_is_left_out() -> None:
    """Rubbish in a slot, by a gateway that was taken over, makes no entry and no error: random words, random pages,
    texts of another kind, lengths past the page. Control: the honest slot beside them is read."""
    kept, draw = Kept(), random.Random(1)
    begun(kept.charges, "honest").end("OK", PROMPT, 0, 1)
    for number in range(300):
        charge = begun(kept.charges, f"r{number}")
        at = charge.slot * SLOT_BYTES
        if number % 3 == 0:
            os.pwrite(kept.memfd, draw.randbytes(SLOT_BYTES), at)
        elif number % 3 == 1:
            charge.words[draw.choice([STATE, TEXT_BYTES])] = draw.choice([-1, 3, 1 << 62])
        else:
            text = b'{"kind":"sandbox"}'
            charge.page[TEXT_AT : TEXT_AT + len(text)] = text
            charge.words[TEXT_BYTES] = len(text)
    assert kept.lost() == {"honest": ("OK", PROMPT, 0, 1, 9 * 10 + 20)}


def answer(charges: OpenCharges, out: int) -> None:
    """What a gateway does, for ever: for each answer its tokens, told before each byte that is written."""
    number = 0
    while True:
        number += 1
        charge = begun(charges, f"r{number}")
        charge.show(PROMPT, 0)
        for token in range(1, 6):
            charge.words[OUTPUT] = token
            os.write(out, b"%d\n" % number)
        charge.end("OK", PROMPT, 0, 5)
        os.write(out, b"end %d\n" % number)  # stands for the entry
        charge.release()


@pytest.mark.parametrize("kills", [40, pytest.param(2_000, marks=pytest.mark.full)])
def test_nothing_served_is_free_after_a_kill(kills: int, tmp_path: Path) -> None:
    """kill -9 at random instructions of a process that answers: every token that left it is charged, in its entry or by
    what it left, at most one that did not leave is, and no request is in both but by its number. Control: kills
    came in the middle of answers."""
    draw, cut = random.Random(kills), 0
    for number in range(kills):
        kept, path = Kept(), tmp_path / str(number)
        out = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        child = os.fork()
        if not child:
            try:
                answer(kept.charges, out)
            finally:
                os._exit(1)
        while not os.fstat(out).st_size:
            time.sleep(0.0005)
        time.sleep(draw.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = path.read_text().splitlines()
        told = {f"r{line[4:]}" for line in lines if line.startswith("end ")}
        served = Counter(f"r{line}" for line in lines if not line.startswith("end "))
        left = kept.lost()
        assert len(left) <= 1
        for name, tokens in served.items():
            if name in told:
                assert tokens == 5
            else:
                assert tokens <= left[name][3] <= tokens + 1
                cut += 1
        for name in left.keys() - served.keys():
            assert int(str(left[name][3])) <= 1
        os.close(out)
        os.close(kept.memfd)
    assert cut >= kills // 20


def test_states_are_told_apart() -> None:
    """A slot that has ended is not charged by the numbers of its run."""
    kept = Kept()
    charge = begun(kept.charges, "r")
    charge.show(PROMPT, 0)
    charge.words[OUTPUT] = 100
    charge.end("CANCELLED", PROMPT, 0, 3)
    assert charge.words[STATE] == ENDED
    assert kept.lost()["r"][:4] == ("CANCELLED", PROMPT, 0, 3)
