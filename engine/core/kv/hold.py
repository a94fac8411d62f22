"""What one request has of the KV pool: block tables, rights, and the chain of ids under which its blocks are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.kv.contents import TRANSIENT
from engine.core.kv.public import Resident
from engine.core.kv.quota import KvAccount
from engine.core.specification import Specification


@dataclass(slots=True, eq=False)
class KvHold:
    """Block tables, rights and block ids of one request."""

    owner: bytes
    """Owner that its blocks are stamped with."""
    key: bytes
    """Key of its block ids: ``kv_key``, that of its end user, or one that only its siblings have."""
    exact: bool
    """Whether its blocks are for deterministic requests alone."""
    origin: bytes = b""
    """Digest of the adapter with which its blocks are computed, or nothing."""
    account: KvAccount = field(init=False)
    """The account that its blocks count for; set while the request is live."""
    ids: list[bytes] = field(default_factory=list)
    """Ids of the first full blocks, as far as they were needed."""
    family_ids: list[bytes] | None = None
    """Ids of the prompt's full blocks, shared with its siblings; only where they have a key of their own."""
    public: Resident | None = None
    """The public prefix that the chain begins with."""
    num_public: int = 0
    """Leading blocks that are the public prefix's."""
    blocks: list[int] = field(default_factory=list)
    """Table of the layers that keep everything; empty when the model has none."""
    local: list[list[int]] = field(default_factory=list)
    """Tables of the layers that keep a window or a chunk, one a reach; the null block where nothing is kept."""
    rights: int = 0
    """Blocks that ``local`` may hold; while the request decodes, the blocks that it does hold."""
    capacity: int = 0
    """Tokens that ``blocks`` hold."""
    num_registered: int = 0
    """Leading blocks that can be found, or were offered to the pool."""
    num_noted: int = 0
    """Leading blocks of the prompt that were noted as computed (``PrefixCache.note``)."""
    num_shared: int = 0
    """Leading blocks that were found in the cache when the request got its row."""

    @classmethod
    def of(cls, spec: Specification) -> KvHold:
        """Begin with no blocks."""
        owner = spec.kv_key if spec.retain else TRANSIENT
        return cls(owner, spec.user or spec.kv_key, spec.deterministic, spec.origin)

    def begin(self, public: Resident | None, ids: Sequence[bytes]) -> None:
        """Begin the chain with the ids of a public prefix, or with none; only while there are no blocks."""
        assert not self.blocks, "a request with blocks has its chain"
        self.public, self.num_public, self.ids = public, len(ids), list(ids)

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept from others: those in tables, and rights."""
        return len(self.blocks) + self.rights
