"""Trainings of random actions: steps ahead of the host leave the same bits as steps that wait for each answer."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.ahead_of_host import queued
from tests.kit import DEVICE, EVERYTHING, Block, Gated, State, loss_of_tokens, make, same_bits, travelling
from tests.patience import HANG
from tests.step.test_ahead import recorded
from tests.timed_backend import TIMINGS, timed_ranks
from zeroshard.step import ahead
from zeroshard.testing import run_ranks

STEPS, LOOK = 12 if EVERYTHING else 9, 3
"""Of a training; and after how many of them the state is read. (Each one with `make test-everything`.) A bit that
differs stays in the state, and reading it also waits for all that the step has left in flight."""
PLANS = ("ddp", "zero1", "zero2", "zero3")
SOME = (5, 118, 123, 201, 302)
SEEDS = range(400, 480) if EVERYTHING else SOME
CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2}),
]
RARE = (
    "by hand",
    "clip value",
    "edit",
    "freeze",
    "gate",
    "NaN",
    "state",
    "write",
    "save",
    "load",
    "lr",
    "clip again",
    "discard",
)


class Step(NamedTuple):
    """What a step has left. `results`: of the steps, and norms. `state`: if it was read."""

    actions: list[str]
    results: str
    state: State


class Training:
    """Of one rank; the random numbers are the same on all ranks."""

    def __init__(self, rank: int, plan: str, seed: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.chosen = random.Random(seed)
        self.model = make(Gated)
        precision = self.chosen.choice([None, None, "bf16", "bf16-remainder"])
        self.scale = self.chosen.choice([1.0, 1.0, zeroshard.DynamicScale(init=2.0**8, growth_interval=3)])
        self.is_weighted = self.chosen.random() < 0.3
        self.handle = zeroshard.shard(self.model, plan, units=Block, precision=precision)
        parameters = list(self.model.parameters())
        if self.chosen.random() < 0.4:  # two optimizers that share units
            self.optimizers = [self.optimizer(parameters[::2]), self.optimizer(parameters[1::2])]
        else:
            matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
            self.optimizers = [self.optimizer([matrices, {"params": [p for p in parameters if p.dim() < 2]}])]

    def optimizer(self, parameters: list[Any]) -> zeroshard.ShardedOptimizer:
        of_class, options = self.chosen.choice(CLASSES)
        return zeroshard.ShardedOptimizer(
            parameters, of_class, loss_scale=self.scale, non_finite="skip", fused=True, **options
        )

    def backward(self, step: int, micro_batch: int = 0) -> None:
        loss = loss_of_tokens(self.model, self.rank, micro_batch, step)
        self.optimizers[0].backward(loss, weight=1.5 + self.rank + step / 7 if self.is_weighted else None)

    def gradients(self, step: int, actions: list[str]) -> None:
        if "freeze" in actions:
            inner = self.model.blocks[1]
            inner.requires_grad_(not next(inner.parameters()).requires_grad)
        closed, bad, local = self.chosen.random() < 0.5, self.chosen.randrange(2), self.chosen.random() < 0.5
        Gated.Inner.open = "gate" not in actions or (not closed and self.rank == 0)
        factor = math.nan if "NaN" in actions and self.rank == bad else 1.0
        hook = self.model.head.weight.register_hook(lambda grad: grad * factor)
        try:
            last = 2 if "micro-batches" in actions else 0
            for micro_batch in range(last + 1):
                with self.handle.no_sync() if micro_batch < last and local else nullcontext():
                    self.backward(step, micro_batch)
        finally:
            Gated.Inner.open = True
            hook.remove()
        if "by hand" in actions and self.scale == 1.0 and not self.is_weighted:
            weight = self.model.head.weight
            weight.grad = torch.full(weight.shape, 0.01 * (1 + self.rank), dtype=weight.grad_dtype, device=DEVICE)
        if "discard" in actions:
            self.clip(0.1)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.backward(step, 7)

    def clip(self, max_norm: float) -> list[Tensor]:
        return [optimizer.clip_grad_norm_(max_norm) for optimizer in self.optimizers]

    def change(self, actions: list[str]) -> None:
        """Between backward and step."""
        amount = self.chosen.random()
        if "clip value" in actions and "by hand" not in actions:  # refused until these are averaged
            for optimizer in self.optimizers:
                optimizer.clip_grad_value_(1e-3 + amount / 100)
        if "state" in actions:
            for optimizer in self.optimizers:
                optimizer.state_dict()
        gradient = self.model.embed.weight.grad
        if "edit" in actions and gradient is not None and self.scale == 1.0 and not self.is_weighted:
            gradient.mul_(0.5)
        if "write" in actions:
            with self.handle.unsharded(write=True), torch.no_grad():
                self.model.head.bias.add_(amount / 100)
        if "lr" in actions:
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = 1e-3 + amount / 100

    def step(self, number: int) -> Step:
        actions = [name for name in ("clip", "micro-batches") if self.chosen.random() < 0.35]
        actions += [name for name in RARE if self.chosen.random() < 0.07]
        self.gradients(number, actions)
        norms = self.clip(0.2 + self.chosen.random()) if "clip" in actions else []
        norms += self.clip(0.05 + self.chosen.random() / 4) if "clip again" in actions else []
        self.change(actions)
        results = [optimizer.step() for optimizer in self.optimizers]
        found = [(one.applied, one.grad_norm, one.group_norms, one.loss_scale) for one in results]
        for optimizer in self.optimizers if "load" in actions else ():
            optimizer.load_state_dict(optimizer.state_dict())
        if "save" in actions:
            zeroshard.save(self.folder, self.handle, self.optimizers, step=number)
        for optimizer in self.optimizers if self.chosen.random() < 0.6 else ():
            optimizer.zero_grad()
        if "by hand" in actions:
            norms.clear()  # the device does not know them
        is_looked_at = EVERYTHING or number % LOOK == LOOK - 1
        return Step(actions, repr([*found, *(norm.item() for norm in norms)]), self.state() if is_looked_at else {})

    def state(self) -> State:
        state = {f"main {name}": value for name, value in self.handle.full_state_dict(main=True).items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, items in optimizer.state_dict()["state"].items():
                state |= {f"{key} {number} {index}": value for key, value in items.items()}
        return {name: value.clone() for name, value in (state | self.handle.full_state_dict()).items()}


def run(rank: int, plan: str, seed: int, folder: Path, is_ahead: bool) -> tuple[list[Step], int]:
    """The steps, and how many updates went ahead."""
    with queued(is_ahead=is_ahead), travelling("native"), recorded() as called:
        training = Training(rank, plan, seed, folder / str(is_ahead))
        steps = [training.step(number) for number in range(STEPS)]
        training.handle.close()
    return steps, called.count("update ahead")


def both(rank: int, plan: str, seed: int, folder: Path) -> tuple[str, int]:
    """The first difference, and how many updates went ahead."""
    mine, num_ahead = run(rank, plan, seed, folder, True)
    theirs, _ = run(rank, plan, seed, folder, False)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.results != other.results:
            return f"step {number} {one.actions}: {one.results}, expected {other.results}", num_ahead
        if not same_bits(one.state, other.state):
            return f"state after step {number}, {[step.actions for step in mine[: number + 1]]}", num_ahead
    return "", num_ahead


def test_steps_ahead_leave_the_bits_of_steps_that_wait(tmp_path: Path) -> None:
    num_ahead = 0
    for seed in SEEDS:
        with timed_ranks(TIMINGS[seed % len(TIMINGS)]):
            found = run_ranks(both, 2, PLANS[seed % 4], seed, tmp_path / str(seed), collective_timeout=HANG)
        assert [difference for difference, _ in found] == ["", ""], seed
        num_ahead += found[0][1]
    assert num_ahead > 3 * len(SEEDS)


def test_a_factor_of_the_device_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: by one bit of fp32."""
    update = ahead.Verdict.update

    def off(self: ahead.Verdict, clipping: Any) -> Any:
        found = update(self, clipping)
        if isinstance(found.factor, Tensor):
            found.factor.copy_(torch.nextafter(found.factor, found.factor * 2))
        return found

    monkeypatch.setattr(ahead.Verdict, "update", off)
    with timed_ranks("early"):
        found = run_ranks(both, 2, PLANS[SOME[0] % 4], SOME[0], tmp_path)
    assert all(difference for difference, _ in found)
