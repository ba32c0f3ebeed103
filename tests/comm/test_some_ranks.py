"""In a group of some ranks, in another order than that of the job, messages named ranks by their number in the group: a
user was sent to a rank that had done nothing, or that was not even in the group."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.patience import HANG
from zeroshard.checkpoint import publishing, writer
from zeroshard.testing import run_ranks

RANKS = (3, 1)
"""Their numbers in the group are 0 and 1."""


class Training:
    """One rank's training in the group `RANKS`."""

    def __init__(self, rank: int, folder: str, plan: str = "zero2", lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.rank, self.folder = rank, folder
        group = dist.new_group(RANKS, timedelta(seconds=HANG), use_local_synchronization=True, sort_ranks=False)
        self.handle = zeroshard.shard(self.model, plan, units=nn.Linear, mesh=group)
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, torch.optim.SGD, lr=lr)

    def backward(self, factor: float = 1.0) -> None:
        (self.model(torch.ones(4, 16) * self.rank).sum() * factor).backward()


def other_model(rank: int, folder: str) -> None:
    group = dist.new_group(RANKS, use_local_synchronization=True, sort_ranks=False)
    zeroshard.shard(nn.Linear(4, 4 + rank), "zero2", mesh=group)


def other_path(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    one.handle.gradient("0.weight") if rank == 3 else one.optimizer.step()


def other_unit(rank: int, folder: str) -> None:
    one = Training(rank, folder, "zero3")
    one.model[2 if rank == 3 else 0](torch.ones(4, 32 if rank == 3 else 16)).sum().backward()
    one.optimizer.step()


def other_frozen(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    (one.model[0].bias if rank == 3 else one.model[0].weight).requires_grad_(False)
    one.backward()


def other_rate(rank: int, folder: str) -> None:
    one = Training(rank, folder, lr=float(rank))
    one.backward()
    one.optimizer.step()


def raised_on_one(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    with one.handle.no_sync(), suppress(OSError):
        one.backward()
        if rank == 1:
            one.model[0].bias.register_hook(no_room)
        one.backward()
    one.optimizer.step()


def not_finite(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    one.backward(torch.inf if rank == 1 else 1.0)
    one.optimizer.step()


def diverged(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    for _ in range(4):
        with torch.no_grad():
            one.model[0].weight.data[:, rank:] += rank == 1
        one.backward()
        one.optimizer.step()


def other_writes(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    with one.handle.unsharded(write=True), torch.no_grad():
        one.model[0].weight.fill_(rank)


def wrong_on_one(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    state = one.handle.full_state_dict()
    one.handle.load_full_state_dict({"other": torch.zeros(1)} if rank == 1 else state)


def no_room(*arguments: object) -> Any:
    raise OSError(28, "No space left on device")


def disk_full(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(writer, "write_file", no_room)
        zeroshard.save(folder, one.handle, one.optimizer, step=1)


def own_folders(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    zeroshard.save(f"{folder}-of-{rank}", one.handle, one.optimizer, step=1)


def own_folders_to_load(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    zeroshard.save(folder, one.handle, one.optimizer, step=1)
    zeroshard.load(folder if rank == 3 else f"{folder}-of-{rank}", one.handle, one.optimizer)


def full_behind_the_rename(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "set_latest", no_room)  # on the first rank of the group alone
        zeroshard.save(folder, one.handle, one.optimizer, step=1)


def closed_on_the_first(rank: int, folder: str) -> None:
    one = Training(rank, folder)
    one.handle.close(rank0_only=True)
    if rank == 3:
        raise RuntimeError("only rank 3 has values")
    one.model[0].weight.sum()


CASES: list[tuple[Callable[[int, str], None], str]] = [
    (other_model, r"rank 3 has .* where rank 1 has"),
    (other_path, r"rank 3 at .* rank 1 at "),
    (other_unit, r"rank (3 is .* rank 1|1 is .* rank 3) is at unit"),
    (other_frozen, r"0.weight requires grad on rank 3 alone|0.bias requires grad on rank 1 alone"),
    (other_rate, r"lr of group 0: 3.0 on rank 3, 1.0 on rank 1"),
    (raised_on_one, r"step on rank 1: "),
    (not_finite, r" on rank 1\. Nothing"),
    (diverged, r"other values on rank 1 than on rank 3"),
    (other_writes, r"other values than on rank 3 in .*rank 1\)"),
    (wrong_on_one, r"\(on rank 1\)"),
    (disk_full, r"rank 1: .*No space"),
    (own_folders, r"which rank 3 has made"),
    (own_folders_to_load, r"which rank 3 has found"),
    (full_behind_the_rename, r"rank 3 failed in what follows"),
    (closed_on_the_first, r"on(ly)? rank 3 (alone|has)"),
]


@pytest.mark.by_gloo  # over another backend ranks that do not agree meet in collectives of other sizes
def test_messages_name_ranks_of_the_whole_job(tmp_path: Path) -> None:
    def catch(rank: int) -> list[str]:
        said = []
        for number, (case, _) in enumerate(CASES if rank in RANKS else ()):
            try:
                case(rank, str(tmp_path / str(number)))
                said.append("")
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        return said

    found = run_ranks(catch, 4, collective_timeout=HANG)
    for rank in RANKS:
        for (case, named), said in zip(CASES, found[rank], strict=True):
            assert re.search(named, said, re.DOTALL), (case, rank, said)
            assert not re.search(r"\branks? [02]\b", said), (case, rank, said)


def test_a_timeline_names_the_rank_of_the_whole_job(tmp_path: Path) -> None:
    def titles(rank: int) -> str:
        if rank not in RANKS:
            return ""
        with Training(rank, str(tmp_path)).handle.timeline() as timeline:
            pass
        return timeline.title.partition(":")[0]

    assert run_ranks(titles, 4) == ["", "rank 1", "", "rank 3"]


def test_the_rank_that_writes_is_named_by_its_number_in_the_job(tmp_path: Path) -> None:
    """Rank 1 was asked for as number 1 of the group; in other groups, what it wrote was lost without an error."""

    def write(rank: int) -> list[float]:
        if rank not in (1, 2, 3):
            return []
        group = dist.new_group([2, 3, 1], use_local_synchronization=True, sort_ranks=False)
        handle = zeroshard.shard(model := nn.Linear(2, 2), "zero3", mesh=group)
        with handle.unsharded(modifier_rank=1), torch.no_grad():
            model.bias.fill_(rank)
        with pytest.raises(ValueError, match="one of the ranks 1-3, found 0"), handle.unsharded(modifier_rank=0):
            pass
        return handle.full_state_dict()["bias"].tolist()

    assert run_ranks(write, 4) == [[], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
