"""A small modern GPT: rotary positions, RMSNorm before each part and on queries and keys, SwiGLU, no biases.

Shapes: B sequences, T tokens, C features, H heads of D = C / H features, V tokens in the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:  # benchmarks use this model without the trainer's packages
    from zeroshard.train.config import ModelConfig


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_norm = nn.RMSNorm(width // heads)
        self.key_norm = nn.RMSNorm(width // heads)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.query_key_value(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # 3 x [B, H, T, D]
        q, k = rotate(self.query_norm(q), rotation), rotate(self.key_norm(k), rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return mixed


class SwiGLU(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (width * 8 // 3 + 31) // 32 * 32  # as many parameters as the classic 4 x width with two matrices
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """The sharding unit."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """`forward(tokens, targets)` returns the mean loss in nats per token; `forward(tokens)` returns the logits."""

    rotation: Tensor  # fp32 [2, context, D / 2]: cosines and sines

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = None if config.tied else nn.Linear(config.width, vocabulary, bias=False)
        self.register_buffer("rotation", rotations(config.context, config.width // config.heads), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Each block starts as the identity and the logits near zero, so the first loss is that of a uniform guess."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02 * self.head.in_features**-0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets int64 [B, T] -> fp32 0-d loss, or without targets fp32 logits [B, T, V]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[:, : tokens.shape[1]])
        x = self.norm(x)
        logits = F.linear(x, self.embedding.weight if self.head is None else self.head.weight).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotations(context: int, dim: int) -> Tensor:
    """fp32 [2, context, dim / 2]: cosine and sine of each position's angle in each plane."""
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of [B, H, T, D] by its position's angle; computed in fp32."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
