"""Imports safetensors files as a committed step, written and published as by `save`, by one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import files, folders
from zeroshard.checkpoint.commit import Job, file_metadata, open_folder, sizes_of, temporary_folder, versions
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.meeting import Meeting
from zeroshard.checkpoint.writer import FilePlan, Item
from zeroshard.errors import AlreadyExists, InvalidValue
from zeroshard.io.tensor_file import INDEX, SINGLE, open_model
from zeroshard.layout.interval import Interval


@dataclass(frozen=True)
class Imported:
    """An imported step. `left_out`: names in the source that were not imported."""

    path: Path
    left_out: tuple[str, ...] = ()


def import_model(
    source: Path | str, directory: Path | str, *, step: int, force: bool = False, follow_links: bool = False
) -> Imported:
    """Write `directory/step-N` with the weights and buffers of a safetensors file, or of a folder with several and an
    index. `load` without `optimizer` can load it. Not collective; it holds one block (1 MiB) in memory at a time.

    Args:
        source: the file or folder.
        directory: of the steps.
        step: number of the new step.
        force: True: replace an existing step of that number.
        follow_links: True: the files may be links, as in the cache of a model hub.

    Raises:
        FileExistsError: there is such a step, and `force` is False.
        ValueError: the source is a checkpoint of zeroshard, a file of one, or of `torch.save`.
        CheckpointError: a file is damaged, or not valid.
    """
    _expect_of_others(Path(source))
    with ExitStack() as stack:
        found = open_model(Path(source), follow_links=follow_links)
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
        values = {"optimizers": [], "tied": tied}
        return Imported(commit_alone(Path(directory), step, items, values, force=force))


def _expect_of_others(source: Path) -> None:
    """The file of one rank has the form of a model's file, but parts of the tensors under other names.

    Raises:
        ValueError: the source is a step folder, a directory of steps without a model's files, or a rank's file; or a
            file of `torch.save`, or a folder with such a file and none of safetensors.
    """
    is_model = (source / SINGLE).is_file() or (source / INDEX).is_file()
    for file in (source, *(() if is_model else sorted(source.glob("*.bin")))):
        if _is_of_torch(file):
            raise InvalidValue(
                f"{file} is a file of torch.save, a pickle, which is not read: load its weights in a program, with "
                "handle.load_full_state_dict(torch.load(...)), or write them with safetensors.torch.save_file and "
                "import that file"
            )
    if folders.is_step(source) or (folders.steps(source) and not is_model):
        what = "a zeroshard checkpoint"
    elif source.is_file() and folders.is_step(source.parent):
        what = "a part of a zeroshard checkpoint"
    else:
        return
    raise InvalidValue(
        f"{source} is {what}: load the folder with zeroshard.load, or write plain files with zeroshard export first"
    )


def _is_of_torch(file: Path) -> bool:
    """Whether `torch.save` has written a file, now or in its old format. No safetensors file begins like that: it
    would have a header of more than 4 GB."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        start = opened.read(8)
    return start.startswith((b"PK\x03\x04", b"\x80\x02\x8a\n")) and any(start[4:])


def commit_alone(directory: Path, step: int, items: Sequence[Item], values: dict[str, Any], *, force: bool) -> Path:
    """Commit a step with one file of whole tensors.

    Raises:
        FileExistsError: there is such a step, and `force` is False.
        OSError: the folder cannot be made.
        CheckpointError: it failed, and no files are left behind.
    """
    directory = directory.absolute()
    folders.expect_step(step)
    if step in folders.steps(directory) and not force:
        raise AlreadyExists(f"{directory} holds step {step} already (--force replaces it)")
    unique = folders.new_id()
    plan = FilePlan.of(items, file_metadata(step, unique, 0))
    base = Manifest(step, unique, (), {}, {**values, "extra": {}, "world_size": 1}, versions())
    with files.made(directory):
        opened = open_folder(directory, base, [sizes_of(plan, 0)])
        Job(temporary_folder(directory, base), plan, base, Meeting(None, unique), opened).run()
    return directory / folders.step_name(step)
