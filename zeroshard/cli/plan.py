"""`zeroshard plan`: prints, for many configurations, the bytes that each rank will hold, send and write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from torch import nn

from zeroshard.cli.compare import compare
from zeroshard.cli.models import Described, describe
from zeroshard.cli.plan_output import show, show_fit
from zeroshard.cli.terminal import Command, Size, Type
from zeroshard.cli.undisturbed import undisturbed
from zeroshard.errors import InvalidValue, NeedsFP32
from zeroshard.model.unit_policy import UnitPolicy
from zeroshard.placement import PLANS
from zeroshard.planning import MACHINES, Candidate, Configuration, Forecast, Workload, fit
from zeroshard.planning import plan as plan_one
from zeroshard.planning.fit import PRECISIONS, UNIT_BYTES, cheapest_first
from zeroshard.planning.hints import MACHINE
from zeroshard.planning.once import traced_once
from zeroshard.report import facts_of, write_plan


class _List(Type):
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
@click.option(
    "--precision", "precisions", type=_List(click.STRING),
    help=f"[default: bf16; with --fit {', '.join(PRECISIONS)}]",
)  # fmt: skip
@click.option(
    "--optimizer", "optimizers", multiple=True, default=("AdamW",), show_default=True,
    help="a class of torch.optim, zeroshard.optim or torchao.optim: SGD:momentum=0.9, Muon+AdamW8bit; may be repeated",
)  # fmt: skip
@click.option("--ranks", type=_List(click.INT), default="8", show_default=True, help="of the world; several: 8,64,1024")
@click.option(
    "--replicas", type=click.IntRange(1),
    help=f"ranks that hold the same shard (a 2-D mesh)  [default: 1; with --fit also ranks / {MACHINES[MACHINE].node}]",
)  # fmt: skip
@click.option("--rank", type=click.IntRange(0), help="the rank that is planned  [default: 0]")
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
@click.pass_context
def plan(context: click.Context, /, model: str | None, run: Path | None, **options: Any) -> int:
    """Show what each rank will hold, send and write.

    MODEL is the configuration of a run (.toml, or the run's folder), a transformers config (config.json, or its folder)
    or module:factory. Nothing is allocated, and no process group is needed. With --batch activations and inputs are
    included. The exit code is 1 if nothing fits (--fit).
    """
    _expect_an_effect(context)
    if run is not None:
        compare(run, as_json=options["as_json"])
        return 0
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    with undisturbed(model), traced_once():
        described = describe(model, options["inputs"])
        several = list(_configurations(described, **options))
        if options["budget"]:
            found = [candidate for one in several for candidate in _fit(described, one, **options)]
            found = cheapest_first(found, options["machine"])
        else:
            kinds = itertools.product(several, options["precisions"] or ["bf16"], options["plans"])
            forecasts = [
                _planned(described.model, replace(one, plan=name, precision=precision))
                for one, precision, name in kinds
            ]
    if options["budget"]:
        return show_fit(found, **options)
    if options["save"] is not None:
        write_plan(facts_of(model, forecasts, options["machine"]), options["save"])
    show(forecasts, **options)
    return 0


def _planned(model: nn.Module, configuration: Configuration) -> Forecast:
    try:
        return plan_one(model, configuration)
    except NeedsFP32 as error:
        raise InvalidValue(f"{error}. This command takes names of precisions: --precision fp32") from None


def _configurations(described: Described, **options: Any) -> Iterator[Configuration]:
    """For each optimizer and number of ranks what plans and precisions have in common."""
    given = Configuration(
        replicas=options["replicas"] or 1,
        group_of=described.group_of,
        units=_units(options["units"], described.model) or described.units,
        micro_batches=described.micro_batches if options["micro_batches"] is None else options["micro_batches"],
        reduce_every_micro_batch=options["reduce_every_micro_batch"] or described.reduce_every_micro_batch,
        device=options["device"],
        transport=options["transport"],
        ranks=options["replicas"] or 1,
        workload=_workload(described, **options),
    )
    if options["reduce_every_micro_batch"] and given.micro_batches == 1 and not options["budget"]:
        raise InvalidValue("--reduce-every-micro-batch: only with several passes in a step. Add --micro-batches")
    for optimizer, ranks in itertools.product(options["optimizers"], options["ranks"]):
        yield replace(given, optimizer=optimizer, ranks=ranks, rank=options["rank"] or 0)


def _expect_an_effect(context: click.Context) -> None:
    """Raises:
    ValueError: an option that would change nothing beside the others."""
    given = {
        one.name: one.opts[0] if isinstance(one, click.Option) else "MODEL"
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    }
    if "run" in given:
        others = [name for key, name in given.items() if key not in ("run", "as_json")]
        if others:
            raise InvalidValue(f"--compare takes everything from the run: leave out {', '.join(others)}")
    elif "budget" in given:
        others = [given[key] for key in ("rank", "phases", "modules", "each_unit", "save") if key in given]
        if others:
            raise InvalidValue(
                f"{', '.join(others)}: not with --fit. Choose one of what fits, and plan it without --fit"
            )
    if "run" not in given and "batch" not in given:
        others = [given[key] for key in ("tokens", "inputs", "recompute", "modules", "machine") if key in given]
        if others:
            raise InvalidValue(f"{', '.join(others)}: only with a batch. Add --batch")


def _fit(described: Described, given: Configuration, **options: Any) -> list[Candidate]:
    """What is tried for one optimizer and number of ranks. What the user names is tried alone."""
    return fit(
        described.model,
        options["budget"],
        given,
        plans=options["plans"],
        precisions=options["precisions"],
        sizes=() if options["units"] else UNIT_BYTES,
        replicas=() if options["replicas"] else _replicas(described, given, options["machine"] or MACHINE),
        splits=list(_splits(described, options["batch"], options["tokens"])),
    )


def _replicas(described: Described, given: Configuration, machine: str) -> list[int]:
    """Of the mesh whose shards are in one node, and of the one that the planner advises."""
    node = MACHINES[machine].node
    if given.ranks <= node:
        return []
    sharded = plan_one(described.model, replace(given, plan="zero3", workload=None))
    of_nodes = [given.ranks // node] if given.ranks % node == 0 else []
    return [*of_nodes, *(hint.replicas for hint in sharded.hints(machine))]


def _units(text: str | None, model: Any) -> UnitPolicy:
    """The value of `--units`: a size in bytes, or a class of the model's modules.

    Raises:
        ValueError: it is neither.
    """
    if text is None:
        return None
    classes = {type(module).__name__: type(module) for module in model.modules()}
    if text in classes:
        return classes[text]
    try:
        return Size().convert(text, None, None)
    except click.BadParameter:
        known = ", ".join(sorted(classes))
        raise InvalidValue(f"--units {text}: expected a size (64MB), or a class of modules: {known}") from None


def _workload(
    described: Described, *, batch: int | None, tokens: int | None, recompute: bool, machine: str | None, **_: Any
) -> Workload | None:
    """The micro-batch that `--batch` and its related options describe; None without `--batch`.

    Raises:
        ValueError: a model whose inputs are not known, or for a machine the number of its tokens.
    """
    if batch is None:
        return None
    if described.workload is None:
        raise InvalidValue("--batch: the inputs of this model are not known: add --inputs module:function")
    workload = described.workload(batch, tokens)
    if machine is not None and not workload.num_tokens:
        raise InvalidValue(
            "--machine: the time of a step depends on the tokens of a sequence, which only --inputs knows: add "
            "--tokens (1 where a sequence is one vector)"
        )
    return replace(workload, recompute=recompute or workload.recompute)


def _splits(described: Described, batch: int | None, tokens: int | None) -> Iterator[tuple[int, Workload]]:
    """The sequences of a pass in 2, 4, ... smaller passes (6 sequences: in 2 and 6)."""
    number, rest = 1, batch or 1
    while rest > 1 and described.workload is not None:
        factor = next(n for n in range(2, rest + 1) if rest % n == 0)
        number, rest = number * factor, rest // factor
        yield number, described.workload(rest, tokens)
