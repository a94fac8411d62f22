"""Messages between the downloader and the commands that order from it: lines of JSON, versioned.

    {"version": 1, "do": "pull", "source": "s3://models/llama", "name": "", ...}
    {"event": "progress", "doing": "downloading", "done": 1048576, "total": 16060000000}
    {"event": "done", "digest": "9f86...", ...}
    {"event": "failed", "message": "..."}

A connection has one order. Its end before the answer ends a pull, which keeps what has come.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from appliance.common.config import MODEL_NAME
from appliance.common.errors import ModelCacheError
from appliance.fetch.pull import PullOrder

VERSION = 1

MAX_LINE_BYTES = 64 << 10
"""Most bytes of a message; an answer that names 500 models that were evicted has half of it."""

ORDERS = ("pull", "pin", "unpin", "remove")


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """An order: a pull, or what is done with a model of the cache."""

    do: str
    """One of ``ORDERS``."""
    pull: PullOrder | None = None
    model: str = ""
    """Digest, or key of a partial model, for the other orders."""

    def line(self) -> bytes:
        """The order as a message."""
        values: dict[str, Any] = {"version": VERSION, "do": self.do}
        if self.pull is not None:
            values |= {one.name: getattr(self.pull, one.name) for one in fields(PullOrder)}
        else:
            values["model"] = self.model
        return json.dumps(values).encode() + b"\n"


def read_order(line: bytes) -> FetchOrder:
    """Read an order.

    Raises:
        ModelCacheError: it is none of this release.
    """
    problem = (
        "not an order of this release; install one release of athanor alone, and start athanor-fetch.service again"
    )
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ModelCacheError(problem) from None
    if not isinstance(values, dict) or values.pop("version", None) != VERSION or values.get("do") not in ORDERS:
        raise ModelCacheError(problem)
    do = values.pop("do")
    if do != "pull":
        model = values.get("model")
        if values.keys() != {"model"} or not isinstance(model, str):
            raise ModelCacheError(problem)
        return FetchOrder(do, model=model)
    kinds = {"source": str, "name": str, "digest": str, "pin": bool, "unverified": bool}
    if values.keys() != kinds.keys() or not all(type(values[name]) is kind for name, kind in kinds.items()):
        raise ModelCacheError(problem)
    return FetchOrder(do, PullOrder(**values))


def check_order(order: PullOrder) -> None:
    """Check name and digest of a pull.

    Raises:
        ModelCacheError: one of them is of another form.
    """
    import re

    if order.name and not re.fullmatch(MODEL_NAME, order.name):
        raise ModelCacheError(f"{order.name[:80]!r} is no name of a model; letters, digits, dots and dashes make one")
    if order.digest and not re.fullmatch(r"[0-9a-f]{64}", order.digest):
        raise ModelCacheError("a digest has 64 hexadecimal digits; athanor model digest DIR prints that of a folder")
