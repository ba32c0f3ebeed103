"""The rules of `tests/nccl_rules.py`: each finds a program that breaks it, and the engine keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests import nccl_rules
from tests.kit import DEVICE
from tests.timed_backend import timed_ranks
from zeroshard.testing import RankError, run_ranks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathers_at_another_part(rank: int) -> None:
    full = torch.zeros(4)
    all_gather(full, full[2 * (1 - rank) : 2 * (1 - rank) + 2])


def reduces_to_another_part(rank: int) -> None:
    full = torch.zeros(4)
    reduce_scatter(full[2 * (1 - rank) : 2 * (1 - rank) + 2], full)


def exchanges_in_place(rank: int) -> None:
    values = torch.zeros(4)
    dist.all_to_all_single(values, values)


def sums_16_bit_integers(rank: int) -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.int16))


def sums_8_bit_floats(rank: int) -> None:
    dist.all_reduce(torch.zeros(4, dtype=torch.float8_e4m3fn))


def takes_columns(rank: int) -> None:
    dist.broadcast(torch.zeros(4, 4)[:, rank], 0)


def differs_in_dtype(rank: int) -> None:
    dist.all_reduce(torch.zeros(4, dtype=(torch.float32, torch.int32)[rank]))


def differs_in_order(rank: int) -> None:
    values = torch.zeros(4)
    for root in (rank, 1 - rank):
        dist.broadcast(values, root)


def differs_in_order_of_groups(rank: int) -> None:
    groups = [None, dist.new_group([0, 1])]
    for group in groups:
        dist.all_reduce(torch.zeros(4), group=group)  # both are connected
    order = groups if rank == 0 else groups[::-1]
    for work in [dist.all_reduce(torch.zeros(4), group=group, async_op=True) for group in order]:
        work.wait()


BROKEN: dict[Callable[[int], None], str] = {
    gathers_at_another_part: "all_gather: in place, but not at the own part",
    reduces_to_another_part: "reduce_scatter: in place, but not at the own part",
    exchanges_in_place: "all_to_all: NCCL has none in place",
    sums_16_bit_integers: "all_reduce: NCCL does not take torch.int16",
    sums_8_bit_floats: "all_reduce: NCCL does not take torch.float8_e4m3fn",
    takes_columns: "broadcast: tensors must be contiguous",
    differs_in_dtype: "in different collectives: here 1, 1 of all groups: all_reduce of 4 torch",
    differs_in_order: "in different collectives: here 1, 1 of all groups: broadcast of 4 torch.float32, root",
    differs_in_order_of_groups: "in different collectives: here 2, [34] of all groups: all_reduce of 4 torch",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken: Callable[[int], None]) -> None:
    with timed_ranks("apart"), pytest.raises(RankError, match=BROKEN[broken]):
        run_ranks(broken, 2)


# The first collectives of a group -----------------------------------------------------------------------------------


def crosses(rank: int) -> None:
    """Two groups, in another order on each rank, and the host waits in between: fine once they are connected."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    order = groups if rank == 0 else groups[::-1]
    works = [all_gather(torch.zeros(2), torch.zeros(1), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()


def test_first_collectives_in_another_order_are_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_rules, "PATIENCE", 2.0)
    with timed_ranks("apart"), pytest.raises(RankError, match="waits for its first ring, and others do not come"):
        run_ranks(crosses, 2)


class Adapted(nn.Module):
    """A frozen unit, and behind it two layers that train, in a unit around it. Without the second one, which some ranks
    do not use, that unit is complete only after backward has come to the frozen one, and has gathered it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        x = x + self.first(self.frozen(x).relu())
        return x + self.second(x) if uses_both else x


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        for block in (*self.blocks, *self.blocks[:2]):  # else the last ones need no gather
            x = block(x, uses_both)
        return x


def is_unit(module: nn.Module) -> bool:
    return isinstance(module, Adapted) or (isinstance(module, nn.Linear) and not module.weight.requires_grad)


def train_adapters(rank: int, plan: str, precision: Any) -> list[float]:
    torch.manual_seed(0)
    model = Adapters()
    handle = zeroshard.shard(model, plan, units=is_unit, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=0.1)
    losses = []
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(3, 8), bool((rank + step) % 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PRECISIONS = [None, zeroshard.MixedPrecision(reduce=torch.bfloat16)]
"""Terms are summed by a reduce-scatter, or sent in a narrower dtype by all-to-all."""


@pytest.mark.parametrize("precision", PRECISIONS, ids=["plain", "narrow"])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "zero3"])
def test_ranks_are_connected_before_the_first_backward(plan: str, precision: Any) -> None:
    expected = run_ranks(train_adapters, 2, plan, precision)
    with timed_ranks("apart"):
        found = run_ranks(train_adapters, 2, plan, precision)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# Calls of one rank alone ----------------------------------------------------------------------------------------------


def called_alone(rank: int, call: str) -> str:
    torch.manual_seed(0)
    model = Adapters()
    handle = zeroshard.shard(model, "zero3", units=Adapted)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 8), True).sum().backward()
    alone: dict[str, Callable[[], Any]] = {
        "full_state_dict": handle.full_state_dict,
        "gradient": lambda: handle.gradient("blocks.0.first.weight"),
        "unsharded": lambda: handle.unsharded().__enter__(),
    }
    with pytest.raises(RuntimeError, match="the ranks are at different places: rank 0 at ") as caught:
        (alone[call] if rank == 0 else optimizer.step)()
    return str(caught.value)


@pytest.mark.parametrize("call", ["full_state_dict", "gradient", "unsharded"])
def test_a_gather_that_one_rank_alone_asks_for_is_found(call: str) -> None:
    """Nothing is announced over NCCL: the gather met the sum of the other ranks' step."""
    with timed_ranks("apart"):
        first, second = run_ranks(called_alone, 2, call)
    where = "rank 0 at gradient" if call == "gradient" else "at all_gather of unit"  # `gradient` asks all ranks first
    assert first == second and where in first and "rank 1 at a step" in first


# Frozen units of any dtype --------------------------------------------------------------------------------------------

DTYPES = [torch.int16, torch.uint16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu]


class Coded(nn.Module):
    """Codes that do not train, and scales that do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        codes = 2 ** torch.randint(-3, 4, (8, 8), generator=torch.Generator().manual_seed(0)).float()
        self.codes = nn.Parameter((codes > 1) if dtype == torch.bool else codes.to(dtype), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.codes.float() * self.scales


def train_codes(rank: int, dtype: torch.dtype, plan: str | None) -> tuple[list[float], Tensor]:
    model = nn.Sequential(*(Coded(dtype) for _ in range(3))).to(DEVICE)
    handle = zeroshard.shard(model, plan, units=Coded) if plan is not None else None  # type: ignore[arg-type]
    optimizer: Any = torch.optim.SGD([layer.scales for layer in model], lr=1e-6)  # type: ignore[misc]
    if handle is not None:
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-6)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8, device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict() if handle is None else handle.full_state_dict()
    return losses, state["1.codes"].float().cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_values_of_any_dtype_are_gathered(dtype: torch.dtype) -> None:
    """NCCL has no 16-bit integers and not every 8-bit float: the first gather raised. bool was refused everywhere."""
    (plain,) = run_ranks(train_codes, 1, dtype, None)
    for plan in ("zero2", "zero3"):
        with timed_ranks("apart"):
            for losses, codes in run_ranks(train_codes, 2, dtype, plan):
                torch.testing.assert_close(losses, plain[0])
                assert torch.equal(codes, plain[1])
