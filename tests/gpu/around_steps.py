"""Pieces of `make test-gpu` for what happens around steps: checkpoints, parking, and ranks that run out of inputs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import zeroshard
from tests.gpu.checks import Checks, Setting
from tests.gpu.worlds import exchanging_alone, on_shared_device, one_rank
from tests.kit import DEVICE, PLANS, Block, Net, State, loss_of_tokens, make, same_bits
from zeroshard.checkpoint import commit
from zeroshard.checkpoint.writer import Item
from zeroshard.placement import Plan

STEPS = 3


class Training:
    """A small model and its optimizer, a step at a time."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.model = make(Net, seed)
        self.handle = zeroshard.shard(self.model, plan, units=Block, precision="bf16")
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.AdamW, lr=1e-2)

    def step(self, number: int, rank: int = 0, *, factor: float = 1.0) -> None:
        self.optimizer.backward(loss_of_tokens(self.model, rank, 0, number) * factor)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> State:
        return {name: value.cpu() for name, value in self.handle.full_state_dict(main=True).items()}


def checkpoint(checks: Checks, setting: Setting) -> None:
    """A step that was saved, also while training went on, is loaded with its bits."""
    with one_rank(setting.device), exchanging_alone():
        for plan in PLANS:
            training = Training(plan)
            training.step(0)
            zeroshard.save(setting.folder / f"{plan}", training.handle, training.optimizer, step=1)
            _save_beside(setting.folder / f"{plan} beside", training)
            for where in ("", " beside"):
                same = same_bits(_continued(plan, setting.folder / f"{plan}{where}"), training.weights())
                checks.expect(f"{plan}: saved{where}, loaded and trained on, the same bits", same)
        checks.expect(
            "another model, not loaded, has other bits (control)", not same_bits(_continued(plan), training.weights())
        )
        with patch.object(Item, "copied", lambda item: item):
            _save_beside(setting.folder / "late", training, step=2)
        other = _continued(plan, setting.folder / "late", step=2)
        checks.expect("saved beside without copies, other bits (control)", not same_bits(other, training.weights()))


def _save_beside(folder: Path, training: Training, step: int = 1) -> None:
    """Save while the step with that number changes what is being saved: nothing is written before."""
    stepped, write = threading.Event(), commit.write_with_index

    def write_after_the_step(*arguments: Any) -> Any:
        stepped.wait()
        return write(*arguments)

    with patch.object(commit, "write_with_index", write_after_the_step):
        saving = zeroshard.save(folder, training.handle, training.optimizer, step=step, background=True)
        try:
            training.step(step)
        finally:
            stepped.set()
            saving.wait()


def _continued(plan: Plan, folder: Path | None = None, step: int = 1) -> State:
    """The weights of another model after a load and that step."""
    training = Training(plan, seed=1)
    if folder is not None:
        zeroshard.load(folder, training.handle, training.optimizer)
    training.step(step)
    return training.weights()


def park(checks: Checks, setting: Setting) -> None:
    """A parked model leaves the device's memory, and trains on with the same bits."""
    with one_rank(setting.device), exchanging_alone():
        for plan in PLANS:
            parked, other = Training(plan), Training(plan)
            for training in (parked, other):
                training.step(0)
            before = _allocated()
            parked.handle.park()
            if DEVICE.type != "cpu":
                weights = sum(parameter.nbytes for parameter in make(Net).parameters())
                checks.expect(f"{plan}: memory is freed", before - _allocated() >= weights, before - _allocated())
            parked.handle.unpark()
            for training in (parked, other):
                training.step(1)
            checks.expect(f"{plan}: parked and trained on, the same bits", same_bits(parked.weights(), other.weights()))
        other.step(2)
        checks.expect("one step more, other bits (control)", not same_bits(parked.weights(), other.weights()))


def _allocated() -> int:
    return torch.accelerator.memory_allocated() if DEVICE.type != "cpu" else 0


def join(checks: Checks, setting: Setting) -> None:
    """A rank that has run out of inputs counts as one whose gradients are 0."""
    for plan in PLANS[-1:] if setting.is_small else PLANS:
        joined, zeros, full = (
            on_shared_device("late", _uneven, 2, plan, joins, factor)
            for joins, factor in ((True, 0.0), (False, 0.0), (False, 1.0))
        )
        same = all(same_bits(found, zeros[0]) for found in joined)
        checks.expect(f"{plan}: one step less on rank 1, the bits of a step with gradients of 0", same)
        checks.expect(f"{plan}: with all inputs, other bits (control)", not same_bits(full[0], zeros[0]))


def _uneven(rank: int, plan: Plan, joins: bool, factor: float) -> State:
    """`factor`: of the losses of the steps for which rank 1 has no inputs, unless it `joins`."""
    training, own = Training(plan), STEPS - rank
    with training.handle.join() if joins else nullcontext():
        for number in range(own if joins else STEPS):
            training.step(number, rank, factor=1.0 if number < own else factor)
    return training.weights()
