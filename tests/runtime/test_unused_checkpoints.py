"""Activation checkpoints around units, where the loss of one rank leaves out what the last units return.

That rank recomputes less than its peers, which gather for it. So under ZeRO-3 the ranks wait for each other. They say
so within seconds, and what to write: with the unused output times 0 in the loss, all recompute the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.kit import travelling
from tests.patience import HANG
from zeroshard.testing import RankError, run_ranks


class Parts(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.reentrant = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), reentrant

    def body(self, x: Tensor) -> Tensor:
        for part in self.parts[1:4]:
            x = torch.tanh(part(x))
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.parts[0](x)
        inside = checkpoint(self.body, early, use_reentrant=self.reentrant)
        return early, self.parts[4](inside)


def trained(rank: int, ranks: int, plan: str, reentrant: bool, added: bool) -> list[Tensor]:
    zeroshard.init()
    torch.manual_seed(0)
    handle = zeroshard.shard(model := Parts(reentrant), plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        early, late = model(torch.ones(3, 6) + rank)
        loss = (early if rank == ranks - 1 else late).square().mean()
        if added:
            loss = loss + 0 * late.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return list(handle.full_state_dict().values())


def check(rank: int, ranks: int) -> None:
    for reentrant in (False, True):
        expected = trained(rank, ranks, "ddp", reentrant, False)
        for way in ("shared", "pairwise"):
            with travelling(way):
                assert all(map(torch.equal, trained(rank, ranks, "zero3", reentrant, True), expected)), reentrant


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_unused_output_times_zero(ranks: int) -> None:
    run_ranks(check, ranks, ranks, collective_timeout=HANG)


@pytest.mark.by_gloo
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_without_it_ranks_say_that_they_wait_for_each_other(ranks: int, reentrant: bool) -> None:
    with pytest.raises(RankError, match=r"deadlock|not all arrived[\s\S]*add 0 \* output\.sum\(\)") as found:
        run_ranks(trained, ranks, ranks, "zero3", reentrant, False)  # the timeout is five minutes
    assert "parts." in found.value.text
