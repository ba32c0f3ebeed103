"""A model without parameters, or with frozen ones only: `shard` and `ShardedOptimizer` accept it, and do nothing. (Both
once refused it.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import PLANS
from zeroshard.planner import plan_memory
from zeroshard.testing import expect_same_logs, run_ranks


def without_parameters() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.ReLU())


def frozen() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).requires_grad_(False)


@pytest.mark.parametrize("build", [without_parameters, frozen])
def test_everything_is_there_and_does_nothing(build: Any, tmp_path: Path) -> None:
    def check(rank: int, folder: str) -> Any:
        logs = []
        for plan in PLANS:
            for options in ({}, {"units": nn.Linear}, {"max_transient_bytes": 1 << 20}, {"precision": "bf16"}):
                if options.get("precision") and build is frozen:
                    continue  # batch norm needs inputs of its buffers' dtype
                model = build()
                handle = zeroshard.shard(model, plan, **options)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
            for _ in range(2):
                optimizer.zero_grad()
                assert model(x).shape[0] == 4
                assert optimizer.clip_grad_norm_(1.0) == 0.0
                result = optimizer.step(lambda: 1.5)
                assert not result.applied and float(result) == 1.5
                scheduler.step()
            with handle.no_sync(), handle.unsharded(write=True):
                model(x)
            assert optimizer.state_dict()["state"] == {} and not optimizer.state
            optimizer.load_state_dict(optimizer.state_dict())
            full = handle.full_state_dict()
            assert full.keys() == build().state_dict().keys()
            handle.load_full_state_dict(full)
            assert handle.memory()["state"] == handle.memory()["grads"] == 0
            handle.average_buffers()
            handle.park()
            handle.unpark()
            directory = Path(folder) / plan.name
            zeroshard.save(directory, handle, optimizer, step=1)
            zeroshard.load(directory, handle, optimizer)
            handle.close()
            model(x)
            logs.append(handle.comm_log)
        assert plan_memory(build(), "zero3", 2)["main"] == 0
        return logs

    for logs in zip(*run_ranks(check, 2, str(tmp_path)), strict=True):
        expect_same_logs(logs)


def test_what_is_frozen_may_train_later() -> None:
    def check(rank: int) -> None:
        for plan in PLANS:
            model = frozen()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            optimizer.step()
            before = handle.full_state_dict()
            model.requires_grad_(True)
            (model(torch.ones(4, 3) * rank) - 1).square().mean().backward()
            assert optimizer.step().applied
            assert not torch.equal(handle.full_state_dict()["1.bias"], before["1.bias"])

    run_ranks(check, 2)


def test_an_empty_list_is_refused_as_by_torch() -> None:
    def check(rank: int) -> None:
        with pytest.raises(ValueError, match="empty parameter list"):
            zeroshard.ShardedOptimizer([], torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="empty parameter list"):
            zeroshard.ShardedOptimizer(without_parameters().parameters(), torch.optim.SGD, lr=0.1)

    run_ranks(check, 1)
