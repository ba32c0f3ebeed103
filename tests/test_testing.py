"""Starting ranks: what `run_ranks` promises to those who test with it, and `init` to those who train with it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.kit import Job, same_bits, train, train_reference
from tests.patience import AT_ONCE
from zeroshard.testing import RankError, run_ranks


def test_results_come_back_in_rank_order_and_ranks_can_talk() -> None:
    def run(rank: int, offset: int) -> tuple[int, int, float]:
        total = torch.tensor(float(rank + offset))
        dist.all_reduce(total)
        time.sleep(0.02 * (2 - rank))
        return rank, dist.get_world_size(), total.item()

    assert run_ranks(run, 3, 10) == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]


def test_the_first_rank_that_raises_is_reported_with_its_traceback() -> None:
    def run(rank: int) -> None:
        if rank == 1:
            raise KeyError("the reason")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 1 raised:.*in run.*KeyError: 'the reason'") as caught:
        run_ranks(run, 3)
    assert caught.value.rank == 1
    assert time.monotonic() - start < AT_ONCE


def test_a_rank_that_is_killed_is_reported() -> None:
    def run(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match=r"rank \d raised"):
        run_ranks(run, 3, collective_timeout=5)


def test_ranks_that_hang_are_named_and_ended() -> None:
    def run(rank: int) -> int:
        if rank == 1:
            time.sleep(2 * AT_ONCE)
        return rank

    start = time.monotonic()
    with pytest.raises((TimeoutError, RankError), match="1"):
        run_ranks(run, 2, timeout=1.0)
    assert time.monotonic() - start < AT_ONCE


def test_init_without_a_launcher_is_a_world_of_one() -> None:
    def run(rank: int) -> bool:
        dist.destroy_process_group()
        zeroshard.init(timeout=10)
        zeroshard.init()  # a second time does nothing
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        alone = train(Job(), zeroshard.ZERO3, 0)
        return same_bits(alone.weights, train_reference(Job(), 1)[0].weights)

    assert run_ranks(run, 1) == [True]
