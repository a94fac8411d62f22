"""Blocks of a prompt that the local engine takes from the store while another host computes it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from appliance.gateway.sandboxes.engine_link import EngineLink
from isolation.ipc.engine import Submit
from isolation.ipc.prefetch import Prefetch


class Prefetching:
    """One request's prompt; the engine takes nothing more of it after the block."""

    def __init__(self, next_id: Callable[[], int]) -> None:
        """``next_id`` draws wire ids."""
        self._next_id = next_id
        self._engine: EngineLink | None = None
        self._id = 0

    def __enter__(self) -> Prefetching:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, engine: EngineLink, submit: Submit) -> None:
        """Have an engine take the blocks of a request's prompt, unless one does; it may not."""
        if self._engine is None:
            self._engine, self._id = engine, self._next_id()
            engine.prefetch(Prefetch(self._id, submit.namespace, submit.token_ids))

    def end(self) -> None:
        """Have it take no more. An engine that has the request itself has ended this already."""
        if self._engine is not None:
            self._engine.end_prefetch(self._id)
            self._engine = None
