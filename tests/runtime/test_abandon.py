"""`handle.abandon()`: the teardown of a framework after a failure, which must not wait for other ranks.

After one rank had raised, a run hung for 200 seconds in `close()`, which gathers the weights, and waited again for
pending collectives when these were deleted.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.failures.common import Ranks
from tests.kit import PLANS, Block, Net, loss_of_tokens, make
from tests.patience import AT_ONCE, HANG, give_up_after
from zeroshard.comm.messages import Announcement
from zeroshard.failures import rank_watch
from zeroshard.model import units
from zeroshard.testing import run_ranks


class Fails(Block):
    """Raises in forward or in backward on request, like user code."""

    where = ""

    def forward(self, x: Any) -> Any:
        if self.where == "forward":
            raise KeyError("a batch without labels")
        y = super().forward(x)
        if self.where == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Any) -> None:
        raise KeyError("a batch without labels")


def begin(plan: Any, **options: Any) -> tuple[Any, Any, Any]:
    def build() -> nn.Module:
        model = Net(blocks=3)
        model.blocks = nn.ModuleList(Fails() for _ in range(3))
        return model

    model = make(build)
    handle = zeroshard.shard(model, plan, units=Block, **options)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
    return model, handle, optimizer


LONG = timedelta(seconds=HANG)


def flag(name: str) -> str:
    return f"abandoned {name}"


@pytest.mark.by_cpu
def test_it_waits_for_nobody_wherever_this_rank_has_failed() -> None:
    """Rank 1 stops until rank 0 has abandoned its handle, so a wait for rank 1 would never end."""

    def check(rank: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        # A group for each case: an abandoned handle leaves messages in its group.
        cases = list(itertools.product(("forward", "backward", "step"), PLANS))  # gathers are in flight under ZERO3
        groups = [dist.new_group([0, 1]) for _ in cases]
        for (where, plan), group in zip(cases, groups, strict=True):
            name = flag(f"{plan.name} {where}")
            model, handle, optimizer = begin(plan, mesh=group)
            loss_of_tokens(model, rank, 0, 0).backward()
            optimizer.step()
            if where != "step":
                # Rank 1 has failed one block earlier, so the gather that rank 0 has prefetched is never answered.
                model.blocks[1 - rank if where == "forward" else 1 + rank].where = where
                with pytest.raises(KeyError, match="without labels"):
                    loss_of_tokens(model, rank, 0, 1).backward()
            if rank == 1:
                store.wait([name], LONG)
            handle.abandon()
            handle.abandon()
            handle.close()  # some teardowns call both
            store.set(name, "")
            assert repr(handle) == "Handle(abandoned)" and not any(handle.engine.units)
            for call in (optimizer.step, handle.full_state_dict, lambda h=handle: zeroshard.save("x", h, step=1)):
                with pytest.raises(RuntimeError, match=r"this handle was abandoned; build and shard\(\) the model"):
                    call()
            assert all(p.grad is None for p in model.parameters())
            gone = weakref.ref(handle.engine.collectives)
            del handle, optimizer, call
            gc.collect()
            assert gone() is None

    run_ranks(check, 2, collective_timeout=HANG)


@pytest.mark.by_gloo
def test_a_gather_under_way_is_waited_for_by_close_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without `abandon`, `close` waits for the gather until the timeout. The end of the last
    reference does not: garbage collection brings it at another moment on each rank."""
    arrive, given_up = Announcement.arrive, []

    def noted(self: Announcement) -> None:
        try:
            arrive(self)
        except RuntimeError as error:
            given_up.append(str(error).lower())
            raise

    def waits(rank: int, way: str) -> list[str]:
        store = dist.distributed_c10d._get_default_store()
        group = dist.new_group([0, 1], timeout=LONG)
        model, handle, optimizer = begin("zero3", mesh=group)
        given_up.clear()
        if rank == 1:
            store.wait([flag(way)], LONG)
            handle.abandon()
            return []
        give_up_after(0.2, group)
        if way == "close":
            with pytest.raises(RuntimeError) as caught:
                handle.close()
            given_up[:] = [str(caught.value).lower()]
            handle.abandon()
        else:
            handle.engine.gatherer.start(handle.engine.units[0], "forward")
        if way == "abandon":
            handle.abandon()
        del model, handle, optimizer
        gc.collect()
        store.set(flag(way), "")
        return list(given_up)

    def check(rank: int) -> list[list[str]]:
        return [waits(rank, way) for way in ("close", "drop", "abandon")]

    monkeypatch.setattr(Announcement, "arrive", noted)
    by_close, by_drop, after_abandon = run_ranks(check, 2)[0]
    assert ["timed out waiting" in text for text in by_close] == [True]
    assert by_drop == after_abandon == []


def test_what_becomes_of_the_values() -> None:
    def check(rank: int) -> None:
        for plan, precision in [("ddp", None), ("zero1", None), ("zero2", "bf16"), ("zero3", None)]:
            model, handle, _ = begin(plan, precision=precision)
            before = handle.full_state_dict()
            replaced = next(iter(model.head.parameters()))
            dist.barrier()
            handle.abandon()
            if plan != "zero3":
                assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
                (model(torch.zeros(1, 2, dtype=torch.long)).float().sum()).backward()
                assert replaced.grad is not None and type(replaced) is nn.Parameter
                continue
            told = r"the values of parameter head\.weight are lost: its handle was abandoned .* load a checkpoint"
            with pytest.raises(RuntimeError, match=told):
                replaced.norm()
            with pytest.raises(RuntimeError, match="are lost"):
                model(torch.zeros(1, 2, dtype=torch.long))
            with pytest.raises(ValueError, match=r"^shard: untyped_storage: the values of parameter .* are lost"):
                zeroshard.shard(model, plan)
            assert "its values are lost" in repr(replaced) and replaced.shape == before["head.weight"].shape
        for begin_parked in (True, False):
            model, handle, _ = begin("zero1")
            if begin_parked:
                handle.park()
            else:
                with torch.no_grad(), handle.unsharded("head"):
                    handle.abandon()  # inside of an open scope
            handle.abandon()
            with pytest.raises(RuntimeError, match=r"are lost") if begin_parked else torch.no_grad():
                model.head.weight.norm()

    run_ranks(check, 2)


@pytest.mark.by_cpu
@pytest.mark.parametrize("has_parts", [False, True])
def test_all_ranks_leave_when_one_has_failed(has_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch wakes a waiting rank; the rank abandons the handle, and its process ends normally. (`has_parts`: with
    root parts in flight, which the hook after the model's call once waited for again, and raised again.)"""
    monkeypatch.setattr(units, "PART_BYTES", 0 if has_parts else units.PART_BYTES)
    monkeypatch.setattr(rank_watch, "GRACE_SECONDS", AT_ONCE)  # when busy, 2 s may pass before the rank has ended

    def check(rank: int, mark: Any) -> None:
        zeroshard.init()
        model, handle, optimizer = begin("zero3")
        try:
            if rank == 1:
                mark()
                raise KeyError("a batch without labels")
            loss_of_tokens(model, rank, 0, 0).backward()
        except (KeyError, RuntimeError) as error:
            zeroshard.abort(error, quiet=True)
            handle.abandon()
            del model, handle, optimizer
            gc.collect()
            os._exit(7)  # reached: the process was not killed

    assert Ranks(check, 3).finish(60).statuses == [7, 7, 7]
