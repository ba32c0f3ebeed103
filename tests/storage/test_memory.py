"""A step in steady state allocates nothing, and what is deleted frees every byte."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.grids import at, grid
from tests.kit import PLANS, Block, Net, is_uncounted, loss_of_tokens, make, plans_of
from tests.storage.live import expect_accounted, live_storages, storages
from tests.storage.test_bytes import RESTING, TABLE
from zeroshard.placement import Plan
from zeroshard.planner import plan_memory
from zeroshard.testing import expect_same_logs, run_ranks

STEADY_CASES = grid(TABLE, PLANS, (1, 3), apart=(0, 1))


def trained(plan: Plan, precision: Any, rank: int, steps: int = 2) -> tuple[nn.Module, zeroshard.Handle, Any]:
    model = make(partial(Net, tied=True))
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, foreach=False, loss_scale=1.0)
    run_steps(model, optimizer, rank, range(steps))
    return model, handle, optimizer


def run_steps(model: nn.Module, optimizer: Any, rank: int, steps: range, micro_batches: int = 1) -> None:
    for step in steps:
        for micro_batch in range(micro_batches):
            loss_of_tokens(model, rank, micro_batch, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_per_parameter_the_bytes_approach_the_table() -> None:
    """In a model large enough that padding is negligible, the bytes per parameter are those of the table, with Adam in
    fp32."""

    def check(rank: int) -> None:
        for plan, (replicated, sharded) in zip(PLANS, ((16, 0), (8, 8), (4, 12), (0, 16)), strict=True):
            model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
            handle = zeroshard.shard(model, plan, units=nn.Linear)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, foreach=False)
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            memory = handle.memory(peak=True)
            per_parameter = sum(memory[kind] for kind in RESTING) / (2 * 300 * 301)
            assert replicated + sharded / 3 <= per_parameter < (replicated + sharded / 3) * 1.02

    run_ranks(check, 3)


@pytest.mark.by_gloo  # the other backend's copies of inputs would be counted
def test_a_storage_that_nobody_accounts_for_is_seen() -> None:
    def check(rank: int) -> None:
        gc.freeze()
        before = live_storages()
        _, handle, _ = trained(zeroshard.ZERO2, None, rank)
        handle.engine.units[0].stray = torch.zeros(100)
        expect_accounted(handle, before, stray=400)
        with pytest.raises(AssertionError, match="accounted for"):
            expect_accounted(handle, before, looks=1)  # gloo has released its tensor by now

    run_ranks(check, 3)


def test_frozen_parameters_cost_their_weights_alone() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(1):
            model = make(Net)
            for parameter in model.blocks.parameters():
                parameter.requires_grad_(False)
            handle = zeroshard.shard(model, plan, units=Block)
            frozen = [unit for unit in handle.engine.units if not unit.spec.trainable]
            assert len(frozen) == 3 and not any(u.grads.storages() or u.main.storages() for u in frozen)
            held = sum(u.layout.shard_numel if plan is zeroshard.ZERO3 else u.layout.numel for u in handle.engine.units)
            assert handle.memory()["weights"] == 4 * held
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            before = handle.full_state_dict()
            run_steps(model, optimizer, rank, range(2))
            after = handle.full_state_dict()
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert changed == {name for name in before if not name.startswith("blocks")}

    run_ranks(check, 2)


# A step allocates nothing ---------------------------------------------------------------------------------------------

ENGINE = str(Path(zeroshard.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
OTHERS = tuple(f"{TORCH}/{part}/" for part in ("optim", "autograd", "nn"))


class Allocations(TorchDispatchMode):
    """Records the code that allocates counted storages: the innermost frame of the engine, unless a frame of the inner
    optimizer, of autograd or of a module is further in. `taken`: bytes that the engine takes from its pool."""

    def __init__(self) -> None:
        super().__init__()
        self.by_engine: list[tuple[str, int]] = []
        self.taken = 0
        self.by_others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = storages(pytree.tree_leaves((args, kwargs)))
        result = func(*args, **kwargs)
        new = {at: size for at, size in storages(pytree.tree_leaves(result)).items() if at not in known}
        large = sum(size for size in new.values() if not is_uncounted(size))
        where = _origin() if new else None
        if where is not None and where.startswith("pool.py"):
            self.taken += sum(new.values())
        elif large and where is not None:
            self.by_engine.append((f"{func} at {where}", large))
        elif large:
            self.by_others += 1
        return result


def _origin() -> str | None:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ENGINE):
            return f"{Path(name).name}:{frame.f_lineno}"
        if name.startswith(OTHERS) or name == __file__ or name.endswith("kit.py"):
            return None
        frame = frame.f_back
    return None


def come_and_gone(handle: zeroshard.Handle) -> int:
    """Bytes that a step allocates and frees: in these small models only the shards of gradients."""
    return sum(handle.memory(peak=True).values()) - sum(handle.memory().values())


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_steady_step_allocates_nothing(num_ranks: int) -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for row, plan in at(STEADY_CASES, num_ranks):
            precision = TABLE[row][0]
            model, handle, optimizer = trained(plan, precision, rank, steps=2)
            places = handle.memory()
            with Allocations() as seen:
                run_steps(model, optimizer, rank, range(2, 3), micro_batches=2)
            assert seen.by_engine == [], (plan, precision)
            # On one rank autograd allocates what comes and goes in fp32: the engine takes its tensors over.
            taken_over = handle.engine.units[0].grads.is_apart
            assert seen.taken == (0 if taken_over else come_and_gone(handle)), (plan, precision)
            assert seen.by_others > 10
            assert handle.memory() == places
            logs.append(handle.comm_log)
        return logs

    by_rank = run_ranks(check, num_ranks)
    for logs in zip(*by_rank, strict=True):
        expect_same_logs(logs)


@pytest.mark.by_gloo
def test_local_accumulation_allocates_its_buckets_once() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(0):
            model, handle, optimizer = trained(plan, None, rank)

            def step(number: int, model: nn.Module = model, handle: Any = handle, optimizer: Any = optimizer) -> None:
                with handle.no_sync():
                    loss_of_tokens(model, rank, 0, number).backward()
                loss_of_tokens(model, rank, 1, number).backward()
                optimizer.step()

            step(2)
            with torch.device("meta"):
                on_meta = Net(tied=True)
            arguments = {"units": Block, "rank": rank, "no_sync": True}
            assert handle.memory() == plan_memory(on_meta, plan, 2, **arguments)
            assert handle.memory(peak=True) == plan_memory(on_meta, plan, 2, **arguments, peak=True)
            with Allocations() as seen:
                step(3)
            assert seen.by_engine == [] and seen.taken == come_and_gone(handle)

    run_ranks(check, 2)


@pytest.mark.by_gloo
def test_a_parameter_without_gradient_costs_buckets_once() -> None:
    """It once cost new buckets in every step, which peers mapped and never released: its unit is reduced last, so no
    bucket is free for the units after it."""

    class Unused(Net):
        def __init__(self) -> None:
            super().__init__(blocks=5)
            self.blocks[4].unused = nn.Parameter(torch.ones(3))

    def check(rank: int) -> None:
        for plan in plans_of(1):
            model = make(Unused)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            run_steps(model, optimizer, rank, range(2))
            memory, mapped = handle.memory(), maps()
            with Allocations() as seen:
                run_steps(model, optimizer, rank, range(2, 4))
            assert seen.by_engine == [] and seen.taken == 2 * come_and_gone(handle)
            assert (handle.memory(), maps()) == (memory, mapped)

    run_ranks(check, 2)


def maps() -> int:
    """The number of memory files that this process has mapped: its own shared memory and that of its peers."""
    gc.collect()  # unmap those of deleted models
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_allocation_by_the_engine_is_seen() -> None:
    def check(rank: int) -> None:
        model, handle, _ = trained(zeroshard.ZERO2, None, rank)
        with Allocations() as seen:
            handle.full_state_dict()
        del model
        assert any("full_state.py" in where for where, _ in seen.by_engine)

    run_ranks(check, 2)


@pytest.mark.by_gloo
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_units_of_many_parameters_keep_nothing_for_each(plan: str) -> None:
    """But for one element each, which stands for the parameter while it is absent."""

    def check(rank: int) -> None:
        gc.freeze()
        before = live_storages()
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 8) + rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expect_accounted(handle, before, stray=60 * 4, looks=300)

    run_ranks(check, 2)


# Freeing --------------------------------------------------------------------------------------------------------------


@pytest.mark.by_gloo
def test_deleting_model_handle_and_optimizer_frees_every_byte() -> None:
    def check(rank: int) -> None:
        gc.freeze()
        for plan in PLANS:
            before = live_storages()
            model, handle, optimizer = trained(plan, "bf16", rank)
            watched = [weakref.ref(one) for one in (handle, handle.engine, model, optimizer, *handle.engine.units)]
            assert len(live_storages()) > len(before)
            del model, handle, optimizer
            for _ in range(3000):  # see `expect_accounted`
                left = {at: size for at, size in live_storages().items() if at not in before}
                if not left:
                    break
                time.sleep(0.02)
            assert left == {}, plan
            assert [ref() for ref in watched] == [None] * len(watched)

    run_ranks(check, 2)


def test_the_class_of_an_absent_parameter_keeps_no_unit_alive() -> None:
    """A free-threaded Python 3.13 frees no class."""

    def check(rank: int) -> None:
        for plan in (zeroshard.ZERO1, zeroshard.ZERO2, zeroshard.ZERO3):
            model, handle, optimizer = trained(plan, None, rank)
            classes = [unit.weights.absent.class_of(nn.Parameter) for unit in handle.engine.units]
            units = [weakref.ref(unit) for unit in handle.engine.units]
            handle.close()
            del model, handle, optimizer
            gc.collect()
            assert [unit() for unit in units] == [None] * len(classes), plan

    run_ranks(check, 2)


def test_a_reference_left_behind_keeps_its_bytes() -> None:
    """The negative control: a reference to one unit keeps storages alive, which the check above would detect."""

    def check(rank: int) -> None:
        gc.freeze()
        before = live_storages()
        model, handle, optimizer = trained(zeroshard.ZERO3, None, rank)
        left_behind = handle.engine.units[0]
        kept = storages([left_behind.weights.buffer.shard])
        assert sum(kept.values()) >= 4 * left_behind.layout.shard_numel
        del model, handle, optimizer
        left = {at: size for at, size in live_storages().items() if at not in before}
        # Addresses: rank 0's shard has that of the common memory in which it lies, and either may be found last.
        assert kept.keys() <= left.keys()

    run_ranks(check, 2)
