"""A user wrote to the weights in place between forward and backward, and one rank got weights that were written twice.

Under ZERO1 and ZERO2 on one host a rank reads its peers' updated shards directly from their memory, where the user code
of the peer writes, too. A rank read them in its next forward. A rank that came there late (its batch took longer to
load) read weights that its peer had already halved for its own use, and halved them once more.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.kit import NUM_RANKS
from tests.patience import HANG
from tests.together import in_turn
from zeroshard.testing import run_ranks

LONG = timedelta(seconds=60)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def halve(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.5)


def steps(
    rank: int, num_ranks: int, sharded: nn.Module, optimizer: torch.optim.Optimizer, late: int | None
) -> list[torch.Tensor]:
    """Two steps; rank `late` starts the second one when all others have written in theirs. If weights are read at the
    end of a step, this changes nothing. Returns the weights in each forward, and after the write that follows."""
    found = []
    store = dist.distributed_c10d._get_default_store()
    for step in range(2):
        if step and rank == late:
            store.wait([str(other) for other in range(num_ranks) if other != rank], LONG)
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(10 * step + rank)
        loss = sharded(torch.randn(3, 8, generator=data)).square().sum()
        found.append(torch.cat([p.detach().reshape(-1) for p in sharded.parameters()]))
        halve(list(sharded.parameters()))
        found.append(torch.cat([p.detach().reshape(-1) for p in sharded.parameters()]))
        if step == 0:
            loss.detach_()  # no backward: it would need the weights from before the write
            sharded(torch.randn(3, 8, generator=data)).square().sum().backward()
            optimizer.step()
    store.set(str(rank), "")
    return found


def of_rank(rank: int, num_ranks: int, plan: str, late: int | None) -> list[torch.Tensor]:
    sharded = model()
    handle = zeroshard.shard(sharded, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    found = steps(rank, num_ranks, sharded, optimizer, late)
    dist.barrier()
    return found


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_late_rank_finds_what_the_others_have_found(num_ranks: int) -> None:
    cases = [("ddp", None), ("zero1", num_ranks - 1), ("zero2", num_ranks - 1)]
    of_ranks = run_ranks(in_turn(of_rank, [(num_ranks, *case) for case in cases]), num_ranks)
    expected = of_ranks[0][0]
    for _, *of_plans in of_ranks:
        for (plan, _), found in zip(cases[1:], of_plans, strict=True):
            for here, there in zip(found, expected, strict=True):
                assert torch.equal(here, there), plan


def alone(rank: int) -> None:
    sharded, plain = model(), model()
    handle = zeroshard.shard(sharded, "zero1", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        sharded(torch.ones(3, 8) * rank).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        output = None
        if rank == 0:
            with torch.no_grad():
                output = sharded(torch.ones(3, 8))
        dist.barrier()
        plain.load_state_dict(handle.full_state_dict())
        assert output is None or torch.equal(output, plain(torch.ones(3, 8)))


def test_one_rank_alone_may_still_run_the_model_after_a_step() -> None:
    """The rank does not wait for its peers, which wait for it in a barrier: they have read the weights before their own
    step ended. It computes with the weights of that step."""
    run_ranks(alone, 2, collective_timeout=HANG)
