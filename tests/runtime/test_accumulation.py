"""Gradients are accumulated in fp32: sums that 16 bits cannot hold are exact.

1, then four times 1/512: in bf16 (8 bits of significand) each addition to 1 rounds back to 1. In fp32 the sum is
exactly 1 + 4/512 = 1.0078125, whether it is taken over micro-batches or over ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.kit import NUM_RANKS, PLANS, State, make, plans_of, same_bits, with_plans
from tests.parity.common import BF16, FP16, FP32, expect_equal_logs
from tests.together import on_ranks
from zeroshard.precision import MixedPrecision
from zeroshard.testing import run_ranks

EXACT = 1.0078125
PARTS = (1.0, *[1 / 512] * 4)
NUMEL = 700  # several shards, the last one with padding


class Scalar(nn.Module):
    """A parameter whose gradient is the module's input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def accumulated(plan: Any, precision: Any, every: bool, parts: list[float]) -> tuple[float, Any]:
    """The gradient: a step of plain SGD with lr 1 from 0 is minus it. And `unit.grads`, the sum in its own dtype."""
    model = Scalar()
    handle = zeroshard.shard(model, plan, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0, loss_scale=1.0)
    for index, part in enumerate(parts):
        with nullcontext() if every or index == len(parts) - 1 else handle.no_sync():
            optimizer.backward(model(torch.full((NUMEL,), part)))
    optimizer.step()
    values = -handle.full_state_dict(main=True)["weight"]
    assert torch.equal(values, values[0].expand(NUMEL))
    return values[0].item(), handle.comm_log


FP32_SUMS = {
    "bf16": "bf16",
    "bf16-remainder": "bf16-remainder",
    "bf16 wire": MixedPrecision(reduce=BF16),
    "bf16 as the model is": None,
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_micro_batches_sum_in_fp32_in_every_plan(num_ranks: int) -> None:
    """Only rank 0's gradients are not zero: the mean is their sum, divided by the number of ranks."""

    def check(rank: int) -> list[Any]:
        logs = []
        cases = itertools.product((False, True), FP32_SUMS.items())
        for (every, (name, precision)), plan in with_plans(cases):
            parts = [part * num_ranks if rank == 0 else 0.0 for part in PARTS]
            if num_ranks == 3:  # the sum is exact, the division by 3 is not
                parts = [part if rank == 0 else 0.0 for part in PARTS]
            if name == "bf16 wire" and not every and num_ranks > 1:
                continue  # the sum over micro-batches is rounded to the wire dtype
            value, log = accumulated(plan, precision, every, parts)
            expected = float(torch.tensor(EXACT) * (1 / 3)) if num_ranks == 3 else EXACT
            assert value == expected, (plan, every, name)
            logs.append(log)
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


def test_ranks_sum_in_fp32_also_when_16_bits_travel() -> None:
    """One term for each rank: 1 on rank 0 and 1/512 on four others."""

    def check(rank: int) -> list[Any]:
        logs = []
        for (name, precision), plan in with_plans(FP32_SUMS.items()):
            value, log = accumulated(plan, precision, True, [PARTS[rank]])
            assert value == float(torch.tensor(EXACT) / 5), (plan, name)
            logs.append(log)
        return logs

    for logs in zip(*run_ranks(check, 5), strict=True):
        expect_equal_logs(logs)


@on_ranks(5)
def test_a_wider_wire_sums_16_bit_gradients_once_rounded(rank: int) -> None:
    """With bf16 gradients and fp32 on the wire, only the sum over ranks (here to 1 + 2 / 256) and the mean are
    rounded."""
    for plan in plans_of(1):
        wide, _ = accumulated(plan, MixedPrecision(grad=BF16, reduce=FP32), True, [PARTS[rank]])
        narrow, _ = accumulated(plan, MixedPrecision(grad=BF16), True, [PARTS[rank]])
        assert wide == float(torch.tensor(EXACT).to(BF16) / 5)
        assert narrow == float(torch.tensor(1.0).to(BF16) / 5)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_16_bit_gradients_lose_it(rank: int, num_ranks: int) -> None:
    """The negative control: accumulated in bf16, the same parts give 1."""
    parts = [part * num_ranks if rank == 0 else 0.0 for part in PARTS]
    for plan, every in itertools.product(PLANS, (False, True)):
        assert accumulated(plan, MixedPrecision(grad=BF16), every, parts)[0] == 1.0
        assert accumulated(plan, MixedPrecision(FP16, FP16, None, FP32), every, parts)[0] == EXACT  # 11 bits


@on_ranks(2)
def test_uses_of_a_parameter_within_one_backward_sum_in_fp32(rank: int) -> None:
    """Tied weights, or a module called several times: autograd adds up these gradients, the last call first, before the
    engine gets them."""

    def total(plan: zeroshard.Plan, precision: MixedPrecision | str) -> float:
        model = Scalar()
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        optimizer.backward(sum(model(torch.full((NUMEL,), part)) for part in reversed(PARTS)))
        optimizer.step()
        value = -handle.full_state_dict(main=True)["weight"][0].item()
        handle.close()
        assert all(p.grad_dtype == p.dtype for p in model.parameters())
        return value

    for plan in plans_of(0):
        for precision in ("bf16", "bf16-remainder"):
            assert total(plan, precision) == EXACT, (plan, precision)
        assert total(plan, MixedPrecision(grad=BF16)) == 1.0


def mixed(rank: int, plan: Any, num_synced: int, between: Callable[[nn.Module], None] | None) -> State:
    """Weights after a backward that reduces, two under `no_sync`, `between`, and one that reduces."""
    model = make(lambda: nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 20)))
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for number in range(4 - num_synced, 4):
        if number == 3 and between is not None:
            between(model)
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * rank + number))
        with handle.no_sync() if number in (1, 2) else nullcontext():
            model(x).square().mean().backward()
    optimizer.step()
    return handle.full_state_dict()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@on_ranks("num_ranks")
def test_plans_agree_where_backwards_under_no_sync_follow_a_reduction(rank: int, num_ranks: int) -> None:
    """DDP and ZeRO-1 added these gradients to the mean so far, and ZeRO-2 and ZeRO-3 to each other first."""
    first, *others = [mixed(rank, plan, 4, None) for plan in PLANS]
    assert all(same_bits(first, other) for other in others)


class Twice(nn.Module):
    """Its layer gets two gradients in one backward: each of two reentrant checkpoints runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(20, 33), nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: self.layer(torch.tanh(y)), x, use_reentrant=True)
        return x.square().mean()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@on_ranks("num_ranks")
def test_plans_agree_where_a_backward_adds_two_gradients_to_a_mean(rank: int, num_ranks: int) -> None:
    """ZeRO-2 and ZeRO-3 added the two to each other first, and DDP and ZeRO-1 each to the mean."""

    def trained(rank: int, plan: Any, precision: Any) -> State:
        model = make(Twice)
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9)
        for number in range(6):
            model(torch.randn(5, 20, generator=torch.Generator().manual_seed(10 * rank + number))).backward()
            if number % 3 == 2:
                optimizer.step()
        return handle.full_state_dict(main=True)

    for precision in (None, "bf16", MixedPrecision(FP32, BF16, None, FP32)):
        first, *others = [trained(rank, plan, precision) for plan in PLANS]
        assert all(same_bits(first, other) for other in others), precision


def zero_one(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


@pytest.mark.parametrize("zero", [zero_one, lambda model: model.zero_grad(set_to_none=False)], ids=["each", "model"])
@on_ranks(2)
def test_gradients_that_are_zeroed_where_a_part_of_them_is_not_reduced_yet(
    rank: int, zero: Callable[[nn.Module], None]
) -> None:
    """ZeRO-1 zeroed the own part of the bucket, and ZeRO-2 and ZeRO-3 the mean: the rest was stepped, in silence."""
    for plan in PLANS:
        assert same_bits(mixed(rank, plan, 4, zero), mixed(rank, plan, 1, None)), plan


@on_ranks(2)
def test_what_only_one_rank_has_accumulated_behind_a_reduction_is_refused_on_all(rank: int) -> None:
    """`gradient` raised on that rank, and the other one waited; `set_gradient` was done on the other one."""
    for plan in PLANS:
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        handle = zeroshard.shard(model, plan, units=nn.Linear)

        def loss(used: bool, model: nn.ModuleDict = model) -> Tensor:
            outputs = [model[name](torch.ones(2, 4)).sum() for name in ("a", "b")]
            return outputs[0] + (outputs[1] if used else outputs[1].detach())

        loss(True).backward()
        with handle.no_sync():
            loss(rank == 0).backward()
        for what, call in (
            ("gradient", lambda handle=handle: handle.gradient("b.weight")),
            ("set_gradient", lambda handle=handle: handle.set_gradient("b.weight", torch.ones(4, 4))),
        ):
            found = "partial" if rank == 0 else "not reduced on another rank"
            with pytest.raises(RuntimeError, match=rf"^{what}: that of b\.weight is {found}; call backward"):
                call()
        loss(True).backward()
        assert torch.equal(handle.gradient("b.weight"), torch.full((4, 4), 5.0))
        handle.close()


def by_norm(module: nn.Module) -> Tensor:
    assert module.weight.grad is not None
    return module.weight.grad.norm()


def by_clip(module: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(module.parameters(), 1e9)


@pytest.mark.parametrize("norm", [by_norm, by_clip])
@on_ranks(2)
def test_a_norm_of_what_only_one_rank_has_accumulated_behind_a_reduction(
    rank: int, norm: Callable[[nn.Module], Tensor]
) -> None:
    """It raised on that rank, and the other one waited. (Under DDP that has the mean in full.)"""
    for plan in PLANS:
        model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        handle = zeroshard.shard(model, plan, units=nn.Linear)

        def loss(used: bool, model: nn.ModuleDict = model) -> Tensor:
            outputs = [model[name](torch.ones(2, 4)).sum() for name in ("a", "b")]
            return outputs[0] + (outputs[1] if used else outputs[1].detach())

        loss(True).backward()
        with handle.no_sync("b"):
            loss(rank == 0).backward()
        found = "partial" if rank == 0 else "not reduced on another rank"
        refused = pytest.raises(RuntimeError, match=f"^norm on the gradient of b.weight, which is {found}: it can be")
        is_in_full = plan is zeroshard.DDP and rank == 1
        for _ in range(2):
            with nullcontext() if is_in_full else refused:
                assert norm(model.b) == 2 * 4
        assert norm(model.a) == 4 * 4, plan
        loss(True).backward()
        assert norm(model.b) == 5 * 4, plan
        handle.close()


@on_ranks(2)
def test_a_call_that_needs_no_gradients_where_only_one_rank_has_accumulated_some(rank: int) -> None:
    """It raised on that rank, and the other one waited. (Under ZeRO-3 a backward is not of one rank alone.)"""
    for plan in (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        with handle.no_sync():
            loss = model(torch.ones(2, 4)).sum()
            if rank == 0:
                loss.backward()
        with pytest.raises(RuntimeError, match=r"^park: gradients are waiting for a step"):
            handle.park()
        model[1].requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"^parameters that were frozen require grad now, and grad"):
            model(torch.ones(2, 4))
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(handle.gradient("1.bias"), torch.full((4,), 2.0))
        model.zero_grad()
        handle.park()
        handle.unpark()
        handle.close()
