"""What is called inside `torch.inference_mode()`, as scripts do around an evaluation.

Tensors that are made there cannot be saved for backward, and not be changed in place elsewhere. So training raised an
error of torch at the next step, on some of the ranks, where plain torch goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import Block, Net, State, loss_of_tokens, make, same_bits
from tests.together import on_ranks
from zeroshard.comm import samples
from zeroshard.testing import run_ranks

Inside = Callable[[], AbstractContextManager[Any]]


class Run:
    """One step of training; then something happens; then two steps."""

    def __init__(self, rank: int, plan: str, precision: str | None, folder: Path) -> None:
        self.rank, self.plan, self.precision, self.folder = rank, plan, precision, folder
        self.model = make(partial(Net, blocks=2))
        self.shard()
        self.optimizer = self.make_optimizer()
        self.step(0)

    def shard(self) -> None:
        self.handle = zeroshard.shard(self.model, self.plan, units=Block, precision=self.precision)

    def make_optimizer(self) -> Any:
        return zeroshard.ShardedOptimizer(self.handle, torch.optim.AdamW, lr=0.01, foreach=False)

    def step(self, step: int) -> None:
        self.optimizer.backward(loss_of_tokens(self.model, self.rank, 0, step))
        self.optimizer.step()

    def state(self, name: str, inside: Inside) -> State:
        getattr(self, name)(inside)
        for step in (1, 2):
            self.step(step)
        return self.handle.full_state_dict(main=True)

    def nothing(self, inside: Inside) -> None:
        pass

    def evaluated(self, inside: Inside) -> None:
        with inside():
            loss_of_tokens(self.model, self.rank, 0, 7)

    def sharded(self, inside: Inside) -> None:
        self.handle.close()
        with inside():
            self.shard()
            self.optimizer = self.make_optimizer()

    def closed(self, inside: Inside) -> None:
        with inside():
            self.handle.close()
        loss_of_tokens(self.model, self.rank, 0, 7).backward()
        torch.optim.SGD(self.model.parameters(), lr=0.0).step()
        self.model.zero_grad()
        self.shard()
        self.optimizer = self.make_optimizer()

    def optimizer_built(self, inside: Inside) -> None:
        self.optimizer = None
        with inside():
            self.optimizer = self.make_optimizer()

    def optimizer_loaded(self, inside: Inside) -> None:
        state = self.optimizer.state_dict()
        with inside():
            self.optimizer.load_state_dict(state)

    def optimizer_loaded_from_rank0(self, inside: Inside) -> None:
        state = self.optimizer.state_dict(rank0_only=True)
        with inside():
            self.optimizer.load_state_dict(state, broadcast_from_rank0=True)

    def weights_loaded(self, inside: Inside) -> None:
        state = self.handle.full_state_dict(main=True)
        with inside():
            self.handle.load_full_state_dict(state)

    def checkpoint(self, inside: Inside) -> None:
        with inside():
            zeroshard.save(self.folder, self.handle, self.optimizer, step=1)
            zeroshard.load(self.folder, self.handle, self.optimizer)

    def parked(self, inside: Inside) -> None:
        with inside():
            self.handle.park()
            self.handle.unpark()

    def one_state_set(self, inside: Inside) -> None:
        parameter = next(self.model.parameters())
        with inside():
            self.optimizer.state[parameter] = dict(self.optimizer.state[parameter])

    def group_added(self, inside: Inside) -> None:
        first, *others = self.model.parameters()
        self.optimizer = None
        self.optimizer = zeroshard.ShardedOptimizer([first], torch.optim.AdamW, lr=0.01, foreach=False)
        self.step(3)
        with inside():
            self.optimizer.add_param_group({"params": others})


ALL = [
    name for name in vars(Run) if not name.startswith("_") and name not in ("shard", "make_optimizer", "step", "state")
]


PLANS = ("ddp", "zero1", "zero3")


@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on(plan: str, tmp_path: Path) -> None:
    """By default each action under ZERO3 in one precision, and in the other one under one of the other plans."""

    def check(rank: int) -> None:
        for number, name in enumerate(ALL):
            if not EVERYTHING and plan != "zero3" and number % 2 != PLANS.index(plan):
                continue
            precisions, turn = (None, "bf16-remainder"), (number // 2 + (plan == "zero3")) % 2
            for precision in precisions if EVERYTHING else precisions[turn : turn + 1]:
                wanted, found = (
                    Run(rank, plan, precision, tmp_path / f"{name} {precision} {inside.__name__}").state(name, inside)
                    for inside in (torch.no_grad, torch.inference_mode)
                )
                assert same_bits(wanted, found), (name, precision)

    run_ranks(check, 2)


def test_samples_of_weights_that_an_evaluation_took_are_replaced_while_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gathers of ZeRO-3 take a place for a sample of the weights, in turn; after 256 of them a place that was made
    in an evaluation came back, and the backward raised."""
    monkeypatch.setattr(samples, "_LIMIT", 8)

    def check(rank: int) -> None:
        run = Run(rank, "zero3", None, tmp_path)
        run.evaluated(torch.inference_mode)
        for step in range(4):
            run.step(step)
        assert run.handle.engine.collectives.samples._numbers > 16

    run_ranks(check, 2)


@on_ranks(2)
def test_a_model_that_was_built_there_is_refused(rank: int) -> None:
    """It said "Inference tensors do not track version counter"."""
    for plan in PLANS:
        with torch.inference_mode():
            model = make(partial(Net, blocks=1))
        for inside in (nullcontext, torch.inference_mode):
            with inside(), pytest.raises(ValueError, match=r"was made inside torch.inference_mode\(\).*copy.deepcopy"):
                zeroshard.shard(model, plan, units=Block)
        model = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        loss_of_tokens(model, rank, 0, 0).backward()
        assert optimizer.step().applied
