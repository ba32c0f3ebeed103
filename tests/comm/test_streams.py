"""No operation of the engine touches bytes that a collective in flight reads or writes, and none gets memory that was
freed meanwhile: gathers, reductions, the taking over of pool buffers, scratch, parking, and what a checkpoint copies.
The detector finds each wait that is removed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of
from tests.planning.test_dry_run import alone
from tests.streams import Side, Streams, simulated_streams
from zeroshard.checkpoint.contents import model_items, optimizer_items
from zeroshard.comm import native_transport
from zeroshard.comm.pending import Pending
from zeroshard.optim.lamb import Lamb
from zeroshard.planning import dry_run
from zeroshard.precision import MixedPrecision
from zeroshard.step import ahead
from zeroshard.step.agreement import Agreement
from zeroshard.storage.weights import Weights

PRECISIONS: dict[str, Any] = {
    "fp32": None,
    "narrow wire": MixedPrecision(grad=torch.float32, reduce=torch.bfloat16),
    "wide wire": MixedPrecision(grad=torch.bfloat16, reduce=torch.float32),
}
MESHES = ((3, 1), (4, 2), (2, 2))  # ranks, replicas


def by_hand(handle: Any, optimizer: Any) -> None:
    for parameter in handle.trainable_parameters():
        parameter.grad = torch.zeros(parameter.shape, dtype=parameter.grad_dtype)
    optimizer.step()


def gradients(handle: Any, optimizer: Any) -> None:
    optimizer.backward(loss_of_tokens(handle.model, 1, 0, 4))
    handle.set_gradient("blocks.1.norm.weight", handle.gradient("blocks.1.norm.weight"))
    optimizer.step()


def written(handle: Any, optimizer: Any) -> None:
    with handle.unsharded(write=True), torch.no_grad():
        for parameter in handle.trainable_parameters():
            parameter.mul_(0.5)


FOLLOWS: dict[str, Callable[[Any, Any], object]] = {
    "weights": lambda handle, optimizer: handle.full_state_dict(),
    "parked": lambda handle, optimizer: (handle.park(), handle.unpark()),
    "state": lambda handle, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "loaded": lambda handle, optimizer: handle.load_full_state_dict(handle.full_state_dict()),
    "by hand": by_hand,
    "gradients": gradients,
    "written": written,
}
"""What follows a step while its gathers may be in flight."""


class Whole(Lamb):
    """Steps whole parameters on their owners."""

    def __init__(self, parameters: Any, fused: bool | None = None) -> None:
        super().__init__(parameters)


CLASSES = (torch.optim.AdamW, Whole)
CASES = grid(PLANS, PRECISIONS, MESHES, (False, True), (False, True), FOLLOWS, CLASSES)


def train(
    plan: Any,
    precision: str,
    mesh: tuple[int, int],
    frozen: bool,
    chained: bool,
    follow: str = "weights",
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    side: Callable[..., Any] = Side,
    steps: int = 2,
    fused: bool | None = None,
) -> Streams:
    """Some steps with all that surrounds them, as one rank in a dry run.

    Args:
        chained: whether what follows a reduction is queued on a side stream, as on an accelerator.
        follow: what follows the last step (`FOLLOWS`).
        side: makes that stream.
    """
    rank = int(mesh[0] > mesh[1])  # in the first replica, which writes checkpoints
    with dry_run(mesh[0], replicas=mesh[1], rank=rank) as device_mesh, simulated_streams() as streams:
        model = make(lambda: Net(tied=True, blocks=3))
        if frozen:
            model.blocks[0].requires_grad_(False)
            model.blocks[1].up.requires_grad_(False)
        handle = zeroshard.shard(model, plan, units=Block, precision=PRECISIONS[precision], mesh=device_mesh)
        handle.engine.collectives.beside = side(streams) if chained else None
        optimizer = zeroshard.ShardedOptimizer(
            handle, optimizer_class, non_finite="ignore", loss_scale=1.0, fused=fused
        )
        for step in range(steps):
            with handle.no_sync():
                optimizer.backward(loss_of_tokens(model, 1, 0, step))
            for number in (1, 2) if step == steps - 1 else (2,):
                optimizer.backward(loss_of_tokens(model, 1, number, step))
            if plan is PLANS[0]:
                model.blocks[1].norm.weight.grad.sum()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        items = [*model_items(handle.engine), *optimizer_items(optimizer)]
        assert len([item.copied() for item in items]) > 10
        with handle.unsharded(), torch.no_grad():
            loss_of_tokens(model, 1, 0, 3)
        optimizer.backward(loss_of_tokens(model, 1, 0, 3))
        optimizer.step()
        FOLLOWS[follow](handle, optimizer)
        handle.close()
        gc.collect()
    return streams


PARTS = 8 if EVERYTHING else 1
"""Of the cases, which take a quarter of an hour then."""


@pytest.mark.by_cpu
@pytest.mark.parametrize("part", range(PARTS))
def test_every_access_is_ordered(part: int) -> None:
    def check() -> None:
        for case in CASES[part::PARTS]:
            streams = train(*case)
            assert not streams.races, (case, streams.races[:3])
            assert streams.num_collectives > 20

    alone(check)


def drop_waits(patch: pytest.MonkeyPatch, text: str) -> list[str]:
    """Collectives whose name contains the text are not waited for. Returns the names of those that were dropped."""
    wait, dropped = Pending.wait, list[str]()

    def wait_unless(self: Pending, *, stale: bool = False) -> None:
        if self.at is not None and text in self.at.text:
            dropped.append(self.at.text)
            self._works = ()
        wait(self, stale=stale)

    patch.setattr(Pending, "wait", wait_unless)
    return dropped


WAITS = [
    (PLANS[3], "fp32", "all_gather of unit blocks.1 (forward)"),
    (PLANS[3], "fp32", "all_gather of unit blocks.0 (backward)"),
    (PLANS[3], "fp32", "all_gather of unit blocks.1 (unshard)"),
    (PLANS[1], "fp32", "all_gather of unit blocks.1 (step)"),
    (PLANS[0], "fp32", "all_gather of unit root (backward)"),  # the mean
    # The root unit is reduced last. A wait for it is a wait for all reductions before it, as they are on one stream.
    (PLANS[1], "fp32", "reduce_scatter of unit root"),
    (PLANS[2], "fp32", "reduce_scatter of unit root"),
    (PLANS[2], "wide wire", "reduce_scatter of unit blocks.1"),  # its scratch is taken over by the next unit
    (PLANS[3], "fp32", "exchange"),
]
CHAINED_WAITS = [
    (PLANS[0], "fp32", "all_gather of unit root (backward)"),  # it is the last one in the stream of the reductions
    (PLANS[0], "fp32", "sum over replicas of unit root"),
    (PLANS[2], "fp32", "sum over replicas of unit root"),
    (PLANS[2], "fp32", "reduce_scatter of unit root"),
    (PLANS[2], "wide wire", "sum over replicas of unit blocks.1"),  # its scratch
]


@pytest.mark.by_cpu
def test_each_wait_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        cases = [(*case, (3, 1), False) for case in WAITS] + [(*case, (4, 2), True) for case in CHAINED_WAITS]
        for plan, precision, text, mesh, chained in cases:
            with monkeypatch.context() as patch:
                dropped = drop_waits(patch, text)
                races = train(plan, precision, mesh, False, chained, steps=1).races
            assert dropped and races, (plan, precision, text, dropped[:1])

    alone(check)


@pytest.mark.by_cpu
def test_an_update_ahead_of_the_host_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a sum that is used before it has arrived is found."""
    took_effect: list[bool] = []
    is_updated = Agreement.is_updated.fget
    assert is_updated is not None

    def noted(self: Agreement) -> bool:
        took_effect.append(is_updated(self))
        return took_effect[-1]

    def check() -> None:
        monkeypatch.setattr(ahead, "has_queue", lambda device: True)
        monkeypatch.setattr(Agreement, "is_updated", property(noted))
        for case in grid(PLANS, PRECISIONS, MESHES, (False, True), (False, True), FOLLOWS)[::3]:
            took_effect.clear()
            streams = train(*case, steps=4, fused=True)
            assert not streams.races, (case, streams.races[:3])
            assert took_effect[:5] == [False, False, True, True, True], case
        with monkeypatch.context() as patch:
            dropped = drop_waits(patch, "exchange")
            races = train(PLANS[1], "fp32", (3, 1), False, False, steps=4, fused=True).races
        assert dropped and any("aten" in race for race in races)

    alone(check)


@pytest.mark.by_cpu
def test_a_side_stream_that_does_not_wait_for_the_computation_is_found() -> None:
    """Where only replicas hold a unit, its bucket is divided on the current stream, and then summed over them."""

    def check() -> None:
        for plan in plans_of(1):
            assert train(plan, "fp32", (2, 2), False, True, side=partial(Side, begins=False)).races, plan

    alone(check)


@pytest.mark.by_cpu
def test_the_current_stream_does_not_wait_for_what_follows_a_reduction() -> None:
    """In backward it waits only for the sum over shards: for buckets. Before the end it waits for the rest."""

    def waits(mesh: tuple[int, int], side: Callable[..., Any] | None) -> tuple[int, int]:
        """(before the end of backward, in all)."""
        meshed = dry_run(mesh[0], replicas=mesh[1])
        with meshed as device_mesh, simulated_streams() as streams, pytest.MonkeyPatch.context() as patch:
            model = make(lambda: Net(blocks=4))
            handle = zeroshard.shard(model, "ddp", units=Block, mesh=device_mesh)
            handle.engine.collectives.beside = side(streams) if side else None
            reductions, before, at_end = handle.engine.reducer._reductions, streams.waits, list[int]()
            end = reductions.end
            patch.setattr(reductions, "end", lambda: (at_end.append(streams.waits), end()))
            loss_of_tokens(model, 1, 0, 0).backward()
            assert len(handle.engine.units) == 5
            return at_end[0] - before, streams.waits - before

    def check() -> None:
        for mesh in MESHES:
            in_backward, in_all = waits(mesh, Side)
            by_host, _ = waits(mesh, None)
            assert in_backward == 3 < in_all, mesh
            assert by_host > 3 or mesh != (4, 2), mesh

    alone(check)


@pytest.mark.by_cpu
def test_a_write_to_what_a_gather_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory that is freed while a gather writes to it."""
    gather = Weights.gather

    def then_write(self: Weights, *arguments: Any, **named: Any) -> None:
        gather(self, *arguments, **named)
        self.buffer.shard.add_(1e-3)

    def then_free(self: Weights, *arguments: Any, **named: Any) -> None:
        gather(self, *arguments, **named)
        self.full.untyped_storage().resize_(self.full.untyped_storage().nbytes())

    def check() -> None:
        for plan, fault, words in ((PLANS[1], then_write, "aten.add_"), (PLANS[3], then_free, "resize_ writes")):
            with monkeypatch.context() as patch:
                patch.setattr(Weights, "gather", fault)
                races = train(plan, "fp32", (3, 1), False, False).races
            assert any(race.startswith(words) for race in races), races[:3]

    alone(check)


class Unawaited(Side):
    def event(self) -> Any:
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.by_cpu
def test_a_bucket_that_is_freed_while_a_side_stream_reads_it_is_found() -> None:
    """The side stream has waited for the reduction, so torch no longer keeps the bucket. It must not be given back
    before the current stream has waited, too. Nothing else races then."""

    def check() -> None:
        for plan in PLANS[2:]:
            races = train(plan, "fp32", (4, 2), False, True, side=Unawaited).races
            assert races and all("may get freed memory: reduce_scatter" in race for race in races), plan

    alone(check)


@pytest.mark.by_cpu
def test_memory_is_freed_as_by_the_allocator_of_cuda() -> None:
    def check() -> None:
        with dry_run(2), simulated_streams() as streams:
            side = Side(streams)

            def gather() -> Any:
                full = torch.zeros(4)
                return native_transport._all_gather(full, full[:2], group=dist.group.WORLD, async_op=True)

            # Whoever allocates without having waited may get what another stream has waited for and let go.
            for waits, num_races in ((False, 2), (True, 0)):
                work, before = gather(), len(streams.races)
                torch.zeros(1)
                assert len(streams.races) == before  # the work keeps its tensors
                with side.inside():
                    work.wait()
                    torch.zeros(1)
                if waits:
                    side.event().wait()
                torch.zeros(1)
                torch.zeros(1)  # it is told once
                assert len(streams.races) == before + num_races

            # Memory of the side stream goes back to that one.
            for begins in (True, False):
                before, side = len(streams.races), Side(streams, begins)
                with side.inside():
                    there = torch.zeros(1)
                side.event().wait()
                there.clone()
                del there
                torch.zeros(1)
                assert len(streams.races) == before
                with side.inside():
                    torch.zeros(1)
                assert len(streams.races) == before + (not begins)

            # A storage that is emptied and filled belongs to the stream that has filled it.
            there, before, side = torch.zeros(1), len(streams.races), Side(streams)
            there.untyped_storage().resize_(0)
            with side.inside():
                there.untyped_storage().resize_(4)
                there.zero_()
            side.event().wait()
            there.clone()
            del there
            torch.zeros(1)
            assert len(streams.races) == before
            side._begins = False
            with side.inside():
                torch.zeros(1)
            assert len(streams.races) == before + 1

    alone(check)


@pytest.mark.by_cpu
def test_intervals_streams_and_events() -> None:
    """Two collectives of a group run one after the other. Neighbouring bytes do not conflict, and two reads
    do not."""

    def check() -> None:
        with dry_run(2), simulated_streams() as streams:
            full = torch.zeros(8)
            other = dist.new_group([0, 1])
            reduce_scatter, all_gather = native_transport._reduce_scatter, native_transport._all_gather
            works = [reduce_scatter(full[:2], full[:4], group=dist.group.WORLD, async_op=True) for _ in range(2)]
            full[4:].add_(1)
            assert not streams.races
            full[3:5].clone()
            assert len(streams.races) == 1 and "aten.clone" in streams.races[0]
            works[0].wait()
            full[:4].clone()
            assert len(streams.races) == 2
            works[1].wait()
            full[:4].add_(1)
            assert len(streams.races) == 2
            gather = all_gather(torch.zeros(4), full[4:6], group=dist.group.WORLD, async_op=True)
            all_gather(torch.zeros(4), full[4:6], group=other, async_op=True).wait()
            full[4:6].clone()
            assert len(streams.races) == 2
            full[4:6].add_(1)
            assert len(streams.races) == 3
            gather.wait()

    alone(check)
