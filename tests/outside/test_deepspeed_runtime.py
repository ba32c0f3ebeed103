"""DeepSpeed: tests/unit/runtime/ besides test_zero.py and test_dynamic_loss_scale.py, and tests/unit/checkpoint/.

`safe_get_full_grad` and `safe_set_full_grad` are `handle.gradient` and `handle.set_gradient`; those of the fp32 weights
`full_state_dict(main=True)` and `load_full_state_dict`; those of the state `optimizer.state[p]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import grid
from tests.outside.common import PLANS, State, Twins, expect_same_bits, in_fp64, numbers, under_all_plans
from tests.together import on_ranks


class Narrow(nn.Module):
    """16 numbers, one, and 16 again; the first layer may be frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.linears = nn.Sequential(nn.Linear(16, 1), nn.Linear(1, 1), nn.Linear(1, 16))
        self.linears[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linears(x)).float().square().mean()


@on_ranks(2)
def test_gradients_weights_and_state_are_read_and_set(rank: int) -> None:
    """TestTensorFragmentGet, TestTensorFragmentUpdate: what is set after backward, and after a step, is read again, to
    the bit, in each precision; and the step uses it."""
    of_plans: dict[Any, list[State]] = {}
    for plan, precision, frozen in grid(PLANS, ("fp32", "bf16", "fp16", "bf16-remainder"), (False, True)):
        torch.manual_seed(0)
        model = Narrow(frozen)
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for step in range(2):

            def drawn(seed: int, trained: dict[str, nn.Parameter] = trained) -> State:
                generator = torch.Generator().manual_seed(seed)
                return {name: torch.rand(one.shape, generator=generator) for name, one in trained.items()}

            def set_weights(seed: int, handle: zeroshard.Handle = handle) -> None:
                handle.load_full_state_dict(drawn(seed), strict=False)
                found = handle.full_state_dict(main=True)
                assert all(torch.equal(found[name], value) for name, value in drawn(seed).items())

            optimizer.backward(model(numbers(16, rank, step)))
            gradients = {name: value.to(handle.gradient(name).dtype) for name, value in drawn(step).items()}
            for name, value in gradients.items():
                handle.set_gradient(name, value)
            set_weights(10 + step)
            assert all(torch.equal(handle.gradient(name), value) for name, value in gradients.items())
            assert optimizer.step().applied
            for name, value in drawn(20 + step).items():
                optimizer.state[trained[name]] = {**optimizer.state[trained[name]], "exp_avg": value}
            set_weights(30 + step)
            for name, value in drawn(20 + step).items():
                assert torch.equal(optimizer.state[trained[name]]["exp_avg"], value)
            optimizer.zero_grad()
        of_plans.setdefault((precision, frozen), []).append(handle.full_state_dict(main=True))
    for weights in of_plans.values():
        expect_same_bits(weights)


class Choosing(nn.Module):
    """One of two layers: another one in each call, or on each rank."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 6)
        self.rank, self.calls = rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(torch.relu(self.linears[(self.calls if self.rank is None else self.rank) % 2](x)))


@on_ranks(3)
@in_fp64
def test_a_layer_that_is_chosen_in_each_call(rank: int) -> None:
    """TestSetZ3LeafModule: nothing has to be declared where the layers are in one unit."""
    for plan, of_rank, units in grid(PLANS, (rank, None), (None, Choosing)):
        torch.manual_seed(0)
        twins = Twins(Choosing(of_rank), plan, shard={"units": units})
        twins.train(lambda model, step: model(numbers(6, rank, step)).square().mean(), 3)


@on_ranks(2)
def test_a_second_forward_without_gradients(rank: int) -> None:
    """TestZ3MultipleModelCall: one loss of two forwards, one of them under `no_grad`."""

    def train(rank: int, plan: zeroshard.Plan) -> State:
        twins = Twins(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), plan, shard={"units": nn.Linear})

        def loss_of(model: nn.Module, step: int) -> Tensor:
            loss = model(numbers(6, rank, step)).square().mean()
            with torch.no_grad():
                second = model(numbers(6, rank, step + 5)).square().mean()
            return loss + second

        return twins.train(loss_of)

    under_all_plans(rank, train)
