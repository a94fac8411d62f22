"""What the operator's page costs the gateway: processor time and bytes of one look, as the page asks it each second.

    python bench/console.py [http://127.0.0.1:8082] [LOOKS]

Processor time is the gateway's own count (``process_cpu_seconds_total``), so it holds on a crowded machine; what the
gateway does meanwhile in any case is measured first, for as long, and taken off.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
import urllib.request

LOOKS = 300


def get(url: str) -> bytes:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


def cpu_s(admin: str) -> float:
    """Processor time of the gateway so far, in seconds."""
    found = re.search(rb"^process_cpu_seconds_total (\S+)", get(f"{admin}/metrics"), re.MULTILINE)
    if found is None:
        raise SystemExit("no admin listener answers there")
    return float(found[1])


def main(admin: str = "http://127.0.0.1:8082", looks: str = str(LOOKS)) -> None:
    """Measure and print one line of JSON."""
    count = int(looks)
    whole = get(f"{admin}/console/look")
    first = json.loads(whole)
    after = first["points"][-1]["at"] if first["points"] else 0
    query = urllib.parse.urlencode({"after": after, "seen": first["requests"]["mark"]})
    before, began = cpu_s(admin), time.monotonic()
    for _ in range(count):
        again = get(f"{admin}/console/look?{query}")
    spent, seconds = cpu_s(admin) - before, time.monotonic() - began
    before = cpu_s(admin)
    time.sleep(seconds)
    idle = cpu_s(admin) - before
    print(
        json.dumps(
            {
                "looks": count,
                "tenants": first["tenants"]["total"],
                "ms_a_look": round((spent - idle) / count * 1_000, 2),
                "first_look_bytes": len(whole),
                "next_look_bytes": len(again),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
