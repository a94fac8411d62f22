"""Engines of external models, made when the text sandbox of one is there and ended with it.

A model whose endpoint does not answer is served all the same: its requests get a typed error at once, and the first one
after the endpoint has come back is answered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.config import ModelConfig
from appliance.common.external_config import EXTERNAL
from appliance.gateway.external.client import Endpoint
from appliance.gateway.external.completion import Spelling, Vocabulary
from appliance.gateway.external.engine import Count, ExternalEngine
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Hello, Role

LOOK_S = 0.1
"""Seconds between two looks for text sandboxes that have come, while an external model has no engine."""

REST_S = 0.5
"""Seconds between two looks while there is nothing to attach."""

COMPUTES = "a cluster outside of this appliance: {}; isolation of KV, residue, timing and forgetting are not ours there"
"""What status shows where it shows what an engine computes with."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Attached:
    link: EngineLink
    task: asyncio.Task[None]


class ExternalModels:
    """Engines of all external models; every method runs in one event loop."""

    def __init__(
        self,
        models: Mapping[str, ModelSandboxes],
        configured: Callable[[], Iterable[ModelConfig]],
        ended: Callable[[ModelSandboxes, EngineLink], None],
        count: Count,
    ) -> None:
        """``configured`` gives the models of the configuration in force; ``ended`` is called when an engine has ended
        by a defect; ``count`` as in ``ExternalEngine``."""
        self._models = models
        self._configured = configured
        self._ended = ended
        self._count = count
        self._attached: dict[str, _Attached] = {}
        self._generation = 0

    async def run(self) -> None:
        """Attach and go on until cancelled; then all connections are closed."""
        try:
            while True:
                self.look()
                await aligned_sleep(LOOK_S if any(map(_wants, self._models.values())) else REST_S)
        finally:
            tasks = [one.task for one in self._attached.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Attach an engine to each external model that has a text sandbox and no engine."""
        for name, model in self._models.items():
            if _wants(model) and model.text is not None:
                entry = next((one for one in self._configured() if one.name == name), None)
                if entry is not None and entry.external is not None:
                    self._attach(model, model.text, entry)

    def _attach(self, model: ModelSandboxes, text: TextLink, entry: ModelConfig) -> None:
        assert entry.external is not None
        vocabulary = vocabulary_of(text.ready.vocab_size, text.table)
        ready = EngineReady(vocabulary.size, entry.max_context, block_size=16, num_blocks=1)
        host, guest = _channel(ready)
        self._generation += 1
        link = EngineLink(host, ready, self._generation, lambda link, reason, _fault: self._lost(model, link, reason))
        engine = ExternalEngine(model.name, Endpoint(entry.external), guest, vocabulary, self._count)
        task = asyncio.create_task(engine.run(), name=f"external model {model.name}")
        self._attached[model.name] = attached = _Attached(link, task)
        task.add_done_callback(lambda task: self._done(model.name, attached, task))
        model.set_engine(link)
        record = model.record("engine")
        record.generation, record.computes = self._generation, COMPUTES.format(entry.external.url)
        record.become("ready")
        log.info("an external model is served", model=model.name, url=entry.external.url)

    def _done(self, name: str, attached: _Attached, task: asyncio.Task[None]) -> None:
        if self._attached.get(name) is attached:
            del self._attached[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engine of an external model failed", model=name, error=repr(error), exc_info=error)

    def _lost(self, model: ModelSandboxes, link: EngineLink, reason: str) -> None:
        if model.engine is link:
            model.set_engine(None)
        model.record("engine").become("failed", reason)
        self._ended(model, link)


def _wants(model: ModelSandboxes) -> bool:
    """Return whether a model is external and has no engine."""
    return model.runner == EXTERNAL and model.engine is None


def vocabulary_of(size: int, table: VocabularyTable | None) -> Vocabulary:
    """Return what is known of a model's tokens. An id behind all others stands for the end of an output where the
    vocabulary has none without text."""
    if table is None:
        return Vocabulary(size + 1, None, size)
    special = frozenset(token for token, entry in enumerate(table.entries) if not entry)
    spelling = Spelling(table.entries, strip_leading_space=table.strip_leading_space)
    if special:
        return Vocabulary(size, spelling, min(special), special)
    return Vocabulary(size + 1, spelling, size)


def _channel(ready: EngineReady) -> tuple[Channel, Channel]:
    """Return both ends of a channel, past the handshake."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    host = Channel.host(memfd, host_in, host_out, layout, Role.ENGINE)
    guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, Role.ENGINE)
    guest.send(Hello(PROTOCOL_VERSION, Role.ENGINE))
    host.receive()
    host.send(Configure(b"{}"))
    guest.receive()
    guest.send(ready)
    host.receive()
    host.disarm()
    return host, guest
