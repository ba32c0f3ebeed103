"""What users do with gradients between backward and step, on a single rank: as in plain torch, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.storage.test_one_rank import Odd, loss_of, tokens
from tests.together import in_turn, on_ranks

DDP = PLANS[0]


def _replace(parameter: nn.Parameter) -> None:
    """Another tensor, in another order of strides."""
    assert parameter.grad is not None
    parameter.grad = (parameter.grad * 2).t().contiguous().t() if parameter.dim() == 2 else parameter.grad * 2


def _in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3.0)


def _hook_replaces(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_replace)


def _hook_on_gradient(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad.mul(0.5).neg())


def _nothing(model: nn.Module) -> None:
    pass


def _edit(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            _in_place(parameter)


def _drop_one(model: Any) -> None:
    model.norm.weight.grad = None


def _set_one(model: Any) -> None:
    model.norm.weight.grad = torch.arange(13.0)


def _twice_and_edited(model: Any) -> None:
    """A second backward adds to an edited gradient."""
    _edit(model)
    loss_of(model, tokens(7)).backward()


def _double(model: Any) -> None:
    loss = loss_of(model, tokens(8))
    loss.backward(retain_graph=True)
    loss.backward()


def _zeroed(model: Any) -> None:
    model.zero_grad(set_to_none=False)
    loss_of(model, tokens(9)).backward()


BEFORE = {"hook replaces": _hook_replaces, "hook on gradient": _hook_on_gradient}
AFTER: dict[str, Callable[[Any], None]] = {
    "edited": _edit,
    "dropped": _drop_one,
    "set": _set_one,
    "edited, then another backward": _twice_and_edited,
    "two backwards of one graph": _double,
    "zeros": _zeroed,
}


@pytest.mark.parametrize("name", [*BEFORE, *AFTER])
@on_ranks(1)
def test_as_in_plain_torch(rank: int, name: str) -> None:
    # Of gradients that no rank holds in full only some edits are allowed: under DDP all of them are.
    for plan in PLANS if name not in ("edited, then another backward",) else (DDP,):
        fused = name != "hook replaces"  # torch's fused kernel ignores the strides of a gradient
        before, after = BEFORE.get(name, _nothing), AFTER.get(name, _nothing)
        reference = Odd()
        plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=fused)
        model = Odd()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, fused=fused)
        before(reference)
        before(model)
        for step in range(3):
            loss_of(reference, tokens(step)).backward()
            loss_of(model, tokens(step)).backward()
            after(reference)
            after(model)
            plain.step()
            optimizer.step()
            plain.zero_grad()
            optimizer.zero_grad()
        full = handle.full_state_dict()
        for key, value in reference.state_dict().items():
            assert torch.equal(full[key], value), (key, plan, name)


@on_ranks(1)
def test_gradients_are_shown_and_gone_after_the_step(rank: int) -> None:
    reference, model = Odd(), Odd()
    handle = zeroshard.shard(model, DDP)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    loss_of(reference, tokens(0)).backward()
    loss_of(model, tokens(0)).backward()
    kept: dict[str, Tensor] = {}
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad, theirs.grad)
            kept[name] = mine.grad
    assert handle.memory()["grads"] > 0
    optimizer.step()
    for name, mine in model.named_parameters():
        assert repr(mine.grad).endswith("a step has used it") if name in kept else mine.grad is None
    assert handle.memory()["grads"] == 0
    loss_of(model, tokens(1)).backward()
    for (name, _), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert name not in kept or torch.equal(kept[name], theirs.grad), name  # type: ignore[arg-type]


@on_ranks(1)
def test_the_origin_of_a_nan_is_named_and_nothing_is_updated(rank: int) -> None:
    def check(rank: int, plan: Any) -> None:
        model = Odd()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
        loss_of(model, tokens(0)).backward()
        remove = model.norm.bias.register_hook(lambda grad: torch.full_like(grad, torch.nan))
        loss_of(model, tokens(1)).backward()
        before = handle.full_state_dict()
        with pytest.raises(RuntimeError, match=r"not finite: norm\.bias \(micro-batch 1\) on rank 0"):
            optimizer.step()
        remove.remove()
        after = handle.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()
        loss_of(model, tokens(2)).backward()
        assert optimizer.step().applied
        with pytest.raises(RuntimeError, match="the previous step has consumed the gradients"):
            optimizer.step()

    in_turn(check, PLANS)(rank)


@on_ranks(1)
def test_gradients_set_by_the_handle_and_parked(rank: int) -> None:
    for plan in PLANS:
        model = Odd()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        start = handle.full_state_dict()
        handle.set_gradient("norm.bias", torch.arange(13.0))
        optimizer.step()
        end = handle.full_state_dict()
        assert torch.equal(end["norm.bias"], start["norm.bias"] - torch.arange(13.0))
        assert all(torch.equal(end[name], start[name]) for name in start if name != "norm.bias")
        handle.park()
        handle.unpark()
        loss_of(model, tokens(0)).backward()
        gradient = handle.gradient("norm.weight")
        optimizer.step()
        expected = end["norm.weight"] - gradient
        assert torch.equal(handle.full_state_dict()["norm.weight"], expected)
        handle.close()
