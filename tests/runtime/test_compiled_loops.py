"""A compiled function that is a whole step: the compiler traces the user's code, not the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, same_bits
from zeroshard.testing import run_ranks

ENGINE = str(Path(zeroshard.__file__).parent)
CASTS = str(Path(ENGINE, "model"))  # are part of a unit's graph


class Loop:
    def __init__(self, plan: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        handle = zeroshard.shard(self.model, plan, units=nn.Linear) if plan else None
        parameters: Any = handle or self.model.parameters()
        self.optimizer = zeroshard.ShardedOptimizer(parameters, torch.optim.AdamW, lr=0.01)
        self.handle = self.optimizer.handle

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def clipped(self, x: Tensor) -> Tensor:
        self.model.zero_grad()
        with self.handle.no_sync():
            (self.model(x).square().mean() / 2).backward()
        loss = self.model(x + 1).square().mean() / 2
        self.optimizer.backward(loss)
        self.optimizer.clip_grad_value_(0.05)
        self.optimizer.clip_grad_norm_(0.1)
        self.optimizer.step()
        return loss.detach()

    def torch_clipped(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        return loss.detach()


def train(rank: int, plan: Any, how: str, compiled: Callable[[Any], Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    loop = Loop(plan)
    if how == "the optimizer's step":
        loop.optimizer.step = compiled(loop.optimizer.step)  # type: ignore[method-assign]
        step = loop.step
    else:
        step = compiled(getattr(loop, how))
    seeds = [10 * k + (rank if plan else 0) for k in range(3)]  # OPTIMIZER_ONLY: nobody averages the gradients here
    losses = [step(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))) for seed in seeds]
    state = loop.handle.full_state_dict() if plan else loop.model.state_dict()
    return losses, {name: value.clone() for name, value in state.items()}


PLANS_OF: dict[str, tuple[Any, ...]] = {
    "step": (*PLANS, None) if EVERYTHING else (zeroshard.DDP, zeroshard.ZERO3, None),
    "clipped": PLANS if EVERYTHING else (zeroshard.ZERO1, zeroshard.ZERO3),
    "torch_clipped": (zeroshard.DDP, zeroshard.ZERO2),
    "the optimizer's step": PLANS if EVERYTHING else PLANS[1::2],
}


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
@pytest.mark.filterwarnings("ignore")  # the tracer looks at the grad of tensors that are no leaves
@pytest.mark.parametrize("how", PLANS_OF)
def test_a_compiled_step_is_that_of_the_loop(how: str) -> None:
    """By default one of the ranks compiles, in turn: that takes longer than all the rest."""
    traced: list[str] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    def check(rank: int) -> None:
        for turn, plan in enumerate(PLANS_OF[how]):
            torch._dynamo.reset()
            compiles = EVERYTHING or rank == turn % 2
            compiled = partial(torch.compile, backend=backend) if compiles else lambda function: function
            found = train(rank, plan, how, compiled)
            expected = train(rank, plan, how, lambda function: function)
            assert found[0] == expected[0], plan
            assert same_bits(found[1], expected[1]), plan
        assert traced or how != "step"  # torch 2.11 traces nothing of a function that opens one of our contexts
        of_engine = [text for text in traced if ENGINE in text.replace(CASTS, "")]
        assert not of_engine, of_engine[0]

    run_ranks(check, 2)
