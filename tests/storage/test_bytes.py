"""Every row of the table of bytes per parameter, for Adam and for SGD with momentum; and the transients of a step.

Bytes per parameter with an optimizer whose state has s bytes per element (Adam 8, SGD with momentum 4), as a + b / d:

| weight, gradient, main        | DDP    | ZERO1      | ZERO2      | ZERO3      |
|-------------------------------|--------|------------|------------|------------|
| fp32, fp32, the weights       | 8 + s  | 8, s       | 4, 4 + s   | 0, 8 + s   |
| 16-bit, fp32, fp32 master     | 10 + s | 6, 4 + s   | 2, 8 + s   | 0, 10 + s  |
| 16-bit, 16-bit, fp32 master   | 8 + s  | 4, 4 + s   | 2, 6 + s   | 0, 8 + s   |
| bf16, fp32, 16-bit remainder  | 8 + s  | 6, 2 + s   | 2, 6 + s   | 0, 8 + s   |
| bf16, 16-bit, remainder       | 6 + s  | 4, 2 + s   | 2, 4 + s   | 0, 6 + s   |
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import PLANS, Block, Net, is_uncounted, loss_of_tokens, make, plans_of
from tests.parity.common import BF16, FP16, FP32, expect_equal_logs
from tests.storage.live import expect_accounted, live_storages
from zeroshard.planner import plan_memory
from zeroshard.precision import MixedPrecision
from zeroshard.storage.kept_memory import KeptMemory
from zeroshard.testing import run_ranks

Row = tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]
MASTER = ((10, 0), (6, 4), (2, 8), (0, 10))
MASTER_16 = ((8, 0), (4, 4), (2, 6), (0, 8))
TABLE: dict[str, tuple[Any, Row]] = {
    "fp32": ("fp32", ((8, 0), (8, 0), (4, 4), (0, 8))),
    "bf16, fp32": ("bf16", MASTER),
    "fp16, fp32": ("fp16", MASTER),
    "bf16, 16-bit": (MixedPrecision(grad=BF16), MASTER_16),
    "fp16, 16-bit": (MixedPrecision(FP16, FP16, None, FP32), MASTER_16),
    "bf16, fp32, remainder": ("bf16-remainder", ((8, 0), (6, 2), (2, 6), (0, 8))),
    "bf16, 16-bit, remainder": (MixedPrecision(grad=BF16, main="remainder"), ((6, 0), (4, 2), (2, 4), (0, 6))),
}
"""(a, b) without the bytes of optimizer state, which are part of a under DDP and of b under the other plans."""

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int, int]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3, "fused": True}, 8, 1),
    "sgd": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": False}, 4, 0),
}
"""Class, options, bytes of state per element, scalars per tensor."""

RESTING = ("weights", "grads", "main", "state")
PLAN_NUMBERS = range(len(PLANS))
RANKS = (1, 2, 3, 4) if EVERYTHING else (1, 2, 3)
RESTING_CASES = grid(OPTIMIZERS, TABLE, PLAN_NUMBERS, RANKS)
STEPPING_CASES = grid(OPTIMIZERS, TABLE, PLAN_NUMBERS, (1, 2))


def small() -> Net:
    return Net(blocks=2, tied=True)


def trained(plan: Any, precision: Any, name: str, rank: int, steps: int = 1) -> tuple[nn.Module, Any, Any]:
    optimizer_class, defaults, _, _ = OPTIMIZERS[name]
    model = make(small)
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, loss_scale=1.0, **defaults)
    for step in range(steps):
        optimizer.backward(loss_of_tokens(model, rank, 0, step))
        optimizer.step()
    return model, handle, optimizer


def expected_bytes(handle: Any, rank: int, a: int, b: int, state_bytes: int) -> int:
    """The row's bytes for padded layouts. A shard that contains only padding is never stepped and has no state. On one
    rank gradients and state of fp32 weights are those of the parameters alone."""
    total = 0
    if handle.engine.units[0].grads.is_apart:
        for unit in handle.engine.units:
            padding = unit.layout.numel - sum(slot.world.numel for slot in unit.layout.slots)
            total += (a + b + state_bytes) * unit.layout.numel
            total -= (unit.spec.precision.grad.itemsize + state_bytes) * padding
        return total
    for unit in handle.engine.units:
        layout, replicated = unit.layout, handle.plan is zeroshard.DDP
        total += (a + state_bytes * replicated) * layout.numel
        total += (b + state_bytes * (not replicated)) * layout.shard_numel
        mine = range(layout.num_shards) if replicated else [rank]
        total -= sum(state_bytes * layout.shard_numel for shard in mine if not layout.fragments(shard))
    return total


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_row_is_exact_and_planned_and_no_storage_is_forgotten(num_ranks: int) -> None:
    def check(rank: int) -> list[Any]:
        gc.freeze()
        logs = []
        for name, row, number in at(RESTING_CASES, num_ranks):
            _, _, state_bytes, scalars = OPTIMIZERS[name]
            precision, plan, (a, b) = TABLE[row][0], PLANS[number], TABLE[row][1][number]
            before = live_storages()
            model, handle, optimizer = trained(plan, precision, name, rank)
            memory, peak = handle.memory(), handle.memory(peak=True)
            found = sum(peak[kind] for kind in RESTING)
            assert found == expected_bytes(handle, rank, a, b, state_bytes), (name, precision, plan, memory)
            passes = plan in (zeroshard.ZERO2, zeroshard.ZERO3) or (num_ranks == 1 and row == "fp32")
            assert memory["grads"] == (0 if passes else peak["grads"])
            expect_accounted(handle, before)
            with torch.device("meta"):
                on_meta = small()
            options: dict[str, Any] = {"units": Block, "precision": precision, "rank": rank}
            options |= {"state_bytes_per_element": state_bytes, "state_scalars": scalars}
            assert memory == plan_memory(on_meta, plan, num_ranks, **options)
            assert peak == plan_memory(on_meta, plan, num_ranks, **options, peak=True)
            logs.append(handle.comm_log)
            del model, handle, optimizer
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_equal_logs(logs)


@pytest.mark.by_gloo  # the other backend copies
def test_full_weights_of_a_scope_are_counted_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(rank: int) -> None:
        gc.freeze()
        before = live_storages()
        model = make(Net)
        handle = zeroshard.shard(model, "zero3", units=Block)
        with handle.unsharded():
            expect_accounted(handle, before)
            full = sum(unit.layout.numel for unit in handle.engine.units) * 4
            assert handle.memory()["ring"] == full
        with handle.unsharded("blocks.0"):
            expect_accounted(handle, before)
        take, left = KeptMemory.take, [2]

        def take_two(memory: KeptMemory) -> Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError
            return take(memory)

        monkeypatch.setattr(KeptMemory, "take", take_two)
        with pytest.raises(MemoryError), handle.unsharded():  # the units before it stayed gathered
            pass
        assert not any(unit.weights.in_use or unit.weights.shown for unit in handle.engine.units)
        expect_accounted(handle, before)

    run_ranks(check, 2)


def test_the_remainder_saves_exactly_two_bytes_where_main_is() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(0):
            rest = {}
            for precision in ("bf16", "bf16-remainder"):
                _model, handle, _ = trained(plan, precision, "sgd", rank)
                rest[precision] = sum(handle.memory(peak=True)[kind] for kind in RESTING)
                held = sum(unit.main.interval.numel for unit in handle.engine.units)
            assert rest["bf16"] - rest["bf16-remainder"] == 2 * held > 0

    run_ranks(check, 3)


# Transients -----------------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Records every new storage that `is_uncounted` does not exclude, by any code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            new = isinstance(leaf, Tensor) and _storage(leaf) not in known
            if new and not is_uncounted(num_bytes := leaf.untyped_storage().nbytes()):
                self.found.append(f"{func}: {num_bytes} bytes")
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.by_gloo  # the other backend's copies of inputs would be counted
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_needs_the_planned_scratch_and_nothing_else(num_ranks: int) -> None:
    """With optimizers that work in place (fused Adam, SGD), a step allocates no tensor. That includes clipping, the
    norm, joining and splitting a remainder, and rounding and sending the weights."""

    def check(rank: int) -> None:
        for name, row, number in at(STEPPING_CASES, num_ranks):
            precision, plan = TABLE[row][0], PLANS[number]
            model, handle, optimizer = trained(plan, precision, name, rank, steps=2)
            before = handle.memory()
            optimizer.backward(loss_of_tokens(model, rank, 0, 5))
            with Allocations() as seen:
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            assert seen.found == [], (name, precision, plan)
            assert handle.memory() == before

    run_ranks(check, num_ranks)


def test_an_allocation_would_be_seen() -> None:
    """The negative control: Adam without `fused` allocates a temporary for its denominator."""

    def check(rank: int) -> None:
        model = make(Net)
        handle = zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, foreach=False)
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        with Allocations() as seen:
            optimizer.step()
        assert any("sqrt" in what for what in seen.found)

    run_ranks(check, 2)


@pytest.mark.by_gloo
def test_optimizer_only_holds_a_shard_of_main_and_state_beside_full_weights() -> None:
    """fp32 weights: 4 + 8 / d; 16-bit weights: 2 + 12 / d. The gradients belong to torch's DDP."""

    def check(rank: int) -> None:
        for dtype, a, b in ((FP32, 4, 8), (BF16, 2, 12)):
            model = make(Net).to(dtype)
            ddp = nn.parallel.DistributedDataParallel(model)
            optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
            for step in range(2):
                loss_of_tokens(ddp, rank, 0, step).backward()
                optimizer.step()
            memory, units = optimizer.handle.memory(), optimizer.handle.engine.units
            numel, own = sum(u.layout.numel for u in units), sum(u.layout.shard_numel for u in units)
            assert memory["grads"] == 0
            assert sum(memory[kind] for kind in RESTING) == a * numel + b * own

    run_ranks(check, 3)
