"""The Llama family: RMS norm, rotary grouped-query attention, SwiGLU; weights named as Hugging Face publishes them.

Query, key and value share one matrix, and so do gate and up: two products a layer fewer. The loader writes each
published tensor straight into its rows of the shared matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.attention import AttentionBatch, PagedAttention
from engine.model.config import ModelConfig
from engine.model.layers import Linear, Memory, RmsNorm, silu_mul
from engine.model.rotary import Rotary, rotate

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors of old checkpoints that can be computed."""


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, config: ModelConfig, index: int, memory: Memory) -> None:
        self.index = index
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = RmsNorm(hidden, config.rms_norm_eps, memory)
        self.qkv = Linear.empty(hidden, width, bias=config.attention_bias, memory=memory)
        self.out = Linear.empty(config.num_heads * config.head_dim, hidden, bias=config.attention_bias, memory=memory)
        self.mlp_norm = RmsNorm(hidden, config.rms_norm_eps, memory)
        self.gate_up = Linear.empty(hidden, 2 * inner, bias=config.mlp_bias, memory=memory)
        self.down = Linear.empty(inner, hidden, bias=config.mlp_bias, memory=memory)

    def __call__(
        self, x: Tensor, tables: tuple[Tensor, Tensor], attend: PagedAttention, batch: AttentionBatch
    ) -> Tensor:
        """Advance the residual stream ``x`` of shape ``(N, hidden)``, in place."""
        tokens = x.shape[0]
        qkv = self.qkv(self.attention_norm(x)).view(tokens, -1, self._dim)
        rotated = rotate(qkv[:, : self._heads + self._kv_heads], *tables)
        q, k = rotated[:, : self._heads], rotated[:, self._heads :]
        v = qkv[:, self._heads + self._kv_heads :]
        x += self.out(attend(self.index, q, k, v, batch))
        x += self.down(silu_mul(self.gate_up(self.mlp_norm(x))))
        return x

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """Published names and the memory each is loaded into."""
        prefix = f"model.layers.{self.index}."
        yield prefix + "input_layernorm.weight", self.attention_norm.weight
        yield prefix + "post_attention_layernorm.weight", self.mlp_norm.weight
        head_rows = [heads * self._dim for heads in (self._heads, self._kv_heads, self._kv_heads)]
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        yield from _parts(qkv, self.qkv, head_rows)
        yield from _parts([prefix + "self_attn.o_proj"], self.out, [self.out.loaded.shape[0]])
        inner = self.gate_up.loaded.shape[0] // 2
        yield from _parts([prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], self.gate_up, [inner, inner])
        yield from _parts([prefix + "mlp.down_proj"], self.down, [self.down.loaded.shape[0]])

    def pack(self, *, int8: bool) -> None:
        """Pack the matrices after loading."""
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.pack(int8=int8)


class LlamaForCausalLM:
    """A Llama decoder with its vocabulary projection."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        memory = Memory(dtype, device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = memory.empty(config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(config, index, memory) for index in range(config.num_layers)]
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, memory)
        self.head_is_embedding = config.tie_word_embeddings
        if config.tie_word_embeddings:
            self.head = Linear(self.embedding)
        else:
            self.head = Linear.empty(config.hidden_size, config.vocab_size, bias=False, memory=memory)
        self._rotary = Rotary(config.rope, config.head_dim, device)
        self.packed = False

    @staticmethod
    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes that a checkpoint must have, known before anything is allocated."""
        hidden, inner = config.hidden_size, config.intermediate_size
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        matrices = {
            "self_attn.q_proj": (wide, hidden, config.attention_bias),
            "self_attn.k_proj": (narrow, hidden, config.attention_bias),
            "self_attn.v_proj": (narrow, hidden, config.attention_bias),
            "self_attn.o_proj": (hidden, wide, config.attention_bias),
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, (outputs, inputs, bias) in matrices.items():
                shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (outputs,)
        shapes["model.norm.weight"] = (hidden,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        return shapes

    @staticmethod
    def ignores(config: ModelConfig, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although it is not read."""
        return name.endswith(IGNORED_SUFFIXES) or (config.tie_word_embeddings and name == "lm_head.weight")

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """Published names and the memory each is loaded into: every name of ``shapes``."""
        yield "model.embed_tokens.weight", self.embedding
        for layer in self.layers:
            yield from layer.targets()
        yield "model.norm.weight", self.norm.weight
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head.loaded

    def pack(self, *, int8: bool = False) -> None:
        """Bring all matrices into their fastest form, or into int8. Call once, after loading."""
        for layer in self.layers:
            layer.pack(int8=int8)
        self.head.pack(int8=int8)
        self.packed = True

    def release_embedding(self) -> None:
        """Let go of the embedding: somebody else has taken it over."""
        self.embedding = self.embedding.new_empty(0)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: PagedAttention, batch: AttentionBatch, wanted: Tensor
    ) -> Tensor:
        """Compute one step.

        Args:
            token_ids: int64, shape ``(N,)``.
            positions: int64, shape ``(N,)``.
            attend: the paged attention with its storage.
            batch: metadata of this step.
            wanted: int64, indices of the tokens whose logits are asked for, shape ``(M,)``.

        Returns:
            Logits of shape ``(M, vocab_size)`` in the model's dtype.
        """
        x = F.embedding(token_ids, self.embedding)
        tables = self._rotary.tables(positions, self.dtype)
        for layer in self.layers:
            x = layer(x, tables, attend, batch)
        return self.head(self.norm(x.index_select(0, wanted)))


def _parts(names: list[str], linear: Linear, rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Rows of a shared matrix and bias, under the names of the maps that share it."""
    start = 0
    for name, count in zip(names, rows, strict=True):
        yield name + ".weight", linear.loaded[start : start + count]
        if linear.bias is not None:
            yield name + ".bias", linear.bias[start : start + count]
        start += count
