"""What `zeroshard plan` prints: tables, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from zeroshard.cli.terminal import say, table
from zeroshard.planning import Candidate, Forecast, Hint
from zeroshard.planning.in_words import in_seconds, in_units

_TABLE = ("plan", "precision", "ranks", "optimizer", "units")
_BYTES = ("weights", "gradients", "main", "state", "transient", "at rest", "at most", "sent a step", "checkpoint")
_WITH_ACTIVATIONS = ("inputs", "activations", "in all")
_RUN = ("recomputed", "micro-batches", "reduced")
_OUTSIDE = {
    "init": "shard() of a model that is not on the meta device",
    "full_state_dict": "full_state_dict()",
    "state_dict": "optimizer.state_dict()",
    "close": "close()",
}
"""Phases that may hold more than a step, as calls."""
_NEGLIGIBLE = 100
"""Buffers are mentioned if they have this part of a plan's bytes: those of most models are a few kB."""
_UNIT = ("unit", "elements", "in_full", "here", "held_in_full")
_TIMES = ("compute", "update", "messages", "exposed", "step")


def show(
    forecasts: list[Forecast],
    *,
    as_json: bool,
    phases: bool,
    modules: bool,
    machine: str | None,
    each_unit: bool,
    rank: int | None,
    **_: Any,
) -> None:
    """Print one row for each forecast, and what else the options ask for."""
    if as_json:
        said = [_as_json(one, machine, each_unit) for one in forecasts]
        for found, one in zip(said, forecasts, strict=True):
            found["hints"] = [vars(hint) | {"text": str(hint)} for hint in _hints(one, machine)]
        say(json.dumps(said, indent=2))
        return
    first = forecasts[0]
    say(f"{first.num_parameters:,} parameters; bytes on rank {first.configuration.rank}, {_what(first)}")
    columns = (*_TABLE, *_BYTES, *(_WITH_ACTIVATIONS if first.trace else ()))
    table(columns, [(*_named(forecast), *map(in_units, _sizes(forecast))) for forecast in forecasts])
    if beyond := _beyond(forecasts):
        say(f"\nat most: in a step; {beyond}")
    if rank is None:
        _show_fullest(forecasts)
    if first.trace is not None and modules:
        table(
            ("module", "holds behind its forward"),
            [(path or "the model", in_units(size)) for path, size in first.trace.modules.items()],
        )
    if machine is not None:
        _show_times(forecasts, machine)
    if each_unit:
        rows = [(name, f"{numel:,}", *map(in_units, sizes), held) for name, numel, *sizes, held in _units_of(first)]
        table(("unit", "elements", "in full", "here", "held in full"), rows)
    for forecast in forecasts if phases else ():
        _show_phases(forecast)
    for forecast in forecasts:
        for hint in _hints(forecast, machine):
            say(f"\nhint: {_in_words(forecast)}: {hint}: --replicas {hint.replicas}")


def _show_phases(forecast: Forecast) -> None:
    say("\n" + " ".join(map(str, _named(forecast)[:4])))
    kinds = list(vars(forecast.at_rest))
    rows = [
        (
            name,
            *(in_units(getattr(phase.held, kind)) for kind in kinds),
            *map(in_units, (phase.copies, phase.num_bytes)),
        )
        for name, phase in forecast.phases.items()
    ]
    table(("phase", *kinds, "copies", "together"), rows)
    say("init: of a model that is on the device in full; built on the meta device, it has no copies")
    state = ", ".join(f"{key} {in_units(num_bytes)}" for key, num_bytes in forecast.state.items()) or "none"
    padding = f"{in_units(forecast.padding)}, of all ranks {in_units(forecast.padding_of_all)}"
    say(f"state: {state}; padding: {padding}; largest message: {in_units(forecast.largest_message)}")


def _beyond(forecasts: list[Forecast], budget: int | None = None) -> str:
    """The phases outside of a step that hold more than a step, or than the budget; "" if there are none."""

    def larger(phase: str) -> list[int]:
        sizes = [(one.phases[phase].num_bytes, budget or one.whole_peak) for one in forecasts]
        return [num_bytes for num_bytes, limit in sizes if num_bytes > limit]

    def in_words(sizes: list[int]) -> str:
        return " to ".join(dict.fromkeys((in_units(min(sizes)), in_units(max(sizes)))))

    found = {name: sizes for name in _OUTSIDE if (sizes := larger(name))}
    elsewhere = [num_bytes for name in found if name != "init" for num_bytes in larger(f"{name} elsewhere")]
    words = ", ".join(f"{_OUTSIDE[name]} {in_words(sizes)}" for name, sizes in found.items())
    if found.keys() - {"init"}:
        words += f" (to another device {in_words(elsewhere) if elsewhere else 'no more than that'})"
    return f"more outside of it: {words}" if found else ""


def _hints(forecast: Forecast, machine: str | None) -> tuple[Hint, ...]:
    return forecast.hints() if machine is None else forecast.hints(machine)


def _units_of(forecast: Forecast) -> Iterator[tuple[str, int, int, int, str]]:
    """For each unit its name, elements, bytes in full and on this rank, and when this rank has it in full."""
    training = forecast.training
    for unit in training.units:
        in_full, here = unit.layout.numel * unit.spec.weight_dtype.itemsize, unit.held(peak=False).weights
        when = "in its own buffer" if unit.spec.outer or unit.spec.stays else "in turns"
        yield unit.spec.name, unit.layout.numel, in_full, here, "always" if here == in_full else when


def _show_times(forecasts: list[Forecast], machine: str) -> None:
    say(f"time of a step on {machine}, by a model; nothing was measured")
    table((*_TABLE, *_TIMES), [(*_named(forecast), *_seconds(forecast, machine)) for forecast in forecasts])


def _seconds(forecast: Forecast, machine: str) -> Iterator[str]:
    """The values of the columns in `_TIMES`."""
    time = forecast.time(machine)
    yield from map(in_seconds, (*vars(time).values(), time.total))


def show_fit(candidates: list[Candidate], *, as_json: bool, budget: int, machine: str | None, **_: Any) -> int:
    """Print the configurations that fit, then those that do not with the reason. Returns the exit code: 1 if nothing
    fits."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    others = [candidate for candidate in candidates if not candidate.fits]
    if as_json:
        said = [
            _as_json(one.forecast, machine) | {"fits": one.fits, "spare": one.spare, "reason": one.reason}
            for one in candidates
        ]
        say(json.dumps(said, indent=2))
        return 0 if fitting else 1
    what = _what(candidates[0].forecast)
    say(f"{len(fitting)} of {len(candidates)} fit into {in_units(budget)} on each rank, {what}")
    if not fitting:
        nearest = others[0].forecast
        run = f"{'units recomputed, ' * bool(_recomputes(nearest))}micro-batches: {nearest.configuration.micro_batches}"
        run += f", reduced {_reduced(nearest)}" * bool(_reduced(nearest))
        say(f"the nearest is {_in_words(nearest)}, {run}: {others[0].reason}")
    if fitting:
        rows = [
            (
                *(*_named(one), *_run(one)),
                *map(in_units, (one.whole_peak, candidate.spare, one.sent, one.largest_message)),
                *(() if machine is None else _seconds(one, machine)),
            )
            for candidate in fitting
            for one in [candidate.forecast]
        ]
        times = () if machine is None else _TIMES
        table((*_TABLE, *_RUN, "at most", "spare", "sent a step", "largest message", *times), rows)
        if beyond := _beyond([candidate.forecast for candidate in fitting], budget):
            say(f"\nthey fit in a step; {beyond}")
        if machine is not None:
            say(f"\ntime of a step on {machine}, by a model; nothing was measured")
    if others:
        rows = [(*_named(c.forecast), *_run(c.forecast), c.reason) for c in others]
        table((*_TABLE, *_RUN, "why it does not fit"), rows)
    return 0 if fitting else 1


def _in_words(forecast: Forecast) -> str:
    plan, precision, mesh, optimizer, units = (f"{v:,}" if isinstance(v, int) else v for v in _named(forecast))
    number, of, size = units.partition(" of ")
    return f"{plan}, {precision}, {mesh} ranks, {optimizer}, {number} units{of}{size}"


def _of_trace(forecast: Forecast) -> dict[str, Any] | None:
    if forecast.trace is None:
        return None
    found = {name: value for name, value in vars(forecast.trace).items() if name != "calls"}
    return found | {"modules": dict(forecast.trace.modules)}


def _named(forecast: Forecast) -> tuple[Any, ...]:
    """The values of the columns in `_TABLE`."""
    chosen = forecast.configuration
    mesh = f"{chosen.replicas} x {chosen.num_shards}" if chosen.replicas > 1 else chosen.ranks
    return chosen.placements.name, chosen.precision or "", mesh, chosen.optimizer, _units_in_words(forecast)


def _units_in_words(forecast: Forecast) -> str:
    units = forecast.configuration.units
    return f"{forecast.num_units} of {in_units(units)}" if isinstance(units, int) else str(forecast.num_units)


def _sizes(forecast: Forecast) -> Iterator[int]:
    rest = forecast.at_rest
    yield from (rest.weights, forecast.phases["backward"].held.grads, rest.main, rest.state + rest.scalars)
    transient = max(phase.held.transient for phase in forecast.phases.values())
    yield from (transient, rest.sum, forecast.peak, forecast.sent, forecast.checkpoint_bytes)
    if forecast.trace is not None:
        yield from (forecast.trace.inputs, forecast.trace.peak, forecast.whole_peak)


def _show_fullest(forecasts: list[Forecast]) -> None:
    """A line for each forecast of which another rank holds more, by what is shown of the numbers."""

    def sizes(one: Forecast) -> str:
        return f"at most {in_units(one.whole_peak)}, at rest {in_units(one.at_rest.sum)}"

    others = [forecast.fullest for forecast in forecasts if sizes(forecast.fullest) != sizes(forecast)]
    for number, one in enumerate(others):
        say("\n" * (not number) + f"{_in_words(one)}: rank {one.configuration.rank} holds most, {sizes(one)}")


def _what(forecast: Forecast) -> str:
    """Says whether the bytes include activations, and what the model's buffers add where they are not negligible."""
    found = "without activations"
    if forecast.trace is not None:
        found = "with activations and inputs, without what kernels allocate for themselves"
    if forecast.buffers * _NEGLIGIBLE <= forecast.whole_peak:
        return found
    return f"{found}, and without the {in_units(forecast.buffers)} of the model's buffers"


def _run(forecast: Forecast) -> tuple[Any, ...]:
    """The values of the columns in `_RUN`."""
    return _recomputes(forecast), forecast.configuration.micro_batches, _reduced(forecast)


def _recomputes(forecast: Forecast) -> str:
    workload = forecast.configuration.workload
    return "units" if workload is not None and workload.recompute else ""


def _reduced(forecast: Forecast) -> str:
    """When gradients are reduced, if there are several micro-batches."""
    if forecast.configuration.micro_batches == 1:
        return ""
    return "once" if forecast.configuration.accumulates_locally else "in each"


def _as_json(forecast: Forecast, machine: str | None, each_unit: bool = False) -> dict[str, Any]:
    name, precision, _, optimizer, _ = _named(forecast)
    chosen = forecast.configuration
    return {
        "plan": name,
        "precision": str(precision),
        "optimizer": str(optimizer),
        "ranks": chosen.ranks,
        "replicas": chosen.replicas,
        "rank": chosen.rank,
        "fullest_rank": forecast.fullest.configuration.rank,
        "fullest_peak": forecast.fullest.whole_peak,
        "micro_batches": chosen.micro_batches,
        "reduce_every_micro_batch": chosen.reduce_every_micro_batch,
        "parameters": forecast.num_parameters,
        "units": forecast.num_units,
        "buffers": forecast.buffers,
        "unit_bytes": chosen.units if isinstance(chosen.units, int) else None,
        "phases": {
            name: vars(phase.held) | {"copies": phase.copies, "together": phase.num_bytes}
            for name, phase in forecast.phases.items()
        },
        "state": dict(forecast.state),
        "padding": forecast.padding,
        "padding_of_all": forecast.padding_of_all,
        "padding_share": forecast.padding_share,
        "events": [[*event, times] for event, times in forecast.events.items()],
        "sent": forecast.sent,
        "largest_message": forecast.largest_message,
        "file_bytes": forecast.file_bytes,
        "checkpoint_bytes": forecast.checkpoint_bytes,
        "index_bytes": forecast.index_bytes,
        "manifest_bytes": forecast.manifest_bytes,
        "recompute": bool(_recomputes(forecast)),
        "activations": _of_trace(forecast),
        "whole_peak": forecast.whole_peak,
        "seconds": None if machine is None else vars(forecast.time(machine)),
        "each_unit": [dict(zip(_UNIT, one, strict=True)) for one in _units_of(forecast)] if each_unit else None,
    }
