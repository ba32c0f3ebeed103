"""The collectives and bytes of a step equal the formulas exactly, and the log equals the bytes that are really sent."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import DEVICE, PLANS, SCHEDULES, WIDTH, Block, Job, Net, loss_of_tokens, make
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommEvent, CommLog
from zeroshard.comm.messages import Messages
from zeroshard.precision import MixedPrecision
from zeroshard.ranks.mesh import Mesh
from zeroshard.runtime.gather import Gatherer
from zeroshard.testing import expect_same_logs, run_ranks

PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "16-bit gradients": MixedPrecision(grad=torch.bfloat16),
    "narrow wire": MixedPrecision(reduce=torch.bfloat16),
    "wide wire": MixedPrecision(grad=torch.bfloat16, reduce=torch.float32),
}


def sent_in_one_step(plan: Any, job: Job, rank: int, steps: int = 2) -> tuple[zeroshard.Handle, list[CommEvent], int]:
    """The events of a step in steady state, and the bytes that were really passed to torch.distributed meanwhile,
    without the announcements. (With the pairwise transport: in shared memory the log is the same, but no large data are
    sent.)"""
    Collectives._try_to_share = lambda self: None
    model = make(job.model)
    handle = zeroshard.shard(model, plan, units=job.units, precision=job.precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1, foreach=False)
    sent = 0
    send = Messages.send

    def counted(self: Messages, axis: Any, tensor: torch.Tensor, rank: int, kind: str) -> Any:
        nonlocal sent
        sent += 0 if kind.startswith("announce") else tensor.nbytes
        return send(self, axis, tensor, rank, kind)

    for step in range(steps):
        handle.engine.gatherer.settle()  # gathers that the last step started belong to it
        handle.comm_log.clear()
        sent, Messages.send = 0, counted
        for micro_batch, scope in enumerate(job.micro_scopes(handle)):
            with scope:
                optimizer.backward(job.loss(model, rank, micro_batch, step))
        optimizer.step()
        Messages.send = send
    return handle, list(handle.comm_log.entries), sent


def gathers(num_units: int, micro_batches: int) -> Counter[str]:
    """Gathers of a ZERO3 step, by hand: the blocks take turns in two pool buffers, and a block is gathered unless its
    weights are still in its buffer. The root has its own buffer. After an optimizer step no buffer is valid."""
    held: dict[str, str] = {}
    count: Counter[str] = Counter()
    for _ in range(micro_batches):
        forward = ["root", *(f"blocks.{i}" for i in range(num_units))]
        for unit in [*forward, *reversed(forward)]:
            place = "own" if unit == "root" else f"place {int(unit.split('.')[1]) % 2}"
            if held.get(place) != unit:
                held[place] = unit
                count[unit] += 1
    return count


def expected(handle: zeroshard.Handle, job: Job) -> Counter[tuple[str, str, str, int]]:
    """(operation, unit, phase, bytes) -> how often in a step."""
    k = job.micro_batches
    reductions = k if job.reduce_every_micro_batch else 1
    result: Counter[tuple[str, str, str, int]] = Counter()
    for unit in handle.engine.units:
        foreign = unit.layout.numel - unit.layout.shard_numel  # (d - 1) / d of the buffer
        precision = unit.spec.precision
        result["reduce_scatter", unit.name, "backward", foreign * precision.wire.itemsize] = reductions
        if handle.plan is zeroshard.DDP:
            result["all_gather", unit.name, "backward", foreign * precision.grad.itemsize] = reductions
        elif handle.plan is not zeroshard.ZERO3:
            result["all_gather", unit.name, "step", foreign * precision.param.itemsize] = 1
    if handle.plan is zeroshard.ZERO3:
        of_unit = {unit.name: unit for unit in handle.engine.units}
        for name, count in gathers(len(of_unit) - 1, k).items():
            unit = of_unit[name]
            foreign = unit.layout.numel - unit.layout.shard_numel
            result["all_gather", name, "any", foreign * unit.spec.precision.param.itemsize] = count
    return +result


def found(events: list[CommEvent], plan: Any) -> Counter[tuple[str, str, str, int]]:
    """The same counts from a log, without the control exchange. The phase of ZERO3's gathers is not compared."""
    return Counter(
        (e.op, e.unit, "any" if plan is zeroshard.ZERO3 and e.op == "all_gather" else e.phase, e.bytes)
        for e in events
        if e.op != "exchange"
    )


STEP_CASES = grid(SCHEDULES, PRECISIONS, PLANS, (2, 3))


@pytest.mark.by_gloo
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_and_bytes_of_a_step_are_the_formulas(num_ranks: int) -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for schedule, precision, plan in at(STEP_CASES, num_ranks):
            micro_batches, every = SCHEDULES[schedule]
            job = Job(
                model=partial(Net, blocks=3, tied=True),
                precision=PRECISIONS[precision],
                micro_batches=micro_batches,
                reduce_every_micro_batch=every,
            )
            handle, events, sent = sent_in_one_step(plan, job, rank)
            assert found(events, plan) == expected(handle, job), (plan, precision, schedule)
            assert [e.op for e in events].count("exchange") == 1  # the control exchange, under every plan
            assert sent == sum(e.bytes for e in events)
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_same_logs(logs)


def test_in_psi_a_step_sends_the_formulas_and_zero3_gathers_what_was_evicted() -> None:
    """The volumes as docs/design.md states them: multiples of Psi, the bytes of the weights, times (d - 1) / d."""

    def check(rank: int) -> None:
        schedules = zip(SCHEDULES.values(), ((2, 2, 2), (2, 2, 2), (6, 4, 4)), strict=True)
        for number, ((micro_batches, every), volumes) in enumerate(schedules):
            cases = zip(PLANS[:3], volumes, strict=True)
            for plan, volume in cases if EVERYTHING else [*cases][number % 2 :: 2]:
                job = Job(micro_batches=micro_batches, reduce_every_micro_batch=every)
                handle, events, _ = sent_in_one_step(plan, job, rank)
                psi = 4 * sum(unit.layout.numel for unit in handle.engine.units)
                total = sum(e.bytes for e in events if e.op != "exchange")
                assert total == volume * psi * 2 // 3, plan
        for num_blocks, k in ((1, 1), (2, 2), (3, 1), (5, 2)):  # k = 3: in the test above
            job = Job(model=partial(Net, blocks=num_blocks), micro_batches=k, reduce_every_micro_batch=True)
            handle, events, _ = sent_in_one_step(zeroshard.ZERO3, job, rank)
            block, root = (4 * unit.layout.numel for unit in (handle.engine.units[1], handle.engine.units[0]))
            names = {unit.name for unit in handle.engine.units}
            assert names == {"root", *(f"blocks.{i}" for i in range(num_blocks))}
            psi, kept = root + num_blocks * block, min(2, num_blocks) * block
            # Backward finds the last two blocks still gathered, and the next forward finds the first two; the root
            # stays gathered for the whole step. So 3 Psi - kept for the first pass, 3 Psi - 2 kept for later ones, less
            # the root's.
            volume = 3 * k * psi - (2 * k - 1) * (kept + root)
            total = sum(e.bytes for e in events if e.op != "exchange")
            assert total == volume * 2 // 3, (num_blocks, k)
            assert total <= 3 * k * psi * 2 // 3

    run_ranks(check, 3)


@pytest.mark.by_gloo
@pytest.mark.parametrize("apart", [True, False])
def test_each_connection_between_hosts_moves_data_one_way(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """And a second model, while the first lives, uses the same groups. Without the second groups (the control), data
    move both ways."""

    def check(rank: int) -> bool:
        moved: set[tuple[int, bool]] = set()
        send, receive = dist.ProcessGroup.send, dist.ProcessGroup.recv

        def noted_send(self: dist.ProcessGroup, tensors: Any, to: int, tag: int) -> Any:
            moved.add((id(self), to > dist.get_rank(self)))
            return send(self, tensors, to, tag)

        def noted_receive(self: dist.ProcessGroup, tensors: Any, source: int, tag: int) -> Any:
            moved.add((id(self), source < dist.get_rank(self)))
            return receive(self, tensors, source, tag)

        dist.ProcessGroup.send, dist.ProcessGroup.recv = noted_send, noted_receive
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        models, numbers = [], []
        for _ in range(2):
            model = make(Net)
            models.append(zeroshard.shard(model, zeroshard.ZERO2, mesh=mesh, units=Block))
            numbers.append(len(_world.pg_map))
            optimizer = zeroshard.ShardedOptimizer(models[-1], torch.optim.SGD, lr=0.1, foreach=False)
            moved.clear()
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        assert numbers[0] == numbers[1]
        ups, downs = ({group for group, up in moved if up == way} for way in (True, False))
        assert len(ups | downs) == (4 if apart else 2)  # of the shards, and of the replicas
        return ups.isdisjoint(downs)

    monkeypatch.setattr(Collectives, "_try_to_share", lambda self: None)
    if not apart:
        monkeypatch.setattr(Mesh, "with_two_ways", lambda self: self)
    assert run_ranks(check, 4) == [apart] * 4


def test_one_rank_sends_nothing() -> None:
    def check(rank: int) -> None:
        for plan in PLANS:
            _, events, sent = sent_in_one_step(plan, Job(micro_batches=2), rank)
            assert events == [] and sent == 0

    run_ranks(check, 1)


def test_a_gather_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If weights are dropped that could be kept, training gives the same results: only the count of gathers shows
    it."""
    leave = Gatherer.leave

    def forgetful(self: Gatherer, units: Any, **options: Any) -> Any:
        free = leave(self, units, **options)
        for unit in free:
            if not unit.weights.buffer.rests_in_full:
                unit.weights.drop()
        return free

    def check(rank: int) -> None:
        handle, events, _ = sent_in_one_step(zeroshard.ZERO3, Job(), rank)
        assert found(events, zeroshard.ZERO3) != expected(handle, Job())

    monkeypatch.setattr(Gatherer, "leave", forgetful)
    run_ranks(check, 2)


def test_gathers_start_one_unit_ahead_in_forward_and_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, when a module asks for its unit, the gather is already under way."""
    started: list[tuple[str, str, bool]] = []
    prefetch, start = Gatherer._prefetch, Gatherer.start
    ahead = False

    def noting_prefetch(self: Gatherer, *args: Any) -> None:
        nonlocal ahead
        ahead = True
        prefetch(self, *args)
        ahead = False

    def noting_start(self: Gatherer, unit: Any, phase: str) -> None:
        started.append((phase, unit.name, ahead))
        start(self, unit, phase)

    def check(rank: int) -> None:
        model = make(partial(Net, blocks=6))
        handle = zeroshard.shard(model, zeroshard.ZERO3, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for step in range(3):
            started.clear()
            loss_of_tokens(model, rank, 0, step).backward()
            optimizer.step()
        forward = [(name, was_ahead) for phase, name, was_ahead in started if phase == "forward"]
        backward = [(name, was_ahead) for phase, name, was_ahead in started if phase == "backward"]
        assert forward == [("root", False), *((f"blocks.{i}", True) for i in range(6))]
        assert backward == [(f"blocks.{i}", True) for i in (3, 2, 1, 0)]

    monkeypatch.setattr(Gatherer, "_prefetch", noting_prefetch)
    monkeypatch.setattr(Gatherer, "start", noting_start)
    run_ranks(check, 2)


@pytest.mark.parametrize("has_root", [True, False])
def test_an_evaluation_or_a_second_forward_changes_no_later_step(has_root: bool) -> None:
    """What followed a unit once was gathered after it in each later step, although nothing followed it any more: a
    block more in forward (after an evaluation, without a root unit) or backward (after two forwards in one step)."""

    def check(rank: int) -> None:
        model = make(partial(Net, blocks=4) if has_root else lambda: torch.nn.Sequential(*(Block() for _ in range(4))))
        handle = zeroshard.shard(model, zeroshard.ZERO3, units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        inputs = (torch.arange(6).view(2, 3) if has_root else torch.ones(2, 3, WIDTH)).to(DEVICE)

        def gathers(forwards: int = 1) -> Counter[tuple[str, str]]:
            handle.comm_log.clear()
            torch.stack([model(inputs).square().mean() for _ in range(forwards)]).sum().backward()
            optimizer.step()
            return Counter((e.unit, e.phase) for e in handle.comm_log.entries if e.op == "all_gather")

        gathers()
        expected = gathers()
        with torch.no_grad():
            model(inputs)
        gathers()
        assert gathers() == expected
        assert gathers(2) != expected, "the control"
        gathers()
        assert gathers() == expected

    run_ranks(check, 2)


def test_the_comparison_of_logs_sees_a_difference_in_size_order_and_number() -> None:
    def log(*events: tuple[str, int]) -> CommLog:
        result = CommLog()
        for unit, num_bytes in events:
            result.record("all_gather", unit, "forward", num_bytes)
        return result

    same = log(("a", 8), ("b", 8))
    expect_same_logs([same, log(("a", 8), ("b", 8))])
    for other in (log(("a", 8), ("b", 16)), log(("b", 8), ("a", 8)), log(("a", 8)), log(("a", 8), ("b", 8), ("c", 8))):
        assert other.digest != same.digest
        with pytest.raises(AssertionError, match="rank 1 differs from rank 0 in all_gather"):
            expect_same_logs([same, other])
