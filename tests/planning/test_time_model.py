"""The modelled time of a step, in small cases that can be computed by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.planning import MACHINES, Configuration, Machine, StepTime

SLOW = Machine(flops=1e9, memory=1e12, latency=0.0, bandwidth=1e6)


def time(plan: str, machine: Machine | str = SLOW, tokens: int = 1000, **options: object) -> StepTime:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    given: dict[str, Any] = {"ranks": 4, "units": nn.Linear, "device": "cpu", "transport": "native", **options}
    configuration = Configuration(plan=plan, **given)
    return zeroshard.plan(model, configuration).time(machine, tokens)


UNIT = 256 * 256
SECONDS = UNIT * 4 * 3 / 4 / 1e6
"""The time of one gather or reduction of a unit."""


def test_compute_and_messages_by_hand() -> None:
    found = time("zero3")
    assert found.compute == pytest.approx(6 * 4 * UNIT * 1000 / 1e9)
    gathers = 4 + 2  # two of the four units are still gathered in backward
    assert found.communication == pytest.approx((gathers + 4) * SECONDS, rel=0.01)
    assert found.total == found.compute + found.update + found.exposed


class Net(nn.Module):
    """An embedding and a head in the root unit, and blocks between them."""

    def __init__(self, tied: bool = False, positions: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256)
        if positions:
            self.positions = nn.Embedding(positions, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.head = nn.Linear(256, 1024, bias=False) if not tied else None


def planned(model: nn.Module, plan: str) -> zeroshard.planning.Forecast:
    blocks = [[f"blocks.{i}"] for i in range(4)]
    configuration = Configuration(plan=plan, ranks=4, units=blocks, device="cpu", transport="native")
    return zeroshard.plan(model, configuration)


def test_an_embedding_is_looked_up_and_a_head_computes_behind_the_last_block() -> None:
    with torch.device("meta"):
        apart, tied = Net(), Net(tied=True)
    blocks, head = (6 * elements * 1000 / 1e9 for elements in (4 * UNIT, 1024 * 256))
    for model in (apart, tied):  # without a head, the embedding may be multiplied by hand
        assert planned(model, "ddp").time(SLOW, 1000).compute == pytest.approx(blocks + head)
    for tied_by_a_module in (False, True):  # positions were multiplied
        with torch.device("meta"):
            model = Net(positions=300)
        if tied_by_a_module:
            cast(nn.Linear, model.head).weight = model.embed.weight
        assert planned(model, "ddp").time(SLOW, 1000).compute == pytest.approx(blocks + head)
    with torch.device("meta"):
        assert planned(Net(tied=True, positions=300), "ddp").time(SLOW, 1000).compute == pytest.approx(blocks + head)
    spans = planned(apart, "zero3").timeline(SLOW, 1_000_000)
    computed = [(span.unit, span.phase) for span in spans if span.lane == "compute"][:-1]
    assert computed == [
        *((f"blocks.{i}", "forward") for i in range(4)),
        ("root", "forward"),
        ("root", "backward"),
        *((f"blocks.{i}", "backward") for i in reversed(range(4))),
    ]
    for lane, phase in (("gathers", "forward"), ("gathers", "backward"), ("reductions", "backward")):
        units = [span.unit for span in spans if (span.lane, span.phase) == (lane, phase)]
        assert len(units) == len(set(units)), "each once"
    first, last = (next(iter(span for span in some if span.unit == "root")) for some in (spans, spans[::-1]))
    reduced = [span for span in spans if span.lane == "reductions"]
    assert first.lane == "gathers" and first.start == 0, "the embedding is needed first"
    assert reduced[-1].unit == "root" and reduced[-1].start >= max(s.stop for s in spans if s.unit == "blocks.0")
    assert last.lane == "reductions"


def test_the_update_reads_and_writes_the_part_of_this_rank() -> None:
    """Gradients once; main, the moments, and weights that are main twice; weights that follow main once."""
    machine = Machine(flops=1e9, memory=1e6, latency=0.0, bandwidth=1e6)
    elements = 4 * UNIT
    for plan, precision, of_element in (
        ("ddp", "fp32", 4 + 2 * (4 + 8)),
        ("zero1", "fp32", (4 + 2 * (4 + 8)) / 4),
        ("zero3", "bf16", (4 + 2 * (4 + 8) + 2) / 4),
        ("zero2", "bf16-remainder", (4 + 2 * (2 + 2 + 8)) / 4),
    ):
        assert time(plan, machine, precision=precision).update == pytest.approx(elements * of_element / 1e6), plan


def test_what_nothing_hides() -> None:
    """Where messages take longer than the computation, only the time of the computation hides them. In any case the
    first gather, the last reduction and the control exchange of the step (6 kB) are exposed."""
    slow = time("zero3", tokens=1)
    assert slow.exposed == pytest.approx(slow.communication, rel=0.6) and slow.exposed < slow.communication
    quick = time("zero3", tokens=1_000_000)
    assert quick.exposed == pytest.approx(2 * SECONDS, rel=0.02)
    assert time("zero1", tokens=1_000_000).exposed == pytest.approx(2 * SECONDS, rel=0.02)
    assert time("ddp", tokens=1_000_000).exposed < 3 * SECONDS


def test_a_machine_that_does_not_overlap_exposes_everything() -> None:
    machine = Machine(flops=1e9, memory=1e12, latency=1e-3, bandwidth=1e6, overlaps=False)
    found = time("zero2", machine)
    assert found.exposed == found.communication > time("zero2").communication


def test_micro_batches_and_recomputation() -> None:
    one, three = time("zero2"), time("zero2", micro_batches=3)
    assert three.compute == pytest.approx(3 * one.compute)
    assert three.communication == pytest.approx(one.communication), "reduced once"


def test_far_ranks_and_presets() -> None:
    machine = MACHINES["nodes-400"]
    assert machine.seconds(10**9, 16) > 5 * machine.seconds(10**9, 8)
    assert machine.seconds(10**9, 1) == 0
    assert all(time("zero3", name).total > 0 for name in MACHINES)


def test_replicas_are_in_other_nodes() -> None:
    """Two replicas of four shards, in two nodes: the reductions between them took the time of messages in a node."""
    near = Machine(flops=1e9, memory=1e12, latency=0.0, bandwidth=1e6, node=4, far_bandwidth=1e4)
    one_node, two = (time("zero3", replace(near, node=node), ranks=8, replicas=2) for node in (8, 4))
    of_replicas = 4 * UNIT / 4 * 4 / 2 * 2  # of each unit the shard, in fp32: half of it to be added, half added
    shorter, longer = of_replicas / 1e6, of_replicas / 1e4
    assert two.communication - one_node.communication == pytest.approx(longer - shorter, rel=0.05), "and control"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"machine must be one of node, .*'abacus'"):
        time("zero3", "abacus")
    with pytest.raises(ValueError, match="pass tokens="):
        time("zero3", tokens=0)
    for tokens in (-5, math.nan):
        with pytest.raises(ValueError, match="pass tokens="):
            time("zero3", tokens=cast(int, tokens))
    for wrong in (0, math.nan):
        with pytest.raises(ValueError, match="flops of a machine must be positive"):
            Machine(flops=wrong, memory=1, latency=0, bandwidth=1)
    for name in ("latency", "far_latency", "far_bandwidth"):
        with pytest.raises(ValueError, match=f"^{name} of a machine must be at least 0"):
            Machine(**{"flops": 1, "memory": 1, "latency": 0, "bandwidth": 1, name: -1})
    with pytest.raises(ValueError, match="machine must be one of"):
        time("zero3", cast(Any, 5))


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_the_timeline_is_the_same_step(plan: str, overlaps: bool) -> None:
    """It ends at the total, its computations do not overlap, and what they leave is exposed."""
    machine = Machine(flops=1e9, memory=1e9, latency=1e-4, bandwidth=1e6, overlaps=overlaps)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    chosen = Configuration(plan=plan, ranks=4, units=nn.Linear, device="cpu", transport="native", micro_batches=2)
    planned = zeroshard.plan(model, chosen)
    spans, step = planned.timeline(machine, 1000), planned.time(machine, 1000)
    assert max(span.stop for span in spans) == pytest.approx(step.total)
    computes = [span for span in spans if span.lane == "compute"]
    assert all(a.stop <= b.start + 1e-9 for a, b in itertools.pairwise(computes))
    idle = step.total - sum(span.stop - span.start for span in computes)
    assert idle == pytest.approx(step.exposed) and idle > 0
    sent = sum(span.stop - span.start for span in spans if span.lane != "compute")
    assert sent == pytest.approx(step.communication)
