"""The models whose plans are compared with what the engine holds, sends and writes. Each takes `tests.kit`'s tokens and
returns logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.kit import HIDDEN, LENGTH, VOCAB, WIDTH, Block, Net
from zeroshard.layout.cuts import SIZES
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.train.model import GPT
from zeroshard.train.model import Block as GPTBlock


class Tied(Net):
    """With buffers, and a head that is the embedding. `frozen`: embedding and first block are frozen, and a part of a
    block in the middle."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__(tied=True, blocks=4)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(7), persistent=False)
        if frozen:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer, and a trainable matrix of rank 2 that is added to it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Lora(Net):
    """Everything is frozen but the adapters in the blocks."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)


class Experts(nn.Module):
    """Four experts, each of which chooses a third of the tokens (Zhou et al., 2022), so each has tokens on every rank.
    `fused`: their weights are in two tensors of three dimensions, as in Mixtral; else each expert is a module."""

    def __init__(self, fused: bool, number: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, number, bias=False)
        if fused:
            self.up = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / 5)
            self.down = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 5)
        else:
            self.experts = nn.ModuleList(_expert() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores, chosen = self.router(tokens).float().softmax(-1).topk(tokens.shape[0] // 3, dim=0)
        parts = [self._expert(number, tokens[places]) for number, places in enumerate(chosen.T)]
        found = torch.zeros_like(tokens)
        for part, places, score in zip(parts, chosen.T, scores.T, strict=True):
            found = found.index_add(0, places, (part * score[:, None]).to(found.dtype))
        return x + found.view_as(x)

    def _expert(self, number: int, tokens: Tensor) -> Tensor:
        if hasattr(self, "up"):
            return torch.tanh(tokens @ self.up[number]) @ self.down[number]
        y: Tensor = self.experts[number](tokens)
        return y


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False))


class Mixture(Net):
    """Plain blocks and blocks of experts, in turn."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.blocks.insert(1, Experts(fused=True))
        self.blocks.append(Experts(fused=False))


class Primes(nn.Module):
    """Lengths that are prime numbers, a parameter without dimensions, one of one element, and one that is longer than a
    piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 7)
        self.gain, self.offset = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList([Block(7, 13), Block(7, 37_501)])
        self.head = nn.Linear(7, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain + self.offset
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


assert SIZES["cpu"].piece < 7 * 37_501


@dataclass(frozen=True)
class Planned:
    """A model and its units."""

    build: Callable[[], nn.Module]
    units: UnitPolicy


_SHAPE = SimpleNamespace(layers=2, width=48, heads=3, context=LENGTH, tied=False, dropout=0.0)

MODELS = {
    "tied": Planned(Tied, Block),
    "the trainer's": Planned(partial(GPT, _SHAPE, VOCAB), GPTBlock),
    "LoRA": Planned(Lora, Block),
    "experts": Planned(Mixture, [Block, Experts]),
    "odd sizes": Planned(Primes, Block),
}
FROZEN = Planned(partial(Tied, frozen=True), Block)
