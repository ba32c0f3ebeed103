"""`Configuration`: how a model is to be trained, as `plan` and `fit` take it."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.comm.collectives import transport_named
from zeroshard.comm.transport import TransportName
from zeroshard.errors import InvalidType
from zeroshard.model.casting import Precisions
from zeroshard.model.managed import Ignored
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.model.units import KeepGathered
from zeroshard.placement import Plan, as_plan
from zeroshard.planned.parts import Topology
from zeroshard.planner import expect_device, expect_mesh, expect_number
from zeroshard.planning.activations import Workload
from zeroshard.planning.optimizers import GroupOf, Optimizers


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """How a model is to be trained.

    Attributes:
        plan, units, precision, ignored, keep_gathered: as for `shard`.
        ranks: number of ranks in the world.
        replicas: how many ranks hold the same shard (a 2-D mesh).
        optimizer: a class; its name in `torch.optim` or `zeroshard.optim`, with options: "SGD:momentum=0.9"; or
            several, "Muon+AdamW": each parameter belongs to the first class that accepts it.
        group_of: (name, parameter) -> its param group, if the optimizer has several.
        micro_batches: forward and backward passes per step.
        reduce_every_micro_batch: True: gradients are reduced in each of them; False: only in the last (`no_sync`).
        loss_scales: number of loss scales in use; None: one if weights are fp16, else none.
        device: "cuda" or "cpu".
        transport: as for `plan_memory`; None: "native" on a GPU, "shared" on a CPU.
        rank: the rank that is planned.
        workload: one micro-batch, to plan activations; None: only the engine is planned.

    Raises:
        ValueError: the numbers do not form a mesh; an unknown plan, device or transport.
        TypeError: `workload` is not one.
    """

    plan: Plan | str | int = "zero3"
    ranks: int = 1
    replicas: int = 1
    precision: Precisions = None
    optimizer: Optimizers = "AdamW"
    group_of: GroupOf = lambda name, parameter: 0
    units: UnitPolicy = None
    ignored: Ignored = ()
    keep_gathered: KeepGathered = ()
    micro_batches: int = 1
    reduce_every_micro_batch: bool = False
    loss_scales: int | None = None
    device: str = "cuda"
    transport: TransportName | None = None
    rank: int = 0
    workload: Workload | None = None

    def __post_init__(self) -> None:
        expect_number("micro_batches", self.micro_batches, 1)
        expect_mesh(self.ranks, self.replicas, self.rank)
        _ = self.placements
        expect_device("device", self.device)
        if self.loss_scales is not None:
            expect_number("loss_scales", self.loss_scales, 0)
        if self.workload is not None and not isinstance(self.workload, Workload):
            raise InvalidType(f"workload must be a Workload(inputs, loss), found {self.workload!r:.80}")

    @property
    def placements(self) -> Plan:
        """The plan that `plan` names."""
        return as_plan(self.plan, has_replicas=self.replicas > 1)

    @property
    def num_shards(self) -> int:
        return self.ranks // self.replicas

    @property
    def topology(self) -> Topology:
        transport = self.transport or ("native" if self.device == "cuda" else "shared")
        return Topology(self.num_shards, self.replicas, transport_named(transport), self.device)

    @property
    def accumulates_locally(self) -> bool:
        """Whether micro-batches but the last run under `no_sync`."""
        return self.micro_batches > 1 and not self.reduce_every_micro_batch
