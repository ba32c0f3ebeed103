"""The plain zeroshard loop that every framework is compared to; and the expected end of a failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import zeroshard
from tests.accelerated import MAX_NORM, MICRO_BATCHES
from tests.failures.common import FULL, Ended, Ranks, finish_all
from tests.grids import EVERYTHING
from tests.kit import Block, Net, State, loss_of, make
from tests.patience import AT_ONCE, OUT

STEPS = 4 if EVERYTHING else 2
HALF = STEPS // 2
"""After so many steps runs are saved, and from there resumed."""

Samples = Callable[[int, int, int], list[int]]


def as_launched(rank: int, num_ranks: int) -> None:
    """Set the environment variables that a launcher sets, and accelerate reads. What accelerate has read of the
    environment in the parent, by a test that ran before, is forgotten."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def texts() -> torch.utils.data.TensorDataset:
    """A data set with enough samples for the steps of three ranks."""
    tokens = torch.randint(23, (3 * STEPS * MICRO_BATCHES * 2, 6), generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(tokens)


def loss_of_outputs(model: nn.Module) -> tuple[torch.dtype, torch.dtype, float]:
    """The dtypes of what the model returns and of a loss of it, which casts nothing; and the loss."""
    (tokens,) = texts().tensors
    logits = model(tokens[:8, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:8, 1:].flatten())
    return logits.dtype, loss.dtype, loss.item()


def plain_loop(
    rank: int, num_ranks: int, samples: Samples, precision: Any = None, max_norm: float = MAX_NORM
) -> tuple[list[float], State]:
    """Losses and main of the loop in plain zeroshard, which a framework's loop must equal.

    Args:
        samples: returns the indices of the texts in this rank's micro-batch `number`.
    """
    model = make(Net)
    handle = zeroshard.shard(model, "zero1", units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    (tokens,), losses = texts().tensors, []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            mine = tokens[samples(step * MICRO_BATCHES + micro_batch, rank, num_ranks)]
            with handle.no_sync() if micro_batch + 1 < MICRO_BATCHES else torch.enable_grad():
                loss = loss_of(model, mine)
                optimizer.backward(loss / MICRO_BATCHES)
            losses.append(loss.item())
        optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, handle.full_state_dict(main=True)


FAULTS = ("in the step", "in the data", "killed")


class Fault:
    """Lets rank 1 raise in its first training step, raise in its data after some samples, or be killed in its first
    step.

    Args:
        kind: one of `FAULTS`.
        mark: called at the moment of the fault.
    """

    def __init__(self, kind: str, rank: int, mark: Callable[[], Any]) -> None:
        self._kind, self._mark, self._strikes = kind, mark, rank == 1

    def in_step(self, *_: Any) -> None:
        """A hook before a forward."""
        if self._strikes and self._kind != "in the data":
            self._strike()

    def within(self, data: Any) -> torch.utils.data.Dataset[Any]:
        """The data set with the fault in it."""
        return _Faulty(data, self._strike if self._strikes and self._kind == "in the data" else None)

    def _strike(self) -> None:
        self._mark()
        if self._kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such file: data/7")


class _Faulty(torch.utils.data.Dataset[Any]):
    """A data set whose sixth reading fails: training has begun then."""

    def __init__(self, data: Any, strike: Callable[[], None] | None) -> None:
        self._data, self._strike, self._read = data, strike, 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        if self._strike is not None and self._read == 6:
            self._strike()
        return self._data[index]


def expect_faults_to_end_all(run: Callable[..., None], *args: Any, kinds: Sequence[str] = FAULTS) -> None:
    """Each fault of rank 1 ends both ranks within `OUT`, and the first line that zeroshard prints says what happened.
    All faults are tried at the same time, each on ranks of its own. The seconds are printed (`pytest -s`).

    Args:
        run: `run(rank, fault, *args)` trains on two ranks with a `Fault`.
    """
    groups = [Ranks(_with_a_fault, 2, run, kind, *args) for kind in kinds]
    for kind, ended in zip(kinds, finish_all(groups), strict=True):
        print(
            f"{run.__name__}, {kind}: ranks ended after {', '.join(f'{one:.1f}' for one in ended.seconds)} s; "
            f"{ended.seconds_of_their_own():.1f} s without waiting for a processor"
        )
        _expect_end(kind, ended)


def _with_a_fault(rank: int, mark: Callable[[], Any], run: Callable[..., None], kind: str, *args: Any) -> None:
    run(rank, Fault(kind, rank, mark), *args)


def _expect_end(kind: str, ended: Ended) -> None:
    assert ended.seconds_of_their_own() < OUT and (not FULL or max(ended.seconds) < AT_ONCE), (kind, ended)
    first = next(line for line in ended.said.splitlines() if line.startswith("zeroshard:"))
    if kind == "killed":
        assert ended.statuses[1] == -signal.SIGKILL and ended.statuses[0] not in (None, 0), ended
        assert first.startswith("zeroshard: rank 0 exits because rank 1 died without reporting an error"), ended.said
    else:
        assert all(ended.statuses), (kind, ended)
        assert first == "zeroshard: rank 1 of 2 failed first:", (kind, ended.said)
        assert "rank 0 exits because rank 1 failed: ValueError: no such file: data/7" in ended.said, (kind, ended.said)
