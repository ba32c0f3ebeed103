"""What is in param groups comes back as it was: numbers of any library, tensors, dtypes. What cannot be stored is named
by `save`, and nothing is left out in silence but functions."""

from __future__ import annotations

import enum
import math
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


class Keeping(torch.optim.SGD):
    """Keeps the sum of its gradients in fp64, under a name that may be no good one."""

    key: Any = "sum"

    def step(self, closure: Any = None) -> Any:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            nothing = torch.zeros_like(parameter, dtype=torch.float64)
            self.state[parameter].setdefault(self.key, nothing).add_(parameter.grad)


def test_state_in_another_dtype_than_main_stays_in_it(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        job, other = Job(rank, Keeping), Job(rank, Keeping)
        job.step(0)
        job.save(tmp_path)
        other.load(tmp_path)
        for mine, theirs in zip(job.optimizer.state.values(), other.optimizer.state.values(), strict=True):
            assert theirs["sum"].dtype == torch.float64 and torch.equal(mine["sum"], theirs["sum"])

    run_ranks(check, 2)


@pytest.mark.parametrize("key", ["a/b", 7])
def test_state_whose_name_no_file_can_have_is_refused(tmp_path: Path, key: Any) -> None:
    def check(rank: int) -> None:
        job = Job(rank, type("Odd", (Keeping,), {"key": key}))
        job.step(0)
        with pytest.raises(ValueError, match=rf"{key!r} of (weight|bias): its name must be a text without '/'"):
            job.save(tmp_path)

    run_ranks(check, 1)
    assert not list(tmp_path.iterdir())


KEPT: dict[str, Any] = {
    "lr": torch.tensor(0.25, dtype=torch.float64),
    "betas": (torch.tensor(0.5), torch.tensor(0.75)),
    "one": torch.tensor([[7]], dtype=torch.int16),
    "several": torch.arange(3.0),
    "list": [torch.ones(2, dtype=torch.bfloat16), {"x": torch.int8}],
    "complex": torch.tensor(1 + 2j),
    "set": {1, (2, 3), "x"},
    "frozen": frozenset({1}),
    "dtype": torch.float16,
    "another_dtype": torch.complex128,
    "never": -math.inf,
}
"""Options of a param group that torch's `state_dict` and `torch.save` keep."""


def differing(group: dict[str, Any]) -> list[str]:
    """The options in KEPT that a group has not."""
    return [key for key, value in KEPT.items() if not same(group.get(key), value)]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.by_cpu
def test_what_torch_keeps_in_a_group_is_kept(tmp_path: Path) -> None:
    """Sets, dtypes, tensors of several elements, and lists with tensors were left out in silence. A tensor of one
    number came back as a number."""

    def save(rank: int) -> None:
        job = Job(rank)
        job.group.update(KEPT)
        job.save(tmp_path)
        state_dict = job.optimizer.state_dict()
        for from_rank0 in (False, True):
            other = Job(rank)
            other.optimizer.load_state_dict(state_dict, broadcast_from_rank0=from_rank0)
            assert differing(other.group) == []

    def load(rank: int) -> None:
        for job in (Job(rank), Job(rank, lr=torch.tensor(0.5))):
            assert differing(job.group) == [*KEPT]
            job.group |= {"several": "another", "set": None, "one": torch.zeros(1, 1, dtype=torch.int16)}
            job.group |= {"never": torch.zeros(3), "betas": (0.5,)}
            job.load(tmp_path)
            assert differing(job.group) == []

    def load_damaged(rank: int) -> None:
        job = Job(rank)
        before = job.handle.full_state_dict()
        with pytest.raises(zeroshard.CheckpointError, match=r"rank-00000\.safetensors"):
            job.load(tmp_path)
        assert differing(job.group) == [*KEPT] and same_bits(before, job.handle.full_state_dict())

    run_ranks(save, 2)
    run_ranks(load, 3)
    file = tmp_path / "step-1" / "rank-00000.safetensors"
    several = KEPT["several"].numpy().tobytes()
    assert several in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(several, bytes(len(several))))
    run_ranks(load_damaged, 2)


def test_a_step_with_a_tensor_goes_on_as_it_was(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        job = Job(rank)
        job.group["lr"] = torch.tensor(0.3)
        job.step(0)
        job.save(tmp_path)
        expected = job.step(1)
        other, of_another_class = Job(rank), Job(rank, torch.optim.Adam)
        other.load(tmp_path)
        assert same_bits(expected, other.step(1))
        with pytest.raises(zeroshard.CheckpointError, match="state of AdamW for Adam"):
            of_another_class.load(tmp_path)
        zeroshard.load(tmp_path, of_another_class.handle, of_another_class.optimizer, strict=False)
        # Not every class takes tensors.
        assert same(of_another_class.group["lr"], torch.tensor(0.3).item())

    run_ranks(check, 2)


TABLE = np.arange(2)


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Config:
    def __init__(self) -> None:
        self.block = 4


class Configured(torch.optim.SGD):
    """A class with defaults that are no values."""

    def __init__(self, params: Any, lr: float = 0.1, mode: Mode = Mode.FAST, config: Any = None) -> None:
        super().__init__(params, lr)
        defaults = {"mode": mode, "config": config or Config(), "schedule": abs, "device": "cpu", "table": TABLE}
        for key, value in defaults.items():
            self.defaults[key] = value
            for group in self.param_groups:
                group.setdefault(key, value)


@pytest.mark.by_cpu
def test_objects_are_refused_by_name_unless_the_class_brings_them(tmp_path: Path) -> None:
    """Whoever builds the optimizer again gives it its configuration again. What was set later would be lost."""

    def check(rank: int) -> None:
        of_class, path = {"elementwise": True}, tmp_path / "configured"
        job = Job(rank, Configured, config=Config(), **of_class)
        job.save(path)
        state_dict = job.optimizer.state_dict()
        job.optimizer.load_state_dict(state_dict)  # copies the configuration
        job.save(path)
        other = Job(rank, Configured, lr=0.2, **of_class)
        other.load(path)
        assert other.group["lr"] == 0.1 and isinstance(other.group["config"], Config)
        model = nn.Linear(3, 3)
        handle = zeroshard.shard(model, "zero2")
        groups = [{"params": [model.weight], "optimizer_class": Configured}, {"params": [model.bias]}]
        several = zeroshard.ShardedOptimizer(groups, torch.optim.SGD, lr=0.1)
        zeroshard.save(tmp_path / "classes", handle, several, step=1)
        for key, value in {
            "mode": Mode.EXACT,
            "config": {"x": Config()},
            "mine": Config(),
            "bytes": b"x",
            "array": np.arange(2),
            "sparse": torch.eye(2).to_sparse(),
            "device": torch.device("cpu"),
        }.items():
            job = Job(rank, Configured, **of_class)
            job.group[key] = value
            with pytest.raises(ValueError, match=rf"^save: {key} of param group 0.* is (of type|a Tensor)"):
                job.save(tmp_path / "refused")
        job = Job(rank)
        job.group |= {"function": len, "partial": lambda: 0}
        job.save(tmp_path / "functions")

    run_ranks(check, 2)
    assert not (tmp_path / "refused").exists()


def test_state_of_another_class_that_a_step_cannot_take_is_refused_also_if_not_strict(tmp_path: Path) -> None:
    """One rank raised a KeyError in the next step, and the other one stepped."""

    def check(rank: int) -> None:
        saved = Job(rank)
        saved.step(0)
        zeroshard.save(tmp_path, saved.handle, saved.optimizer, step=1)
        other = Job(rank, torch.optim.RMSprop)
        told = "does not fit: this is not the state of RMSprop, whose step would raise KeyError: 'square_avg'"
        with pytest.raises(zeroshard.CheckpointError, match=told):
            zeroshard.load(tmp_path, other.handle, other.optimizer, strict=False)
        without_momentum = Job(rank, torch.optim.SGD)
        loaded = zeroshard.load(tmp_path, without_momentum.handle, without_momentum.optimizer, strict=False)
        assert "state of AdamW for SGD" in str(loaded.unexpected)
        without_momentum.step(1)

    run_ranks(check, 2)
