"""Several outputs of one prompt: one submission becomes as many requests, and the prompt is computed once.

The first request, the *leader*, is queued alone; the others *follow*: they wait until its whole prompt is computed,
then find its full blocks as cached ones (the rest of the last block is computed again, one short chunk each). If the
leader ends before that, the next one leads. No other module knows families: a sibling is a request like any other,
whose rows, blocks and preemptions are its own.

Where blocks may not outlive their request, or prefixes are not cached at all, the family has a key of its own, under
which only its members find the prompt's blocks; with the last of them those blocks are free, and zeroed.

Output ``i`` draws with seed ``seed + i`` (modulo 2**64): it is what a request for a single output gives with that seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from engine.core.request import Request
from isolation.ipc.engine import Submit
from isolation.ipc.messages import NAMESPACE_KEY_BYTES

PERSON = b"athanor-siblings"
"""Domain of a family's own key; 16 bytes, BLAKE2b's limit."""

SEEDS = 1 << 64


class Siblings:
    """The live requests of one submission."""

    __slots__ = ("_live", "following", "leader", "prompt_ids")

    def __init__(self, leader: Request, others: list[Request], key: bytes | None) -> None:
        """``key``: key of the prompt's blocks when only members may find them; None: the namespace's."""
        self.leader = leader
        self.following = others
        """Members that are not queued yet."""
        self.prompt_ids: list[bytes] = []
        """Ids of the prompt's full blocks, once they are computed and where the key is the family's own."""
        self._live = len(others) + 1
        if key is not None:
            for member in (leader, *others):
                member.kv.key, member.kv.family_ids = key, self.prompt_ids

    def release(self) -> list[Request]:
        """Give the members to queue now that the leader's prompt is computed."""
        following, self.following = self.following, []
        return following

    def end(self, request: Request) -> Request | None:
        """Take a member out; gives the one that leads from now on and has to be queued, if there is one."""
        self._live -= 1
        if request in self.following:
            self.following.remove(request)
            return None
        if request is self.leader and self.following:
            self.leader = self.following.pop(0)
            return self.leader
        return None

    @property
    def over(self) -> bool:
        """Whether all members have ended."""
        return not self._live


def split(submit: Submit) -> list[Submit]:
    """The submissions of the single outputs, under consecutive ids."""
    seed = submit.sampling.seed
    return [
        replace(
            submit,
            request=submit.request + index,
            choices=1,
            prompt_logprobs=submit.prompt_logprobs if index == 0 else -1,
            sampling=replace(submit.sampling, seed=(seed + index) % SEEDS),
        )
        for index in range(submit.choices)
    ]


def make_siblings(submit: Submit, make: Callable[[Submit], Request], *, prefix_caching: bool) -> Siblings:
    """Make the requests of a submission for several outputs."""
    leader, *others = [make(one) for one in split(submit)]
    key = None
    if not (prefix_caching and submit.retain):
        order = leader.spec.order.to_bytes(8, "little")
        key = blake2b(order, key=submit.namespace, digest_size=NAMESPACE_KEY_BYTES, person=PERSON).digest()
    return Siblings(leader, others, key)
