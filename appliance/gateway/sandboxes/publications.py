"""Public prefixes, from the policy to the engines: token ids, problems, and the choice of one for each request.

A prefix is tokenized in its model's text sandbox, as requests are. Which of its tokens every request that begins so
has depends on what follows: a template may close a header, a tokenizer may join characters. So it is rendered with
several continuations, and the common beginning of all is published. It need not be exact: engine and gateway compare
ids, and a request shares as many whole blocks as it has in common with the prefix, or none.

A prefix is named to an engine only after that engine has said that it is resident. Requests do not wait for that: after
a boot or a reload they are computed from their start until the prefix is there.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from appliance.common.errors import ApplianceError, InvalidRequestError, UnavailableError
from appliance.common.figures import counted
from appliance.common.kv_shares import public_account, quotas_of
from appliance.common.status import PublicPrefixStatus
from appliance.gateway.generate_request import ChatPrompt, Prompt, TextPrompt
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_client import TextClient
from isolation.ipc.kv import WHOLE_POOL
from isolation.ipc.messages import EngineReady
from isolation.ipc.public import MAX_PUBLIC_TOKENS, PublicPrefix, PublicPrefixes, PublicState, common_length
from policy import model as policy_model
from policy.model import PolicySet

log = structlog.get_logger()

ENCODE_S = 8.0
"""Longest time of one continuation of a prefix in the text sandbox, in seconds."""

LOOK_S = 2.0
"""Seconds until a prefix is tried again whose model was not there."""

MOST = 2
"""Inverse of the largest share of the pool that public prefixes take together, as in the engine."""

CONTINUATIONS = (" the", "a", "1", "\n\n", ".", "\u00e9", "  x")
"""Texts that may follow a prefix: words, digits, breaks and marks, which tokenizers join to the text before in many
ways."""

TURNS = {"user": ("a", "1", "\u00e9", "The"), "assistant": ("a", "1"), "tool": ("a", "1")}
"""Turns that may follow a conversation, by role: the first role of which the template takes two turns is what is meant
to follow. Whatever else does shares the blocks before the role is named."""

REASONS = {
    PublicState.NO_ROOM: "its blocks do not fit the KV pool beside what is reserved and other prefixes",
    PublicState.UNSUPPORTED: "this model's engine keeps no public prefixes",
    PublicState.INVALID: "it fills no block, or the model has not all of its tokens",
    PublicState.FAILED: "its computation failed",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Published prefix."""

    key: bytes
    token_ids: array[int]


@dataclass(slots=True)
class Publications:
    """All public prefixes of the policy in force."""

    models: Mapping[str, ModelSandboxes] = field(default_factory=dict)
    next_id: Callable[[], int] = lambda: 0
    _policy: PolicySet | None = None
    _keys: Mapping[str, bytes] = field(default_factory=dict)
    _encoded: dict[str, array[int]] = field(default_factory=dict)
    """Token ids by account name."""
    _problems: dict[str, str] = field(default_factory=dict)
    """Reasons why prefixes could not be tokenized, by account name."""
    _misfitting: dict[str, str] = field(default_factory=dict)
    """Reasons why prefixes do not fit their engine beside the others, by id."""
    _table: dict[str, _Entry] = field(default_factory=dict)
    """Published prefixes by id."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def prepare(self, policy: PolicySet) -> list[str]:
        """Tokenize what a policy publishes, as far as its models are there; returns a line for each prefix that cannot
        be published. Prefixes in force are not changed."""
        encoded, found = await self._encode(policy)
        self._encoded |= encoded
        found |= self._misfits(policy, self._encoded)
        return [f"public_prefixes.{name}: {problem}" for name, problem in sorted(found.items())]

    def apply(self, policy: PolicySet, keys: Mapping[str, bytes]) -> None:
        """Put a policy's prefixes in force: every engine is told, now and at each start, which ones to keep."""
        self._policy, self._keys = policy, keys
        accounts = {name: public_account(prefix) for name, prefix in policy.public.items()}
        self._encoded = {name: ids for name, ids in self._encoded.items() if name in accounts.values()}
        self._problems = {name: why for name, why in self._problems.items() if name in accounts.values()}
        self._misfitting = self._misfits(policy, self._encoded)
        self._table = {
            name: _Entry(keys[account], self._encoded[account])
            for name, account in accounts.items()
            if account in keys and account in self._encoded and name not in self._misfitting
        }
        for model in self.models.values():
            entries = [self._table[name] for name in sorted(self._table) if policy.public[name].model == model.name]
            model.set_public(PublicPrefixes(tuple(PublicPrefix(one.key, one.token_ids) for one in entries)))
        self._changed.set()

    def model_came(self, name: str) -> None:
        """Publish again what is published for a model that has come: another one of this name may have had another
        tokenizer."""
        if self._policy is not None:
            accounts = {public_account(one) for one in self._policy.public.values() if one.model == name}
            self._encoded = {account: ids for account, ids in self._encoded.items() if account not in accounts}
            self._problems = {account: why for account, why in self._problems.items() if account not in accounts}
            self._changed.set()

    async def run(self) -> None:
        """Publish prefixes that could not be published at once when their models come up; ends by cancellation."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._policy is not None and self._missing(self._policy):
                policy = self._policy
                encoded, found = await self._encode(policy)
                for name, problem in found.items():
                    log.error("a public prefix is not published", prefix=name, problem=problem)
                    self._problems[public_account(policy.public[name])] = problem
                self._encoded |= encoded
                if policy is self._policy and (encoded or found):
                    self.apply(policy, self._keys)
                await asyncio.sleep(LOOK_S)

    def choose(self, names: Iterable[str], token_ids: array[int], engine: EngineLink) -> bytes:
        """Return the key of the prefix that has the most ids in common with these, of ``names`` and of those resident
        in the engine; empty where that is less than a block."""
        best, most = b"", engine.ready.block_size - 1
        for name in names:
            entry = self._table.get(name)
            use = engine.public.get(entry.key) if entry is not None else None
            if entry is None or use is None or use.state is not PublicState.RESIDENT:
                continue
            common = common_length(entry.token_ids, token_ids)
            if common > most:
                best, most = entry.key, common
        return best

    def unchecked(self, policy: PolicySet) -> list[str]:
        """Return a line for each prefix whose model sleeps and has never been asked for its tokens."""
        asked = self._encoded.keys() | self._problems.keys()
        return [
            f"public_prefixes.{name}: its model {one.model} sleeps; whether it can be published is known once it wakes"
            for name, one in sorted(policy.public.items())
            if one.model in self.models
            and self.models[one.model].sleep_state.asleep
            and public_account(one) not in asked
        ]

    def views(self, model: str | None = None) -> list[PublicPrefixStatus]:
        """Return the states of one model's prefixes, or of all."""
        policy = self._policy
        if policy is None:
            return []
        return [
            self._view(prefix) for _, prefix in sorted(policy.public.items()) if model is None or prefix.model == model
        ]

    def _view(self, prefix: policy_model.PublicPrefix) -> PublicPrefixStatus:
        model, entry, account = self.models.get(prefix.model), self._table.get(prefix.id), public_account(prefix)
        engine = model.engine if model is not None else None
        use = engine.public.get(entry.key) if engine is not None and entry is not None else None
        reason, state = self._problems.get(account) or self._misfitting.get(prefix.id, ""), "waiting"
        if use is not None:
            state, reason = use.state.name.lower(), REASONS.get(use.state, "")
        elif entry is not None and engine is not None:
            state = "pending"
        return PublicPrefixStatus(
            id=prefix.id,
            model=prefix.model,
            state="refused" if reason else state,
            tenants=len(prefix.tenants),
            num_tokens=len(self._encoded.get(account, ())),
            num_blocks=use.num_blocks if use else 0,
            hits=use.hits if use else 0,
            reason=reason,
        )

    def _missing(self, policy: PolicySet) -> list[policy_model.PublicPrefix]:
        """Return the prefixes that are neither tokenized nor refused."""
        known = self._encoded.keys() | self._problems.keys()
        return [prefix for prefix in policy.public.values() if public_account(prefix) not in known]

    async def _encode(self, policy: PolicySet) -> tuple[dict[str, array[int]], dict[str, str]]:
        """Return token ids by account name of prefixes that can be tokenized now, and problems by prefix id; nothing of
        those whose models came or went meanwhile."""
        encoded: dict[str, array[int]] = {}
        found: dict[str, str] = {}
        asked = {name: self.models.get(prefix.model) for name, prefix in policy.public.items()}
        for prefix in policy.public.values():
            model, account = asked[prefix.id], public_account(prefix)
            if model is None:
                found[prefix.id] = f"there is no model {prefix.model!r}"
            elif account not in self._encoded and model.text is not None:
                try:
                    encoded[account] = await tokenize(prefix, model, self.next_id)
                except UnavailableError:
                    continue  # Later.
                except ApplianceError as error:
                    found[prefix.id] = str(error)
        for name, prefix in policy.public.items():
            if self.models.get(prefix.model) is not asked[name]:
                encoded.pop(public_account(prefix), None)
                found.pop(name, None)
        return encoded, found

    def _misfits(self, policy: PolicySet, encoded: Mapping[str, array[int]]) -> dict[str, str]:
        """Return why prefixes do not fit their engines, by id, as far as engines have announced their sizes."""
        found: dict[str, str] = {}
        for model in self.models.values():
            ready = model.capacity
            own = [prefix for _, prefix in sorted(policy.public.items()) if prefix.model == model.name]
            if ready is None or not own:
                continue
            quotas = quotas_of(policy, dict.fromkeys(_accounts(policy), b""), model.name).quotas
            taken = sum(ready.num_blocks * quota.reserved // WHOLE_POOL for quota in quotas)
            total = 0
            for prefix in own:
                ids = encoded.get(public_account(prefix), array("I"))
                problem = _misfit(len(ids), total, taken, ready) if ids else None
                total += len(ids) // ready.block_size if problem is None else 0
                if problem is not None:
                    found[prefix.id] = problem
        return found


def published_for(policy: PolicySet, removed: Collection[str]) -> list[str]:
    """Return a line for each prefix whose model is to be removed."""
    return [
        f"public_prefixes.{name}: it is published for the model {one.model}, which is to be removed; take both away"
        for name, one in policy.public.items()
        if one.model in removed
    ]


def _accounts(policy: PolicySet) -> list[str]:
    return [*policy.tenants, *(f"group/{name}" for name in policy.groups)]


def _misfit(tokens: int, public: int, reserved: int, ready: EngineReady) -> str | None:
    """Return why so many tokens cannot be published beside ``public`` blocks of other prefixes and ``reserved``
    ones."""
    blocks = tokens // ready.block_size
    if not ready.publishes:
        return REASONS[PublicState.UNSUPPORTED]
    if not blocks:
        there = counted(tokens, "token")
        return f"it has {there}, and a block of the KV pool has {ready.block_size}: there is nothing to share"
    if blocks * ready.block_size >= ready.max_context:
        return f"it has {counted(tokens, 'token')}, and the model's context is {ready.max_context}"
    if (public + blocks) * MOST > ready.num_blocks or public + blocks + reserved > ready.num_blocks:
        return (
            f"it needs {blocks} of the {ready.num_blocks} blocks of the KV pool; {public} are other prefixes', "
            f"{reserved} are reserved, and public prefixes take half of the pool at most"
        )
    return None


async def tokenize(prefix: policy_model.PublicPrefix, model: ModelSandboxes, next_id: Callable[[], int]) -> array[int]:
    """Return the token ids with which every prompt that begins with the prefix begins.

    Raises:
        UnavailableError: the text sandbox is not there now.
        ApplianceError: it has no such beginning, or one of too many tokens.
    """
    client = TextClient(model, next_id, "")
    common: array[int] | None = None
    taken, refusal = 0, ""
    for prompts in _continued(prefix):
        for prompt in prompts:
            try:
                ids = await client.encode(prompt, time.monotonic() + ENCODE_S)
            except InvalidRequestError as error:
                refusal = str(error)
                continue
            taken += 1
            common = ids if common is None else common[: common_length(common, ids)]
        if taken > 1:
            break
    if common is None or taken < 2:
        raise InvalidRequestError(f"the model's template takes nothing that begins so: {refusal}")
    if len(common) > MAX_PUBLIC_TOKENS:
        raise InvalidRequestError(f"it has {len(common)} tokens; a public prefix has {MAX_PUBLIC_TOKENS} at most")
    return common


def _continued(prefix: policy_model.PublicPrefix) -> list[list[Prompt]]:
    """Return the prefix with its continuations, by kinds of which one is enough."""
    if not prefix.chat:
        return [[TextPrompt(prefix.source + more) for more in CONTINUATIONS]]
    messages = json.loads(prefix.source)
    return [[_conversation([*messages, {"role": role, "content": one}]) for one in TURNS[role]] for role in TURNS]


def _conversation(messages: list[dict[str, str]]) -> ChatPrompt:
    return ChatPrompt(json.dumps({"messages": messages}, ensure_ascii=False, separators=(",", ":")).encode())
