"""Has sandboxes frozen that nobody has used for a while, and thawed when something is about to be sent to them.

An idle gVisor sandbox is not at rest: its runtime's timers take some hundredths of a core. Frozen by its cgroup it
takes nothing, keeps all its memory, counts as ready, and goes on within milliseconds.

The order of messages is the whole protocol. A link calls ``wake`` before it writes the first frame, so the supervisor
reads the word to thaw after any earlier word to freeze; the frame lies in the ring meanwhile. Nothing waits.

A thaw can be measured, and then says that nobody was served for a while. So sandboxes are frozen only where the policy
lets every tenant's be that uses them (``freeze_idle``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from appliance.common.control import Freeze, Frozen
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import TextLink
from policy.model import PolicySet
from policy.routes import reachable

Key = tuple[str, str]
"""Model, and the tenant whose sandboxes they are, empty for shared ones."""


@dataclass(slots=True)
class _Rest:
    """What was seen of one model's sandboxes."""

    model: ModelSandboxes
    mark: tuple[tuple[int, int], ...] = ()
    """Generation and frames of each link when it was seen last."""
    since: float = 0.0
    """Monotonic seconds since which nothing has changed."""
    links: Mapping[str, EngineLink | TextLink] = field(default_factory=dict)
    """Links by role while they are frozen."""


@dataclass(slots=True)
class Freezer:
    """Freezes and thaws; ``tell`` sends to the supervisor, ``thawed`` is called with the model of each thaw."""

    tell: Callable[[Freeze], None]
    after_s: float
    thawed: Callable[[str], None] = lambda _model: None
    clock: Callable[[], float] = time.monotonic
    _allowed: frozenset[Key] = frozenset()
    _seen: dict[Key, _Rest] = field(default_factory=dict)

    def apply(self, policy: PolicySet, models: Iterable[str]) -> None:
        """Take which sandboxes the policy lets be frozen; the next look thaws the others."""
        names = tuple(models)
        users: dict[str, bool] = {}
        own: set[Key] = set()
        visible: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]] = {}
        for tenant in policy.tenants.values():
            lists = tenant.models, tenant.adapters
            if lists not in visible:  # Thousands of tenants have the same few lists of models.
                visible[lists] = reachable(policy.routes, *lists, names)
            for model in visible[lists]:
                if tenant.isolation_class.own_text and tenant.freeze_idle:
                    own.add((model, tenant.id))
                if not tenant.isolation_class.own_engine:
                    users[model] = users.get(model, True) and tenant.freeze_idle
        self._allowed = frozenset(own | {(model, "") for model, allowed in users.items() if allowed})

    def look(self, every: Iterable[ModelSandboxes]) -> None:
        """Freeze what has been idle for long enough, thaw what may not be frozen any more; to be called every few
        seconds."""
        now, seen = self.clock(), {}
        for model in every:
            key = model.name, model.tenant
            rest = self._seen.get(key)
            if rest is None or rest.model is not model:
                rest = _Rest(model)
            seen[key] = rest
            links = _links(model)
            mark = _mark(links)
            if mark != rest.mark or not mark:
                # One has ended, or sent something at the last moment: the other shall not stay frozen.
                self._wake(key, rest)
                rest.mark, rest.since = mark, now
            elif key not in self._allowed:
                self._wake(key, rest)
            elif not rest.links and now - rest.since >= self.after_s and not _probed(links):
                self._freeze(key, links, rest)
        self._seen = seen

    def take(self, message: Frozen) -> None:
        """Note what the supervisor says of a sandbox. What computes, or cannot be frozen, is tried again later.

        Raises:
            KeyError: it has no such role.
        """
        key = message.model, message.tenant
        rest = self._seen.get(key)
        if rest is None or rest.model.records[message.role].generation != message.generation:
            return
        rest.model.records[message.role].frozen = bool(message.frozen)
        if not message.frozen:
            self._wake(key, rest)

    def _freeze(self, key: Key, links: Mapping[str, EngineLink | TextLink], rest: _Rest) -> None:
        rest.links = links
        for role, link in links.items():
            link.wake = partial(self._wake, key, rest)
            self.tell(Freeze(key[0], role, link.generation, 1, key[1]))

    def _wake(self, key: Key, rest: _Rest) -> None:
        """Thaw all sandboxes of the model, if they are frozen: a request needs them one after the other."""
        if not rest.links:
            return
        links, rest.links, rest.since = rest.links, {}, self.clock()
        for role, link in links.items():
            link.wake = None
            if not link.closed:
                self.tell(Freeze(key[0], role, link.generation, 0, key[1]))
        self.thawed(key[0])


def _links(model: ModelSandboxes) -> dict[str, EngineLink | TextLink]:
    """Return the links of all sandboxes of the model; none while one of them is missing."""
    found = {"engine": model.engine, "text": model.text}
    wanted = {role: found[role] for role in model.records}
    return {role: link for role, link in wanted.items() if link is not None} if all(wanted.values()) else {}


def _probed(links: Mapping[str, EngineLink | TextLink]) -> bool:
    """Return whether one of them has to answer a probe: frozen, it could not, and one that hangs would count as
    ready."""
    return any(link.probe.outstanding for link in links.values())


def _mark(links: Mapping[str, EngineLink | TextLink]) -> tuple[tuple[int, int], ...]:
    """Return what changes whenever something is sent or comes; nothing while an answer is outstanding."""
    if any(link.occupied for link in links.values()):
        return ()
    return tuple((link.generation, link.frames) for link in links.values())
