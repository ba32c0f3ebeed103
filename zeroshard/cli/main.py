"""The command line: arguments only. `train` has one option per configuration field, generated from `train.config`.

The trainer is imported for `train` alone (and for a plan of its model); the commands for checkpoints are in
`commands.py`, those for plans and pages in `plan.py` and `report.py`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

import zeroshard
from zeroshard.checkpoint.folders import steps, without_manifest
from zeroshard.cli.commands import COMMANDS
from zeroshard.cli.plan import plan
from zeroshard.cli.report import report
from zeroshard.cli.terminal import Damaged, Helpful, printable
from zeroshard.cli.tokenizer import tokenizer
from zeroshard.io.logger import warnings_on_stderr
from zeroshard.starting import BAD_INPUT, begun, exit_code

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from zeroshard.train.config import Config

SHORT = {
    "parallel.plan": "--plan",
    "parallel.nproc": "--nproc",
    "parallel.precision": "--precision",
    "data.path": "--data",
    "model.config": "--model",
    "schedule.steps": "--steps",
    "run.out": "--out",
    "parallel.max_restarts": "--max-restarts",
}

ELSEWHERE = {
    **dict.fromkeys(("batch", "batch-size", "global-batch-size", "train-batch-size"), "batch.sequences"),
    **dict.fromkeys(("gradient-accumulation-steps", "accumulate"), "batch.micro_batches"),
    "learning-rate": "optimizer.lr",
    **dict.fromkeys(("epochs", "num-epochs", "max-steps", "num-train-epochs", "iters", "max-iters"), "steps"),
    **dict.fromkeys(("output-dir", "save-dir", "out-dir"), "out"),
    **dict.fromkeys(("block-size", "seq-len", "seq-length", "sequence-length", "max-length"), "model.context"),
    **dict.fromkeys(("hidden-size", "dim", "d-model", "n-embd"), "model.width"),
    **dict.fromkeys(("num-layers", "n-layer", "n-layers", "depth"), "model.layers"),
    **dict.fromkeys(("nproc-per-node", "num-processes", "world-size"), "nproc"),
    **dict.fromkeys(("dtype", "mixed-precision"), "precision"),
}
"""What other programs call an option -> its name here, for the message about an unknown one."""


def run(arguments: list[str]) -> int:
    """Carry out one command and return the exit code. Bad input: one line on stderr and 2, never a traceback."""
    try:
        with warnings_on_stderr():
            result = main(arguments or ["--help"], prog_name="zeroshard", standalone_mode=False, obj=arguments)
        return result if isinstance(result, int) else 0
    except click.NoSuchOption as error:
        elsewhere = ELSEWHERE.get(error.option_name.lstrip("-").replace("_", "-"))
        nearest = [f"--{elsewhere}"] if elsewhere and arguments[0] == "train" else []
        near = {name.lstrip("-"): name for name in error.possibilities or []}  # the dashes make all options alike
        nearest += [near[name] for name in difflib.get_close_matches(error.option_name.lstrip("-"), near, n=1)]
        command = "zeroshard" if arguments[0].startswith("-") else f"zeroshard {arguments[0]}"
        hint = f"did you mean {nearest[0]}?" if nearest else f"{command} --help lists them"
        return _refuse(f"unknown option {error.option_name}; {hint}", arguments)
    except Damaged as error:
        _refuse(error.format_message(), arguments)
        return 1
    except click.ClickException as error:
        return _refuse(error.format_message(), arguments)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return exit_code()


def _refuse(problem: str, arguments: list[str]) -> int:
    """Print the problem as one line on stderr and return the exit code 2. Ranks that `train` has started report it to
    the starting process, which prints it once."""
    if arguments[:1] == ["train"]:
        from zeroshard.train.launch import refuse

        return refuse(problem)
    print(f"zeroshard: error: {printable(' '.join(problem.split()))}", file=sys.stderr)
    return BAD_INPUT


class _Commands(Helpful, click.Group):
    """`zeroshard` itself."""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(zeroshard.__version__)
def main() -> None:
    """Sharded data-parallel training for PyTorch."""


for _command in (*COMMANDS, plan, report, tokenizer):
    main.add_command(_command)


class _Choice(click.Choice[str]):
    """Takes the names of other libraries, too: `--plan fsdp`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from zeroshard.train.config import named_as_here

        return super().convert(named_as_here(value, self.choices), param, ctx)


def _click_type(info: FieldInfo) -> click.ParamType[Any] | type:
    kind = info.annotation
    if get_origin(kind) is Literal:
        return _Choice(get_args(kind))
    optional = [part for part in get_args(kind) if part is not type(None)]
    kind = optional[0] if optional else kind
    assert isinstance(kind, type)
    return kind


class _Train(Helpful):
    """A command with an option `--section.name` for every field of the configuration, besides its own options, and
    with the short names in `SHORT`. The fields are added when the command runs, so that others need no pydantic.

    The last segment of a name is accepted, too, if no other option has it (`--lr`), and "-" in place of "_".
    """

    complete = False

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        if not self.complete:
            from zeroshard.train.config import fields

            self.complete = True
            self.params += [_option(key, info) for key, info in fields()]
        return super().make_context(*arguments, **options)

    def make_parser(self, context: click.Context) -> Any:
        parser = super().make_parser(context)
        for name, option in _other_names([one for one in self.params if isinstance(one, click.Option)]).items():
            parser.add_option(option, [name], dest=option.name, nargs=option.nargs)
        return parser

    def invoke(self, context: click.Context) -> Any:
        from zeroshard.train.config import UserError

        try:
            return super().invoke(context)
        except UserError as error:
            raise click.ClickException(str(error)) from error


def _other_names(options: list[click.Option]) -> dict[str, click.Option]:
    """Names that the help does not list: last segments that are unique, and "-" in place of "_"."""
    named = {name: option for option in options for name in option.opts}
    segments = [name.rpartition(".")[2] for name in named if "." in name]
    short = {f"--{name.rpartition('.')[2]}": option for name, option in named.items() if "." in name}
    unique = {name: option for name, option in short.items() if segments.count(name[2:]) == 1 and name not in named}
    dashed = {name.replace("_", "-"): option for name, option in {**named, **unique}.items()}
    return {name: option for name, option in {**unique, **dashed}.items() if name not in named}


def _option(key: str, info: FieldInfo) -> click.Option:
    names = [f"--{key}", *([SHORT[key]] if key in SHORT else [])]
    default = "" if info.default in ("", None) else f"  [default: {str(info.default).lower()}]"
    return click.Option(
        [*names, key.replace(".", "__")], type=_click_type(info), help=f"{info.description}{default}", default=None
    )


@main.command(cls=_Train, context_settings={"show_default": False})
@click.option("--config", "files", multiple=True, type=click.Path(path_type=Path), help="TOML file; several may follow")
@click.option(
    "--resume",
    metavar="auto|never|FOLDER",
    default="never",
    help="the run to continue, from its newest good step; auto: the one in --out, if it has saved a step",
)
@click.pass_context
def train(context: click.Context, /, files: tuple[Path, ...], resume: str, **values: Any) -> int:
    """Train a language model on text.

    The model is a small GPT, or any causal language model of transformers (--model config.json). The text is the Python
    standard library's source, or --data. The last part of an option's name is enough where only one option has it: --lr
    for --optimizer.lr.
    """
    from zeroshard.train.config import check_divides, out_of, resolve, with_values
    from zeroshard.train.data import prepare
    from zeroshard.train.launch import already_refused, start_ranks, under_launcher
    from zeroshard.train.loop import train as train_this_rank
    from zeroshard.train.run import default_folder

    if already_refused():
        return BAD_INPUT
    overrides = {name.replace("__", "."): value for name, value in values.items() if value is not None}
    _expect_own_ranks(overrides)
    saved, occupied = _saved_run(resume, out_of(list(files), overrides))
    config = resolve(list(files), overrides) if saved is None else _continued(saved, files, overrides)
    nproc = _number_of_ranks(config, overrides.get("parallel.nproc"))
    config = with_values(config, parallel={"nproc": nproc})
    check_divides(config)
    if under_launcher() or (nproc == 1 and not config.parallel.max_restarts):
        train_this_rank(config, resume=saved, occupied=occupied)
        return 0
    begun()
    prepare(config.data)  # here a mistake in --data is reported once, not by every rank
    arguments = list(context.obj)
    if not config.run.out:
        # Chosen here, once: the default name contains the time, so ranks that are started again would use another
        # folder and not find their checkpoints.
        arguments += ["--out", default_folder()]
    return start_ranks(nproc, arguments, config.parallel.max_restarts)


def _expect_own_ranks(overrides: Mapping[str, Any]) -> None:
    from zeroshard.train.config import UserError
    from zeroshard.train.launch import started_by_others

    if overrides.get("parallel.max_restarts") and started_by_others():
        raise UserError(
            "--max-restarts: the launcher starts these ranks: give it the option, as in torchrun --max-restarts"
        )


def _saved_run(resume: str, out: str) -> tuple[Path | None, bool]:
    """The folder of the run to continue (None: a new run), and whether the output folder may contain a run that has
    saved nothing yet. Ranks that a launcher has restarted continue their own run, whatever `--resume` says."""
    from zeroshard.train.config import UserError
    from zeroshard.train.launch import times_restarted

    again = times_restarted() > 0
    if (again or resume == "auto") and not out:
        why = "ranks that are started again" if again else "--resume auto"
        raise UserError(f"{why}: expected --out, the folder of the run")
    if (again or resume == "auto") and (steps(out) or without_manifest(out)):  # the latter are named, and refused
        return Path(out), True
    return None if resume in ("auto", "never") else Path(resume), again or resume == "auto"


def _continued(saved: Path, files: tuple[Path, ...], overrides: Mapping[str, Any]) -> Config:
    """The configuration of a run that is continued: the saved one, overridden. A model of transformers is built from
    the copy of its configuration in the run's folder, unless the command line names one."""
    from zeroshard.train.config import UserError, out_of, resolve, with_values
    from zeroshard.train.release import FOLDER

    path, kept = saved / "config.toml", saved / FOLDER / "config.json"
    if not path.is_file():
        raise UserError(f"--resume {saved}: expected the folder of a run, with {path.name} in it")
    config = resolve([path, *files], overrides)
    if config.model.config and "model.config" not in overrides and kept.is_file():
        config = with_values(config, model={"config": str(kept)})
    return with_values(config, run={"out": out_of(list(files), overrides) or str(saved)})


def _number_of_ranks(config: Config, asked: int | None) -> int:
    """The launcher's number, else --nproc, else one per GPU or one."""
    from zeroshard.comm.joining import launched
    from zeroshard.train.config import UserError
    from zeroshard.train.ranks import sensible_nproc

    try:
        given = launched()
    except ValueError as error:
        raise UserError(str(error)) from None
    if given is None:
        return sensible_nproc(config.parallel)
    _, world_size = given
    if asked is not None and asked != world_size:
        raise UserError(f"--nproc {asked}: the launcher has started {world_size} ranks; leave --nproc out")
    return world_size
