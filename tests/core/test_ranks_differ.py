"""Ranks that do different things trained wrong without a word: one rank alone asked for the norm of a gradient and got
the bytes of another exchange; a scheduler that was fed each rank's own loss gave each part of a parameter another
learning rate; gradients that nobody had averaged were applied part by part."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.testing import run_ranks

SHARDED = ["zero1", "zero2", "zero3"]
PLANS = ["ddp", *SHARDED]
Case = Callable[[int, nn.Module, zeroshard.Handle, zeroshard.ShardedOptimizer], object]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()


def said_by_all(num_ranks: int, run: Callable[[int], object]) -> str:
    """What every rank raises, the same on all."""

    def catch(rank: int) -> str:
        try:
            run(rank)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    found = run_ranks(catch, num_ranks, timeout=60.0, collective_timeout=20.0)
    assert len(set(found)) == 1, found
    return str(found[0])


# One rank alone asks ------------------------------------------------------------------------------------------------


def clip(rank: int, model: nn.Module, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norm(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        model[0].weight.grad.norm().item()


def other_norm(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    model[0].weight.grad.norm(1 + rank)


def state(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 1:
        optimizer.state[model[0].weight]


def zeros(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        optimizer.count_zero_gradients()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (clip, "rank 0 at the 2-norm of a p.grad"),
        (norm, "rank 0 at the 2-norm of a p.grad"),
        (other_norm, "rank 0 at the 1-norm of a p.grad .*, rank 1 at the 2-norm"),
        (state, "rank 1 at optimizer.state"),
        (zeros, "rank 0 at optimizer.count_zero_gradients"),
    ],
)
def test_one_rank_alone_asks_for_what_is_collective(ask: Case, named: str, num_ranks: int) -> None:
    """The bytes of the others' step were read as a norm, and gloo ended the other process (SIGABRT)."""
    plans = ["zero1", "zero3"] if num_ranks == 2 else ["zero2"]
    for plan in plans:

        def run(rank: int, plan: str = plan) -> None:
            model = build()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            backward(model, rank)
            ask(rank, model, handle, optimizer)
            optimizer.step()

        said = said_by_all(num_ranks, run)
        assert re.search(named, said) and "Both are collective" in said, said


def test_rows_of_other_lengths_and_long_rows() -> None:
    def run(rank: int) -> None:
        collectives = zeroshard.shard(build(), "ddp").collectives
        for numel in (0, 1, 49, 50, 51, 1000):  # 50 fill the first packet
            for dtype in (torch.float64, torch.uint8, torch.bool):
                row = torch.arange(numel).add(rank).to(dtype)
                rows = collectives.exchange(row, "a test")
                assert rows.dtype == dtype
                assert torch.equal(rows, torch.stack([torch.arange(numel).add(r).to(dtype) for r in range(3)]))
        with pytest.raises(RuntimeError, match="a test: rank 0 brings 8 bytes, rank 1 16"):
            collectives.exchange(torch.zeros(1 + rank, dtype=torch.float64), "a test")
        assert collectives.exchange_objects(rank) == [0, 1, 2]  # all of them have heard so, and go on

    run_ranks(run, 3)
