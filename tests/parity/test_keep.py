"""Models with several dtypes: norms kept in fp32, and models that have several dtypes before `shard`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of, train
from tests.parity.common import (
    BF16,
    FP16,
    FP32,
    Job,
    as_one_process,
)
from zeroshard.planner import plan_memory
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

KEEP = (nn.LayerNorm,)
PRECISIONS = {
    "bf16": MixedPrecision(keep=KEEP),
    "bf16, 16-bit gradients": MixedPrecision(grad=BF16, keep=KEEP),
    "fp16": MixedPrecision(FP16, FP32, None, FP32, keep=KEEP),
    "remainder": MixedPrecision(main="remainder", keep=KEEP),
    "blocks and all": MixedPrecision(keep=(Block, nn.LayerNorm)),
}


def tied() -> nn.Module:
    return Net(tied=True, blocks=1)


def untied() -> nn.Module:
    return Net(blocks=1)


def half() -> nn.Module:
    """A model that is bf16 before it is sharded."""
    return Net(blocks=1).to(BF16)


def scale_for(precision: MixedPrecision) -> Any:
    return zeroshard.DynamicScale(init=256.0) if precision.param == FP16 else None


def jobs() -> list[Job]:
    sgd: dict[str, Any] = {"optimizer": torch.optim.SGD, "defaults": {"lr": 0.1, "momentum": 0.9}}
    by_precision = [
        Job(
            precision=precision,
            model=model,
            units=units,
            micro_batches=k,
            scale=scale_for(precision),
            steps=2,
            **options,
        )
        for precision, (model, units, k, options) in itertools.product(
            PRECISIONS.values(), ((untied, Block, 1, {}), (tied, None, 3, sgd))
        )
    ]
    return [*by_precision, Job(precision=PRECISIONS["bf16"], model=half, steps=2)]


CASES = [
    (number, plan, num_ranks)
    for number in range(len(jobs()))
    for plan, num_ranks in (
        itertools.product(PLANS, (2, 3))
        if EVERYTHING
        else zip(plans_of(number), (2, 3) if number % 4 < 2 else (3, 2), strict=True)
    )
]
"""The number of a job, a plan, and the number of ranks: each plan on both numbers of ranks."""


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_norms_kept_in_fp32_in_every_plan(num_ranks: int) -> None:
    """Bit for bit what one process computes."""
    matrix, cases = jobs(), at(CASES, num_ranks)
    as_one_process([(matrix[number], plan) for number, plan in cases], num_ranks)


def test_it_makes_a_difference() -> None:
    """The negative control: the same job with norms in bf16 has other losses."""

    def run(rank: int) -> tuple[list[float], list[float]]:
        kept, not_kept = (Job(precision=precision) for precision in (MixedPrecision(keep=KEEP), "bf16"))
        return train(kept, zeroshard.DDP, rank).losses, train(not_kept, zeroshard.DDP, rank).losses

    kept, not_kept = run_ranks(run, 2)[0]
    assert kept != not_kept
    torch.testing.assert_close(torch.tensor(kept), torch.tensor(not_kept), rtol=2e-2, atol=2e-2)


def test_what_computes_in_which_dtype() -> None:
    """Inputs, weights and gradients are fp32 inside a kept module, and have the compute dtype outside of it."""

    def check(rank: int) -> None:
        for plan in PLANS:
            model = make(Net)
            seen: dict[str, list[torch.dtype]] = {}
            original = nn.LayerNorm.forward

            def spying(self: nn.LayerNorm, x: Tensor, original: Any = original, seen: Any = seen) -> Tensor:
                seen.setdefault("inside", []).extend([x.dtype, self.weight.dtype])
                return original(self, x)

            nn.LayerNorm.forward = spying  # type: ignore[method-assign]
            handle = zeroshard.shard(model, plan, units=Block, precision=MixedPrecision(keep=KEEP))
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            model.blocks[0].up.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.setdefault("outside", []).extend([args[0].dtype])
            )
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
            optimizer.step()
            nn.LayerNorm.forward = original  # type: ignore[method-assign]
            assert set(seen["inside"]) == {FP32} and set(seen["outside"]) == {BF16}, plan
            dtypes = {name: value.dtype for name, value in handle.full_state_dict().items()}
            assert {name for name, dtype in dtypes.items() if dtype == FP32} == {n for n in dtypes if "norm" in n}
            handle.close()
            assert {value.dtype for value in model.state_dict().values()} == {FP32}
            model(torch.zeros(1, 3, dtype=torch.long))  # a plain fp32 model again: nothing is cast

    run_ranks(check, 2)


BYTES = grid(PLANS, PRECISIONS, (1, 2, 3))


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_bytes_are_what_was_planned(num_ranks: int) -> None:
    def check(rank: int) -> None:
        for plan, name in at(BYTES, num_ranks):
            precision = PRECISIONS[name]
            model = make(tied)
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-3, fused=True, loss_scale=1.0)
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
            optimizer.step()
            handle.engine.gatherer.settle()
            planned = plan_memory(make(tied), plan, num_ranks, units=Block, precision=precision, rank=rank)
            assert handle.memory() == planned, (plan, precision)

    run_ranks(check, num_ranks)


class Mixed(nn.Module):
    """A model with three dtypes that casts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 10, dtype=BF16)
        self.third = nn.Linear(10, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).to(BF16)).double())


def mixed_loss(model: nn.Module, rank: int, micro_batch: int, step: int, micro_batches: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    loss: Tensor = model(torch.randn(4, 6, generator=generator)).square().mean() / micro_batches
    return loss


def test_a_model_that_comes_with_several_dtypes_keeps_them() -> None:
    """With precision=None each parameter trains in its own dtype."""
    jobs = [Job(precision=None, model=Mixed, loss_of=mixed_loss, units=None, micro_batches=k, steps=2) for k in (1, 3)]
    for outcome in as_one_process(list(itertools.product(jobs, PLANS)), 2):
        assert [v.dtype for v in outcome.weights.values()] == [FP32] * 2 + [BF16] * 2 + [torch.float64] * 2


@pytest.mark.parametrize("keep", [("LayerNorm",), (torch.Tensor,), (3,)])
def test_what_is_no_class_of_modules_is_refused(keep: Any) -> None:
    with pytest.raises(ValueError, match="keep takes classes of modules, found"):
        MixedPrecision(keep=keep)
