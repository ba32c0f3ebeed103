"""From the files of other tools to a committed step: written and published as `save` does it, by one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import folders
from zeroshard.checkpoint.commit import Job, describe, file_name, open_folder, size_of_part, versions
from zeroshard.checkpoint.manifest import CheckpointError, Manifest
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.interval import Interval
from zeroshard.tensor_file import open_model


def import_model(source: Path, directory: Path, *, step: int, force: bool = False, follow_links: bool = False) -> Path:
    """`directory/step-N` with the weights and buffers of a safetensors file, or of a folder with an index of several:
    what `load` without `optimizer` takes. Not collective; a block (1 MiB) in memory at a time.

    Args:
        force: replace a step of that number.
        follow_links: the files may be links to somewhere else, as in the cache of a hub.

    Raises:
        FileExistsError: there is such a step, and not `force`.
        CheckpointError: files that are damaged, or not what the format says.
    """
    with ExitStack() as stack:
        found = open_model(source, follow_links=follow_links)
        for file in set(found.values()):
            stack.callback(file.close)
        items: list[Item] = []
        tied: dict[str, str] = {}
        for name, file in found.items():
            stored = file.tensors[name]
            whole = Interval(0, stored.numel)
            items.append(Item(f"model/{name}", stored.shape, stored.dtype, whole, partial(file.read, name)))
        for file in set(found.values()):  # as `safetensors.torch.save_model` notes what it left out
            noted = ((alias, name) for alias, name in file.metadata.items() if alias != "format")
            tied |= {alias: name for alias, name in noted if alias not in found and name in found}
        return commit_alone(directory, step, items, {"optimizers": [], "tied": tied}, force=force)


def commit_alone(directory: Path, step: int, items: Sequence[Item], values: dict[str, Any], *, force: bool) -> Path:
    """One file of whole tensors, and its manifest, as a committed step.

    Raises:
        FileExistsError: there is such a step, and not `force`.
        CheckpointError: nothing has been written.
    """
    directory = directory.absolute()
    if isinstance(step, bool) or not 0 <= step < 10**15:
        raise ValueError(f"step must be an integer from 0, found {step!r}")
    if step in folders.steps(directory) and not force:
        raise FileExistsError(f"{directory} holds step {step} already (--force replaces it)")
    unique = folders.new_id()
    plan = FilePlan.of(items, 0, {"format": "pt", "zeroshard": f"step {step}, {unique}, {file_name(0)}"})
    base = Manifest(step, unique, (), {}, {**values, "extra": {}, "world_size": 1}, versions())
    try:
        sizes = [plan.num_bytes, len(base.encode()) + size_of_part(plan, 0)]
        lock = open_folder(directory, step, unique, sizes)
    except OSError as error:
        raise CheckpointError(f"{directory}: {describe(error)}") from None
    Job(directory / folders.temporary_name(step, unique), plan, base, Meeting(None, unique), lock).run()
    return directory / folders.step_name(step)
