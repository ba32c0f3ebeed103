"""Finds the configurations that fit into a number of bytes per rank, cheapest in communication first; says why others
do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zeroshard.errors import InvalidValue
from zeroshard.io.logger import LOGGER
from zeroshard.model.casting import Precisions
from zeroshard.model.managed import Managed
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.model.unit_spec import UnitSpec
from zeroshard.model.units import choose_units
from zeroshard.placement import PLANS, SHARDED, Plan
from zeroshard.planning.activations import Workload
from zeroshard.planning.configuration import Configuration
from zeroshard.planning.forecast import Forecast
from zeroshard.planning.forecasting import as_configuration, plan
from zeroshard.planning.in_words import in_units
from zeroshard.planning.once import traced_once
from zeroshard.planning.time_model import Machine
from zeroshard.precision import MixedPrecision

UNIT_BYTES = (512 << 20, 32 << 20, 8 << 20)
"""Sizes of units that are tried if they change the result."""
PRECISIONS = ("bf16", "bf16-remainder", "fp32")
"""Precisions that are tried. ("fp16" holds and sends what "bf16" does.)"""
KINDS_IN_WORDS = {
    "weights": "weights",
    "grads": "gradients",
    "main": "main weights",
    "state": "optimizer state",
    "ring": "gathered weights",
    "buckets": "gradient buckets",
    "scratch": "scratch",
}


@dataclass(frozen=True)
class Candidate:
    """A configuration that was tried. `spare`: the budget minus the most bytes of a step; negative: it does not fit."""

    forecast: Forecast
    spare: int

    @property
    def fits(self) -> bool:
        return self.spare >= 0

    @property
    def reason(self) -> str:
        """Why it does not fit: by how many bytes, in which phase, and the largest kinds of memory. "" if it fits."""
        if self.fits:
            return ""
        phase, held, activations = self.forecast.busiest, self.forecast.phases[self.forecast.busiest].held, 0
        if self.forecast.moments:
            moment = max(self.forecast.moments, key=lambda one: one.num_bytes)
            phase, held, activations = moment.phase, moment.engine, moment.activations
        kinds = vars(held) | {"activations": activations}
        of_kinds = sorted(((num_bytes, kind) for kind, num_bytes in kinds.items()), reverse=True)
        most = ", ".join(f"{KINDS_IN_WORDS.get(kind, kind)} {in_units(size)}" for size, kind in of_kinds[:2] if size)
        return f"{in_units(-self.spare)} too much in {phase}: {most}"


@traced_once()
def fit(
    model: nn.Module,
    budget: int,
    configuration: Configuration | None = None,
    *,
    plans: Plan | str | int | Iterable[Plan | str | int] = tuple(PLANS),
    precisions: MixedPrecision | str | Iterable[Precisions] | None = None,
    sizes: Sequence[int] | None = None,
    replicas: Sequence[int] = (),
    splits: Sequence[tuple[int, Workload]] = (),
) -> list[Candidate]:
    """Plan all combinations of plans, precisions, units and meshes (with and without recomputation, if there is a
    workload without it). The result is in the order of `cheapest_first`.

    Args:
        model: on any device, also the meta device.
        budget: bytes on each rank for everything that is planned of a step. Without a workload that is only what the
            engine holds: leave room for activations. Other phases may hold more (`Forecast.phases`): "init", if the
            model is not on the meta device, and full state on this device.
        configuration: all other settings. Where whole parameters have owners, the rank that holds most is planned.
        plans: to try.
        precisions: to try; None: the one of the configuration, or if it has none, those of PRECISIONS that the model
            takes (a warning names the others).
        sizes: sizes of units in bytes, which are tried in addition to the configuration's units under the plans that
            hold full units only for a while; None: UNIT_BYTES if the configuration chooses no units, else no others.
        replicas: numbers of replicas, tried in addition to the configuration's under the plans that shard weights.
        splits: other ways to divide the same sequences: (number of micro-batches instead of one of the configuration's,
            the workload of each). Where a combination does not fit, they are tried in this order until one fits: each
            with the configuration's schedule of reductions, then with a reduction in every micro-batch, if that holds
            less.

    Raises:
        ValueError: the budget is below 1; or as `plan`.
        TypeError: as `plan`.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= 1:
        raise InvalidValue(f"the budget must be at least one byte, found {budget!r}")
    given = as_configuration("fit", model, configuration)
    plans = [plans] if isinstance(plans, (str, int, Plan)) else list(plans)
    if isinstance(precisions, (str, MixedPrecision)):
        precisions = [precisions]
    if sizes is None:
        sizes = UNIT_BYTES if given.units is None else ()
    candidates: list[Candidate] = []
    for precision in _taken(model, given) if precisions is None else precisions:
        choices = _choices(model, replace(given, precision=precision), sizes)
        for chosen in plans:
            for tried in _meshes(replace(given, plan=chosen, precision=precision), choices, replicas):
                for recomputing in _recomputing(tried):
                    candidates += _until_one_fits(model, budget, _divided(recomputing, splits))
    return cheapest_first(candidates)


def cheapest_first(candidates: Iterable[Candidate], machine: Machine | str | None = None) -> list[Candidate]:
    """First those that fit, sorted by bytes sent in a step or, on a machine, by the seconds of communication that
    computation does not hide (ties: without recomputation first, then by bytes held); then the others, the smallest
    excess first."""

    def key(candidate: Candidate) -> tuple[bool, float, bool, int]:
        forecast, workload = candidate.forecast, candidate.forecast.configuration.workload
        cost: float = -candidate.spare
        if candidate.fits:
            cost = forecast.sent if machine is None else forecast.time(machine).exposed
        recomputes = workload is not None and workload.recompute
        return not candidate.fits, cost, recomputes, forecast.whole_peak

    return sorted(candidates, key=key)


def _taken(model: nn.Module, configuration: Configuration) -> list[Precisions]:
    """The precision of the configuration, or those of PRECISIONS that the model takes (if it takes none: the first,
    whose plan raises the error)."""
    if configuration.precision is not None:
        return [configuration.precision]
    taken: list[Precisions] = []
    refused: dict[str, InvalidValue] = {}
    for precision in PRECISIONS:
        try:
            _units_of(model, replace(configuration, precision=precision))
            taken.append(precision)
        except InvalidValue as error:
            refused[precision] = error
    if taken and refused:
        LOGGER.warning("fit: %s not tried: %s", ", ".join(refused), next(iter(refused.values())))
    return taken or [PRECISIONS[0]]


def _choices(model: nn.Module, configuration: Configuration, sizes: Iterable[int]) -> list[UnitPolicy]:
    """The configuration's units, and each size that makes other units than those before it."""
    found: dict[Hashable, UnitPolicy] = {}
    for units in (configuration.units, *sizes):
        specs = _units_of(model, replace(configuration, units=units))
        found.setdefault(tuple(spec.names for spec in specs), units)
    return list(found.values())


def _units_of(model: nn.Module, configuration: Configuration) -> list[UnitSpec]:
    parameters = Managed.without(model, configuration.ignored).parameters(model)
    return choose_units(model, configuration.units, configuration.precision, parameters, configuration.keep_gathered)


def _meshes(
    configuration: Configuration, choices: Sequence[UnitPolicy], replicas: Iterable[int]
) -> Iterator[Configuration]:
    """The configuration on each mesh, with each choice of units that may change the result: only if there are pool
    buffers. Replicas are for gathers that stay inside a node, so only for plans with gathers in forward."""
    plan = configuration.placements
    for number in dict.fromkeys((configuration.replicas, *(replicas if plan.weights is SHARDED else ()))):
        tried = replace(configuration, replicas=number)
        has_buffers = tried.num_shards > 1 and SHARDED in (plan.weights, plan.grads)
        for units in choices if has_buffers else choices[:1]:
            yield replace(tried, units=units)


def _recomputing(configuration: Configuration) -> Iterator[Configuration]:
    """The configuration, and the same with recomputation of every unit."""
    yield configuration
    workload = configuration.workload
    if workload is not None and not workload.recompute:
        yield replace(configuration, workload=replace(workload, recompute=True))


def _divided(configuration: Configuration, splits: Sequence[tuple[int, Workload]]) -> Iterator[Configuration]:
    """The configuration, and the same with more and smaller micro-batches."""
    yield from _schedules(configuration)
    recompute = configuration.workload is not None and configuration.workload.recompute
    for number, workload in splits:
        micro_batches = configuration.micro_batches * number
        workload = replace(workload, recompute=recompute)
        yield from _schedules(replace(configuration, micro_batches=micro_batches, workload=workload))


def _schedules(configuration: Configuration) -> Iterator[Configuration]:
    """The configuration, and the same with a reduction in every micro-batch, which sends more: without it, sharded
    gradients are in full from the first micro-batch to the last."""
    yield configuration
    if configuration.accumulates_locally and configuration.num_shards > 1 and configuration.placements.grads is SHARDED:
        yield replace(configuration, reduce_every_micro_batch=True)


def _until_one_fits(model: nn.Module, budget: int, configurations: Iterable[Configuration]) -> Iterator[Candidate]:
    for configuration in configurations:
        forecast = plan(model, configuration).fullest
        candidate = Candidate(forecast, budget - forecast.whole_peak)
        yield candidate
        if candidate.fits:
            return
