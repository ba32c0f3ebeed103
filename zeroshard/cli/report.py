"""`zeroshard report`: writes the page of a run or of a plan file."""

from __future__ import annotations

from pathlib import Path

import click

from zeroshard.cli.runs import saved_run
from zeroshard.cli.terminal import Command, Size, say
from zeroshard.errors import InvalidValue
from zeroshard.report import PAGE, Report, read_plan


@click.command(cls=Command)
@click.argument("source", metavar="RUN|PLAN", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="the page  [default: report.html in the run, or beside the plan]"
)
@click.option("--svg", "folder", type=click.Path(path_type=Path), help="also write each picture into this folder")
@click.option("--budget", type=Size(), help="bytes of each rank (80GB), drawn as a line")
@click.option("--first-rank", type=click.IntRange(0), default=0, help="the first rank of the buffer maps")
def report(source: Path, out: Path | None, folder: Path | None, budget: int | None, first_rank: int) -> None:
    """Write the page of a run or a plan.

    RUN is the folder of a run; PLAN is a file that zeroshard plan --save has written. The page is one HTML file with
    pictures of the buffers, the step, memory and time, and the curves of a run. It opens without a network.
    """
    if source.is_dir():
        run = saved_run(source)
        from zeroshard.train.planned import facts_of_run

        facts = facts_of_run(run.config, run.place, str(source))
        page, out = Report(facts, run.record, budget, first_rank), out or source / PAGE
    elif source.exists():
        page = Report(read_plan(source), None, budget, first_rank)
        out = out or source.with_suffix(".html")
    else:
        raise InvalidValue(f"there is no {source}: expected the folder of a run, or a file of zeroshard plan --save")
    shown = page.facts.planned[:1] if page.run is not None else page.facts.planned
    if out.resolve() == source.resolve():
        raise InvalidValue(f"{out} is the plan file itself: name another file by --out")
    last = max(planned.num_shards for planned in shown) - 1
    if first_rank > last:
        raise InvalidValue(f"--first-rank must be from 0 to {last}, found {first_rank}")
    say(str(page.write(out)))
    for path in page.write_pictures(folder) if folder is not None else ():
        say(str(path))
