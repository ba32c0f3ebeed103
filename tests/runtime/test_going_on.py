"""What follows a reduction goes on during backward: under DDP the gather of the mean, on a 2-D mesh the sum over
replicas. In one order on all ranks, whatever a rank's graph looks like, and with the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.grids import EVERYTHING
from tests.planning.test_dry_run import alone
from tests.timed_backend import TIMINGS, timed_ranks
from zeroshard.comm.chain import Chain
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.comm_log import CommEvent, CommLog
from zeroshard.comm.messages import Messages
from zeroshard.comm.pending import Pending
from zeroshard.placement import REPLICATED, SHARDED, Plan
from zeroshard.planning.fabric import simulated_fabric
from zeroshard.planning.wire import Network, ProcessorClock, SideOfFabric
from zeroshard.runtime.calls import ToCome
from zeroshard.runtime.reductions import Reductions
from zeroshard.testing import expect_same_logs, run_ranks

GRADS_IN_FULL = Plan("grads in full", SHARDED, REPLICATED, SHARDED)
"""Gathers weights in backward, and means."""


class Layer(nn.Module):
    """Some ranks do not use `extra`: there the unit is complete only when backward has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)
        self.extra = nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        x = torch.tanh(self.inner(x))
        return x * self.extra if uses_extra else x


class Layers(nn.Module):
    def __init__(self, number: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(number))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, (index + rank) % 2 == 0)
        return x.square().mean()


def build() -> Layers:
    torch.manual_seed(3)
    return Layers()


def inputs(rank: int, step: int) -> Tensor:
    return torch.rand(4, 24, generator=torch.Generator().manual_seed(100 * rank + step))


def trained(rank: int, plan: Any, replicas: int = 1, wire: torch.dtype = torch.float32) -> tuple[list[Tensor], Any]:
    """The weights after two steps, and the collectives of the last backward."""
    model, size = build(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    precision = zeroshard.MixedPrecision(reduce=wire)
    handle = zeroshard.shard(model, plan, units=Layer, mesh=mesh if replicas > 1 else None, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.3, momentum=0.9)
    events: list[CommEvent] = []
    for step in range(2):
        optimizer.zero_grad()
        loss = model(inputs(rank, step), rank)
        handle.comm_log.clear()
        loss.backward()
        events = list(handle.comm_log.entries)
        optimizer.step()
    logs = handle.comm_log
    return [value.clone() for value in handle.full_state_dict().values()], (events, logs)


def check_plans(rank: int, replicas: int, wire: torch.dtype, gathered: Sequence[str | Plan]) -> Any:
    """All plans give the same bits. Returns the logs of DDP, of ZERO2, and of other plans. (ZERO1, which differs from
    ZERO2 where micro-batches are many, with `make test-everything`.)"""
    plans = ("ddp", "zero2", *(["zero1"] if EVERYTHING else []), *gathered)
    weights, found = zip(*(trained(rank, plan, replicas, wire) for plan in plans), strict=True)
    for plan, of_plan in zip(plans, weights, strict=True):
        assert all(map(torch.equal, of_plan, weights[0])), plan
    return list(found)


def of_reductions(events: list[CommEvent]) -> list[tuple[str, str]]:
    return [(event.op, event.unit) for event in events if event.op != "all_gather" or event.phase != "forward"]


EVERY = list(enumerate(itertools.product(("gloo", *TIMINGS), ((2, 1), (3, 1), (4, 2)))))
"""When collectives read and write ("gloo": as between hosts), the number of ranks and of replicas."""
IN_TURN = [(number, case) for number, case in EVERY if case[1] == ((4, 2), (3, 1))[number // 3 % 2]]
"""Half of the timings on a mesh of replicas, and half of them on 3 ranks."""


@pytest.mark.parametrize(("number", "case"), EVERY if EVERYTHING else IN_TURN)
def test_plans_agree_and_ranks_have_one_order(
    monkeypatch: pytest.MonkeyPatch, number: int, case: tuple[str, tuple[int, int]]
) -> None:
    timing, (ranks, replicas) = case
    gathered: list[str | Plan] = ["zero3", GRADS_IN_FULL]
    if not EVERYTHING:
        del gathered[number // 2 % 2]
    if timing == "gloo":  # between hosts
        monkeypatch.setattr(Collectives, "_try_to_share", lambda self: None)
        of_ranks = run_ranks(check_plans, ranks, replicas, torch.float32, gathered)
    else:
        with timed_ranks(timing):
            of_ranks = run_ranks(check_plans, ranks, replicas, torch.bfloat16, gathered)
    for of_plan in zip(*of_ranks, strict=True):
        expect_same_logs([log for _, log in of_plan])
    for of_rank in of_ranks:
        ddp, zero2, *_ = [of_reductions(events) for events, _ in of_rank]
        assert ddp == of_reductions(of_ranks[0][0][0])
        sums = [place for place, (op, _) in enumerate(ddp) if op == "reduce_scatter"]
        gathers = [place for place, (op, _) in enumerate(ddp) if op == "all_gather"]
        assert len(sums) == len(gathers) == 5
        assert gathers[0] < sums[3] or replicas > 1, "during backward"
        replica_sums = [place for place, (op, _) in enumerate(zero2) if op == "reduce_replicas"]
        sums = [place for place, (op, _) in enumerate(zero2) if op == "reduce_scatter"]
        assert replicas == 1 or replica_sums[0] < sums[2]


@pytest.mark.by_gloo
def test_ranks_gather_weights_and_means_in_different_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if means count as gathers of weights, and units are reduced at their last gradients and not in one
    order with gathers, the next step finds the difference."""
    record = CommLog.record
    monkeypatch.setattr(ToCome, "has_any", lambda self: False)
    monkeypatch.setattr(CommLog, "record", lambda self, *a, kind="", **k: record(self, *a, **k))
    monkeypatch.setattr(Collectives, "_try_to_share", lambda self: None)

    def check(rank: int) -> None:
        with pytest.raises(RuntimeError, match="the ranks have not issued the same collectives: all_gather"):
            trained(rank, GRADS_IN_FULL)

    run_ranks(check, 2)


class Root(nn.Module):
    """One root unit for each dtype."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.double().square().mean()


def root_trained(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    handle = zeroshard.shard(model := Root(), "ddp", units=None, precision=None)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.25)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(rank, step)[:, :6]).backward()
        optimizer.step()
    return [value.clone() for value in handle.full_state_dict().values()]


def test_a_sum_without_scratch_is_there_before_its_mean_is_gathered() -> None:
    """Native sums in one dtype need no scratch, so nothing made the first of three root units wait for its sum, and its
    mean was waited for twice."""
    (expected, _), found = run_ranks(root_trained, 2), []
    for timing in ("early", "late"):
        with timed_ranks(timing):
            found += run_ranks(root_trained, 2)
    assert all(all(map(torch.equal, one, expected)) for one in found)


def test_nothing_starts_after_a_failure() -> None:
    """`abandon` drops what is in flight, and a wait that has failed is not followed by others."""
    for failed in (False, True):
        messages, started = Messages(0, "x"), list[int]()
        owner = SimpleNamespace(messages=messages, log=CommLog())

        def start(started: list[int] = started) -> Pending:
            started.append(1)
            return Pending()

        chain = Chain(owner, Pending()).follow(start).follow(start)
        messages.failed = failed
        chain.release()
        assert len(started) == (0 if failed else 2) and chain.goes_on is failed


def test_what_follows_starts_when_peers_have_read() -> None:
    """Only the last exchange of a chain is waited for at its end. A message of an earlier one (of a mean to replicas,
    which no later exchange waits for) would still leave the memory in which a program clips its gradients."""
    done = list[str]()
    owner = SimpleNamespace(messages=Messages(0, "x"), log=CommLog())

    def exchange(name: str) -> Pending:
        return Pending(owner, (), lambda: [SimpleNamespace(wait=lambda: done.append(name))])

    chain = Chain(owner, exchange("read first"))
    chain.follow(lambda: done.append("second") or exchange("read second"))  # type: ignore[func-returns-value]
    chain.follow(lambda: done.append("third") or Pending())  # type: ignore[func-returns-value]
    chain.wait()
    assert done == ["read first", "second", "read second", "third"]


class Computation:
    """Each layer computes for 6 s in forward, and 12 s in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        for layer in (module for module in model.modules() if isinstance(module, nn.Linear)):
            layer.register_forward_hook(lambda *_: self.add(6))
            layer.weight.register_hook(lambda grad: self.add(12))  # behind the engine's hooks on the output

    def add(self, seconds: float) -> None:
        self.seconds += seconds


def exposed(plan: str, ranks: int, replicas: int, *, in_streams: bool) -> float:
    """Seconds for which forward and backward wait, of 8 layers that compute for 18 s each, on a wire that needs 3.5 s
    for a gather on 8 ranks."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    computation = Computation(model)
    clock = ProcessorClock(lambda: computation.seconds)
    with simulated_fabric(ranks, Network(latency=0.0, bandwidth=16384.0), clock=clock) as fabric:
        sizes = replicas, ranks // replicas
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
        handle = zeroshard.shard(model, plan, units=nn.Linear, mesh=mesh)
        handle.engine.collectives.beside = SideOfFabric(fabric) if in_streams else None
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-3, non_finite="ignore")
        for _ in range(2):
            optimizer.zero_grad()
            start, computed = clock.now(), computation.seconds
            model(torch.rand(2, 128, requires_grad=True)).sum().backward()
            waited = clock.now() - start - (computation.seconds - computed)
            optimizer.step()
        handle.close()
        return waited


@pytest.mark.by_cpu
@pytest.mark.filterwarnings("ignore")
def test_exposed_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction of the first layer, and what follows it, cannot be hidden: 3.5 s for the sum over 8 ranks, 0.875 s
    for that over 8 replicas, 3.5 s for the gather of the mean (ZERO1: of the weights, in the next forward)."""

    def check() -> None:
        for plan, ranks, replicas, least in (
            ("ddp", 8, 1, 7.0),
            ("zero1", 8, 1, 7.0),
            ("ddp", 64, 8, 7.875),
            ("zero2", 64, 8, 7.875),
            ("zero3", 64, 8, 7.875),
        ):
            by_host = exposed(plan, ranks, replicas, in_streams=False)
            assert exposed(plan, ranks, replicas, in_streams=True) == pytest.approx(least), (plan, replicas)
            with monkeypatch.context() as patch:
                patch.setattr(Reductions, "_go_on", lambda self: None)
                control = exposed(plan, ranks, replicas, in_streams=False)
            assert least - 1e-6 <= by_host <= control
            assert by_host < control - 3 or plan == "zero1", (plan, replicas, by_host, control)

    alone(check)


def early_sums(rank: int, plan: str, reads: bool) -> list[int]:
    """How many reductions are in flight at the last gradient of each unit, if all ranks have started the one before.

    Args:
        reads: False: no rank looks at a gradient, or before it waits for a gather, what its peers are ready for.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)))
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
    reductions = handle.engine.reducer._reductions
    found: list[int] = []
    for layer in model:
        seen = iter([dist.barrier, lambda: found.append(len(reductions._arriving))])  # at the first and at the second
        for parameter in layer.parameters():
            parameter.register_hook(lambda grad, seen=seen: next(seen)())
    with pytest.MonkeyPatch.context() as patch:
        if not reads:
            patch.setattr(Reductions, "finish_early", lambda self: None)
            patch.setattr(handle.engine.gatherer, "before_wait", lambda: None)
        optimizer.backward(model(torch.ones(2, 24) + rank).square().mean())
    optimizer.step()
    return found


@pytest.mark.by_gloo
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_what_all_peers_are_ready_for_is_summed_during_backward(plan: str) -> None:
    """So no rank waits for a bucket while its peers still have to read it."""
    for found in run_ranks(early_sums, 2, plan, True):
        assert found == [0] * 5
    for found in run_ranks(early_sums, 2, plan, False):
        assert found[2:] and min(found[2:]) > 0


def told_apart(rank: int) -> tuple[bool, bool]:
    """Rank 0 confirms a reduction while rank 1 confirms a gather, and the other way round. Whether rank 0 took the
    first for the second, and whether its peer had read in the end."""
    handle = zeroshard.shard(nn.Linear(24, 24), "zero3")
    messages, axis = handle.engine.collectives.messages, handle.engine.collectives.mesh.shard
    kinds = ("reduce_scatter", "all_gather") if rank == 0 else ("all_gather", "reduce_scatter")
    first = messages.acknowledge(axis, kinds[0])
    dist.barrier()
    early = all(work.has_arrived for work in first)
    dist.barrier()
    second = messages.acknowledge(axis, kinds[1])
    for work in (*first, *second):
        work.wait()
    return early, all(work.has_arrived for work in first)


@pytest.mark.by_gloo
def test_confirmations_of_reductions_and_of_gathers_are_told_apart() -> None:
    assert run_ranks(told_apart, 2) == [(False, True)] * 2
