"""The forecast for one rank, as `plan` (`forecasting.py`) makes it: memory by phase, messages, files, time, hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from zeroshard.checkpoint.writer import FilePlan
from zeroshard.comm.comm_log import CommEvent
from zeroshard.errors import InvalidValue
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.placement import Plan
from zeroshard.planned.parts import Bytes, Topology
from zeroshard.planned.training import Training, fullest_rank
from zeroshard.planning.activations import Trace
from zeroshard.planning.configuration import Configuration
from zeroshard.planning.disk import Checkpoint
from zeroshard.planning.hints import MACHINE, WORTH_IT, Gathers, Hint, shards_to_use
from zeroshard.planning.moments import Moment
from zeroshard.planning.time_model import Machine, Span, StepModel, StepTime, as_machine, message_seconds
from zeroshard.planning.traffic import Gathered


@dataclass(frozen=True)
class Phase:
    """The most that one rank holds in a phase.

    Attributes:
        held: by the engine, as `handle.memory()` counts it.
        copies: further bytes. full_state_dict: the returned values. save in the background: the copied values. save,
            load: one block. init, state_dict, close: how much more is there than `held` when most is there (see
            `whole_model.py`); none in "init" if the model is on the meta device.
    """

    held: Bytes
    copies: int = 0

    @property
    def num_bytes(self) -> int:
        return self.held.sum + self.copies


@dataclass(frozen=True)
class Forecast:
    """The forecast for one rank. Activations and inputs are included if the configuration has a workload. Memory that
    kernels allocate internally is not.

    Attributes:
        configuration: what was planned.
        num_parameters: elements of all parameters.
        num_units: number of units.
        buffers: bytes of the model's buffers (statistics, masks), which each rank holds beside all that is planned.
        ignored: bytes of the ignored parameters, and of their gradients where they train, which each rank holds beside
            all that is planned. (The state of the user's own optimizer of them comes in addition.)
        phases: by name: "init" (model sharded, optimizer built), "load" (into a model that has not been trained),
            "forward", "backward", "step", "between steps" (from the second step on), "full_state_dict", "state_dict",
            "close", each of these three "elsewhere" (with `device=` another device, or `rank0_only` on other ranks),
            "save", "save in the background".
        state: key ("exp_avg", ...) -> bytes of optimizer state, including scalars.
        padding, padding_of_all: bytes of weights, gradients and main between steps that belong to no parameter: on the
            rank, and on all ranks together.
        events: what the rank sends in a step, from the second step on: event, as in `handle.comm_log` -> how often.
        file: the rank's file in a checkpoint.
        checkpoint: the checkpoint that a save would write.
        chosen: the units before small ones are merged for this number of ranks.
        training: the units and their layouts.
        again: plans the same model in another configuration.
        trace: of one micro-batch, if there is a workload.
        moments: of a step, if there is a workload.
        looked_up: names of the embeddings, whose rows are not multiplied with each token.
    """

    configuration: Configuration
    num_parameters: int
    num_units: int
    buffers: int
    ignored: int
    phases: Mapping[str, Phase]
    state: Mapping[str, int]
    padding: int
    padding_of_all: int
    events: Mapping[CommEvent, int]
    chosen: Sequence[UnitSpec] = field(repr=False)
    training: Training = field(repr=False)
    file: FilePlan = field(repr=False)
    checkpoint: Checkpoint = field(repr=False)
    again: Callable[[Configuration], Forecast] = field(repr=False)
    trace: Trace | None = None
    moments: tuple[Moment, ...] = ()
    looked_up: frozenset[str] = frozenset()

    def elsewhere(self, plan: Plan, topology: Topology) -> Training:
        """The same units and optimizer under another plan, or on another mesh."""
        of, chosen = self.training, self.configuration
        there = Training.of(topology.units(self.chosen), plan, topology, of.optimizer)
        calls = None if self.trace is None else self.trace.calls
        gathered = Gathered.of(there, chosen.micro_batches, calls, no_sync=chosen.accumulates_locally)
        return replace(there, gradients=of.gradients, gathered_apart=gathered.apart)

    @property
    def file_bytes(self) -> int:
        """Of the rank's file in a checkpoint."""
        return self.file.num_bytes

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of all files of a checkpoint and their indices, without the manifest. (Takes as long as planning them.)"""
        return self.checkpoint.num_bytes(self.configuration.rank)

    @property
    def index_bytes(self) -> int:
        """Of the index of the rank's file in a checkpoint."""
        return self.file.index_bytes

    @property
    def manifest_bytes(self) -> int:
        """Of a checkpoint's manifest, without hyper-parameters, `extra` and versions. (Takes as long as writing it.)"""
        return self.checkpoint.manifest_bytes(self.configuration.rank)

    @property
    def padding_share(self) -> float:
        """The share of padding in the full buffers of all units: what an exchange moves for nothing."""
        numel = sum(unit.layout.numel for unit in self.training.units)
        return sum(one.numel for unit in self.training.units for one in unit.layout.padding) / max(numel, 1)

    @property
    def at_rest(self) -> Bytes:
        """The bytes held between steps."""
        return self.phases["between steps"].held

    @property
    def busiest(self) -> str:
        """The phase of a step in which the engine holds most."""
        return max(("forward", "backward", "step"), key=lambda name: self.phases[name].num_bytes)

    @property
    def peak(self) -> int:
        """The most bytes that the engine holds in a step."""
        return self.phases[self.busiest].num_bytes

    @property
    def whole_peak(self) -> int:
        """The most bytes in a step, with the activations and inputs of the workload, if there is one."""
        return max((moment.num_bytes for moment in self.moments), default=self.peak)

    def time(self, machine: Machine | str, tokens: int | None = None) -> StepTime:
        """An estimate of the time of a step, by a model (see `time_model.py`), not by a measurement.

        Args:
            machine: rates, or the name of a preset.
            tokens: in one micro-batch of this rank; None: those of the workload.

        Raises:
            ValueError: an unknown preset; the number of tokens is not known.
        """
        return self._step(machine, tokens).time()

    def timeline(self, machine: Machine | str, tokens: int | None = None) -> tuple[Span, ...]:
        """The same step in time, by the same model: computations and messages with their begin and end."""
        return self._step(machine, tokens).timeline()

    def _step(self, machine: Machine | str, tokens: int | None) -> StepModel:
        workload = self.configuration.workload
        if tokens is None:
            tokens = workload.num_tokens if workload is not None else 0
        if not tokens > 0:
            raise InvalidValue(
                f"the time of a step depends on the tokens of a micro-batch, found {tokens}: pass tokens=..., from 1"
            )
        return StepModel(
            self.training,
            self.events,
            as_machine(machine),
            tokens=tokens,
            micro_batches=self.configuration.micro_batches,
            recompute=workload is not None and workload.recompute,
            looked_up=self.looked_up,
        )

    def hints(self, machine: Machine | str = MACHINE) -> tuple[Hint, ...]:
        """Advice: a 2-D mesh, if gathers over all ranks are mostly latency (see `hints.py`); usually none.

        Raises:
            ValueError: an unknown preset.
        """
        machine = as_machine(machine)
        gathers = Gathers.of(self.training, self.events)
        shards = shards_to_use(self.training, gathers, machine)
        if shards is None:
            return ()
        replicas = self.configuration.ranks // shards
        there = self.again(replace(self.configuration, replicas=replicas, workload=None))
        seconds, seconds_there = (message_seconds(one.training, one.events, machine) for one in (self, there))
        if seconds_there > WORTH_IT * seconds:
            return ()
        message, share = round(gathers.message(gathers.ranks)), gathers.latency_share(machine, gathers.ranks)
        return (Hint(replicas, shards, message, share, seconds, seconds_there, self.peak, there.peak),)

    @cached_property
    def fullest(self) -> Forecast:
        """The same on the rank that holds most, which may own more whole parameters than the others (see
        `fullest_rank`); this one if the ranks differ only by padding and scalars."""
        rank = self.configuration.rank - self.training.rank + fullest_rank(self.training)
        return self if rank == self.configuration.rank else self.again(replace(self.configuration, rank=rank))

    @property
    def sent(self) -> int:
        """Bytes sent in a step."""
        return sum(event.bytes * times for event, times in self.events.items())

    @property
    def largest_message(self) -> int:
        """The most bytes that one collective sends."""
        return max((event.bytes for event in self.events), default=0)
