"""Timelines: every collective of the log once, ranges that nest, times of a device, traces; and no result changes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, same_bits
from tests.model.test_graphs import Checkpointed, Reentrant
from zeroshard.comm.comm_log import CommLog
from zeroshard.placement import Plan
from zeroshard.runtime import timeline as timelines
from zeroshard.runtime.timeline import Timeline
from zeroshard.runtime.timeline_event import TimelineEvent, covered, lanes
from zeroshard.testing import run_ranks

OPS = ("all_gather", "reduce_scatter", "all_to_all", "exchange")
UNITS = ("root", "blocks.0", "blocks.1", "blocks.2")


def expect_nested(spans: Sequence[tuple[float, float]]) -> None:
    """Of two spans, one contains the other or ends before it begins."""
    around: list[tuple[float, float]] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or end <= around[-1][1], (begin, end, around[-1])
        around.append((begin, end))


def expect_logged(events: Sequence[TimelineEvent], log: CommLog) -> None:
    """The collectives are the entries of the log, in its order."""
    found = [event for event in events if event.kind == "collective"]
    assert [(event.name, event.unit, event.phase, event.num_bytes) for event in found] == list(map(tuple, log.entries))
    assert sum(event.num_bytes for event in found) == log.bytes() > 0


def expect_in_order(timeline: Timeline) -> None:
    """Ranges of a thread nest; waits for a collective lie within it; nothing leaves the block."""
    ended = [event for event in timeline.events if event.kind != "collective"]
    for thread in {event.thread for event in ended}:
        expect_nested([event.host for event in ended if event.thread == thread])
    for event in timeline.events:
        assert 0 <= event.host[0] <= event.host[1] <= timeline.seconds
    flights = [event for event in timeline.events if event.kind == "collective" and event.is_complete]
    for wait in timeline.events:
        if wait.kind == "wait" and wait.name in OPS:
            of_wait = wait.name, wait.unit, wait.phase
            around = [f for f in flights if of_wait == (f.name, f.unit, f.phase) and f.host[0] <= wait.host[0]]
            # Where messages are sent, weights of ZERO1 and ZERO2 arrive in the forward after the step that gathers.
            begun_before = wait.phase == "step" and not around
            assert begun_before or any(wait.host[1] <= flight.host[1] for flight in around), wait


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices are stepped whole (Muon), the rest elementwise."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon},
        {"params": [p for p in model.parameters() if p.dim() != 2]},
    ]


def train(model: nn.Module, plan: Plan, rank: int, *, record: bool, mesh: Any = None) -> tuple[Any, Timeline | None]:
    """Two steps of two micro-batches; a timeline of the second one. Returns losses, log and weights, and the
    timeline."""
    called = DistributedDataParallel(model) if plan.external_gradients else model
    handle = None if plan.external_gradients else zeroshard.shard(model, plan, units=Block, mesh=mesh)
    optimizer = zeroshard.ShardedOptimizer(groups_of(model), torch.optim.AdamW, lr=1e-2)
    handle = handle or optimizer.handle
    losses = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        for micro_batch in range(2):
            loss = loss_of_tokens(called, rank, micro_batch, number, 2)
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()

    step(0)
    log = handle.comm_log
    log.clear()
    waited, timeline = log.wait_seconds, handle.timeline() if record else None
    with timeline or nullcontext():
        step(1)
    if timeline is not None:
        expect_logged(timeline.events, log)
        waits = [event.seconds for event in timeline.events if event.kind == "wait" and event.name in OPS]
        assert 0 < sum(waits) <= log.wait_seconds - waited
    found = losses, list(log.entries)
    return (*found, dict(model.state_dict()) if called is not model else handle.full_state_dict()), timeline


def expect_unchanged(model: Any, plan: Plan, rank: int, mesh: Any = None) -> Timeline:
    """Train with and without a timeline: the same bits, and the same collectives."""
    *found, weights = (recorded := train(make(model), plan, rank, record=True, mesh=mesh))[0]
    *expected, of_plain = train(make(model), plan, rank, record=False, mesh=mesh)[0]
    assert found == expected and same_bits(weights, of_plain)
    timeline = recorded[1]
    assert timeline is not None
    expect_in_order(timeline)
    return timeline


def test_every_collective_is_there_once_and_no_bit_changes() -> None:
    def check(rank: int) -> None:
        plans = PLANS if EVERYTHING else PLANS[::3]
        for plan in (*plans, zeroshard.OPTIMIZER_ONLY):
            timeline = expect_unchanged(Net, plan, rank)
            assert all(event.is_complete or plan.weights is not plan.main for event in timeline.events)
            counts = Counter((event.kind, event.label) for event in timeline.events)
            for unit in () if plan.external_gradients else UNITS:
                assert counts["forward", f"forward({unit})"] == 2
            backward = [event.unit for event in timeline.events if event.kind == "backward"]
            # The unit "root" has the head, which comes after the blocks, and the embedding, which comes before them.
            assert backward == ["root", "blocks.2", "blocks.1", "blocks.0", "root"] * 2 * (not plan.external_gradients)
            assert counts["phase", "step: batch"] and counts["phase", "step: whole parameters"] == 1
            assert counts["phase", "step: agree"] == 2 and bool(counts["wait", "wait: all_to_all(owners)"]) == (
                plan is not zeroshard.DDP
            )
            if rank == 0 and plan is zeroshard.ZERO3:
                expect_failures(timeline, plan)

    run_ranks(check, 2)


def expect_failures(timeline: Timeline, plan: Plan) -> None:
    """The negative control of the checks: an event that is missing, doubled, longer or later."""
    events, log = timeline.events, CommLog()
    flights = [event for event in events if event.kind == "collective"]
    for event in flights:
        log.record(event.name, event.unit, event.phase, event.num_bytes)
    expect_logged(events, log)
    for wrong in ([*events, flights[0]], [e for e in events if e is not flights[-1]]):
        with pytest.raises(AssertionError):
            expect_logged(wrong, log)
    root, inner, *_ = [event for event in events if event.kind == "forward"]
    assert root.host[0] <= inner.host[0] < inner.host[1] <= root.host[1]
    for event, moved in (
        (root, replace(root, host=(root.host[0], sum(inner.host) / 2))),
        (flights[0], replace(flights[0], host=(flights[0].host[0],) * 2)),
    ):
        timeline._events = tuple(moved if one is event else one for one in events)
        with pytest.raises(AssertionError):
            expect_in_order(timeline)
    timeline._events = events


def test_replicas_and_recomputed_forwards() -> None:
    """Sums over replicas are collectives of their own. A recomputed forward lies in the backward of its unit; in a
    reentrant checkpoint, which runs a backward of its own, before it."""

    def check_replicas(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        timeline = expect_unchanged(Net, zeroshard.ZERO3, rank, mesh)
        replicas = [e for e in timeline.events if e.kind == "collective" and e.name == "reduce_replicas"]
        assert len(replicas) == 2 * len(UNITS)

    def check_recomputed(rank: int) -> None:
        for model in (Checkpointed, Reentrant):
            events = expect_unchanged(model, zeroshard.ZERO3, rank).events
            forwards = [event for event in events if event.kind == "forward" and event.unit == "blocks.1"]
            assert len(forwards) == 4
            begin, end = forwards[1].host
            backward = [event for event in events if event.kind == "backward"]
            around = [event.unit for event in backward if event.host[0] < begin and end < event.host[1]]
            following = next(event.unit for event in backward if event.host[0] > end)
            assert (around, following) == ([], "blocks.1") if model.reentrant else (["blocks.1"], "blocks.0")

    run_ranks(check_replicas, 4)
    run_ranks(check_recomputed, 2)


class Queue:
    """A device that comes to each event 1 s later than the host, and 2 s later per event before it."""

    def __init__(self) -> None:
        self.events: list[Late] = []
        self.done = 0

    def event(self) -> Any:
        self.events.append(Late(self, 1.0 + 2.0 * len(self.events)))
        return self.events[-1]

    def synchronize(self) -> None:
        self.done = len(self.events)


class Late:
    def __init__(self, queue: Queue, seconds: float) -> None:
        self.queue, self.number, self.seconds = queue, len(queue.events), seconds

    def elapsed_time(self, later: Late) -> float:
        assert later.number < self.queue.done, "the device has not come to this event"
        return (later.seconds - self.seconds) * 1000


def test_a_device_has_times_of_its_own(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        model = make(Net)
        handle = zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        queue = Queue()
        handle.comm_log.clear()
        with patch.object(timelines, "_device_of", lambda mesh: queue), handle.timeline() as timeline:
            loss_of_tokens(model, rank, 0, 0).backward()
            optimizer.step()
        events = timeline.events
        assert len(queue.events) == 2 + sum(1 + event.is_complete for event in events)
        # Times of the device are those of its events, in the order in which they were recorded: 2 s apart.
        marks = sorted(time for event in events for time in event.device or ())
        assert marks[0] == 2.0 and timeline.seconds == 2.0 * (len(queue.events) - 1) == marks[-1] + 2.0 * all(
            event.is_complete for event in events
        )
        assert all(event.times == event.device and event.seconds >= 2.0 for event in events)
        expect_nested([event.times for event in events if event.kind != "collective"])
        # Weights of ZERO2 are gathered in the step and arrive in the next forward.
        open_ = [event for event in events if not event.is_complete]
        assert all(event.name == "all_gather" and event.times[1] == timeline.seconds for event in open_)
        for path in (tmp_path / f"{rank}.json", tmp_path / f"{rank}.json.gz"):
            timeline.export_chrome_trace(path)
        trace = json.loads((tmp_path / f"{rank}.json").read_text())
        assert trace == json.loads(gzip.decompress((tmp_path / f"{rank}.json.gz").read_bytes()))
        found = [one for one in trace["traceEvents"] if one["ph"] == "X"]
        assert len(found) == 2 * len(events) and {one["pid"] for one in found} == {rank}
        names = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
        assert {name.split(",")[0] for name in names.values()} == {"host", "device"}
        for tid in names:
            expect_nested([(one["ts"], one["ts"] + one["dur"]) for one in found if one["tid"] == tid])
        sent = sum(one["args"]["bytes"] for one in found if names[one["tid"]].startswith("host, in flight"))
        assert sent == handle.comm_log.bytes()
        lines = timeline.summary().splitlines()
        assert lines[0] == f"timeline of {timeline.title}"
        assert any(line.startswith("collective  reduce_scatter") for line in lines)
        assert lines[-1].startswith(f"{timeline.seconds:.4f} s, in waits: {timeline.seconds_in('wait'):.4f} s (")

    run_ranks(check, 2)


def test_one_timeline_at_a_time_of_one_block_each() -> None:
    def check(rank: int) -> None:
        models = [make(Net), make(Net)]
        handles = [zeroshard.shard(model, "zero3", units=Block) for model in models]
        timeline = handles[0].timeline()
        for read in (
            lambda: timeline.events,
            lambda: timeline.seconds,
            timeline.summary,
            lambda: timeline.seconds_in("wait"),
        ):
            with pytest.raises(RuntimeError, match="this timeline is not recorded yet: read it after its block"):
                read()

        def fail() -> None:
            with timeline:
                for model in models:  # all models of the process are recorded
                    model(torch.zeros(1, 2, dtype=torch.int64))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert len([e for e in timeline.events if e.kind == "forward"]) == 8 and all(
            e.is_complete for e in timeline.events
        )
        with pytest.raises(RuntimeError, match="this timeline has recorded its block"), timeline:
            pass
        with handles[1].timeline() as empty:
            for other in handles:
                with pytest.raises(RuntimeError, match="a timeline of this process is being recorded"):
                    other.timeline().__enter__()
        with pytest.raises(ValueError, match=r"expected kinds out of forward, .*, found \('waits',\)"):  # it was 0.0
            empty.seconds_in("waits")
        assert empty.events == () and empty.seconds > 0 and "in waits: 0.0000 s (0%)" in empty.summary()
        skips = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
        skips[0].unused = nn.Parameter(torch.ones(2))
        with zeroshard.shard(skips, "zero3", units=nn.Identity).timeline() as timeline:
            skips(torch.ones(1, 2, requires_grad=True)).sum().backward()  # a module returns an input without a node
        assert {event.unit for event in timeline.events if event.kind == "forward"} == {"0", "root"}
        handles[0].close()
        with pytest.raises(RuntimeError, match="timeline: this handle is closed"):
            handles[0].timeline()

    run_ranks(check, 1)


def test_spans_and_lanes() -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (5.0, 6.0), (5.5, 7.0), (4.0, 4.5)]
    assert covered(spans) == 6.5 and covered([]) == 0.0
    assert lanes(spans) == [0, 1, 0, 1, 0] and lanes([]) == []
