"""FairScale: tests/nn/data_parallel/test_sharded_ddp_features.py and test_sharded_ddp_pytorch_parity.py, under ZERO1,
and under the other plans where these behave alike.

`OSS` and `ShardedDataParallel` around a model are `shard(model, "zero1")` (or "zero2") and a `ShardedOptimizer`. There
is no wrapper: the model remains the same object.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import plans_of, with_plans
from tests.outside.common import (
    PLANS,
    Transformer,
    Twins,
    expect_close,
    expect_same_bits,
    expect_same_on_all_ranks,
    in_fp64,
    numbers,
    state_of,
    tokens,
)
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan

SGD = torch.optim.SGD


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), *(nn.Linear(3, 3) for _ in range(5)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((self.mlp(x), self.mlp(y)), dim=1)


class WithEmbedding(nn.Module):
    """trunk and head on embedded indices; `twice`: the head runs two times in one forward."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.embedding = nn.Embedding(32, 2)
        self.twice = twice

    def forward(self, indices: Tensor) -> Tensor:
        x = self.head(self.trunk(self.embedding(indices)))
        return self.head(x) if self.twice else x


def indices(rank: int, step: int, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    return torch.randint(32, (8, 2), generator=generator)


@on_ranks(2)
def test_models_are_equal_on_all_ranks_at_first_and_after_each_step(rank: int) -> None:
    """test_step, CPU and gloo: a frozen first parameter, a buffer that differs between ranks, gradient accumulation."""

    @in_fp64
    def check(rank: int, accumulate: bool, plan: Plan) -> None:
        torch.manual_seed(rank)
        model = mlp()
        model.register_buffer("of_rank", torch.ones(1) * rank)
        next(model.parameters()).requires_grad = False
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1e-3, momentum=0.99)
        expect_same_on_all_ranks(handle.full_state_dict())  # also the buffer: rank 0's value at first
        for step in range(3):
            before = handle.full_state_dict()
            for micro_batch in range(2 if accumulate else 1):
                with handle.no_sync() if accumulate and not micro_batch else nullcontext():
                    model(numbers(2, rank, step, micro_batch, rows=64)).abs().sum().backward()
            optimizer.step()
            after = handle.full_state_dict()
            expect_same_on_all_ranks(after)
            assert [torch.equal(before[n], after[n]) for n in before].count(True) == 2  # frozen weight, buffer

    in_turn(check, with_plans([False, True]))(rank)


@on_ranks(2)
def test_buffers_are_made_equal_when_asked(rank: int) -> None:
    """test_step, `broadcast_buffers=True`: there in every forward. Here each rank has its own buffers, and
    `average_buffers` of the handle averages them."""
    model = mlp()
    handle = zeroshard.shard(model, "zero1")
    model.register_buffer("of_rank", torch.ones(1) * rank)
    assert model.of_rank == rank
    handle.average_buffers()
    assert model.of_rank == 0.5


@on_ranks(2)
@in_fp64
def test_several_inputs(rank: int) -> None:
    """test_inputs, test_training_change: the model also works after eval()."""
    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        twins = Twins(TwoInputs(), plan, SGD, lr=1e-3, momentum=0.99)
        x, y = numbers(2, rank, rows=8), numbers(2, rank, 1, rows=8)
        weights.append(twins.train(lambda model, step, x=x, y=y: model(x, y).abs().sum(), steps=3))
        twins.model.eval(), twins.plain.eval()
        for _ in range(2):
            torch.testing.assert_close(twins.model(x, y), twins.plain(x, y))
    expect_same_bits(weights)


@on_ranks(1)
def test_the_model_keeps_its_attributes(rank: int) -> None:
    """test_ddp_attributes, test_random_attributes: nothing is wrapped, so there is no `module` and nothing to
    forward."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    model.banana = "sweet"
    zeroshard.shard(model, "zero1")
    assert type(model) is nn.Sequential and model.banana == "sweet"
    assert not hasattr(model, "orange")


@on_ranks(2)
@in_fp64
def test_a_gradient_with_a_graph_of_its_own_is_added_to_as_in_torch(rank: int) -> None:
    """test_catch_grad_grad: there the next forward raises. Here backward adds to the gradient in `p.grad`, as torch
    does, or the error names the parameter: the gradient is never lost."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
        twins = Twins(model, plan, SGD, lr=1e-3, momentum=0.99)
        for one in (twins.model, twins.plain):
            first = next(one.parameters())
            first.grad = torch.ones_like(first).requires_grad_()
        twins.backward(lambda model: model(numbers(2, rank)).sum())
        twins.step()
        twins.expect_equal()


@on_ranks(2)
def test_a_frozen_parameter_of_integers(rank: int) -> None:
    """test_mixed_types."""

    class Tripwire(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 3, bias=False)
            self.tripwire = nn.Parameter(torch.tensor([3, 3]), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    for plan in PLANS:
        model = Tripwire()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1e-3, momentum=0.99)
        model(torch.rand(2, 2)).sum().backward()
        optimizer.step()
        assert handle.full_state_dict()["tripwire"].tolist() == [3, 3]


@on_ranks(3)
def test_from_training_to_evaluation_and_back(rank: int) -> None:
    """test_train_eval_change: `model.zero_grad()` discards, and the gradients of the next backward are those alone."""

    @in_fp64
    def check(rank: int) -> None:
        for plan in PLANS:
            torch.manual_seed(0)
            twins = Twins(mlp(), plan, SGD, lr=1e-3, momentum=0.99)
            twins.backward(lambda model: model(numbers(2, rank)).sum())
            for model in (twins.model, twins.plain):
                model.zero_grad()
                model.eval()
            torch.testing.assert_close(twins.model(numbers(2, rank)), twins.plain(numbers(2, rank)))
            twins.model.train(), twins.plain.train()
            twins.backward(lambda model: model(numbers(2, rank, 1)).sum())
            twins.step()
            twins.expect_equal()

    check(rank)


@on_ranks(2)
def test_moving_the_model_afterwards_is_refused(rank: int) -> None:
    """test_device_change, and the `.to(dtype)` in test_gpt2: parameters lie in the engine's buffers."""
    for plan in PLANS:
        model = mlp()
        zeroshard.shard(model, plan)
        with pytest.raises(RuntimeError, match="move and cast a model before shard"):
            model.to(torch.float16)(torch.rand(4, 2).half())


@on_ranks(2)
@in_fp64
def test_two_optimizers_for_one_model(rank: int) -> None:
    """test_two_optimizers, test_ddp_parity_two_optim: each optimizer steps its half after one backward."""
    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        model = WithEmbedding()
        plain = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan)
        half = len(list(model.parameters())) // 2
        options = {"lr": 1e-3, "momentum": 0.99}
        ours = [
            zeroshard.ShardedOptimizer(list(model.parameters())[part], SGD, **options)
            for part in (slice(half), slice(half, None))
        ]
        theirs = [SGD(list(plain.parameters())[part], **options) for part in (slice(half), slice(half, None))]
        for step in range(3):
            for optimizer in (*ours, *theirs):
                optimizer.zero_grad()
            for one in (model, plain):
                one(indices(rank, step)).abs().sum().backward()
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
                parameter.grad /= 2
            for optimizer in (*ours, *theirs):
                optimizer.step()
            expect_close(handle.full_state_dict(), state_of(plain))
        weights.append(handle.full_state_dict())
    expect_same_bits(weights)


@on_ranks(2)
@in_fp64
def test_parameters_that_forward_does_not_use(rank: int) -> None:
    """test_gpt2: trainable, and never called; inputs are integers, so the first module gets no gradient from its
    input."""

    class Classifier(Transformer):
        def __init__(self) -> None:
            super().__init__(layers=2)
            self.unused = nn.Linear(16, 2)

    weights = []
    for plan in PLANS:
        torch.manual_seed(0)
        twins = Twins(Classifier(), plan, SGD, lr=1e-3, momentum=0.99)
        weights.append(twins.train(lambda model, step: model(tokens(rank, step)).abs().sum()))
    expect_same_bits(weights)


@on_ranks(4)
def test_a_process_group_of_some_ranks(rank: int) -> None:
    """test_multiple_groups: ranks 0 and 2 of four train together."""

    @in_fp64
    def check(rank: int) -> None:
        group = dist.new_group([0, 2])
        if rank % 2:
            return
        for plan in PLANS:
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 5))
            handle = zeroshard.shard(model, plan, mesh=group)
            optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=1e-3, momentum=0.99)
            for step in range(3):
                optimizer.zero_grad()
                model(numbers(20, rank, step)).abs().sum().backward()
                optimizer.step()
                expect_same_on_all_ranks(handle.full_state_dict(), group)

    check(rank)


@on_ranks(2)
def test_parity_with_ddp(rank: int) -> None:
    """test_ddp_parity, without amp (fp16 needs a GPU there): three micro-batches, a head that runs twice, the first
    parameter frozen at first and trained from the second step on, and the norm that clips."""

    @in_fp64
    def check(rank: int, twice: bool, accumulate: bool, plans: Any) -> None:
        weights = []
        for plan in plans:
            torch.manual_seed(0)
            model = WithEmbedding(twice)
            model.register_buffer("of_rank", torch.ones(1))
            next(model.parameters()).requires_grad = False
            twins = Twins(model, plan, SGD, lr=1e-4, momentum=0.99)
            for step in range(4):
                for micro_batch in range(3 if accumulate else 1):
                    last = not accumulate or micro_batch == 2
                    twins.backward(
                        lambda model, s=step, m=micro_batch: model(indices(rank, s, m)).abs().sum(),
                        reduced=last,
                    )
                twins.expect_equal_gradients()
                expected = nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.3)
                torch.testing.assert_close(twins.optimizer.clip_grad_norm_(0.3), expected)
                twins.optimizer.step(), twins.plain_optimizer.step()
                twins.optimizer.zero_grad(), twins.plain_optimizer.zero_grad()
                twins.expect_equal()
                if step == 0:
                    for one in (twins.model, twins.plain):
                        next(one.parameters()).requires_grad = True
            weights.append(twins.handle.full_state_dict())
        expect_same_bits(weights)

    cases = itertools.product([False, True], [False, True])
    in_turn(check, [(*case, plans_of(number)) for number, case in enumerate(cases)])(rank)
