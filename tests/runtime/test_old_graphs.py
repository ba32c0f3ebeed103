"""Backward of a graph that is older than a step, or than other new values of the weights.

Plain torch raises if the graph has saved a weight that was written to since: its gradients would be those of new
weights and old activations. What a step writes to the buffer was not noticed once, and such gradients were used without
a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.kit import PLANS, WIDTH, Block, Net, State, loss_of_tokens, make, same_bits
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.testing import run_ranks

MODIFIED = "has been modified by an inplace operation"


def _step(model: nn.Module, handle: Any, optimizer: Any) -> None:
    assert optimizer.step().applied


def _load(model: nn.Module, handle: Any, optimizer: Any) -> None:
    handle.load_full_state_dict({name: 2 * value for name, value in handle.full_state_dict().items()})


def _set_main(model: nn.Module, handle: Any, optimizer: Any) -> None:
    handle.set_main_parts([2 * part for part in handle.main_parts()])


def _write(model: nn.Module, handle: Any, optimizer: Any) -> None:
    with handle.unsharded(write=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


@on_ranks("num_ranks")
@pytest.mark.parametrize("change", [_step, _load, _set_main, _write])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_raises_as_in_plain_torch(rank: int, num_ranks: int, change: Callable[..., None]) -> None:
    for plan in PLANS:
        for frozen in (False, True):  # frozen weights are guarded by their versions while they are gone
            model = make(lambda: Net(blocks=2))
            model.blocks[0].up.weight.requires_grad_(not frozen)
            handle = zeroshard.shard(model, plan, units=8192)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)  # a second backward alone is right
            change(model, handle, optimizer)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
            optimizer.zero_grad()
            loss_of_tokens(model, rank, 0, 0).backward()  # training goes on
            assert optimizer.step().applied


@on_ranks(2)
def test_new_weights_are_no_write_of_the_user(rank: int) -> None:
    """A step and a load inside of a scope that only reads."""
    for plan in PLANS:
        model = make(lambda: Net(blocks=2))
        handle = zeroshard.shard(model, plan, units=8192)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for change in (_step, _set_main):
            with handle.unsharded():
                loss_of_tokens(model, rank, 0, 0).backward()
                change(model, handle, optimizer)
            optimizer.zero_grad()
            with pytest.raises(zeroshard.errors.InvalidState, match="has been written to"), handle.unsharded():
                with torch.no_grad():
                    model.norm.weight.mul_(2)


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError


@on_ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_backward_goes_on_through_a_graph_from_before_one_that_raised(rank: int, num_ranks: int) -> None:
    """It counted as a part of the one that had raised, and never ended: the next forward discarded its gradients, in
    silence. (A forward before it would have discarded what was left of that one.)"""

    def run(plan: str, raises: bool, first: Callable[[torch.Tensor, nn.Module], Any]) -> State:
        model = make(lambda: Net(blocks=2))
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        of_first: list[torch.Tensor] = []
        hook = model.blocks[0].register_forward_hook(lambda module, args, output: of_first.append(output))
        bad = loss_of_tokens(model, rank, 0, 0)
        hook.remove()
        good = loss_of_tokens(model, rank, 1, 0)
        if raises:
            of_first[0].register_hook(_raise)
            with pytest.raises(ArithmeticError):
                first(bad, model)
        good.backward()
        gradient = handle.gradient("norm.weight")
        loss_of_tokens(model, rank, 2, 0).backward()
        assert optimizer.step().applied
        return {**handle.full_state_dict(), "gradient": gradient}

    for plan in PLANS:
        expected = run(plan, False, lambda loss, model: None)
        assert same_bits(run(plan, True, lambda loss, model: loss.backward()), expected), plan
        of_embedding = run(plan, True, lambda loss, model: torch.autograd.grad(loss, model.embed.weight))
        assert same_bits(of_embedding, expected), plan


@on_ranks(2)
def test_it_says_that_earlier_gradients_are_discarded(rank: int) -> None:
    for plan in PLANS:
        model = make(lambda: Net(blocks=2))
        optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, plan, units=Block), torch.optim.SGD, lr=0.1)
        loss_of_tokens(model, rank, 0, 0).backward()
        good = loss_of_tokens(model, rank, 2, 0)
        hook = model.norm.register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)
        bad = loss_of_tokens(model, rank, 1, 0)
        hook.remove()
        with pytest.raises(ArithmeticError):
            bad.backward()
        with pytest.raises(zeroshard.errors.InvalidState, match="those of earlier micro-batches are discarded"):
            good.backward()
        optimizer.zero_grad()
        loss_of_tokens(model, rank, 0, 0).backward()
        assert optimizer.step().applied


def _write_on_one_rank(model: nn.Module, handle: Any, rank: int, factor: float = 2, **options: int) -> None:
    with handle.unsharded(write=True, **options), torch.no_grad():
        if rank == 1:
            model.blocks[0].up.weight.mul_(factor)


def _write_and_fail(model: nn.Module, handle: Any, rank: int) -> None:
    with pytest.raises(ValueError, match="other values than on rank 0"):
        _write_on_one_rank(model, handle, rank)


def _load_a_part(model: nn.Module, handle: Any, rank: int) -> None:
    weight = handle.full_state_dict()["blocks.0.up.weight"]
    handle.load_full_state_dict({"blocks.0.up.weight": weight}, strict=False)


WRITES = (
    partial(_write_on_one_rank, modifier_rank=1),
    partial(_write_on_one_rank, factor=1),  # the same values
    _write_and_fail,
    _load_a_part,
)


def test_all_ranks_raise_or_none_does() -> None:
    """Only the rank that had written to a weight raised, and the others waited for it. And what is not written to is
    not new, as in plain torch: a load of some weights refused graphs of others."""

    def check(rank: int) -> None:
        for write, plan, units in product(WRITES, PLANS, (None, Block)):
            if write is _write_and_fail and plan in PLANS[1:3]:
                continue  # what is restored is gathered in the next forward, and all ranks say that it is not here
            model = make(lambda: Net(blocks=2))
            handle = zeroshard.shard(model, plan, units=units)
            x = torch.ones(2, WIDTH)
            norms = model.norm(x), model.blocks[0].norm(x)
            loss = loss_of_tokens(model, rank, 0, 0)
            write(model, handle, rank)
            for norm in norms:
                norm.sum().backward()  # of other parameters, also of the same unit
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()

    run_ranks(check, 2, collective_timeout=HANG)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.critic = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)


@on_ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_of_other_parameters_may_come_before_it(rank: int, num_ranks: int) -> None:
    """Two optimizers take turns on parts of one model, as in plain torch."""

    def run(plan: Any) -> State:
        model = make(Parts)
        if plan is None:
            first = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
            second = torch.optim.SGD(model.critic.parameters(), lr=0.1)
        else:
            zeroshard.shard(model, plan)
            mains = [*model.trunk.parameters(), *model.head.parameters()]
            first = zeroshard.ShardedOptimizer(mains, torch.optim.SGD, lr=0.1)
            second = zeroshard.ShardedOptimizer(model.critic.parameters(), torch.optim.SGD, lr=0.1)
        losses: State = {}
        for step in range(3):
            features = model.trunk(torch.linspace(-1, 1, 16).view(2, 8) + rank + step)
            result = model.head(features).square().mean()
            of_each = (model.critic(features.detach()).square().mean(), second), (result, first)
            for loss, optimizer in of_each[:: (-1) ** step]:
                optimizer.zero_grad()
                loss.backward()
                if plan is None:
                    for parameter in optimizer.param_groups[0]["params"]:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= num_ranks
                optimizer.step()
                losses[f"{len(losses)}"] = loss.detach()
        return losses

    expected = run(None)
    for plan in PLANS:
        assert same_bits(run(plan), expected), plan
