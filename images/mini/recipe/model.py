"""A plain torch Llama for training, with the parameter names of Hugging Face's checkpoints.

Pre-norm decoder of Touvron et al. (arXiv 2302.13971) with grouped-query attention (arXiv
2305.13245): RMSNorm, rotary positions in the half-split form, SwiGLU, tied embeddings.
Shapes: B batch, T tokens, D hidden, N query heads, K key-value heads, H width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the network; the defaults give 7.72 million parameters, 15.4 MB as bfloat16."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 768
    num_hidden_layers: int = 5
    num_attention_heads: int = 12
    num_key_value_heads: int = 2
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and no bias."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
        """Mix each position with those before it."""
        q_BNTH = _rotate(self._heads(self.q_proj(x_BTD)), cos_BTH, sin_BTH)
        k_BKTH = _rotate(self._heads(self.k_proj(x_BTD)), cos_BTH, sin_BTH)
        v_BKTH = self._heads(self.v_proj(x_BTD))
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k_BNTH = k_BKTH.repeat_interleave(groups, dim=1)
        v_BNTH = v_BKTH.repeat_interleave(groups, dim=1)
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        return self.o_proj(out_BNTH.transpose(1, 2).reshape(x_BTD.shape))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
        """One layer of the network."""
        x_BTD = x_BTD + self._drop(self.self_attn(self.input_layernorm(x_BTD), cos_BTH, sin_BTH))
        return x_BTD + self._drop(self.mlp(self.post_attention_layernorm(x_BTD)))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD


class Decoder(nn.Module):
    """Embeddings, layers and the last norm: the part that checkpoints call `model`."""

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class MiniLlama(nn.Module):
    """The whole network; `state_dict` has the names of a Hugging Face Llama with tied head.

    In training, `dropout` of what each layer adds to the residual stream is left out.
    """

    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape, dropout)
        self._init_weights()

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Logits, float, [kept, vocab], of the positions where `keep_BT` is true.

        `positions_BT` may jump, but must grow along a row and stay under
        `max_position_embeddings`.
        """
        return self.logits(self.hidden(ids_BT, positions_BT)[keep_BT])

    def hidden(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """What the last layer leaves, before the last norm."""
        cos_BTH, sin_BTH = self._rotary(positions_BT)
        x_BTD = self.model.embed_tokens(ids_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos_BTH, sin_BTH)
        return x_BTD

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the next token, from rows of `hidden`."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def _rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32, device=positions_BT.device)
        frequency_H = self.shape.rope_theta ** (-half / self.shape.head_dim)
        angle_BTH = positions_BT[..., None].float() * frequency_H
        angle_BTH = torch.cat((angle_BTH, angle_BTH), dim=-1)
        return angle_BTH.cos()[:, None], angle_BTH.sin()[:, None]

    def _init_weights(self) -> None:
        """Normal weights; what writes to the residual stream is scaled down by depth."""
        depth = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                width = self.shape.hidden_size**-0.5
                scale = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                std = 0.02 if "embed_tokens" in name else width * scale * 0.6
                nn.init.normal_(parameter, std=std)


def _rotate(x_BNTH: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864), pairs split into halves."""
    first, second = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_BTH + torch.cat((-second, first), dim=-1) * sin_BTH
