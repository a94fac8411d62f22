"""``athanor`` with a gateway that probes at other intervals: ``python tests/system/hurried.py PERIOD LATE demo ...``.

PERIOD and LATE take the place of ``PERIOD_S`` and ``LATE_S`` of ``appliance.gateway.sandboxes.probe``.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    period, late, *rest = sys.argv[1:]
    if rest[0] == "appliance.operator.child":
        # Before anything else of ours is imported: others import the constants by name.
        from appliance.gateway.sandboxes import probe

        probe.PERIOD_S, probe.LATE_S = float(period), float(late)
        probe.Probe.ask.__defaults__ = (probe.LATE_S,)
        from appliance.operator import child

        sys.exit(child.main(rest[1:]))
    from tests.system.clocked import launch

    launch(str(Path(__file__).resolve()), [period, late], rest)
