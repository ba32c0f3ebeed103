"""Plans and precisions by the names that users know from other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.together import on_ranks
from zeroshard.integrations import Sharding
from zeroshard.placement import DDP, ZERO1, ZERO2, ZERO3, Plan, as_plan
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration
from zeroshard.precision import MixedPrecision, as_precision


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (DDP, ["ddp", "DDP", 0, "0", "zero0", "NO_SHARD", "no-shard"]),
        (ZERO1, ["zero1", "ZeRO-1", 1, "stage_1"]),
        (ZERO2, ["zero2", "ZERO_2", 2, "stage2", "SHARD_GRAD_OP"]),
        (ZERO3, ["zero3", "ZeRO 3", 3, "3", "fsdp", "FSDP2", "FULL_SHARD", "full-shard"]),
    ],
)
def test_plans(plan: Plan, names: list[Any]) -> None:
    assert [as_plan(name) for name in names] == [plan] * len(names)


@on_ranks(2)
def test_hybrid_sharding_is_a_plan_over_a_mesh_of_two_axes(rank: int) -> None:
    for shape in ((2, 1), (1, 2)):
        names = ("dp_replicate", "dp_shard")
        grid = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=names)
        for name in ("hybrid", "HYBRID_SHARD", "hsdp"):
            model = nn.Linear(5, 3)
            handle = zeroshard.shard(model, name, mesh=grid)
            assert handle.plan == ZERO3
            assert Sharding(name).shard(model) is Sharding("zero3", mesh=grid).shard(model) is handle
    for mesh in (None, grid["dp_shard"], torch.distributed.group.WORLD):  # a control
        with pytest.raises(ValueError, match="'hybrid': hybrid sharding is a plan over a mesh of two axes: shard"):
            zeroshard.shard(nn.Linear(5, 3), "hybrid", mesh=mesh)


def test_hybrid_sharding_is_planned_with_replicas() -> None:
    def planned(plan: str, **options: Any) -> Any:
        return zeroshard.plan(nn.Linear(8, 8), Configuration(plan=plan, ranks=4, **options))

    hybrid, zero3 = (planned(plan, replicas=2) for plan in ("hybrid", "zero3"))
    assert (hybrid.phases, hybrid.sent) == (zero3.phases, zero3.sent)
    assert plan_memory(nn.Linear(8, 8), "hsdp", 2, num_replicas=2) == plan_memory(
        nn.Linear(8, 8), "zero3", 2, num_replicas=2
    )
    with pytest.raises(ValueError, match="to plan it, set replicas="):
        planned("hybrid")


def test_precisions() -> None:
    bf16, fp16, fp32 = as_precision("bf16"), as_precision("fp16"), as_precision("fp32")
    assert as_precision(torch.bfloat16) == as_precision("bf16-mixed") == bf16
    assert as_precision(torch.float16) == as_precision("fp16-mixed") == as_precision("16-mixed") == fp16
    assert as_precision(torch.float32) == as_precision("32-true") == as_precision("no") == fp32
    assert as_precision("bf16-true") == MixedPrecision(*[torch.bfloat16] * 2, None, torch.bfloat16)
    assert (
        as_precision(torch.float64)
        == as_precision("64-true")
        == MixedPrecision(*[torch.float64] * 2, None, torch.float64)
    )


@on_ranks(2)
def test_they_train(rank: int) -> None:
    def trained(plan: Any, precision: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        model(torch.ones(2, 5)).float().sum().backward()
        optimizer.step()
        return handle.full_state_dict()["weight"]

    for ours, theirs in [(("zero3", "bf16"), (3, torch.bfloat16)), (("ddp", "fp32"), ("NO_SHARD", "32-true"))]:
        assert torch.equal(trained(*ours), trained(*theirs))
