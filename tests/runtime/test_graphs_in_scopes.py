"""A graph that is built inside `handle.unsharded()`, and its backward outside of it.

Autograd saves a parameter as it is, not its values. So such a backward once read the placeholders of parameters that
are sharded again: all gradients were NaN, and with `non_finite="skip"` no step was made, without a word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard
from tests.kit import Block, Net, State, loss_of_tokens, make, plans_of, same_bits
from tests.together import on_ranks


def start(plan: Any) -> tuple[Any, Any, Any]:
    model = make(lambda: Net(blocks=3))
    handle = zeroshard.shard(model, plan, units=Block)
    return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)


def gradients(model: Any, handle: Any) -> State:
    return {name: handle.gradient(name) for name, _ in model.named_parameters()}


@on_ranks(3)
def test_backward_may_run_after_the_scope(rank: int) -> None:
    for plan in (zeroshard.ZERO3, plans_of(0)[-1]):
        model, handle, optimizer = start(plan)
        loss_of_tokens(model, rank, 0, 0).backward()
        expected = gradients(model, handle)
        optimizer.zero_grad()

        parts: tuple[tuple[str, ...], ...] = ((), ("blocks.1",), ("blocks.0", "norm"))
        for names in parts:
            with handle.unsharded(*names):
                if not names and rank == 1:  # a rank may run the model alone; nobody comes back to this graph
                    loss_of_tokens(model, rank, 3, 0)
                loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward()
            assert same_bits(gradients(model, handle), expected)
            optimizer.zero_grad()

        with handle.unsharded():
            loss = loss_of_tokens(model, rank, 0, 0)
            loss.backward()
        assert same_bits(gradients(model, handle), expected)
        assert optimizer.step().applied


@on_ranks(2)
def test_one_backward_for_forwards_inside_and_outside(rank: int) -> None:
    found = []
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model, handle, optimizer = start(plan)
        for _ in range(2):  # the second time in the order that has been recorded
            first = loss_of_tokens(model, rank, 0, 0)
            with handle.unsharded():
                second = loss_of_tokens(model, rank, 1, 0)
            third = loss_of_tokens(model, rank, 2, 0)
            (first + second + third).backward()
            found.append(gradients(model, handle))
            assert optimizer.step().applied
    assert same_bits(found[0], found[2]) and same_bits(found[1], found[3])


@on_ranks(2)
def test_a_weight_used_outside_of_its_module_raises_in_that_backward(rank: int) -> None:
    model, handle, optimizer = start(zeroshard.ZERO3)
    weight = model.blocks[1].up.weight

    def inside() -> Any:
        with handle.unsharded():
            return weight.square().sum()

    with pytest.raises(zeroshard.errors.InvalidState, match=r"up\.weight are not here.*inside the same block"):
        inside().backward()
    optimizer.zero_grad()
    with pytest.raises(zeroshard.errors.InvalidState, match=r"blocks\.1\.up\.weight are not here"):
        torch.autograd.grad(inside(), weight)

    with handle.unsharded():  # as the message says
        weight.square().sum().backward()
        twice = 2 * weight.detach()
    assert torch.equal(handle.gradient("blocks.1.up.weight"), twice)
    assert optimizer.step().applied


@on_ranks(2)
def test_second_derivatives_inside_a_scope(rank: int) -> None:
    norms = []
    for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
        model, handle, _ = start(plan)
        with handle.unsharded():
            loss = loss_of_tokens(model, rank, 0, 0)
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            torch.stack([grad.sum() for grad in found]).sum().backward()
        norms.append(gradients(model, handle))
    assert same_bits(*norms)
