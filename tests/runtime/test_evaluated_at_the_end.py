"""An evaluation on another thread begins while a backward ends."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import PLANS, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.runtime import schedule
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.schedule import Schedule


def trained(plan: Any, patch: pytest.MonkeyPatch | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    handle = zeroshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    loss = handle.model(torch.ones(2, 4)).square().mean()
    looks, ends, over = threading.Event(), threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad():
            handle.model(torch.ones(2, 4))
        over.set()

    other, main = threading.Thread(target=evaluate), threading.get_ident()
    if patch is not None:
        in_backward, end_backward = schedule.in_backward, Reducer.end_backward

        def asked() -> bool:  # in the middle of the look at the backward, it comes to its end
            if threading.get_ident() != main and sys._getframe(1).f_code is Schedule.abandon_backward.__code__:
                looks.set()
                ends.wait(60)
            return in_backward()

        def ending(reducer: Reducer) -> None:
            ends.set()
            over.wait(60)
            end_backward(reducer)

        patch.setattr(schedule, "in_backward", asked)
        patch.setattr(Reducer, "end_backward", ending)

        def evaluate_now(grad: torch.Tensor) -> None:
            other.start()
            looks.wait(60)

        handle.model[0].weight.register_hook(evaluate_now)
    loss.backward()
    if patch is not None:
        other.join()
        assert looks.is_set()
    optimizer.step()
    return handle.full_state_dict()


@on_ranks(1)
def test_an_evaluation_that_meets_the_end_of_a_backward_discards_no_gradients(rank: int) -> None:
    """It took the backward for one that has raised: the step had no gradients, in silence."""

    def check(rank: int, plan: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            found = trained(plan, patch)
        assert same_bits(found, trained(plan, None))

    in_turn(check, PLANS[:3])(rank)
