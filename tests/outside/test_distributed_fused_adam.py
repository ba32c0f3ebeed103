"""apex: apex/contrib/test/optimizers/test_dist_adam.py; and Megatron-LM: dist_checkpointing/test_optimizer.py.

`DistributedFusedAdam(params)` is `ShardedOptimizer(params, torch.optim.AdamW)` over a model under `zero2`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.outside.common import PLANS, numbers
from tests.together import on_ranks
from zeroshard.loss_scale import DynamicScale
from zeroshard.testing import run_ranks

OPTIONS = {"lr": 0.1, "betas": (0.1, 0.2), "eps": 0.25, "weight_decay": 0.1}


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.5]]))

    def forward(self, x: float) -> Tensor:
        return self.weight * x


@on_ranks(2)
def test_the_scale_of_torchs_scaler(rank: int) -> None:
    """test_grad_scaler: overflows now and then, and factors that are no powers of two."""
    factors = {"growth_factor": 1.23, "backoff_factor": 0.876, "growth_interval": 1}
    for plan in PLANS:
        model = Product()
        plain = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan)
        scale = DynamicScale(init=3.21, **factors)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, loss_scale=scale, **OPTIONS)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.21, **factors)
        for x, factor in zip((3, 1, 4, 1, 5, 9), (1, float("inf"), 1, 1, float("nan"), -1), strict=True):
            plain_optimizer.zero_grad()
            scaler.scale((plain(x) * factor).sum()).backward()
            scaler.step(plain_optimizer)
            scaler.update()
            optimizer.zero_grad()
            optimizer.backward((model(x) * factor).sum())
            optimizer.step()
            torch.testing.assert_close(handle.full_state_dict()["weight"], plain.weight.detach())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.unused = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3), nn.Linear(13, 5)
        self.a.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.norm(self.a(x))))


class Lion(torch.optim.Optimizer):
    """With state of every kind."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {
                        "exp_avg": torch.zeros_like(parameter),
                        "count": 0,
                        "step": torch.zeros(1),
                        "name": "lion",
                    }
                parameter.add_((state["exp_avg"] * 0.9 + parameter.grad * 0.1).sign(), alpha=-group["lr"])
                state["exp_avg"].lerp_(parameter.grad, 0.01)
                state["count"] += 1
                state["step"] += 1


def expect_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            expect_equal(value, expected[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            expect_equal(one, other)
    else:
        assert found == expected


def test_saved_and_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    """test_checkpoint_save_1gpu, _load_1gpu, _bf16; Megatron: test_fp32_optimizer_resharding,
    test_optimizer_resharding, test_distrib_optimizer_save_load_with_non_tensor_state,
    test_lion_optimizer_checkpoint_round_trip: from two ranks to one and back, each time with another plan; and a loaded
    model trains on."""

    def check(rank: int) -> None:
        one = dist.new_group([0])
        for number, (kind, precision) in enumerate(
            [(torch.optim.AdamW, "bf16"), (Lion, "fp32"), (Lion, "bf16-remainder")]
        ):
            saved = None
            for step, (plan, alone) in enumerate(
                [("zero1", False), ("zero3", True), ("zero3", False), ("zero2", True)]
            ):
                dist.barrier()
                if alone and rank:
                    continue
                torch.manual_seed(step)
                model = Net()
                handle = zeroshard.shard(model, plan, precision=precision, mesh=one if alone else None)
                optimizer = zeroshard.ShardedOptimizer(handle, kind, lr=1.0 if step else 0.01)
                if step:
                    zeroshard.load(tmp_path / f"{number}-{step - 1}", handle, optimizer)
                    found = handle.full_state_dict(main=True), optimizer.state_dict()
                    if saved is not None and (rank == 0 or step == 2):
                        expect_equal(found, saved)
                for micro_step in () if step == 1 else range(2):
                    model(numbers(7, rank, micro_step)).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                zeroshard.save(tmp_path / f"{number}-{step}", handle, optimizer, step=1)
                saved = copy.deepcopy((handle.full_state_dict(main=True), optimizer.state_dict()))
                handle.close()

    run_ranks(check, 2)
