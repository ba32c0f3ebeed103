"""An optimizer that is stepped in gradient hooks, one parameter at a time, as LOMO and layer-wise GaLore do it.

The gradient there is this rank's alone. Under DDP, ZERO1 and ZERO2 each rank once stepped its own weights with it, in
silence, and under ZERO3 so did a step through `p.data`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.together import in_turn
from zeroshard.testing import run_ranks

Hook = Callable[[Tensor], None]


def step_of_torch(parameter: nn.Parameter) -> Hook:
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def hook(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def step_by_hand(parameter: nn.Parameter) -> Hook:
    def hook(one: Tensor) -> None:
        assert one.grad is not None
        one.data.add_(one.grad, alpha=-0.1)  # leaves the version as it is
        one.grad = None

    return hook


def look(parameter: nn.Parameter) -> Hook:
    return lambda one: None if one.grad is None else print(end="" if bool(one.grad.isfinite().all()) else "!")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def backward(model: nn.Module, rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()


def register(model: nn.Module, of: Callable[[nn.Parameter], Hook]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(of(parameter))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_in_a_hook_of_a_gradient_raises_in_that_backward(num_ranks: int) -> None:
    def check(rank: int, case: tuple[Callable[[nn.Parameter], Hook], bool], plan: zeroshard.placement.Plan) -> None:
        of, before = case
        model = build()
        if before:
            register(model, of)
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        if not before:
            register(model, of)
        with pytest.raises(RuntimeError, match=r"2\.bias has been written to in a hook of a gradient"):
            backward(model, rank)
        handle.abandon()

    cases = [(of, before) for of in (step_of_torch, step_by_hand) for before in (False, True)]
    run_ranks(in_turn(check, [(case, plan) for case in cases for plan in PLANS]), num_ranks)


def test_hooks_that_write_nothing_change_nothing() -> None:
    """Also a write between two backwards, and hooks that were registered before `shard`."""

    def check(rank: int, before: bool, plan: zeroshard.placement.Plan) -> list[Tensor]:
        weights = []
        for hooked in (True, False):
            model = build()
            if hooked and before:
                register(model, look)
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            if hooked and not before:
                register(model, look)
            for _ in range(3):
                with handle.no_sync():
                    backward(model, rank)
                backward(model, rank)
                optimizer.step()
                with handle.unsharded(write=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            weights.append(torch.cat([value.flatten() for value in handle.full_state_dict().values()]))
        assert torch.equal(*weights)
        return weights

    run_ranks(in_turn(check, [(before, plan) for before in (False, True) for plan in PLANS]), 2)


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
def test_gradients_with_a_graph_are_not_read_from_p_grad() -> None:
    """`loss.backward(create_graph=True)` leaves graphs in `p.grad` of plain torch. A penalty on `p.grad` once had no
    effect under DDP, nor had one on its norm under any plan."""

    def check(rank: int, plan: zeroshard.placement.Plan) -> None:
        model = build()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for penalty in (torch.Tensor.square, torch.Tensor.norm, lambda grad: grad @ grad):
            with handle.unsharded():
                model(x).square().mean().backward(create_graph=True)
                with pytest.raises(RuntimeError, match=r"create_graph=True, and in p\.grad there is no graph"):
                    penalty(model[2].bias.grad)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert optimizer.step().applied and norm > 0.1
            backward(model, rank)
            if plan is zeroshard.DDP:
                assert type(model[2].bias.grad) is Tensor, "there is no graph any more"
            optimizer.zero_grad()

    run_ranks(in_turn(check, PLANS), 2)
