"""A plan is three placements, in 27 combinations. Each of them trains as one process does, or `shard` refuses it and
says why. (`Plan("p", REPLICATED, SHARDED, REPLICATED)` once failed with an AssertionError in the first `step()`.)
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import Block, Job, Net, largest_difference, make, same_bits, train, train_reference
from tests.together import on_ranks
from zeroshard.placement import PARTIAL, REPLICATED, SHARDED, Placement, Plan
from zeroshard.testing import run_ranks

POSSIBLE = [
    (REPLICATED, REPLICATED, REPLICATED),
    (REPLICATED, PARTIAL, REPLICATED),
    (REPLICATED, REPLICATED, SHARDED),
    (REPLICATED, PARTIAL, SHARDED),
    (REPLICATED, SHARDED, SHARDED),
    (SHARDED, REPLICATED, SHARDED),
    (SHARDED, PARTIAL, SHARDED),
    (SHARDED, SHARDED, SHARDED),
]


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(3)
def test_every_combination_trains_or_is_refused(rank: int, precision: str | None) -> list[object]:
    small = partial(Net, blocks=1)
    job = Job(precision=precision, model=small, steps=2)

    reference = train_reference(job, 3)[rank].weights
    possible = POSSIBLE if precision is None or EVERYTHING else POSSIBLE[1::2]
    found = [train(job, Plan("mine", *placements), rank) for placements in possible]
    for placements in set(product(Placement, repeat=3)).difference(POSSIBLE) if precision is None else ():
        plan = Plan("mine", *placements)
        model = make(small)
        with pytest.raises(ValueError, match=r"plan 'mine' \(weights .*, gradients .*, main .*\) is impossible"):
            zeroshard.shard(model, plan, units=Block)
        zeroshard.shard(model, "zero1")  # the refused model can still be sharded
    assert all(same_bits(one.weights, found[0].weights) for one in found)
    assert largest_difference(found[0].weights, reference) < (1e-6 if precision is None else 1e-2)
    return [one.log for one in found]


@pytest.mark.by_gloo  # DTensor finds no backend for the other one's groups
@pytest.mark.by_cpu
def test_parameters_that_no_flat_buffer_can_hold_are_named() -> None:
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def check(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Replicate()):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model[1].weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
            for plan in ("ddp", "zero3"):
                with pytest.raises(ValueError, match=r"parameter 1.weight is a DTensor, distributed already"):
                    zeroshard.shard(model, plan)
            with pytest.raises(ValueError, match="parameter 2 is a DTensor"):
                zeroshard.ShardedOptimizer(list(model.parameters()), torch.optim.SGD, lr=0.1)
            assert isinstance(model[1].weight, DTensor) and type(model[0].weight.data) is torch.Tensor
        lazy = nn.Sequential(nn.LazyLinear(3))
        with pytest.raises(ValueError, match=r"parameter 0.weight has no shape yet: call the model once"):
            zeroshard.shard(lazy, "zero2")

    run_ranks(check, 2)
