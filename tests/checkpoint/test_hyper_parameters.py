"""What is in param groups comes back as it was: numbers of any library, tensors, dtypes. What cannot be stored is named
by `save`, and nothing is left out in silence but functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import State, same_bits
from zeroshard.testing import run_ranks


class Held:
    """A `Stateful` that holds a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


class Job:
    """A small model with AdamW, whose first learning rate is the constructor's."""

    def __init__(self, rank: int, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, nn.Linear(3, 3)
        self.handle = zeroshard.shard(self.model, "zero2")
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, optimizer, **{"lr": 0.1, **options})
        self.group: dict[str, Any] = self.optimizer.param_groups[0]

    def step(self, number: int) -> State:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + self.rank))
        self.optimizer.backward(self.model(x).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.handle.full_state_dict()

    def save(self, folder: Path, **extra: Any) -> None:
        zeroshard.save(folder, self.handle, self.optimizer, step=1, extra=extra)

    def load(self, folder: Path, **extra: Any) -> None:
        zeroshard.load(folder, self.handle, self.optimizer, extra=extra)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """A learning rate times `np.cos(...)` is of a type of numpy: `save` left it out, and the continued run stepped with
    the constructor's. Schedulers with such numbers could not be saved."""

    def check(rank: int) -> None:
        job = Job(rank)
        scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: np.cos(0.3 * step))
        job.step(0)
        scheduler.step()
        job.group |= {"weight_decay": np.float32(0.25), "warm": np.int64(3), "on": np.bool_(True)}
        job.group["all"] = {np.int64(1): [np.float32(0.5)]}
        job.save(tmp_path, scheduler=scheduler)
        lr = job.group["lr"]
        expected = job.step(1)

        other = Job(rank)
        again = torch.optim.lr_scheduler.LambdaLR(other.optimizer, lambda step: np.cos(0.3 * step))
        other.load(tmp_path, scheduler=again)
        loaded = [other.group[key] for key in ("lr", "weight_decay", "warm", "on", "all")]
        assert loaded == [float(lr), 0.25, 3, True, {1: [0.5]}]
        assert [*map(type, loaded)] == [float, float, int, bool, dict]
        assert again.get_last_lr() == scheduler.get_last_lr()
        assert same_bits(expected, other.step(1))
        control = Job(rank)
        control.step(0)
        assert not same_bits(expected, control.step(1))

    run_ranks(check, 2)


def test_numbers_of_numpy_are_compared_between_ranks() -> None:
    def check(rank: int) -> None:
        job = Job(rank)
        job.group["lr"] = np.float32(0.5 + rank)
        with pytest.raises(RuntimeError, match=r"lr of group 0: 0\.5 on rank 0, 1\.5 on rank 1"):
            job.step(0)

    run_ranks(check, 2)


def test_state_may_be_numbers_of_numpy(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["steps"] = np.int64(state.get("steps", 0) + 1)

    def check(rank: int) -> None:
        job = Job(rank, Counting, elementwise=True)
        job.step(0), job.step(1)
        job.save(tmp_path)
        other = Job(rank, Counting, elementwise=True)
        other.load(tmp_path)
        assert [of_one["steps"] for of_one in other.optimizer.state_dict()["state"].values()] == [2, 2]
        assert same_bits(job.step(2), other.step(2))

    run_ranks(check, 2)
