"""Weights that every rank has in full, read and written between a step and the next forward.

Under ZERO1 and ZERO2 the new weights are gathered during the next forward, unit by unit. A parameter once was NaN until
then, so a weight clamp, an average of the weights or a printed norm did not work as in plain torch or under DDP.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import Block, Net, loss_of_tokens, make, same_bits
from zeroshard.model.absent import is_absent
from zeroshard.ranks.trial import Probe
from zeroshard.testing import run_ranks

PLANS = ("ddp", "zero1", "zero2")


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def init_again(model: Any) -> None:
    torch.manual_seed(3)
    model.blocks[1].up.reset_parameters()


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def leave(model: nn.Module) -> None:
    pass


RUNS: dict[str, dict[str, Any]] = {
    "clamp": {"edit": clamp},
    "data": {"edit": clamp_data},
    "init": {"edit": init_again},
    "foreach": {"edit": foreach},
    "clamp in bf16": {"edit": clamp, "precision": "bf16"},
    "average": {"edit": leave, "average": True},
}


def trained(
    rank: int, plan: str, edit: Callable[[Any], None], precision: str | None = None, average: bool = False
) -> Any:
    model = make(partial(Net, blocks=2))
    averaged = AveragedModel(model) if average else None
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    for step in range(2):
        loss_of_tokens(model, rank, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(model)
        edit(model)
    return dict(averaged.state_dict()) if averaged is not None else handle.full_state_dict(main=True)


WAYS = ("shared", "messages")
IN_TURN = zip(RUNS, 3 * WAYS, (2, 2, 3, 3, 2, 3), strict=True)
CASES = grid(RUNS, WAYS, (2, 3)) if EVERYTHING else [*IN_TURN]


@pytest.mark.parametrize("ranks", [2, 3])
def test_edits_after_a_step_are_those_of_ddp(ranks: int) -> None:
    def check(rank: int) -> None:
        for number, (name, way) in enumerate(at(CASES, ranks)):
            plans = PLANS if EVERYTHING else (PLANS[0], PLANS[1 + number % 2])
            with pytest.MonkeyPatch.context() as patch:
                if way == "messages":
                    patch.setattr(Probe, "answer", lambda self, cards: False)
                ddp, *others = (trained(rank, plan, **RUNS[name]) for plan in plans)
            assert all(same_bits(other, ddp) for other in others), (name, way)
            assert name != "average" or all(value.isfinite().all() for value in ddp.values())
        nothing, clamped = (trained(rank, "zero1", edit) for edit in (leave, clamp))
        assert not same_bits(nothing, clamped)  # the control

    run_ranks(check, ranks)


def test_one_rank_alone_may_read_but_not_a_thread_or_a_worker() -> None:
    def check(rank: int, plan: str) -> None:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        weight, other = model.blocks[1].up.weight, model.blocks[0].up.weight
        for step in range(3):
            loss_of_tokens(model, rank, 0, step).backward()
            optimizer.step()
            assert is_absent(weight) and is_absent(other)
            seen: list[str] = []

            def read(seen: list[str] = seen) -> None:
                try:
                    weight.norm()
                except RuntimeError as error:
                    seen.append(str(error))

            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            pid = os.fork()
            if pid == 0:
                read()
                os._exit(len(seen))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
            assert len(seen) == 1 and "the values of parameter blocks.1.up.weight are not here" in seen[0]
            if rank == step % 2:
                assert weight.norm().isfinite() and type(weight) is nn.Parameter
                assert is_absent(other)
            assert torch.equal(handle.full_state_dict()["blocks.1.up.weight"], weight)

    run_ranks(lambda rank: [check(rank, plan) for plan in PLANS[1:]], 2)
