"""What the exit codes of every command mean."""

from __future__ import annotations

OK = 0
"""Done."""

REFUSED = 1
"""It was understood and could not be done: a policy with problems, a reload that changed nothing,
a request that is not known."""

USAGE = 2
"""The command line itself is wrong."""

UNREACHABLE = 3
"""Nothing answers on the admin address."""

CANNOT_START = 4
"""The appliance cannot start: configuration, ports, sandboxes, models."""

INCOMPLETE = 5
"""Nothing failed, and not everything could be shown here."""

NOT_RUNNING = 6
"""Nobody listens on the admin address: nothing runs there, or it is about to start or to end. ``athanor reload`` alone
tells this from ``UNREACHABLE``."""
