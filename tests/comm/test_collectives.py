"""Collectives: sums in rank order with any wire dtype, gathers in place, meshes with one axis or two."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard
from tests.grids import EVERYTHING, grid
from tests.kit import (
    PLANS,
    Block,
    Counting,
    Job,
    Net,
    Outcome,
    largest_difference,
    logs,
    loss_of_integers,
    same_bits,
    train,
)
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommLog
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.pairwise_transport import PairwiseTransport
from zeroshard.comm.transport import Reduction
from zeroshard.layout.interval import Interval
from zeroshard.layout.portions import Portions
from zeroshard.precision import MixedPrecision
from zeroshard.ranks.mesh import Mesh
from zeroshard.ranks.pipes import MOST_BYTES
from zeroshard.testing import RankError, expect_same_logs, run_ranks

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP16), (BF16, FP32), (FP16, FP32)]
"""(buffer, wire)"""


def terms(rank: int, numel: int, dtype: torch.dtype, *, exact: bool = False) -> Tensor:
    """The values of one rank: random numbers, or integers whose sums are exact in any float dtype."""
    generator = torch.Generator().manual_seed(rank)
    if exact:
        return torch.randint(-9, 10, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def sum_by_hand(own: int, of_ranks: list[Tensor], wire: torch.dtype) -> Tensor:
    """((g0 + g1) + g2) + ... in the wider of the two dtypes. Terms of other ranks are rounded to the wire dtype, the
    own term is not."""
    dtype = of_ranks[0].dtype
    wider = wire if wire.itemsize > dtype.itemsize else dtype
    moved = [(term if rank == own else term.to(wire)).to(wider) for rank, term in enumerate(of_ranks)]
    total = moved[0]
    for term in moved[1:]:
        total = total + term
    return total.to(dtype)


def reduce_scatter(
    collectives: Collectives, full: Tensor, wire: torch.dtype, *, in_place: bool, portions: Portions | None = None
) -> Tensor:
    mesh = collectives.mesh
    sizes = mesh.reduce.size, mesh.replicate.size
    is_sent = collectives.transport.name == "shared" and not collectives.transport.is_shared(full)
    transport = PairwiseTransport if is_sent else collectives.transport
    num_bytes = max(transport.scratch_of_each(full.numel(), full.dtype, wire, *sizes, in_place=in_place))
    reduction = Reduction(torch.empty(num_bytes, dtype=torch.uint8), wire)
    own = full.view(mesh.shard.size, -1)[mesh.shard.rank]
    out = own if in_place else torch.full_like(own, 99)
    collectives.reduce_scatter(full, out, reduction, unit="u", phase="test", portions=portions).release()
    return out


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks("num_ranks")
def test_reduce_scatter_is_the_sum_in_rank_order_bit_for_bit(rank: int, num_ranks: int) -> CommLog:
    collectives = Collectives(Mesh.of(None), CommLog())
    for (dtype, wire), in_place in itertools.product(DTYPES, (True, False)):
        numel = num_ranks * 264
        of_ranks = [terms(r, numel, dtype) for r in range(num_ranks)]
        mine = slice(rank * 264, (rank + 1) * 264)
        full = of_ranks[rank].clone()
        out = reduce_scatter(collectives, full, wire, in_place=in_place)
        assert torch.equal(out, sum_by_hand(rank, of_ranks, wire)[mine]), (dtype, wire, in_place)
        untouched = of_ranks[rank].clone()
        if in_place:
            untouched[mine] = out
        assert torch.equal(full, untouched)
        if num_ranks > 1:
            assert collectives.log.entries[-1].bytes == (num_ranks - 1) * 264 * wire.itemsize
    return collectives.log


def test_order_and_dtype_of_the_sum_are_visible_in_its_bits() -> None:
    """The negative control: with these terms another order, or another wire dtype, gives different bits."""
    of_ranks = [terms(r, 264, FP32) for r in range(4)]
    right = sum_by_hand(0, of_ranks, FP32)
    assert not torch.equal(right, sum_by_hand(0, of_ranks[::-1], FP32))
    assert not torch.equal(right, sum_by_hand(0, of_ranks, BF16))
    assert not torch.equal(sum_by_hand(0, of_ranks, BF16), sum_by_hand(1, of_ranks, BF16))
    narrow = [term.to(BF16) for term in of_ranks]
    assert not torch.equal(sum_by_hand(0, narrow, BF16), sum_by_hand(0, narrow, FP32))


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_the_backends_own_collectives_give_the_same_sums_where_they_are_exact(rank: int, num_ranks: int) -> CommLog:
    """The native transport, which NCCL uses, on gloo's collectives (which add up in another order)."""
    collectives = Collectives(Mesh.of(None), CommLog())
    collectives.transport = NativeTransport(collectives.messages, collectives.log)
    for (dtype, wire), in_place in itertools.product(DTYPES, (True, False)):
        of_ranks = [terms(r, num_ranks * 256, dtype, exact=True) for r in range(num_ranks)]
        out = reduce_scatter(collectives, of_ranks[rank].clone(), wire, in_place=in_place)
        expected = sum_by_hand(rank, of_ranks, wire)[rank * 256 : (rank + 1) * 256]
        assert torch.equal(out, expected), (dtype, wire, in_place)
        full = torch.zeros(num_ranks * 256, dtype=dtype)
        full[rank * 256 : (rank + 1) * 256] = out
        collectives.all_gather(full, unit="u", phase="test").wait()
        assert torch.equal(full[:256], sum_by_hand(0, of_ranks, wire)[:256])
    return collectives.log


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks("num_ranks")
def test_portions_are_summed_and_gathered_and_nothing_else_is_touched(rank: int, num_ranks: int) -> CommLog:
    """With the shared, pairwise and native transports; also with portions of which some shards have nothing."""
    numel = num_ranks * 512
    cases = [[(64, 128)], [(0, 64), (448, 1024)], [(576, 640), (704, 768)], [(0, 320), (384, numel)], []]

    collectives = Collectives(Mesh.of(None), CommLog())
    shared, mine = collectives.transport, slice(rank * 512, (rank + 1) * 512)
    native = NativeTransport(collectives.messages, collectives.log)
    ways = {"shared": shared, "pairwise": PairwiseTransport(shared.messages, shared.log), "native": native}
    for way, (dtype, wire), in_place, case in itertools.product(ways, DTYPES, (True, False), cases):
        collectives.transport = ways[way]
        assert collectives.transport.name == way
        moved = Portions.of([Interval(*one) for one in case], numel, num_ranks)
        chosen = torch.zeros(numel, dtype=torch.bool)
        for one in case:
            chosen[slice(*one)] = True
        of_ranks = [terms(r, numel, dtype, exact=way == "native") for r in range(num_ranks)]
        full = collectives.transport.allocate(numel * dtype.itemsize, torch.device("cpu")).view(dtype)
        full.copy_(of_ranks[rank])
        out = reduce_scatter(collectives, full, wire, in_place=in_place, portions=moved)
        untouched = of_ranks[rank][mine] if in_place else torch.full_like(out, 99)
        expected = torch.where(chosen[mine], sum_by_hand(rank, of_ranks, wire)[mine], untouched)
        assert torch.equal(out, expected), (way, dtype, wire, in_place, case)
        per_shard = chosen.view(num_ranks, -1).sum(1).tolist()
        assert collectives.log.entries[-1].bytes == (sum(per_shard) - per_shard[rank]) * wire.itemsize
        if way != "native":
            outside = [~chosen] if in_place else [slice(None)]
            assert all(torch.equal(full[part], of_ranks[rank][part]) for part in outside)
        if wire == dtype and in_place:
            full.copy_(torch.full_like(full, 5))
            full[mine] = rank
            collectives.all_gather(full, unit="u", phase="test", of_mean=True, portions=moved).release()
            owners = torch.arange(num_ranks).repeat_interleave(512).to(dtype)
            gathered = torch.where(chosen, owners, torch.full_like(full, 5))
            gathered[mine] = rank
            assert torch.equal(full, gathered), (way, dtype, case)
            assert collectives.log.entries[-1].bytes == (num_ranks - 1) * per_shard[rank] * dtype.itemsize
    return collectives.log


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks("num_ranks")
def test_all_gather_fills_in_what_others_have(rank: int, num_ranks: int) -> CommLog:
    collectives = Collectives(Mesh.of(None), CommLog())
    for dtype in (FP32, BF16, FP16, torch.uint8, torch.int64):
        expected = torch.cat([torch.arange(5).add(10 * r).to(dtype) for r in range(num_ranks)])
        full = torch.zeros_like(expected)
        own = full[5 * rank : 5 * rank + 5]
        own.copy_(expected[5 * rank : 5 * rank + 5])
        collectives.all_gather(full, unit="u", phase="test").wait()
        assert torch.equal(full, expected)
        assert own.data_ptr() == full.data_ptr() + 5 * rank * dtype.itemsize
    empty = torch.empty(0)
    collectives.all_gather(empty, unit="u", phase="test").wait()
    reduce_scatter(collectives, empty, FP32, in_place=True)
    return collectives.log


def test_several_collectives_under_way_do_not_mix() -> None:
    def check(rank: int) -> CommLog:
        collectives = Collectives(Mesh.of(None), CommLog())
        fulls, outs, pending = [], [], []
        for number in range(4):
            full = torch.full((3 * 256,), float(10**number * (rank + 1)))
            out = torch.zeros(256)
            reduction = Reduction(torch.empty(2 * 256 * 4, dtype=torch.uint8), FP32)
            pending.append(collectives.reduce_scatter(full, out, reduction, unit=f"{number}", phase="test"))
            gathered = torch.zeros(3 * 256)
            gathered[rank * 256 : (rank + 1) * 256] = 100 * number + rank
            pending.append(collectives.all_gather(gathered, unit=f"{number}", phase="test"))
            fulls.append((full, gathered))
            outs.append(out)
        for each in reversed(pending):
            each.wait()
            each.wait()  # a second time does nothing
        for number, (out, (_, gathered)) in enumerate(zip(outs, fulls, strict=True)):
            assert out.eq(10**number * 6).all()
            assert gathered.view(3, 256).eq(torch.tensor([[100 * number + r] for r in range(3)])).all()
        return collectives.log

    expect_same_logs(run_ranks(check, 3))


@pytest.mark.by_gloo
def test_what_garbage_collection_drops_waits_for_no_peer() -> None:
    """It runs at another moment on each rank: here on rank 0, when the peer has not read what rank 0 gave."""

    def check(rank: int) -> None:
        collectives = Collectives(Mesh.of(None), CommLog())
        assert collectives.transport.memory is not None
        memory = collectives.transport.allocate(2 * 256 * 4, torch.device("cpu"))
        full = memory.view(FP32)
        full[rank * 256 : (rank + 1) * 256] = rank + 1.0
        collectives.map_peers()
        for _ in range(3):  # what was dropped does not mix with what comes later
            pending = collectives.all_gather(full, unit="u", phase="forward", of_mean=True)
            if rank == 0:
                pending.wait()
                assert pending._acknowledgements
                del pending
            assert collectives.exchange_objects(rank) == [0, 1]
            if rank == 1:
                pending.release()
            assert full.view(2, 256).eq(torch.tensor([[1.0], [2.0]])).all()

    run_ranks(check, 2, collective_timeout=HANG)


def test_objects_are_exchanged_in_rank_order() -> None:
    def check(rank: int) -> CommLog:
        collectives = Collectives(Mesh.of(None), CommLog())
        assert collectives.exchange_objects(["x" * rank, rank, None]) == [["x" * r, r, None] for r in range(3)]
        return collectives.log

    assert len(run_ranks(check, 3)) == 3


# Two axes -------------------------------------------------------------------------------------------------------------

SHAPES = [(2, 2), (1, 3), (3, 1), *([(2, 1), (1, 4), (4, 1)] if EVERYTHING else [])]
"""replicas x shards"""


def two_axes(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def exact(precision: Any = None, every: bool = False) -> Job:
    return Job(
        steps=2,
        model=Counting,
        loss_of=loss_of_integers,
        units=torch.nn.Linear,
        precision=precision,
        micro_batches=2,
        reduce_every_micro_batch=every,
    )


JOBS = (exact(), exact("bf16"), exact(MixedPrecision(reduce=BF16)), exact(every=True))
MESH_CASES = grid(range(len(JOBS)), PLANS, SHAPES, apart=(0, 1))


@pytest.mark.parametrize("num_ranks", sorted({math.prod(shape) for shape in SHAPES}))
def test_a_mesh_of_two_axes_is_the_mesh_of_one_where_sums_are_exact(num_ranks: int) -> None:
    cases = [case for case in MESH_CASES if math.prod(case[-1]) == num_ranks]
    if not EVERYTHING and num_ranks == 3:  # one of the axes is of one rank: one case for each job and plan
        cases = [case for case in cases if (case[-1] == (1, 3)) == (case[0] % 2 == 1)]

    def check(rank: int) -> tuple[list[Outcome], list[Outcome]]:
        meshes = {shape: two_axes(shape) for *_, shape in cases}
        flat = [train(job, zeroshard.ZERO2, rank) for job in JOBS]
        return flat, [train(JOBS[number], plan, rank, meshes[shape]) for number, plan, shape in cases]

    expected, found = zip(*run_ranks(check, num_ranks), strict=True)
    for index, (number, plan, shape) in enumerate(cases):
        by_rank = [outcomes[index] for outcomes in found]
        for outcome, flat in zip(by_rank, expected, strict=True):
            assert outcome.losses == flat[number].losses, (number, plan, shape)
            assert same_bits(outcome.weights, flat[number].weights), (number, plan, shape)
        expect_same_logs(logs(by_rank))


def test_on_two_axes_all_plans_and_both_replicas_have_the_same_bits() -> None:
    """With ordinary data: sums over the mesh are in another order than over four ranks, and differ by rounding only."""
    job = Job(model=partial(Net, blocks=2), steps=2, micro_batches=2)

    def check(rank: int) -> tuple[Outcome, list[Outcome]]:
        mesh = two_axes((2, 2))
        return train(job, zeroshard.ZERO1, rank), [train(job, plan, rank, mesh) for plan in PLANS]

    one_axis, found = zip(*run_ranks(check, 4), strict=True)
    for rank in range(4):
        for outcome in found[rank]:
            assert same_bits(outcome.weights, found[0][0].weights)
            assert outcome.losses == found[rank][0].losses
            assert outcome.norms == found[0][0].norms
        assert 0 < largest_difference(found[rank][0].weights, one_axis[rank].weights) < 1e-6
    for plan in range(len(PLANS)):
        of_plan = logs([found[rank][plan] for rank in range(4)])
        expect_same_logs(of_plan)
        assert {event.op for event in of_plan[0].entries} >= {"reduce_scatter", "reduce_replicas", "all_gather"}


def test_forgetting_the_replicas_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Collectives.reduce_scatter

    def within_the_node(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        mesh = self.mesh
        self.mesh = replace(mesh, replicate=Mesh.of(None).replicate)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.mesh = mesh

    monkeypatch.setattr(Collectives, "reduce_scatter", within_the_node)
    with pytest.raises(RankError, match=r"the ranks have diverged: unit .* has other values on rank 2 than on rank 0"):
        run_ranks(lambda rank: train(replace(exact(), steps=3), zeroshard.DDP, rank, two_axes((2, 2))), 4)


@pytest.mark.by_gloo
@on_ranks(4)
def test_sums_over_replicas_take_turns_in_their_scratch(rank: int) -> None:
    """The terms of the second unit would come to where those of the first one wait to be summed."""
    collectives, numel = Collectives(Mesh.of(two_axes((2, 2))), CommLog()), 4 * MOST_BYTES
    shards, replicas = PairwiseTransport.scratch_of_each(numel, FP32, FP32, 2, 2, in_place=True)
    of_replicas = torch.empty(replicas, dtype=torch.uint8)
    chains, outs = [], []
    for unit in range(2):
        full = torch.full((numel,), 2.0**rank * 100**unit)
        outs.append(full.view(2, -1)[collectives.mesh.shard.rank])
        reduction = Reduction(torch.empty(shards, dtype=torch.uint8), FP32, 1, of_replicas)
        chains.append(collectives.reduce_scatter(full, outs[-1], reduction, unit=str(unit), phase="test"))
    for chain in chains:
        assert chain.advance()
    collectives.count(0)  # all have sent both
    for chain in chains:
        chain.release()
    for unit, out in enumerate(outs):
        assert torch.equal(out, torch.full_like(out, 15.0 * 100**unit)), unit


def test_other_meshes_are_refused() -> None:
    def check(rank: int) -> None:
        with pytest.raises(ValueError, match=r"needs the axes 'replicate' and 'shard' .*, found"):
            Mesh.of(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))
        with pytest.raises(ValueError, match=r"expected a mesh of one axis .* found 3: pass the part of it"):
            Mesh.of(init_device_mesh("cpu", (1, 1, 2)))
        mesh = Mesh.of(init_device_mesh("cpu", (2, 1)))
        assert (mesh.replicate.size, mesh.shard.size) == (2, 1)
        mesh = Mesh.of(init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "replicate")))
        assert (mesh.replicate.size, mesh.shard.size) == (1, 2)
        model, group = Net(), dist.new_group([0])
        if rank == 1:
            with pytest.raises(TypeError, match="a group that this rank is not in"):
                zeroshard.shard(model, "zero3", mesh=group)
        with pytest.raises(ValueError, match="needs the axes"):
            zeroshard.shard(
                model, "zero3", mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), units=Block
            )

    run_ranks(check, 2)


def test_small_tensors_are_broadcast_together_and_large_ones_without_a_copy() -> None:
    """Of any dtype and layout, also empty ones."""

    def tensors(rank: int) -> list[Tensor]:
        def values(*shape: int) -> Tensor:
            return torch.arange(math.prod(shape)).reshape(shape) % 50 + 100 * rank

        small = [values(5).to(torch.uint8), values(3, 4).float(), values(2, 3).t(), torch.empty(0), values(1)[0].half()]
        return [*small, values(40_000).float(), values(7).to(torch.float8_e4m3fn), values(9).bool()]

    def check(rank: int) -> list[int]:
        collectives = Collectives(Mesh.of(None), CommLog())
        found, sent = tensors(rank), []
        broadcast = collectives.transport.broadcast

        def counted(axis: Any, tensor: Tensor, source: int) -> None:
            sent.append(tensor.nbytes)
            assert tensor.nbytes < 1000 or tensor.data_ptr() == found[5].data_ptr(), "no copy of a large one"
            broadcast(axis, tensor, source)

        collectives.transport.broadcast = counted  # type: ignore[method-assign]
        collectives.broadcast(found, source=1)
        for value, own, expected in zip(found, tensors(rank), tensors(1), strict=True):
            assert torch.equal(value.float(), expected.float())
            assert rank == 1 or not value.numel() or value.dtype == torch.bool or not torch.equal(value, own)
        return sent

    assert run_ranks(check, 2) == [[5 + 48 + 48 + 2, 160_000, 7 + 9]] * 2
