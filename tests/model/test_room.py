"""Calls inside of a forward of the model, of `optimizer.backward` and of `step` map no memory for their frames, however
deep in the stack the program calls these."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.model.room import with_room
from zeroshard.testing import run_ranks

CALLS = 200
DEPTHS = range(300)


def faults_of_calls() -> int:
    """Page faults in a loop that calls a small function: a frame that lies in new memory has one."""

    def called(number: int) -> int:
        return number

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        max((1, 2), key=called)  # by C, as hooks are
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def at_depth(depth: int, function: Callable[[], Any]) -> Any:
    return at_depth(depth - 1, function) if depth else function()


def at_worst(function: Callable[[], int]) -> int:
    """The most faults that it finds, at the depths of a thread of its own."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(at_depth(depth, function) for depth in DEPTHS))
    thread.start()
    thread.join()
    assert len(found) == len(DEPTHS)
    return max(found)


def expect_chunks() -> None:
    if at_worst(faults_of_calls) < CALLS:
        pytest.skip("this Python does not map memory again and again for the frames of calls")


def test_a_function_has_room() -> None:
    expect_chunks()
    assert at_worst(with_room(lambda: faults_of_calls())) < CALLS / 10


class Counting(nn.Linear):
    """Counts in its forward, in its backward, and in the step of its optimizer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.found: list[int] = []

    def count(self, *_: Any) -> None:
        self.found.append(faults_of_calls())

    def forward(self, x: Tensor) -> Tensor:
        return self._count_around(x)

    def predict(self, x: Tensor) -> Tensor:
        return self._count_around(x)

    def _count_around(self, x: Tensor) -> Tensor:
        self.count()
        output = super().forward(x)
        output.register_hook(self.count)  # type: ignore[no-untyped-call]
        return output


def most_in_training(rank: int, plan: str) -> list[int]:
    handle = zeroshard.shard(model := Counting(), plan)
    handle.register_forward_method(model, "predict")

    class CountingSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            model.count()
            super().step(closure)

    optimizer = zeroshard.ShardedOptimizer(handle, CountingSGD, lr=0.1)

    x = torch.ones(1, 2)  # a thread of its own would not have the default device

    def step(call: Callable[[Tensor], Tensor]) -> int:
        model.found.clear()
        optimizer.backward(call(x).sum())
        optimizer.step()
        assert len(model.found) >= 3, "forward, backward, step"
        return max(model.found)

    return [at_worst(lambda: step(model)), at_worst(lambda: step(model.predict))]


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_a_step_has_room(plan: str) -> None:
    expect_chunks()
    (found,) = run_ranks(most_in_training, 1, plan)
    assert max(found) < CALLS / 10, found
