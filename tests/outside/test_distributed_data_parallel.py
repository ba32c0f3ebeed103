"""torch: the tests of DistributedDataParallel in torch/testing/_internal/distributed/distributed_test.py.

`DistributedDataParallel(model)` is `shard(model, plan)`. What its constructor sets (`find_unused_parameters`,
`static_graph`, buckets, views, broadcasts of buffers) is nothing to set here: see docs/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.grids import grid
from tests.outside.common import (
    PLANS,
    State,
    Twins,
    average_gradients,
    expect_close,
    expect_same_bits,
    expect_same_on_all_ranks,
    in_fp64,
    numbers,
    state_of,
)
from tests.together import in_turn, on_ranks
from zeroshard.placement import Plan

SGD = torch.optim.SGD
FULL_WEIGHTS = (zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO2)


def layers(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(numbers(6, rank, step)).square().mean()


@on_ranks(3)
@in_fp64
def test_a_gradient_that_is_undefined(rank: int) -> None:
    """test_undefined_grad_parity_unused_parameters: a backward that comes to no parameter, on all ranks or on one."""
    for plan, ranks in grid(PLANS, [(0, 1, 2), (1,)]):
        twins = Twins(layers(), plan, torch.optim.AdamW, lr=1e-2, weight_decay=0.5)

        def loss(model: nn.Module, step: int, ranks: tuple[int, ...] = ranks) -> Tensor:
            value = loss_of(model, rank, step)
            return torch._C._functions.UndefinedGrad()(value) if step == 1 and rank in ranks else value

        twins.train(loss, 3)


@on_ranks(2)
@in_fp64
def test_other_tensors_in_place_of_parameters(rank: int) -> None:
    """test_stateless_api_with_ddp: `functional_call` gives gradients to the tensors that it is given."""
    for plan in PLANS:
        twins = Twins(layers(1), plan)
        weight, bias = (torch.full(size, 0.5, requires_grad=True) for size in ((6, 6), (6,)))
        x = numbers(6, rank)
        with twins.handle.unsharded():
            out = torch.func.functional_call(twins.model, {"0.weight": weight, "0.bias": bias}, x)
            out.sum().backward()
        torch.testing.assert_close(out, x @ weight.T + bias)
        assert weight.grad is not None and bias.grad is not None
        assert all(parameter.grad is None for parameter in twins.model.parameters())
        twins.train(lambda model, step: loss_of(model, rank, step))


class Proxy(nn.Module):
    """The second layer has another shape on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 6)
        self.fc2 = nn.Linear(6 + rank, 3)
        self.fc2.register_buffer("table", torch.zeros(5 + rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


@on_ranks(2)
@in_fp64
def test_an_ignored_part_is_replaced_afterwards(rank: int) -> None:
    """test_ddp_ignore_params_arg: a part that differs between ranks, and that another one takes the place of."""
    for plan in PLANS:
        torch.manual_seed(0)
        model = Proxy(rank)
        handle = zeroshard.shard(model, plan, ignored=[model.fc2])
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=0.1)
        former, model.fc2 = model.fc2, nn.Linear(6, 3)
        with handle.unsharded():
            plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
            for index, part in enumerate((model.fc1, model.fc2)):
                plain[index].load_state_dict(part.state_dict())
        for step in range(2):
            for one in (model, plain):
                loss_of(one, rank, step).backward()
            torch.testing.assert_close(model.fc2.weight.grad, plain[1].weight.grad)
        assert all(parameter.grad is None for parameter in former.parameters())
        average_gradients(plain[0].parameters())
        torch.testing.assert_close(handle.gradient("fc1.weight"), plain[0].weight.grad)
        optimizer.step()


@on_ranks(2)
@in_fp64
def test_one_rank_evaluates_alone(rank: int) -> None:
    """test_ddp_inference: in evaluation, with gradients or not, between the steps."""
    for plan in FULL_WEIGHTS:
        twins = Twins(layers(), plan)
        for step in range(2):
            twins.train(lambda model, step: loss_of(model, rank, step), 1)
            for grad in (True, False) if rank == 0 else ():
                with torch.set_grad_enabled(grad):
                    found, expected = (one.eval()(numbers(6, 9)) for one in (twins.model, twins.plain))
                torch.testing.assert_close(found, expected)


@on_ranks(3)
def test_other_ranks_go_on(rank: int) -> None:
    """test_ddp_update_process_group_new_group: the same model on other groups, one after the other."""
    groups = {(0, 1, 2): None, (0, 1): dist.new_group([0, 1]), (1, 2): dist.new_group([1, 2])}
    weights = []
    for plan in PLANS:
        model = layers()
        for members in ((0, 1, 2), (0, 1), (1, 2), (0, 1, 2)):
            if rank in members:
                handle = zeroshard.shard(model, plan, mesh=groups[members], units=nn.Linear)
                optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=0.1)
                loss_of(model, rank, 0).backward()
                optimizer.step()
                handle.close()
        weights.append(state_of(model))
    expect_same_bits(weights)
    expect_same_on_all_ranks(weights[0])


def stepping(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    return lambda *_: optimizer.step() and None


@on_ranks(2)
def test_a_plain_optimizer_that_would_train_nothing_raises(rank: int) -> None:
    """test_ddp_apply_optim_in_backward, and one that is stepped behind a ShardedOptimizer of other parameters. Its
    parameters were not trained, in silence."""

    def in_backward(model: nn.Sequential, others: Callable[[], object]) -> None:
        for parameter in model[0].parameters():  # as `torch.distributed.optim` does it
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(stepping(SGD([parameter], lr=0.1)))
        others()
        loss_of(model, rank, 0).backward()

    def behind(model: nn.Sequential, others: Callable[[], Any]) -> None:
        plain, optimizer = SGD(model[0].parameters(), lr=0.1), others()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        plain.step()

    def check(rank: int, plan: Plan, way: Callable[..., None], message: str) -> None:
        model = layers()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        with pytest.raises(RuntimeError, match=rf"a plain SGD would not train 0\.(weight|bias): {message}"):
            way(model, lambda: zeroshard.ShardedOptimizer(model[1:].parameters(), SGD, lr=0.1))
        other = nn.Parameter(torch.ones(1))  # of another model
        other.grad = torch.ones(1)
        SGD([other, nn.Parameter(torch.ones(1))], lr=0.5).step()
        assert other.item() == 0.5
        handle.abandon()

    ways = [(in_backward, "inside of backward"), (behind, "a ShardedOptimizer that has not this parameter")]
    in_turn(check, [(plan, *way) for plan in PLANS for way in ways])(rank)


@on_ranks(2)
def test_optimizers_that_train_something_do_not_raise(rank: int) -> None:
    """A ShardedOptimizer that takes the parameters afterwards, and a plain one after `close()`, also in backward."""
    for plan in PLANS:
        model = layers(2)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(model[0].parameters(), SGD, lr=0.1)
        other = zeroshard.ShardedOptimizer([model[1].weight], SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        other.add_param_group({"params": [model[1].bias]})
        other.step()
        del other
        loss_of(model, rank, 1).backward()
        optimizer.step()
        handle.close()
        plain = SGD(model.parameters(), lr=0.1)
        plain.step()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(stepping(plain))
        before = state_of(model)
        loss_of(model, rank, 1).backward()
        assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Uneven inputs --------------------------------------------------------------------------------------------------------

STEPS = (2, 5)
SKIPPED = (2, 4)


def discard(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "p.grad = None":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        (optimizer if how.startswith("optimizer") else model).zero_grad(set_to_none="False" not in how)


@on_ranks(2)
@in_fp64
def test_steps_that_are_left_out_in_a_join(rank: int) -> None:
    """test_ddp_grad_div_uneven_inputs, where gradients are discarded without a step. `model.zero_grad()` and
    `optimizer.zero_grad(set_to_none=False)` raised under ZeRO, with a message about other units. At the end of a join,
    ranks that had run out kept the gradients, and added those of the next backward to them, in silence."""
    of_plans: dict[str, list[State]] = {}
    plain = layers()
    plain_optimizer = SGD(plain.parameters(), lr=0.1)
    for step in range(max(STEPS) + 2):
        for of_rank in (one for one in range(2) if step < STEPS[one] or step >= max(STEPS)):
            (loss_of(plain, of_rank, step) / 2).backward()
        if step not in SKIPPED:
            plain_optimizer.step()
        plain_optimizer.zero_grad()
    ways = ("model", "p.grad = None", "optimizer", "optimizer, set_to_none=False")
    for plan, how in grid(PLANS, ways):
        model = layers()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, SGD, lr=0.1)
        with handle.join():
            for step in range(STEPS[rank]):
                loss_of(model, rank, step).backward()
                if step not in SKIPPED:
                    optimizer.step()
                discard(how, model, optimizer)
        for step in range(max(STEPS), max(STEPS) + 2):
            loss_of(model, rank, step).backward()
            optimizer.step()
        weights = handle.full_state_dict()
        expect_same_on_all_ranks(weights)
        expect_close(weights, state_of(plain))
        of_plans.setdefault(how, []).append(weights)
    expect_same_bits([weights for states in of_plans.values() for weights in states])
