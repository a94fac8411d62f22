"""Sandboxes, engines and their KV as status and console show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.common.clocks import Clocks
from appliance.common.status import AccountView, EngineStatus, KvView, ModelStatus, ModelView, SandboxStatus
from appliance.gateway.console.look import MAX_ACCOUNTS
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes, SandboxRecord
from appliance.gateway.watch.definitions import kv_blocks, running, waiting
from isolation.ipc.messages import weight_word


class EngineStates:
    """States of the models' sandboxes, read from their links and records."""

    def __init__(self, sandboxes: Sandboxes, ledger: Ledger, clocks: Clocks) -> None:
        self._sandboxes = sandboxes
        self._ledger = ledger
        self._clocks = clocks
        self._names: tuple[Mapping[str, bytes], dict[bytes, str]] = ({}, {})

    @property
    def engines(self) -> list[EngineLink]:
        """Engines that are there."""
        return [model.engine for model in self._sandboxes.every if model.engine is not None]

    def view(self, model: ModelSandboxes) -> ModelView:
        """Return the state of one model's sandboxes."""
        engine, kind = model.engine, self._sandboxes.attachment.sandbox
        there = model.ready if "engine" in model.records else model.text is not None
        hangs = model.hangs
        return ModelView(
            name=model.name,
            runner=model.runner,
            tenant=model.tenant,
            state=view_state(model, there=there),
            running=running(engine),
            waiting=waiting(engine),
            sandboxes=tuple(
                self._sandbox(role, model.records[role], kind, hangs.get(role, ""))
                for role in ("engine", "text")
                if role in model.records
            ),
            kv=None if engine is None else self._kv(engine),
        )

    def status(self, model: ModelSandboxes) -> ModelStatus:
        """Return the state of one model's sandboxes in the form of ``athanor status``."""
        view, kind = self.view(model), self._sandboxes.attachment.sandbox
        known = {one.role: one for one in view.sandboxes}
        engine = EngineStatus(state="shared", kind=kind)
        if "engine" in known:
            blocks, free, cached = (view.kv.blocks, view.kv.free, view.kv.cached) if view.kv is not None else (0, 0, 0)
            engine = EngineStatus(
                **_fields(known["engine"]),
                num_blocks=blocks,
                free_blocks=free,
                cached_blocks=cached,
                running=view.running,
                waiting=view.waiting,
                computes=model.records["engine"].computes,
                adapters=0 if model.engine is None else model.engine.ready.adapters,
                weights="" if model.engine is None else weight_word(model.engine.ready.weights),
            )
        text = known.get("text") or SandboxStatus(state="booting", kind=kind)
        return ModelStatus(
            name=view.name,
            state=view.state,
            engine=engine,
            text=text,
            runner=view.runner,
            tenant=view.tenant,
            used_at=self._clocks.unix(model.sleep_state.used_at) if model.sleep_state.used else None,
        )

    def blocks_by_account(self) -> dict[str, int]:
        """Count the KV blocks with each account's content, in all engines."""
        found: dict[str, int] = {}
        names = self._account_names()
        for engine in self.engines:
            for use in engine.kv.uses:
                name = names.get(use.namespace, "")
                found[name] = found.get(name, 0) + use.resident
        return found

    def _kv(self, engine: EngineLink) -> KvView:
        uses = sorted(engine.kv.uses, key=lambda use: use.resident, reverse=True)
        names = self._account_names()
        views = [
            AccountView(
                name=name,
                kind=_account_kind(name),
                held=use.held,
                cached=max(0, use.resident - use.held),
                reserved=use.reserved,
                cap=use.cap,
                lost=use.lost,
                preempted=use.preempted,
            )
            for use in uses[:MAX_ACCOUNTS]
            if (name := names.get(use.namespace)) is not None
        ]
        shown = {view.name for view in views}
        rest = [use for use in uses if use.resident and names.get(use.namespace) not in shown]
        pool = kv_blocks(engine)
        return KvView(
            blocks=pool.total,
            free=pool.free,
            cached=pool.cached,
            block_tokens=engine.ready.block_size,
            accounts=tuple(views),
            other_accounts=len(rest),
            other_held=sum(use.held for use in rest),
            other_cached=sum(max(0, use.resident - use.held) for use in rest),
        )

    def _sandbox(self, role: str, record: SandboxRecord, kind: str, hang: str) -> SandboxStatus:
        ready = record.state == "ready"
        return SandboxStatus(
            role=role,
            state="hung" if ready and hang else record.state,
            kind=kind,
            pid=record.pid or None,
            generation=record.generation,
            restarts=record.restarts,
            uptime_s=self._clocks.monotonic() - record.since if ready else None,
            since=self._clocks.unix(record.since),
            cause=hang if ready else record.cause,
            frozen=record.frozen,
        )

    def _account_names(self) -> dict[bytes, str]:
        """Return account names by namespace key; inverted once for each table of keys."""
        keys = self._ledger.namespaces
        if self._names[0] is not keys:
            self._names = keys, {key: name for name, key in keys.items()}
        return self._names[1]


def view_state(model: ModelSandboxes, *, there: bool) -> str:
    """Return the state of a model for ``ModelView``; ``there``: its sandboxes are."""
    if model.draining or model.leaving is not Leaving.NO:
        return "draining"
    if not there and not model.sleep_state.awake:
        return model.sleep_state.state
    return "starting" if not there else "hung" if model.hangs else "ready"


def _fields(sandbox: SandboxStatus) -> dict[str, Any]:
    return {name: getattr(sandbox, name) for name in SandboxStatus.__dataclass_fields__}


def _account_kind(name: str) -> str:
    prefix, slash, _ = name.partition("/")
    return prefix if slash and prefix in ("group", "public") else "tenant"
