"""G9, provable forgetting: nothing of a request persists in clear. Deleted data is ``g9_sealed`` and ``deleted_text``.

Canaries are in prompts, grammars and outputs of a running appliance, of a tenant with ``retention: none``. Five seconds
after the last answer everything that the appliance still has is searched: memory of all its processes, unnamed files
(the rings, and all memory of each sandbox), its state directory with logs, policy, keys and spill, ``/dev/shm``, and
the traces that it keeps. The control is this search after these requests of an ordinary tenant, whose compiled grammars
may stay: it must find them. Token ids, which are all that an engine sees, are searched for too; their control is a
search while requests of the quiet tenant run. Both controls end at the first find.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from appliance.common.catalog import embedded_model
from appliance.common.figures import counted
from appliance.selftest.canary import Hits, Wanted, descendants, draw, scan_folder, scan_memory, scan_nameless_files
from appliance.selftest.deleted_text import deleted_rows
from appliance.selftest.result import Result, judged
from appliance.selftest.spilling_appliance import SpillingAppliance, spilling_appliance

COMMAND = "athanor selftest --only G9"

AFTER_S = 5.0
"""Seconds after the last answer at which the search starts."""

REQUESTS, FULL_REQUESTS = 8, 60

FAR_CHARACTERS = 4_000
"""Characters of a grammar before its canary: more than any message that follows, so that a copy which is kept somewhere
on the way is not overwritten by chance."""

NEEDED_IDS = 8
"""Number of consecutive token ids that is unique to the check."""


def run(full: bool) -> list[Result]:
    """Run all rows; ``full`` sends more requests and searches for more forms of each canary."""
    return memory_rows(full)


def memory_rows(full: bool, sandbox: Mapping[str, Any] = MappingProxyType({})) -> list[Result]:
    """Search a running appliance for remains of requests. ``sandbox``: further keys of that section of its
    configuration."""
    bar = f"0 hits {AFTER_S:g} s after completion"
    if os.geteuid() != 0:
        reason = "memory of processes can be read by root alone"
        return [Result("G9.canaries", "absent", reason, bar, COMMAND)]
    pause = threading.Event()
    with spilling_appliance(sandbox) as one:
        quiet, loud = _drawn(full), _drawn(full)
        _talk(one, "quiet", quiet, FULL_REQUESTS if full else REQUESTS)
        pause.wait(AFTER_S)
        hits, ids = _search(one, quiet)
        core = _core_limits(one)
        _talk(one, "loud", loud, 2)
        control = _first(one, loud)
        in_flight = _ids_in_flight(one, quiet)
        deleted = deleted_rows(one, full=full)
    where = f" ({', '.join(f'{place}: {count}' for place, count in hits.places.most_common(3))})" if hits.total else ""
    return [
        judged(
            "G9.canaries",
            not hits.total,
            figure=f"{counted(hits.total, 'hit')} in {hits.scanned_bytes >> 20} MiB{where}",
            bar=bar,
            command=COMMAND,
        ),
        judged(
            "G9.canaries.control",
            control.total > 0,
            figure=f"{counted(control.total, 'hit')} of a tenant whose compiled grammars may stay, at the same place",
            bar="1 or more",
            command=COMMAND,
        ),
        judged(
            "G9.ids",
            not ids.total,
            figure=f"{counted(ids.total, 'place')} with a prompt's token ids, in the engine's memory",
            bar=bar,
            command=COMMAND,
        ),
        judged(
            "G9.ids.control",
            in_flight.total > 0,
            figure=f"{counted(in_flight.total, 'place')} while requests run, where the first was found",
            bar="1 or more",
            command=COMMAND,
        ),
        judged(
            "G9.cores",
            not core,
            figure=f"{counted(len(core), 'process', 'processes')} may leave a core file",
            bar="0",
            command=COMMAND,
        ),
        *deleted,
    ]


def _drawn(full: bool) -> Wanted:
    """Draw canaries, and tokenise their common prefix with the embedded model's tokenizer."""
    from tokenizers import Tokenizer

    drawn = draw(3 * FULL_REQUESTS, thorough=full)
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    ids = tokenizer.encode(f"please keep {drawn.stem}", add_special_tokens=False).ids[:NEEDED_IDS]
    return replace(drawn, ids=tuple(ids))


def _talk(one: SpillingAppliance, tenant: str, wanted: Wanted, count: int) -> None:
    """Send requests with a canary in prompt, grammar and output, and with long prompts."""
    for number in range(count):
        inside, outside, long = wanted.canaries[3 * number : 3 * number + 3]
        far = f"[{'x' * FAR_CHARACTERS}]{outside}"
        said = one.complete(tenant, prompt=f"please keep {inside} safe", max_tokens=80, guided_regex=far)
        if said != f"x{outside}":
            raise RuntimeError("the answer does not follow its grammar: the canary never was in an output")
        one.complete(tenant, prompt=f"please keep {long} safe " * 40, max_tokens=4)


def _search(one: SpillingAppliance, wanted: Wanted) -> tuple[Hits, Hits]:
    """Search for the text everywhere, and for the ids in the sandboxes' memory."""
    hits, ids = Hits(), Hits()
    for _ in _searches(one, wanted, hits, ids):
        pass
    for folder in (one.target.state, Path("/dev/shm")):
        scan_folder(folder, wanted, hits)
    for stem in wanted.needles():
        hits.places["kept traces"] += one.get_admin("/traces?limit=1000").count(stem)
    return hits, ids


def _first(one: SpillingAppliance, wanted: Wanted, *, of_ids: bool = False) -> Hits:
    """Search memory until something has the text or, with ``of_ids``, the ids: for a control the first will do."""
    hits, ids = Hits(), Hits()
    sought = ids if of_ids else hits
    for _ in _searches(one, wanted, hits, ids):
        if sought.total:
            break
    return sought


def _searches(one: SpillingAppliance, wanted: Wanted, hits: Hits, ids: Hits) -> Iterator[None]:
    """Search unnamed files and then memory of one process after the other, as the caller asks for them."""
    processes = descendants(one.target.pid)
    files: set[tuple[int, int]] = set()
    shared: set[str] = set()
    for pid in processes:
        scan_nameless_files(pid, wanted, hits, ids, files)
        yield
    for pid in processes:
        scan_memory(pid, wanted, hits, ids, shared)
        yield


def _ids_in_flight(one: SpillingAppliance, wanted: Wanted) -> Hits:
    """Search for ids while requests with them run, one after the other."""
    over = threading.Event()

    def talk() -> None:
        while not over.is_set():
            one.complete("quiet", prompt=f"please keep {wanted.canaries[0]} safe", max_tokens=80)

    talking = threading.Thread(target=talk)
    talking.start()
    try:
        return _first(one, wanted, of_ids=True)
    finally:
        over.set()
        talking.join()


def _core_limits(one: SpillingAppliance) -> list[int]:
    """Return the processes that may write a core file."""
    loose = []
    for pid in descendants(one.target.pid)[1:]:  # The launcher itself holds nothing.
        try:
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        except OSError:
            continue
        soft = next(line.split()[4] for line in limits if line.startswith("Max core file size"))
        if soft != "0":
            loose.append(pid)
    return loose
