"""FairScale: tests/optim/test_oss.py, under plan OPTIMIZER_ONLY.

`OSS(params, C, ...)` is `ShardedOptimizer(params, C, ...)`. Tests that torch's ZeroRedundancyOptimizer took over
from there (`test_state_dict`, `test_lr_scheduler`, `test_step...`, `test_zero_grad`, `test_add_param_group`,
`test_sharding`, `test_collect_shards`, `test_multiple_groups`) are in `test_zero_redundancy_optimizer.py`.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.outside.common import average_gradients, expect_close, expect_same_on_all_ranks, in_fp64, numbers, state_of
from tests.together import in_turn, on_ranks

SGD = torch.optim.SGD


@on_ranks(1)
def test_a_tensor_that_does_not_require_grad_is_accepted(rank: int) -> None:
    """TestSingleRank.test_create: nothing trains yet, and no value is changed."""
    x = torch.rand(1)
    before = x.clone()
    optimizer = zeroshard.ShardedOptimizer([x], SGD, lr=0.01)
    optimizer.step()
    assert torch.equal(x, before) and not x.requires_grad


@on_ranks(2)
def test_state_dict_is_whole_without_a_call_before_it(rank: int) -> None:
    """TestSingleRank.test_implicit_local_state_dict: there it raises before `consolidate_state_dict`. Here the call
    itself is collective, so it never returns a local state dict."""
    params = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(7))]
    optimizer = zeroshard.ShardedOptimizer(params, SGD, lr=0.1, momentum=0.9)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    momenta = [optimizer.state_dict()["state"][i]["momentum_buffer"] for i in (0, 1)]
    assert [m.shape for m in momenta] == [(300,), (7,)] and all(m.eq(1).all() for m in momenta)


@on_ranks(4)
def test_ranks_without_any_parameter_take_part(rank: int) -> None:
    """test_empty_shard: four ranks, two trainable numbers."""
    model = nn.Linear(1, 1)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    expected = [p.detach().clone() for p in model.parameters()]
    dist.broadcast(expected[0], 0), dist.broadcast(expected[1], 0)
    model(torch.ones(20, 1)).sum().backward()
    optimizer.step()
    torch.testing.assert_close([p.detach() for p in model.parameters()], [p - 2.0 for p in expected])


@on_ranks(2)
@in_fp64
def test_rewound_by_state_dicts_the_same_losses_come_again(rank: int) -> None:
    """test_reproducibility, without `broadcast_fp16`: weights travel in the dtype of the model."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)))
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.RMSprop, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(numbers(3, rank)).abs().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    first = [optimizer.step(closure).loss for _ in range(2)]
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    again = [optimizer.step(closure).loss for _ in range(2)]
    assert first == again


@on_ranks(3)
def test_clipping_is_torchs(rank: int) -> None:
    """test_gradient_clipping: the same norm as torch's utility, and the step takes the clipped gradient; twice in a
    row."""

    @in_fp64
    def check(rank: int, norm_type: float) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 10), nn.Linear(10, 5))
        plain = copy.deepcopy(model)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.99)
        plain_optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.99)
        for step in range(2):
            for one, stepped in ((model, optimizer), (plain, plain_optimizer)):
                stepped.zero_grad()
                one(numbers(20, rank, step)).abs().sum().backward()
                average_gradients(one.parameters())
            norm = optimizer.clip_grad_norm_(0.3, norm_type)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
            assert expected > 0.3
            torch.testing.assert_close(norm, expected)
            optimizer.step(), plain_optimizer.step()
            expect_close(state_of(model), state_of(plain))

    in_turn(check, [1.0, 2.0, float("inf")])(rank)


@on_ranks(2)
@in_fp64
def test_a_run_that_is_saved_and_loaded_follows_one_that_is_not(rank: int) -> None:
    """test_state_dict_distributed: two groups, the second added later; the optimizer that loads was built with wrong
    hyper-parameters."""
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 10)), nn.Linear(10, 5)
    kept, other = nn.Sequential(trunk, head), nn.Sequential(copy.deepcopy(trunk), copy.deepcopy(head))

    def optimizer_of(model: nn.Sequential, **options: float) -> zeroshard.ShardedOptimizer:
        first, second = model
        return zeroshard.ShardedOptimizer(
            [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.05}], SGD, **options
        )

    def step(model: nn.Module, optimizer: zeroshard.ShardedOptimizer, number: int) -> None:
        optimizer.zero_grad()
        model(numbers(20, rank, number)).abs().sum().backward()
        average_gradients(model.parameters())
        optimizer.step()

    followed, saved = (optimizer_of(model, lr=0.1, momentum=0.99) for model in (kept, other))
    for number in range(3):
        package = [saved.state_dict()]
        assert [g["lr"] for g in package[0]["param_groups"]] == [0.1, 0.05]
        dist.broadcast_object_list(package, src=1)
        del saved
        saved = optimizer_of(other, lr=1e6, momentum=0.0001)
        saved.load_state_dict(package[0])
        step(kept, followed, number), step(other, saved, number)
        expect_close(state_of(other), state_of(kept))


@on_ranks(2)
def test_with_ddp_groups_may_be_interleaved_and_parameters_freeze(rank: int) -> None:
    """test_ddp_parity (marked "broken at head" there): groups that are not in the order of the model, a first parameter
    that stops and begins to require grad, checkpoints of either loaded into the other."""

    @in_fp64
    def check(rank: int, change_what_trains: bool, optimizer_class: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(rank)
        trunk = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        trunk.register_buffer("of_rank", torch.ones(1) * rank)
        model = nn.Sequential(trunk, nn.Linear(5, 3))
        twin = copy.deepcopy(model)

        def groups(model: nn.Sequential) -> list[dict[str, Any]]:
            of_trunk, of_head = (list(part.parameters()) for part in model)
            return [{"params": of_trunk[:-1] + of_head, "lr": 1e-3}, {"params": of_trunk[-1:], "lr": 1e-2}]

        options: dict[str, Any] = {"momentum": 0.9} if optimizer_class is SGD else {}
        ddp = [DistributedDataParallel(one, find_unused_parameters=True) for one in (model, twin)]
        sharded = zeroshard.ShardedOptimizer(groups(model), optimizer_class, **options)
        plain = optimizer_class(groups(twin), **options)

        def step(number: int) -> None:
            losses = []
            for one, optimizer in zip(ddp, (sharded, plain), strict=True):
                optimizer.zero_grad()
                loss = one(numbers(3, rank, number)).abs().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses)
            expect_close(state_of(model), state_of(twin))

        expect_close(state_of(model), state_of(twin))
        for number in range(5):
            step(number)
            if change_what_trains:
                for one in (model, twin):
                    first = next(one.parameters())
                    first.requires_grad = not first.requires_grad
        ours, theirs = sharded.state_dict(), copy.deepcopy(plain.state_dict())
        plain.load_state_dict(copy.deepcopy(ours)), sharded.load_state_dict(theirs)
        step(6)
        plain.load_state_dict(theirs), sharded.load_state_dict(ours)
        step(7)
        expect_same_on_all_ranks({name: p.detach() for name, p in model.named_parameters()})

    in_turn(check, itertools.product([False, True], [torch.optim.Adam, SGD]))(rank)
