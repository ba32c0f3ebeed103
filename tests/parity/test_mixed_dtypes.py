"""Optimizers over parameters of several dtypes. `MixedPrecision(main=torch.bfloat16, keep=(LayerNorm,))` once crashed
in the middle of `step()` where the norm came first, as scratch had the dtype of the first piece. So did OPTIMIZER_ONLY
with fp32 and fp64 parameters. Optimizers of whole parameters stepped all of them in the dtype of the first one, without
an error.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, make, same_bits
from zeroshard.optim import Lamb
from zeroshard.planner import plan_memory
from zeroshard.testing import expect_same_logs, run_ranks

KEPT = zeroshard.MixedPrecision(grad=torch.bfloat16, main=torch.bfloat16, keep=(nn.LayerNorm,))


class NormFirst(nn.Module):
    """In the order of reduction the last norm comes first, then the matrices, then the other norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(19)
        self.up = nn.Linear(19, 37)
        self.down = nn.Linear(37, 19)
        self.after = nn.LayerNorm(19)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(torch.tanh(self.up(self.before(x))))).float().square().mean()


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).double()).square().mean()


def data(rank: int, step: int, width: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


OPTIMIZERS = [(torch.optim.AdamW, {"lr": 1e-2, "foreach": False}), (Lamb, {"lr": 1e-2})]


@pytest.mark.by_gloo
@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=["pieces", "whole"])
def test_a_bf16_main_beside_norms_kept_in_fp32(optimizer_class: Any, options: dict[str, Any]) -> None:
    def check(rank: int) -> Any:
        found, logs = [], []
        for plan in PLANS:
            model = make(NormFirst)
            handle = zeroshard.shard(model, plan, units=nn.LayerNorm, precision=KEPT)
            optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, **options)
            for step in range(3):
                model(data(rank, step, 19)).backward()
                optimizer.step()
            state = optimizer.state_dict()["state"]
            names = [name for name, _ in model.named_parameters()]
            for index, name in enumerate(names):
                dtype = torch.float32 if name.startswith(("before", "after")) else torch.bfloat16
                assert handle.full_state_dict(main=True)[name].dtype == dtype
                assert state[index]["exp_avg"].dtype == dtype
                if dtype == torch.float32:  # no value has been rounded to 16 bits
                    assert not torch.equal(state[index]["exp_avg"], state[index]["exp_avg"].bfloat16().float())
            found.append(handle.full_state_dict(main=True) | {f"m{i}": s["exp_avg"] for i, s in state.items()})
            logs.append(handle.comm_log)
            if optimizer_class is torch.optim.AdamW:
                planned = plan_memory(make(NormFirst), plan, 3, units=nn.LayerNorm, precision=KEPT, rank=rank)
                assert handle.memory()["scratch"] == planned["scratch"]
        assert all(same_bits(one, found[0]) for one in found)
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        if optimizer_class is torch.optim.AdamW:  # owners send different numbers of bytes
            expect_same_logs(logs)


def test_fp32_and_fp64_parameters_alike() -> None:
    def compare(rank: int, optimizer_class: Any, options: dict[str, Any], reverse: bool) -> None:
        models = [make(Doubles) for _ in range(2)]
        params = [list(model.parameters())[:: -1 if reverse else 1] for model in models]
        plain: Any = optimizer_class(params[0], **options)
        sharded = zeroshard.ShardedOptimizer(params[1], optimizer_class, **options)
        for step in range(3):
            for model, optimizer in zip(models, (plain, sharded), strict=True):
                optimizer.zero_grad()
                model(data(rank, step, 7)).backward()
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad.div_(3)
                optimizer.step()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-12 if a.dtype == torch.float64 else 1e-5)
        for ours, theirs in zip(
            sharded.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True
        ):
            assert ours["exp_avg"].dtype == theirs["exp_avg"].dtype

    def check(rank: int) -> None:
        for (optimizer_class, options), reverse in itertools.product(OPTIMIZERS, (False, True)):
            compare(rank, optimizer_class, options, reverse)

    run_ranks(check, 3)
