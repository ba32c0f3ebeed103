"""Shared by the checkpoint tests: small runs with every kind of state, and functions that collect state to compare."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, Block, Net, State, loss_of_tokens, make, same_bits
from zeroshard.checkpoint import Reader
from zeroshard.checkpoint.index import digest_of
from zeroshard.loss_scale import DynamicScale

FULL = os.environ.get("ZEROSHARD_FAULTS") == "full"
"""True under `make test-faults`: the tests run with their full counts."""

PRECISIONS = ("fp32", "bf16", "bf16-remainder", "fp16")
PLAN_OF = {plan.name: plan for plan in PLANS}


class Awkward(Net):
    """Net with dropout, buffers, a parameter without elements, one of a single number, and a frozen one."""

    def __init__(self, empty: int = 0) -> None:
        super().__init__(tied=True, blocks=1)
        self.empty = nn.Parameter(torch.zeros(empty, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.arange(11.0), requires_grad=False)  # exact in bf16
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(tokens.float().mean() * 0.1)  # differs between ranks
        logits = super().forward(tokens)
        return nn.functional.dropout(logits * self.gain + self.frozen.mean(), 0.1) + self.empty.sum()


def muon_and_adamw(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices by Muon at their owners, the rest by AdamW in two groups."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and p.numel() and "blocks" in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.01},
        {"params": rest[:2], "weight_decay": 0.0},
        {"params": rest[2:], "lr": 3e-3},
    ]


@dataclass(frozen=True)
class Kind:
    """What is trained, without plan and precision."""

    model: Callable[[], nn.Module] = lambda: Net(blocks=1)
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    defaults: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "foreach": False})
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None


class Run:
    """A sharded model with an optimizer and a scheduler."""

    def __init__(self, rank: int, plan: str, precision: Any, kind: Kind = Kind(), seed: int = 0) -> None:
        self.rank = rank
        self.model = make(kind.model, seed)
        self.handle = zeroshard.shard(self.model, PLAN_OF[plan], units=Block, precision=precision)
        scale = DynamicScale(init=2.0**8, growth_interval=2) if precision == "fp16" else None
        params: Any = kind.groups(self.model) if kind.groups else self.handle
        self.optimizer = zeroshard.ShardedOptimizer(params, kind.optimizer, loss_scale=scale, **kind.defaults)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.losses: list[float] = []

    def train(self, steps: Iterable[int]) -> Run:
        for step in steps:
            self.optimizer.zero_grad()
            loss = loss_of_tokens(self.model, self.rank, 0, step) * random.uniform(0.9, 1.1)
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def save(self, directory: Path | str, step: int, **options: Any) -> Any:
        return zeroshard.save(directory, self.handle, self.optimizer, step=step, extra=self.extra, **options)

    def load(self, directory: Path | str, **options: Any) -> Any:
        return zeroshard.load(directory, self.handle, self.optimizer, **{"extra": self.extra, **options})

    def state(self) -> State:
        """Full main values, weights and optimizer state. Collective."""
        state = {f"main {name}": value for name, value in self.handle.full_state_dict(main=True).items()}
        state |= {f"weights {name}": value for name, value in self.handle.full_state_dict().items()}
        for number, of_parameter in self.optimizer.state_dict()["state"].items():
            for key, value in of_parameter.items():
                state[f"{key} {number}"] = torch.as_tensor(value).clone()
        scale = self.optimizer.state_dict().get("loss_scale", {})
        return state | {f"scale {key}": torch.tensor(float(value)) for key, value in scale.items()}


def seed_all(rank: int) -> None:
    """Seed the random generators differently on each rank."""
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)


def read_all(step: Path) -> State:
    """Every tensor of a step except those of single ranks (`rank/...`), read without a process group."""
    with Reader(step) as reader:
        return {name: reader.tensor(name) for name in reader.manifest.tensors if not name.startswith("rank/")}


def signed(body: bytes) -> bytes:
    """A manifest with this body and the right digest of it."""
    return b'{"digest": "' + digest_of(body).encode() + b'", "manifest": ' + body + b"}\n"


__all__ = [
    "FULL",
    "PLANS",
    "PRECISIONS",
    "Awkward",
    "Kind",
    "Net",
    "Run",
    "make",
    "muon_and_adamw",
    "read_all",
    "same_bits",
    "seed_all",
    "signed",
]
