"""`zeroshard plan --compare RUN`: prints the planned bytes of a run beside the bytes that it has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import torch

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.manifest import MANIFEST_NAME, Manifest
from zeroshard.cli.commands import table
from zeroshard.cli.models import described_by_the_trainer
from zeroshard.errors import InvalidValue
from zeroshard.planning import Configuration, Forecast
from zeroshard.planning import plan as plan_one
from zeroshard.planning.fit import in_units


def compare(run: Path) -> None:
    """Print planned and recorded bytes at the last step of a run of `zeroshard train`.

    Raises:
        ValueError: the folder contains no such run, a damaged one, or one that has not done a step yet.
    """
    record, step = _last_step(run), _saved_step(run)
    described, config = described_by_the_trainer(run / "config.toml")
    ranks = config.parallel.nproc or _ranks_of(step)
    is_cuda = config.parallel.device == "cuda" or (config.parallel.device == "auto" and torch.cuda.is_available())
    sequences = config.batch.sequences // (ranks * described.micro_batches)
    assert described.workload is not None, "the trainer knows its inputs"
    configuration = Configuration(
        plan=config.parallel.plan,
        ranks=ranks,
        precision=config.parallel.precision,
        group_of=described.group_of,
        units=described.units,
        micro_batches=described.micro_batches,
        reduce_every_micro_batch=described.reduce_every_micro_batch,
        device="cuda" if is_cuda else "cpu",
        workload=described.workload(max(1, sequences), None),
    )
    forecast = plan_one(described.model, configuration)
    click.echo(f"{run}, step {record['step']}: {config.parallel.plan}, {config.parallel.precision}, {ranks} ranks")
    rows = list(_rows(forecast, record, step))
    table(("of rank 0", "planned", "measured", "difference"), [(n, *map(in_units, (p, m, m - p))) for n, p, m in rows])
    if not is_cuda:
        click.echo("The process has Python and its libraries, too, which are not planned: some 300 to 500 MB.")


def _rows(forecast: Forecast, record: dict[str, Any], step: Path | None) -> list[tuple[str, int, int]]:
    rows = [
        ("the engine, between steps", forecast.at_rest.sum, record["engine_bytes"]),
        ("the process at most", forecast.whole_peak, record["peak_memory_bytes"]),
    ]
    if step is not None:
        on_disk = sum(path.stat().st_size for path in step.glob("*.safetensors"))
        rows.append(("files of a checkpoint, all ranks", forecast.checkpoint_bytes, on_disk))
    return rows


def _last_step(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        if steps and not all(isinstance(steps[-1][key], int) for key in ("step", "engine_bytes", "peak_memory_bytes")):
            raise InvalidValue(steps[-1])
    except FileNotFoundError:
        raise InvalidValue(f"{run} is not the folder of a run: there is no {path.name} in it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(f"{path} is damaged: {error!r}") from error
    if not steps:
        raise InvalidValue(f"{path}: the run has not come to its first step")
    record: dict[str, Any] = steps[-1]
    return record


def _saved_step(run: Path) -> Path | None:
    known = folders.steps(run)
    return folders.find(run, max(known)) if known else None


def _ranks_of(step: Path | None) -> int:
    """The world size recorded in the checkpoint; 1 without a checkpoint."""
    if step is None:
        return 1
    found = Manifest.decode((step / MANIFEST_NAME).read_bytes()).values.get("world_size")
    return found if isinstance(found, int) else 1
