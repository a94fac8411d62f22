"""A decoder: embedding, layers of one family, norm, vocabulary projection; whole, or one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.attention import Attention
from engine.model.adapters.bank import AdapterBank
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.fields import Fields
from engine.model.layers.blocks import NO_ADAPTERS, Layer, StepContext
from engine.model.layers.layers import RmsNorm
from engine.model.layers.rotary import Rotary
from engine.model.layers.sharded import NormMaker, VocabEmbedding, VocabHead, rms_norm

LayerFactory = Callable[[ModelConfig, Checklist, int, int], Layer]
"""Builds a layer from: the description, the checklist of the layer's own prefix, the layer's number in the model, and
its place in this rank's KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderForm:
    """In what decoders differ outside of their layers."""

    prefix: str = "model"
    """Prefix of every published name but the head's."""
    embedding_scale: float = 1.0
    logit_cap: float = 0.0
    """Logits become ``cap * tanh(logit / cap)``; 0: they stay."""
    logit_divisor: float = 1.0
    norm: NormMaker = rms_norm
    """Makes the last norm."""


PLAIN_DECODER = DecoderForm()


class Decoder:
    """What runs. The first stage of a pipeline takes token ids, the last gives logits."""

    def __init__(
        self,
        config: ModelConfig,
        checklist: Checklist,
        layer: LayerFactory,
        rotaries: tuple[Rotary, ...],
        form: DecoderForm = PLAIN_DECODER,
    ) -> None:
        self.config = config
        self.form = form
        self.dtype, self.device = checklist.memory.dtype, checklist.memory.device
        # The factor has the model's dtype, as published models were trained; it stays on the host.
        self._embedding_scale = torch.tensor(form.embedding_scale, dtype=self.dtype).item()
        self.parallel = checklist.parallel
        self.rotaries = rotaries
        self._linears = checklist.linears
        self.sites = checklist.sites
        """What adapters may change."""
        self.bank: AdapterBank | None = None
        """Adapters of the model; None: it has none."""
        stage = checklist.parallel.stage(config.num_layers)
        first, last = stage.start == 0, stage.stop == config.num_layers
        tied = config.tie_word_embeddings
        below = checklist.under(form.prefix)
        size, hidden = config.vocab_size, config.hidden_size
        needed = first or (last and tied)
        self._embedding = VocabEmbedding(below, "embed_tokens", vocab_size=size, width=hidden) if needed else None
        self.takes_ids = first
        self.layers = [layer(config, below.under("layers", index), index, place) for place, index in enumerate(stage)]
        self._norm = form.norm(below, "norm", hidden, config.rms_norm_eps) if last else None
        self.head_is_embedding = tied
        shared = self._embedding if tied else None
        self._head = VocabHead(checklist, "lm_head", vocab_size=size, width=hidden, tied=shared) if last else None
        self._labels: Tensor | None = None
        if last and config.labels:
            # As the checkpoint has it: a few rows, never packed.
            memory = checklist.memory
            self._labels = torch.empty(config.labels, hidden, dtype=memory.dtype, device=memory.device)
            checklist.under("score").want("weight", (config.labels, hidden), self._labels)
        self.scaled = checklist.memory.scaled
        """Whether maps of layers are held in 8 bits (``engine.model.layers.scaled``)."""
        self.packed = checklist.memory.final
        """Whether its matrices have the form that they keep."""

    @property
    def plain(self) -> bool:
        """Whether nothing but the layers tells it from a Llama."""
        form = self.form
        scaled = form.embedding_scale != 1.0 or form.logit_divisor != 1.0 or form.logit_cap
        whole = len(self.rotaries) == 1 and self.rotaries[0].width == self.config.head_dim
        return not scaled and whole and form.norm is rms_norm

    @property
    def embedding(self) -> VocabEmbedding:
        """The embedding, of a model that has one."""
        assert self._embedding is not None, "this stage has no embedding"
        return self._embedding

    @property
    def norm(self) -> RmsNorm:
        """The last norm, of a model that has one."""
        assert self._norm is not None, "this stage has no last norm"
        return self._norm

    @property
    def head(self) -> VocabHead:
        """The vocabulary projection, of a model that has one."""
        assert self._head is not None, "this stage has no head"
        return self._head

    @property
    def labels(self) -> Tensor:
        """The classification head, ``(labels, hidden)``, of a model that has one."""
        assert self._labels is not None, "this stage has no classification head"
        return self._labels

    def pack(self, *, int8: bool = False) -> None:
        """Bring all matrices into their fastest form, or into int8; those that somebody has taken over stay as they
        are. Call once, after loading."""
        for linear in self._linears:
            if linear.weight is not None:
                linear.pack(int8=int8)
        self.packed = True

    def release_embedding(self) -> None:
        """Release the embedding, which a backend has taken over."""
        self.embedding.weight = self.embedding.weight.new_empty(0)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attention,
        wanted: Tensor,
        adapters: Tensor = NO_ADAPTERS,
        *,
        alone: bool = False,
    ) -> Tensor:
        """Compute one step of a whole model, or of one stage of a pipeline.

        Args:
            token_ids: int64, shape ``(N,)``.
            positions: int64, shape ``(N,)``.
            attend: attention of this step.
            wanted: int64, indices of the tokens whose logits are asked for, shape ``(M,)``.
            adapters: int64, the adapter of each token, or empty; see ``StepContext``.
            alone: take the adapters' products row by row, so that no row's numbers depend on others.

        Returns:
            Logits of shape ``(M, vocab_size)`` in the model's dtype, the same on every rank of the last stage; on ranks
            of other stages zeros in their place, which take no memory.
        """
        if self.parallel.pipe is not None:
            return self._advance_stage(token_ids, positions, attend, wanted)
        if not len(adapters):
            return self.logits(self.advance(self.embed(token_ids), positions, attend), wanted)
        assert self.bank is not None, "rows with an adapter came in, and the model has none"
        with self.bank.step(adapters, alone=alone):
            x = self.advance(self.embed(token_ids), positions, attend, adapters)
            self.bank.choose(adapters.index_select(0, wanted), alone=alone)
            return self.logits(x, wanted)

    def _advance_stage(self, token_ids: Tensor, positions: Tensor, attend: Attention, wanted: Tensor) -> Tensor:
        """Take the residual stream from the stage before, through the layers here, and on to the next stage."""
        pipe = self.parallel.pipe
        assert pipe is not None, "there are other stages"
        hidden = self.config.hidden_size
        x = self.embed(token_ids) if self.takes_ids else pipe.receive((len(token_ids), hidden), self.dtype)
        x = self.advance(x, positions, attend)
        if self._head is not None:
            return self.logits(x, wanted)
        pipe.send(x)
        return x.new_zeros(1, 1).expand(len(wanted), self.config.vocab_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream of these ids (int64, ``(N,)``) before the first layer, ``(N, hidden)``."""
        x = self.embedding(token_ids)
        return x if self.form.embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def rotations(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosines and signed sines of these positions, one pair for each rotary embedding."""
        return tuple(rotary.tables(positions, self.dtype) for rotary in self.rotaries)

    def advance(self, x: Tensor, positions: Tensor, attend: Attention, adapters: Tensor = NO_ADAPTERS) -> Tensor:
        """Take the residual stream through this stage's layers; ``x`` may be changed."""
        step = StepContext(positions, self.rotations(positions), attend, adapters)
        for layer in self.layers:
            x = layer(x, step)
        return x

    def logits(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Logits of some rows of the residual stream behind the last layer."""
        return self.project(self.norm(x.index_select(0, wanted)))

    def project(self, normed: Tensor) -> Tensor:
        """Logits of rows behind the last norm, ``(M, hidden)``."""
        return self.bound_logits(self.head(normed))

    def bound_logits(self, logits: Tensor) -> Tensor:
        """Logits as the vocabulary's map gives them, divided and capped where the family does so; in place."""
        if self.form.logit_divisor != 1.0:
            logits = logits.div_(self.form.logit_divisor)
        if self.form.logit_cap:
            logits = logits.div_(self.form.logit_cap).tanh_().mul_(self.form.logit_cap)
        return logits


@dataclass(frozen=True, slots=True)
class Family:
    """What the registry knows of an architecture."""

    read: Callable[[Fields], ModelConfig]
    """Checks the fields of a ``config.json``."""
    build: Callable[[ModelConfig, Checklist], Decoder]
    """Makes the model, or this rank's part of it, in the checklist's memory, with everything on the list."""

    @classmethod
    def of_layers(
        cls, read: Callable[[Fields], ModelConfig], layer: LayerFactory, *, unread: tuple[str, ...] = ()
    ) -> Family:
        """Family of decoders with one rotary embedding and nothing of their own outside of their layers; ``unread``:
        suffixes of tensors that are not read."""

        def build(config: ModelConfig, checklist: Checklist) -> Decoder:
            checklist.ignore_suffixes(*unread)
            return Decoder(config, checklist, layer, (Rotary(config.rope, config.head_dim, checklist.memory.device),))

        return cls(read, build)
