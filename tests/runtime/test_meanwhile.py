"""Another thread, or a finalizer, shards a model between two lines of a call that goes over all models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zeroshard
from tests.together import on_ranks


def make() -> zeroshard.Handle:
    return zeroshard.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "zero1")


def sharded_meanwhile(names: set[str], call: Callable[[], object]) -> list[zeroshard.Handle]:
    """Shard a model before each line of the functions of these names that the call comes to."""
    made: list[zeroshard.Handle] = []

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name not in names:
            return None
        if event == "line":
            made.append(make())
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return made


@on_ranks(1)
def test_a_handle_is_closed_while_another_model_is_sharded(rank: int) -> None:
    """It raised "dictionary changed size during iteration", and was closed by half."""
    handles = [make() for _ in range(3)]
    made = sharded_meanwhile({"_let_go_of_parameters", "_parameters_of", "items", "keyrefs"}, handles[0].close)
    assert len(made) >= 4
    model = handles[0].model
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    zeroshard.shard(model, "zero1")
    for handle in [*handles[1:], *made]:
        handle.close()


@on_ranks(1)
def test_a_plain_optimizer_steps_while_a_model_is_sharded(rank: int) -> None:
    """The step, of any optimizer in the process, raised "Set changed size during iteration"."""
    handles = [make() for _ in range(3)]
    plain = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 2)).sum().backward()
    before = plain.weight.detach().clone()
    made = sharded_meanwhile({"_before_step", "__iter__", "all"}, optimizer.step)
    assert len(made) >= 4 and torch.equal(plain.weight, before - 0.1)
    for handle in [*handles, *made]:
        handle.close()
