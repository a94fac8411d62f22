"""Block ids, and the longest known prefix of a request's tokens.

A block id is a keyed hash chain, ``BLAKE2b(key = namespace key, parent id, token ids)``: it names the whole prefix
up to and including the block, for one namespace. Two namespaces cannot meet, since neither can compute the other's
ids: isolation is in the name, not in a check. BLAKE2b's keyed mode is a MAC (RFC 7693, section 2.9), so ids tell a
reader of memory dumps nothing about the tokens either.

In a model with several block tables the ids of one chain serve all of them: a block is named by the prefix up to its
end and the number of its table. Layers with a window need of a prefix only the blocks that the next token sees, so a
prefix is known when the blocks of whole contexts up to its end are, and of each other table those that are seen.

Where a tenant's end users have namespaces of their own, the key of a chain is the end user's: blocks of two of them
cannot meet either, and have one account and one owner, the tenant.

A chain begins at a root that differs between models, and between the adapters with which a model computes: what was
computed with one is found with no other, and not without one.

A chain may begin with the ids of a public prefix (``engine.core.kv.public``), which has a key of its own; the first id
behind it is under the namespace's key again, with the last public id as its parent (of a deterministic request with a
hash of it, since one public block serves both kinds of requests and what follows must not). Models with windows have
no public prefixes.

Framing: the parent has a fixed width, and the number of tokens comes before the tokens, so no two different inputs
give the same bytes. The ``person`` label separates this use of the key from any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar

from engine.core.kv.block_pool import BlockPool
from engine.core.kv.contents import TRANSIENT
from engine.core.kv.groups import granule
from engine.core.kv.hold import KvHold
from engine.core.kv.layout import BLOCK_ID_BYTES, FULL, NULL_BLOCK, KvGroup
from engine.core.kv.public import PublicBlocks
from engine.core.specification import Specification
from isolation.ipc.engine import Submit

PERSON = b"athanor-kv-block"
"""Domain of the hash; 16 bytes, BLAKE2b's limit."""

PERSON_EXACT = b"athanor-kv-exact"
"""Domain of the root for deterministic requests: the same tokens, computed in another order of roundings."""


def block_id(namespace: bytes, parent: bytes, token_ids: array[int] | memoryview) -> bytes:
    """Id of the block that holds ``token_ids`` (typecode ``I``) after the prefix named by ``parent``.

    No copy of the tokens is made: it would lie in freed memory afterwards.
    """
    hashed = blake2b(
        parent + len(token_ids).to_bytes(4, "little"), key=namespace, digest_size=BLOCK_ID_BYTES, person=PERSON
    )
    hashed.update(token_ids)
    return hashed.digest()


@dataclass(frozen=True, slots=True)
class Hit:
    """A known prefix, none of whose blocks is held for the request yet."""

    num_tokens: int
    blocks: list[int]
    """Blocks of whole contexts, in order."""
    local: tuple[list[int], ...] = ()
    """Tables with a bounded reach: the null block, then the blocks that the next token sees."""


NO_HIT = Hit(0, [])
"""Nothing is known; never changed."""


class CachedRequest(Protocol):
    """What the cache reads of a request (``engine.core.request.Request``)."""

    spec: Specification
    kv: KvHold
    token_ids: array[int]
    num_scored: int

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is present."""


AnyRequest = TypeVar("AnyRequest", bound=CachedRequest)


class PrefixCache:
    """Finds and registers the full blocks of requests in a pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        root: bytes,
        block_size: int,
        caching: bool = True,
        groups: tuple[KvGroup, ...] = (),
        adapters: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """``caching``: whether blocks are found by other requests than the other outputs of the same prompt.
        ``groups``: the block tables, as in ``KvLayout``. ``adapters``: roots in place of ``root``, by the digests of
        the adapters with which blocks are computed."""
        self.caching = caching
        self._pool = pool
        self._roots = {b"": root, **(adapters or {})}
        self._exact_roots = {digest: _exact(one) for digest, one in self._roots.items()}
        self.public = PublicBlocks(pool, block_size)
        self.noted: list[tuple[bytes, list[bytes]]] | None = None
        """Namespaces, and ids of the blocks of prompts that can be found, since this list was last cleared (``note``).
        None where nobody asks."""
        self._block_size = block_size
        self._granule = granule(groups) if groups else block_size
        named = list(zip(groups, map(_table_name, range(len(groups))), strict=True))
        self._tables = [(group.block_size // block_size, name) for group, name in named]
        """Number of ids of the chain that a block of each table spans, and the table's name; none for one of whole
        contexts."""
        self._keeps_all = not groups or groups[0].reach == FULL
        self._local = [(group, name) for group, name in named if group.reach != FULL]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    def knows(self, origin: bytes) -> bool:
        """Whether chains of requests with this adapter have a root: whether the engine computes with it."""
        return origin in self._roots

    def shares(self, request: CachedRequest) -> bool:
        """Whether the request may find and leave blocks: under its ``kv_key``, or under its family's own key."""
        return request.kv.family_ids is not None or (self.caching and request.spec.retain)

    def match(self, request: CachedRequest) -> Hit:
        """The longest known prefix of the request's tokens.

        At least one token is left out, since its logits have to be computed; all are, when the log-probabilities of
        the prompt are wanted. Hashing stops at the first unknown block, so a miss costs one hash where some layers
        keep everything.
        """
        if request.spec.public:
            self._begin(request.spec, request.kv, request.token_ids)
        if not (self.shares(request) or request.kv.num_public) or request.num_scored < request.spec.num_prompt:
            return NO_HIT
        if self._local:
            return self._match_tables(request)
        found = self._match(request)
        if request.kv.num_public and len(found) == request.kv.num_public:
            found = self._own(request, found)
        return Hit(len(found) * self._block_size, found) if found else NO_HIT

    def _match(self, request: CachedRequest) -> list[int]:
        found: list[int] = []
        most = (len(request.token_ids) - 1) // self._block_size if self.shares(request) else request.kv.num_public
        for index in range(most):
            block = self._pool.find(self._id(request.kv, request.token_ids, index))
            if block is None:
                break
            key = request.spec.kv_key if index >= request.kv.num_public else request.spec.public
            assert self._pool.owner(block) in (key, TRANSIENT), "a block id met in two namespaces"
            found.append(block)
        return found

    def _begin(self, spec: Specification, kv: KvHold, token_ids: array[int]) -> None:
        """Begin the chain of a request that holds no blocks with its public prefix, as far as that is resident."""
        resident, count = self.public.of(spec, token_ids)
        if resident is not kv.public:
            kv.begin(resident, resident.ids[:count] if resident is not None else ())

    def _own(self, request: CachedRequest, found: list[int]) -> list[int]:
        """The chain without the public prefix, where more of that is known: from before it was published."""
        if not self.shares(request):
            return found
        public, ids = request.kv.public, request.kv.ids
        request.kv.begin(None, ())
        own = self._match(request)
        if len(own) <= len(found):
            request.kv.begin(public, tuple(ids[: len(found)]))
            request.kv.ids = ids
            return found
        return own

    def chain(self, submit: Submit) -> Iterator[bytes]:
        """Ids of the blocks that ``match`` would look for, one after the other; for models with one block table."""
        spec, token_ids = Specification.of(submit), submit.token_ids
        kv = KvHold.of(spec)
        self._begin(spec, kv, token_ids)
        for index in range((len(token_ids) - 1) // self._block_size):
            yield self._id(kv, token_ids, index)

    def longest(self, requests: Sequence[AnyRequest]) -> AnyRequest:
        """The request with the longest known prefix, of some of one namespace; the first of equals."""
        if self._local:
            return max(requests, key=lambda request: self.match(request).num_tokens)
        # Several requests are looked at for each that is admitted: a call less for each block is worth it.
        known, size = self._pool.contents.by_id, self._block_size
        best, most = requests[0], 0
        for request in requests:
            spec, kv, token_ids = request.spec, request.kv, request.token_ids
            if spec.public:
                self._begin(spec, kv, token_ids)
            ids = kv.ids
            length, last = 0, (len(token_ids) - 1) // size if spec.retain else 0
            while length < last:
                if (ids[length] if length < len(ids) else self._id(kv, token_ids, length)) not in known:
                    break
                length += 1
            if length > most:
                best, most = request, length
        return best

    def register(self, request: CachedRequest) -> None:
        """Make the request's full, computed blocks findable, of a family with a key of its own those of the prompt;
        those done before are not looked at again."""
        if not self.shares(request):
            return
        kv = request.kv
        full = request.num_computed // self._block_size
        if kv.family_ids is not None:
            full = min(full, request.spec.num_prompt // self._block_size)
        if self._local:
            self._register_tables(request, full)
        else:
            ids, known, blocks, register = kv.ids, len(kv.ids), kv.blocks, self._pool.register
            for index in range(kv.num_registered, full):
                register(blocks[index], ids[index] if index < known else self._id(kv, request.token_ids, index))
        kv.num_registered = max(kv.num_registered, full)
        if kv.family_ids is not None and full > len(kv.family_ids):
            kv.family_ids[:] = kv.ids[kv.num_public : full]

    def note(self, request: CachedRequest) -> None:
        """Note the full blocks of the request's prompt that can be found now, each once, also those that were found
        for it. Left out is what no other host looks for: what is not kept, or is for deterministic requests alone, and
        what begins with a public prefix."""
        kv, spec = request.kv, request.spec
        if self.noted is None or self._local or not (self.caching and spec.retain):
            return
        if kv.exact or spec.public or kv.family_ids is not None:
            return
        full = min(kv.num_registered, spec.num_prompt // self._block_size)
        if full > kv.num_noted:
            self.noted.append((spec.kv_key, kv.ids[kv.num_noted : full]))
            kv.num_noted = full

    def forget(self, block_ids: list[bytes]) -> None:
        """Make the blocks of these ids of the chain, in all tables, unfindable; their content is zeroed when no
        request holds them any longer."""
        names = [name for _, name in self._tables] if self._local else [b""]
        for block_id_ in block_ids:
            for name in names:
                self._pool.forget(block_id_ + name)

    def disown(self, request: CachedRequest) -> None:
        """Make all that the request registered unfindable, also what it holds no longer: it is wrong."""
        self.forget(request.kv.ids[request.kv.num_public : request.kv.num_registered])

    def _match_tables(self, request: CachedRequest) -> Hit:
        """Match in several tables, or one with a bounded reach: first as far as whole contexts are known, then
        back from there to the first place whose surroundings are."""
        step = self._granule
        length = (len(request.token_ids) - 1) // step * step
        full: list[int] = []
        if self._keeps_all:
            span, name = self._tables[0]
            size = span * self._block_size
            while (len(full) + 1) * size <= length:
                block = self._known(request, (len(full) + 1) * span - 1, name)
                if block is None:
                    break
                full.append(block)
            length = len(full) * size // step * step
        while length:
            local, missing = self._look_back(request, length)
            if missing is None:
                break
            length = missing // step * step
        if not length:
            return NO_HIT
        if full:
            del full[length // (self._tables[0][0] * self._block_size) :]
        return Hit(length, full, tuple(local))

    def _look_back(self, request: CachedRequest, length: int) -> tuple[list[list[int]], int | None]:
        """Blocks that the token behind a prefix of this length sees, by table with a bounded reach; or where
        the last unknown one begins: no longer prefix is known that ends behind that place."""
        tables: list[list[int]] = []
        for group, name in self._local:
            span = group.block_size // self._block_size
            stop, first = length // group.block_size, group.first_block(length)
            table = [NULL_BLOCK] * stop
            # Where no layer keeps everything, one block has to be known even at the start of a chunk: what is
            # not computed is not cached.
            last = first if self._keeps_all else min(first, stop - 1)
            for index in range(stop - 1, last - 1, -1):
                block = self._known(request, (index + 1) * span - 1, name)
                if block is None:
                    return [], index * group.block_size
                if index >= first:
                    table[index] = block
            tables.append(table)
        return tables, None

    def _known(self, request: CachedRequest, index: int, name: bytes) -> int | None:
        for place in range(len(request.kv.ids), index + 1):
            self._id(request.kv, request.token_ids, place)
        block = self._pool.find(request.kv.ids[index] + name)
        owner = None if block is None else self._pool.owner(block)
        assert owner in (None, request.spec.kv_key, TRANSIENT), "a block id met in two namespaces"
        return block

    def _register_tables(self, request: CachedRequest, full: int) -> None:
        tables = [request.kv.blocks, *request.kv.local] if self._keeps_all else request.kv.local
        for index in range(request.kv.num_registered, full):
            chain_id = self._id(request.kv, request.token_ids, index)
            for table, (span, name) in zip(tables, self._tables, strict=True):
                if (index + 1) % span == 0 and table[index // span] != NULL_BLOCK:
                    self._pool.register(table[index // span], chain_id + name)

    def _id(self, kv: KvHold, token_ids: array[int], index: int) -> bytes:
        """Id of the tokens up to the end of block ``index`` of the smallest size. The only place that extends a chain:
        lookup, caching and spill all take their ids from here; ids before ``index`` are known already."""
        ids = kv.ids
        if index == len(ids):
            size = self._block_size
            parent = ids[-1] if ids and not kv.exact else self._parent(kv)
            # An array with a view on it cannot grow, so the view ends here.
            with memoryview(token_ids)[index * size : index * size + size] as part:
                ids.append(block_id(kv.key, parent, part))
        return ids[index]

    def _parent(self, kv: KvHold) -> bytes:
        """The parent of the id behind those that a request has, the first of which may be a public prefix's."""
        if not kv.ids:
            return (self._exact_roots if kv.exact else self._roots)[kv.origin]
        return _exact(kv.ids[-1]) if kv.exact and len(kv.ids) == kv.num_public else kv.ids[-1]


def _exact(parent: bytes) -> bytes:
    """What stands in place of a parent that deterministic requests have in common with others."""
    return blake2b(parent, digest_size=BLOCK_ID_BYTES, person=PERSON_EXACT).digest()


def _table_name(place: int) -> bytes:
    """What comes behind an id of the chain in the ids of one table's blocks."""
    return bytes([place])
