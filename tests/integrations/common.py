"""The plain zeroshard loop that every framework is compared to; and the expected end of a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from tests.failures.common import Ended
from tests.kit import Block, Net, State, make
from tests.patience import AT_ONCE

STEPS, MICRO_BATCHES, MAX_NORM = 4, 2, 0.5

Samples = Callable[[int, int, int], list[int]]


def as_launched(rank: int, num_ranks: int) -> None:
    """Set the environment variables that a launcher sets, and accelerate reads."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ["ACCELERATE_USE_CPU"] = "true"


def texts() -> torch.utils.data.TensorDataset:
    """A data set with enough samples for the steps of three ranks."""
    tokens = torch.randint(23, (3 * STEPS * MICRO_BATCHES * 2, 6), generator=torch.Generator().manual_seed(5))
    return torch.utils.data.TensorDataset(tokens)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


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


def fail(*_: Any) -> None:
    raise ValueError("no such file: data/7")


def expect_all_left(ended: Ended, reason: str) -> None:
    assert all(status for status in ended.statuses), ended
    assert max(ended.seconds) < AT_ONCE, ended
    first = next(line for line in ended.said.splitlines() if line.startswith("zeroshard:"))
    assert first == "zeroshard: rank 1 of 3 failed first:", ended.said
    assert ended.said.count(f"exits because rank 1 failed: ValueError: {reason}") == 2, ended.said
