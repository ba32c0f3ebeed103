"""A model of how long a step takes: the alpha-beta model of the messages, and which of them computation hides.

A message takes `latency + bytes / bandwidth` (alpha and beta; Hockney, 1994). A ring over n ranks is n - 1 messages one
after the other, of an n-th each. Units compute one after the other, forward, and backward for twice as long; gathers
follow each other on one line of messages, reductions on another, as on two communicators of NCCL:

    compute   | forward u1 | forward u2 | ...                | backward u2 | backward u1 |        | step
    gathers   | u1 | u2        | u3                          | u2 | u1                                   | weights |
    reductions                                                             | u2   | u1            |
                                                                            exposed until here ---|

It is a model, and no measurement: compute is taken as even over a unit's elements, and nothing disturbs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.comm.comm_log import CommEvent
from zeroshard.errors import InvalidValue
from zeroshard.placement import REPLICATED
from zeroshard.planner import Training

FORWARD, BACKWARD = 2, 4
"""Floating-point operations for each element of a weight and token."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a time depends on, as rates that are reached, not those of a data sheet.

    Attributes:
        flops: operations per second of one rank.
        memory: bytes per second that one rank reads and writes while it steps an optimizer.
        latency, bandwidth: seconds of a message beside its bytes, and bytes per second that a rank sends: inside of a
            node.
        node: ranks in one.
        far_latency, far_bandwidth: the same between nodes.
        overlaps: whether messages move while a rank computes.

    Raises:
        ValueError: what is not positive.
    """

    flops: float
    memory: float
    latency: float
    bandwidth: float
    node: int = 8
    far_latency: float = 0.0
    far_bandwidth: float = 0.0
    overlaps: bool = True

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "bandwidth", "node"):
            if getattr(self, name) <= 0:
                raise InvalidValue(f"{name} of a machine must be positive, found {getattr(self, name)}")

    def seconds(self, num_bytes: int, ranks: int) -> float:
        """Of a ring over so many ranks, in which each sends so many bytes."""
        if ranks == 1 or not num_bytes:
            return 0.0
        is_far = ranks > self.node
        latency = self.far_latency or self.latency if is_far else self.latency
        bandwidth = self.far_bandwidth or self.bandwidth if is_far else self.bandwidth
        return (ranks - 1) * latency + num_bytes / bandwidth


MACHINES: dict[str, Machine] = {
    # bf16 at 40 % of 989 TFLOP/s; NVLink 4 (450 GB/s in one direction) at 70 %; HBM3 (3.35 TB/s) at 70 %
    "node": Machine(flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11),
    # the same with one 400 Gb/s adapter for each GPU, at 85 %
    "nodes-400": Machine(
        flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11, far_latency=1.5e-5, far_bandwidth=4.2e10
    ),
    # with one 100 Gb/s adapter for eight GPUs
    "nodes-100": Machine(
        flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11, far_latency=3e-5, far_bandwidth=1.3e9
    ),
    # processes of one machine without a GPU, a core each: who moves bytes does not compute
    "cpu": Machine(flops=4.0e10, memory=8.0e9, latency=2e-4, bandwidth=4.0e9, node=64, overlaps=False),
}
"""Presets. Yours is a `Machine` with the rates that you have measured."""


def machine_named(name: str) -> Machine:
    """
    Raises:
        ValueError: there is no such preset.
    """
    if name not in MACHINES:
        raise InvalidValue(f"machine must be one of {', '.join(MACHINES)}, found {name!r}")
    return MACHINES[name]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by the model.

    Attributes:
        compute: forward and backward of all micro-batches.
        update: the optimizer's step.
        communication: of all messages, one after the other.
        exposed: how much of it nothing hides.
    """

    compute: float
    update: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.update + self.exposed


def step_time(
    training: Training,
    events: Mapping[CommEvent, int],
    machine: Machine,
    *,
    tokens: int,
    micro_batches: int = 1,
    recompute: bool = False,
) -> StepTime:
    """
    Args:
        events: of a step.
        tokens: in one micro-batch of one rank.
        recompute: whether forward runs a second time in backward.
    """
    of_forward = {unit.spec.name: FORWARD * unit.layout.numel * tokens / machine.flops for unit in training.units}
    backward = (BACKWARD + FORWARD * recompute) / FORWARD
    compute = sum(of_forward.values()) * (1 + backward) * micro_batches
    update = _bytes_of_update(training) / machine.memory
    messages = _Messages.of(training, events, machine)
    exposed = messages.total
    if machine.overlaps:
        runs = [Run(unit.spec.name, "forward", of_forward[unit.spec.name]) for unit in training.units]
        back = [Run(run.unit, "backward", run.seconds * backward) for run in reversed(runs)]
        exposed = min(exposed, messages.exposed([*runs, *back] * micro_batches, micro_batches))
    return StepTime(compute, update, messages.total, exposed)


def _bytes_of_update(training: Training) -> int:
    """What a step reads and writes: gradients once, main and state twice, weights once."""
    held = training.held(peak=True)
    return held.grads + 2 * (held.main + held.state) + held.weights


@dataclass(frozen=True)
class Run:
    """A unit computes."""

    unit: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class _Messages:
    """Seconds of a step's messages: `of_units` by (kind, unit, phase), in the order of the units; `others` hide behind
    nothing: what the ranks agree on, and whole parameters on their way to their owners."""

    of_units: Mapping[tuple[str, str, str], float]
    others: float

    @classmethod
    def of(cls, training: Training, events: Mapping[CommEvent, int], machine: Machine) -> _Messages:
        topology, of_units, others = training.topology, dict[tuple[str, str, str], float](), 0.0
        world = topology.num_shards * topology.num_replicas
        ranks_of = {"reduce_replicas": topology.num_replicas, "exchange": world}
        for event, number in events.items():
            seconds = number * machine.seconds(event.bytes, ranks_of.get(event.op, topology.num_shards))
            if event.op in ("exchange", "all_to_all"):
                others += seconds
            else:
                is_gather = event.op == "all_gather" and not (
                    event.phase == "backward" and training.plan.mean is REPLICATED
                )
                key = "gather" if is_gather else "reduce", event.unit, event.phase
                of_units[key] = of_units.get(key, 0.0) + seconds
        return cls(of_units, others)

    @property
    def total(self) -> float:
        return sum(self.of_units.values()) + self.others

    def exposed(self, runs: Sequence[Run], micro_batches: int) -> float:
        """How long computation waits.

        Args:
            runs: of all units, in their order in time. While one computes, the weights of the next one come.
        """

        def of(kind: str, run: Run, phase: str = "") -> float:
            return self.of_units.get((kind, run.unit, phase or run.phase), 0.0) / (1 if phase else micro_batches)

        now = reduced = 0.0
        gathered = of("gather", runs[0]) if runs else 0.0
        followed = 0.0  # until when the weights of the last step come, unit by unit
        has_followed = set[str]()
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            if run.unit not in has_followed:
                has_followed.add(run.unit)
                followed += of("gather", run, "step")
                now = max(now, followed)
            now = max(now, gathered)
            if following is not None:
                gathered = now + of("gather", following)
            now += run.seconds
            if run.phase == "backward":
                reduced = max(reduced, now) + of("reduce", run)
        return max(now, reduced) - sum(run.seconds for run in runs) + self.others
