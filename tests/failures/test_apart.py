"""Ranks that gathered different bytes than their peers trained to the end with different weights and exit status 0. Now
the exchange of every step includes samples of the gathered values, and all ranks raise where these differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, same_bits
from zeroshard.comm.messages import Announcement
from zeroshard.comm.samples import Samples, first_difference
from zeroshard.comm.shared_transport import SharedTransport
from zeroshard.placement import Plan
from zeroshard.ranks.common import Common
from zeroshard.ranks.shared_memory import Location, Process, SharedMemory
from zeroshard.step import same_weights
from zeroshard.testing import run_ranks


def steps_until_it_raises(
    rank: int, plan: Plan, before_step: Callable[[nn.Module, int], None], most: int = 10, **options: Any
) -> int:
    return until_it_raises(rank, plan, before_step, most, **options)[0]


def until_it_raises(
    rank: int, plan: Plan, before_step: Callable[[nn.Module, int], None], most: int = 10, **options: Any
) -> tuple[int, str]:
    """The number of steps, and the message."""
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, foreach=False, **options)
    for step in range(most):
        loss_of_tokens(model, rank, 0, step, 1).backward()
        before_step(model, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            if "the ranks have diverged: unit" not in str(error):
                raise
            return step, str(error)
    return most, ""


def nothing(model: nn.Module, step: int) -> None:
    pass


def written(rank: int) -> list[int]:
    """For each plan and who writes at step 1 the step that raises."""

    def then(who: Callable[[nn.Parameter], None]) -> Callable[[nn.Module, int], None]:
        return lambda model, step: who(model.blocks[1].up.weight) if step == 1 else None

    def by_last(weight: nn.Parameter) -> None:
        if rank == dist.get_world_size() - 1:
            weight.mul_(0.9)

    def by_first_for_all(weight: nn.Parameter) -> None:
        if rank == 0:
            weight.mul_(0.9)
        dist.broadcast(weight.data, 0)

    ways = by_last, by_first_for_all, lambda weight: weight.mul_(0.9)
    plans = zeroshard.DDP, zeroshard.ZERO1, zeroshard.ZERO2
    return [steps_until_it_raises(rank, plan, torch.no_grad()(then(way)), most=3) for plan in plans for way in ways]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_write_on_one_rank_alone_is_found_by_the_next_step(num_ranks: int) -> None:
    """It was found where a sample happened to hit it. The next gather made the ranks equal again, without the write."""
    assert run_ranks(written, num_ranks) == [[1, 3, 3] * 3] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_read_their_own_memory_for_that_of_a_peer_raise(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """As in the containers of `test_containers.py`, but with the probe of shared memory passed."""

    def own_memory(self: SharedTransport, announced: Announcement, rank: int, like: Tensor) -> Tensor:
        place = announced.location(rank)
        return known[place.segment][place.offset :][: like.nbytes].view(like.dtype).view(like.shape)

    make_map = SharedMemory.map
    known: dict[int, Tensor] = {}  # segment -> memory

    def remembered(self: SharedMemory, segment: int, fd: int, num_bytes: int) -> Tensor:
        tensor = make_map(self, segment, fd, num_bytes)
        known[segment] = tensor.view(-1)
        return tensor

    map_common = SharedMemory.map_common

    def own_common(self: SharedMemory, process: Process, location: Location, own: slice) -> Common:
        if process != self.process:
            process, location = self.process, Location(*self.create(location.num_bytes), location.num_bytes, 0)
        return map_common(self, process, location, own)

    monkeypatch.setattr(SharedMemory, "map_common", own_common)
    monkeypatch.setattr(SharedTransport, "_peer", own_memory)
    monkeypatch.setattr(SharedMemory, "map", remembered)

    def run(rank: int) -> list[int]:
        return [steps_until_it_raises(rank, plan, nothing) for plan in PLANS]

    found = run_ranks(run, num_ranks)
    assert all(steps == found[0] for steps in found)
    assert max(found[0]) <= 1


def test_weights_that_one_rank_has_written_alone_are_noticed() -> None:
    """Under DDP no other rank reads these weights. (Under ZERO1 and ZERO2 the next step overwrites them.)"""

    def run(rank: int) -> int:
        def write(model: nn.Module, step: int) -> None:
            if rank == 1 and step == 2:
                with torch.no_grad():
                    model.get_parameter("embed.weight").mul_(1.5)

        return steps_until_it_raises(rank, PLANS[0], write)

    found = run_ranks(run, 3)
    assert found == [found[0]] * 3 and 2 <= found[0] <= 2 + len(list(Net().blocks)) + 1


@pytest.mark.parametrize("other", ["", "torch 2.13.0, a CPU of long ago"])
def test_ranks_that_compute_with_other_kernels_are_told_so(other: str) -> None:
    """Under DDP each rank updates all weights. A CPU without a fused multiply-add rounds differently."""

    def run(rank: int) -> str:
        def write(model: nn.Module, step: int) -> None:
            if rank == 1:
                for parameter in model.parameters():
                    parameter.data.mul_(1.001)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and other:
                patch.setattr(same_weights, "kernels", lambda device: other)
            return until_it_raises(rank, PLANS[0], write)[1]

    for text in run_ranks(run, 2):
        assert ("data are damaged" in text) == (not other)
        assert ("which may round differently: use a plan" in text and f"rank 1 with {other}" in text) == bool(other)


class Codebook(nn.Linear):
    """Its first forward in training sets its weights from the batch, as k-means does for a codebook."""

    is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.weight.data.copy_(x[:4])
            self.is_set = True
        return super().forward(x)


def test_weights_that_each_rank_sets_from_its_first_batch() -> None:
    """The message asked for writes of the user alone, and said nothing of modules that set their own weights."""

    def run(rank: int) -> str:
        torch.manual_seed(0)
        handle = zeroshard.shard(Codebook(4, 4), "zero1")
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
        handle.model(torch.full((4, 4), 1.0 + rank)).sum().backward()
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        return str(raised.value)

    for told in run_ranks(run, 2):
        assert "the ranks have diverged" in told and "call the model once before shard()" in told


def test_nan_is_like_nan_and_whoever_does_the_same_does_not_differ() -> None:
    def run(rank: int) -> list[int]:
        def poison(model: nn.Module, step: int) -> None:
            if step == 1:
                loss_of_tokens(model, rank, 0, step, 1).mul(torch.nan).backward()

        return [steps_until_it_raises(rank, plan, poison, most=4, non_finite="ignore") for plan in PLANS]

    assert run_ranks(run, 2) == [[4] * len(PLANS)] * 2


def test_values_that_are_replaced_while_they_arrive_are_no_difference() -> None:
    """A second optimizer's step, or a load, right after a step: the gather that the first step started arrived while
    peers wrote new values, and all ranks raised because the samples of it differed."""

    def check(rank: int) -> None:
        states = []
        for plan in PLANS:
            model = make(Net)
            handle = zeroshard.shard(model, plan)
            parameters = list(model.parameters())
            optimizers = [
                zeroshard.ShardedOptimizer(part, torch.optim.SGD, lr=0.1) for part in (parameters[:5], parameters[5:])
            ]
            for step in range(4):
                loss_of_tokens(model, rank, 0, step, 1).backward()
                for optimizer in optimizers:
                    optimizer.step()
                if step == 2:
                    handle.load_full_state_dict(handle.full_state_dict())
            states.append(handle.full_state_dict())
        assert all(same_bits(state, states[0]) for state in states)

    run_ranks(check, 2)


def test_what_has_arrived_on_one_rank_only_is_no_difference() -> None:
    one, other = Samples(torch.device("cpu")), Samples(torch.device("cpu"))
    values = torch.arange(1000.0)
    for samples in (one, other):
        samples.take(samples.next_number(), "a", values)
    late = other.next_number(), one.next_number()
    one.take(late[1], "b", values)
    assert float(one.digest()) != float(other.digest())
    assert first_difference({0: one.listing(), 1: other.listing()}) is None
    one.forget(), other.forget()
    other.take(late[0], "b", values)
    assert first_difference({0: one.listing(), 1: other.listing()}) is None
    one.forget(), other.forget()
    assert float(one.digest()) == float(other.digest()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex128])
def test_every_element_is_looked_at_in_time(dtype: torch.dtype) -> None:
    """A differing element, also the last one or a NaN, is found within 2 * numel + 600 gathers."""
    for numel in (1, 7, 100, 257):
        values = torch.ones(numel, dtype=dtype)
        for index in {0, numel // 2, numel - 1}:
            wrong = values.clone()
            wrong[index] = torch.nan if dtype.is_floating_point else 2
            one, other = Samples(torch.device("cpu")), Samples(torch.device("cpu"))
            for number in range(2 * numel + 600):
                one.take(one.next_number(), "u", values)
                other.take(other.next_number(), "u", wrong)
                if float(one.digest()) != float(other.digest()):
                    assert first_difference({0: one.listing(), 1: other.listing()}) == (1, "u")
                    break
                if number % 100 == 99:
                    one.forget(), other.forget()
            else:
                raise AssertionError(f"never found: element {index} of {numel}")


def test_more_gathers_than_there_is_room_for() -> None:
    one, other = Samples(torch.device("cpu")), Samples(torch.device("cpu"))
    for number in range(1000):
        one.take(one.next_number(), f"u{number}", torch.zeros(5))
        other.take(other.next_number(), f"u{number}", torch.full((5,), float(number > 900)))
    assert first_difference({0: one.listing(), 1: other.listing()}) == (1, "u901")
