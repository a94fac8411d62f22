"""``python -m appliance.operator.cli``: the same as ``athanor``, where the script is not installed."""

from __future__ import annotations

from appliance.operator.cli.app import main

if __name__ == "__main__":
    main()
