"""Import of the log library without the one that draws tables."""

from __future__ import annotations

import importlib
import sys


def import_structlog() -> None:
    """Import structlog without rich, for a program that is about to import modules that log.

    structlog imports rich, and with it pygments and attrs, wherever it is installed, for tracebacks with colours that
    no program of ours draws (``log``): half of a tenth of a second to a tenth of processor time, in each process of
    an appliance. rich can be imported afterwards.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    # An import of a name that stands for None raises ModuleNotFoundError, as of a package that is not installed.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        del sys.modules["rich"]
