"""What is in `p.grad` behind a step. Plain torch has the gradient there until `zero_grad`. It was None, so code that
skips parameters without a gradient did nothing, in silence: `Lookahead` around the optimizer, or a norm for the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import LAST_BITS, PLANS, largest_difference
from tests.together import on_ranks
from zeroshard.placement import ZERO3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x).tanh())
        return found


class Lookahead:
    """As timm's: every second step the weights go half of the way back to slow ones, which are state of the optimizer
    inside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps, self.slow = optimizer, 0, defaultdict[Tensor, dict[str, Tensor]](dict)

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        for group in self.optimizer.param_groups if self.num_steps % 2 == 0 else ():
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.slow[p].setdefault("slow", p.detach().clone())
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)


def backward(model: Model, rank: int, step: int) -> None:
    torch.manual_seed(10 * step + rank)
    model(torch.randn(5, 4)).square().mean().backward()


@on_ranks(2)
def test_a_wrapper_that_goes_by_it_works(rank: int) -> None:
    plain = Model()
    outer = Lookahead(torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    for step in range(6):
        backward(plain, rank, step)
        for parameter in plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        outer.step()
        outer.optimizer.zero_grad()
    for plan in PLANS:
        model = Model()
        handle = zeroshard.shard(model, plan)
        outer = Lookahead(zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, momentum=0.9))
        for step in range(6):
            backward(model, rank, step)
            if plan is ZERO3 and step == 1:
                with pytest.raises(zeroshard.Error, match="are not here"):
                    outer.step()
                break
            outer.step()
            outer.optimizer.zero_grad()
        assert plan is ZERO3 or largest_difference(handle.full_state_dict(), plain.state_dict()) < LAST_BITS, plan


READS: dict[str, Callable[[Model], object]] = {
    "norm": lambda model: model.inner.weight.grad.norm(),  # type: ignore[union-attr]
    "norms": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "mean": lambda model: model.inner.weight.grad.abs().mean(),  # type: ignore[union-attr]
    "scaled": lambda model: model.inner.weight.grad.mul_(0.5),  # type: ignore[union-attr]
    "clipped": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "kept": lambda model: model.inner.weight.grad.clone(),  # type: ignore[union-attr]
}


def stepped(plan: object, rank: int) -> tuple[Model, zeroshard.Handle, zeroshard.ShardedOptimizer]:
    model = Model()
    handle = zeroshard.shard(model, plan)  # type: ignore[arg-type]
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
    backward(model, rank, 0)
    assert optimizer.step().applied
    return model, handle, optimizer


@on_ranks(2)
def test_what_reads_it_is_told(rank: int) -> None:
    for plan in PLANS:
        model, handle, optimizer = stepped(plan, rank)
        held = handle.memory()["grads"]
        for name, read in READS.items():
            with pytest.raises(zeroshard.Error, match=r"gradient of inner\.weight: a step has used it"):
                read(model)
            assert handle.memory()["grads"] == held, name
        with pytest.raises(zeroshard.Error, match="step of a plain SGD"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="the previous step has consumed the gradients"):
            optimizer.step()
        assert "a step has used it" in repr(model.inner.weight.grad)
        assert plan.grads.name != "REPLICATED" or model.unused.weight.grad is None


@on_ranks(2)
def test_it_goes_with_the_next_forward_or_with_zero_grad(rank: int) -> None:
    for plan in PLANS:
        expected = None
        ends: dict[str, Callable[[Model, Any], object]] = {
            "nothing": lambda model, optimizer: None,
            "of the optimizer": lambda model, optimizer: optimizer.zero_grad(),
            "in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
            "of the model": lambda model, optimizer: model.zero_grad(),
            "of the model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
            "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
            "by hand, in place": lambda model, optimizer: [
                p.grad.zero_() for p in model.parameters() if p.grad is not None
            ],
        }
        for name, end in ends.items():
            model, handle, optimizer = stepped(plan, rank)
            end(model, optimizer)
            for step in (1, 2):  # two micro-batches
                backward(model, rank, step)
            assert model.inner.weight.grad is not None
            optimizer.step()
            found = handle.full_state_dict()
            assert expected is None or all(torch.equal(found[key], expected[key]) for key in found), (plan, name)
            expected = found
            handle.close()
            assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_a_gradient_set_by_hand_takes_its_place(rank: int) -> None:
    for plan in PLANS:
        model, handle, optimizer = stepped(plan, rank)
        model.inner.weight.grad = torch.full((4, 4), 1.0 + rank)
        before = handle.full_state_dict()
        assert optimizer.step().applied
        after = handle.full_state_dict()
        assert not torch.equal(before["inner.weight"], after["inner.weight"])
        assert torch.equal(before["outer.weight"], after["outer.weight"])
        model.inner.weight.grad = model.outer.weight.grad  # both of the same shape
        with pytest.raises(zeroshard.Error, match=r"gradient of outer\.weight: a step has used it"):
            optimizer.step()


@on_ranks(2)
def test_what_begins_to_train_finds_none(rank: int) -> None:
    """The unit of the frozen layer gets gradients, and the engine another record of what it shows."""
    for plan in PLANS:
        model = Model()
        model.outer.requires_grad_(False)
        handle = zeroshard.shard(model, plan, units=[nn.Linear])
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        backward(model, rank, 0)
        optimizer.step()
        assert model.inner.weight.grad is not None
        model.outer.requires_grad_(True)
        backward(model, rank, 1)
        before = handle.full_state_dict()
        assert optimizer.step().applied
        assert all(
            name.startswith("unused") or not torch.equal(before[name], value)
            for name, value in handle.full_state_dict().items()
        )


@on_ranks(2)
def test_a_forward_removes_it(rank: int) -> None:
    """torch.compile leaves out, in silence, what it comes to while a `p.grad` has another dtype than its parameter."""
    for plan in PLANS:
        model = Model()
        handle = zeroshard.shard(model, plan, precision="bf16", units=[nn.Linear])
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
        seen: list[Tensor | None] = []
        for _ in range(2):
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()
            seen += [parameter.grad for parameter in model.inner.parameters()]
            with torch.no_grad():
                model(torch.ones(2, 4))
            seen += [parameter.grad for parameter in model.inner.parameters()]
        assert [one is None for one in seen] == 2 * [False, False, True, True]
        assert seen[0] is seen[4]
