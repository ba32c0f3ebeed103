"""All ranks issue gathers and reductions in one order, over both communicators: checked on native backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests import nccl_rules
from tests.grids import EVERYTHING
from tests.kit import make
from tests.runtime.test_living_forwards import LOOPS, Layer, Net
from tests.timed_backend import timed_ranks
from zeroshard.runtime.calls import ToCome
from zeroshard.runtime.reduce import Reducer
from zeroshard.testing import run_ranks

WIDTH, BLOCKS = 8, 5


class Block(nn.Module):
    """What it leaves out of a forward gets no gradient there."""

    def __init__(self, inner: nn.ModuleList | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = inner or nn.ModuleList()
        self.without: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if "first" not in self.without:
            x = x + self.first(x).tanh()
        for block in self.inner:
            x = block(x)
        return x if "second" in self.without else x + self.second(x).tanh()


def flat() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))


def nested(*, frozen: bool) -> nn.Sequential:
    model = nn.Sequential(
        *(Block(nn.ModuleList(Block() for _ in range(2))) for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)
    )
    for block in model[:-1] if frozen else ():
        block.inner.requires_grad_(False)
    return model


MODELS: list[Callable[[], nn.Sequential]] = [flat, partial(nested, frozen=False), partial(nested, frozen=True)]
WITHOUT, PLACES = (("first",), ("second",), ("first", "second")), ((2,), (1, 2), (0, 4))
CASES_OF = {
    build: [
        (without, at)
        for i, without in enumerate(WITHOUT)
        for j, at in enumerate(PLACES)
        if EVERYTHING or (number == 0 and (i + j) % 2 == 0) or (number and (i + j) % 3 == number)
    ]
    for number, build in enumerate(MODELS)
}
"""What rank 1 leaves out, and of which blocks: every second pair in the flat model, each once in the others."""


def issued(rank: int, build: Callable[[], nn.Sequential]) -> list[list[tuple[str, str]]]:
    """The collectives of the first steps, of a later step, and of one in which rank 1 has another graph again."""
    steps = []
    for without, at in CASES_OF[build]:
        handle = zeroshard.shard(model := make(build), "zero3", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-3)
        for step in range(3):
            handle.comm_log.clear()
            for index in at:
                model[index].without = without if rank == 1 and step != 1 else ()
            torch.manual_seed(rank + 10 * step)
            optimizer.backward(model(torch.randn(2, WIDTH)).square().mean())
            optimizer.step()
            steps.append([(event.op, event.unit) for event in handle.comm_log.entries])
    return steps


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    with timed_ranks("late"):
        yield


@pytest.mark.parametrize("build", MODELS, ids=["flat", "nested", "frozen inside"])
def test_gathers_and_reductions_have_one_order(build: Callable[[], nn.Sequential]) -> None:
    """Where one rank has no gradient for a part of a unit, it reduced that unit behind the next gather, and the others
    in front of it."""
    first, second = run_ranks(issued, 2, build)
    assert first == second


def of_living_forwards(rank: int, units: Any, of_loops: Sequence[Any] = LOOPS) -> list[list[tuple[str, str]]]:
    """Several forwards before their backwards, of which each rank uses other parts."""
    loops = []
    for loop in of_loops:
        torch.manual_seed(0)
        handle = zeroshard.shard(model := Net(1 + (units is Layer)), "zero3", units=units)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-3)
        handle.comm_log.clear()
        loop(model, rank)
        optimizer.zero_grad()
        loops.append([(event.op, event.unit) for event in handle.comm_log.entries])
    return loops


UNITS = [60, nn.Linear, Layer, (Layer, nn.Linear)]


@pytest.mark.parametrize("units", UNITS, ids=["by size", "layers", "around layers", "both"])
def test_also_of_several_forwards(units: Any) -> None:
    """Where backward came to a unit, a rank also reduced the next one, if it had all its gradients by then. By default
    each loop with two of the four choices of units."""
    first, second = run_ranks(of_living_forwards, 2, units, LOOPS if EVERYTHING else LOOPS[UNITS.index(units) % 2 :: 2])
    assert first == second


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule stops ranks that issue in two orders."""
    monkeypatch.setattr(nccl_rules.Told, "compare", lambda self: None)


def test_at_the_last_gradient_they_would_have_two(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(ToCome, "has_any", lambda self: False)
    first, second = run_ranks(issued, 2, flat)
    assert first != second
    assert [sorted(step) for step in first] == [sorted(step) for step in second]


def test_with_all_that_is_complete_they_would_have_two(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    advance = Reducer._advance
    monkeypatch.setattr(Reducer, "_advance", lambda self, among=None: advance(self))
    first, second = run_ranks(of_living_forwards, 2, nn.Linear)
    assert first != second
    assert [sorted(loop) for loop in first] == [sorted(loop) for loop in second]
