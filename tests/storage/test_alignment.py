"""Kernels are chosen by the alignment of addresses. Parameters once were packed without gaps, some at odd elements. On
some CPUs a linear layer with a batch of one then differed from the plain model in the last bits.

Slots now start at multiples of 64 elements. The elements between them are padding: zero, and without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, Block, Job, Net, loss_of_tokens, make, plans_of, same_bits, train, train_reference
from tests.together import on_ranks
from zeroshard.layout.layout import SLOT_ALIGNMENT
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks

BYTES = 64
"""The alignment of torch's CPU allocator."""


class Odd(nn.Module):
    """Layers of odd sizes and 0-dimensional parameters, so that nothing is aligned by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in (1, 3, 7, 16, 19, 33))
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        total = self.shift
        for layer in self.layers:
            total = total + (layer(x[:, : layer.in_features]) * self.scale).square().sum()
        return total


def batch_of_one(rank: int) -> Tensor:
    return torch.randn(1, 33, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parameters_and_gradients_lie_aligned_and_compute_as_in_the_plain_model(num_ranks: int) -> None:
    def check(rank: int) -> None:
        for number, dtype in enumerate((torch.float32, torch.bfloat16)):
            plain = make(Odd).to(dtype)
            x = batch_of_one(rank).to(dtype)
            expected = plain(x)
            expected.backward()
            for plan in plans_of(number + num_ranks):
                model = make(Odd).to(dtype)
                handle = zeroshard.shard(model, plan, units=nn.Linear)
                seen: list[int] = []
                for layer in model.layers:
                    layer.register_forward_hook(
                        lambda m, *_, seen=seen: seen.extend(p.data_ptr() % BYTES for p in m.parameters())
                    )
                loss = model(x)
                assert torch.equal(loss, expected)
                assert seen == [0] * 12
                loss.backward()
                for unit in handle.engine.units:
                    assert all(slot.world.start % SLOT_ALIGNMENT == 0 for slot in unit.layout.slots)
                    assert unit.grads.buffer.shard.data_ptr() % BYTES == 0
                if num_ranks == 1:
                    for name, parameter in plain.named_parameters():
                        assert torch.equal(handle.gradient(name).to(dtype), parameter.grad)

    run_ranks(check, num_ranks)


def spoil(handle: zeroshard.Handle) -> None:
    """Write NaN where values do not matter between two steps: into pooled buckets, and into gradients after their
    step."""
    collectives = handle.engine.collectives
    collectives.exchange_objects(None)  # a barrier: no rank writes before all have read
    for storage in handle.engine.pool.tensors("buckets"):
        storage.view(torch.float32).fill_(torch.nan)
    for unit in handle.engine.units:
        if unit.grads.storages() and unit.grads.buffer.rests_in_full and unit.grads.buffer.full is not None:
            unit.grads.buffer.full.fill_(torch.nan)
    collectives.exchange_objects(None)


def padding_of(handle: zeroshard.Handle) -> list[Tensor]:
    """The padding in the own shard of weights and main."""
    found = []
    for unit in handle.engine.units:
        own = unit.own_shard()
        for part in (interval & own for interval in unit.layout.padding):
            if part:
                found.append(unit.weights.own()[part.relative_to(own.start).slice].float())
                found.append(unit.main.read(part, torch.empty(part.numel)).clone())
    return found


def run(rank: int, plan: Plan, job: Job, *, spoiled: bool) -> tuple[Any, list[float], list[int]]:
    model = make(job.model)
    handle = zeroshard.shard(model, plan, units=Block, precision=job.precision)
    optimizer = zeroshard.ShardedOptimizer(handle, job.optimizer, **job.defaults)
    norms, zeros = [], []
    for step in range(2):
        if spoiled:
            spoil(handle)
        loss_of_tokens(model, rank, 0, step).backward()
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        zeros.append(optimizer.count_zero_gradients())
        optimizer.step()
        optimizer.zero_grad()
    assert all(not part.any() for part in padding_of(handle)) and padding_of(handle)
    return handle.full_state_dict(main=True), norms, zeros


@pytest.mark.parametrize(("precision", "plans"), [("fp32", plans_of(1)), ("bf16-remainder", plans_of(0))])
@on_ranks(2)
def test_padding_is_zero_whatever_was_there_before_and_does_not_count(
    rank: int, precision: str, plans: Sequence[Plan]
) -> None:
    """A bucket that another unit used before, or gradients after unparking, may hold any values in the padding."""
    job = Job(precision=precision, defaults={"lr": 1e-2, "weight_decay": 0.1, "foreach": False})

    model = make(Net)
    loss = sum(loss_of_tokens(model, other, 0, 0) for other in range(2)) / 2
    loss.backward()
    absent = sum(int((p.grad == 0).sum()) for p in model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    results = [run(rank, plan, job, spoiled=spoiled) for plan in plans for spoiled in (False, True)]
    for weights, norms, zeros in results:
        assert same_bits(weights, results[0][0]) and norms == results[0][1] and zeros == results[0][2]
    if precision == "fp32":
        assert results[0][2][0] == absent
        torch.testing.assert_close(torch.tensor(results[0][1][0]), norm)


@on_ranks(2)
def test_gradients_that_come_back_from_being_parked_hold_no_old_padding(rank: int) -> None:
    """Storages that were freed are allocated again with arbitrary values."""
    job = Job(model=Net, steps=1)
    truth = train_reference(job, 2)[0].weights
    for plan in plans_of(0):
        assert same_bits(train(job, plan, rank).weights, truth)
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, job.optimizer, **job.defaults)
        handle.park()
        handle.unpark()
        spoil(handle)
        optimizer.backward(job.loss(model, rank, 0, 0))
        optimizer.step()
        assert same_bits(handle.full_state_dict(), truth)


class Drift(torch.optim.Optimizer):
    """Moves every element, also one whose value and gradient are zero, as Adam does with eps=0 (0 / 0)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 1, alpha=-group["lr"])


class PartlyUsed(nn.Module):
    """Has a parameter that gets no gradient, so that a step gathers only a part of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.unused, self.out = nn.Linear(5, 37), nn.Linear(7, 9), nn.Linear(37, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(x))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_padding_that_an_optimizer_moves_is_no_difference_between_ranks(num_ranks: int) -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: Sequence[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
                (model(x).square().mean() / len(ranks)).backward()
            optimizer.step()

    def check(rank: int) -> None:
        truth = make(PartlyUsed)
        steps(truth, Drift(truth.parameters(), 0.1), range(num_ranks))
        for plan in PLANS:
            model = make(PartlyUsed)
            handle = zeroshard.shard(model, plan)
            steps(model, zeroshard.ShardedOptimizer(handle, Drift, lr=0.1), [rank])
            torch.testing.assert_close(handle.full_state_dict(), dict(truth.state_dict()), msg=str(plan))

    run_ranks(check, num_ranks)
