"""Estimates the time of a step: the alpha-beta model of messages, and the overlap of messages with computation.

A message takes `latency + bytes / bandwidth` (alpha and beta; Hockney, 1994). A ring over n ranks is a sequence of
n - 1 messages of an n-th each. Units compute one after the other; backward takes twice as long as forward. Gathers run
in sequence, and reductions run in sequence beside them, as on two communicators of NCCL. Rows of an embedding are
looked up, which takes no time; what else the root unit has (a head) computes behind the last unit:

    compute   | forward u1 | forward u2 | ...                | backward u2 | backward u1 |        | step
    gathers   | u1 | u2        | u3                          | u2 | u1                                   | weights |
    reductions                                                             | u2   | u1            |
                                                                            exposed until here ---|

This is a model, not a measurement: compute time is proportional to a unit's elements, and messages and computation do
not slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.comm.comm_log import CommEvent
from zeroshard.errors import InvalidValue
from zeroshard.model.unit_spec import in_order_of_reduction
from zeroshard.placement import REPLICATED
from zeroshard.planned.training import Training

FORWARD, BACKWARD = 2, 4
"""Floating-point operations per weight element and token."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The rates of a machine: those that are reached in practice, not those of the data sheet.

    Attributes:
        flops: floating-point operations per second of one rank.
        memory: bytes per second that one rank reads and writes in an optimizer step.
        latency: seconds per message inside a node, in addition to its bytes.
        bandwidth: bytes per second that a rank sends inside a node.
        node: number of ranks per node.
        far_latency, far_bandwidth: the same between nodes.
        overlaps: whether messages move while a rank computes.

    Raises:
        ValueError: a rate is not positive, or a latency is negative.
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
            if not getattr(self, name) > 0:
                raise InvalidValue(f"{name} of a machine must be positive, found {getattr(self, name)}")
        for name in ("latency", "far_latency", "far_bandwidth"):
            if not getattr(self, name) >= 0:
                raise InvalidValue(f"{name} of a machine must be at least 0, found {getattr(self, name)}")

    def seconds(self, num_bytes: int, ranks: int, among: int = 0) -> float:
        """The time of a ring over `ranks` ranks in which each sends `num_bytes`. `among`: over how many neighbours they
        are spread; 0: they are neighbours."""
        if ranks == 1 or not num_bytes:
            return 0.0
        latency, bandwidth = self.rates(among or ranks)
        return (ranks - 1) * latency + num_bytes / bandwidth

    def rates(self, ranks: int) -> tuple[float, float]:
        """Latency and bandwidth of a ring over `ranks` ranks."""
        if ranks <= self.node:
            return self.latency, self.bandwidth
        return self.far_latency or self.latency, self.far_bandwidth or self.bandwidth


MACHINES: dict[str, Machine] = {
    # bf16 at 40 % of 989 TFLOP/s; NVLink 4 (450 GB/s in one direction) at 70 %; HBM3 (3.35 TB/s) at 70 %
    "node": Machine(flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11),
    # the same nodes, with one 400 Gb/s adapter per GPU, at 85 %
    "nodes-400": Machine(
        flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11, far_latency=1.5e-5, far_bandwidth=4.2e10
    ),
    # the same nodes, with one 100 Gb/s adapter for eight GPUs
    "nodes-100": Machine(
        flops=4.0e14, memory=2.3e12, latency=3e-6, bandwidth=3.2e11, far_latency=3e-5, far_bandwidth=1.3e9
    ),
    # processes of one machine without a GPU, one core each: a core that copies bytes cannot compute
    "cpu": Machine(flops=4.0e10, memory=8.0e9, latency=2e-4, bandwidth=4.0e9, node=64, overlaps=False),
}
"""Presets. For your own machine, make a `Machine` with the rates that you have measured."""


def as_machine(machine: Machine | str) -> Machine:
    """A machine, or the preset of that name.

    Raises:
        ValueError: there is no such preset.
    """
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise InvalidValue(f"machine must be one of {', '.join(MACHINES)}, found {machine!r}")
    return MACHINES[machine]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by the model.

    Attributes:
        compute: forward and backward of all micro-batches.
        update: the optimizer's step.
        communication: the sum of all messages.
        exposed: the part of `communication` that computation does not hide.
    """

    compute: float
    update: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        return self.compute + self.update + self.exposed


def message_seconds(training: Training, events: Mapping[CommEvent, int], machine: Machine) -> float:
    """The sum of all messages of a step: `StepTime.communication`, which depends on no tokens."""
    return _Messages.of(training, events, machine).total


@dataclass(frozen=True)
class Span:
    """A part of a step: seconds from its begin. `lane`: "compute", "gathers", "reductions" or "others"; `phase`:
    "forward", "backward" or "step"."""

    lane: str
    unit: str
    phase: str
    start: float
    stop: float


class StepModel:
    """A step in time, by the model."""

    def __init__(
        self,
        training: Training,
        events: Mapping[CommEvent, int],
        machine: Machine,
        *,
        tokens: int,
        micro_batches: int,
        recompute: bool,
        looked_up: Collection[str],
    ) -> None:
        """
        Args:
            events: the messages of a step: event -> how often.
            tokens: in one micro-batch of one rank.
            recompute: whether forward runs a second time in backward.
            looked_up: names of the parameters that are not multiplied with each token: embeddings.
        """
        self._runs = _runs(training, machine, tokens, micro_batches, recompute, looked_up)
        self._messages = _Messages.of(training, events, machine)
        self._update = _bytes_of_update(training) / machine.memory
        self._micro_batches, self._overlaps = micro_batches, machine.overlaps

    def time(self) -> StepTime:
        """Seconds of the step, in four parts."""
        exposed = communication = self._messages.total
        if self._overlaps:
            exposed = min(exposed, self._messages.exposed(self._runs, self._micro_batches))
        return StepTime(sum(run.seconds for run in self._runs), self._update, communication, exposed)

    def timeline(self) -> tuple[Span, ...]:
        """When each unit computes, and when its messages are under way; the last span ends at `time().total`."""
        spans = list(self._messages.schedule(self._runs, self._micro_batches))
        if not self._overlaps:
            spans = _one_after_the_other(spans)
        end = max((span.stop for span in spans), default=0.0)
        others = self._messages.others
        return (
            *spans,
            Span("others", "control and owners", "step", end, end + others),
            Span("compute", "update", "step", end + others, end + others + self._update),
        )


def _one_after_the_other(spans: Sequence[Span]) -> list[Span]:
    """The spans without overlap, in the order in which they start; of equal ones, messages first."""
    now, result = 0.0, []
    for span in sorted(spans, key=lambda one: (one.start, one.lane == "compute")):
        result.append(replace(span, start=now, stop=now + span.stop - span.start))
        now = result[-1].stop
    return result


def multiplied(training: Training, looked_up: Collection[str]) -> dict[str, int]:
    """Unit -> elements of its weights that a forward multiplies with each token."""
    return {
        unit.spec.name: sum(
            math.prod(shape)
            for name, shape in zip(unit.spec.names, unit.spec.shapes, strict=True)
            if name not in looked_up
        )
        for unit in training.units
    }


def _runs(
    training: Training, machine: Machine, tokens: int, micro_batches: int, recompute: bool, looked_up: Collection[str]
) -> list[_Computation]:
    """The computations of a step, in their order."""
    again = (BACKWARD + FORWARD * recompute) / FORWARD
    elements = multiplied(training, looked_up)
    forward = [
        _Computation(name, "forward", FORWARD * number * tokens / machine.flops) for name, number in elements.items()
    ]
    roots = {unit.spec.name for unit in training.units if unit.spec.of_root and not unit.spec.is_part}
    late = [run for run in forward if run.unit in roots] if len(roots) < len(forward) else []
    early = [replace(run, seconds=0.0, ends=False) if run in late else run for run in forward]
    forward = [*early, *(replace(run, begins=False) for run in late)]
    backward = [replace(run, phase="backward", seconds=run.seconds * again).reversed() for run in reversed(forward)]
    return [*forward, *backward] * micro_batches


def _bytes_of_update(training: Training) -> int:
    """Bytes that a step reads and writes: of the part of main that this rank updates, gradients once, main and state
    twice, and weights once that are written after main."""
    total = 2 * training.stepped().state
    for unit in training.units:
        if unit.spec.trainable:
            precision, weight = unit.spec.precision, unit.spec.weight_dtype.itemsize
            of_element = precision.grad.itemsize + weight
            if precision.weights_are_main:
                of_element += weight
            elif precision.main == "remainder":
                of_element += weight + 2 * 2  # main is joined from both, and split again
            else:
                of_element += 2 * precision.main_dtype.itemsize
            total += unit.main_part(training.rank).numel * of_element
    return total


@dataclass(frozen=True)
class _Computation:
    """The computation of one unit in one phase, or a part of it. `begins`: it is the first part, which needs weights;
    `ends`: the last one, which completes the gradients."""

    unit: str
    phase: str
    seconds: float
    begins: bool = True
    ends: bool = True

    def reversed(self) -> _Computation:
        return replace(self, begins=self.ends, ends=self.begins)


@dataclass(frozen=True)
class _Messages:
    """Seconds of a step's messages. `of_units`: (kind, unit, phase) -> seconds, in the order of the units. `others`:
    messages that nothing hides: control exchanges, and whole parameters to and from their owners. `order`: of the
    reductions."""

    of_units: Mapping[tuple[str, str, str], float]
    others: float
    order: tuple[str, ...]

    @classmethod
    def of(cls, training: Training, events: Mapping[CommEvent, int], machine: Machine) -> _Messages:
        topology, of_units, others = training.topology, dict[tuple[str, str, str], float](), 0.0
        world = topology.num_shards * topology.num_replicas
        ranks_of = {"reduce_replicas": (topology.num_replicas, world), "exchange": (world, world)}
        for event, number in events.items():
            ranks, among = ranks_of.get(event.op, (topology.num_shards, topology.num_shards))
            seconds = number * machine.seconds(event.bytes, ranks, among)
            if event.op in ("exchange", "all_to_all"):
                others += seconds
            else:
                is_gather = event.op == "all_gather" and not (
                    event.phase == "backward" and training.plan.mean is REPLICATED
                )
                key = "gather" if is_gather else "reduce", event.unit, event.phase
                of_units[key] = of_units.get(key, 0.0) + seconds
        return cls(of_units, others, tuple(unit.spec.name for unit in in_order_of_reduction(training.units)))

    @property
    def total(self) -> float:
        return sum(self.of_units.values()) + self.others

    def exposed(self, runs: Sequence[_Computation], micro_batches: int) -> float:
        """The seconds for which computation waits for messages."""
        end = max((span.stop for span in self.schedule(runs, micro_batches)), default=0.0)
        return end - sum(run.seconds for run in runs) + self.others

    def schedule(self, runs: Sequence[_Computation], micro_batches: int) -> Iterator[Span]:
        """Computations and messages in time, without those of `others`.

        Args:
            runs: of all units, in the order in time. While one computes, the next unit's weights are gathered.
        """

        def of(kind: str, run: _Computation, phase: str = "") -> float:
            return self.of_units.get((kind, run.unit, phase or run.phase), 0.0) / (1 if phase else micro_batches)

        def message(lane: str, run: _Computation, phase: str, start: float, seconds: float) -> Iterator[Span]:
            if seconds:
                yield Span(lane, run.unit, phase, start, start + seconds)

        now = reduced = followed = 0.0  # `followed`: when the weights updated by the last step have been gathered
        gathered = of("gather", runs[0]) if runs else 0.0
        yield from message("gathers", runs[0], runs[0].phase, 0.0, gathered) if runs else ()
        has_followed = set[str]()
        complete: dict[str, _Computation] = {}
        queue: list[str] = []  # the units that this backward has not reduced yet
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            if run.unit not in has_followed:
                has_followed.add(run.unit)
                yield from message("gathers", run, "step", followed, of("gather", run, "step"))
                followed += of("gather", run, "step")
                now = max(now, followed)
            now = max(now, gathered)
            if following is not None and following.begins:
                gathered = now + of("gather", following)
                yield from message("gathers", following, following.phase, now, of("gather", following))
            if run.seconds:
                yield Span("compute", run.unit, run.phase, now, now + run.seconds)
            now += run.seconds
            if run.phase == "backward" and run.ends:
                complete[run.unit] = run
                queue = queue or list(self.order)
                while queue and queue[0] in complete:
                    ready, start = complete.pop(queue.pop(0)), max(reduced, now)
                    reduced = start + of("reduce", ready)
                    yield from message("reductions", ready, ready.phase, start, of("reduce", ready))
