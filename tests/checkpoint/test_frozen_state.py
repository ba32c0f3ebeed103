"""Optimizer state of parameters that are frozen when it is loaded or saved.

A user trained a model, loaded the checkpoint into a model with a frozen backbone, and unfroze the backbone later: its
moments and step counts were lost without an error. (Plain torch keeps the state of a frozen parameter.) Under
OPTIMIZER_ONLY, only parameters that trained at first were numbered, so that parameters could get each other's state,
and a save with a frozen parameter raised a KeyError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests import grids
from tests.kit import make, same_bits
from zeroshard.checkpoint import CheckpointError
from zeroshard.testing import run_ranks

EVERYTHING, HEAD = range(3), (2,)


def build(seed: int = 0) -> nn.Module:
    """Backbone ("0", "1") and head ("2"). The weights of "0" and "1" have the same shape, so a mix-up raises no
    error."""
    return make(lambda: nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)), seed)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(7 * step + rank))


def let_train(model: Any, layers: Any) -> None:
    for index, layer in enumerate(model):
        layer.requires_grad_(index in layers)


class Run:
    """A model and its optimizer; `form`: what the optimizer is built from, and when the parameters are frozen."""

    def __init__(self, plan: Any, form: str, optimizer_class: Any, seed: int, first: Any = EVERYTHING) -> None:
        self.model = build(seed)
        late = "frozen after" in form
        if not late:
            let_train(self.model, first)
        if plan is zeroshard.OPTIMIZER_ONLY:
            self.optimizer = zeroshard.ShardedOptimizer(self.model.parameters(), optimizer_class, lr=1e-2)
            self.handle = self.optimizer.handle
        else:
            self.handle = zeroshard.shard(self.model, plan, units=nn.Linear)
            if form == "frozen after shard":
                let_train(self.model, first)
            source: Any = self.model.parameters() if form == "parameters" else self.handle
            self.optimizer = zeroshard.ShardedOptimizer(source, optimizer_class, lr=1e-2)
        if late:
            let_train(self.model, first)

    def train(self, rank: int, steps: range, layers: Any = None) -> None:
        if layers is not None:
            let_train(self.model, layers)
        for step in steps:
            self.optimizer.zero_grad()
            self.model(batch(rank, step)).square().mean().backward()
            if self.handle.plan.external_gradients:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
            assert self.optimizer.step().applied

    def weights(self) -> dict[str, Tensor]:
        if self.handle.plan.external_gradients:
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return self.handle.full_state_dict(main=True)

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        if self.handle.plan.external_gradients:
            self.model.load_state_dict(weights)
        else:
            self.handle.load_full_state_dict(weights)


def expected(rank: int, plan: Any, optimizer_class: Any, folder: Path) -> tuple[Any, list[Any]]:
    """A run without interruption, and the states that it saved: before the backbone was frozen, and while it was."""
    run = Run(plan, "handle", optimizer_class, 0)
    saved = []
    for number, layers in enumerate([EVERYTHING, HEAD]):
        run.train(rank, range(number, number + 1), layers)
        zeroshard.save(folder, run.handle, run.optimizer, step=number)
        saved.append((run.weights(), run.optimizer.state_dict()))
    run.train(rank, range(2, 3), EVERYTHING)
    return run, saved


def go_on(run: Run, rank: int, number: int) -> None:
    if number == 0:
        run.train(rank, range(1, 2), HEAD)
    run.train(rank, range(2, 3), EVERYTHING)


def equal_states(one: Any, other: Any) -> bool:
    if one["param_groups"] != other["param_groups"] or one["state"].keys() != other["state"].keys():
        return False
    return all(
        one["state"][p].keys() == items.keys() and all(torch.equal(one["state"][p][key], v) for key, v in items.items())
        for p, items in other["state"].items()
    )


CASES = {
    torch.optim.AdamW: [
        ("handle", 0, "folder"),
        ("handle", 1, "state_dict"),
        ("handle", 0, "again"),
        ("parameters", 0, "state_dict"),
        ("parameters", 1, "again"),
        ("frozen after shard", 0, "folder"),
        ("frozen after all", 1, "folder"),
    ],
    torch.optim.Adafactor: [("handle", 0, "again"), ("parameters", 1, "state_dict")],
}
"""(`form`; which checkpoint, 0: saved before the backbone was frozen; how the checkpoint is loaded). DDP and ZERO3 take
turns."""


UNDER_OPTIMIZER_ONLY = [("parameters", 0, "again"), ("parameters", 1, "state_dict"), ("frozen after all", 0, "folder")]


def check_cases(rank: int, plan: Any, optimizer_class: Any, cases: list[tuple[str, int, str]], folder: Path) -> None:
    run, saved = expected(rank, plan, optimizer_class, folder)
    whole = run.weights(), run.optimizer.state_dict()
    for form, number, way in cases:
        case = plan, optimizer_class, form, number, way
        one = Run(plan, form, optimizer_class, 1, HEAD)
        load(one, folder, number, saved[number], way, lambda form=form: Run(plan, form, optimizer_class, 2, HEAD))
        assert plan is not zeroshard.OPTIMIZER_ONLY or same_bits(one.weights(), saved[number][0]), case
        go_on(one, rank, number)
        assert same_bits(one.weights(), whole[0]), case
        assert equal_states(one.optimizer.state_dict(), whole[1]), case


def test_frozen_when_loaded_trained_later(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for plan in (zeroshard.DDP, zeroshard.ZERO3, zeroshard.OPTIMIZER_ONLY):
            for number, (optimizer_class, cases) in enumerate(CASES.items()):
                chosen = cases if grids.EVERYTHING else cases[(number + (plan is zeroshard.ZERO3)) % 2 :: 2]
                chosen = UNDER_OPTIMIZER_ONLY[number:] if plan is zeroshard.OPTIMIZER_ONLY else chosen
                folder = tmp_path / f"{plan} {optimizer_class.__name__}"
                check_cases(rank, plan, optimizer_class, chosen, folder)

    run_ranks(check, 2)


def load(run: Run, folder: Path, number: int, saved: Any, way: str, second: Callable[[], Run]) -> None:
    if way == "folder":
        zeroshard.load(folder, run.handle, run.optimizer, step=number)
    elif way == "state_dict":
        run.take_weights(saved[0])
        run.optimizer.load_state_dict(saved[1])
    else:  # load the frozen state in a second run, save it there, and load that into this one
        between = second()
        zeroshard.load(folder, between.handle, between.optimizer, step=number)
        assert equal_states(between.optimizer.state_dict(), saved[1])
        zeroshard.save(folder, between.handle, between.optimizer, step=10 + number)
        zeroshard.load(folder, run.handle, run.optimizer, step=10 + number)


def test_a_checkpoint_of_other_groups_is_still_refused(tmp_path: Path) -> None:
    """State that was saved in another param group is refused, and the options of the groups are not changed."""

    def check(rank: int) -> None:
        run = Run(zeroshard.ZERO1, "handle", torch.optim.SGD, 0, HEAD)
        let_train(run.model, EVERYTHING)
        run.optimizer.add_param_group({"params": run.model[0].parameters(), "lr": 0.5})
        run.train(rank, range(1))
        zeroshard.save(tmp_path, run.handle, run.optimizer, step=1)
        other = Run(zeroshard.ZERO1, "handle", torch.optim.SGD, 0, HEAD)
        before = other.optimizer.state_dict()["param_groups"]
        with pytest.raises(CheckpointError, match=r"unexpected: optimizer state of 0\.weight"):
            zeroshard.load(tmp_path, other.handle, other.optimizer)
        assert other.optimizer.state_dict()["param_groups"] == before, "nothing has been changed"
        with pytest.raises(ValueError, match="param groups of"):
            other.optimizer.load_state_dict(run.optimizer.state_dict())

    run_ranks(check, 2)


def test_a_load_follows_what_trains_again_since_shard(tmp_path: Path) -> None:
    """Frozen weights are their main, in bf16: the fp32 values of the checkpoint would not fit."""

    def begun(*, frozen: bool) -> tuple[nn.Module, zeroshard.Handle, zeroshard.ShardedOptimizer]:
        model = build()
        model[0].requires_grad_(not frozen)
        handle = zeroshard.shard(model, "zero2", units=nn.Linear, precision="bf16")
        return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)

    def check(rank: int) -> None:
        model, handle, optimizer = begun(frozen=False)
        model(batch(rank, 0)).square().mean().backward()
        optimizer.step()
        zeroshard.save(tmp_path, handle, optimizer, step=1)
        model, other, its_optimizer = begun(frozen=True)
        model[0].requires_grad_(True)
        zeroshard.load(tmp_path, other, its_optimizer)
        assert same_bits(other.full_state_dict(main=True), handle.full_state_dict(main=True))
        assert equal_states(its_optimizer.state_dict(), optimizer.state_dict())

    run_ranks(check, 2)
