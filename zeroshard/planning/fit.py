"""Finds the configurations that fit into a number of bytes per rank, sorted by bytes sent; says why others do not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zeroshard.errors import InvalidValue
from zeroshard.model.casting import Precisions
from zeroshard.placement import PLANS, SHARDED, Plan
from zeroshard.planning.activations import Workload
from zeroshard.planning.forecast import Configuration, Forecast, plan

UNIT_BYTES = (512 << 20, 128 << 20, 32 << 20, 8 << 20)
"""Sizes of units that are tried if they change the result."""
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


def fit(
    model: nn.Module,
    budget: int,
    configuration: Configuration | None = None,
    *,
    plans: Iterable[Plan | str | int] = tuple(PLANS),
    precisions: Iterable[Precisions] = (None,),
    splits: Sequence[tuple[int, Workload]] = (),
) -> list[Candidate]:
    """Plan all combinations of plans, precisions and sizes of units (with and without recomputation, if there is a
    workload without it). First those that fit, sorted by bytes sent in a step (ties: without recomputation first, then
    by bytes held); then the others, the smallest excess first.

    Args:
        model: on any device, also the meta device.
        budget: bytes on each rank for everything that is planned. Without a workload that is only what the engine
            holds: leave room for activations.
        configuration: all other settings. If it chooses units, no other sizes are tried.
        plans: to try.
        precisions: to try.
        splits: other ways to divide the same sequences: (number of micro-batches instead of one of the configuration's,
            the workload of each). Where a combination does not fit, they are tried in this order until one fits.

    Raises:
        ValueError: the budget is below 1; or as `plan`.
    """
    if budget < 1:
        raise InvalidValue(f"the budget must be at least one byte, found {budget}")
    given, precisions = configuration or Configuration(), list(precisions)
    candidates: list[Candidate] = []
    for chosen in plans:
        for precision in precisions:
            for tried in _sizes(replace(given, plan=chosen, precision=precision)):
                for recomputing in _recomputing(tried):
                    candidates += _until_one_fits(model, budget, _divided(recomputing, splits))
    return sorted(candidates, key=_order)


def _sizes(configuration: Configuration) -> Iterator[Configuration]:
    """The configuration with each size of units that may change the result: only if there are pool buffers."""
    plan = configuration.placements
    matters = configuration.num_shards > 1 and SHARDED in (plan.weights, plan.grads)
    if configuration.units is not None or not matters:
        yield configuration
        return
    for num_bytes in UNIT_BYTES:
        yield replace(configuration, units=num_bytes)


def _recomputing(configuration: Configuration) -> Iterator[Configuration]:
    """The configuration, and the same with recomputation of every unit."""
    yield configuration
    workload = configuration.workload
    if workload is not None and not workload.recompute:
        yield replace(configuration, workload=replace(workload, recompute=True))


def _divided(configuration: Configuration, splits: Sequence[tuple[int, Workload]]) -> Iterator[Configuration]:
    """The configuration, and the same with more and smaller micro-batches."""
    yield configuration
    recompute = configuration.workload is not None and configuration.workload.recompute
    for number, workload in splits:
        micro_batches = configuration.micro_batches * number
        yield replace(configuration, micro_batches=micro_batches, workload=replace(workload, recompute=recompute))


def _until_one_fits(model: nn.Module, budget: int, configurations: Iterable[Configuration]) -> Iterator[Candidate]:
    for configuration in configurations:
        forecast = plan(model, configuration)
        candidate = Candidate(forecast, budget - forecast.whole_peak)
        yield candidate
        if candidate.fits:
            return


def _order(candidate: Candidate) -> tuple[bool, int, bool, int]:
    peak, workload = candidate.forecast.whole_peak, candidate.forecast.configuration.workload
    recomputes = workload is not None and workload.recompute
    return not candidate.fits, candidate.forecast.sent if candidate.fits else peak, recomputes, peak


def in_units(num_bytes: int) -> str:
    """A number of bytes for people: three digits, in decimal units."""
    size, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 999.5 or unit == "PB":
            break
        size /= 1000
    digits = 0 if unit == "B" or abs(size) >= 99.95 else 1 if abs(size) >= 9.995 else 2
    return f"{size:.{digits}f} {unit}"
