"""torch's `Join([ddp, optimizer])` under OPTIMIZER_ONLY: ranks with inputs for different numbers of steps.

The weights are those of a plain optimizer under DDP. (With torch's ZeroRedundancyOptimizer a rank without inputs steps
its part with the gradients of its own last step.)
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.kit import Block, Net, State, loss_of_tokens, make, same_bits
from zeroshard.testing import run_ranks

STEPS = (2, 4, 1)
CASES: dict[str, dict[str, Any]] = {
    "Adam": {},
    "the mean over those that go on": {"divide": False},
    "clip and a scheduler": {"clip": (0.05,)},
    "clips": {"clip": (0.05, 0.06), "optimizer_class": torch.optim.SGD},
    "whole parameters": {"optimizer_class": torch.optim.Adafactor},
    "scaled": {"loss_scale": "dynamic"},
}


def train(
    rank: int,
    sharded: bool,
    steps: int,
    *,
    divide: bool = True,
    clip: tuple[float, ...] = (),
    optimizer_class: Any = torch.optim.AdamW,
    loss_scale: Any = None,
) -> State:
    ddp = DistributedDataParallel(make(Net))
    options: dict[str, Any] = {"lr": 1e-2, "foreach": False}
    optimizer: Any
    if sharded:
        optimizer = zeroshard.ShardedOptimizer(ddp.parameters(), optimizer_class, loss_scale=loss_scale, **options)
    else:
        optimizer = optimizer_class(ddp.parameters(), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7 if clip else 1.0)
    with Join([ddp, optimizer] if sharded else [ddp], divide_by_initial_world_size=divide):
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of_tokens(ddp, rank, 0, step)
            optimizer.backward(loss) if sharded else loss.backward()
            for most in clip:
                norm = optimizer.clip_grad_norm_(most) if sharded else nn.utils.clip_grad_norm_(ddp.parameters(), most)
                assert (norm > most) == (most == clip[0])
            optimizer.step()
            schedule.step()
    if sharded:  # afterwards training without join works
        state = optimizer.state_dict()["state"]
        assert {float(one.get("step", max(STEPS))) for one in state.values()} <= {max(STEPS)}
        assert all(parameter.grad is None for parameter in ddp.parameters()) or steps == max(STEPS)
    return {name: value.detach().clone() for name, value in ddp.module.state_dict().items()}


@functools.cache
def run_all() -> list[dict[str, tuple[State, State]]]:
    """By rank and case: the weights of a plain optimizer under DDP, and those of a sharded one."""

    def both(rank: int, options: dict[str, Any]) -> tuple[State, State]:
        plain = {key: value for key, value in options.items() if key != "loss_scale"}
        return train(rank, False, STEPS[rank], **plain), train(rank, True, STEPS[rank], **options)

    return run_ranks(lambda rank: {case: both(rank, options) for case, options in CASES.items()}, 3)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_a_plain_optimizer_under_ddp(case: str) -> None:
    found = [of_rank[case] for of_rank in run_all()]
    for expected, weights in found:
        assert same_bits(weights, found[0][1])
        if CASES[case].get("clip"):
            torch.testing.assert_close(weights, expected)
        else:
            assert same_bits(weights, expected)


def test_a_sharded_model_has_a_join_of_its_own() -> None:
    def check(rank: int) -> None:
        handle = zeroshard.shard(make(Net), "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD)
        with pytest.raises(ValueError, match=r"use `with handle.join\(\):`"):
            Join([optimizer])

    run_ranks(check, 1)
