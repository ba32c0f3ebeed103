"""`zeroshard plan`: prints, for many configurations, the bytes that each rank will hold, send and write."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from zeroshard.cli.commands import Command, Size, table
from zeroshard.cli.compare import compare
from zeroshard.cli.models import Described, describe
from zeroshard.errors import InvalidValue
from zeroshard.model.units import UnitPolicy
from zeroshard.placement import PLANS
from zeroshard.planning import MACHINES, Configuration, Forecast, Workload, fit
from zeroshard.planning import plan as plan_one
from zeroshard.planning.fit import Candidate, in_units
from zeroshard.report import facts_of, write_plan

_TABLE = ("plan", "precision", "ranks", "optimizer", "units")
_BYTES = ("weights", "gradients", "main", "state", "transient", "at rest", "at most", "sent a step", "checkpoint")
_WITH_ACTIVATIONS = ("inputs", "activations", "in all")
_RUN = ("recomputed", "micro-batches")
_TIMES = ("compute", "update", "messages", "exposed", "step")


class _List(click.ParamType[list[Any]]):
    """Values of one type, separated by commas."""

    name = "list"

    def __init__(self, of: Any) -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> list[Any]:
        return [self._of(part.strip(), param, context) for part in str(value).split(",")]


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--compare", "run", type=click.Path(path_type=Path), help="a run's folder: planned beside measured")
@click.option("--plan", "plans", type=_List(click.STRING), default=",".join(PLANS), show_default=True)
@click.option("--precision", "precisions", type=_List(click.STRING), default="bf16", show_default=True)
@click.option(
    "--optimizer", "optimizers", multiple=True, default=("AdamW",), show_default=True,
    help="a class of torch.optim, zeroshard.optim or torchao.optim: SGD:momentum=0.9, Muon+AdamW8bit; may be repeated",
)  # fmt: skip
@click.option("--ranks", type=_List(click.INT), default="8", show_default=True, help="of the world; several: 8,64,1024")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, show_default=True,
    help="ranks that hold the same shard (a 2-D mesh)",
)  # fmt: skip
@click.option("--units", help="a class of modules, or a size (64MB); default: as the model says, or by size")
@click.option("--micro-batches", type=int, help="passes in a step  [default: 1, or the configuration's]")
@click.option("--reduce-every-micro-batch", is_flag=True, help="reduce gradients in each pass, not once per step")
@click.option(
    "--batch", type=click.IntRange(1), help="sequences in a pass: what the model holds beside the engine, too"
)
@click.option("--tokens", type=click.IntRange(1), help="of each sequence  [default: as many as the model takes]")
@click.option("--inputs", help="module:function, from sequences and tokens to the inputs of a model of module:factory")
@click.option("--recompute", is_flag=True, help="each unit is recomputed in backward (activation checkpointing)")
@click.option("--modules", is_flag=True, help="what each module holds behind its forward")
@click.option("--device", default="cuda", show_default=True, help="cuda or cpu")
@click.option("--transport", help="native, pairwise or shared  [default: native on cuda, shared on a CPU]")
@click.option(
    "--fit", "budget", type=Size(), help="what fits into that much per rank (80GB), and why the rest does not"
)
@click.option(
    "--machine", type=click.Choice(list(MACHINES)), help="how long a step takes there with such a --batch, by a model"
)
@click.option("--phases", is_flag=True, help="each phase on its own")
@click.option("--each-unit", is_flag=True, help="of the first row, each unit: its size, and whether it is held in full")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@click.option("--save", type=click.Path(path_type=Path), help="write a plan file, for zeroshard report")
def plan(model: str | None, run: Path | None, **options: Any) -> None:
    """Show what each rank will hold, send and write.

    MODEL is the configuration of a run (.toml), a transformers config (config.json, or its folder) or module:factory.
    Nothing is allocated, and no process group is needed. With --batch activations and inputs are included.
    """
    if run is not None:
        if model is not None:
            raise click.UsageError("--compare takes the model from the run: leave MODEL out")
        compare(run)
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    described = describe(model, options["inputs"])
    units = _units(options["units"], described.model) or described.units
    given = Configuration(
        replicas=options["replicas"],
        group_of=described.group_of,
        units=units,
        micro_batches=described.micro_batches if options["micro_batches"] is None else options["micro_batches"],
        reduce_every_micro_batch=options["reduce_every_micro_batch"] or described.reduce_every_micro_batch,
        device=options["device"],
        transport=options["transport"],
        ranks=options["replicas"],
        workload=_workload(described, **options),
    )
    several = [
        replace(given, optimizer=optimizer, ranks=ranks)
        for optimizer, ranks in itertools.product(options["optimizers"], options["ranks"])
    ]
    choices = {"plans": options["plans"], "precisions": options["precisions"]}
    if options["budget"]:
        if options["save"] is not None:
            raise InvalidValue("--save goes without --fit: choose one of what fits, and save its plan")
        # If the configuration names units, `fit` tries no other sizes. So leave the model's own units out.
        free = [replace(one, units=units if options["units"] else None) for one in several]
        choices["splits"] = list(_splits(described, options["batch"], options["tokens"]))
        _show_fit([fit(described.model, options["budget"], one, **choices) for one in free], **options)
        return
    forecasts = [
        plan_one(described.model, replace(one, plan=name, precision=precision))
        for one, precision, name in itertools.product(several, options["precisions"], options["plans"])
    ]
    _show(forecasts, **options)
    if options["save"] is not None:
        write_plan(facts_of(model, forecasts, options["machine"]), options["save"])


def _units(text: str | None, model: Any) -> UnitPolicy:
    """The value of `--units`: a size in bytes, or a class of the model's modules.

    Raises:
        ValueError: it is neither.
    """
    if text is None:
        return None
    if text[:1].isdigit():
        return Size().convert(text, None, None)
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if text not in classes:
        raise InvalidValue(f"--units {text}: expected a size, or a class of modules: {', '.join(sorted(classes))}")
    return classes[text]


def _workload(
    described: Described,
    *,
    batch: int | None,
    tokens: int | None,
    recompute: bool,
    modules: bool,
    machine: str | None,
    **_: Any,
) -> Workload | None:
    """The micro-batch that `--batch` and its related options describe; None without `--batch`.

    Raises:
        ValueError: related options without `--batch`, or a model whose inputs are not known.
    """
    if batch is None:
        if tokens or recompute or modules or machine:
            raise InvalidValue("--tokens, --recompute, --modules and --machine are about a batch: add --batch")
        return None
    if described.workload is None:
        raise InvalidValue("--batch: the inputs of this model are not known: add --inputs module:function")
    return replace(described.workload(batch, tokens), recompute=recompute)


def _splits(described: Described, batch: int | None, tokens: int | None) -> Iterator[tuple[int, Workload]]:
    """The sequences of a pass in 2, 4, ... smaller passes, as far as they divide."""
    number = 2
    while batch and described.workload is not None and batch % number == 0:
        yield number, described.workload(batch // number, tokens)
        number *= 2


# Output ---------------------------------------------------------------------------------------------------------------


def _show(
    forecasts: list[Forecast],
    *,
    as_json: bool,
    phases: bool,
    modules: bool,
    machine: str | None,
    each_unit: bool,
    **_: Any,
) -> None:
    if as_json:
        click.echo(json.dumps([_as_json(forecast) for forecast in forecasts], indent=2))
        return
    first = forecasts[0]
    click.echo(f"{first.num_parameters:,} parameters; bytes on rank {first.configuration.rank}, {_what(first)}")
    columns = (*_TABLE, *_BYTES, *(_WITH_ACTIVATIONS if first.trace else ()))
    table(columns, [(*_named(forecast), *map(in_units, _sizes(forecast))) for forecast in forecasts])
    if first.trace is not None and modules:
        table(
            ("module", "holds behind its forward"),
            [(path or "the model", in_units(size)) for path, size in first.trace.modules.items()],
        )
    if machine is not None:
        _show_times(forecasts, machine)
    if each_unit:
        table(("unit", "elements", "in full", "here", "held in full"), list(_units_of(first)))
    for forecast in forecasts if phases else ():
        click.echo(" ".join(map(str, _named(forecast)[:4])))
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


def _units_of(forecast: Forecast) -> Iterator[tuple[str, ...]]:
    """For each unit its name, elements, full size, size on this rank, and when this rank has it in full."""
    training = forecast.training
    for unit in training.units:
        itemsize = unit.spec.weight_dtype.itemsize
        in_full, here = unit.layout.numel * itemsize, unit.held(peak=False).weights
        when = "in its own buffer" if unit.spec.outer or unit.spec.stays else "in turns"
        held = "always" if here == in_full else when
        yield unit.spec.name, f"{unit.layout.numel:,}", in_units(in_full), in_units(here), held


def _show_times(forecasts: list[Forecast], machine: str) -> None:
    click.echo(f"seconds of a step on {machine}, by a model; nothing was measured")
    times = [(_named(forecast), forecast.time(machine)) for forecast in forecasts]
    rows = [(*names, *(f"{part:.4f}" for part in (*vars(time).values(), time.total))) for names, time in times]
    table((*_TABLE, *_TIMES), rows)


def _show_fit(found: list[list[Candidate]], *, as_json: bool, budget: int, **_: Any) -> None:
    """Print the configurations that fit, then those that do not with the reason."""
    candidates = [candidate for of_one in found for candidate in of_one]
    if as_json:
        said = [
            _as_json(one.forecast) | {"fits": one.fits, "spare": one.spare, "reason": one.reason} for one in candidates
        ]
        click.echo(json.dumps(said, indent=2))
        return
    fitting = sorted(filter(lambda candidate: candidate.fits, candidates), key=lambda one: one.forecast.sent)
    what = _what(candidates[0].forecast)
    click.echo(f"{len(fitting)} of {len(candidates)} fit into {in_units(budget)} on each rank, {what}")
    columns = (*_TABLE, *_RUN, "at most", "spare", "sent a step", "largest message")
    rows = [
        (*_named(one), *_run(one), *map(in_units, (one.whole_peak, c.spare, one.sent, one.largest_message)))
        for c in fitting
        for one in [c.forecast]
    ]
    if rows:
        table(columns, rows)
    others = [candidate for candidate in candidates if not candidate.fits]
    if others:
        rows = [(*_named(c.forecast), *_run(c.forecast), c.reason) for c in others]
        table((*_TABLE, *_RUN, "why it does not fit"), rows)


def _of_trace(forecast: Forecast) -> dict[str, Any] | None:
    return None if forecast.trace is None else vars(forecast.trace) | {"modules": dict(forecast.trace.modules)}


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


def _what(forecast: Forecast) -> str:
    """Says whether the bytes include activations."""
    if forecast.trace is None:
        return "without activations"
    return "with activations and inputs, without what kernels allocate for themselves"


def _run(forecast: Forecast) -> tuple[Any, ...]:
    """The values of the columns in `_RUN`."""
    return _recomputes(forecast), forecast.configuration.micro_batches


def _recomputes(forecast: Forecast) -> str:
    workload = forecast.configuration.workload
    return "units" if workload is not None and workload.recompute else ""


def _as_json(forecast: Forecast) -> dict[str, Any]:
    name, precision, _, optimizer, _ = _named(forecast)
    chosen = forecast.configuration
    return {
        "plan": name,
        "precision": str(precision),
        "optimizer": str(optimizer),
        "ranks": chosen.ranks,
        "replicas": chosen.replicas,
        "micro_batches": chosen.micro_batches,
        "parameters": forecast.num_parameters,
        "units": forecast.num_units,
        "unit_bytes": chosen.units if isinstance(chosen.units, int) else None,
        "phases": {
            name: vars(phase.held) | {"copies": phase.copies, "together": phase.num_bytes}
            for name, phase in forecast.phases.items()
        },
        "state": dict(forecast.state),
        "padding": forecast.padding,
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
    }
