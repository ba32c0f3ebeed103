"""A single rank takes over the tensors that autograd makes: no bucket, no copy, and the arithmetic of plain torch."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS
from tests.together import in_turn, on_ranks
from zeroshard.storage.slot_buffer import SlotBuffer
from zeroshard.testing import run_ranks


class Odd(nn.Module):
    """Sizes that are no multiple of a vector, a tied weight, a parameter that is not used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(37, 13)
        self.inner = nn.Sequential(nn.Linear(13, 21), nn.GELU(), nn.Linear(21, 13))
        self.norm = nn.LayerNorm(13)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(13), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) * self.scale + self.frozen
        return self.head(self.norm(hidden + self.inner(hidden)))


def tokens(step: int, micro_batch: int = 0) -> Tensor:
    return torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(10 * step + micro_batch))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


@pytest.mark.parametrize("kind", ["fused", "foreach", "clip", "micro-batches", "no_sync"])
@on_ranks(1)
def test_the_bits_of_plain_torch(rank: int, kind: str) -> None:
    def check(rank: int, plan: Any) -> None:
        options: dict[str, Any] = {"lr": 1e-2, "fused": kind == "fused", "foreach": kind == "foreach"}
        reference = Odd()
        plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], **options)
        model = Odd()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **options)
        for step in range(3):
            for number in range(3 if kind in ("micro-batches", "no_sync") else 1):
                loss_of(reference, tokens(step, number)).backward()
                if kind == "no_sync" and number < 2:
                    with handle.no_sync():
                        loss_of(model, tokens(step, number)).backward()
                else:
                    loss_of(model, tokens(step, number)).backward()
            if kind == "clip":  # with its own factor, so that a rounding of the norm does not matter
                factor = min(1.0, 0.1 / (float(optimizer.clip_grad_norm_(0.1)) + 1e-6))
                for parameter in reference.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad * factor
            optimizer.step()
            plain.step()
            plain.zero_grad()
        full = handle.full_state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(full[name], value), (name, plan, kind)

    in_turn(check, PLANS)(rank)


@on_ranks(1)
def test_tensors_are_taken_and_not_copied(rank: int) -> None:
    for plan in PLANS:
        model = nn.Linear(33, 7)
        handle = zeroshard.shard(model, plan)
        seen: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(_note, seen, name))
        model(torch.randn(5, 33)).square().mean().backward()
        (unit,) = handle.engine.units
        assert isinstance(unit.grads.buffer, SlotBuffer)
        held = {
            slot.name: view.data_ptr() for slot, view in zip(unit.layout.slots, unit.grads.buffer.views(), strict=True)
        }
        assert held == seen, plan


def _note(seen: dict[str, int], name: str, grad: Tensor) -> None:
    seen[name] = grad.data_ptr()


def test_gradients_of_a_hook_that_are_negative_views_are_clipped_and_stepped() -> None:
    """torch's operations on several tensors refuse these in place."""

    def check(rank: int) -> None:
        found = []
        for is_negative in (False, True):
            model = Odd()
            handle = zeroshard.shard(model, zeroshard.ZERO2)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
            for parameter in (p for p in model.parameters() if p.requires_grad and is_negative):
                parameter.register_hook(lambda grad: torch._neg_view(-grad))
            optimizer.backward(loss_of(model, tokens(0)))
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            found.append(handle.full_state_dict())
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

    run_ranks(check, 1)


class Joined(nn.Module):
    """Three gradients are parts of one tensor, which is the gradient of an output as well; that of `alone` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.alone = (nn.Parameter(torch.arange(1.0, 7.0)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([self.a, self.b, self.c.view(2, 3).view(6)]).view(3, 6)
        out.retain_grad()
        self.out = [out]
        return out @ x + (self.alone * x).sum()


@on_ranks(1)
def test_memory_that_is_also_anothers_is_not_written_to(rank: int) -> None:
    """A step with a clip multiplies gradients in place. (Without the copy of such gradients, this changes what the user
    keeps.)"""

    def check(rank: int, plan: Any) -> None:
        model = Joined()
        reference = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        kept: list[Tensor] = []
        model.a.register_hook(lambda grad: kept.append(grad))
        model.alone.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
        x = torch.arange(1.0, 7.0)
        model(x).square().sum().backward()
        reference(x).square().sum().backward()
        own = [*((one, one.clone()) for one in kept), (model.out[0].grad, model.out[0].grad.clone())]
        assert handle.memory()["grads"] == 4 * 6 * 4
        factor = min(1.0, 1.0 / (float(optimizer.clip_grad_norm_(1.0)) + 1e-6))
        assert factor < 1
        optimizer.step()
        for tensor, before in own:
            assert torch.equal(tensor, before)
        full = handle.full_state_dict()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(full[name], parameter.detach() - parameter.grad * factor), name

    in_turn(check, PLANS)(rank)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, tokens(step)).backward()  # all ranks have the same inputs
        optimizer.step()


def test_checkpoints_of_one_rank_and_of_two(tmp_path: Path) -> None:
    """One rank, two ranks, one rank: the state fits although its pieces are others, and is that of plain torch."""

    def run(rank: int, plan: Any, steps: range, source: str | None, target: str) -> dict[str, Any]:
        model, folder = Odd(), tmp_path / str(plan)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=True)
        if source is not None:
            zeroshard.load(folder / source, handle, optimizer)
        train(model, optimizer, steps)
        zeroshard.save(folder / target, handle, optimizer, step=steps.stop)
        return {"model": handle.full_state_dict(), "optimizer": optimizer.state_dict()["state"]}

    def under_all_plans(num_ranks: int, *arguments: Any) -> list[dict[str, Any]]:
        return run_ranks(in_turn(run, [(plan, *arguments) for plan in PLANS]), num_ranks)[0]

    under_all_plans(1, range(2), None, "first")
    under_all_plans(2, range(2, 4), "first", "second")
    of_plans = under_all_plans(1, range(4, 6), "second", "third")

    def plainly(rank: int) -> dict[str, Any]:
        model = Odd()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=True)
        train(model, optimizer, range(6))
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}

    expected = run_ranks(plainly, 1)[0]
    for found in of_plans:
        torch.testing.assert_close(found["model"], dict(expected["model"]))
        for key, state in expected["optimizer"].items():
            torch.testing.assert_close(found["optimizer"][key], state)


@on_ranks(1)
def test_values_given_to_a_gradient_after_a_clip_has_read_it_are_those_of_the_step(rank: int) -> None:
    def trained(plan: Any, *, gives: bool) -> dict[str, Tensor]:
        model = Odd()
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        optimizer.backward(loss_of(model, tokens(0)))
        optimizer.clip_grad_norm_(1e9)
        if gives:
            grad: Any = model.norm.weight.grad
            grad.data = torch.ones(13)
        optimizer.step()
        return handle.full_state_dict()

    def check(rank: int, plan: Any) -> None:
        given, plain = trained(plan, gives=True), trained(plan, gives=False)
        assert torch.equal(given["norm.weight"], torch.ones(13).sub(torch.ones(13), alpha=0.1))
        assert not torch.equal(given["norm.weight"], plain["norm.weight"])

    in_turn(check, PLANS)(rank)
