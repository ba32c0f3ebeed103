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
    assert "run each backward on every rank, under no_sync too" in str(found.value)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.gate = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, used: bool) -> Tensor:
        made = torch.tanh(self.map(x)) * self.gate
        return x + made if used else x * 1


class GatedLayers(nn.Sequential):
    def forward(self, x: Tensor, left_out: int) -> Tensor:
        """The second layer is checkpointed."""
        for number, layer in enumerate(self):
            used = number != left_out
            x = checkpoint(layer, x, used, use_reentrant=False) if number == 1 else layer(x, used)
        return x


def gated(rank: int, plan: str, units: type[nn.Module]) -> list[Tensor]:
    """Rank 1 uses no result of a layer behind the one that is checkpointed."""
    zeroshard.init()
    torch.manual_seed(0)
    handle = zeroshard.shard(model := GatedLayers(*(Gated() for _ in range(5))), plan, units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    model(torch.ones(3, 6) + rank, 2 if rank else -1).square().mean().backward()
    optimizer.step()
    return list(handle.full_state_dict().values())


@pytest.mark.by_gloo
def test_units_inside_of_what_is_checkpointed() -> None:
    """A rank recomputes them before backward comes to what is behind: the error names the units to give."""
    with pytest.raises(RankError, match=r"shard\(\.\.\., units=\) the class of the modules that are checkpointed"):
        run_ranks(gated, 2, "zero3", nn.Linear)
    expected = run_ranks(gated, 2, "ddp", Gated)
    for found, right in zip(run_ranks(gated, 2, "zero3", Gated), expected, strict=True):
        assert all(map(torch.equal, found, right))
