"""Writes to parameters whose values are not on this rank.

Every write to such a parameter raises. Once, writes that fill it with one value (`zero_`, `fill_`, `nn.init.zeros_`,
`masked_fill_`, `torch._foreach_zero_`, ...) did not raise and were lost: from then on the parameter read as that value
instead of NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import Block, Job, Net, loss_of_tokens, make, same_bits, train
from tests.together import on_ranks
from zeroshard.model.absent import as_tensors, is_absent

WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "zero_": lambda p: p.zero_(),
    "data.zero_": lambda p: p.data.zero_(),
    "fill_": lambda p: p.fill_(3.0),
    "data.fill_": lambda p: p.data.fill_(3.0),
    "detach().zero_": lambda p: p.detach().zero_(),
    "zeros_": lambda p: nn.init.zeros_(p),
    "ones_": lambda p: nn.init.ones_(p),
    "constant_": lambda p: nn.init.constant_(p, 0.5),
    "eye_": lambda p: nn.init.eye_(p),
    "masked_fill_": lambda p: p.masked_fill_(torch.ones(p.shape, dtype=torch.bool), 1.0),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([0]), 1.0),
    "fill_diagonal_": lambda p: p.fill_diagonal_(1.0),
    "_foreach_zero_": lambda p: torch._foreach_zero_([p]),
    "_foreach_zero_ of data": lambda p: torch._foreach_zero_([p.data]),
    "an element": lambda p: p[0, 0].fill_(3.0),
    "an element of data": lambda p: p.data[0, 0].copy_(torch.tensor(3.0)),
    "numpy": lambda p: p.detach().numpy().fill(0.0),
    "out=": lambda p: torch.zeros(p.shape, out=p.data),
    "out= itself": lambda p: torch.zeros(p.shape, out=p),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "normal_": lambda p: nn.init.normal_(p),
    "clamp_": lambda p: p.data.clamp_(-1.0, 1.0),
    "mul_": lambda p: p.mul_(2.0),
    "slice": lambda p: p.data.__setitem__(0, 1.0),
    "item": lambda p: p.__setitem__(0, 1.0),
    "lerp_": lambda p: torch._foreach_lerp_([p.data], [torch.ones(p.shape)], 0.5),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).zero_(),
    "data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@on_ranks(2)
def test_a_write_raises_and_leaves_no_trace(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    target = model.blocks[1].up.weight
    for step in range(Job.steps):
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
        assert is_absent(target)
        with torch.no_grad():
            for name, write in WRITES.items():
                with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight are not here.*write=True"):
                    write(target)
                with as_tensors():
                    assert target.isnan().all(), name
    assert same_bits(handle.full_state_dict(), train(Job(), handle.plan, rank).weights)


@on_ranks(2)
def test_between_backward_and_step_too(rank: int) -> None:
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    optimizer.backward(loss_of_tokens(model, rank, 0, 0))
    before = handle.full_state_dict()
    with pytest.raises(RuntimeError, match=r"parameter head\.bias are not here"):
        model.head.bias.data.zero_()
    assert same_bits(handle.full_state_dict(), before)
    assert optimizer.step().applied


@on_ranks(2)
def test_what_the_message_proposes_works(rank: int) -> None:
    """Inside `unsharded(write=True)`, as the message proposes, writes succeed."""
    model = make(Net)
    handle = zeroshard.shard(model, "zero3", units=Block)
    with handle.unsharded(write=True), torch.no_grad():
        model.head.bias.zero_()
        nn.init.ones_(model.blocks[0].norm.bias)
    model(torch.zeros(1, 2, dtype=torch.long))
    state = handle.full_state_dict()
    assert not state["head.bias"].any()
    assert (state["blocks.0.norm.bias"] == 1).all()


@on_ranks(2)
def test_integers_that_are_not_here_too(rank: int) -> None:
    model = nn.Linear(4, 4)
    model.codes = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)
    zeroshard.shard(model, "zero3")
    for touch in (lambda: model.codes.zero_(), lambda: model.codes.sum()):
        with pytest.raises(RuntimeError, match="parameter codes are not here"):
            touch()
    model(torch.ones(4))


@on_ranks(2)
def test_what_shapes_and_identity_decide_is_no_read(rank: int) -> None:
    """`torch.equal`, by which code finds a parameter in a list; `names` (of dimensions) were those of parameters."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    zeroshard.shard(model, "zero3")
    first, bias, second = model.parameters()
    assert is_absent(first) and torch.equal(first, first) and first.equal(first)
    assert getattr(first, "names", None) == getattr(torch.zeros(3, 3), "names", None)  # gone in torch 2.13
    assert not torch.equal(first, bias) and not torch.equal(torch.zeros(4), first)
    for other in (second, torch.zeros(3, 3)):
        with pytest.raises(RuntimeError, match=r"equal: the values of parameter 0\.weight are not here"):
            torch.equal(first, other)


@on_ranks(2)
def test_a_copy_of_weights_that_have_yet_to_arrive_is_a_parameter(rank: int) -> None:
    """Its class was that of an absent parameter: every use of the copy raised, with the name of another parameter."""
    model = make(Net)
    handle = zeroshard.shard(model, "zero1", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    target = model.blocks[1].up.weight
    for step, copied in enumerate((copy.deepcopy, lambda p: type(p)(p.data.clone()))):
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
        assert is_absent(target)
        found = copied(target)
        assert type(found) is nn.Parameter and torch.equal(found, target)
    optimizer.backward(loss_of_tokens(model, rank, 0, 2))
    optimizer.step()
    assert is_absent(target) and torch.equal(target.as_subclass(torch.Tensor), target)
