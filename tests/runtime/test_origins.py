"""The error for a non-finite gradient names parameter, rank and micro-batch in the first step with such a gradient.

It names the parameter where the value arose. (The error once named the first five affected parameters by alphabet, so a
NaN that arose in layer 1 was reported for layer 0.)
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.comm.messages import Read
from zeroshard.testing import run_ranks

PLANS = ("ddp", "zero1", "zero2", "zero3")


class NanInBackward(torch.autograd.Function):
    """The identity, with NaN as gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.nan


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.after: int | None = None  # the layer after which the gradient turns NaN

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == self.after:
                x = NanInBackward.apply(x)
        return x.square().mean()


def message_of(rank: int, plan: str, local: bool) -> dict[str, str]:
    """Messages for four kinds of faults, each only on rank 1 and in micro-batch 1."""

    def in_backward(model: Layers) -> None:
        model.after = 2

    def one_parameter(model: Layers) -> None:
        model.layers[1].bias.register_hook(lambda grad: grad * torch.inf)

    def in_forward(model: Layers) -> None:
        model.layers[1].register_forward_hook(lambda module, args, output: output * torch.nan)

    messages = {}
    for spoil in (in_backward, one_parameter, in_forward):
        model = Layers()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        before = handle.full_state_dict()
        for micro_batch in range(3):
            if (rank, micro_batch) == (1, 1):
                spoil(model)
            with handle.no_sync() if local and micro_batch < 2 else torch.enable_grad():
                model(torch.ones(2, 4)).backward()
        with pytest.raises(RuntimeError, match="Nothing has been updated") as error:
            optimizer.step()
        messages[spoil.__name__] = str(error.value)
        optimizer.zero_grad()
        after = handle.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    return messages


CASES = list(itertools.product(PLANS, [False, True]))


@functools.cache
def all_messages() -> list[list[dict[str, str]]]:
    """The messages by rank and case."""
    return run_ranks(lambda rank: [message_of(rank, *case) for case in CASES], 2)


@pytest.mark.parametrize("local", [False, True], ids=["reduced each time", "accumulated"])
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_named_in_the_order_of_backward(plan: str, local: bool) -> None:
    first, *others = (of_rank[CASES.index((plan, local))] for of_rank in all_messages())
    assert all(messages == first for messages in others)
    # Backward reaches the weights of a layer in reverse registration order.
    assert "layers.2.bias (micro-batch 1), layers.2.weight (micro-batch 1)" in first["in_backward"]
    assert "layers.3" not in first["in_backward"] and "layers.0" not in first["in_backward"]
    assert "and 3 more on rank 1" in first["in_backward"]
    assert "layers.1.bias (micro-batch 1) on rank 1" in first["one_parameter"]
    assert "layers.1.weight" not in first["one_parameter"]
    assert "all of them, layers.3.bias first (micro-batch 1; the loss" in first["in_forward"]
    for text in first.values():
        assert "on rank 0" not in text and "micro-batch 0" not in text


def nothing_is_looked_for(rank: int) -> None:
    """A run with finite gradients never reads the recorded numbers, as that would wait for the device."""
    model = Layers()
    handle = zeroshard.shard(model, "zero2", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
        names = {slot.name for unit in handle.engine.units for slot in unit.layout.slots}
        assert handle.engine.reducer.origins.first(names) is None
        assert optimizer.step().applied
    assert handle.engine.reducer.origins._backwards == [[]]


def test_finite_gradients_have_no_origin() -> None:
    run_ranks(nothing_is_looked_for, 2)


def of_a_single_rank(rank: int) -> None:
    """It takes the norms later: when the next backward adds to the gradients, or on the way to the error."""

    def message(plan: str, micro_batches: int, bad: int, edit: bool = False) -> str:
        model = Layers()
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for micro_batch in range(micro_batches):
            model.after = 2 if micro_batch == bad else None
            model(torch.ones(2, 4)).backward()
            if edit and micro_batch == bad:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(torch.nan)
        with pytest.raises(RuntimeError, match="Nothing has been updated") as error:
            optimizer.step()
        return str(error.value)

    for plan in PLANS:
        for micro_batches, bad in ((1, 0), (3, 0), (3, 1), (3, 2)):
            text = message(plan, micro_batches, bad)
            assert f"layers.2.bias (micro-batch {bad}), layers.2.weight (micro-batch {bad})" in text
            assert "layers.3" not in text and text.count("micro-batch") == 3
        # The values that backward has left are gone: nothing is said about it.
        text = message(plan, 1, 0, edit=True)
        assert "micro-batch" not in text and "layers.3.bias" in text


def test_a_single_rank_names_it_as_well() -> None:
    run_ranks(of_a_single_rank, 1)


# Ranks look at each term only if a bucket (or a sum in shared memory) is not finite -----------------------------------

ELEMENTS = ((0, 0), (0, -1), (1, -1), (2, 0), (2, -1))  # (layer, element of its weight): in the shards of all ranks


def looks(rank: int, plan: str) -> tuple[list[str], list[list[bool]]]:
    """The messages for one element that is infinite on one rank, or on two with opposite signs, and which units each
    rank has looked at, in these steps and in a step with finite gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    messages, looked = [], []
    for number, (layer, element) in enumerate([*ELEMENTS, (1, 7), (0, 0)]):
        by = {number % 3: torch.inf} if number < len(ELEMENTS) else {0: torch.inf, 2: -torch.inf}
        if number == len(ELEMENTS) + 1:
            by = {}

        def spoil(grad: Tensor, element: int = element, by: dict[int, float] = by) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[element] += by.get(rank, 0.0)
            return grad

        with handle.unsharded():
            hook = model[layer].weight.register_hook(spoil)
        model(torch.ones(2, 64) * (rank + 1)).square().mean().backward()
        looked.append([bool(look.norms) for look in handle.engine.reducer.origins._backwards[0]])
        if not by:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="Nothing has been updated") as error:
                optimizer.step()
            messages.append(str(error.value))
        hook.remove()
        optimizer.zero_grad()
    return messages, looked


@pytest.mark.by_gloo
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_a_rank_looks_at_a_unit_only_if_its_terms_are_not_finite(plan: str) -> None:
    by_rank = run_ranks(looks, 3, plan)
    for rank, (messages, looked) in enumerate(by_rank):
        for number, (layer, _) in enumerate(ELEMENTS):
            assert messages[number].count("on rank") == 1
            assert f"{layer}.weight (micro-batch 0) on rank {number % 3}" in messages[number]
            # Backward comes to the last layer first.
            assert looked[number] == [2 - layer == place and number % 3 == rank for place in range(3)]
        assert all(f"1.weight (micro-batch 0) on rank {spoilt}" in messages[-1] for spoilt in (0, 2))
        assert "rank 1" not in messages[-1]
        assert looked[-1] == [False] * 3
    assert len(by_rank) == 3


@pytest.mark.by_gloo
def test_a_rank_that_is_not_told_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: if nobody heeds the doubts of a peer, only the rank that sums finds its own terms."""
    monkeypatch.setattr(Read, "wait", lambda read: read.note.take())
    messages, _ = run_ranks(looks, 3, "zero3")[0]
    found = [f"on rank {number % 3}" in messages[number] for number in range(len(ELEMENTS))]
    assert any(found) and not all(found)
