"""Ranks that do different things once trained wrong without an error: one rank alone asked for the norm of a gradient,
and received the bytes of another exchange; a scheduler that used each rank's own loss gave each shard of a parameter
another learning rate; gradients that had not been averaged were applied, each shard with its own rank's gradient."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import NUM_RANKS, PLANS
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.comm.samples import Samples
from zeroshard.step import same_gradients
from zeroshard.testing import RankError, run_ranks

Case = Callable[[int, Any, Any, Any], object]
SHARDED = ["zero1", "zero2", "zero3"] if EVERYTHING else ["zero2", "zero3"]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()


def said_by_all(num_ranks: int, *runs: Callable[[int, Any], object]) -> list[str]:
    """The message of the error that each run raises on every rank; it must be the same on all ranks. "" for none.

    The runs share their ranks. Each one has a process group of its own, so that an error leaves no trace."""

    def catch(rank: int) -> list[str]:
        said = []
        for run in runs:
            group = dist.new_group(timeout=timedelta(seconds=HANG))
            try:
                run(rank, group)
                said.append("")
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        return said

    first, *others = run_ranks(catch, num_ranks, collective_timeout=HANG)
    for other in others:
        assert other == first
    return first


# Only one rank calls a collective function ----------------------------------------------------------------------------


def clip(rank: int, model: nn.Module, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def norm(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        model[0].weight.grad.norm().item()


def other_norm(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    model[0].weight.grad.norm(1 + rank)


def state(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 1:
        optimizer.state[model[0].weight]


def zeros(rank: int, model: Any, handle: Any, optimizer: Any) -> None:
    if rank == 0:
        optimizer.count_zero_gradients()


COLLECTIVE: list[tuple[Case, str]] = [
    (clip, "rank 0 at the 2-norm of a p.grad"),
    (norm, "rank 0 at the 2-norm of a p.grad"),
    (other_norm, "rank 0 at the 1-norm of a p.grad .*, rank 1 at the 2-norm"),
    (state, "rank 1 at optimizer.state"),
    (zeros, "rank 0 at optimizer.count_zero_gradients"),
]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_one_rank_alone_asks_for_what_is_collective(num_ranks: int) -> None:
    """Earlier, the bytes of the other ranks' step were read as a norm, and gloo aborted the other process (SIGABRT)."""

    def run(rank: int, group: Any, ask: Case, plan: str) -> None:
        model = build()
        handle = zeroshard.shard(model, plan, mesh=group)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        backward(model, rank)
        ask(rank, model, handle, optimizer)
        optimizer.step()

    cases = list(itertools.product(COLLECTIVE, SHARDED))
    found = said_by_all(num_ranks, *(partial(run, ask=ask, plan=plan) for (ask, _), plan in cases))
    for ((_, named), plan), said in zip(cases, found, strict=True):
        assert re.search(named, said) and "Both are collective" in said, (plan, said)


@on_ranks(3)
def test_rows_of_other_lengths_and_long_rows(rank: int) -> None:
    collectives = zeroshard.shard(build(), "ddp").engine.collectives
    for numel in (0, 1, 25, 26, 27, 1000):  # 26 fill the first packet
        for dtype in (torch.float64, torch.uint8, torch.bool):
            row = torch.arange(numel).add(rank).to(dtype)
            rows = collectives.exchange(row, "a test")
            assert rows.dtype == dtype
            assert torch.equal(rows, torch.stack([torch.arange(numel).add(r).to(dtype) for r in range(3)]))
    with pytest.raises(RuntimeError, match="a test: rank 0 brings 8 bytes, rank 1 16"):
        collectives.exchange(torch.zeros(1 + rank, dtype=torch.float64), "a test")
    assert collectives.exchange_objects(rank) == [0, 1, 2]  # all ranks have raised, and can go on


# Ranks step with different settings ----------------------------------------------------------------------------------


class Run:
    """One rank's training. Subclasses do something else on rank 1; `named` is the pattern of the error."""

    named = ""

    def __init__(self, rank: int, group: Any, plan: Any) -> None:
        self.rank = rank
        self.model = build()
        self.module: Any = self.model
        self.handle = zeroshard.shard(self.model, plan, mesh=group)
        self.optimizer = self.optimize()

    def optimize(self) -> Any:
        return zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=0.1)

    def edit(self, step: int) -> None:
        """Called between backward and step."""

    def after(self, step: int) -> None:
        """Called after each step."""

    def backward(self, step: int) -> None:
        backward(self.model, self.rank, step)

    def train(self) -> None:
        for step in range(3):
            self.optimizer.zero_grad()
            self.backward(step)
            self.edit(step)
            self.optimizer.step()
            self.after(step)


def expect_named(num_ranks: int, cases: Iterable[tuple[type[Run], Any]]) -> None:
    """Under its plan, each run raises the error that its class names, on every rank."""
    cases = list(cases)

    def run(rank: int, group: Any, differs: type[Run], plan: Any) -> None:
        differs(rank, group, plan).train()

    found = said_by_all(num_ranks, *(partial(run, differs=differs, plan=plan) for differs, plan in cases))
    for (differs, plan), said in zip(cases, found, strict=True):
        assert re.search(differs.named, said.replace("rank 0 and 2", "rank 0")), (differs, plan, said)


class OtherLr(Run):
    named = r"^the ranks step with different settings. lr of group 0: 0.1 on rank 0, 0.2 on rank 1"

    def optimize(self) -> Any:
        return zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=0.1 * (1 + (self.rank == 1)))


class OtherClass(Run):
    named = r"class of group 0: 'torch.optim.sgd.SGD' on rank 0, 'torch.optim.adam.Adam' on rank 1"

    def optimize(self) -> Any:
        return zeroshard.ShardedOptimizer(
            self.handle, torch.optim.Adam if self.rank == 1 else torch.optim.SGD, lr=0.1, weight_decay=0.0
        )


class OtherWhole(Run):
    named = r"momentum of group 0: 0.9 on rank 0, 0.8 on rank 1"

    def optimize(self) -> Any:
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() == 2], "optimizer_class": torch.optim.Muon},
            {"params": [p for p in self.model.parameters() if p.dim() == 1]},
        ]
        groups[0]["momentum"] = 0.8 if self.rank == 1 else 0.9
        return zeroshard.ShardedOptimizer(groups, torch.optim.AdamW, lr=0.1)


class Plateau(Run):
    """The most common mistake: a scheduler steps with each rank's own loss."""

    named = r"lr of group 0: 0.1 on rank 0, 0.01\d* on rank 1.*average the loss"

    def after(self, step: int) -> None:
        if step == 0:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.scheduler.step(float(step) if self.rank == 1 else -float(step))


class OtherMembers(Run):
    named = r"the param group of 0.bias: 1 on rank 0, 0 on rank 1"

    def optimize(self) -> Any:
        dims = (1, 2) if self.rank == 1 else (2,)
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if p.dim() in dims and n != "2.bias"]},
            {"params": [p for n, p in self.model.named_parameters() if p.dim() not in dims or n == "2.bias"]},
        ]
        return zeroshard.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1)


class OtherNumberOfGroups(Run):
    named = r"class of group 1: 'torch.optim.sgd.SGD' on rank 0, nothing on rank 1|the param group of"

    def optimize(self) -> Any:
        parameters = list(self.model.parameters())
        groups = [parameters] if self.rank == 1 else [parameters[:1], parameters[1:]]
        return zeroshard.ShardedOptimizer([{"params": one} for one in groups], torch.optim.SGD, lr=0.1)


class OtherClip(Run):
    named = r"clip_grad_norm_\(max_norm, norm_type\): \(0.01, 2.0\) on rank 0, \(0.02, 2.0\) on rank 1"

    def edit(self, step: int) -> None:
        self.optimizer.clip_grad_norm_(0.02 if self.rank == 1 else 0.01)


class ClipOnOne(Run):
    named = r"clip_grad_norm_\(max_norm, norm_type\): nothing on rank 0, \(0.01, 2.0\) on rank 1"

    def edit(self, step: int) -> None:
        if self.rank == 1:
            self.optimizer.clip_grad_norm_(0.01)


class OtherClamp(Run):
    named = r"clip_grad_value_: None on rank 0, 0.01 on rank 1"

    def edit(self, step: int) -> None:
        if self.rank == 1:
            self.optimizer.clip_grad_value_(0.01)


class AfterClip(Run):
    """The learning rate changes after the exchange in clip_grad_norm_, so the error comes one step later."""

    named = r"after clip_grad_norm_, lr of group 0: as before on rank 0, 0.3 on rank 1. The previous step has used it"

    def edit(self, step: int) -> None:
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.param_groups[0]["lr"] = 0.3 if self.rank == 1 and step == 1 else 0.1


class OtherScale(Run):
    named = r"the loss scales of this step: .*1024.* on rank 0, .*2048.* on rank 1"

    def optimize(self) -> Any:
        return zeroshard.ShardedOptimizer(
            self.handle, torch.optim.SGD, lr=0.1, loss_scale=2048.0 if self.rank == 1 else 1024.0
        )

    def backward(self, step: int) -> None:
        self.optimizer.backward(self.model(torch.ones(4, 16) + self.rank).square().mean())


class ScaleOnOne(OtherScale):
    named = r"the loss scales of this step: .*1024.* on rank 0, \(\) on rank 1"

    def optimize(self) -> Any:
        return zeroshard.ShardedOptimizer(
            self.handle, torch.optim.SGD, lr=0.1, loss_scale=1.0 if self.rank == 1 else 1024.0
        )


class WeightsOnOne(Run):
    named = r"the losses of this step have weights: False on rank 0, True on rank 1"

    def backward(self, step: int) -> None:
        loss = self.model(torch.ones(4, 16) + self.rank).square().mean()
        self.optimizer.backward(loss, weight=3.0 if self.rank == 1 else None)


SETTINGS = [
    *(OtherLr, OtherClass, OtherWhole, Plateau, OtherMembers, OtherNumberOfGroups, OtherClip, ClipOnOne),
    *(OtherClamp, AfterClip, OtherScale, ScaleOnOne, WeightsOnOne),
]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_every_rank_says_which_setting_differs(num_ranks: int) -> None:
    """By default each setting under one plan, in turn."""
    expect_named(num_ranks, itertools.product(SETTINGS, PLANS) if EVERYTHING else zip(SETTINGS, itertools.cycle(PLANS)))


class OtherFactor(Run):
    named = r"what was done to p.grad of 0.weight: mul_\(0.5\) on rank 0, mul_\(1.0\) on rank 1"

    def edit(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad.mul_(1.0 if self.rank == 1 else 0.5)


class FactorOnOne(Run):
    named = r"what was done to p.grad of 2.bias: nothing on rank 0, clamp_\(.*0.5.*\) on rank 1"

    def edit(self, step: int) -> None:
        if self.rank == 1:
            self.module[2].bias.grad.clamp_(min=-0.5, max=0.5)


class OtherTorchClip(Run):
    named = r"what was done to p.grad of 0.weight: mul_\(.*\) on rank 0, mul_\(.*\) on rank 1"

    def edit(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3 * (1 + (self.rank == 1)))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_every_rank_says_what_was_done_to_a_gradient(num_ranks: int) -> None:
    expect_named(num_ranks, itertools.product([OtherFactor, FactorOnOne, OtherTorchClip], SHARDED))


def changed_after_a_clip(rank: int, plan: str, ranks: tuple[int, ...]) -> float:
    """These ranks change a gradient between clip and step. Returns the sum of all weights."""
    model = build()
    handle = zeroshard.shard(model, plan)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 16) + rank).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        if rank in ranks:
            next(model.parameters()).grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    total = sum(value.double().sum().item() for value in handle.full_state_dict().values())
    handle.close()
    return total


@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_that_all_ranks_change_after_a_clip(plan: str) -> None:
    both, none = (run_ranks(changed_after_a_clip, 2, plan, ranks) for ranks in ((0, 1), ()))
    assert both[0] == both[1] != none[0] == none[1]


@pytest.mark.by_gloo  # elsewhere ranks announce nothing: the watch ends them after its timeout
@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_that_one_rank_changes_after_a_clip(plan: str) -> None:
    """That rank has to agree once more, and the others step. They must not wait for each other."""
    with pytest.raises(RankError, match=r"rank 1 is at .* have changed since clip_grad_norm_ .* load a checkpoint"):
        run_ranks(changed_after_a_clip, 2, plan, (1,))


@on_ranks(3)
def test_after_a_difference_ranks_go_on(rank: int) -> None:
    """The error leaves everything unchanged: once the settings agree, the step is that of ranks that never differed."""
    ends = []
    for wrong in (False, True):
        model = build()
        handle = zeroshard.shard(model, "zero2")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            if wrong and step == 1:
                optimizer.param_groups[0]["lr"] = 0.1 + rank
                with pytest.raises(RuntimeError, match="lr of group 0"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64) if rank else 0.1
            optimizer.step()
        ends.append(handle.full_state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@on_ranks(2)
def test_groups_that_are_added_are_compared(rank: int) -> None:
    model = build()
    zeroshard.shard(model, "zero2")
    optimizer = zeroshard.ShardedOptimizer([model[0].weight], torch.optim.SGD, lr=0.1)
    backward(model, rank)
    optimizer.step()
    optimizer.add_param_group({"params": [model[0].bias if rank else model[2].bias]})
    backward(model, rank, 1)
    with pytest.raises(RuntimeError, match="the param group of"):
        optimizer.step()


# Gradients that every rank has in full --------------------------------------------------------------------------------


class FactorUnderDdp(OtherFactor):
    named = r"different gradients: that of 2.bias has other values on rank 1 than on rank 0.*on every rank alike"


class DiscardedOnOne(Run):
    named = r"different gradients: 0.bias has one on rank 0, and none on rank 1"

    def edit(self, step: int) -> None:
        if self.rank == 1:
            self.module[0].bias.grad = None


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gradients_that_one_rank_alone_has_changed_under_ddp(num_ranks: int) -> None:
    """Found one step later, as weights that differ between ranks."""
    expect_named(num_ranks, itertools.product([FactorUnderDdp, DiscardedOnOne], ["ddp"]))


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_gradients_that_nobody_averages(num_ranks: int) -> None:
    """A model without DDP, and an optimizer built from its parameters: each shard took its own rank's gradient."""

    def run(rank: int, group: Any, *, missing: bool = False, averaged: bool = False) -> None:
        model = build()
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, rank, step)
            for parameter in model.parameters():
                if averaged:
                    dist.all_reduce(parameter.grad)
            if missing and rank == 1:
                model[2].bias.grad = None
            if averaged and not missing:
                model[0].bias.grad = None  # on every rank
            optimizer.step()

    local, missing, fine = said_by_all(
        num_ranks, run, partial(run, missing=True, averaged=True), partial(run, averaged=True)
    )
    assert "that of parameter number 3 has other values on rank 1 than on rank 0" in local
    assert "DistributedDataParallel" in local
    assert "parameter number 3 has one on rank 0, and none on rank 1" in missing
    assert fine == ""


def test_samples_with_other_signs_have_another_digest() -> None:
    """Of float64, two signs cancelled."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = set()
        for changed in ([], [0, 1], [1, 3], range(16)):
            values, samples = torch.arange(1.0, 17.0, dtype=dtype), Samples(torch.device("cpu"))
            values[list(changed)] *= -1
            samples.take(0, "unit", values)
            found.add(int(samples.digest()))
        assert len(found) == 4, dtype


def test_each_gradient_is_compared_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_gradients, "_AT_A_TIME", 1)

    def check(rank: int) -> None:
        for differs in range(4):
            model = build()
            optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
            with pytest.raises(RuntimeError, match=f"that of parameter number {differs} has other values on rank 1"):
                train(model, optimizer, rank, differs)
            optimizer.handle.close()

    def train(model: nn.Module, optimizer: Any, rank: int, differs: int) -> None:
        for _ in range(4):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, rank if number == differs else 1)
            optimizer.step()

    run_ranks(check, 2)
