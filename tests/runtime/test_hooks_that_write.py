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
from tests.grids import grid
from tests.kit import PLANS, travelling
from tests.together import in_turn, on_ranks
from zeroshard.testing import RankError, run_ranks

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


@on_ranks(2)
def test_hooks_that_write_nothing_change_nothing(rank: int) -> None:
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

    in_turn(check, [(before, plan) for before in (False, True) for plan in PLANS])(rank)


class Backwards(nn.Module):
    """Its layers run in reverse, so backward comes to them in another order than that in which they are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def test_hooks_of_a_unit_whose_weights_have_gone_before_it_is_reduced() -> None:
    """Under ZERO3 that backward raised: what the hooks had seen was compared with weights that were not here."""

    def check(rank: int, plan: zeroshard.placement.Plan) -> list[Tensor]:
        torch.manual_seed(0)
        model = Backwards()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        register(model, lambda _: put_twice)
        for _ in range(2):
            backward(model, rank)
            optimizer.step()
        weights = list(handle.full_state_dict().values())
        register(model, step_by_hand)
        with pytest.raises(RuntimeError, match="has been written to in a hook of a gradient"):
            backward(model, rank)
        handle.abandon()
        return weights

    for found in run_ranks(in_turn(check, PLANS), 2):
        for weights in found[1:]:
            assert all(map(torch.equal, weights, found[0]))


def put_twice(one: Tensor) -> None:
    assert one.grad is not None
    one.grad = one.grad * 2


@on_ranks(2)
def test_training_goes_on_after_an_error_at_the_end_of_a_backward(rank: int) -> None:
    """The reductions of that backward were never ended: the next ones raised, and so did `zero_grad`."""

    def check(rank: int, plan: zeroshard.placement.Plan) -> None:
        weights = []
        for fails in (True, False):
            torch.manual_seed(0)
            model = Backwards()
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            if fails:
                last = model.layers[4].weight
                hook = last.register_post_accumulate_grad_hook(touch)
                with pytest.raises(RuntimeError, match=r"layers\.4\.weight has been written to in a hook"):
                    backward(model, rank)
                hook.remove()
                with pytest.raises(RuntimeError, match="the last backward has raised"):
                    optimizer.step()
                optimizer.zero_grad()
            for _ in range(2):
                backward(model, rank)
                optimizer.step()
            weights.append(torch.cat([value.flatten() for value in handle.full_state_dict().values()]))
        assert torch.equal(*weights)

    in_turn(check, PLANS)(rank)


@torch.no_grad()
def touch(one: Tensor) -> None:
    one.add_(0.0)  # the values are as before: training can go on


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


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True")
def test_a_graph_on_one_rank_alone_does_not_change_what_ranks_do_to_gradients() -> None:
    """Under DDP others have tensors in `p.grad`, which they change and whose norms they take without an exchange: they
    once waited for each other. The same parameters have a gradient there (a layer without one is left out)."""

    def check(rank: int, plan: zeroshard.placement.Plan) -> None:
        found = []
        for with_graphs in (0, 1):
            model = build()
            model.register_parameter("unused", nn.Parameter(torch.ones(3)))
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
            with handle.unsharded():
                model(x).square().mean().backward(create_graph=rank < with_graphs)
            names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with torch.no_grad():
                norm += model[0].weight.grad.norm() + sum(p.grad.norm(torch.inf) for p in model[2].parameters())
            assert optimizer.step().applied
            found.append((names, norm.item(), [p.tolist() for p in handle.full_state_dict().values()]))
            handle.close()
        assert found[0] == found[1], f"{plan.name}: {found}"

    run_ranks(in_turn(check, PLANS), 2, collective_timeout=20)


def halve(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def halve_data(weight: Tensor) -> None:
    weight.data.mul_(0.5)


def backward_that_writes(rank: int, layer: int, write: Callable[[Tensor], None], way: str) -> None:
    with travelling(way):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(7)])
        zeroshard.shard(model, "zero3", units=nn.Linear)
        model[layer].register_full_backward_hook(lambda module, *_: write(module.weight))
        backward(model, rank)


@pytest.mark.parametrize(("layer", "write", "way"), grid([1, 3, 6], [halve, halve_data], ["shared", "pairwise"]))
def test_hooks_of_modules_in_backward_do_not_write_to_borrowed_weights(
    layer: int, write: Callable[[Tensor], None], way: str
) -> None:
    """Also where another unit takes over the memory in the same backward: such a write was lost, in silence. (The error
    may be of one rank alone, the one whose shard it is.)"""
    with pytest.raises(RankError, match="has been written to in a forward or backward, where its values are borrowed"):
        run_ranks(backward_that_writes, 2, layer, write, way)
