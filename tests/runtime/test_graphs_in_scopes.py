"""A graph that is built inside `handle.unsharded()`, and its backward outside of it.

Autograd saves a parameter as it is, not its values. So such a backward once read the placeholders of parameters that
are sharded again: all gradients were NaN, and with `non_finite="skip"` no step was made, without a word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import WIDTH, Block, Net, State, loss_of_tokens, make, plans_of, same_bits
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


class Penalised(Net):
    """Opens a block in its forward, or in that of a block, and uses weights of other units and of the root there."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.around()) if hasattr(self, "around") else super().forward(x)

    def __init__(self, where: str) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))
        self.where, self.handle = where, [Any]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.where == "unit":
            self.blocks[1].around = self.penalty
        logits = super().forward(tokens)
        return logits if self.where == "unit" else logits * (1 + self.penalty())

    def penalty(self) -> Tensor:
        first, last = self.blocks[0], self.blocks[2]
        with self.handle[0].unsharded():
            found = first.up.weight.clamp(-0.1, 0.1).square().sum() + last(first(torch.ones(1, WIDTH))).square().mean()
            found = found + self.norm.weight.square().sum() + self.blocks[1].up.weight.abs().sum()
            return 1e-3 * (found + nn.functional.linear(last.up.weight.t(), last.down.weight).square().sum())


@on_ranks(2)
def test_weights_that_are_used_in_a_scope_inside_of_a_forward(rank: int) -> None:
    """Where backward read the placeholders, gradients were NaN, or of comparisons with NaN: 0, in silence."""
    for where in ("unit", "root"):
        found = []
        for plan in (zeroshard.ZERO2, zeroshard.ZERO3):
            model = make(lambda where=where: Penalised(where))
            handle = zeroshard.shard(model, plan, units=Block)
            model.handle = [handle]
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            for step in range(2):
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                found.append(gradients(model, handle))
                assert optimizer.step().applied
        assert same_bits(found[0], found[2]) and same_bits(found[1], found[3]), where


@on_ranks(2)
def test_what_is_saved_in_such_a_scope_is_checked_as_by_autograd(rank: int) -> None:
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            with model.handle[0].unsharded():
                y = torch.tanh(model.blocks[0].norm.weight * x.exp())
                y.add_(1.0)  # tanh has saved it
            return super().forward(y)

    model: Any = make(lambda: Net(blocks=2))
    model.blocks[1].__class__ = Inner
    model.handle = [zeroshard.shard(model, zeroshard.ZERO3, units=Block)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of_tokens(model, rank, 0, 0).backward()


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
