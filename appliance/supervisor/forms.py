"""Which form an engine is told to compute in, and what is remembered of its trial."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from appliance.common.form_cache import FormCache, KeptForm
from appliance.supervisor.boot import Booted, BootPlan
from appliance.supervisor.layout import GUEST_KERNELS
from engine.backends.native.manifest import FORMS, MANIFEST
from engine.config import EngineConfig
from isolation.gvisor.cpuid import processor
from isolation.ipc.messages import Role


@dataclass(frozen=True, slots=True)
class Forms:
    """Forms of the engines that run under one runtime."""

    cache: FormCache
    runtime: str
    """Label of the runtime: what a sandbox lets through differs."""

    def told(self, plan: BootPlan) -> BootPlan:
        """Plan that tells an engine the form of an earlier trial, if there was one."""
        kept = self.find(plan)
        if kept is None:
            return plan
        config = replace(EngineConfig.from_json(plan.configuration), form=kept.form)
        return replace(plan, configuration=config.to_json())

    def find(self, plan: BootPlan) -> KeptForm | None:
        """Form of an earlier trial of such an engine."""
        key = self._key(plan)
        return self.cache.find(key) if key else None

    def note(self, plan: BootPlan, booted: Booted) -> None:
        """Remember the form of an engine that has just become ready, or show an old trial's figures for it.

        Args:
            plan: as it was before ``told``.
            booted: the engine; its ``computes`` gets the figures of the trial.
        """
        number = booted.ready.get("form", 0)
        if not 0 < number < len(FORMS):
            return
        kept = self.find(plan)
        if kept is not None and kept.form == FORMS[number]:
            booted.computes = f"{kept.said}; tried on {kept.tried}"
        elif key := self._key(plan):
            today = datetime.now(UTC).date().isoformat()
            self.cache.keep(KeptForm(key, plan.model, FORMS[number], today, booted.computes))

    def _key(self, plan: BootPlan) -> str:
        """Digest of all that the times of forms depend on; empty for a sandbox that has no forms."""
        sources = [mount.source for mount in plan.spec.mounts if mount.target == GUEST_KERNELS]
        if plan.role is not Role.ENGINE or not sources:
            return ""
        try:
            manifest = (Path(sources[0]) / MANIFEST).read_bytes()
            parts = (plan.configuration, manifest, self.runtime.encode(), processor().encode())
        except OSError:
            return ""
        digest = hashlib.sha256(b"athanor forms 1\0")
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()
