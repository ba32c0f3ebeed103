"""A program that computes on several streams: no access is unordered that the program's own waits order in plain torch.
The detector finds what happens without the engine's waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.grids import grid
from tests.kit import PLANS
from tests.planning.test_dry_run import alone
from tests.streams import MAIN, Side, Simulated, Streams, simulated_streams
from zeroshard.comm.user_streams import UserStreams
from zeroshard.placement import Plan
from zeroshard.planning import dry_run
from zeroshard.precision import MixedPrecision

OTHER = "the user's second stream"


def go_to(streams: Streams, stream: int) -> None:
    """The program goes on there, after what it has queued so far, as `wait_stream` and `with torch.cuda.stream` do."""
    streams.record(streams.current)(stream)
    streams.current = stream


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Fork(torch.autograd.Function):
    """What backward has done on the other stream is over where its result is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, streams: Streams) -> Tensor:
        ctx.streams = streams
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        go_to(ctx.streams, MAIN)
        return grad.clone(), None


class Branches(nn.Module):
    """Two branches beside each other: neither waits for the other one."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.first, self.here, self.there, self.last = (Part() for _ in range(4))
        self.streams, self.other = streams, streams.stream_of(OTHER)

    def forward(self, x: Tensor) -> Tensor:
        x, streams = self.first(x), self.streams
        began = streams.record(MAIN)
        y = self.here(x)
        began(self.other)
        streams.current = self.other
        z = self.there(Fork.apply(x, streams))  # type: ignore[no-untyped-call]
        z = Back.apply(z, streams)  # type: ignore[no-untyped-call]
        outputs: Tensor = self.last(y + z)
        return outputs


class Back(torch.autograd.Function):
    """The program is back on the first stream, which waits for the other one. Backward, which comes to `there` first,
    goes to the other stream here, and returns in `Fork`: autograd runs it on the streams of forward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, streams: Streams) -> Tensor:
        ctx.streams, ctx.other = streams, streams.current
        go_to(streams, MAIN)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        go_to(ctx.streams, ctx.other)
        return grad.clone(), None


UNITS: dict[str, Any] = {"blocks": Part, "both branches": [("here", "there"), Part]}
PRECISIONS: dict[str, Any] = {
    "fp32": None,
    "narrow wire": MixedPrecision(grad=torch.float32, reduce=torch.bfloat16),
}


def train(plan: Plan, units: str, precision: str, chained: bool, *, follows: bool = True) -> Streams:
    """Three steps, as one rank in a dry run. `follows`: whether the engine follows the program's streams."""
    with dry_run(3) as mesh, simulated_streams() as streams:
        torch.manual_seed(0)
        net = Branches(streams)
        net.first.requires_grad_(units == "blocks")  # frozen weights arrive once, and nothing behind them
        handle = zeroshard.shard(net, plan, units=UNITS[units], precision=PRECISIONS[precision], mesh=mesh)
        collectives = handle.engine.collectives
        collectives.beside = Side(streams) if chained else None
        collectives.user_streams = UserStreams(lambda: Simulated(streams.current, streams)) if follows else None
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1, non_finite="ignore")
        for _ in range(3):
            loss = net(torch.ones(2, 24)).sum()
            loss.backward()
            go_to(streams, MAIN)  # as autograd at the end of a backward
            optimizer.step()
            optimizer.zero_grad()
        handle.close()
    return streams


CASES = grid(PLANS, UNITS, PRECISIONS, (False, True))


@pytest.mark.by_cpu
def test_a_program_with_several_streams_races_with_nothing() -> None:
    def check() -> None:
        for case in CASES:
            streams = train(*case)
            assert not streams.races, (case, streams.races[:3])
            assert streams.num_collectives > 5

    alone(check)


@pytest.mark.by_cpu
def test_without_the_engines_waits_it_does() -> None:
    def check() -> None:
        gathered = train(zeroshard.ZERO3, "blocks", "fp32", True, follows=False).races
        assert any("addmm.default reads" in race for race in gathered)  # weights that the next gather overwrites
        arrived = train(zeroshard.ZERO1, "both branches", "fp32", True, follows=False).races
        assert arrived  # the stream that runs `here` has waited for the weights, and the one that runs `there` has not

    alone(check)


@pytest.mark.by_cpu
def test_on_one_stream_nothing_is_waited_for() -> None:
    waits = []

    class Alone:
        def wait_stream(self, stream: object) -> None:
            waits.append(stream)

    one = Alone()
    streams = UserStreams(lambda: one)
    for _ in range(3):
        streams.come()
    assert not waits
