"""Opens the folder of a run of `zeroshard train`: what it has recorded, and the configuration that it had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.manifest import MANIFEST_NAME, CheckpointError, Manifest
from zeroshard.cli.models import configuration_file
from zeroshard.errors import InvalidValue
from zeroshard.report import RunRecord, read_run

if TYPE_CHECKING:
    from zeroshard.train.config import Config
    from zeroshard.train.planned import Place


@dataclass(frozen=True)
class SavedRun:
    """A run, with the configuration and place of its last step. `step`: the folder of its newest checkpoint."""

    record: RunRecord
    config: Config
    place: Place
    step: Path | None


def saved_run(folder: Path, *, timeline: bool = True) -> SavedRun:
    """The run in `folder`, with the timeline of a step if `timeline`.

    Raises:
        ValueError: the folder contains no run, a damaged one, or one that has not done a step yet.
    """
    record = read_run(folder, timeline=timeline)
    config, steps = configuration_file(folder / "config.toml"), folders.steps(folder)
    step = steps[max(steps)] if steps else None
    from zeroshard.train.planned import Place

    last = record.started
    of_ranks: dict[str, object] = {"plan": last.plan, "precision": last.precision}
    of_ranks |= {} if last.recompute is None else {"recompute": last.recompute}
    parallel, batch = config.parallel.model_copy(update=of_ranks), config.batch.model_copy(update=last.batch)
    config = config.model_copy(update={"parallel": parallel, "batch": batch})
    return SavedRun(record, config, Place(last.ranks, last.device, last.transport), step)


def saved_bytes(step: Path) -> int:
    """Of the ranks' files of a checkpoint, and their indices.

    Raises:
        ValueError: the manifest is damaged, or one of its files is missing or has another size.
    """
    files = _manifest(step).files
    sizes = {file.name: file.num_bytes for file in files}
    sizes |= {file.index_name: file.index_bytes for file in files}
    for name, num_bytes in sizes.items():
        path = step / name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        if found != f"{num_bytes} bytes":
            raise InvalidValue(f"{path} is damaged: expected {num_bytes} bytes, found {found}")
    return sum(sizes.values())


def ranks_that_saved(step: Path) -> int:
    """How many ranks have written a checkpoint.

    Raises:
        ValueError: the manifest is damaged.
    """
    return len(_manifest(step).files)


def _manifest(step: Path) -> Manifest:
    """
    Raises:
        ValueError: it is damaged.
    """
    path = step / MANIFEST_NAME
    try:
        return Manifest.decode(path.read_bytes())
    except CheckpointError as error:
        raise InvalidValue(f"{path} {error}") from error
