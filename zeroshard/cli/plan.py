"""`zeroshard plan`: tables of what a model will hold, send and write, for many configurations side by side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click

from zeroshard.cli.commands import Command, Size, table
from zeroshard.cli.models import describe
from zeroshard.model.units import UnitPolicy
from zeroshard.placement import PLANS, as_plan
from zeroshard.planning import Configuration, Forecast, fit
from zeroshard.planning import plan as plan_one
from zeroshard.planning.fit import Candidate, in_units

_TABLE = ("plan", "precision", "ranks", "optimizer", "units")
_BYTES = ("weights", "gradients", "main", "state", "transient", "at rest", "at most", "sent a step", "checkpoint")


class _List(click.ParamType[list[Any]]):
    """Values of one type, separated by commas."""

    name = "list"

    def __init__(self, of: Any) -> None:
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> list[Any]:
        return [self._of(part.strip(), param, context) for part in str(value).split(",")]


@click.command(cls=Command)
@click.argument("model")
@click.option("--plan", "plans", type=_List(click.STRING), default=",".join(PLANS), show_default=True)
@click.option("--precision", "precisions", type=_List(click.STRING), default="bf16", show_default=True)
@click.option(
    "--optimizer", "optimizers", multiple=True, default=("AdamW",), show_default=True,
    help="a class of torch.optim, zeroshard.optim or torchao.optim: SGD:momentum=0.9, Muon+AdamW8bit; may be repeated",
)  # fmt: skip
@click.option("--ranks", type=_List(click.INT), default="8", show_default=True, help="of the world; several: 8,64,1024")
@click.option("--replicas", type=int, default=1, show_default=True, help="ranks that hold the same shard (a 2-D mesh)")
@click.option("--units", help="a class of modules, or a size (64MB); default: as the model says, or by size")
@click.option("--micro-batches", type=int, help="passes in a step  [default: 1, or the configuration's]")
@click.option("--reduce-every-micro-batch", is_flag=True, help="reduce gradients in each pass, not once per step")
@click.option("--device", default="cuda", show_default=True, help="cuda or cpu")
@click.option("--transport", help="native, pairwise or shared  [default: native on cuda, shared on a CPU]")
@click.option(
    "--fit", "budget", type=Size(), help="what fits into that much per rank (80GB), and why the rest does not"
)
@click.option("--phases", is_flag=True, help="each phase on its own")
@click.option("--json", "as_json", is_flag=True, help="for programs")
def plan(model: str, **options: Any) -> None:
    """Show what each rank will hold, send and write.

    MODEL is the configuration of a run (.toml), a transformers config (config.json, or its folder) or module:factory.
    Nothing is allocated, and no process group is needed. Activations are not included.
    """
    described = describe(model)
    units = _units(options["units"], described.model) or described.units
    given = Configuration(
        replicas=options["replicas"],
        group_of=described.group_of,
        units=units,
        micro_batches=options["micro_batches"] or described.micro_batches,
        reduce_every_micro_batch=options["reduce_every_micro_batch"] or described.reduce_every_micro_batch,
        device=options["device"],
        transport=options["transport"],
        ranks=options["replicas"],
    )
    several = [
        replace(given, optimizer=optimizer, ranks=ranks)
        for optimizer, ranks in itertools.product(options["optimizers"], options["ranks"])
    ]
    choices = {"plans": options["plans"], "precisions": options["precisions"]}
    if options["budget"]:
        # The units that the model names are one choice among others here.
        free = [replace(one, units=units if options["units"] else None) for one in several]
        _show_fit([fit(described.model, options["budget"], one, **choices) for one in free], **options)
        return
    forecasts = [
        plan_one(described.model, replace(one, plan=name, precision=precision))
        for one, precision, name in itertools.product(several, options["precisions"], options["plans"])
    ]
    _show(forecasts, **options)


def _units(text: str | None, model: Any) -> UnitPolicy:
    """
    Raises:
        ValueError: neither a size nor a class of the model's modules.
    """
    if text is None:
        return None
    if text[:1].isdigit():
        return Size().convert(text, None, None)
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if text not in classes:
        raise ValueError(f"--units {text}: expected a size, or a class of modules: {', '.join(sorted(classes))}")
    return classes[text]


# Output ---------------------------------------------------------------------------------------------------------------


def _show(forecasts: list[Forecast], *, as_json: bool, phases: bool, **_: Any) -> None:
    if as_json:
        click.echo(json.dumps([_as_json(forecast) for forecast in forecasts], indent=2))
        return
    first = forecasts[0]
    click.echo(f"{first.num_parameters:,} parameters; bytes on rank {first.configuration.rank}, without activations")
    table((*_TABLE, *_BYTES), [(*_named(forecast), *map(in_units, _sizes(forecast))) for forecast in forecasts])
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


def _show_fit(found: list[list[Candidate]], *, as_json: bool, budget: int, **_: Any) -> None:
    """What fits, and what does not with its reason."""
    candidates = [candidate for of_one in found for candidate in of_one]
    if as_json:
        said = [
            _as_json(one.forecast) | {"fits": one.fits, "spare": one.spare, "reason": one.reason} for one in candidates
        ]
        click.echo(json.dumps(said, indent=2))
        return
    fitting = sorted(filter(lambda candidate: candidate.fits, candidates), key=lambda one: one.forecast.sent)
    click.echo(f"{len(fitting)} of {len(candidates)} fit into {in_units(budget)} on each rank, without activations")
    columns = (*_TABLE, "at most", "spare", "sent a step", "largest message")
    rows = [
        (*_named(c.forecast), *map(in_units, (c.forecast.peak, c.spare, c.forecast.sent, c.forecast.largest_message)))
        for c in fitting
    ]
    if rows:
        table(columns, rows)
    others = [candidate for candidate in candidates if not candidate.fits]
    if others:
        table((*_TABLE, "why it does not fit"), [(*_named(c.forecast), c.reason) for c in others])


def _named(forecast: Forecast) -> tuple[Any, ...]:
    """The first columns."""
    chosen = forecast.configuration
    mesh = f"{chosen.replicas} x {chosen.num_shards}" if chosen.replicas > 1 else chosen.ranks
    return as_plan(chosen.plan).name, chosen.precision or "", mesh, chosen.optimizer, _units_in_words(forecast)


def _units_in_words(forecast: Forecast) -> str:
    units = forecast.configuration.units
    return f"{forecast.num_units} of {in_units(units)}" if isinstance(units, int) else str(forecast.num_units)


def _sizes(forecast: Forecast) -> Iterator[int]:
    rest = forecast.at_rest
    yield from (rest.weights, forecast.phases["backward"].held.grads, rest.main, rest.state + rest.scalars)
    transient = max(phase.held.transient for phase in forecast.phases.values())
    yield from (transient, rest.sum, forecast.peak, forecast.sent, forecast.checkpoint_bytes)


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
        "events": [[*event, times] for event, times in forecast.events.items()],
        "sent": forecast.sent,
        "largest_message": forecast.largest_message,
        "file_bytes": forecast.file_bytes,
        "checkpoint_bytes": forecast.checkpoint_bytes,
    }
