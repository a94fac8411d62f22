"""Block ids, and the longest known prefix of a request's tokens.

A block id is a keyed hash chain, ``BLAKE2b(key = namespace key, parent id, token ids)``: it names the whole prefix
up to and including the block, for one namespace. Two namespaces cannot meet, since neither can compute the other's
ids: isolation is in the name, not in a check. BLAKE2b's keyed mode is a MAC (RFC 7693, section 2.9), so ids tell a
reader of memory dumps nothing about the tokens either.

Framing: the parent has a fixed width, and the number of tokens comes before the tokens, so no two different inputs
give the same bytes. The ``person`` label separates this use of the key from any other.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

from engine.kv.block_pool import TRANSIENT, BlockPool
from engine.kv.layout import BLOCK_ID_BYTES
from engine.request import Request

PERSON = b"athanor-kv-block"
"""Domain of the hash; 16 bytes, BLAKE2b's limit."""

PERSON_EXACT = b"athanor-kv-exact"
"""Domain of the root for deterministic requests: the same tokens, computed in another order of roundings."""


def block_id(namespace: bytes, parent: bytes, token_ids: array[int]) -> bytes:
    """Id of the block that holds ``token_ids`` (typecode ``I``) after the prefix named by ``parent``."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    data = parent + len(token_ids).to_bytes(4, "little") + token_ids.tobytes()
    return blake2b(data, key=namespace, digest_size=BLOCK_ID_BYTES, person=PERSON).digest()


class PrefixCache:
    """Finds and registers the full blocks of requests in a pool."""

    __slots__ = ("_block_size", "_exact_root", "_pool", "_root", "caching")

    def __init__(self, pool: BlockPool, *, root: bytes, block_size: int, caching: bool = True) -> None:
        """``caching``: whether blocks are found by anybody but the other outputs of the same prompt."""
        self.caching = caching
        self._pool = pool
        self._root = root
        self._exact_root = blake2b(root, digest_size=BLOCK_ID_BYTES, person=PERSON_EXACT).digest()
        self._block_size = block_size

    def shares(self, request: Request) -> bool:
        """Whether the request may find and leave blocks: for its namespace, or for its own family."""
        if request.family is not None and request.family.key is not None:
            return True
        return self.caching and request.retain

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the longest known prefix of the request's tokens, none of them held for it yet.

        At least one token is left out, since its logits have to be computed; all are, when the log-probabilities of
        the prompt are wanted. Hashing stops at the first unknown
        block, so a miss costs one hash.
        """
        if not self.shares(request) or request.num_scored < request.num_prompt:
            return []
        found: list[int] = []
        for index in range((len(request.token_ids) - 1) // self._block_size):
            block = self._pool.find(self._id(request, index))
            if block is None:
                break
            assert self._pool.owner(block) in (request.namespace, TRANSIENT), "a block id met in two namespaces"
            found.append(block)
        return found

    def longest(self, requests: list[Request]) -> Request:
        """Of some requests of one namespace the one with the longest known prefix, the first of equals."""
        find, size = self._pool.find, self._block_size
        best, most = requests[0], 0
        for request in requests:
            ids = request.block_ids
            length, last = 0, (len(request.token_ids) - 1) // size if request.retain else 0
            while length < last:
                if find(ids[length] if length < len(ids) else self._id(request, length)) is None:
                    break
                length += 1
            if length > most:
                best, most = request, length
        return best

    def register(self, request: Request) -> None:
        """Make the request's full, computed blocks findable, of a family with a key of its own those of the prompt;
        those done before are not looked at again."""
        if not self.shares(request):
            return
        full = request.num_computed // self._block_size
        family = request.family
        if family is not None and family.key is not None:
            full = min(full, request.num_prompt // self._block_size)
        for index in range(request.num_registered, full):
            self._pool.register(request.blocks[index], self._id(request, index))
        request.num_registered = max(request.num_registered, full)
        if family is not None and family.key is not None and full > len(family.prompt_ids):
            family.prompt_ids = request.block_ids[:full]

    def forget(self, block_ids: list[bytes]) -> None:
        """Make these blocks, which nobody holds, unfindable: nobody is left who may find them."""
        for block_id_ in block_ids:
            self._pool.drop(block_id_)

    def _id(self, request: Request, index: int) -> bytes:
        """Id of the request's block ``index``; ids before it are known already."""
        ids = request.block_ids
        if index == len(ids):
            size = self._block_size
            parent = ids[-1] if ids else self._exact_root if request.deterministic else self._root
            ids.append(block_id(request.cache_key, parent, request.token_ids[index * size : index * size + size]))
        return ids[index]
