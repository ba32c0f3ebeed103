"""Ranks that run different units, or units in a different order, raise an error before anything is updated."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, travelling
from zeroshard.testing import run_ranks

TRIALS, CONTROLS = (100, 20) if os.environ.get("ZEROSHARD_TEST_EVERYTHING") else (6, 3)


class Paths(Net):
    """Each rank runs the blocks in the order of its own `path`."""

    path: tuple[int, ...] = ()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index in self.path:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return Paths(blocks=5)


def paths(trial: int, num_ranks: int, *, skips: bool) -> list[tuple[int, ...]]:
    """One rank's path differs from the others': another order, or one block less."""
    draw = random.Random(trial)
    usual = tuple(draw.sample(range(5), 5))
    other = usual
    while other == usual:
        other = tuple(draw.sample(usual, 4 if skips and draw.random() < 0.5 else 5))
    odd = draw.randrange(num_ranks)
    return [other if rank == odd else usual for rank in range(num_ranks)]


def one_trial(rank: int, path: tuple[int, ...], group: Any, steps: int) -> tuple[str, bool]:
    """The error's text ("" if none), and whether main is unchanged. First `steps` steps with the same path on all
    ranks: the prefetch that follows their order must not hide the difference."""
    model = make(build)
    handle = zeroshard.shard(model, "zero3", units=Block, mesh=group)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    model.path = (0, 1, 2, 3, 4)
    for step in range(steps):
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
    before = [unit.main.weights.clone() for unit in handle.engine.units]
    model.path = path
    said = ""
    try:
        optimizer.backward(loss_of_tokens(model, rank, 0, steps))
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    same = all(torch.equal(unit.main.weights, value) for unit, value in zip(handle.engine.units, before, strict=True))
    return said, same


@pytest.mark.by_gloo
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_another_path_on_one_rank_is_always_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all trials every rank raises, the message names both units (no timeout does), and nothing has been updated."""
    if way == "messages":
        monkeypatch.delattr(os, "memfd_create", raising=False)

    def check(rank: int) -> list[Any]:
        results = []
        for trial in range(TRIALS * 7 // 10 if way == "shared memory" else TRIALS * 3 // 10):
            group = dist.new_group()
            path = paths(trial, 3, skips=way == "shared memory")[rank]
            results.append(one_trial(rank, path, group, steps=trial % 3))
        return results

    found = run_ranks(check, 3)
    for trial, by_rank in enumerate(zip(*found, strict=True)):
        for said, same in by_rank:
            assert said.count("blocks.") == 2, (trial, by_rank)
            assert "same units in the same order" in said, (trial, said)
            assert same, (trial, by_rank)


def test_one_path_on_all_ranks_is_fine() -> None:
    """The negative control: the same changes of path on all ranks."""

    def check(rank: int) -> None:
        for trial in range(CONTROLS):
            path = paths(trial, 3, skips=True)[0]
            said, same = one_trial(rank, path, None, steps=trial % 3)
            assert said == "" and not same

    run_ranks(check, 3)


@pytest.mark.by_gloo
@pytest.mark.parametrize("way", ["shared", "pairwise"])
def test_a_read_of_one_rank_is_no_gather_of_the_others_forward(way: str) -> None:
    """It is of the same unit, and of as many bytes."""

    def check(rank: int) -> str:
        with travelling(way):
            model = nn.Sequential(nn.Linear(8, 8))
            handle = zeroshard.shard(model, "zero3", units=nn.Linear)
            try:
                if rank == 0:
                    with handle.unsharded():
                        return "read"
                return str(model(torch.ones(8)).shape)
            except RuntimeError as error:
                return str(error)

    for said in run_ranks(check, 2):
        assert "its weights, which a call has asked for" in said, said


def test_where_nothing_says_which_unit_it_is_the_digest_does() -> None:
    """As on NCCL, where collectives of equal size in another order succeed: the step compares digests and raises."""

    def check(rank: int) -> list[str]:
        said = []
        for plan, op in (("zero3", "all_gather"), ("zero1", "reduce_scatter")):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
            before = handle.full_state_dict()
            for unit in ("blocks.1", "blocks.2") if rank != 1 else ("blocks.2", "blocks.1"):
                handle.comm_log.record(op, unit, "backward", 64)
            with pytest.raises(RuntimeError, match="have not issued the same collectives") as error:
                optimizer.step()
            assert all(torch.equal(value, before[name]) for name, value in handle.full_state_dict().items())
            said.append(str(error.value))
        return said

    for said in zip(*run_ranks(check, 3), strict=True):
        assert len(set(said)) == 1
        assert "rank 0 was at unit blocks.1 where rank 1 was at unit blocks.2" in said[0]
