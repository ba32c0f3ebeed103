"""torch: test/distributed/optim/test_zero_redundancy_optimizer.py, under plan OPTIMIZER_ONLY and, for tests of whole
training runs, under ZERO1.

`ZeroRedundancyOptimizer(params, optimizer_class=C, ...)` is `ShardedOptimizer(params, C, ...)`;
`consolidate_state_dict` is not needed, because `state_dict()` is collective.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.outside.common import (
    State,
    Twins,
    average_gradients,
    expect_close,
    expect_same_on_all_ranks,
    in_fp64,
    numbers,
    state_of,
    under_all_plans,
)
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def one(value: float = 1.0) -> torch.Tensor:
    """A leaf tensor that is not an nn.Parameter."""
    return torch.tensor([value], requires_grad=True)


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.Linear(10, 10), nn.Linear(10, 5))


def weights_and_biases(model: nn.Module, decay: float = 0.01) -> list[dict[str, Any]]:
    return [
        {"params": [layer.weight for layer in model if isinstance(layer, nn.Linear)], "weight_decay": 0.0},
        {"params": [layer.bias for layer in model if isinstance(layer, nn.Linear)], "weight_decay": decay},
    ]


# One rank ------------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_state_dict_is_torchs_and_loads_over_other_hyper_parameters(rank: int) -> None:
    """TestZeroRedundancyOptimizerSingleRank.test_state_dict."""
    x = one()
    optimizer = zeroshard.ShardedOptimizer([x], SGD, lr=0.1, momentum=0.9)
    x.backward()
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))
    optimizer.zero_grad()
    state = optimizer.state_dict()
    torch.testing.assert_close(state["state"][0]["momentum_buffer"], torch.tensor([1.0]))
    (group,) = state["param_groups"]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.1, 0.9, False)
    assert group["weight_decay"] == group["dampening"] == 0.0
    assert all(group[key] == optimizer.param_groups[0][key] for key in group if key != "params")

    del optimizer
    gc.collect()
    other = zeroshard.ShardedOptimizer([x], SGD, lr=0.01)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    x.grad = None
    x.backward()
    other.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.71]))
    torch.testing.assert_close(other.state_dict()["state"][0]["momentum_buffer"], torch.tensor([1.9]))
    assert other.param_groups[0]["params"][0].device == x.device


@on_ranks(2)
def test_a_scheduler_goes_on_through_steps_without_gradients(rank: int) -> None:
    """test_lr_scheduler (both classes): the test calls zero_grad between backward and step, so no step has a
    gradient."""
    x, plain = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer, plain_optimizer = zeroshard.ShardedOptimizer([x], SGD, lr=0.01), SGD([plain], lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1) for one in (optimizer, plain_optimizer)]
    for step in range(5):
        for parameter, stepped, schedule in ((x, optimizer, schedules[0]), (plain, plain_optimizer, schedules[1])):
            parameter.backward()
            if step % 2 == 0:
                stepped.zero_grad()
            stepped.step()
            stepped.zero_grad()
            schedule.step()
        torch.testing.assert_close(x, plain)
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]


@on_ranks(1)
def test_step_passes_keyword_arguments_to_the_class(rank: int) -> None:
    """test_step_with_kwargs."""

    class Noting(SGD):
        def step(self, closure: Any = None, noted: Any = None) -> Any:
            noted.append(5)
            return super().step(closure)

    noted: list[int] = []
    x = nn.Parameter(torch.ones(1))
    optimizer = zeroshard.ShardedOptimizer([x], Noting, lr=0.1, elementwise=True)  # a trial would pass no list
    x.backward()
    optimizer.step(noted=noted)
    assert noted == [5]
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


@on_ranks(1)
def test_keys_that_the_class_adds_to_its_groups_are_seen_outside(rank: int) -> None:
    """test_step_with_extra_inner_key."""

    class Adding(SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["new_key"] = 0.1
            return super().step(closure)

    x = nn.Parameter(torch.ones(1))
    optimizer = zeroshard.ShardedOptimizer([x], Adding, lr=0.1)
    x.backward()
    optimizer.step()
    assert optimizer.param_groups[0]["new_key"] == 0.1
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


@on_ranks(1)
def test_a_class_whose_step_takes_no_closure(rank: int) -> None:
    """test_step_without_closure."""

    class Bare(SGD):
        def step(self) -> Any:
            return super().step()

    x = nn.Parameter(torch.ones(1))
    optimizer = zeroshard.ShardedOptimizer([x], Bare, lr=0.1)
    x.backward()
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))


@on_ranks(2)
def test_zero_grad_clears_what_torch_has_left_in_the_parameters(rank: int) -> None:
    """test_zero_grad (FairScale's has the same name)."""
    model = nn.Linear(1, 1)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=0.01)
    model(torch.rand(1)).backward()
    assert model.weight.grad is not None and model.bias.grad is not None
    optimizer.zero_grad()
    assert model.weight.grad is None and model.bias.grad is None


@on_ranks(1)
def test_what_may_be_passed_as_parameters(rank: int) -> None:
    """test_constructor: also several groups, a generator, a list."""
    model = three_layers()
    wrong: list[tuple[Any, type[Exception]]] = [
        ([], ValueError),
        (1.2, TypeError),
        (torch.randn(1), TypeError),
        ([*model.parameters(), 42], TypeError),
    ]
    for params, error in wrong:
        with pytest.raises(error):
            zeroshard.ShardedOptimizer(params, SGD, lr=0.01)
    for params in (weights_and_biases(model), model.parameters(), list(model.parameters())):
        zeroshard.ShardedOptimizer(params, SGD, lr=0.01)
        gc.collect()
    optimizer = zeroshard.ShardedOptimizer(weights_and_biases(model), AdamW, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]


@on_ranks(1)
def test_sparse_parameters_are_refused(rank: int) -> None:
    """test_same_dense_param_type, its first and third input."""
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor(size=(2, 3)).requires_grad_()
    for params in ([sparse], [one(), one(), sparse]):
        with pytest.raises((ValueError, TypeError), match=r"sparse|strided|dense"):
            zeroshard.ShardedOptimizer(params, SGD, lr=0.01)


@on_ranks(2)
def test_parameters_of_several_dtypes_are_trained(rank: int) -> None:
    """test_same_dense_param_type, its second input: refused there, "until support is added"; here it is."""
    x, y = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = zeroshard.ShardedOptimizer([x, y], SGD, lr=0.1)
    (x.double() * y).backward()
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.9]))
    torch.testing.assert_close(y.detach(), torch.tensor([0.9], dtype=torch.float64))


# Several ranks -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_is_that_of_a_plain_optimizer(rank: int) -> None:
    """TestZeroRedundancyOptimizerDistributed.test_step, FairScale's test_step: gradients averaged by hand."""
    x = torch.tensor([float(rank + 1)])
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0), nn.init.constant_(model.bias, 2.0)
    plain = copy.deepcopy(model)
    plain_optimizer = SGD(plain.parameters(), lr=0.1)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=0.1)
    for one in (model, plain):
        one(x).backward(x)
        average_gradients(one.parameters())
    optimizer.step(), plain_optimizer.step()
    expect_close(state_of(model), state_of(plain))
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[0.75]]))
    torch.testing.assert_close(model.bias.detach(), torch.tensor([1.85]))


@on_ranks(2)
def test_a_closure_is_called_once_and_its_loss_comes_back(rank: int) -> None:
    """test_step_with_closure (FairScale's as well): gradients from before the closure are discarded."""
    x = torch.tensor([rank + 1.0])
    target = x + 3.0
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0), nn.init.constant_(model.bias, 2.0)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=0.1)
    model(x).backward(x)
    average_gradients(model.parameters())
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(x), target)
        loss.backward()
        average_gradients(model.parameters())
        return loss

    result = optimizer.step(closure)
    assert len(calls) == 1 and result == 1.0 and result.item() == 1.0
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1.15]]))  # x is 1 and 2: a mean of 1.5
    torch.testing.assert_close(model.bias.detach(), torch.tensor([2.1]))


def test_every_rank_holds_an_equal_part() -> None:
    """test_sharding (FairScale's as well): shards are whole parameters there, and elements here."""

    def check(rank: int) -> int:
        params = [nn.Parameter(torch.rand(size, 1)) for size in [900, 700, 500, 300] * 4]
        optimizer = zeroshard.ShardedOptimizer(params, SGD, lr=0.01, momentum=0.9)
        torch._foreach_add_([p.data for p in params], 1.0)
        sum(p.sum() for p in params).backward()
        optimizer.step()
        return optimizer.handle.memory()["state"]

    held = run_ranks(check, 4)
    assert max(held) == min(held) and 4 * 2400 <= held[0] < 4 * (2400 + 16 * 64 + 256)


@on_ranks(3)
def test_parameters_added_later_are_trained_by_everybody(rank: int) -> None:
    """test_add_param_group (FairScale's as well): parameters that are added later; some do not require grad."""
    for sizes, frozen in (([9, 7, 5, 3, 9, 7, 5], 0), ([100, 3, 5, 2, 6, 4], 1)):
        torch.manual_seed(3)
        params = [nn.Parameter(torch.rand(size, 1), requires_grad=i >= frozen) for i, size in enumerate(sizes)]
        added = nn.Parameter(torch.rand(3, 1))
        expected = [p.detach() - (0.1 if p.requires_grad else 0.0) for p in (*params, added)]
        optimizer = zeroshard.ShardedOptimizer(params, SGD, lr=0.1)
        optimizer.add_param_group({"params": [added]})
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(sizes), 1]
        sum(p.sum() for p in (*params, added)).backward()
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in (*params, added)], expected)


@on_ranks(2)
@in_fp64
def test_groups_given_at_once_or_one_after_the_other_are_the_same(rank: int) -> None:
    """test_multiple_param_groups: and both are a plain AdamW."""
    models = [three_layers() for _ in range(3)]
    at_once = zeroshard.ShardedOptimizer(weights_and_biases(models[0]), AdamW, lr=0.01)
    first, second = weights_and_biases(models[1])
    later = zeroshard.ShardedOptimizer(first["params"], AdamW, lr=0.01, weight_decay=0.0)
    later.add_param_group(second)
    plain = AdamW(weights_and_biases(models[2]), lr=0.01)
    for step in range(3):
        for model, optimizer in zip(models, (at_once, later, plain), strict=True):
            optimizer.zero_grad()
            model(numbers(5, rank, step)).sum().backward()
            average_gradients(model.parameters())
            optimizer.step()
        expect_close(state_of(models[0]), state_of(models[2]))
        expect_close(state_of(models[1]), state_of(models[2]))


@on_ranks(2)
@in_fp64
def test_the_state_of_all_parameters_is_collected_and_loaded(rank: int) -> None:
    """test_collect_shards (FairScale's as well): the state travels from one rank to the others by broadcast."""
    model = three_layers()
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=1e-3, momentum=0.99)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(numbers(5, rank)).abs().sum()
        loss.backward()
        average_gradients(model.parameters())
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    assert len(state["state"]) == len(list(model.parameters()))
    package = [state if rank == 0 else {}]
    dist.broadcast_object_list(package, src=0)
    optimizer.load_state_dict(package[0])
    optimizer.step(closure)
    expect_same_on_all_ranks(state_of(model))


@on_ranks(4)
def test_a_process_group_of_some_ranks(rank: int) -> None:
    """test_nondefault_process_group, FairScale's test_multiple_groups: the even ranks of four."""

    @in_fp64
    def check(rank: int) -> None:
        group = dist.new_group([0, 2])
        if rank % 2:
            return
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(20, 10), nn.Linear(10, 5))
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), SGD, lr=1e-3, momentum=0.99, process_group=group)
        for step in range(5):
            optimizer.zero_grad()
            model(numbers(20, rank, step)).abs().mean().backward()
            average_gradients(model.parameters(), group)
            optimizer.step()
            expect_same_on_all_ranks(state_of(model), group)

    check(rank)


@on_ranks(2)
def test_under_ddp_a_sharded_optimizer_is_the_local_one(rank: int) -> None:
    """test_local_optimizer_parity, with and without `maximize`: a parameter stops and begins to require grad in
    between, and each loads the other's state."""

    @in_fp64
    def check(rank: int, optimizer_class: type[torch.optim.Optimizer]) -> None:
        for maximize in (False, True):
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
            model.register_buffer("of_rank", torch.ones(1) * rank)
            local = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
            sharded = DistributedDataParallel(model, find_unused_parameters=True)
            options = {"lr": 1e-3, "maximize": maximize}
            optimizer = zeroshard.ShardedOptimizer(sharded.parameters(), optimizer_class, **options)
            local_optimizer = optimizer_class(local.parameters(), **options)

            def step(number: int, optimizer: Any = optimizer, local_optimizer: Any = local_optimizer) -> None:
                for one, stepped in ((local, local_optimizer), (sharded, optimizer)):  # noqa: B023
                    stepped.zero_grad()
                    one(numbers(2, rank, number)).abs().sum().backward()
                    stepped.step()
                expect_close(state_of(sharded), state_of(local))  # noqa: B023

            for number in range(3):
                step(number)
                if number > 0:
                    for one in (local, sharded):
                        next(one.parameters()).requires_grad = bool(number % 2)
            theirs, ours = copy.deepcopy(local_optimizer.state_dict()), optimizer.state_dict()
            local_optimizer.load_state_dict(copy.deepcopy(ours)), optimizer.load_state_dict(theirs)
            step(20)
            local_optimizer.load_state_dict(theirs), optimizer.load_state_dict(ours)
            step(21)

    in_turn(check, [torch.optim.Adam, AdamW, SGD])(rank)


@on_ranks(3)
def test_ranks_that_have_fewer_inputs_go_on_with_a_weight_of_nothing(rank: int) -> None:
    """test_zero_join_cpu: rank r has 2 + r batches. There a `Join` shadows collectives for ranks that are done
    (`tests/runtime/test_join.py` tests this). Here such ranks repeat a batch with weight 0, and the step uses the mean
    over the ranks that still have batches."""

    def train(rank: int, plan: Plan) -> State:
        model = three_layers()
        plain = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, AdamW, lr=0.01)
        plain_optimizer = AdamW(plain.parameters(), lr=0.01)
        for step in range(4):
            has_data = step < 2 + rank
            optimizer.backward(model(numbers(5, rank, step)).abs().mean(), weight=1.0 if has_data else 0.0)
            optimizer.step()
            losses = [plain(numbers(5, other, step)).abs().mean() for other in range(3) if step < 2 + other]
            (sum(losses) / len(losses)).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        weights = handle.full_state_dict()
        expect_close(weights, state_of(plain))
        return weights

    under_all_plans(rank, train, 3)


@on_ranks(2)
@in_fp64
def test_overlap_needs_no_hook(rank: int) -> None:
    """test_ddp_zero_overlap: there a DDP communication hook steps while backward runs. Here, under ZERO1, gathers
    overlap the next forward; the results are those of the local optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 30))
    twins = Twins(model, zeroshard.ZERO1, SGD, lr=0.01, momentum=0.9, weight_decay=0.001)
    twins.train(lambda model, step: model(numbers(40, rank, step)).sum(), steps=5)
