"""The backend of `tests/timed_backend.py` computes the same as gloo, and exposes faults that gloo hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of
from tests.timed_backend import KINDS, NAME, TIMINGS, timed_ranks
from zeroshard.comm.pending import Pending
from zeroshard.placement import Plan
from zeroshard.storage.gradients import Gradients
from zeroshard.storage.weights import Residency, Weights
from zeroshard.testing import RankError, run_ranks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.mark.parametrize("timing", TIMINGS)
def test_each_collective_is_right(timing: str) -> None:
    def check(rank: int) -> None:
        assert dist.get_backend() == NAME
        own = torch.arange(4.0) + 10 * rank
        every = torch.cat([torch.arange(4.0) + 10 * other for other in range(3)])
        full = torch.zeros(12)
        all_gather(full, own)
        assert torch.equal(full, every)
        in_place = torch.zeros(12)
        in_place[4 * rank : 4 * rank + 4] = own
        all_gather(in_place, in_place[4 * rank : 4 * rank + 4])
        assert torch.equal(in_place, every)
        out = torch.zeros(4)
        reduce_scatter(out, every * (rank + 1))
        assert torch.equal(out, 6 * own)
        value = torch.full((3,), rank)
        dist.broadcast(value, 1)
        assert value.tolist() == [1, 1, 1]
        total = torch.full((3,), float(rank))
        dist.reduce(total, 2)
        assert rank != 2 or total.tolist() == [3.0, 3.0, 3.0]
        dist.all_reduce(total.fill_(rank), dist.ReduceOp.MAX)
        assert total.tolist() == [2.0, 2.0, 2.0]
        sizes = [1, 2, 3]
        received = torch.zeros(3 * sizes[rank])
        dist.all_to_all_single(received, torch.full((6,), float(rank)), [sizes[rank]] * 3, sizes)
        assert received.tolist() == [float(other) for other in range(3) for _ in range(sizes[rank])]
        found: list[object] = [None] * 3
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": other} for other in range(3)]
        pairs = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(total.fill_(1), group=pairs)
            assert total.tolist() == [2.0, 2.0, 2.0]
        dist.barrier()

    with timed_ranks(timing):
        run_ranks(check, 3)


def _written_before_the_wait(rank: int) -> Tensor:
    full, own = torch.zeros(4), torch.full((2,), 1.0 + rank)
    work = all_gather(full, own, async_op=True)
    seen = full.clone()
    own += 10  # a fault: before the wait
    work.wait()
    return torch.cat([seen, full])


@pytest.mark.parametrize(
    ("timing", "is_hidden", "values"),
    [
        ("early", False, [1, 1, 2, 2]),
        ("late", True, [11, 11, 12, 12]),
        ("apart", True, [1, 1, 2, 2]),
        ("between", True, [11, 11, 12, 12]),  # no other collective comes before the wait
    ],
)
def test_inputs_are_read_and_outputs_written_when_the_timing_says(
    timing: str, is_hidden: bool, values: list[int]
) -> None:
    with timed_ranks(timing):
        for found in run_ranks(_written_before_the_wait, 2):
            assert found[:4].isnan().all() if is_hidden else not found[:4].isnan().any()
            assert found[4:].tolist() == values


def _read_and_written_after(rank: int) -> list[tuple[float, int]]:
    """For twenty collectives: which later issue had begun when the input was read, and after how many later waits the
    output was there."""
    moments = []
    for _ in range(20):
        full, own = torch.zeros(2), torch.zeros(1)
        work = all_gather(full, own, async_op=True)
        others = []
        for later in range(1, 5):
            own.fill_(later)
            others.append(all_gather(torch.zeros(2), torch.zeros(1), async_op=True))
        written = 0
        for number, other in enumerate(others, 1):
            assert written or full.isnan().all()
            other.wait()
            if not (written or full.isnan().any()):
                written = number
        work.wait()
        moments.append((full[rank].item(), written))
    return moments


def test_between_is_at_each_moment_in_between_and_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.timed_backend._UNREAD", 600.0)  # a rank may be that late for its next collective
    with timed_ranks("between"):
        found = run_ranks(_read_and_written_after, 2)
    with timed_ranks("between-0"):
        assert run_ranks(_read_and_written_after, 2) == found
    with timed_ranks("between-7"):
        assert run_ranks(_read_and_written_after, 2) != found
    assert found[0] != found[1]  # each rank has moments of its own
    for moments in found:
        assert {written for _, written in moments} == {1, 2, 3}
        assert {read for read, _ in moments} == {1, 2, 3}


def test_random_draws_every_kind() -> None:
    drawn: set[str] = set()

    def check(rank: int) -> set[str]:
        for _ in range(40):
            dist.all_reduce(torch.ones(1))
        return drawn

    with pytest.MonkeyPatch.context() as patch, timed_ranks("random-7"):
        for kind, when in KINDS.items():
            patch.setitem(KINDS, kind, lambda draw, kind=kind, when=when: (drawn.add(kind), when(draw))[1])
        assert run_ranks(check, 2) == [set(KINDS)] * 2


def _train(rank: int, fault: Callable[[], None], plans: Sequence[Plan]) -> list[Tensor]:
    fault()
    found = []
    for plan in plans:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, non_finite="ignore")
        for step in range(2):
            for number in range(2):
                loss_of_tokens(model, rank, number, step, 2).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step(), optimizer.zero_grad()
        found.append(torch.cat([value.flatten() for value in handle.full_state_dict().values()]))
    return found


def _wait_is_dropped() -> None:
    wait, gathers = Pending.wait, []

    def wait_but_once(self: Pending, *, stale: bool = False) -> None:
        if self.at is not None and "blocks.1" in self.at.text and "all_gather" in self.at.text:
            gathers.append(self)
            return
        wait(self, stale=stale)

    Pending.wait = wait_but_once  # type: ignore[method-assign]


def _shard_is_changed_too_soon() -> None:
    gather = Weights.gather

    def gather_and_write(self: Weights, *arguments: object, **named: object) -> None:
        gather(self, *arguments, **named)  # type: ignore[arg-type]
        self.buffer.shard.add_(1e-3)

    Weights.gather = gather_and_write  # type: ignore[method-assign]


def _weights_are_read_too_soon() -> None:
    arrive = Weights.arrive

    def read_and_arrive(self: Weights) -> None:
        full = self.buffer.full if self.state is Residency.GATHERING else None
        too_soon = None if full is None else full.clone()
        arrive(self)
        if full is not None and too_soon is not None:
            full.copy_(too_soon)

    Weights.arrive = read_and_arrive  # type: ignore[method-assign]


def _reduction_begins_too_soon() -> None:
    """Before the last gradient is in the bucket."""
    reduce = Gradients.reduce

    def reduce_and_write(self: Gradients, *arguments: object) -> None:
        bucket = self.buffer.full
        assert bucket is not None
        whole = bucket.clone()
        bucket.mul_(0.5)
        reduce(self, *arguments)  # type: ignore[arg-type]
        bucket.copy_(whole)

    Gradients.reduce = reduce_and_write  # type: ignore[method-assign]


def _nothing_is_wrong() -> None:
    pass


@cache
def _by_gloo() -> list[Tensor]:
    """Must be called outside of `timed_ranks`."""
    return run_ranks(_train, 2, _nothing_is_wrong, plans_of(0))[0]


@pytest.mark.parametrize("timing", [*TIMINGS, "random-1"])
def test_training_is_what_it_is_by_gloo(timing: str) -> None:
    """Late under all plans, otherwise under two."""
    expected = _by_gloo()
    plans = PLANS if timing == "late" else plans_of(timing == "random")
    with timed_ranks(timing):
        for found in run_ranks(_train, 2, _nothing_is_wrong, plans):
            assert all(torch.equal(weights, expected[0]) for weights in [*found, *expected])


FAULTS = [
    (_wait_is_dropped, "late"),
    (_weights_are_read_too_soon, "late"),
    (_shard_is_changed_too_soon, "late"),
    (_reduction_begins_too_soon, "early"),
    *((fault, "apart") for fault in (_wait_is_dropped, _weights_are_read_too_soon, _reduction_begins_too_soon)),
    (_weights_are_read_too_soon, "between"),
]


SEEN_BY_THE_ENGINE = (
    "the ranks have diverged: unit",  # it compares samples of weights that must be equal
    " has been written to in a forward or backward",  # a rank's shard is no longer that of the full weights
)


@pytest.mark.parametrize(("fault", "timing"), FAULTS)
def test_a_fault_of_time_is_found(fault: Callable[[], None], timing: str) -> None:
    expected = _by_gloo()
    try:
        with timed_ranks(timing):
            found = run_ranks(_train, 2, fault, PLANS[2:])[0]
    except RankError as error:
        if not any(text in str(error) for text in SEEN_BY_THE_ENGINE):
            raise
    else:
        assert not all(torch.equal(weights, expected[0]) for weights in found)


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_step_two_models_in_other_orders_are_told_so(same: bool) -> None:
    """All exchanges of a group have one order here. The step of one model looked like that of the other, and the ranks
    were told that they had taken another path through the units."""

    def run(rank: int) -> str:
        optimizers = []
        for _ in range(2):
            model = nn.Linear(8, 8)
            handle = zeroshard.shard(model, "zero2")
            optimizers.append(zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1))
            model(torch.ones(2, 8)).sum().backward()
        try:
            for optimizer in optimizers if same or rank == 0 else reversed(optimizers):
                optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    with timed_ranks("late"):
        for said in run_ranks(run, 2):
            assert ("the ranks are at the calls of different models" in said) == (not same)
